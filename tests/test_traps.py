"""What users of activation checkpointing hit, by its row in the list of traps; each docstring is the symptom."""

from __future__ import annotations

import copy
import io
import json
import logging
import pickle
import warnings

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin
from conftest import assert_same, enable, gradients, input_gradient_hooks, recomputed, step, without_cache
from peft import (
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
    get_peft_model,
    get_peft_model_state_dict,
    prepare_model_for_kbit_training,
)
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import HfArgumentParser, Trainer, TrainingArguments
from transformers.utils import logging as transformers_logging

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.engines import full
from hf_ckpt.errors import GraphCaptureError, HfCkptError, NoBlocksError, OwnerConflictError, SpecError
from hf_ckpt.install import _warn_eval_mode
from hf_ckpt.tiny import FAMILIES, tiny_batch, tiny_model

LLAMA_BLOCKS = [f"model.layers.{index}" for index in range(4)]
GENERATING = ("llama", "gpt2", "t5")


def disable(model):
    """Disable by the newest name."""
    getattr(model, compat.DISABLE_NAMES[-1])()


def lora(model, **keys):
    torch.manual_seed(1)
    return get_peft_model(
        model, LoraConfig(**{"r": 4, "target_modules": ["q_proj"], "init_lora_weights": False, **keys})
    )


def training_arguments(path, **keys):
    keys = {"max_steps": 1, "per_device_train_batch_size": 2, "report_to": [], "save_strategy": "no"} | keys
    return TrainingArguments(output_dir=str(path), use_cpu=True, disable_tqdm=True, **keys)


def dataset(family="llama"):
    batch = tiny_batch(family)
    return [{key: value[index] for key, value in batch.items()} for index in range(2)]


@pytest.fixture
def eval_warnings():
    """The warning about eval mode comes once a class and process: forget that it came."""
    _warn_eval_mode.cache_clear()
    yield
    _warn_eval_mode.cache_clear()


# --- rows 1 to 3: adapters, and hooks that others call ----------------------------------------------------------------


@pytest.mark.parametrize("order", ["enable first", "adapters first", "add_adapter", "enable, then add_adapter"])
@pytest.mark.parametrize(
    ("targets", "counts"),
    [
        (r".*SelfAttention\.(q|v)", (3, 3)),
        (r".*decoder\.block\.2.*\.(q|v)", (0, 1)),
        (r".*EncDecAttention\.(q|v)", (0, 3)),
    ],
    ids=["all layers", "last layer", "cross-attention"],
)
def test_row_01_every_adapter_trains(order, targets, counts):
    """LoRA: "element 0 of tensors does not require grad", or adapters that silently stay as they were."""
    config = LoraConfig(r=4, target_modules=targets, lora_dropout=0.1, init_lora_weights=False)

    def adapt(model):
        torch.manual_seed(1)
        if "add_adapter" not in order:
            return get_peft_model(model, config)
        model.add_adapter(config)
        return model.train()

    expected = step(adapt(tiny_model("t5", layers=3)), tiny_batch("t5"))
    assert all(gradient is not None for gradient in expected.values())
    model = tiny_model("t5", layers=3)
    if order.startswith("enable"):
        hf_ckpt.install(model)
        enable(model)
    model = adapt(model)
    hf_ckpt.install(model)
    enable(model)
    assert_same(expected, step(model, tiny_batch("t5")))
    names = recomputed(model)
    assert tuple(sum(name.startswith(stack) for name in names) for stack in ("encoder", "decoder")) == counts


def test_row_01_reentrant_is_refused_with_the_reason():
    """`use_reentrant: true` drops the gradients of adapters; it is what a bare call meant in older transformers."""
    model = tiny_model("llama")
    with pytest.raises(SpecError, match="reentrant checkpointing drops gradients of adapters"):
        hf_ckpt.install(model, {"use_reentrant": True})
    hf_ckpt.install(model)
    for name in compat.ENABLE_NAMES:
        with pytest.raises(SpecError, match="reentrant checkpointing drops gradients of adapters"):
            getattr(model, name)({"use_reentrant": True})


@pytest.mark.compat
def test_row_02_the_plan_survives_generation_in_trl():
    """The policy is silently replaced by plain full: TRL disables around generation and enables with its own kwargs."""
    model = tiny_model("llama")
    hf_ckpt.install(model, {"layers": "1"})
    enable(model)
    for again in ({"use_reentrant": False}, None, {}):
        disable(model)
        model.generate(tiny_batch("llama")["input_ids"][:, :4], max_new_tokens=2)
        enable(model, again)
        step(model, tiny_batch("llama"))
    assert recomputed(model) == ["model.layers.1"] * 3


