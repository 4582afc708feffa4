"""The rules of `hf-ckpt doctor`: one row for each kind of mistake, in the table `RULES`.

A row has a code, a severity, a function that looks for the mistake in the `Facts`, and texts: what will go wrong, and
what to do. The function returns None, or values for the placeholders in the texts. One of them is `where`, the place
of the mistake. A function that can find several mistakes yields them.

>>> facts = Facts((ConfigFile("args.json", TRAINING, {"gradient_checkpointing_kwargs": {"polcy": "full"}}),))
>>> [finding.code for finding in diagnose(facts)]
['spec', 'kwargs-without-flag']
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_ckpt.doctor.facts import (
    ACCELERATE,
    DEEPSPEED,
    FLAGS,
    KWARGS,
    OUR_KEYS,
    REQUIRED,
    SEVERITIES,
    TRAINING,
    Facts,
    Setting,
    is_at_most,
    is_before,
    is_file,
    is_on,
    is_positive,
    is_set,
    key_of,
    positive_int,
    shown,
    walk,
    without_true_reentrant,
)
from hf_ckpt.errors import SpecError
from hf_ckpt.planner.policies import make_plan
from hf_ckpt.spec.plan import Block
from hf_ckpt.spec.spec import Spec
from hf_ckpt.units import GIB, format_bytes, format_percent
from hf_ckpt.versions import LAST_DEEPSPEED_WITH_EMPTY_SHAPES, NEW_NAME_SINCE, NON_REENTRANT_SINCE

Values = Mapping[str, Any]
"""Placeholder -> value; always with `where`."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """A mistake, or something worth knowing."""

    severity: str
    """`error`, `warning` or `note`."""
    code: str
    """Name of the rule, which is the same in all releases."""
    where: str
    """Its place, as `file: key`, or the name of a package."""
    what: str
    """What will go wrong."""
    fix: str
    """What to do."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """A kind of mistake."""

    code: str
    severity: str
    find: Callable[[Facts], Values | Iterable[Values] | None]
    what: str
    fix: str

    def findings(self, facts: Facts) -> Iterator[Finding]:
        """Yield the findings of the rule. A value named `severity` replaces the rule's own."""
        found = self.find(facts)
        for values in () if found is None else (found,) if isinstance(found, Mapping) else found:
            filled = {"last": LAST_DEEPSPEED_WITH_EMPTY_SHAPES, **values}
            what, fix = self.what.format_map(filled), self.fix.format_map(filled)
            yield Finding(values.get("severity", self.severity), self.code, values["where"], what, fix)


def diagnose(facts: Facts) -> tuple[Finding, ...]:
    """Return the findings of all rules, errors first."""
    found = [finding for rule in RULES for finding in rule.findings(facts)]
    return tuple(sorted(found, key=lambda finding: SEVERITIES.index(finding.severity)))


