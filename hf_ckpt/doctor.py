"""`hf-ckpt doctor`: what will go wrong with activation checkpointing, read from configs and versions. Free of torch.

    >>> facts = Facts((ConfigFile("args.json", TRAINING, {"gradient_checkpointing_kwargs": {"polcy": "full"}}),))
    >>> [finding.code for finding in diagnose(facts)]
    ['spec', 'kwargs-without-flag']

Files in, `Facts`; facts in, findings, by one small function a check (`CHECKS`). Versions are material to report here:
nothing that hf_ckpt does depends on them.

What no config shows, and doctor does not claim to check: modules in eval mode while gradients are on (adapters never
set to train), generation in train mode, someone else's code that disables and enables checkpointing, operations in
place, hidden states used outside, remote code in the old format, what only the command line gives, and whether a script
installs hf_ckpt. `MemoryTimeCallback` and `hf-ckpt check` see some of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_ckpt.errors import SpecError
from hf_ckpt.facts import (
    ACCELERATE,
    CHUNKS,
    DEEPSPEED,
    FLAGS,
    KWARGS,
    LAST_DEEPSPEED_WITH_EMPTY_SHAPES,
    NEW_NAME_SINCE,
    NON_REENTRANT_SINCE,
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
    key_of,
    positive_int,
    shown,
    walk,
    without_true_reentrant,
)
from hf_ckpt.plan import Block
from hf_ckpt.planner import make_plan
from hf_ckpt.spec import Spec
from hf_ckpt.units import GIB, format_bytes, format_percent


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that will go wrong, or is worth knowing."""

    severity: str
    """`error`, `warning` or `note`."""
    code: str
    """Short name of what was found; stays the same over releases."""
    where: str
    """`file: key`, or the package."""
    what: str
    fix: str

    def to_dict(self) -> dict[str, str]:
        return dataclasses.asdict(self)


# --- the checks -----------------------------------------------------------------------------------------------------

Check = Callable[[Facts], Iterator[Finding]]


def two_owners(facts: Facts) -> Iterator[Finding]:
    """Trap 8."""
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
    """Traps 1 and 11."""
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
    """Trap 35: everything that `Spec.parse` refuses."""
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
    """Transformers would hand our keys to torch, which refuses them."""
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
    """A request that nobody will ever read."""
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
    """Both names of a flag, or one that the installed transformers does not know."""
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


def fsdp2_dropout(facts: Facts) -> Iterator[Finding]:
    """Trap 5. FSDP1's wrapper keeps random state."""
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


def random_state_off(facts: Facts) -> Iterator[Finding]:
    """Trap 5 by one's own hand. `selective` by rebuilding needs no random state: masks are operands there."""
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


def zero3_frozen(facts: Facts) -> Iterator[Finding]:
    """Trap 6."""
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
    """Trap 32."""
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


def cuda_graphs(facts: Facts) -> Iterator[Finding]:
    """Trap 31."""
    if facts.checkpointing is None or facts.kwargs.get("preserve_rng_state") is False:
        return
    graphs = [facts.option("torch_compile_mode"), facts.option("torch_compile_backend")]
    for file in facts.of(ACCELERATE):
        graphs += [file.setting("dynamo_config", key) for key in ("dynamo_mode", "dynamo_backend")]
    for file in facts.of(TRAINING, ACCELERATE):
        values = (file.setting(*path) for path, value in walk(file.values) if path[-1] == "triton.cudagraphs")
        graphs += [value for value in values if value is not None and is_on(value.value)]
    for setting in graphs:
        by_mode = setting is not None and str(setting.value).lower() in (
            "reduce-overhead",
            "max-autotune",
            "cudagraphs",
        )
        if setting is not None and (by_mode or setting.where.endswith("triton.cudagraphs")):
            yield Finding(
                "warning",
                "cuda-graphs",
                setting.where,
                f"{shown(setting.value)} captures CUDA graphs, in which random state cannot be read: checkpointing "
                "that preserves it stops there.",
                "Use a mode without graphs (default, max-autotune-no-cudagraphs), or set preserve_rng_state to false "
                "in the checkpointing kwargs if no dropout is active.",
            )
            return