@pytest.mark.compat
@pytest.mark.parametrize("kwargs", [{}, {"gradient_checkpointing_kwargs": {"use_reentrant": False}}], ids=str)
def test_row_02_the_plan_survives_kbit_preparation(kwargs):
    """PEFT's k-bit preparation enables on its own, with a bare call."""
    model = tiny_model("llama")
    hf_ckpt.install(model, {"layers": "0,3"})
    model.is_loaded_in_8bit = True  # all that PEFT looks at
    model = lora(prepare_model_for_kbit_training(model, **kwargs), target_modules=["q_proj", "v_proj"])
    step(model, tiny_batch("llama"))
    assert recomputed(model) == [LLAMA_BLOCKS[0], LLAMA_BLOCKS[3]]
    assert input_gradient_hooks(model.get_base_model()) == 0


@pytest.mark.compat
def test_row_02_the_plan_survives_trainer(tmp_path):
    """Trainer enables with its own defaults on every `train()`."""
    model = tiny_model("llama")
    hf_ckpt.install(model, {"layers": "2"})
    trainer = Trainer(model, training_arguments(tmp_path, gradient_checkpointing=True), train_dataset=dataset())
    trainer.train()
    assert recomputed(model) == [LLAMA_BLOCKS[2]]
    disable(model)
    trainer.train()
    assert recomputed(model) == [LLAMA_BLOCKS[2]] * 2


@pytest.mark.compat
def test_row_03_the_hook_is_where_every_caller_finds_it():
    """A hook on the wrong object is bypassed: calls on PeftModel, tuner and base model must all reach the plan."""
    model = lora(tiny_model("llama"))
    hf_ckpt.install(model)
    callers = (model, model.base_model, model.get_base_model())
    assert type(callers[0]) is not type(callers[1])
    for index, caller in enumerate(callers):
        for name in compat.ENABLE_NAMES:
            getattr(caller, name)({"layers": str(index)})
            assert list(hf_ckpt.describe(model).plan.active()) == [LLAMA_BLOCKS[index]]
    step(model, tiny_batch("llama"))
    assert recomputed(model) == [LLAMA_BLOCKS[2]]
    for caller in callers:
        getattr(caller, compat.DISABLE_NAMES[0])()
        assert not hf_ckpt.describe(model).enabled
        enable(model)


@pytest.mark.compat
@pytest.mark.parametrize("name", [name.replace("_enable", "") for name in compat.ENABLE_NAMES])
def test_row_03_trainer_passes_the_spec_on(tmp_path, name):
    """Keyword arguments are dropped on the way from TrainingArguments to the blocks, nested dicts first of all."""
    model = tiny_model("t5")
    hf_ckpt.install(model)
    spec = {"policy": "full", "layers": {"encoder": "0", "decoder": "1-2"}, "preserve_rng_state": True}
    arguments = training_arguments(tmp_path, **{name: True, f"{name}_kwargs": spec})
    Trainer(model, arguments, train_dataset=dataset("t5")).train()
    assert recomputed(model) == ["encoder.block.0", "decoder.block.1", "decoder.block.2"]
    assert hf_ckpt.describe(model).spec == spec


# --- row 5: dropout, and a second owner ------------------------------------------------------------------------------


def test_row_05_dropout_is_drawn_once():
    """The loss is equal and the gradients belong to another sample: dropout was drawn again at recomputation."""
    expected = step(lora(tiny_model("llama"), lora_dropout=0.1), tiny_batch("llama"))
    for preserve in ("auto", True, False):
        model = tiny_model("llama")
        hf_ckpt.install(model, {"preserve_rng_state": preserve})
        enable(model)
        model = lora(model, lora_dropout=0.1)  # the only dropout comes after the plan
        got = step(model, tiny_batch("llama"))
        assert torch.equal(expected["loss"], got["loss"])
        assert recomputed(model) == LLAMA_BLOCKS
        if preserve is False:  # said so by the user: this is the trap itself, and the comparison sees it
            with pytest.raises(AssertionError, match="differs"):
                assert_same(expected, got)
        else:
            assert_same(expected, got)


