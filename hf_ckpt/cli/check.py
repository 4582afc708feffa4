"""`hf-ckpt check`: check that a model has the same loss and gradients with a plan as without checkpointing."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hf_ckpt.cli.arguments import importing, positive, progress, within_memory
from hf_ckpt.console import make_console

if TYPE_CHECKING:
    from rich.console import Console


def add(verbs: Any) -> None:
    """Add the verb and its options to the command line."""
    check = verbs.add_parser(
        "check",
        help="prove on a model that a plan gives the same loss and gradients",
        description="One forward and backward from the same seed, without and with the plan. Without a model: a small "
        "random one of every family, with dropout. Exit code 1 if anything differs or nothing was recomputed.",
        epilog='example: hf-ckpt check ./my-model --spec \'{"policy": "full", "layers": "0-15"}\' --tokens 128',
    )
    check.add_argument("model", nargs="?", help="hub id or folder of a model with a language-model or classifier head")
    check.add_argument("--spec", default="full", help="JSON, words like policy=full, or a YAML file (default: full)")
    check.add_argument("--batch", type=positive, default=2, help="sequences (default 2)")
    check.add_argument("--tokens", type=positive, default=32, help="tokens a sequence (default 32)")
    check.add_argument("--compile", action="store_true", help="with each block compiled, as by compile=blocks")
    check.add_argument("--bf16", action="store_true", help="weights and computation in bfloat16")
    check.add_argument("--json", action="store_true", help="print JSON instead of the table")
    check.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Verify the spec on each model and print a row each. Returns 1 if gradients differ or nothing was recomputed."""
    from hf_ckpt.spec.spec import Spec

    spec = Spec.parse(arguments.spec)  # before torch is imported, which takes seconds
    if arguments.compile:
        spec = Spec.parse({**spec.to_dict(), "compile": "blocks"})
    with progress("loading torch and transformers") as tell:
        with importing():
            import torch

            from hf_ckpt.cli.check_models import check_families, check_model

        options = {
            "batch": arguments.batch,
            "tokens": arguments.tokens,
            "dtype": torch.bfloat16 if arguments.bf16 else torch.float32,
            "on_progress": tell,
        }
        with within_memory(f"{arguments.batch} x {arguments.tokens} tokens"):
            if arguments.model is None:
                rows = check_families(spec, **options)
            else:
                rows = [check_model(arguments.model, spec, **options)]
    if arguments.json:
        found = [{"model": name, "spec": spec.to_dict(), **check.to_dict()} for name, check in rows]
        print(json.dumps(found, indent=1))
    else:
        print_checks([(name, spec.to_json(), check) for name, check in rows])
    return 0 if all(check for _, check in rows) else 1


def print_checks(rows: Sequence[tuple[str, str, Any]], console: Console | None = None) -> None:
    """Print a table with a row for each (model, spec, `Verification`), and the details of failed ones."""
    from rich.table import Table

    table = Table(title="same seed, without and with the plan", title_justify="left")
    for column in ("model", "spec", "loss", "gradients", "recomputed", "result"):
        table.add_column(column, justify="right" if column in ("gradients", "recomputed") else "left", overflow="fold")
    for model, spec, check in rows:
        equal = f"{check.parameters - check.different}/{check.parameters} bit-equal"
        loss = "equal" if not check.loss_difference else f"off by {check.loss_difference:.2g}"
        recomputed = f"{sum(check.recomputed.values())} of {len(check.plan.active())}"
        recomputed = f"{len(check.compiled)} compiled" if check.compiled else recomputed
        table.add_row(model, spec, loss, equal, recomputed, "ok" if check else "[bold red]FAILED")
    console = console or make_console()
    console.print(table)
    for model, spec, check in rows:
        if not check or check.compiled:
            console.print(f"{model}, {spec}:\n{check}", markup=False, highlight=False)