def compiled_engine(facts: Facts) -> Iterator[Finding]:
    """What works in eager mode only."""
    spec, given, compiled = facts.spec, facts.given_kwargs, facts.compiled
    if spec is None or given is None or compiled is None:
        return
    if spec.engine == "rebuild":
        yield Finding(
            "error",
            "rebuild-compiled",
            f"{given.where}.engine",
            f'"engine": "rebuild" cannot work under torch.compile ({compiled.where}).',
            'Use "engine": "auto", which takes SAC there.',
        )
    if facts.policies & {"budget", "auto"}:
        yield Finding(
            "warning",
            "planned-compiled",
            f"{given.where}.policy",
            f"Under torch.compile ({compiled.where}) no plan is made, and every block is recomputed.",
            "Plan beforehand with `hf-ckpt plan ... --out plan.yaml` and use {'plan': 'plan.yaml'}, or do not compile.",
        )
    if "selective" in facts.policies and "linear" in spec.save and facts.adapters is not None:
        yield Finding(
            "warning",
            "adapters-compiled",
            f"{given.where}.save",
            f"Under torch.compile ({compiled.where}) `selective` is SAC, which keeps the results of all linear layers: "
            f"with adapters ({facts.adapters.where}) those are also what frozen ones and the adapters themselves make, "
            "and that is more than no checkpointing keeps.",
            'Use "save": ["attention"] or "policy": "full", or do not compile.',
        )


def prefix_tuning(facts: Facts) -> Iterator[Finding]:
    """Trap 10."""
    kind, projection = facts.option("peft_type"), facts.option("prefix_projection")
    is_prefix = kind is not None and str(kind.value).upper().endswith("PREFIX_TUNING")
    found = kind if is_prefix else projection
    if facts.checkpointing is not None and found is not None:
        yield Finding(
            "error",
            "prefix-tuning",
            found.where,
            "Prefix tuning puts its parameters into the KV cache, which recomputed blocks do not see; hf_ckpt refuses "
            "the first training step.",
            f"Set {key_of(facts.checkpointing)} to false, or use LoRA or prompt tuning.",
        )


def cache(facts: Facts) -> Iterator[Finding]:
    """Trap 25. hf_ckpt switches the cache off for each forward by itself."""
    asked = facts.option_on("use_cache")
    if facts.checkpointing is not None and asked is not None and not facts.ours:
        yield Finding(
            "note",
            "use-cache",
            asked.where,
            "Without hf_ckpt, transformers warns and switches the cache off while checkpointing is on.",
            "Set use_cache to false for training, or use hf_ckpt, which does it for the forward only.",
        )


def attention(facts: Facts) -> Iterator[Finding]:
    """Trap 13. Both engines count what they save, and SAC stops where that is nothing."""
    spec, given = facts.spec, facts.given_kwargs
    asked = facts.option("attn_implementation")
    if spec is None or given is None or asked is None or "selective" not in facts.policies:
        return
    kind = str(asked.value).lower()
    # A softmax over whole rows is an operation like any other there: its result, heads x tokens x tokens, stays.
    if kind == "eager" and not (spec.engine == "sac" and spec.save == ("linear",)):
        yield Finding(
            "warning",
            "eager-attention",
            asked.where,
            "With eager attention `selective` keeps the scores of every block: heads x tokens x tokens elements, which "
            "grow with the square of the sequence.",
            "Set attn_implementation to sdpa (or flash_attention_2), or use `policy: full`.",
        )
    elif spec.engine == "sac" and spec.save == ("attention",) and kind not in ("eager", "sdpa", "flash_attention_2"):
        yield Finding(
            "warning",
            "nothing-to-save",
            f"{given.where}.save",
            f'"engine": "sac" is to save attention only, but {asked.where} is {shown(asked.value)}, which may run no '
            "operation that PyTorch's selective checkpointing knows; the first step stops then.",
            'Save ["linear", "attention"], use sdpa, or "engine": "rebuild".',
        )