def to_dict(facts: Facts, findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the facts and findings as a dict that can be written as JSON."""
    return {
        "files": {file.path: file.kind for file in facts.files},
        "model": facts.model.name if facts.model else None,
        "versions": dict(facts.versions),
        "findings": [dataclasses.asdict(finding) for finding in findings],
    }


def _first(*settings: Setting | None) -> Setting | None:
    return next((setting for setting in settings if setting is not None), None)


# --- what is asked for ------------------------------------------------------------------------------------------------


def two_owners(facts: Facts) -> Values | None:
    flag, switch = facts.checkpointing, facts.fsdp.switch if facts.fsdp else None
    if flag is None or switch is None:
        return None
    return {"where": switch.where, "flag": flag.where, "switch": key_of(switch), "owner": key_of(flag)}


def _is_reentrant(facts: Facts) -> bool:
    return facts.checkpointing is not None and facts.kwargs.get("use_reentrant") is True


def reentrant(facts: Facts) -> Values | None:
    given = facts.given_kwargs
    return {"where": f"{given.where}.use_reentrant"} if given is not None and _is_reentrant(facts) else None


def reentrant_default(facts: Facts) -> Values | None:
    flag, given = facts.checkpointing, facts.given_kwargs
    if flag is None or facts.ours or "use_reentrant" in facts.kwargs:
        return None
    values = {"where": (given or flag).where, "kwargs": key_of(given) if given else KWARGS[1]}
    to_torch = facts.kwargs.keys() - {"every_n_layers", "offload"}  # Trainer removes these two
    installed = facts.versions.get("transformers")
    if to_torch:
        keys = ", ".join(sorted(to_torch))
        cause = f"transformers hands {keys} to torch, which is reentrant unless use_reentrant is among the keys"
    elif is_before(installed, NON_REENTRANT_SINCE):
        cause = f"transformers {installed} is reentrant by default; {NON_REENTRANT_SINCE} is not"
    else:
        return None
    return values | {"cause": cause}


def spec_problems(facts: Facts) -> Iterator[Values]:
    given = facts.given_kwargs
    if given is None:
        return
    problems: Sequence[str] = ()
    try:
        Spec.parse(without_true_reentrant(given.value) if isinstance(given.value, Mapping) else {})
    except SpecError as error:
        problems = error.problems
    if not isinstance(given.value, Mapping):
        problems = [f"must be a mapping of keys, but is {shown(given.value)} instead."]
    yield from ({"where": given.where, "problem": problem} for problem in problems)


def plan_file(facts: Facts) -> Values | None:
    given, plan = facts.given_kwargs, facts.spec.plan if facts.spec is not None else None
    if given is None or plan is None or is_file(Path(plan)):
        return None
    return {"where": f"{given.where}.plan", "plan": repr(plan)}


def needs_hf_ckpt(facts: Facts) -> Values | None:
    given = facts.given_kwargs
    if facts.checkpointing is None or given is None or not facts.ours:
        return None
    return {"where": given.where, "keys": ", ".join(sorted(OUR_KEYS & facts.kwargs.keys()))}


def kwargs_without_flag(facts: Facts) -> Values | None:
    given = facts.given_kwargs
    if given is None or given.value in ({}, "") or facts.checkpointing is not None:
        return None
    return {"where": given.where, "flag": key_of(given).removesuffix("_kwargs")}


def _names(facts: Facts) -> Iterator[tuple[str, str, Setting, Setting | None]]:
    """Yield (new name, old name, setting of the new one, setting of the old one)."""
    for file in facts.of(TRAINING):
        for new, old in (FLAGS, KWARGS):
            given = file.setting(new)
            if given is not None:
                yield new, old, given, file.setting(old)


def two_names(facts: Facts) -> Iterator[Values]:
    for new, old, given, former in _names(facts):
        if former is not None and given.value != former.value:
            yield {"where": former.where, "new": new, "old": old}


def new_name(facts: Facts) -> Iterator[Values]:
    installed = facts.versions.get("transformers")
    for new, old, given, former in _names(facts):
        if is_before(installed, NEW_NAME_SINCE) and (former is None or former.value == given.value):
            yield {"where": given.where, "new": new, "old": old, "installed": installed, "since": NEW_NAME_SINCE}


def own_offloading(facts: Facts) -> Values | None:
    moved = facts.own_offloading
    return None if moved is None else {"where": moved.where, "key": key_of(moved), "value": shown(moved.value)}


def random_state(facts: Facts) -> Values | None:
    # The rebuild engine needs no random state for `selective`, because it keeps dropout masks.
    spec, given, dropout = facts.spec, facts.given_kwargs, facts.dropout
    if spec is None or given is None or dropout is None or spec.preserve_rng_state:
        return None
    if not facts.policies - {"none", "selective"} and not (spec.engine == "sac" and "selective" in facts.policies):
        return None
    return {"where": f"{given.where}.preserve_rng_state", "dropout": dropout.where, "rate": dropout.value}


# --- several devices --------------------------------------------------------------------------------------------------


def fsdp2_dropout(facts: Facts) -> Values | None:
    fsdp, dropout = facts.fsdp, facts.dropout
    if fsdp is None or fsdp.switch is None or fsdp.version == "1":  # FSDP1's wrapper keeps random state
        return None
    if dropout is None and facts.model is not None:
        return None
    certain = dropout is not None and fsdp.version is not None
    return {
        "where": fsdp.switch.where,
        "severity": "error" if certain else "warning",
        "active": f"{dropout.where} is {dropout.value}" if dropout is not None else "a dropout may be active",
        "switch": key_of(fsdp.switch),
        "hint": "." if dropout is not None else "; --model says whether it is.",
    }


def zero3_frozen(facts: Facts) -> Values | None:
    zero3, adapters, installed = facts.zero3, facts.adapters, facts.versions.get("deepspeed")
    if facts.checkpointing is None or zero3 is None or adapters is None:
        return None
    if installed is not None and not is_at_most(installed, LAST_DEEPSPEED_WITH_EMPTY_SHAPES):
        return None
    return {
        "where": zero3.where,
        "severity": "error" if installed else "warning",
        "adapters": adapters.where,
        "here": f"{installed} is installed" if installed else "none is installed here, so its version is unknown",
    }


def deepspeed_block(facts: Facts) -> Iterator[Values]:
    more = "" if facts.checkpointing else ", and set gradient_checkpointing in the training arguments"
    blocks = (file.setting("activation_checkpointing") for file in facts.of(DEEPSPEED))
    yield from ({"where": block.where, "more": more} for block in blocks if block is not None)


def fsdp_and_deepspeed(facts: Facts) -> Values | None:
    fsdp, deepspeed = facts.option("fsdp"), facts.option("deepspeed")
    if fsdp is None or deepspeed is None or not (is_set(fsdp.value) and is_set(deepspeed.value)):
        return None
    return {"where": fsdp.where, "deepspeed": deepspeed.where}


def segments_sharded(facts: Facts) -> Values | None:
    spec, given, sharded = facts.spec, facts.given_kwargs, facts.sharded
    if spec is None or given is None or sharded is None or spec.segments is None:
        return None
    return {"where": f"{given.where}.segments", "sharded": sharded.where}


def head_sharded(facts: Facts) -> Values | None:
    spec, given, sharded = facts.spec, facts.given_kwargs, facts.sharded
    if spec is None or given is None or sharded is None or spec.head == "full":
        return None
    return {"where": f"{given.where}.head", "sharded": sharded.where}


# --- torch.compile ----------------------------------------------------------------------------------------------------


def cuda_graphs(facts: Facts) -> Values | None:
    if facts.checkpointing is None or facts.kwargs.get("preserve_rng_state") is False:
        return None
    modes = [facts.option("torch_compile_mode"), facts.option("torch_compile_backend")]
    for file in facts.of(ACCELERATE):
        modes += [file.setting("dynamo_config", key) for key in ("dynamo_mode", "dynamo_backend")]
    graphs = ("reduce-overhead", "max-autotune", "cudagraphs")
    found = [mode for mode in modes if mode is not None and str(mode.value).lower() in graphs]
    for file in facts.of(TRAINING, ACCELERATE):
        switches = (file.setting(*path) for path, _ in walk(file.values) if path[-1] == "triton.cudagraphs")
        found += [switch for switch in switches if switch is not None and is_on(switch.value)]
    return {"where": found[0].where, "mode": shown(found[0].value)} if found else None


def _compiled(facts: Facts, key: str, applies: Callable[[Spec], bool]) -> Values | None:
    """Return the values for a key of the spec that does not work under torch.compile."""
    spec, given, compiled = facts.spec, facts.given_kwargs, facts.compiled
    if spec is None or given is None or compiled is None or not applies(spec):
        return None
    return {"where": f"{given.where}.{key}", "compiled": compiled.where}


def adapters_compiled(facts: Facts) -> Values | None:
    adapters = facts.adapters
    found = _compiled(facts, "save", lambda spec: "selective" in facts.policies and "linear" in spec.save)
    return None if found is None or adapters is None else {**found, "adapters": adapters.where}


# --- the model --------------------------------------------------------------------------------------------------------


def prefix_tuning(facts: Facts) -> Values | None:
    kind, projection = facts.option("peft_type"), facts.option("prefix_projection")
    is_prefix = kind is not None and str(kind.value).upper().endswith("PREFIX_TUNING")
    found, flag = kind if is_prefix else projection, facts.checkpointing
    once = facts.ours and facts.policies and facts.policies <= {"none", "selective"}  # no block runs twice
    return None if found is None or flag is None or once else {"where": found.where, "flag": key_of(flag)}


def use_cache(facts: Facts) -> Values | None:
    asked = facts.option_on("use_cache")
    return {"where": asked.where} if asked is not None and facts.checkpointing is not None and not facts.ours else None


def eager_attention(facts: Facts) -> Values | None:
    # The softmax of eager attention is an operation like any other: its result, heads x tokens x tokens, is kept.
    spec, asked = facts.spec, facts.option("attn_implementation")
    if spec is None or facts.given_kwargs is None or asked is None or "selective" not in facts.policies:
        return None
    keeps = str(asked.value).lower() == "eager" and not (spec.engine == "sac" and spec.save == ("linear",))
    return {"where": asked.where} if keeps else None


def nothing_to_save(facts: Facts) -> Values | None:
    spec, given, asked = facts.spec, facts.given_kwargs, facts.option("attn_implementation")
    if spec is None or given is None or asked is None or "selective" not in facts.policies:
        return None
    known = str(asked.value).lower() in ("eager", "sdpa", "flash_attention_2")
    if known or spec.engine != "sac" or spec.save != ("attention",):
        return None
    return {"where": f"{given.where}.save", "asked": asked.where, "value": shown(asked.value)}


def logits(facts: Facts) -> Values | None:
    model, spec = facts.model, facts.spec
    if model is None or (spec is not None and spec.head != "full") or facts.option_on("use_liger_kernel"):
        return None
    endings = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration", "ForPreTraining")
    classes = model.config.get("architectures")
    if isinstance(classes, list) and classes and not str(classes[0]).endswith(endings):
        return None
    vocabulary = next((n for path, n in walk(model.config) if path[-1] == "vocab_size" and type(n) is int), None)
    names: tuple[str, ...] = ("max_length", "max_seq_length", "block_size", "sequence_len", "cutoff_len")
    if model.config.get("is_encoder_decoder"):
        names = ("max_target_length", *names)
    batch = facts.batch or positive_int(facts.option("per_device_train_batch_size", "micro_batch_size"))
    tokens = facts.tokens or positive_int(facts.option(*names))
    if vocabulary is None or batch is None or tokens is None:
        return None
    launched = any(str(file.values.get("mixed_precision")) in ("bf16", "fp16") for file in facts.of(ACCELERATE))
    in_16_bits = launched or facts.option_on("bf16") is not None or facts.option_on("fp16") is not None
    size = batch * tokens * vocabulary * (14 if in_16_bits else 16)
    memory = facts.device.memory_bytes if facts.device else None
    if size <= 2 * GIB and (memory is None or size <= memory / 4):
        return None
    chunks = '`"head": "auto"` in the checkpointing kwargs takes the head and its loss in chunks; or take'
    return {
        "where": f"{model.name}: vocab_size",
        "size": format_bytes(size) + (f", {format_percent(size / memory)} of the device" if memory else ""),
        "shape": f"batch {batch} x {tokens} tokens x {vocabulary} entries",
        "take": f"{chunks} a smaller batch" if facts.sharded is None else "Take a smaller batch",
    }


def blocks(facts: Facts) -> Iterator[Values]:
    model, spec, given = facts.model, facts.spec, facts.given_kwargs
    if model is None or spec is None or given is None or spec.plan is not None or not model.stacks:
        return
    if not model.named and (isinstance(spec.layers, tuple) or any(rule.stack for rule in spec.rules)):
        return
    made = [Block(f"{name}.{index}", name, index, "block") for name, count in model.stacks for index in range(count)]
    try:
        make_plan(spec, made, "", model.name)
    except SpecError as error:
        yield from ({"where": given.where, "problem": f"{model.name}: {problem}"} for problem in error.problems)


def every_n_layers(facts: Facts) -> Values | None:
    model, spec, given = facts.model, facts.spec, facts.given_kwargs
    if model is None or spec is None or given is None or spec.plan is not None or not model.stacks:
        return None
    count = min(count for _, count in model.stacks)
    if not spec.every_n_layers >= count > 1:
        return None
    where = f"{given.where}.every_n_layers"
    return {"where": where, "every": spec.every_n_layers, "count": count, "model": model.name}


def one_counter(facts: Facts) -> Values | None:
    model, spec, given = facts.model, facts.spec, facts.given_kwargs
    if model is None or spec is None or given is None or facts.ours or len(model.stacks) < 2:
        return None
    (first, count), every = model.stacks[0], spec.every_n_layers
    if every <= 1 or not count % every:
        return None
    values = {"model": model.name, "count": count, "first": first, "next": -count % every}
    return {"where": f"{given.where}.every_n_layers", **values}


def quantised(facts: Facts) -> Values | None:
    keys = ("load_in_4bit", "load_in_8bit")
    inner = (file.setting("quantization_config", key) for file in facts.of(TRAINING) for key in keys)
    found = _first(facts.option_on(*keys), *(each for each in inner if each is not None and is_on(each.value)))
    return None if found is None else {"where": found.where}


def routers(facts: Facts) -> Values | None:
    # In eager mode, recomputed blocks choose the same experts, except under PyTorch's selective checkpointing. If
    # `selective` saves linear layers, it keeps the routers' scores, so the choice is the same.
    model, spec = facts.model, facts.spec
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    found = (path for path, n in walk(model.config if model else {}) if path[-1] in names and is_positive(n) and n > 1)
    where = next(found, None)
    if model is None or spec is None or where is None:
        return None
    saves = (spec.save, *(rule.save or spec.save for rule in spec.rules))
    keeps_scores = facts.policies <= {"none", "selective"} and all("linear" in save for save in saves)
    by_sac = spec.engine == "sac" and "selective" in facts.policies
    if keeps_scores or not (by_sac or facts.compiled is not None):
        return None
    unchecked = ", and determinism_check is none, so nobody would notice" if spec.determinism_check == "none" else ""
    return {"where": f"{model.name}: {'.'.join(where)}", "unchecked": unchecked}


# --- the machine ------------------------------------------------------------------------------------------------------


def offload_nowhere(facts: Facts) -> Values | None:
    spec, given = facts.spec, facts.given_kwargs
    if spec is None or given is None or not (spec.offload or "offload" in facts.policies):
        return None
    launched = (file.setting("use_cpu") for file in facts.of(ACCELERATE))
    by_device = facts.device is not None and facts.device.name == "cpu"
    cpu = _first(
        facts.option_on("use_cpu", "no_cuda"),
        *(use for use in launched if use is not None and is_on(use.value)),
        Setting("cpu", "--device") if by_device else None,
    )
    return None if cpu is None else {"where": given.where, "cpu": cpu.where}


def versions(facts: Facts) -> Iterator[Values]:
    for package, (first, beyond) in REQUIRED.items():
        installed = facts.versions.get(package)
        if installed is None or is_before(installed, first) or (beyond and not is_before(installed, beyond)):
            wanted = f"{package} {first} or later" + (f", before {beyond}" if beyond else "")
            command = f"pip install '{package}>={first}" + (f",<{beyond}'" if beyond else "'")
            here = "none is installed" if installed is None else f"{installed} is installed"
            yield {"where": package, "wanted": wanted, "here": here, "command": command}


def old_deepspeed(facts: Facts) -> Values | None:
    installed = facts.versions.get("deepspeed")
    if facts.files or installed is None or not is_at_most(installed, LAST_DEEPSPEED_WITH_EMPTY_SHAPES):
        return None
    return {"where": "deepspeed", "installed": installed}


# fmt: off
RULES: tuple[Rule, ...] = (
    Rule("two-owners", "error", two_owners,
         "FSDP's own activation checkpointing is on, and so is {flag}. Two owners would recompute blocks twice; "
         "Trainer and hf_ckpt both refuse to start.",
         "Set {switch} to false; checkpointing stays with {owner}."),
    Rule("reentrant", "warning", reentrant,
         "Reentrant checkpointing does not train adapters whose input needs no gradient, and marks parameters ready "
         "twice under DDP. hf_ckpt recomputes non-reentrantly, with a warning.",
         "Set use_reentrant to false."),
    Rule("reentrant-default", "warning", reentrant_default,
         "Without hf_ckpt, checkpointing is reentrant here: {cause}.",
         'Set {kwargs} to {{"use_reentrant": false}}, or name a policy of hf_ckpt.'),
    Rule("spec", "error", spec_problems,
         "{problem}",
         "Correct it: hf_ckpt refuses to enable anything until it is right."),
    Rule("plan-file", "warning", plan_file,
         "There is no file {plan}, seen from here.",
         "Give a path that exists where training starts; `hf-ckpt plan ... --out FILE` writes one."),
    Rule("needs-hf-ckpt", "note", needs_hf_ckpt,
         "Only hf_ckpt understands {keys}; without it training stops with `Unexpected keyword arguments`.",
         "Call hf_ckpt.install(model) in the script, or launch it with `-m hf_ckpt` in front of its name."),
    Rule("kwargs-without-flag", "warning", kwargs_without_flag,
         "These kwargs do nothing, because {flag} is not on.",
         "Set {flag} to true, or remove the kwargs."),
    Rule("two-names", "warning", two_names,
         "{old} is the old name of {new}, which is set to something else and wins.",
         "Remove {old}."),
    Rule("new-name", "warning", new_name,
         "TrainingArguments of transformers {installed} does not know {new} (the recipes of hf_ckpt translate it).",
         "Write {old}, which works everywhere, or install transformers {since} or later."),
    Rule("own-offloading", "warning", own_offloading,
         "{key}: {value} lets the program itself move activations to host memory or a disk. hf_ckpt does not know of "
         "that: `hf-ckpt plan` counts these activations as kept on the device.",
         "Set it to false, and let hf_ckpt move them: `policy: offload`, or `host_budget` beside `budget`."),
    Rule("fsdp2-dropout", "error", fsdp2_dropout,
         "accelerate's FSDP2 checkpointing does not keep random state, and {active}: recomputed blocks draw other "
         "masks, the loss looks right and the gradients belong to another sample.",
         "Set {switch} to false and gradient_checkpointing to true, or set every dropout to 0{hint}"),
    Rule("random-state", "error", random_state,
         "Random state is not kept, but {dropout} is {rate}: recomputed blocks draw other masks, and gradients are "
         "wrong without any message.",
         "Remove preserve_rng_state, or set every dropout to 0."),
    Rule("zero3-frozen", "error", zero3_frozen,
         "ZeRO-3 with frozen weights ({adapters}) and checkpointing stops with a CheckpointError (recomputed shape "
         "[0]) on DeepSpeed up to {last}; {here}.",
         "Install a later DeepSpeed, use ZeRO-2, or train without checkpointing."),
    Rule("deepspeed-block", "warning", deepspeed_block,
         "DeepSpeed's own activation_checkpointing does nothing for Hugging Face models: none of them calls it.",
         "Remove it{more}."),
    Rule("fsdp-and-deepspeed", "error", fsdp_and_deepspeed,
         "Both fsdp and deepspeed ({deepspeed}) are set, but only one of them can share the parameters.",
         "Remove one of them."),
    Rule("cuda-graphs", "warning", cuda_graphs,
         "{mode} captures CUDA graphs, in which random state cannot be read: checkpointing that preserves it stops "
         "there.",
         "Use a mode without graphs (default, max-autotune-no-cudagraphs), or set preserve_rng_state to false in the "
         "checkpointing kwargs if no dropout is active."),
    Rule("rebuild-compiled", "error", lambda facts: _compiled(facts, "engine", lambda spec: spec.engine == "rebuild"),
         '"engine": "rebuild" cannot work under torch.compile ({compiled}).',
         'Use "engine": "auto", which takes SAC there.'),
    Rule("planned-compiled", "warning",
         lambda facts: _compiled(facts, "policy", lambda _: bool(facts.policies & {"budget", "auto"})),
         "Under torch.compile ({compiled}) no plan is made, and every block is recomputed.",
         "Plan beforehand with `hf-ckpt plan ... --out plan.yaml` and use {{'plan': 'plan.yaml'}}, or do not compile."),
    Rule("adapters-compiled", "warning", adapters_compiled,
         "Under torch.compile ({compiled}) `selective` is SAC, which keeps the results of all linear layers. With "
         "adapters ({adapters}) that is more than no checkpointing keeps.",
         'Use "save": ["attention"] or "policy": "full", or do not compile.'),
    Rule("prefix-tuning", "error", prefix_tuning,
         "Prefix tuning puts its parameters into the KV cache, which recomputed blocks do not see; hf_ckpt refuses the "
         "first training step.",
         "Set {flag} to false, use hf_ckpt with `policy: selective`, or LoRA or prompt tuning."),
    Rule("use-cache", "note", use_cache,
         "Without hf_ckpt, transformers warns and switches the cache off while checkpointing is on.",
         "Set use_cache to false for training, or use hf_ckpt, which does it for the forward only."),
    Rule("eager-attention", "warning", eager_attention,
         "With eager attention `selective` keeps the scores of every block: heads x tokens x tokens elements, which "
         "grow with the square of the sequence.",
         "Set attn_implementation to sdpa (or flash_attention_2), or use `policy: full`."),
    Rule("nothing-to-save", "warning", nothing_to_save,
         '"engine": "sac" is to save attention only, but {asked} is {value}, which may run no operation that '
         "PyTorch's selective checkpointing knows; the first step stops then.",
         'Save ["linear", "attention"], use sdpa, or "engine": "rebuild".'),
    Rule("logits", "note", logits,
         "Logits, their loss and gradients take up to {size} ({shape}), if a language-model head is trained. No policy "
         "on blocks can save that.",
         "{take} and accumulate."),
    Rule("blocks", "error", blocks,
         "{problem}",
         "Name blocks that the model has."),
    Rule("every-n-layers", "warning", every_n_layers,
         "{every} leaves one block of {count} to be recomputed in a stack of {model}: memory hardly moves.",
         "Use a number below {count}; 2 recomputes every second block."),
    Rule("one-counter", "warning", one_counter,
         "Without hf_ckpt, transformers counts through all stacks of {model} with one counter: after {count} blocks of "
         "the {first} the next stack begins with block {next}, not 0.",
         "Use hf_ckpt (add a policy), which counts each stack from 0."),
    Rule("segments-sharded", "error", segments_sharded,
         "Segments recompute several blocks at once, but parameters are split over ranks ({sharded}): those of the "
         "other blocks are away then, and the first training step stops.",
         "Use `policy: full` without segments."),
    Rule("head-sharded", "warning", head_sharded,
         "The head is run as a whole where parameters are split over ranks ({sharded}): its logits are not saved.",
         "Remove `head`, and take a smaller batch if the logits are the peak."),
    Rule("offload-nowhere", "warning", offload_nowhere,
         "Offloading moves hidden states from an accelerator to host memory, but training is on the CPU ({cpu}): "
         "nothing is moved.",
         "Use `policy: full`, or train on an accelerator."),
    Rule("quantised", "note", quantised,
         "PEFT's prepare_model_for_kbit_training switches checkpointing on by itself, with settings of its own.",
         "Call it with use_gradient_checkpointing=False; checkpointing then has one owner, the training arguments."),
    Rule("routers", "warning", routers,
         "Under torch.compile, and by SAC, a mixture of experts can route a token elsewhere when its block is "
         "recomputed, where kernels are not deterministic: shapes differ, or gradients go to another expert"
         "{unchecked}.",
         'Use `policy: selective` with its default `save`, or eager mode, and leave determinism_check at "default".'),
    Rule("version", "error", versions, "hf_ckpt needs {wanted}; {here}.", "{command}"),
    Rule("deepspeed", "note", old_deepspeed,
         "DeepSpeed {installed} cannot recompute frozen weights (LoRA) under ZeRO-3.",
         "Install one after {last} for that."),
)
"""Every rule, in the order in which findings of one severity are reported."""
# fmt: on