@pytest.mark.parametrize("of_the_process", [False, True], ids=["model", "process"])
def test_row_05_accelerates_own_checkpointing_is_a_second_owner(monkeypatch, everywhere, of_the_process):
    """accelerate's FSDP plugin checkpoints too, without preserving random state."""
    model = tiny_model("llama")
    everywhere(None if of_the_process else model)
    for owns in (True, False):
        plugin = FullyShardedDataParallelPlugin(activation_checkpointing=owns)
        monkeypatch.setattr(AcceleratorState, "_shared_state", {"fsdp_plugin": plugin})
        if owns:
            with pytest.raises(OwnerConflictError, match="fsdp_activation_checkpointing: true"):
                enable(model)
            assert not any(block.gradient_checkpointing for block in model.model.layers)
        else:
            enable(model)
            assert hf_ckpt.describe(model).enabled


def test_row_05_a_wrapper_put_around_blocks_later_is_noticed():
    """What accelerate's plugin does at `prepare`, after the plan was enabled."""
    model = tiny_model("llama")
    hf_ckpt.install(model)
    enable(model)
    model.model.layers[0] = checkpoint_wrapper(model.model.layers[0])
    with pytest.raises(OwnerConflictError, match="needs one owner"):
        enable(model)


# --- rows 7, 10, 11: generation, caches, reentrant -------------------------------------------------------------------


@pytest.mark.compat
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("family", GENERATING)
def test_row_07_generate_in_train_mode(family, dropout):
    """generate() in train mode with checkpointing on gives other tokens, silently: the cache is lost."""
    model = tiny_model(family, dropout=dropout)
    prompt = {"input_ids": tiny_batch(family)["input_ids"][:, :5]}

    def generate(**keys):
        torch.manual_seed(7)
        return model.generate(**prompt, max_new_tokens=8, min_new_tokens=8, output_logits=True, **keys)

    def tokens_and_logits():
        done = generate(return_dict_in_generate=True, do_sample=False)
        return done.sequences, torch.stack(done.logits)

    sequences, logits = tokens_and_logits()
    hf_ckpt.install(model)
    enable(model)
    got_sequences, got_logits = tokens_and_logits()
    assert torch.equal(sequences, got_sequences)
    assert torch.equal(logits, got_logits)  # tokens of a random model could agree by chance
    with hf_ckpt.paused(model):
        assert torch.equal(sequences, tokens_and_logits()[0])
    assert sum(hf_ckpt.describe(model).forwards.values()) == 0
    step(model, tiny_batch(family))
    assert len(recomputed(model)) == len(hf_ckpt.describe(model).plan.actions)


@pytest.mark.compat
@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_row_07_a_loop_shaped_like_grpo(context, paused):
    """Generate, score under no_grad, then train: all on one model in train mode."""

    def log_probabilities(model, sequences):
        logits = model(input_ids=sequences, use_cache=False).logits[:, :-1].log_softmax(-1)
        return logits.gather(-1, sequences[:, 1:, None]).squeeze(-1)

    def loop(model, pause):
        found = []
        torch.manual_seed(7)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            with pause(model):
                sequences = model.generate(
                    tiny_batch("llama")["input_ids"][:, :4], max_new_tokens=6, min_new_tokens=6, do_sample=True
                )
            with context():
                old = log_probabilities(model, sequences)
            new = log_probabilities(model, sequences)
            optimizer.zero_grad()
            (new - old.clone()).exp().mean().neg().backward()
            found.append({"sequences": sequences, "loss": old.clone(), **gradients(model)})
            optimizer.step()
        return found

    def no_pause(model):
        return torch.enable_grad()

    expected = loop(tiny_model("llama", dropout=0.1), no_pause)
    model = tiny_model("llama", dropout=0.1)
    hf_ckpt.install(model)
    enable(model)
    got = loop(model, hf_ckpt.paused if paused else no_pause)
    for before, after in zip(expected, got, strict=True):
        assert_same(before, after)
    assert recomputed(model) == [name for name in LLAMA_BLOCKS for _ in range(2)]  # only the trained forward counts
    assert set(hf_ckpt.describe(model).forwards.values()) == {2}


