"""The rules of `hf-ckpt doctor`: a function for each silent fault, in the table `RULES_BY_SEVERITY`.

A silent fault is one that neither the owner of the file nor hf_ckpt reports when the training starts. Faults that end
the start with an error are reported, too, where they concern activations.
"""

from __future__ import annotations

import difflib
import functools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from hf_ckpt.doctor.files import SPEC_KEYS, ConfigFiles, split_by
from hf_ckpt.doctor.owners import OWNERS, without_sections
from hf_ckpt.errors import SpecError, shown
from hf_ckpt.models.families import depth_keys, family_of
from hf_ckpt.planner.policies import make_plan, parse_for
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


def diagnose(files: ConfigFiles) -> list[Finding]:
    """Return the findings of all rules, errors first."""
    findings = []
    for severity, rules in RULES_BY_SEVERITY.items():
        for rule in rules:
            findings += [Finding(severity, code_of(rule), *texts) for texts in rule(files)]
    return findings


def code_of(rule: Callable[[ConfigFiles], Texts]) -> str:
    """Return the code of a rule, such as `flag-off`."""
    return rule.__name__.strip("_").replace("_", "-")


def _spec(files: ConfigFiles) -> Texts:
    kwargs = files.kwargs
    if not isinstance(kwargs, dict | None):  # a text would be read as the name of a policy, which Trainer does not
        kwargs = {shown(kwargs, 60): None}
    try:
        # A plan is made for the config's blocks, because `layers` beyond the last are refused only then.
        spec = parse_for(lambda: Spec.parse(kwargs), functools.partial(_planned, files))
        _planned(files, spec)
    except SpecError as error:
        for problem in error.problems:
            yield files.kwargs_key, problem, "Correct it: hf_ckpt refuses the whole spec."


def _planned(files: ConfigFiles, spec: Spec) -> None:
    """Raise `SpecError` for blocks that the model's config does not count."""
    blocks = _blocks(files, spec)
    if blocks and spec.plan is None:
        make_plan(spec, blocks, "", "")


def _blocks(files: ConfigFiles, spec: Spec) -> list[Block]:
    """Return the blocks that the model's config counts, stack by stack; none if it does not say what there is."""
    config = types.SimpleNamespace(**files.model)
    family = family_of(config)
    if not family.stacks and (isinstance(spec.layers, tuple) or any(rule.stack for rule in spec.rules)):
        return []  # the names of its stacks are not known
    blocks = []
    for stack, _ in family.stacks or (("layers", ""),):
        for key in depth_keys(config, stack)[:1]:
            blocks += [Block("", stack, index, "") for index in range(getattr(config, key))]
    return blocks


def _spec_outside(files: ConfigFiles) -> Texts:
    for key in sorted(SPEC_KEYS & files.values.keys()):
        what = f"{files.owner.name} does not read it outside the checkpointing kwargs."
        yield key, what, f"Indent it under {files.kwargs_key}." if files.reads_spec else files.owner.advice


def _unread(files: ConfigFiles) -> Texts:
    kwargs = files.kwargs
    if isinstance(kwargs, dict) and kwargs.keys() - _OF_TORCH and not files.reads_spec:
        what = f"{files.owner.name} does not give them to hf_ckpt: no policy would be used."
        yield files.kwargs_key, what, files.owner.advice


def _misspelt(files: ConfigFiles) -> Texts:
    names = [*files.values.keys() - files.unknown, *files.owner.keys]
    for key in files.unknown:
        elsewhere = [name for name in names if name.endswith(f".{key}")]  # without its section, or in a wrong one
        near = elsewhere[:1] or _near(key, names)
        for name in near:
            yield key, "unknown key; planning ignores it.", f"Did you mean {name}?"
        if not near:
            for name in _near(key, SPEC_KEYS):
                yield key, "unknown key; planning ignores it.", f"Did you mean {name}, under {files.kwargs_key}?"
    yield from _misspelt_in("DeepSpeed", files.deepspeed)
    yield from _misspelt_in("accelerate", {"fsdp_config": files.launch.get("fsdp_config") or {}})


def _misspelt_in(program: str, config: Any) -> Texts:
    """Keys of the file of a program that are near one that it reads. It ignores most others without a word."""
    if not isinstance(config, dict):
        return
    (owned_keys,) = (owner.keys for owner in OWNERS if owner.name == program)
    for key in sorted(without_sections(config).keys() | config.keys()):
        for name in () if key in owned_keys else _near(key, owned_keys):
            yield key, f"unknown key of {program}.", f"Did you mean {name}?"


def _near(key: str, names: Iterable[str]) -> list[str]:
    """The one of these names that an unknown key is near to, in the same section; empty if there is none."""
    section = key.rpartition(".")[0]
    beside = [name for name in names if name.rpartition(".")[0] == section]
    # So near that no key of an owner is called misspelt; tests/doctor/keys.yaml has hundreds of each.
    return difflib.get_close_matches(key, beside, 1, cutoff=0.85)


def _launch_keys(files: ConfigFiles) -> Texts:
    for key, names in files.unknown_to_accelerate.items():
        near = difflib.get_close_matches(key, names, 1, cutoff=0.6)
        yield key, "unknown key: accelerate refuses the file.", f"Did you mean {near[0]}?" if near else "Remove it."


