"""The head of a causal language model and its loss, as a whole and in chunks of tokens, trained and frozen.

Measures bytes, time, and how far gradients are from exact ones, with transformers' own loss, forward and backward, on
random hidden states. Bytes are counted above what is there before; times are taken in turns, and ratios within a turn.
The exit code is 1 if chunks are further from exact than the whole.

    python recipes/benchmarks/head.py --vocabulary 128256 --hidden 4096 --tokens 4096 --dtype bfloat16
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import command
import report
import torch
import turns
from machine import circumstances
from torch import nn
from transformers.loss.loss_utils import ForCausalLMLoss  # documented nowhere, but what its causal models call

from hf_ckpt import compat
from hf_ckpt.cli.arguments import positive
from hf_ckpt.engines.head.logits import Logits, chunked
from hf_ckpt.errors import HfCkptError
from hf_ckpt.measure.live import LiveBytes

FULL = "full"
TUNINGS = ("trained", "frozen")


@dataclasses.dataclass(frozen=True)
class HeadSettings:
    """Sizes. Raises `HfCkptError` for values that mean nothing."""

    vocabulary: int = 32_000
    tokens: int = 2048
    hidden: tuple[int, ...] = (512, 1024, 2048)
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    chunks: tuple[int | str, ...] = ("auto",)
    device: str = dataclasses.field(default_factory=lambda: compat.accelerator_type() or "cpu")
    repeats: int = 7

    def __post_init__(self) -> None:
        for name in self.dtypes:
            if name not in ("float32", "bfloat16", "float16"):
                raise HfCkptError(f"dtype must be float32, bfloat16 or float16, but is {name!r} instead.")


@dataclasses.dataclass
class HeadRow:
    """One way to run one head."""

    hidden: int
    dtype: str
    tuning: str
    """`trained`, or `frozen` as with LoRA."""
    head: int | str
    peak_bytes: int
    """Most live bytes above hidden states, weight and labels; the gradient of the weight is among them."""
    weight_gradient_bytes: int
    """That gradient, which is there at the end in any case."""
    error: float
    """Of all gradients, against float64: norm of the difference over norm."""
    step_seconds: list[float] = dataclasses.field(default_factory=list)
    bytes_ratio: float | None = None
    """`peak_bytes` of the plain head over this one's."""
    time_ratio: float | None = None
    """Median of this one's time over the plain head's, repeat by repeat."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return {**dataclasses.asdict(self), "step_seconds_median": turns.median(self.step_seconds)}


@dataclasses.dataclass
class HeadBench:
    """What was measured, and where."""

    settings: HeadSettings
    circumstances: dict[str, Any]
    rows: list[HeadRow]

    @property
    def ok(self) -> bool:
        """Whether no chunked head is further from exact gradients than the plain one, but for float32's last digits."""
        plain = {(row.hidden, row.dtype, row.tuning): row.error for row in self.rows if row.head == FULL}
        return all(row.error <= 1.2 * plain[row.hidden, row.dtype, row.tuning] + 1e-6 for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        rows = [row.to_dict() for row in self.rows]
        settings = dataclasses.asdict(self.settings)
        return {"circumstances": self.circumstances, "settings": settings, "ok": self.ok, "rows": rows}


def bench_head(settings: HeadSettings, *, on_progress: Callable[[str], None] = lambda text: None) -> HeadBench:
    """Measure every head that `settings` name."""
    rows: list[HeadRow] = []
    for hidden in settings.hidden:
        for dtype in settings.dtypes:
            for tuning in TUNINGS:
                on_progress(f"hidden size {hidden}, {dtype}, {tuning}")
                rows += _Case(settings, hidden, getattr(torch, dtype), tuning).rows()
    return HeadBench(settings, circumstances(settings.device), rows)


def progress_steps(settings: HeadSettings) -> int:
    """How often `bench_head` reports progress."""
    return len(settings.hidden) * len(settings.dtypes) * len(TUNINGS)


class _Case:
    def __init__(self, settings: HeadSettings, hidden: int, dtype: torch.dtype, tuning: str) -> None:
        torch.manual_seed(0)
        self.settings, self.tuning, self.dtype = settings, tuning, dtype
        self.head = nn.Linear(hidden, settings.vocabulary, bias=False, dtype=dtype, device=settings.device)
        self.head.weight.requires_grad_(tuning == "trained")
        shape = (1, settings.tokens, hidden)
        self.hidden = torch.randn(shape, dtype=dtype, device=settings.device).requires_grad_()
        self.labels = torch.randint(settings.vocabulary, shape[:2], device=settings.device)

    def rows(self) -> list[HeadRow]:
        exact = self._exact()
        rows = {way: self._counted(way, exact) for way in (FULL, *self.settings.chunks)}
        for number in range(self.settings.repeats):
            order = turns.rotated(rows, number, self.settings.repeats)
            steps = {way: functools.partial(turns.seconds_of, functools.partial(self._step, way)) for way in order}
            for way, seconds in turns.fastest(steps).items():
                rows[way].step_seconds.append(seconds)
        plain = rows[FULL]
        for row in rows.values():
            row.bytes_ratio = plain.peak_bytes / row.peak_bytes
            row.time_ratio = turns.median(turns.ratios(row.step_seconds, plain.step_seconds))
        return list(rows.values())

    def _step(self, way: int | str) -> list[torch.Tensor]:
        """Forward and backward; returns the gradients."""
        self.head.weight.grad = self.hidden.grad = None
        logits = self.head(self.hidden) if way == FULL else chunked(self.head, self.head.forward, self.hidden, way)
        if (way != FULL) != isinstance(logits, Logits):
            raise HfCkptError(f"{self.settings.tokens} tokens do not make several chunks of {way}.")
        ForCausalLMLoss(logits, self.labels, self.settings.vocabulary).backward()
        return [value.grad for value in (self.hidden, self.head.weight) if value.grad is not None]

    def _counted(self, way: int | str, exact: Sequence[torch.Tensor]) -> HeadRow:
        self.head.weight.grad = self.hidden.grad = None
        with LiveBytes(self.head, {"hidden": self.hidden, "labels": self.labels}) as live:
            gradients = self._step(way)
        weight = self.head.weight
        return HeadRow(
            hidden=self.hidden.shape[-1],
            dtype=str(self.dtype).removeprefix("torch."),
            tuning=self.tuning,
            head=way,
            peak_bytes=live.peak_bytes - live.start_bytes,
            weight_gradient_bytes=weight.nbytes if weight.requires_grad else 0,
            error=_distance(gradients, exact),
        )

    def _exact(self) -> list[torch.Tensor]:
        """The gradients in float64."""
        hidden, weight = (value.detach().double().requires_grad_() for value in (self.hidden, self.head.weight))
        logits = (hidden[0, :-1] @ weight.t()).requires_grad_()
        nn.functional.cross_entropy(logits, self.labels[0, 1:]).backward()
        found = [hidden.grad, weight.grad if self.tuning == "trained" else None]
        return [value for value in found if value is not None]


def _distance(found: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> float:
    return max(float((mine.double() - right).norm() / right.norm()) for mine, right in zip(found, exact, strict=True))


# --- the command ------------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = command.make_parser(__doc__)
    parser.add_argument("--vocabulary", type=positive, help="entries (default 32000)")
    parser.add_argument("--tokens", type=positive, help="tokens a step (default 2048)")
    parser.add_argument("--hidden", type=positive, action="append", help="repeatable (default 512, 1024, 2048)")
    parser.add_argument("--dtype", action="append", help="repeatable (default float32 and bfloat16)")
    parser.add_argument("--chunk", type=_chunk, action="append", help="tokens a chunk; repeatable (default auto)")
    command.add_device(parser)
    parser.add_argument("--repeats", type=positive, help="timed steps of each (default 7)")
    return parser


def _chunk(text: str) -> int | str:
    return text if text == "auto" else positive(text)


def _run(arguments: argparse.Namespace) -> int:
    asked = {
        "vocabulary": arguments.vocabulary,
        "tokens": arguments.tokens,
        "hidden": arguments.hidden and tuple(arguments.hidden),
        "dtypes": arguments.dtype and tuple(arguments.dtype),
        "chunks": arguments.chunk and tuple(arguments.chunk),
        "device": arguments.device,
        "repeats": arguments.repeats,
    }
    settings = HeadSettings(**{name: value for name, value in asked.items() if value is not None})
    return command.carry_out(bench_head, settings, progress_steps(settings), report.print_head, arguments)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script with these words, or with those of the command line."""
    return command.call(_run, _parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