@pytest.mark.compat
@pytest.mark.parametrize("family", GENERATING)
def test_row_10_no_block_sees_a_cache(family):
    """The KV cache is written twice, and recomputed shapes differ."""
    model = tiny_model(family)
    expected = step(model, tiny_batch(family))
    seen = []

    def look(module, args, kwargs):
        seen.extend(value for value in (*args, *kwargs.values()) if compat.is_cache(value))

    for module in model.modules():
        if "Attention" in type(module).__name__:
            module.register_forward_pre_hook(look, with_kwargs=True)
    model.zero_grad()
    model(**tiny_batch(family), use_cache=True).loss.backward()
    assert seen  # without hf_ckpt there is a cache to see
    seen.clear()
    hf_ckpt.install(model)
    enable(model)
    for asked in ({}, {"use_cache": True}):
        model.zero_grad()
        loss = model(**tiny_batch(family), **asked).loss
        loss.backward()
        assert_same(expected, {"loss": loss.detach(), **gradients(model)}, str(asked))
    assert not seen
    assert set(hf_ckpt.describe(model).recomputed.values()) == {2}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_row_10_a_cache_given_by_the_caller_is_not_written_twice(family):
    """Someone passes a cache of their own into a training step: planned blocks leave it alone."""
    model = tiny_model(family)
    expected = step(model, tiny_batch(family))
    hf_ckpt.install(model)
    enable(model)
    cache = transformers.DynamicCache()
    model.zero_grad()
    loss = model(**tiny_batch(family), past_key_values=cache, use_cache=True).loss
    loss.backward()
    assert_same(expected, {"loss": loss.detach(), **gradients(model)})
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_row_10_prefix_tuning_is_refused(family):
    """Prefix tuning trains keys and values that come as a cache: dropped, they stay untrained, or shapes differ."""
    model = get_peft_model(tiny_model(family), PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"))
    model(**tiny_batch(family)).loss.backward()
    assert all(gradient.any() for gradient in gradients(model).values())  # it trains without hf_ckpt

    def train():
        hf_ckpt.install(model)
        enable(model)
        model(**tiny_batch(family)).loss.backward()

    with pytest.raises(HfCkptError, match=r"past_key_values|cache"):
        train()


@pytest.mark.compat
@pytest.mark.parametrize(
    "asked", [None, {}, {"use_reentrant": False}, {"determinism_check": "none"}, {"preserve_rng_state": True}], ids=str
)
def test_row_11_never_reentrant(monkeypatch, asked):
    """`{}` or one unrelated key means reentrant to torch, which then ignores keyword inputs and frozen inputs."""
    calls = []
    real = full.checkpoint

    def recorder(function, *args, **kwargs):
        calls.append(kwargs)
        return real(function, *args, **kwargs)

    monkeypatch.setattr(full, "checkpoint", recorder)
    model = tiny_model("llama")
    hf_ckpt.install(model)
    enable(model, asked)
    step(model, tiny_batch("llama"))
    assert len(calls) == 4
    assert all(call["use_reentrant"] is False for call in calls)


# --- rows 15, 18, 19: counting, hooks, serialisation -----------------------------------------------------------------


@pytest.mark.compat
@pytest.mark.parametrize(
    "asked", [{"every_n_layers": 2}, {"policy": "full", "every_n_layers": 2, "offload": False}], ids=str
)
def test_row_15_every_n_layers_counts_each_stack(asked):
    """T5, n=2: one counter through both stacks takes encoder 0 and 2, then decoder 1."""
    model = tiny_model("t5", layers=3)
    hf_ckpt.install(model)
    enable(model, asked)
    step(model, tiny_batch("t5"))
    assert recomputed(model) == [f"{stack}.block.{index}" for stack in ("encoder", "decoder") for index in (0, 2)]
    getattr(model, compat.ENABLE_NAMES[-1])(None, every_n_layers=3)  # as Trainer passes it, beside the kwargs
    assert list(hf_ckpt.describe(model).plan.active()) == ["encoder.block.0", "decoder.block.0"]


@pytest.mark.compat
@pytest.mark.parametrize("every", [0, -1, 1.5, "2", None])
def test_row_15_every_n_layers_is_validated(every):
    """0 divides by zero deep inside; -1 and 1.5 are accepted."""
    with pytest.raises(SpecError, match="`every_n_layers` must be a whole number of at least 1"):
        hf_ckpt.install(tiny_model("llama"), {"every_n_layers": every})


@pytest.mark.compat
@pytest.mark.parametrize("order", ["adapters first", "enable first", "add_adapter", "transformers first"])
def test_row_18_a_frozen_prefix_does_not_pay(order):
    """The embedding hook makes layer 0 require gradients, so frozen blocks save, recompute and run backward."""
    model = tiny_model("llama")
    if order == "transformers first":
        enable(model, {"use_reentrant": False})
    if order in ("enable first", "transformers first"):
        hf_ckpt.install(model)
        enable(model)
    keys = {"layers_to_transform": [2]}
    if order == "add_adapter":
        model.add_adapter(LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, **keys))
        model.train()
        wrapped = model
    else:
        wrapped = lora(model, **keys)
    hf_ckpt.install(wrapped)
    for _ in range(3):
        enable(wrapped)
    assert input_gradient_hooks(model) == 0
    inputs = {}
    for index, layer in enumerate(model.model.layers):
        layer.register_forward_pre_hook(lambda module, args, index=index: inputs.update({index: args[0].requires_grad}))
    step(wrapped, tiny_batch("llama"))
    assert inputs == {0: False, 1: False, 2: False, 3: True}
    assert recomputed(wrapped) == LLAMA_BLOCKS[2:]
    assert hf_ckpt.describe(wrapped).frozen == tuple(LLAMA_BLOCKS[:2])


