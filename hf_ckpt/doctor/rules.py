"""The rules of `hf-ckpt doctor`: a row for each silent fault, in the table `RULES`.

A silent fault is one that neither the program nor hf_ckpt reports when the training starts.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from hf_ckpt.doctor.trainings import SPEC_KEYS, Training
from hf_ckpt.errors import SpecError, shown
from hf_ckpt.spec.files import read_values
from hf_ckpt.spec.spec import Spec


class Finding(NamedTuple):
    """A fault: the code of its rule, its place (a key), what will go wrong, and what to do."""

    severity: str
    code: str
    where: str
    what: str
    fix: str


Texts = Iterator[tuple[str, str, str]]
"""Place, what will go wrong, and what to do, for each fault."""


def diagnose(training: Training) -> list[Finding]:
    """Return the findings of all rules, errors first."""
    findings = [Finding(severity, code, *texts) for severity, code, rule in RULES for texts in rule(training)]
    return sorted(findings, key=lambda finding: ("error", "warning", "note").index(finding.severity))


def _spec(training: Training) -> Texts:
    kwargs = training.kwargs
    try:
        Spec.parse(kwargs if isinstance(kwargs, dict) or kwargs is None else {shown(kwargs, 60): None})
    except SpecError as error:
        for problem in error.problems:
            yield f"{training.flag}_kwargs", problem, "Correct it: hf_ckpt enables nothing until it is right."


def _spec_outside(training: Training) -> Texts:
    for key in sorted(SPEC_KEYS & training.values.keys()):
        what = f"it stands beside the checkpointing kwargs, where {training.program.name} does not read it."
        yield key, what, f"Indent it under {training.flag}_kwargs."


def _unknown_keys(training: Training) -> Texts:
    known = [*training.values.keys() - training.unknown, *training.program.keys]
    near = {key: difflib.get_close_matches(key, known, n=1, cutoff=0.85) for key in training.unknown}
    named = ", ".join(f"{key} (did you mean {near[key][0]}?)" if near[key] else key for key in near)
    if named:
        yield named, "hf_ckpt does not know it: a plan leaves it out of account.", "Correct what is misspelt."


def _flag_off(training: Training) -> Texts:
    if training.kwargs and not training.values.get(training.flag):
        fix = f"Set {training.flag} to true, or remove the kwargs."
        yield f"{training.flag}_kwargs", f"they do nothing, because {training.flag} is not on.", fix


def _own_offloading(training: Training) -> Texts:
    for key in ("activation_offloading", "use_unsloth_gc", training.flag):
        if training.values.get(key) and (key != training.flag or isinstance(training.values[key], str)):
            what = "the program itself moves activations to host memory; a plan counts them as kept on the device."
            yield key, what, "Turn it off, and let hf_ckpt move them: `policy: offload`, or `host_budget`."


def _adapter_layers(training: Training) -> Texts:
    keys = [key for key, name in training.program.keys.items() if name == "lora_targets"]
    if training.adapters and not any(training.values.get(key) for key in (*keys, "lora_target_linear")):
        what = "no layers are named, and PEFT takes its own for the model: often query and value projections only."
        yield keys[0], what, "Name the layers, or `all-linear`."


def _deepspeed_block(training: Training) -> Texts:
    launched = (training.launch.get("deepspeed_config") or {}).get("deepspeed_config_file")
    config = training.values.get("deepspeed") or launched
    with contextlib.suppress(ValueError):  # a path that is another one where the training starts
        config = read_values(config, unique=False) if isinstance(config, str) else config
    if isinstance(config, dict) and "activation_checkpointing" in config:
        what = "DeepSpeed's own activation_checkpointing does nothing for Hugging Face models: none of them calls it."
        yield "deepspeed", what, f"Remove it, and set {training.flag}."


def _redrawn_dropout(training: Training) -> Texts:
    rates = {"lora_dropout": training.values.get("lora_dropout")} if training.adapters else {}
    for key, value in training.model.items():
        outside = key.startswith(("classif", "summary", "embd", "cls_", "pooler"))
        if not outside and any(word in key for word in ("dropout", "pdrop", "drop_path")):
            rates[f"the model's {key}"] = value
    active = [f"{key} is {rate}" for key, rate in rates.items() if isinstance(rate, float) and rate > 0]
    version, options = training.fsdp or ("", {})
    if not active:
        return
    what = f"random state is not kept, but {active[0]}: recomputed blocks draw other masks, and gradients are wrong."
    if version == "2" and str(options.get("activation_checkpointing")).lower() == "true":  # FSDP1 keeps random state
        yield "fsdp_activation_checkpointing", what, f"Set it to false and {training.flag} to true."
    kwargs = training.kwargs if training.values.get(training.flag) and isinstance(training.kwargs, dict) else {}
    if kwargs.get("preserve_rng_state") is False and kwargs.get("policy") not in ("none", "selective"):
        yield "preserve_rng_state", what, "Remove it, or set every dropout to 0."  # `selective` keeps the masks


RULES: tuple[tuple[str, str, Callable[[Training], Texts]], ...] = (
    ("error", "spec", _spec),
    ("error", "spec-outside", _spec_outside),
    ("note", "unknown-keys", _unknown_keys),
    ("warning", "flag-off", _flag_off),
    ("warning", "own-offloading", _own_offloading),
    ("note", "adapter-layers", _adapter_layers),
    ("warning", "deepspeed-block", _deepspeed_block),
    ("error", "redrawn-dropout", _redrawn_dropout),
)
"""Severity, code and function of every rule, in the order in which findings of one severity are reported."""
