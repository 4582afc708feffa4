"""The rules of `hf-ckpt doctor`: a row for each silent fault, in the table `RULES`.

A silent fault is one that neither the owner of the file nor hf_ckpt reports when the training starts. Faults that end
the start with an error are reported, too, where they concern activations.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from hf_ckpt.doctor.trainings import SPEC_KEYS, Training, split_by
from hf_ckpt.errors import SpecError, shown
from hf_ckpt.models.families import depth_keys, family_of
from hf_ckpt.planner.policies import make_plan
from hf_ckpt.spec.plan import Block
from hf_ckpt.spec.spec import Spec

_OF_TORCH = {"use_reentrant", "preserve_rng_state", "determinism_check", "every_n_layers"}
"""Kwargs that transformers and `torch.utils.checkpoint` know without hf_ckpt."""


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
        spec = Spec.parse(kwargs if isinstance(kwargs, dict) or kwargs is None else {shown(kwargs, 60): None})
        blocks = _blocks(training, spec)
        if blocks and spec.plan is None:
            make_plan(spec, blocks, "", "")
    except SpecError as error:
        for problem in error.problems:
            yield training.kwargs_key, problem, "Correct it: hf_ckpt enables nothing until it is right."


def _blocks(training: Training, spec: Spec) -> list[Block]:
    """Return the blocks that the model's config counts, stack by stack; none if it does not say what there is."""
    config = types.SimpleNamespace(**training.model)
    family = family_of(config)
    if family is None and (isinstance(spec.layers, tuple) or any(rule.stack for rule in spec.rules)):
        return []  # the names of its stacks are not known
    blocks = []
    for stack, _ in family.stacks if family else (("layers", ""),):
        for key in depth_keys(config, stack)[:1]:
            blocks += [Block("", stack, index, "") for index in range(getattr(config, key))]
    return blocks


def _spec_outside(training: Training) -> Texts:
    for key in sorted(SPEC_KEYS & training.values.keys()):
        what = f"it stands beside the checkpointing kwargs, where {training.owner.name} does not read it."
        yield key, what, f"Indent it under {training.kwargs_key}." if training.reads_spec else training.owner.advice


def _unread(training: Training) -> Texts:
    kwargs = training.kwargs
    if isinstance(kwargs, dict) and kwargs.keys() - _OF_TORCH and not training.reads_spec:
        what = f"{training.owner.name} does not give them to hf_ckpt: no policy would be used."
        yield training.kwargs_key, what, training.owner.advice


def _misspelt(training: Training) -> Texts:
    known = [*training.values.keys() - training.unknown, *training.owner.keys]
    for key in training.unknown:
        section = key.rpartition(".")[0]
        beside = [name for name in known if name.rpartition(".")[0] == section]
        elsewhere = [name for name in known if name.endswith(f".{key}")]
        for name in (elsewhere or difflib.get_close_matches(key, beside, cutoff=0.85))[:1]:
            what = f"hf_ckpt does not know it (did you mean {name}?): a plan leaves it out of account."
            yield key, what, f"Write {name}, if that is meant."


def _flag_off(training: Training) -> Texts:
    flags = [(training.flag, training.kwargs_key, training.kwargs)]
    scopes = {key: f"{key}_scope" for key in training.owner.checkpointing.split()}
    flags += [(key, scope, training.values.get(scope)) for key, scope in scopes.items()]
    for flag, key, value in flags:
        if value and not _is_on(training.values.get(flag)):
            yield key, f"it does nothing, because {flag} is not on.", f"Set {flag} to true, or remove {key}."


def _is_on(value: Any) -> bool:
    """Whether a flag is on; NeMo Automodel's may be words."""
    return bool(value) and str(value).lower() not in ("false", "off", "none", "disabled", "no")


def _own_checkpointing(training: Training) -> Texts:
    keys = [key for key in training.owner.checkpointing.split() if _is_on(training.values.get(key))]
    if isinstance(training.values.get(training.flag), str) and training.flag not in training.unknown:
        keys.append(training.flag)  # such as `offload`
    if training.fsdp and _is_on(training.fsdp[1].get("activation_checkpointing")):
        keys.append("fsdp_activation_checkpointing")
    for key in keys:
        what = "activations are then saved, recomputed or moved without hf_ckpt; a plan does not count that."
        yield key, what, "Turn it off, and let hf_ckpt do it: `policy: full`, `policy: offload`, or `host_budget`."