def logits(facts: Facts) -> Iterator[Finding]:
    """Trap 12."""
    model, spec = facts.model, facts.spec
    if model is None or (spec is not None and spec.head != "full") or facts.option_on("use_liger_kernel"):
        return
    endings = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration", "ForPreTraining")
    classes = model.config.get("architectures")
    if isinstance(classes, list) and classes and not str(classes[0]).endswith(endings):
        return
    vocabulary = next((n for path, n in walk(model.config) if path[-1] == "vocab_size" and type(n) is int), None)
    batch, tokens = _batch(facts), _tokens(facts)
    if vocabulary is None or batch is None or tokens is None:
        return
    size = batch * tokens * vocabulary * (14 if _computes_in_16_bits(facts) else 16)
    memory = facts.device.memory_bytes if facts.device else None
    if size > 2 * GIB or (memory is not None and size > memory / 4):
        share = f", {format_percent(size / memory)} of the device" if memory else ""
        fix = f"{CHUNKS}; or take a smaller batch and accumulate."
        yield Finding(
            "note",
            "logits",
            f"{model.name}: vocab_size",
            f"Logits, their loss and gradients take up to {format_bytes(size)}{share} (batch {batch} x {tokens} tokens "
            f"x {vocabulary} entries), if a language-model head is trained. No policy on blocks can save that.",
            "Take a smaller batch and accumulate; the head cannot be taken in chunks where it is sharded."
            if facts.sharded
            else fix,
        )


def _batch(facts: Facts) -> int | None:
    found = facts.option("per_device_train_batch_size", "micro_batch_size")
    return facts.batch or positive_int(found)


def _tokens(facts: Facts) -> int | None:
    """Of the sequences that get logits."""
    names: tuple[str, ...] = ("max_length", "max_seq_length", "block_size", "sequence_len", "cutoff_len")
    if facts.model is not None and facts.model.config.get("is_encoder_decoder"):
        names = ("max_target_length", *names)
    return facts.tokens or positive_int(facts.option(*names))


def _computes_in_16_bits(facts: Facts) -> bool:
    by_launcher = (str(file.values.get("mixed_precision")) in ("bf16", "fp16") for file in facts.of(ACCELERATE))
    return facts.option_on("bf16") is not None or facts.option_on("fp16") is not None or any(by_launcher)


def blocks(facts: Facts) -> Iterator[Finding]:
    """Choices of blocks that this model does not have."""
    model, spec, given = facts.model, facts.spec, facts.given_kwargs
    if model is None or spec is None or given is None or spec.plan is not None or not model.stacks:
        return
    by_name = isinstance(spec.layers, tuple) or any(rule.stack for rule in spec.rules)
    if by_name and not model.named:
        return
    made = [Block(f"{name}.{index}", name, index, "block") for name, count in model.stacks for index in range(count)]
    try:
        make_plan(spec, made, "", model.name)
    except SpecError as error:
        for problem in error.problems:
            yield Finding("error", "blocks", given.where, f"{model.name}: {problem}", "Name blocks that the model has.")
    smallest = min(count for _, count in model.stacks)
    if spec.every_n_layers >= smallest > 1:
        yield Finding(
            "warning",
            "every-n-layers",
            f"{given.where}.every_n_layers",
            f"{spec.every_n_layers} leaves one block of {smallest} to be recomputed in a stack of {model.name}: memory "
            "hardly moves.",
            f"Use a number below {smallest}; 2 recomputes every second block.",
        )


def one_counter(facts: Facts) -> Iterator[Finding]:
    """Trap 15. With hf_ckpt every stack is counted by itself."""
    model, spec, given = facts.model, facts.spec, facts.given_kwargs
    if model is None or spec is None or given is None or facts.ours or len(model.stacks) < 2:
        return
    (first, count), every = model.stacks[0], spec.every_n_layers
    if every > 1 and count % every:
        yield Finding(
            "warning",
            "one-counter",
            f"{given.where}.every_n_layers",
            f"Without hf_ckpt, transformers counts through all stacks of {model.name} with one counter: after {count} "
            f"blocks of the {first} the next stack begins with block {-count % every}, not 0.",
            "Use hf_ckpt (add a policy), which counts each stack from 0.",
        )


def sharded(facts: Facts) -> Iterator[Finding]:
    """What needs whole parameters."""
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


def offload_nowhere(facts: Facts) -> Iterator[Finding]:
    """Without an accelerator hidden states are in host memory anyway."""
    spec, given = facts.spec, facts.given_kwargs
    if spec is None or given is None or not (spec.offload or "offload" in facts.policies):
        return
    on_cpu = facts.option_on("use_cpu", "no_cuda")
    for file in facts.of(ACCELERATE):
        use = file.setting("use_cpu")
        on_cpu = on_cpu or (use if use is not None and is_on(use.value) else None)
    if on_cpu is None and facts.device is not None and facts.device.name == "cpu":
        on_cpu = Setting("cpu", "--device")
    if on_cpu is not None:
        yield Finding(
            "warning",
            "offload-nowhere",
            given.where,
            f"Offloading moves hidden states from an accelerator to host memory, but training is on the CPU "
            f"({on_cpu.where}): nothing is moved.",
            "Use `policy: full`, or train on an accelerator.",
        )


