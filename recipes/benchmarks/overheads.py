"""What two small things cost: masks as bits in a step under `selective`, and changing plans between batches.

What packs and unpacks masks is timed inside of a step; beside that, steps with masks as bits and as they are alternate,
of which the fastest of a turn counts. For plans, the hook that finds one is called with batches of two lengths, in
turn, and with one of them only. The exit code is 1 if packing and unpacking take more than 3 % of a step, or a change
of plans more than 50 us.

    python recipes/benchmarks/overheads.py --json overheads-cpu.json
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import command
import held
import report
import torch
import turns
from machine import circumstances, keep_freed_memory
from torch import nn

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.attach.attach import BatchHook
from hf_ckpt.attach.record import installation
from hf_ckpt.cli.arguments import positive
from hf_ckpt.engines.rebuild import masks
from hf_ckpt.errors import HfCkptError
from hf_ckpt.measure.clocks import stopwatch
from hf_ckpt.models.blocks import base_model
from hf_ckpt.models.tiny import tiny_batch, tiny_model

MOST_SHARE, MOST_MICROSECONDS = 0.03, 50.0
WAYS = (("GPT-2", "full"), ("RoBERTa", "full"), ("mT5", "full"), ("Mistral", "LoRA"))
"""Models with dropout, and how they are trained."""
LENGTHS = (16, 256)
"""Tokens of the two batches, of which only the longer one needs anything recomputed."""


@dataclasses.dataclass(frozen=True)
class OverheadsSettings:
    """Sizes."""

    turns: int = 7
    steps: int = 3
    """Of each way in a turn, of which the fastest counts."""
    blocks: int = 16
    """Of the model that changes plans."""
    calls: int = 400
    """Calls of the hook in a turn."""
    dtype: str = "float32"


@dataclasses.dataclass
class MasksRow:
    """A model under `selective`, with masks as bits and without."""

    model: str
    tuning: str
    masks: int
    """Masks that a step packs."""
    step_seconds: list[float]
    """As bits, turn by turn."""
    without_seconds: list[float]
    share: float
    """Of a step, what packing and unpacking takes: the median of the turns."""
    ratio: float
    """Median of the turns' ratios of whole steps."""
    spread: tuple[float, float]


