"""Checks of training on several devices: FSDP, DeepSpeed, and parameters that are split over ranks."""

from __future__ import annotations

from collections.abc import Iterator

from hf_ckpt.doctor.facts import DEEPSPEED, Facts, is_at_most, key_of
from hf_ckpt.doctor.findings import Finding
from hf_ckpt.versions import LAST_DEEPSPEED_WITH_EMPTY_SHAPES


def fsdp2_dropout(facts: Facts) -> Iterator[Finding]:
    """Find accelerate's FSDP2 checkpointing with an active dropout, which gives wrong gradients.

    FSDP1's wrapper keeps random state, so that it is not concerned.
    """
    fsdp, dropout = facts.fsdp, facts.dropout
    if fsdp is None or fsdp.switch is None or fsdp.version == "1":
        return
    if dropout is None and facts.model is not None:
        return
    active = f"{dropout.where} is {dropout.value}" if dropout is not None else "a dropout may be active"
    yield Finding(
        "error" if dropout is not None and fsdp.version is not None else "warning",
        "fsdp2-dropout",
        fsdp.switch.where,
        f"accelerate's FSDP2 checkpointing does not keep random state, and {active}: recomputed blocks draw other "
        "masks, the loss looks right and the gradients belong to another sample.",
        f"Set {key_of(fsdp.switch)} to false and gradient_checkpointing to true, or set every dropout to 0"
        + ("." if dropout is not None else "; --model says whether it is."),
    )


def zero3_frozen(facts: Facts) -> Iterator[Finding]:
    """Find frozen weights under ZeRO-3 with a DeepSpeed that cannot recompute them."""
    flag, zero3, adapters = facts.checkpointing, facts.zero3, facts.adapters
    version = facts.versions.get("deepspeed")
    if flag is None or zero3 is None or adapters is None:
        return
    if version is None or is_at_most(version, LAST_DEEPSPEED_WITH_EMPTY_SHAPES):
        unknown = "its version is unknown here"
        yield Finding(
            "error" if version else "warning",
            "zero3-frozen",
            zero3.where,
            f"ZeRO-3 with frozen weights ({adapters.where}) and checkpointing stops with a CheckpointError (recomputed "
            f"shape [0]) on DeepSpeed up to {LAST_DEEPSPEED_WITH_EMPTY_SHAPES}; "
            + (f"{version} is installed." if version else f"{unknown}, because it is not installed."),
            "Install a later DeepSpeed, use ZeRO-2, or train without checkpointing.",
        )


def deepspeed_block(facts: Facts) -> Iterator[Finding]:
    """Find DeepSpeed's own `activation_checkpointing`, which Hugging Face models ignore."""
    for file in facts.of(DEEPSPEED):
        block = file.setting("activation_checkpointing")
        if block is not None:
            yield Finding(
                "warning",
                "deepspeed-block",
                block.where,
                "DeepSpeed's own activation_checkpointing does nothing for Hugging Face models: none of them calls it.",
                "Remove it"
                + ("." if facts.checkpointing else ", and set gradient_checkpointing in the training arguments."),
            )


def sharded(facts: Facts) -> Iterator[Finding]:
    """Find what needs whole parameters where they are split over ranks."""
    spec, given, where = facts.spec, facts.given_kwargs, facts.sharded
    if spec is None or given is None or where is None:
        return
    split = f"parameters are split over ranks ({where.where})"
    version = facts.fsdp.version if facts.fsdp is not None and facts.zero3 is None else "1"
    if facts.policies & {"budget", "auto"} and version != "2":
        yield Finding(
            "error" if version else "warning",
            "planned-sharded",
            f"{given.where}.policy",
            f"`{spec.policy}` cannot plan where {split} by FSDP1 or ZeRO-3; the first training step stops.",
            "Use FSDP2 (`fsdp_version: 2`), `selective` or `full`, or a plan that `hf-ckpt plan ... --out FILE` wrote.",
        )
    if spec.segments is not None:
        yield Finding(
            "error",
            "segments-sharded",
            f"{given.where}.segments",
            f"Segments recompute several blocks at once, but {split}: those of the others are away then, and the first "
            "training step stops.",
            "Use `policy: full` without segments.",
        )
    if spec.head != "full":
        yield Finding(
            "warning",
            "head-sharded",
            f"{given.where}.head",
            f"The head is run as a whole where {split}: its logits are not saved.",
            "Remove `head`, and take a smaller batch if the logits are the peak.",
        )
