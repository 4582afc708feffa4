"""Checks of what is asked for: the checkpointing flag and its kwargs in the training arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hf_ckpt.doctor.facts import (
    FLAGS,
    KWARGS,
    OUR_KEYS,
    TRAINING,
    Facts,
    is_before,
    is_file,
    key_of,
    shown,
    without_true_reentrant,
)
from hf_ckpt.doctor.findings import Finding
from hf_ckpt.errors import SpecError
from hf_ckpt.spec.spec import Spec
from hf_ckpt.versions import NEW_NAME_SINCE, NON_REENTRANT_SINCE


def two_owners(facts: Facts) -> Iterator[Finding]:
    """Find FSDP's own activation checkpointing on beside that of the training arguments."""
    flag, switch = facts.checkpointing, facts.fsdp.switch if facts.fsdp else None
    if flag is not None and switch is not None:
        yield Finding(
            "error",
            "two-owners",
            switch.where,
            f"FSDP's own activation checkpointing is on, and so is {flag.where}. Two owners would recompute blocks "
            "twice; Trainer and hf_ckpt both refuse to start.",
            f"Set {key_of(switch)} to false; checkpointing stays with {key_of(flag)}.",
        )


def reentrant(facts: Facts) -> Iterator[Finding]:
    """Find reentrant checkpointing, asked for or by default."""
    flag, given = facts.checkpointing, facts.given_kwargs
    if flag is None:
        return
    where = flag.where if given is None else given.where
    fix = f'Set {key_of(given) if given else KWARGS[1]} to {{"use_reentrant": false}}, or name a policy of hf_ckpt.'
    to_torch = facts.kwargs.keys() - {"every_n_layers", "offload"}  # Trainer takes these two out
    if facts.kwargs.get("use_reentrant") is True:
        yield Finding(
            "error",
            "reentrant",
            f"{where}.use_reentrant",
            "Reentrant checkpointing leaves adapters untrained whose input needs no gradient, and marks parameters "
            "ready twice under DDP. hf_ckpt refuses it.",
            "Set use_reentrant to false.",
        )
    elif facts.ours or "use_reentrant" in facts.kwargs:
        return
    elif to_torch:
        yield Finding(
            "warning",
            "reentrant-default",
            where,
            f"Without hf_ckpt, transformers hands these keys ({', '.join(sorted(to_torch))}) to torch, and torch takes "
            "reentrant checkpointing where use_reentrant is not among them.",
            fix,
        )
    elif is_before(facts.versions.get("transformers"), NON_REENTRANT_SINCE):
        yield Finding(
            "warning",
            "reentrant-default",
            where,
            f"Without hf_ckpt, transformers {facts.versions['transformers']} checkpoints reentrantly where nothing is "
            f"said; {NON_REENTRANT_SINCE} does not.",
            fix,
        )


def spec_problems(facts: Facts) -> Iterator[Finding]:
    """Find everything in the checkpointing kwargs that `Spec.parse` refuses, and a plan file that is not there."""
    given = facts.given_kwargs
    if given is None:
        return
    try:
        Spec.parse(without_true_reentrant(given.value) if isinstance(given.value, Mapping) else {})
        problems: Sequence[str] = ()
    except SpecError as error:
        problems = error.problems
    if not isinstance(given.value, Mapping):
        problems = [f"must be a mapping of keys, but is {shown(given.value)} instead."]
    for problem in problems:
        yield Finding(
            "error", "spec", given.where, problem, "Correct it: hf_ckpt refuses to enable anything until it is right."
        )
    plan = facts.spec.plan if facts.spec is not None else None
    if plan is not None and not is_file(Path(plan)):
        yield Finding(
            "warning",
            "plan-file",
            f"{given.where}.plan",
            f"There is no file {plan!r}, seen from here.",
            "Give a path that exists where training starts; `hf-ckpt plan ... --out FILE` writes one.",
        )


def needs_hf_ckpt(facts: Facts) -> Iterator[Finding]:
    """Find keys of hf_ckpt's own. Transformers would hand them to torch, which refuses them."""
    given = facts.given_kwargs
    if facts.checkpointing is not None and given is not None and facts.ours:
        keys = ", ".join(sorted(OUR_KEYS & facts.kwargs.keys()))
        yield Finding(
            "note",
            "needs-hf-ckpt",
            given.where,
            f"Only hf_ckpt understands {keys}; without it training stops with `Unexpected keyword arguments`.",
            "Call hf_ckpt.install(model) in the script, or launch it with `-m hf_ckpt` in front of its name.",
        )


def kwargs_without_flag(facts: Facts) -> Iterator[Finding]:
    """Find checkpointing kwargs that nothing reads, because no flag switches checkpointing on."""
    given = facts.given_kwargs
    if given is not None and given.value not in ({}, "") and facts.checkpointing is None:
        flag = key_of(given).removesuffix("_kwargs")
        yield Finding(
            "warning",
            "kwargs-without-flag",
            given.where,
            f"These kwargs do nothing, because {flag} is not on.",
            f"Set {flag} to true, or remove the kwargs.",
        )


def flag_names(facts: Facts) -> Iterator[Finding]:
    """Find a flag under both of its names, or under one that the installed transformers does not know."""
    for file in facts.of(TRAINING):
        for new, old in (FLAGS, KWARGS):
            given, former = file.setting(new), file.setting(old)
            if given is not None and former is not None and given.value != former.value:
                yield Finding(
                    "warning",
                    "two-names",
                    former.where,
                    f"{old} is the old name of {new}, which is set to something else and wins.",
                    f"Remove {old}.",
                )
            elif given is not None and is_before(facts.versions.get("transformers"), NEW_NAME_SINCE):
                yield Finding(
                    "warning",
                    "new-name",
                    given.where,
                    f"TrainingArguments of transformers {facts.versions['transformers']} does not know {new} (the "
                    "recipes of hf_ckpt translate it).",
                    f"Write {old}, which works everywhere, or install transformers {NEW_NAME_SINCE} or later.",
                )


def random_state_off(facts: Facts) -> Iterator[Finding]:
    """Find `preserve_rng_state: false` with an active dropout, which gives wrong gradients.

    `selective` by rebuilding needs no random state, because the masks of dropout are kept.
    """
    spec, given, dropout = facts.spec, facts.given_kwargs, facts.dropout
    if spec is None or given is None or spec.preserve_rng_state is not False or dropout is None:
        return
    if facts.policies - {"none", "selective"} or (spec.engine == "sac" and "selective" in facts.policies):
        yield Finding(
            "error",
            "random-state",
            f"{given.where}.preserve_rng_state",
            f"Random state is not kept, but {dropout.where} is {dropout.value}: recomputed blocks draw other masks, "
            "and gradients are wrong without any message.",
            "Remove preserve_rng_state, or set every dropout to 0.",
        )