def _flag_off(files: ConfigFiles) -> Texts:
    # LLaMA-Factory enables its own checkpointing without the flag: then `unread` says what to do.
    needs = files.owner.needs
    has_own_switch = needs is not None and needs[0].startswith("disable_") and not files.reads_spec
    flags = [] if has_own_switch else [(files.flag, files.kwargs_key, files.kwargs)]
    scopes = {key: f"{key}_scope" for key in files.owner.checkpointing.split()}
    flags += [(key, scope, files.values.get(scope)) for key, scope in scopes.items()]
    # Nothing reads these kwargs then, and the training runs out of memory as if there were no plan.
    for flag, key, value in flags:
        if value and not _is_on(files.values.get(flag)):
            yield key, f"it has no effect, because {flag} is off.", f"Set {flag} to true, or remove {key}."


def _is_on(value: Any) -> bool:
    """Whether a flag is on; NeMo Automodel's may be words."""
    return bool(value) and str(value).lower() not in ("false", "off", "none", "disabled", "no")


def _own_checkpointing(files: ConfigFiles) -> Texts:
    keys = [key for key in files.owner.checkpointing.split() if _is_on(files.values.get(key))]
    if isinstance(files.values.get(files.flag), str) and files.flag not in files.unknown:
        keys.append(files.flag)  # such as `offload`
    if files.fsdp and _is_on(files.fsdp[1].get("activation_checkpointing")):
        keys.append("fsdp_activation_checkpointing")
    for key in keys:
        what = "it saves, recomputes or moves activations without hf_ckpt, which plans do not count."
        yield key, what, "Turn it off, and let hf_ckpt do it: `policy: full`, `policy: offload`, or `host_budget`."


def _fsdp_offload(files: ConfigFiles) -> Texts:
    version, options = files.fsdp or ("", {})
    # accelerate/utils/dataclasses.py, `FullyShardedDataParallelPlugin.__post_init__`
    parent = _is_on(options.get("activation_checkpointing"))
    if _is_on(options.get("activation_checkpointing_offload")) and not (parent and version == "2"):
        what = "accelerate refuses it without fsdp_activation_checkpointing and fsdp_version 2."
        yield "fsdp_activation_checkpointing_offload", what, "Remove it, and use `policy: offload` of hf_ckpt."


def _splits(files: ConfigFiles) -> Texts:
    for key, size in files.splits.items():
        if split_by(key) == "sequences":
            what = f"a rank has 1/{size} of a sequence. Plans count that, but not the time of attention across ranks."
            yield f"{key}: {size}", what, "Compare plans by their peaks, and give the tokens of one rank as `--seq`."
        else:
            what = f"it splits {split_by(key)} between ranks, which cannot be planned for."
            yield f"{key}: {size}", what, "Run without it; hf_ckpt is not tested with it."


def _adapter_layers(files: ConfigFiles) -> Texts:
    owner = files.owner
    values = files.values
    keys = owner.fields.get("lora_targets", "").split()
    chosen = [owner.chosen(key, values.get(key)) or {} for key in owner.choices]
    named = any(values.get(key) for key in keys) or any("lora_targets" in fields for fields in chosen)
    if files.adapters and not named:  # PEFT: TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
        what = "no layers are named, so PEFT chooses them: often the query and value projections only."
        yield keys[0], what, "Name the layers, or `all-linear`."


def _auto_batch(files: ConfigFiles) -> Texts:
    if _is_on(files.values.get("auto_find_batch_size")):
        what = "if memory runs out, it reduces the batch without accumulating more, so the effective batch changes."
        yield "auto_find_batch_size", what, "Remove it, and start the run by `python -m hf_ckpt --oom-guard`."


def _deepspeed_block(files: ConfigFiles) -> Texts:
    config = files.deepspeed
    # It sets up `deepspeed.checkpointing.checkpoint`, which a model has to call; Megatron's do.
    if isinstance(config, dict) and "activation_checkpointing" in config:
        where = "activation_checkpointing" if files.engine else "deepspeed"
        what = "DeepSpeed's own activation_checkpointing has no effect on Hugging Face models, which never call it."
        yield where, what, f"Remove it, and set {files.flag}."


def _redrawn_dropout(files: ConfigFiles) -> Texts:
    keys = files.owner.fields.get("lora_dropout", "").split()
    rates = {key: files.values.get(key) for key in keys} if files.adapters else {}
    for key, value in files.model.items():
        # Heads and embeddings are outside the blocks, and nothing recomputes them.
        outside = key.startswith(("classif", "summary", "embd", "cls_", "pooler"))
        if not outside and any(word in key for word in ("dropout", "pdrop", "drop_path")):
            rates[f"the model's {key}"] = value
    active = [f"{key} is {rate}" for key, rate in rates.items() if isinstance(rate, float) and rate > 0]
    version, options = files.fsdp or ("", {})
    if not active:
        return
    effect = "recomputed blocks draw other masks, so gradients are wrong"
    what = f"random state is not preserved, but {active[0]}: {effect}."
    if version == "2" and _is_on(options.get("activation_checkpointing")):  # FSDP1 keeps random state
        yield "fsdp_activation_checkpointing", what, f"Set it to false and {files.flag} to true."
    kwargs = files.kwargs if files.values.get(files.flag) and isinstance(files.kwargs, dict) else {}
    if kwargs.get("preserve_rng_state") is False and kwargs.get("policy") not in ("none", "selective"):
        yield "preserve_rng_state", what, "Remove it, or set every dropout to 0."  # `selective` keeps the masks


RULES_BY_SEVERITY: dict[str, tuple[Callable[[ConfigFiles], Texts], ...]] = {
    "error": (_spec, _spec_outside, _unread, _launch_keys, _fsdp_offload, _redrawn_dropout),
    "warning": (_misspelt, _flag_off, _own_checkpointing, _splits, _deepspeed_block, _auto_batch),
    "note": (_adapter_layers,),
}
"""Severity -> its rules, in the order in which findings are reported. The code of a rule is its name."""