def quantised(facts: Facts) -> Iterator[Finding]:
    """Trap 23."""
    found = facts.option_on("load_in_4bit", "load_in_8bit")
    for file in facts.of(TRAINING):
        for key in ("load_in_4bit", "load_in_8bit"):
            inner = file.setting("quantization_config", key)
            found = found or (inner if inner is not None and is_on(inner.value) else None)
    if found is not None:
        yield Finding(
            "note",
            "quantised",
            found.where,
            "PEFT's prepare_model_for_kbit_training switches checkpointing on by itself, with settings of its own.",
            "Call it with use_gradient_checkpointing=False; checkpointing then has one owner, the training arguments.",
        )


def routers(facts: Facts) -> Iterator[Finding]:
    """Trap 33. `selective` that saves linear layers keeps the routers' scores, so that the choice stays as it was."""
    model, spec = facts.model, facts.spec
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    found = (path for path, n in walk(model.config if model else {}) if path[-1] in names and is_positive(n) and n > 1)
    where = next(found, None)
    if model is None or spec is None or where is None:
        return
    saves = (spec.save, *(rule.save or spec.save for rule in spec.rules))
    if facts.policies <= {"none", "selective"} and all("linear" in save for save in saves):
        return
    unchecked = spec.determinism_check == "none"
    yield Finding(
        "warning",
        "routers",
        f"{model.name}: {'.'.join(where)}",
        "A mixture of experts can route a token elsewhere when its block is recomputed, where kernels are not "
        "deterministic: shapes differ, or gradients go to another expert"
        + (", and determinism_check is none, so nobody would notice." if unchecked else "."),
        'Use `policy: selective` with its default `save`, and leave determinism_check at "default".',
    )


def environment(facts: Facts) -> Iterator[Finding]:
    """Versions that hf_ckpt does not work with, and what is known of others."""
    for package, (first, beyond) in REQUIRED.items():
        version = facts.versions.get(package)
        wanted = f"{package} {first} or later" + (f", before {beyond}" if beyond else "")
        command = f"pip install '{package}>={first}" + (f",<{beyond}'" if beyond else "'")
        if version is None:
            yield Finding("error", "version", package, f"hf_ckpt needs {wanted}, and it is not installed.", command)
        elif is_before(version, first) or (beyond and not is_before(version, beyond)):
            yield Finding("error", "version", package, f"hf_ckpt needs {wanted}; {version} is installed.", command)
    version = facts.versions.get("deepspeed")
    if version is not None and not facts.files and is_at_most(version, LAST_DEEPSPEED_WITH_EMPTY_SHAPES):
        yield Finding(
            "note",
            "deepspeed",
            "deepspeed",
            f"DeepSpeed {version} cannot recompute frozen weights (LoRA) under ZeRO-3.",
            f"Install one after {LAST_DEEPSPEED_WITH_EMPTY_SHAPES} for that.",
        )


CHECKS: tuple[Check, ...] = (
    *(two_owners, reentrant, spec_problems, needs_hf_ckpt, kwargs_without_flag, flag_names),
    *(fsdp2_dropout, random_state_off, zero3_frozen, deepspeed_block),
    *(cuda_graphs, compiled_engine, prefix_tuning, cache, attention, logits),
    *(blocks, one_counter, sharded, offload_nowhere, quantised, routers, environment),
)


def diagnose(facts: Facts) -> tuple[Finding, ...]:
    """Everything that the checks find, errors first."""
    found = [finding for check in CHECKS for finding in check(facts)]
    return tuple(sorted(found, key=lambda finding: SEVERITIES.index(finding.severity)))


def to_dict(facts: Facts, findings: Sequence[Finding]) -> dict[str, Any]:
    """JSON-able: what was looked at, and what was found."""
    return {
        "files": {file.path: file.kind for file in facts.files},
        "model": facts.model.name if facts.model else None,
        "versions": dict(facts.versions),
        "findings": [finding.to_dict() for finding in findings],
    }
