"""`hf-ckpt doctor`: find mistakes with checkpointing in configs and versions."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hf_ckpt.cli.arguments import positive, refused_in_words
from hf_ckpt.console import make_console
from hf_ckpt.forecast.devices import DEVICES
from hf_ckpt.prediction.question import FIELDS, about

if TYPE_CHECKING:
    from rich.console import Console

    from hf_ckpt.doctor.facts import Facts
    from hf_ckpt.doctor.rules import Finding


def add(verbs: Any) -> None:
    """Add the verb and its options to the command line."""
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
    device = refused_in_words(about(FIELDS["device"]).read)
    doctor.add_argument("--device", type=device, metavar="NAME", help=", ".join(DEVICES))
    doctor.add_argument("--batch", type=positive, help="sequences a micro-step (default: as in the files)")
    doctor.add_argument("--seq", type=positive, help="tokens a sequence (default: as in the files)")
    doctor.add_argument("--strict", action="store_true", help="exit code 1 for a warning, too")
    doctor.add_argument("--json", action="store_true", help="print JSON instead of the table")
    doctor.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Read the files and print the findings. Returns 1 for an error, or with `--strict` for a warning."""
    from hf_ckpt.doctor.facts import gather
    from hf_ckpt.doctor.rules import diagnose, to_dict

    given = {name: getattr(arguments, name) for name in ("model", "device", "batch")}
    facts = gather(arguments.files, **given, tokens=arguments.seq)
    findings = diagnose(facts)
    fit = _fit(facts)
    if arguments.json:
        print(json.dumps({**to_dict(facts, findings), "fit": fit}, indent=1))
    else:
        print_findings(findings, facts.versions)
        if fit is not None:
            told = f"{fit['told']} What to write:" if "told" in fit else "whether it fits a card:"
            make_console().print(f"{told} {fit['ask']}", highlight=False, markup=False, soft_wrap=True)
    failing = {"error", "warning"} if arguments.strict else {"error"}
    return 1 if failing & {finding.severity for finding in findings} else 0


def _fit(facts: Facts) -> dict[str, Any] | None:
    """Return whether the training of the files fits the device; None without a training file.

    `ask` is the command that prints what to write. If model, device and length are known, `told` is the answer in
    words, and `fits` says whether it fits; None if no plan could be made.
    """
    from hf_ckpt.doctor.facts import TRAINING
    from hf_ckpt.doctor.trainings import workload_fields

    if not facts.of(TRAINING):
        return None
    fields = workload_fields(facts)
    model = facts.model.name if facts.model else fields.get("model")
    asked = f"hf-ckpt plan {model or 'MODEL'} --config {facts.of(TRAINING)[0].path}"
    asked += f" --device {facts.device.name}" if facts.device else " --device NAME"
    if facts.model is None or facts.device is None or "tokens" not in fields:
        return {"ask": asked}
    from hf_ckpt.cli.arguments import quiet_libraries
    from hf_ckpt.errors import HfCkptError, InfeasibleError
    from hf_ckpt.forecast.answers import misfit_of
    from hf_ckpt.forecast.forecast import forecast
    from hf_ckpt.prediction.question import question

    quiet_libraries()
    fits: bool | None = True
    try:
        training = question({"batch": 8, **fields, "model": facts.model.name, "device": facts.device.name})
        told = forecast(training).answer
    except InfeasibleError as error:
        fits, told = False, misfit_of(error, training, facts.device).headline
    except HfCkptError as error:
        fits, told = None, f"whether it fits is not known: {error}"
    return {"ask": asked, "told": told, "fits": fits}


def print_findings(findings: Sequence[Finding], versions: Mapping[str, str], console: Console | None = None) -> None:
    """Print the versions, and a table of the findings."""
    from rich.table import Table
    from rich.text import Text

    console = console or make_console()
    installed = ", ".join(f"{name} {version}" for name, version in versions.items())
    console.print(f"installed: {installed or 'nothing that hf_ckpt works with'}", highlight=False, markup=False)
    if not findings:
        console.print("nothing found that would go wrong", highlight=False)
        return
    styles = {"error": "bold red", "warning": "yellow"}
    table = Table(title_justify="left", show_lines=True)
    for name in ("", "where", "what, and what to do"):
        table.add_column(name, overflow="fold")
    for finding in findings:
        severity = Text(finding.severity, styles.get(finding.severity, ""))
        # As `Text`, because rich would read brackets in keys and values as markup.
        table.add_row(severity, Text(finding.where), Text(f"{finding.what}\n-> {finding.fix}"))
    console.print(table)