def test_row_18_hooks_do_not_pile_up():
    """Three enables leave three embedding hooks; the first two have lost their handles."""
    model = tiny_model("llama")
    hf_ckpt.install(model)
    for _ in range(3):
        enable(model)
        model.enable_input_require_grads()  # as PEFT and TRL call it
    assert input_gradient_hooks(model) == 0
    disable(model)
    hf_ckpt.uninstall(model)
    assert input_gradient_hooks(model) == 0


def test_row_18_hooks_that_lost_their_handle_before_install():
    """Scripts call `enable_input_require_grads` and enable on top of it; of two hooks only one still has a handle."""
    model = tiny_model("llama")
    embedding = model.get_input_embeddings()
    model.enable_input_require_grads()
    model.enable_input_require_grads()
    before = dict(embedding._forward_hooks)
    assert len(before) == 2
    hf_ckpt.install(model)
    enable(model)
    assert len(embedding._forward_hooks) == 0
    hf_ckpt.uninstall(model)
    assert len(embedding._forward_hooks) == 2


SPEC = {"policy": "full", "layers": {"encoder": "0-1", "decoder": "-1"}, "determinism_check": "default"}


@pytest.mark.parametrize("name", [name.replace("_enable", "_kwargs") for name in compat.ENABLE_NAMES])
def test_row_19_training_arguments_with_a_spec_serialise(tmp_path, name):
    """A callable in the kwargs breaks `to_json_string`, which the TensorBoard callback calls."""
    arguments = training_arguments(tmp_path, **{name: SPEC})
    assert json.loads(arguments.to_json_string())[name] == SPEC
    assert arguments.to_dict()[name] == SPEC
    buffer = io.BytesIO()
    torch.save(arguments, buffer)
    buffer.seek(0)
    assert getattr(torch.load(buffer, weights_only=False), name) == SPEC
    assert getattr(copy.deepcopy(arguments), name) == SPEC


@pytest.mark.parametrize("name", [name.replace("_enable", "_kwargs") for name in compat.ENABLE_NAMES])
def test_row_19_a_nested_spec_on_the_command_line(tmp_path, name):
    """The whole spec fits into one flag of an unmodified script."""
    words = ["--output_dir", str(tmp_path), "--use_cpu", "--report_to", "none", f"--{name}", json.dumps(SPEC)]
    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(words)
    assert getattr(arguments, name) == SPEC
    model = tiny_model("t5")
    hf_ckpt.install(model)
    enable(model, getattr(arguments, name))
    assert list(hf_ckpt.describe(model).plan.active()) == ["encoder.block.0", "encoder.block.1", "decoder.block.3"]


def through_pickle(model):
    return pickle.loads(pickle.dumps(model))


def through_torch(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.compat
@pytest.mark.parametrize("through", [copy.deepcopy, through_pickle, through_torch])
@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "peft"])
def test_row_19_an_enabled_model_copies_and_pickles(through, wrapped):
    """An enabled model no longer pickles; or its copy drives the blocks of the original."""
    model = tiny_model("llama")
    hf_ckpt.install(model, {"layers": "0,2"})
    enable(model)
    if wrapped:
        model = lora(model)
    expected = step(model, tiny_batch("llama"))
    model.zero_grad()
    twin = through(model)
    assert_same(expected, step(twin, tiny_batch("llama")))
    assert recomputed(twin) == [LLAMA_BLOCKS[0], LLAMA_BLOCKS[0], LLAMA_BLOCKS[2], LLAMA_BLOCKS[2]]  # counts come along
    assert recomputed(model) == [LLAMA_BLOCKS[0], LLAMA_BLOCKS[2]]  # the original's did not move
    enable(twin, {"layers": "1"})
    hf_ckpt.uninstall(model)
    step(twin, tiny_batch("llama"))
    assert recomputed(twin) == [LLAMA_BLOCKS[1]]
    disable(twin)
    hf_ckpt.uninstall(twin)
    assert_same(expected, step(twin, tiny_batch("llama")))