def _fsdp_offload(training: Training) -> Texts:
    version, options = training.fsdp or ("", {})
    parent = _is_on(options.get("activation_checkpointing"))
    if _is_on(options.get("activation_checkpointing_offload")) and not (parent and version == "2"):
        what = "accelerate refuses it without fsdp_activation_checkpointing and fsdp_version 2."
        yield "fsdp_activation_checkpointing_offload", what, "Remove it, and use `policy: offload` of hf_ckpt."


def _splits(training: Training) -> Texts:
    for key, size in training.splits.items():
        if split_by(key) == "sequences":
            what = f"a rank has 1/{size} of a sequence. Plans count that, but not the time of attention to other parts."
            yield f"{key}: {size}", what, "Compare plans by their peaks, and give `--seq` as of one rank."
        else:
            what = f"it splits {split_by(key)} between ranks, which cannot be planned for."
            yield f"{key}: {size}", what, "Run without it, or expect no plan: hf_ckpt is not tested with it."


def _adapter_layers(training: Training) -> Texts:
    owner = training.owner
    values = training.values
    keys = owner.fields.get("lora_targets", "").split()
    chosen = [owner.chosen(key, values.get(key)) or {} for key in owner.choices]
    named = any(values.get(key) for key in keys) or any("lora_targets" in fields for fields in chosen)
    if training.adapters and not named:
        what = "no layers are named, and PEFT takes its own for the model: often query and value projections only."
        yield keys[0], what, "Name the layers, or `all-linear`."


def _deepspeed_block(training: Training) -> Texts:
    config = training.deepspeed
    if isinstance(config, dict) and "activation_checkpointing" in config:
        where = "activation_checkpointing" if training.engine else "deepspeed"
        what = "DeepSpeed's own activation_checkpointing does nothing for Hugging Face models: none of them calls it."
        yield where, what, f"Remove it, and set {training.flag}."


def _redrawn_dropout(training: Training) -> Texts:
    keys = training.owner.fields.get("lora_dropout", "").split()
    rates = {key: training.values.get(key) for key in keys} if training.adapters else {}
    for key, value in training.model.items():
        outside = key.startswith(("classif", "summary", "embd", "cls_", "pooler"))
        if not outside and any(word in key for word in ("dropout", "pdrop", "drop_path")):
            rates[f"the model's {key}"] = value
    active = [f"{key} is {rate}" for key, rate in rates.items() if isinstance(rate, float) and rate > 0]
    version, options = training.fsdp or ("", {})
    if not active:
        return
    what = f"random state is not kept, but {active[0]}: recomputed blocks draw other masks, and gradients are wrong."
    if version == "2" and _is_on(options.get("activation_checkpointing")):  # FSDP1 keeps random state
        yield "fsdp_activation_checkpointing", what, f"Set it to false and {training.flag} to true."
    kwargs = training.kwargs if training.values.get(training.flag) and isinstance(training.kwargs, dict) else {}
    if kwargs.get("preserve_rng_state") is False and kwargs.get("policy") not in ("none", "selective"):
        yield "preserve_rng_state", what, "Remove it, or set every dropout to 0."  # `selective` keeps the masks


RULES: tuple[tuple[str, str, Callable[[Training], Texts]], ...] = (
    ("error", "spec", _spec),
    ("error", "spec-outside", _spec_outside),
    ("error", "unread", _unread),
    ("error", "fsdp-offload", _fsdp_offload),
    ("warning", "misspelt", _misspelt),
    ("warning", "flag-off", _flag_off),
    ("warning", "own-checkpointing", _own_checkpointing),
    ("warning", "splits", _splits),
    ("note", "adapter-layers", _adapter_layers),
    ("warning", "deepspeed-block", _deepspeed_block),
    ("error", "redrawn-dropout", _redrawn_dropout),
)
"""Severity, code and function of every rule, in the order in which findings of one severity are reported."""