@dataclasses.dataclass
class OverheadsBench:
    """What was measured, and where."""

    settings: OverheadsSettings
    circumstances: dict[str, Any]
    rows: list[MasksRow]
    same_microseconds: float
    """To find that the present plan serves a batch."""
    change_microseconds: float
    """To put another plan on that is held already, on top of that."""
    changed: int
    """Blocks that the two plans differ in."""

    @property
    def ok(self) -> bool:
        """Whether both cost as little as they may."""
        return self.change_microseconds <= MOST_MICROSECONDS and all(row.share <= MOST_SHARE for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return {**dataclasses.asdict(self), "ok": self.ok}


def bench_overheads(
    settings: OverheadsSettings, *, on_progress: Callable[[str], None] = lambda text: None
) -> OverheadsBench:
    """Measure both. Raises `HfCkptError` where no masks are packed, or both batches have the same plan."""
    keep_freed_memory()
    rows = []
    for name, tuning in WAYS:
        on_progress(f"masks of {name}, {tuning}")
        rows.append(_masks(name, tuning, settings))
    on_progress("changing plans")
    return OverheadsBench(settings, circumstances("cpu"), rows, *_changes(settings))


def _masks(name: str, tuning: str, settings: OverheadsSettings) -> MasksRow:
    sizes = held.HeldSettings(dtype=settings.dtype, models=(name,))
    model = held.model_of(held.MODELS[name], tuning, sizes)
    hf_ckpt.install(model, {"policy": "selective"})
    getattr(base_model(model), compat.ENABLE_NAMES[-1])()
    step = functools.partial(_step, model, held.batch_of(sizes))
    step()
    shares = []
    for _ in range(settings.turns):
        with _timed() as (calls, seconds):
            whole = turns.seconds_of(step)
        shares.append(sum(seconds) / whole)
    if not calls["pack"]:
        raise HfCkptError(f"no masks of {name} are packed.")
    ways = {"bits": functools.partial(turns.seconds_of, step), "without": functools.partial(_without_bits, step)}
    found = [turns.fastest(ways, settings.steps) for _ in range(settings.turns)]
    bits, without = ([turn[way] for turn in found] for way in ways)
    ratios = turns.ratios(bits, without)
    share, ratio = statistics.median(shares), statistics.median(ratios)
    return MasksRow(name, tuning, calls["pack"], bits, without, share, ratio, (min(ratios), max(ratios)))


def _step(model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    model.zero_grad(set_to_none=True)
    options = {"use_cache": False} if compat.wants_use_cache(base_model(model)) else {}
    model(**batch, **options).loss.backward()


def _without_bits(step: Callable[[], None]) -> float:
    with mock.patch.object(masks, "can_pack", return_value=False):
        return turns.seconds_of(step)


@contextlib.contextmanager
def _timed() -> Iterator[tuple[collections.Counter[str], list[float]]]:
    """As a context: how often masks were packed, looked through and unpacked in it, and the seconds of each call."""
    calls, seconds = collections.Counter[str](), list[float]()

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            with stopwatch() as taken:
                found = function(*args, **kwargs)
            seconds.append(taken[0])
            return found

        return run

    with contextlib.ExitStack() as patches:
        for name in ("pack", "scale_of", "unpack"):
            patches.enter_context(mock.patch.object(masks, name, timed(name, getattr(masks, name))))
        yield calls, seconds


def _changes(settings: OverheadsSettings) -> tuple[float, float, int]:
    """Microseconds of the hook where the plan stays, of a change on top of that, and blocks that change."""
    model = tiny_model("llama", layers=settings.blocks)
    batches = [tiny_batch("llama", batch=2, tokens=tokens) for tokens in LENGTHS]
    peaks = [hf_ckpt.predict(model, batch, budget="100%", frontier=True).frontier for batch in batches]
    low, high = peaks[1][0].peak_bytes, peaks[1][-1].peak_bytes
    hf_ckpt.install(model, {"policy": "budget", "budget": f"{(low + high) // 2}B"})
    model.gradient_checkpointing_enable()
    plans = []
    for batch in (*batches, *batches, *batches):  # the first steps of each plan are measured
        _step(model, batch)
        record = installation(base_model(model))
        assert record is not None
        plans.append(record.plan)
    changed = sum(one != other for (_, one), (_, other) in zip(plans[-2].actions, plans[-1].actions, strict=True))
    if not changed:
        raise HfCkptError(f"batches of {LENGTHS} tokens have the same plan.")
    hook = next(hook for hook in base_model(model)._forward_pre_hooks.values() if isinstance(hook, BatchHook))
    given = [{**batch, "use_cache": False} for batch in batches]

    def call(order: Sequence[int]) -> None:
        for number in order:
            hook(base_model(model), (), given[number])

    each, same = [0, 1] * (settings.calls // 2), [1] * settings.calls
    ways = {
        "change": functools.partial(turns.seconds_of, functools.partial(call, each)),
        "same": functools.partial(turns.seconds_of, functools.partial(call, same)),
    }
    fastest = turns.fastest(ways, settings.turns * settings.steps)
    stays, changes = (1e6 * fastest[way] / settings.calls for way in ("same", "change"))
    return stays, changes - stays, changed


# --- the command ------------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = command.make_parser(__doc__)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the models with dropout (default float32)")
    parser.add_argument("--turns", type=positive, help="of each way (default 7)")
    parser.add_argument("--steps", type=positive, help="of each way in a turn (default 3)")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    asked = {name: getattr(arguments, name) for name in ("dtype", "turns", "steps")}
    settings = OverheadsSettings(**{name: value for name, value in asked.items() if value is not None})
    return command.carry_out(bench_overheads, settings, len(WAYS) + 1, report.print_overheads, arguments)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script with these words, or with those of the command line."""
    return command.call(_run, _parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