def test_row_19_a_disabled_model_pickles_too():
    """Between enable calls the installation is only a record."""
    model = tiny_model("llama")
    hf_ckpt.install(model, {"layers": "1"})
    enable(model)
    disable(model)
    twin = through_pickle(model)
    assert not hf_ckpt.describe(twin).enabled
    enable(twin)
    step(twin, tiny_batch("llama"))
    assert recomputed(twin) == [LLAMA_BLOCKS[1]]


# --- rows 21 and 22: what blocks hand to each other -------------------------------------------------------------------


def test_row_21_only_t5_blocks_are_driven():
    """T5's attention modules carry the flag too, and would be checkpointed inside a checkpointed block."""
    model = tiny_model("t5")
    carriers = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
    assert len(carriers) > 8  # there is something to leave alone
    hf_ckpt.install(model)
    enable(model)
    driven = {type(module).__name__ for module in carriers if module.gradient_checkpointing}
    assert driven == {"T5Block"}


@pytest.mark.parametrize(
    "layers", [{"decoder": "0-3"}, {"decoder": "1-3"}, {"encoder": "1-3"}, {"encoder": "0"}], ids=str
)
def test_row_21_the_shared_position_bias_crosses_the_plan(layers):
    """Block 0 returns the bias and the others add it: its gradient passes through planned and kept blocks."""
    model = tiny_model("t5", dropout=0.1)
    expected = step(model, tiny_batch("t5"))
    assert all(gradient.any() for name, gradient in expected.items() if "relative_attention_bias" in name)
    assert all(gradient.any() for name, gradient in expected.items() if name.startswith("encoder.block"))
    hf_ckpt.install(model, {"layers": layers})
    enable(model)
    assert_same(expected, step(model, tiny_batch("t5")))
    (stack,) = layers
    assert len(recomputed(model)) > 0
    assert all(name.startswith(stack) for name in recomputed(model))


@pytest.mark.parametrize("family", FAMILIES)
def test_row_22_hidden_states_in_the_loss(family):
    """Hidden states are lost or shifted, or their gradients are."""
    model = tiny_model(family, dropout=0.1)

    def outputs():
        model.zero_grad()
        torch.manual_seed(7)
        out = model(**without_cache(model, tiny_batch(family)), output_hidden_states=True)
        states = [*(out.encoder_hidden_states or ()), *(out.decoder_hidden_states or ())] if family == "t5" else None
        states = states or list(out.hidden_states)
        loss = out.loss + states[2].square().mean() + states[-2].sin().mean()
        loss.backward()
        return {"loss": loss.detach(), **gradients(model)}, [state.detach() for state in states]

    expected, states = outputs()
    assert len(states) == (10 if family == "t5" else 5)
    with pytest.raises(AssertionError, match="differs"):  # the hidden states do take part in the loss
        assert_same(expected, step(model, tiny_batch(family)))
    hf_ckpt.install(model)
    enable(model)
    got, got_states = outputs()
    assert_same(expected, got)
    assert all(torch.equal(one, other) for one, other in zip(states, got_states, strict=True))
    assert set(hf_ckpt.describe(model).recomputed.values()) == {1}


@pytest.mark.parametrize("family", FAMILIES)
def test_row_22_attentions_in_the_loss(family):
    """Attention weights come out of the middle of a block."""
    model = tiny_model(family, attention="eager")

    def outputs():
        model.zero_grad()
        out = model(**without_cache(model, tiny_batch(family)), output_attentions=True)
        found = out.decoder_attentions if family == "t5" else out.attentions
        loss = out.loss + found[1].square().sum()
        loss.backward()
        return {"loss": loss.detach(), **gradients(model)}, [weights.detach() for weights in found]

    expected, weights = outputs()
    assert len(weights) == 4
    hf_ckpt.install(model)
    enable(model)
    got, got_weights = outputs()
    assert_same(expected, got)
    assert all(torch.equal(one, other) for one, other in zip(weights, got_weights, strict=True))
    assert set(hf_ckpt.describe(model).recomputed.values()) == {1}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_row_22_gpt2_cross_attention(attention):
    """The encoder's states reach GPT-2's cross-attention, and gradients go back to the encoder."""
    model = tiny_model("gpt2", add_cross_attention=True, attention=attention, dropout=0.1)
    states = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])

    def outputs():
        encoder = states.clone().requires_grad_(True)
        got = step(model, {**tiny_batch("gpt2"), "encoder_hidden_states": encoder, "encoder_attention_mask": mask})
        return {**got, "encoder": encoder.grad}

    expected = outputs()
    assert expected["encoder"][0].any()
    hf_ckpt.install(model)
    enable(model)
    assert_same(expected, outputs())
    assert len(recomputed(model)) == 4


