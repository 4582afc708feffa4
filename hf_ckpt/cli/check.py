"""`hf-ckpt check`: check that a model has the same loss and gradients with a plan as without checkpointing.

Runs one forward and backward from the same seed, without and with the plan, and compares the loss and every gradient.
If no model is given, it checks a small random one of each family, with dropout. Exit code 1 if anything differs or
nothing was recomputed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from hf_ckpt.cli.arguments import add_verb, positive, quiet_libraries
from hf_ckpt.console import make_console, print_progress
from hf_ckpt.errors import HfCkptError, reason_of
from hf_ckpt.units import counted


def add(verbs: Any) -> None:
    """Add the verb and its options to the command line."""
    example = 'example: hf-ckpt check ./my-model --spec \'{"policy": "full", "layers": "0-15"}\' --tokens 128'
    help = "compare loss and gradients of a model with and without a spec"
    check = add_verb(verbs, __name__, run, help, epilog=example)
    check.add_argument("model", nargs="?", help="hub id or folder of a model with a language-model or classifier head")
    check.add_argument("--spec", default="full", help="JSON, KEY=VALUE words or a YAML file (default: full)")
    check.add_argument("--batch", type=positive, default=2, help="sequences (default 2)")
    check.add_argument("--tokens", type=positive, default=32, help="tokens per sequence (default 32)")
    check.add_argument("--bf16", action="store_true", help="weights and computation in bfloat16")
    check.add_argument("--json", action="store_true", help="print JSON instead of the table")


def run(arguments: argparse.Namespace) -> int:
    """Verify the spec on each model and print a row each. Returns 1 if gradients differ or nothing was recomputed.

    Raises `SpecError` if the spec does not fit a model, and `HfCkptError` if a model cannot be loaded.
    """
    from rich.table import Table

    from hf_ckpt.spec.spec import Spec

    spec = Spec.parse(arguments.spec)  # before torch is imported, which takes seconds
    checks = {}
    print_progress("loading torch and transformers")
    quiet_libraries()
    from hf_ckpt.training.verify import verify

    for name, model, inputs, loss in _models_to_check(arguments, spec):
        print_progress(f"checking {name}")
        checks[name] = verify(model, inputs, spec, loss_fn=loss)
    if arguments.json:
        rows = [
            {"model": name, "spec": spec.to_dict(), "ok": bool(check), **vars(check), "plan": check.plan.to_dict()}
            for name, check in checks.items()
        ]
        print(json.dumps(rows, indent=1))
    else:
        table = Table("model", "loss", "gradients", "recomputed", "result", title=f"without and with {spec.to_json()}")
        for name, check in checks.items():
            recomputed = f"{sum(check.recomputed.values())} in {counted(len(check.plan.active()), 'block')}"
            result = "ok" if check else "[bold red]FAILED"
            table.add_row(name, check.loss, check.gradients, recomputed, result)
        details = [f"{name}:\n{check}" for name, check in checks.items() if not check]
        make_console().print(table)
        make_console().print("\n".join(details), markup=False, highlight=False)
    return 0 if all(checks.values()) else 1


def _models_to_check(arguments: argparse.Namespace, spec: Any) -> Iterator[tuple[str, Any, dict[str, Any], Any]]:
    """Yield (name, model, inputs, loss): the model of the command line, or a small random one of every family.

    A loss of None is the model's own. Compiled blocks and tiles draw their own numbers, so they get no dropout.
    """
    import torch
    import transformers

    from hf_ckpt import compat
    from hf_ckpt.models.blocks import vocabulary_head
    from hf_ckpt.models.families import refuse_long
    from hf_ckpt.models.tiny import TINY_FAMILIES, tiny_batch, tiny_model

    dtype = torch.bfloat16 if arguments.bf16 else torch.float32
    if arguments.model is None:
        dropout = 0.1 if spec.compile is None and spec.mlp == "whole" else 0.0
        for family in TINY_FAMILIES:
            model = tiny_model(family, dropout=dropout, dtype=dtype)
            if spec.head == "whole" or vocabulary_head(model) is not None:  # a head that can run in chunks
                inputs = tiny_batch(family, batch=arguments.batch, tokens=arguments.tokens)
                yield f"{family} (random)", model, inputs, None
        return
    try:
        config = transformers.AutoConfig.from_pretrained(arguments.model)
        saved = getattr(transformers, str((config.architectures or [""])[0]), transformers.AutoModelForCausalLM)
        model = saved.from_pretrained(arguments.model, dtype=dtype)
    except Exception as error:  # of all kinds: no such model, broken files, a missing package
        raise HfCkptError(f"cannot load a model from {arguments.model!r}: {reason_of(error)}.") from error
    model = model.to(compat.devices.accelerator_type() or "cpu").train()
    torch.manual_seed(0)
    refuse_long(config, arguments.tokens, arguments.model)
    # Any ids do: both sides get the same, and no gradient is compared with a number from elsewhere.
    ids = torch.randint(config.get_text_config().vocab_size, (arguments.batch, arguments.tokens)).to(model.device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids.clone()
    if spec.head != "whole":  # a head in chunks computes a loss from labels, and no logits
        inputs["labels"] = ids.clone()
        yield arguments.model, model, inputs, None
    else:  # without labels, so that models of any task get one
        yield arguments.model, model, inputs, lambda outputs: outputs[0].float().square().mean()
