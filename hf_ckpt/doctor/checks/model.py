"""Checks of what is asked against the model: its attention, head, stacks, adapters and experts."""

from __future__ import annotations

from collections.abc import Iterator

from hf_ckpt.doctor.facts import (
    ACCELERATE,
    CHUNKS,
    TRAINING,
    Facts,
    is_on,
    is_positive,
    key_of,
    positive_int,
    shown,
    walk,
)
from hf_ckpt.doctor.findings import Finding
from hf_ckpt.errors import SpecError
from hf_ckpt.planner.policies import make_plan
from hf_ckpt.spec.plan import Block
from hf_ckpt.units import GIB, format_bytes, format_percent


def prefix_tuning(facts: Facts) -> Iterator[Finding]:
    """Find prefix tuning, whose parameters lie in a cache that recomputed blocks do not see."""
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
    """Find `use_cache` without hf_ckpt, which would switch the cache off for each forward by itself."""
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
    """Find implementations of attention under which `selective` keeps too much, or SAC nothing at all."""
    spec, given = facts.spec, facts.given_kwargs
    asked = facts.option("attn_implementation")
    if spec is None or given is None or asked is None or "selective" not in facts.policies:
        return
    kind = str(asked.value).lower()
    # The softmax of eager attention is an operation like any other: its result, heads x tokens x tokens, is kept.
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
    """Find logits that are a large part of the memory, which no policy on blocks can save."""
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
    """Return the sequences of a micro-step, given or from the training arguments."""
    found = facts.option("per_device_train_batch_size", "micro_batch_size")
    return facts.batch or positive_int(found)


def _tokens(facts: Facts) -> int | None:
    """Return the length of the sequences that get logits: for an encoder-decoder, the target."""
    names: tuple[str, ...] = ("max_length", "max_seq_length", "block_size", "sequence_len", "cutoff_len")
    if facts.model is not None and facts.model.config.get("is_encoder_decoder"):
        names = ("max_target_length", *names)
    return facts.tokens or positive_int(facts.option(*names))


def _computes_in_16_bits(facts: Facts) -> bool:
    """Return whether the configs ask for a 16-bit type."""
    by_launcher = (str(file.values.get("mixed_precision")) in ("bf16", "fp16") for file in facts.of(ACCELERATE))
    return facts.option_on("bf16") is not None or facts.option_on("fp16") is not None or any(by_launcher)


def blocks(facts: Facts) -> Iterator[Finding]:
    """Find choices of blocks that this model does not have, or that leave almost nothing to recompute."""
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
    """Find `every_n_layers` on several stacks without hf_ckpt, which counts each stack by itself."""
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


def quantised(facts: Facts) -> Iterator[Finding]:
    """Find quantised weights: PEFT's preparation for them switches checkpointing on by itself."""
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
    """Find mixtures of experts whose routing is recomputed, and may choose other experts.

    In eager mode the choice is kept, but by PyTorch's selective checkpointing. `selective` that saves linear layers
    keeps the routers' scores, so that the choice stays as it was.
    """
    model, spec = facts.model, facts.spec
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    found = (path for path, n in walk(model.config if model else {}) if path[-1] in names and is_positive(n) and n > 1)
    where = next(found, None)
    if model is None or spec is None or where is None:
        return
    saves = (spec.save, *(rule.save or spec.save for rule in spec.rules))
    keeps_scores = facts.policies <= {"none", "selective"} and all("linear" in save for save in saves)
    by_sac = spec.engine == "sac" and "selective" in facts.policies
    if keeps_scores or not (by_sac or facts.compiled is not None):
        return
    unchecked = spec.determinism_check == "none"
    yield Finding(
        "warning",
        "routers",
        f"{model.name}: {'.'.join(where)}",
        "Under torch.compile, and by SAC, a mixture of experts can route a token elsewhere when its block is "
        "recomputed, where kernels are not deterministic: shapes differ, or gradients go to another expert"
        + (", and determinism_check is none, so nobody would notice." if unchecked else "."),
        'Use `policy: selective` with its default `save`, or eager mode, and leave determinism_check at "default".',
    )