def test_row_22_bert_as_a_decoder():
    """BERT with causal masks, cross-attention and a cache of its own."""
    config = copy.deepcopy(tiny_model("bert").config)
    config.is_decoder = config.add_cross_attention = True
    config.hidden_dropout_prob = 0.1
    torch.manual_seed(0)
    model = transformers.BertLMHeadModel(config).train()
    states = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    batch = {**tiny_batch("llama"), "encoder_hidden_states": states}
    expected = step(model, batch)
    hf_ckpt.install(model)
    enable(model)
    assert_same(expected, step(model, batch))
    assert len(recomputed(model)) == 4


# --- rows 24 to 26 ----------------------------------------------------------------------------------------------------


def test_row_24_eval_mode_with_gradients_is_said_once(eval_warnings, caplog):
    """Adapters trained in eval mode run out of memory: blocks are checkpointed in train mode only."""
    model = tiny_model("llama")
    expected = step(model, tiny_batch("llama"))
    hf_ckpt.install(model)
    enable(model)
    with caplog.at_level(logging.WARNING, "hf_ckpt"):
        step(model, tiny_batch("llama"))
        assert not caplog.records
        model.eval()
        for _ in range(2):
            assert_same(expected, step(model, tiny_batch("llama")))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "LlamaModel runs in eval mode with gradients on" in caplog.text
    assert recomputed(model) == LLAMA_BLOCKS  # from the step in train mode


@pytest.mark.parametrize("training", [True, False])
def test_row_24_evaluation_neither_warns_nor_recomputes(eval_warnings, caplog, training):
    """Validation in train mode recomputes, or warns."""
    model = tiny_model("llama").train(training)
    hf_ckpt.install(model)
    enable(model)
    with torch.no_grad():
        model(**tiny_batch("llama"))
    with torch.inference_mode():
        model(**tiny_batch("llama"))
    model.requires_grad_(False).eval()(**tiny_batch("llama"))  # a frozen model has nothing to train
    assert not caplog.records
    assert sum(hf_ckpt.describe(model).forwards.values()) == 0


@pytest.mark.compat
@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_row_25_two_steps_without_a_warning(family, wrapped, tmp_path, caplog, transformers_log):
    """`use_cache=True` is incompatible, every step; and the saved config keeps `use_cache=False`."""
    model = tiny_model(family, dropout=0.1)
    trained = model
    if wrapped:
        targets = {"llama": "q_proj", "gpt2": "c_attn", "bert": "query", "t5": "q"}[family]
        trained = lora(model, target_modules=[targets], fan_in_fan_out=family == "gpt2")

    def two_steps():
        """What was said by Python's warnings and transformers' logger, each message as if for the first time."""
        transformers_logging.get_logger("transformers.any").warning_once.__func__.cache_clear()
        transformers_log.clear()
        optimizer = torch.optim.SGD([parameter for parameter in trained.parameters() if parameter.requires_grad])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for name in compat.ENABLE_NAMES if installed else ():
                getattr(trained, name)({"policy": "full"})
            for _ in range(2):
                trained(**tiny_batch(family)).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        return [str(warning.message) for warning in caught], [record.getMessage() for record in transformers_log]

    installed = False
    assert two_steps() == ([], [])  # stock; transformers also completes BERT's config here
    config, generation = model.config.to_dict(), copy.deepcopy(getattr(model, "generation_config", None))
    with caplog.at_level(logging.WARNING, "hf_ckpt"):
        hf_ckpt.install(trained)
        installed = True
        assert two_steps() == ([], [])
    assert not [record for record in caplog.records if record.name.startswith("hf_ckpt")]
    assert set(hf_ckpt.describe(trained).recomputed.values()) == {2}
    assert model.config.to_dict() == config
    assert getattr(model, "generation_config", None) == generation
    if not wrapped:
        model.save_pretrained(tmp_path)
        saved = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
        assert saved.get("use_cache", True) is True
        assert not [key for key in saved if "checkpoint" in key or "hf_ckpt" in key]


class RemoteBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden_states):
        return hidden_states + self.linear(hidden_states).tanh()


class RemoteCheckpointableBlock(compat.GradientCheckpointingLayer):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden_states):
        return hidden_states + self.linear(hidden_states).tanh()


class RemoteConfig(transformers.PretrainedConfig):
    model_type = "from_the_hub"


class RemoteModel(transformers.PreTrainedModel):
    """A model with code of its own, written against the format of 2022."""

    config_class = RemoteConfig
    supports_gradient_checkpointing = True

    def __init__(self, config, block_class=RemoteBlock):
        super().__init__(config)
        self.layers = nn.ModuleList(block_class() for _ in range(3))
        self.post_init()

    def _init_weights(self, module):
        """Nothing to do: linear layers start themselves."""

    def _set_gradient_checkpointing(self, module, value=False):
        if isinstance(module, RemoteModel):
            module.gradient_checkpointing = value

    def forward(self, hidden_states):
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return hidden_states


def test_row_26_remote_code_without_blocks_is_an_error_with_the_families():
    """Remote code in the old format: enabled without an error, and nothing is checkpointed."""
    model = RemoteModel(RemoteConfig())
    with pytest.raises(NoBlocksError, match="no blocks built on GradientCheckpointingLayer") as caught:
        hf_ckpt.install(model)
    assert "llama: llama, mistral" in str(caught.value)
    assert "_hf_ckpt" not in vars(model)


def test_row_26_remote_code_with_blocks_is_generic(caplog):
    """The same format over blocks that can be driven: they are, and the family is said to be unknown."""
    model = RemoteModel(RemoteConfig(), RemoteCheckpointableBlock).train()
    inputs = torch.randn(2, 8)
    with caplog.at_level(logging.WARNING, "hf_ckpt"):
        hf_ckpt.install(model)
    assert "3 checkpointable blocks found, used as family `generic`" in caplog.text
    enable(model)
    model(inputs).sum().backward()
    assert recomputed(model) == ["layers.0", "layers.1", "layers.2"]


# --- rows 30, 31, 35 --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_row_30_state_dict_keys(family, tmp_path):
    """Keys get a `_checkpoint_wrapped_module.` inside, and the checkpoint loads nowhere else."""
    model = tiny_model(family)
    before = model.state_dict()
    names = [name for name, _ in model.named_modules()]
    hf_ckpt.install(model)
    enable(model)
    step(model, tiny_batch(family))
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert [name for name, _ in model.named_modules()] == names
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert list(loaded.state_dict()) == list(before)
    assert all(torch.equal(value, before[name]) for name, value in loaded.state_dict().items())
    model.load_state_dict(before)


def test_row_30_adapter_keys(tmp_path):
    """The same with PEFT, saved and loaded."""
    stock = lora(tiny_model("llama"))
    model = tiny_model("llama")
    hf_ckpt.install(model)
    enable(model)
    model = lora(model)
    step(model, tiny_batch("llama"))
    assert list(model.state_dict()) == list(stock.state_dict())
    wanted = get_peft_model_state_dict(stock)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(tiny_model("llama"), tmp_path)
    got = get_peft_model_state_dict(loaded)
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("preserve", ["auto", True, False])
def test_row_31_graph_capture(monkeypatch, preserve):
    """Random state cannot be read while a CUDA graph is captured; the error comes from deep inside the generator."""
    model = tiny_model("llama")
    expected = step(model, tiny_batch("llama"))
    hf_ckpt.install(model, {"preserve_rng_state": preserve})
    enable(model)
    monkeypatch.setattr(compat, "is_capturing", lambda: True)
    if preserve is False:
        assert_same(expected, step(model, tiny_batch("llama")))
        assert recomputed(model) == LLAMA_BLOCKS
    else:
        with pytest.raises(GraphCaptureError, match=r"block 'model.layers.0' preserves random state"):
            step(model, tiny_batch("llama"))
        with torch.no_grad():
            model(**tiny_batch("llama"))  # nothing is preserved where nothing is recomputed


@pytest.mark.parametrize(
    ("asked", "near"),
    [
        ({"determinism_chek": "none"}, "determinism_check"),
        ({"preserve_rng": True}, "preserve_rng_state"),
        ({"every_n_layer": 2}, "every_n_layers"),
        ({"use_rentrant": False}, "use_reentrant"),
        ({"ploicy": "full"}, "policy"),
    ],
)
def test_row_35_misspelt_keys(asked, near):
    """Misspelt kwargs are accepted in silence."""
    model = tiny_model("llama")
    with pytest.raises(SpecError, match=f"did you mean `{near}`"):
        hf_ckpt.install(model, asked)
    hf_ckpt.install(model)
    for name in compat.ENABLE_NAMES:
        with pytest.raises(SpecError, match=f"did you mean `{near}`"):
            getattr(model, name)(asked)
    assert not hf_ckpt.describe(model).enabled
