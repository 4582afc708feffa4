"""What users of activation checkpointing hit, by its row in the list of traps; each docstring is the symptom."""

from __future__ import annotations

import ast
import copy
import functools
import io
import json
import logging
import pickle
import warnings
from pathlib import Path

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
from test_callback import FLAG, StopAt, metrics, trainer
from test_offload import HIDDEN, Delayed
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import HfArgumentParser, Trainer, TrainingArguments
from transformers.utils import logging as transformers_logging

import hf_ckpt
from hf_ckpt import autoplan, callback, compat
from hf_ckpt.blueprint import blueprint_of
from hf_ckpt.budgets import plan_of_least, plan_within
from hf_ckpt.cli import main
from hf_ckpt.cost import Step, trace_costs
from hf_ckpt.devices import DEVICES
from hf_ckpt.engines import full, offload, values
from hf_ckpt.engines.offload import Mover
from hf_ckpt.errors import (
    GraphCaptureError,
    HfCkptError,
    InfeasibleError,
    InPlaceError,
    NoBlocksError,
    OwnerConflictError,
    SpecError,
)
from hf_ckpt.install import _warn_eval_mode, installation, trial
from hf_ckpt.measure import LiveBytes
from hf_ckpt.moves import MOVES, with_moves
from hf_ckpt.plan import KEEP
from hf_ckpt.timeline import worst_timeline
from hf_ckpt.tiny import FAMILIES, tiny_batch, tiny_model
from hf_ckpt.units import format_bytes

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


# --- row 12: logits ---------------------------------------------------------------------------------------------------


def large_vocabulary(**keys):
    return tiny_model("llama", layers=2, hidden=64, attention="sdpa", vocab_size=4000, **keys)


@pytest.mark.compat
def test_row_12_a_budget_that_the_logits_break_says_so():
    """Memory does not move, whatever is done to the blocks: the logits are the peak."""
    model, batch = large_vocabulary(), tiny_batch("llama", batch=4, tokens=256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    hf_ckpt.install(model)
    enable(model, {"policy": "budget", "budget": "1MiB"})
    with pytest.raises(InfeasibleError, match="no plan fits") as refused:
        step(model, batch)
    (work,) = (size for name, size in refused.value.parts.items() if name.startswith("work of head and loss"))
    assert work >= 2 * 4 * 256 * 4000 * 4  # the logits and what their loss makes of them
    (hint,) = (hint for hint in refused.value.hints if "the head and its loss are the peak" in hint)
    assert format_bytes(work) in hint
    assert '("head": "auto")' in hint
    del optimizer  # that the remedy is one: test_autoplan.py


@pytest.mark.parametrize(("vocabulary", "said"), [(4000, True), (64, False)])
def test_row_12_the_plan_of_a_config_says_so(vocabulary, said, tmp_path, capsys):
    """A plan fits, and takes nothing off the peak."""
    keys = {"layers": 2, "hidden": 64, "vocab_size": vocabulary}
    tiny_model("llama", **keys).config.to_json_file(tmp_path / "config.json", use_diff=False)
    words = ["plan", str(tmp_path), "--batch", "4", "--seq", "256", "--optimizer", "sgd", "--device", "h100"]
    assert main(words) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert ("the head and its loss are the peak" in shown) == said
    assert "full, head in chunks" in shown


class Meter:
    """Finds the same peak always."""

    source, exact = "test allocator", True

    def __init__(self, peak):
        self.peak = peak

    def reset(self):
        pass

    def peak_bytes(self):
        return self.peak

    def reserved_bytes(self):
        return None


LOGITS = 2 * 12 * 320 * 4  # of test_callback's rows


@pytest.mark.parametrize(
    ("spec", "peak", "share", "said"),
    [
        ({"policy": "full"}, 3 * LOGITS, 1 / 3, True),
        ({"policy": "selective", "layers": "0"}, 3 * LOGITS, 1 / 3, True),
        ({"policy": "full"}, 5 * LOGITS, 1 / 5, False),
        ({"policy": "none"}, 3 * LOGITS, 1 / 3, False),
        ({"policy": "full", "head": 6}, 3 * LOGITS, 1 / 12, False),  # 6 of 24 tokens at a time
    ],
    ids=str,
)
def test_row_12_the_callback_says_so_once(spec, peak, share, said, tmp_path, monkeypatch, caplog):
    """Checkpointing is on, and memory is as before; nobody looks at `memory/head_share`."""
    callback._warn_head.cache_clear()
    monkeypatch.setattr(callback, "peak_meter", lambda: Meter(peak))
    with caplog.at_level(logging.WARNING, "hf_ckpt"):
        trainer(tmp_path, max_steps=3, **{f"{FLAG}_kwargs": spec}).train()
    assert [row["memory/head_share"] for row in metrics(tmp_path)] == [pytest.approx(share)] * 3
    messages = [record.getMessage() for record in caplog.records if "the logits of" in record.getMessage()]
    assert len(messages) == said
    if said:
        assert "LlamaForCausalLM alone are 33 % of the peak (30.00 KiB)" in messages[0]
        assert '"head": "auto"' in messages[0]


# --- row 13: selective that is full -----------------------------------------------------------------------------------

SAVES = (["linear", "attention"], ["attention"], ["linear"])
SCORES = ("_softmax", "_safe_softmax", "_scaled_dot_product_flash_attention_for_cpu")


class Counting(TorchDispatchMode):
    """How often attention is computed, forward."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._schema.name.removeprefix("aten::") in SCORES
        return func(*args, **(kwargs or {}))


def attention_in_backward(model, batch):
    """The step's gradients, and how often attention was computed in its backward."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(7)
    loss = model(**without_cache(model, batch)).loss
    with Counting() as counting:
        loss.backward()
    return {"loss": loss.detach(), **gradients(model)}, counting.count


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_row_13_attention_is_not_run_again(family, attention, dropout):
    """`selective` finds no attention to save (on the CPU, eager, with dropout) and silently recomputes everything."""
    model = tiny_model(family, layers=2, attention=attention, dropout=dropout)
    batch = tiny_batch(family)
    expected, count = attention_in_backward(model, batch)
    assert count == 0
    hf_ckpt.install(model)
    blocks = 4 if family == "t5" else 2
    for engine in ("rebuild", "sac"):
        for save in (["linear", "attention"], ["attention"]):
            enable(model, {"policy": "selective", "save": save, "engine": engine})
            got, count = attention_in_backward(model, batch)
            assert_same(expected, got, f"{engine} {save}")
            assert count == 0, (engine, save)
            regions = installation(model).regions.values()
            if engine == "sac":
                assert all(
                    region.matched >= (2 if save == ["attention"] and attention == "eager" else 1) for region in regions
                )
                assert set(hf_ckpt.describe(model).recomputed.values()) == {1}
            else:
                assert not {"attention"} & hf_ckpt.describe(model).dropped.keys()
                assert any("oftmax" in name or "Scaled" in name for name in hf_ckpt.describe(model).kept)
                assert hf_ckpt.describe(model).dropped
    enable(model, {"policy": "full"})
    got, count = attention_in_backward(model, batch)
    assert_same(expected, got)
    assert count >= blocks  # so that one would have been seen


def test_row_13_nothing_to_save_is_an_error():
    """No operation of the block is one that `save` names: that is `full`, at a higher price."""
    model = remote(lambda block, hidden: functional.silu(hidden) * block.norm(hidden))
    hf_ckpt.install(model, {"policy": "selective", "save": ["attention"], "engine": "sac"})
    enable(model)
    with pytest.raises(HfCkptError, match="the block ran no such operation, so this would be `full`"):
        remote_steps(model)


# --- rows 14 and 16: the peak, and what offloading does to it ---------------------------------------------------------


@functools.cache
def planned_costs(family):
    """A model, a batch for it, and what the actions cost that a plan is mostly made of."""
    attention = "sdpa" if family != "t5" or len(compat.ENABLE_NAMES) > 1 else "eager"  # T5 of transformers 4
    model = tiny_model(family, layers=4, hidden=64, attention=attention)
    batch = tiny_batch(family, batch=4, tokens=64)
    at_work = Step(batch, optimizer="sgd")
    return model, batch, trace_costs(blueprint_of(model), at_work, DEVICES["cpu"], trial, actions=(KEEP, *MOVES))


@pytest.mark.compat
@pytest.mark.parametrize("family", ["llama", "t5"])
def test_row_14_a_budget_is_on_the_peak(family):
    """A budget of 0.05 peaks higher than one of 0.15: it was on saved bytes."""
    model, batch, costs = planned_costs(family)
    low, high = plan_of_least(costs).prediction.peak_bytes, plan_within(costs, 2**30).prediction.peak_bytes
    plans, seconds, peaks = [], [], []
    for place in range(6):
        budget = low + (high - low) * place // 5
        plan = plan_within(costs, budget)
        hf_ckpt.install(model, plan)
        enable(model)
        step(model, batch)
        model.zero_grad(set_to_none=True)
        with LiveBytes(model, batch) as live:
            model(**without_cache(model, batch)).loss.backward()
        model.zero_grad(set_to_none=True)
        assert live.peak_bytes <= budget, (place, live.peak_bytes, budget)
        plans.append(plan)
        seconds.append(plan.prediction.step_seconds)
        peaks.append(live.peak_bytes)
    assert seconds == sorted(seconds, reverse=True)
    assert len({plan.actions for plan in plans}) >= 4
    assert peaks[0] < 0.7 * peaks[-1]
    assert plans[0].active()
    assert not plans[-1].active()


def test_row_16_a_plan_offloads_only_where_that_lowers_the_peak():
    """Offloading costs time and takes nothing off the peak, which is elsewhere."""
    _, _, traced = planned_costs("llama")
    (costs,) = with_moves(traced, host_bandwidth=1e9, launch_nanoseconds=1)
    low, high = plan_of_least(costs).prediction.peak_bytes, plan_within(traced, 2**30).prediction.peak_bytes
    assert low < plan_of_least(traced).prediction.peak_bytes
    numbers = {action: number for number, action in enumerate(costs.actions)}
    instead = {costs.actions[moving]: costs.actions[base] for moving, base in costs.stacks[0].instead.items()}
    moving = 0
    for place in range(12):
        budget = low + (high - low) * place // 11
        actions = [action for _, action in plan_within(costs, budget).actions]
        if any(action in instead for action in actions):
            moving += 1
            stayed = (tuple(numbers[instead.get(action, action)] for action in actions),)
            assert worst_timeline(costs, stayed).peak_bytes > budget
    assert moving > 0
    assert not any(action in instead for action in actions)  # where everything fits


@pytest.fixture
def lanes(monkeypatch):
    """A device that copies late, and what it was asked; nothing is too small to be moved."""
    made = []
    monkeypatch.setattr(offload, "lane_of", lambda device: made.append(Delayed()) or made[-1])
    monkeypatch.setattr(offload, "LEAST_BYTES", 0)
    return made


@pytest.mark.compat
@pytest.mark.parametrize("family", FAMILIES)
def test_row_16_hidden_states_move_once_and_nothing_else(family, lanes):
    """T5 packs 21 tensors for 12 storages; GPT-2 and BERT move 4-D masks with every layer."""
    batch = tiny_batch(family)
    batch["attention_mask"][0, -3:] = 0
    expected = step(tiny_model(family), batch)
    model = tiny_model(family)
    hf_ckpt.install(model, {"policy": "offload"})
    enable(model)
    assert_same(expected, step(model, batch))
    sizes = [HIDDEN] * 3 + ([HIDDEN // 2] * 3 if family == "t5" else [])  # never the last block's of a stack
    assert [size for kind, size in lanes[0].log if kind == "out"] == sizes
    assert sorted(size for kind, size in lanes[0].log if kind == "back") == sorted(sizes)
    assert sorted(hf_ckpt.describe(model).moved.values()) == sorted(sizes)


# --- row 17: copies that come late ------------------------------------------------------------------------------------


def test_row_17_what_comes_back_has_the_bits_it_left_with():
    """float32 is rounded in silence, through a pool of bfloat16 buffers."""
    lane, pool = Delayed(), Mover(make_lane=Delayed)
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float32):
        tensor = torch.randn(1024 // dtype.itemsize, generator=generator, dtype=torch.float64).to(dtype)
        expected = tensor.clone()
        group = pool.open("block", lane, tensor)
        slot = group.send(tensor)
        group.close()
        tensor.fill_(torch.nan)  # its memory is somebody else's now
        found = slot.fetch()
        assert found.dtype is dtype
        assert torch.equal(found, expected)
        del slot, group
    assert pool.held_bytes == 1024  # one buffer for all of them


@pytest.mark.compat
@pytest.mark.parametrize("spec", [{"policy": "offload"}, {"policy": "selective", "offload": "saved"}], ids=str)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_row_17_forwards_and_backwards_in_any_order(order, spec, lanes):
    """NaN, leaks, use after free: a buffer is filled late, or given to the next forward too early."""
    batches = [{**tiny_batch("llama", seed=seed), "use_cache": False} for seed in range(3)]
    expected = [step(tiny_model("llama"), batch) for batch in batches]
    model = tiny_model("llama")
    hf_ckpt.install(model, spec)
    enable(model)
    held = []
    for _ in range(3):
        losses = [model(**batch).loss for batch in batches]
        for number in order:
            model.zero_grad(set_to_none=True)
            losses[number].backward(retain_graph=number == 1)
            assert_same(expected[number], {"loss": losses[number].detach(), **gradients(model)})
        del losses
        (pool,) = {region.mover for region in installation(model).regions.values() if getattr(region, "mover", None)}
        held.append((pool.held_bytes, pool._in_use))
    assert held[0][0] > 0
    assert held == [(held[0][0], 0)] * 3
    assert not any(copying[0]() is not None for copying in lanes[0].queue)


# --- row 20: in place -------------------------------------------------------------------------------------------------


class WorkingBlock(compat.GradientCheckpointingLayer):
    def __init__(self, work):
        super().__init__()
        self.one, self.two, self.norm = nn.Linear(16, 16), nn.Linear(16, 16), nn.LayerNorm(16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)  # as under adapters
        self.work = work

    def forward(self, hidden_states):
        return self.work(self, hidden_states)


class WorkingModel(transformers.PreTrainedModel):
    config_class = RemoteConfig
    supports_gradient_checkpointing = True

    def __init__(self, config, work):
        super().__init__(config)
        self.first = nn.Linear(16, 16)
        self.layers = nn.ModuleList(WorkingBlock(work) for _ in range(3))
        self.post_init()

    def _init_weights(self, module):
        """Nothing to do."""

    def forward(self, hidden_states):
        hidden_states = self.first(hidden_states).clone()  # what a linear layer returns is a view
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return hidden_states


def remote(work, dtype=torch.float32):
    """Three blocks with code that nobody knows."""
    torch.manual_seed(0)
    return WorkingModel(RemoteConfig(), work).to(dtype).train()


def remote_steps(model, steps=3):
    found = []
    for number in range(steps):
        model.zero_grad(set_to_none=True)
        torch.manual_seed(number)
        loss = model(torch.randn(2, 8, 16).to(model.first.weight.dtype)).float().square().mean()
        loss.backward()
        found.append({"loss": loss.detach(), **gradients(model)})
    return found


def rms(hidden):
    wide = hidden.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(hidden.dtype)


def _adds_to_its_input(block, hidden):
    hidden += block.frozen(hidden)
    return block.one(functional.silu(hidden))


def _scales_its_input(block, hidden):
    hidden *= 0.5
    return block.frozen(hidden).tanh() + block.one(hidden).clone()


def _adds_a_norm_to_its_input(block, hidden):
    hidden += block.one(rms(hidden))  # in 16 bits nothing saves `hidden`
    return hidden


def _adds_to_a_residual(block, hidden):
    middle = block.one(hidden)
    middle += block.two(rms(middle))
    return middle + hidden


def _relu(block, hidden):
    return block.two(functional.relu(block.one(hidden), inplace=True))


def _masks_scores(block, hidden):
    scores = block.one(hidden) @ block.two(hidden).transpose(-1, -2)
    scores.masked_fill_(torch.ones(8, 8, dtype=torch.bool).triu(1), -1e4)
    return scores.softmax(-1) @ hidden


def _changes_an_operand(block, hidden):
    one, two = block.one(hidden), block.two(hidden)
    result = functional.silu(one + two)
    one.mul_(2.0)
    return hidden + result + one


def _clamps_without_a_graph(block, hidden):
    result = functional.silu(block.one(hidden))
    with torch.no_grad():
        result.clamp_(-0.1, 0.05)
    return functional.silu(result * 2.0)


def _writes_data(block, hidden):
    result = functional.silu(block.one(hidden))
    result.data.mul_(2.0)
    return functional.silu(result * 2.0)


def _writes_data_of_a_norm(block, hidden):
    result = block.norm(hidden)
    result.data.mul_(2.0)
    return functional.silu(result * 1.5) + block.one(hidden)


def _drops_in_place(block, hidden):
    return block.two(functional.dropout(functional.silu(block.one(hidden)), 0.3, True, True))


def _adds_rows(block, hidden):
    out = torch.zeros_like(hidden)
    out.index_add_(0, torch.tensor([0, 1]), block.one(hidden))
    out[:, 0] = 0.0
    return functional.silu(out) * hidden


# What a block does -> whether `selective` finds that it cannot rebuild, (float32, bfloat16); None: autograd refuses it.
WORKING_IN_PLACE = {
    _adds_to_its_input: (False, False),
    _scales_its_input: (False, False),
    _adds_a_norm_to_its_input: (None, True),
    _adds_to_a_residual: (None, False),
    _relu: (False, False),
    _masks_scores: (False, False),
    _changes_an_operand: (False, False),
    _clamps_without_a_graph: (True, True),
    _writes_data: (True, True),
    _writes_data_of_a_norm: (True, True),
    _drops_in_place: (False, False),
    _adds_rows: (False, False),
}


@pytest.mark.parametrize("work", WORKING_IN_PLACE)
def test_row_20_what_trains_without_checkpointing_trains_with_it(work, caplog):
    """In-place operations inside a block: other gradients in silence, or an error that names nothing."""
    for dtype, falls_back in zip((torch.float32, torch.bfloat16), WORKING_IN_PLACE[work], strict=True):
        if falls_back is None:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                remote_steps(remote(work, dtype))
            continue
        expected = remote_steps(remote(work, dtype))
        for spec in ({"policy": "full"}, *({"policy": "selective", "save": save} for save in SAVES)):
            model = remote(work, dtype)
            hf_ckpt.install(model, spec)
            enable(model)
            caplog.clear()
            for before, after in zip(expected, remote_steps(model), strict=True):
                assert_same(before, after, f"{work.__name__} {spec} {dtype}")
            regions = installation(model).regions.values()
            said = [record.getMessage() for record in caplog.records if "cannot make again" in record.getMessage()]
            if spec["policy"] == "full":
                assert set(hf_ckpt.describe(model).recomputed.values()) == {3}
                assert not said
            elif falls_back:
                assert [region.recomputed for region in regions] == [2] * 3  # as a whole, from the second step on
                assert [message.split("'")[1] for message in said] == ["layers.0", "layers.1", "layers.2"]
                assert hf_ckpt.describe(model).dropped == {}
            else:
                assert not said
                assert not any(region.failed or region.trial for region in regions)
                assert all(region.kept or region.dropped for region in regions)
                assert all(region.forwards == 3 for region in regions)


def test_row_20_the_warning_names_block_and_operation(caplog):
    model = remote(_adds_a_norm_to_its_input, torch.bfloat16)
    hf_ckpt.install(model, {"policy": "selective"})
    enable(model)
    remote_steps(model, 1)
    assert "block 'layers.1' cannot make again what " in caplog.text
    assert "works in place (AddBackward0)" in caplog.text
    assert sum(hf_ckpt.describe(model).kept.values()) > 0
    remote_steps(model, 1)
    assert hf_ckpt.describe(model).kept == {}


@pytest.mark.parametrize(
    "spec", [{"policy": "full"}, {"policy": "selective"}, {"policy": "selective", "save": ["attention"]}], ids=str
)
@pytest.mark.parametrize(
    "work",
    [
        lambda block, hidden: functional.silu(block.one(hidden)) * block.two(functional.gelu(hidden)),
        _drops_in_place,
        _adds_to_its_input,
    ],
    ids=["products", "dropout", "input"],
)
def test_row_20_a_trial_leaves_nothing_behind(work, spec):
    """A first forward that looks closely holds no more, once its block has ended, than those after it."""
    model = remote(work)
    hf_ckpt.install(model, spec)
    enable(model)
    inputs, held = torch.randn(2, 8, 16), []
    for _ in range(3):
        with LiveBytes(model) as live:
            loss = model(inputs).sum()
            held.append(live.current_bytes - live.start_bytes)
            loss.backward()
        model.zero_grad(set_to_none=True)
    assert held[0] == held[1] == held[2] > 0
    assert all(region.forwards == 3 for region in installation(model).regions.values())


SAC = {"policy": "selective", "engine": "sac"}


@pytest.mark.parametrize(
    ("work", "spec", "operation"),
    [
        (_scales_its_input, SAC, "MulBackward0"),
        (_scales_its_input, {"policy": "full", "segments": 3}, "MulBackward0"),
        (_adds_to_its_input, {"policy": "full", "segments": 1}, "AddBackward0"),
        (_relu, SAC, None),  # of the result of a linear layer, which stays
    ],
)
def test_row_20_what_cannot_be_helped_is_told_with_the_block(work, spec, operation):
    """`one of the variables needed for gradient computation has been modified`, and no word of where."""
    remote_steps(remote(work), 1)  # trains without
    model = remote(work)
    hf_ckpt.install(model, spec)
    enable(model)
    with pytest.raises(InPlaceError, match=r"block 'layers\.[02]'.*was changed in place.*`full`") as raised:
        remote_steps(model, 1)
    assert raised.value.operation == operation
    enable(model, {"policy": "full"})
    assert_same(remote_steps(remote(work), 1)[0], remote_steps(model, 1)[0])


# --- row 27: pinned memory --------------------------------------------------------------------------------------------


@pytest.mark.compat
def test_row_27_memory_that_cannot_be_pinned_and_is_rounded_up(lanes, monkeypatch, caplog):
    """The driver has no more pinned pages; and 17 tokens take as much of it as 32."""
    empty, refused = torch.empty, []

    def refusing(*args, **keys):
        if keys.get("pin_memory"):
            refused.append(args[0])
            raise RuntimeError("CUDA error: out of memory")
        return empty(*args, **keys)

    offload._tell_unpinned.cache_clear()
    offload._tell_limit.cache_clear()
    monkeypatch.setattr(torch, "empty", refusing)
    monkeypatch.setattr(offload.compat, "accelerator_type", lambda: "cuda")
    batch = tiny_batch("llama", tokens=17)
    hidden = 2 * 17 * 32 * 4
    for limit, moved in ((3 * 8192, 3), (3 * 8192 - 1, 2), (3 * hidden, 1)):
        model = tiny_model("llama")
        hf_ckpt.install(model, {"policy": "offload", "host_budget": limit})
        enable(model)
        for _ in range(2):
            assert_same(step(tiny_model("llama"), batch), step(model, batch))
            assert list(hf_ckpt.describe(model).moved.values()) == [hidden] * moved
        (pool,) = {region.mover for region in installation(model).regions.values() if getattr(region, "mover", None)}
        assert pool.held_bytes == moved * 8192
    assert refused == [8192] * 3  # asked once a pool
    said = [record.getMessage() for record in caplog.records if "cannot be pinned" in record.getMessage()]
    assert len(said) == 1
    assert "CUDA error: out of memory" in said[0]
    assert "unpinned memory is used" in said[0]


# --- row 29: resuming -------------------------------------------------------------------------------------------------


def test_row_29_a_resumed_run_plans_with_the_optimizer_state_that_is_there(tmp_path):
    """A run that was resumed runs out of memory: its state is there before the first forward."""
    states = []

    def run(stop, spec, resume=None):
        model = tiny_model("llama")
        hf_ckpt.install(model)
        keys = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1, "optim": "adamw_torch"}
        job = trainer(tmp_path, model, **keys, **{f"{FLAG}_kwargs": spec})
        job.add_callback(StopAt(stop))
        job.train(resume_from_checkpoint=resume)
        states.append(autoplan.state_bytes(job.optimizer))
        assert job.state.global_step == stop
        return installation(model)

    run(1, {"policy": "full"})
    record = run(2, {"policy": "budget", "budget": "1GiB"}, str(tmp_path / "checkpoint-1"))
    by_its_kind = 2 * sum(parameter.nbytes for parameter in tiny_model("llama").parameters())
    # As it is, with the counters of its steps: nothing was there to read them from but the state itself.
    assert record.planned.costs[0].static.optimizer == states[1] == states[0] > by_its_kind


# --- row 32: DeepSpeed's own block ------------------------------------------------------------------------------------


def test_row_32_deepspeeds_own_block_is_told(tmp_path, capsys):
    """`activation_checkpointing` in DeepSpeed's config does nothing for Hugging Face models."""
    settings = {"zero_optimization": {"stage": 2}, "activation_checkpointing": {"partition_activations": True}}
    found = []
    for keys in (settings, {"zero_optimization": {"stage": 2}}):
        (tmp_path / "ds.json").write_text(json.dumps(keys))
        main(["doctor", str(tmp_path / "ds.json"), "--json"])
        findings = json.loads(capsys.readouterr().out)["findings"]
        found.append([finding for finding in findings if finding["code"] == "deepspeed-block"])
    assert len(found[0]) == 1
    assert "does nothing for Hugging Face models" in found[0][0]["what"]
    assert "gradient_checkpointing" in found[0][0]["fix"]
    assert found[1] == []


# --- row 33: mixtures of experts --------------------------------------------------------------------------------------

EXPERTS = {
    "mixtral": (
        transformers.MixtralConfig,
        transformers.MixtralForCausalLM,
        {"num_local_experts": 4, "router_jitter_noise": 0.1},
    ),
    "qwen2_moe": (
        transformers.Qwen2MoeConfig,
        transformers.Qwen2MoeForCausalLM,
        {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    ),
    "olmoe": (transformers.OlmoeConfig, transformers.OlmoeForCausalLM, {"num_experts": 4}),
}
MOE_SPECS = ({"policy": "full"}, *({"policy": "selective", "save": save} for save in SAVES), SAC)


def experts(name, dtype=torch.float32, implementation=None):
    """A mixture of experts with its auxiliary loss, and the kernels it calls its experts by."""
    config_class, model_class, keys = EXPERTS[name]
    config = config_class(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts_per_tok=2,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
        output_router_logits=True,
        router_aux_loss_coef=0.5,
        **keys,
    )
    config._attn_implementation = "sdpa"
    if implementation is not None:
        config._experts_implementation = implementation
    torch.manual_seed(0)
    return model_class(config).to(dtype).train()


IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm") if len(compat.ENABLE_NAMES) > 1 else (None,)


@pytest.mark.compat
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", EXPERTS)
def test_row_33_tokens_go_to_the_same_experts(name, implementation):
    """Routing flips at recomputation: gradients of experts that never saw a token; with jitter noise, always."""
    model, batch = experts(name, implementation=implementation), tiny_batch("llama")
    expected = step(model, batch)
    routers = [key for key in expected if key.endswith(".gate.weight")]
    assert len(routers) == 2
    assert all(expected[key].any() for key in routers)
    hf_ckpt.install(model)
    for spec in MOE_SPECS:
        enable(model, spec)
        assert_same(expected, step(model, batch), f"{name} {spec}")
        assert all(count > 0 for count in hf_ckpt.describe(model).recomputed.values())
        regions = installation(model).regions.values()
        assert not any(getattr(region, "failed", False) for region in regions)
        assert all(getattr(region, "determinism_check", "default") == "default" for region in regions)


@pytest.mark.parametrize("name", EXPERTS)
def test_row_33_selective_keeps_what_was_chosen(name):
    """No top-k is drawn again in backward, under any `save`; under `full` it is, and the same comes out."""

    class TopK(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            TopK.count += func._schema.name == "aten::topk"
            return func(*args, **(kwargs or {}))

    model, batch = experts(name), without_cache(experts(name), tiny_batch("llama"))
    hf_ckpt.install(model)
    counts = []
    for spec in MOE_SPECS[:-1]:
        enable(model, spec)
        loss = model(**batch).loss
        TopK.count = 0
        with TopK():
            loss.backward()
        counts.append(TopK.count)
    assert counts == [2, 0, 0, 0]


@pytest.mark.skipif(len(compat.ENABLE_NAMES) < 2, reason="experts of transformers 4 are called one by one")
@pytest.mark.parametrize(
    ("name", "implementation", "dtype"),
    [("qwen2_moe", "batched_mm", torch.float32), ("mixtral", "grouped_mm", torch.bfloat16)],
    ids=str,
)
def test_row_33_a_mixture_of_experts_can_be_planned_for(name, implementation, dtype):
    """Near what is really used, whatever tokens choose; the auxiliary loss is traced of other depths."""
    model, batch = experts(name, dtype, implementation), tiny_batch("llama", batch=4, tokens=64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    hf_ckpt.install(model)
    enable(model, {"policy": "budget", "budget": "1GiB"})
    step(model, batch)
    for plan in (plan_of_least(costs := installation(model).planned.costs), plan_within(costs, 2**30)):
        hf_ckpt.install(model, plan)
        enable(model)
        step(model, batch)
        model.zero_grad(set_to_none=True)
        with LiveBytes(model, batch) as live:
            model(**without_cache(model, batch)).loss.backward()
        model.zero_grad(set_to_none=True)
        assert abs(live.peak_bytes / plan.prediction.peak_bytes - 1) <= 0.05
    del optimizer


def test_row_33_what_cannot_be_planned_for_says_what_to_do():
    """Experts that are called one by one get as many tokens as chose them, which nobody knows before."""
    model = experts("mixtral", implementation="eager" if len(compat.ENABLE_NAMES) > 1 else None)
    hf_ckpt.install(model)
    enable(model, {"policy": "budget", "budget": "1GiB"})
    told = r'cannot be planned for.*depends on their values.*experts_implementation="grouped_mm".*`full`'
    with pytest.raises(HfCkptError, match=told):
        step(model, tiny_batch("llama"))
    enable(model, {"policy": "selective"})
    step(model, tiny_batch("llama"))
    assert sum(hf_ckpt.describe(model).recomputed.values()) > 0


def test_row_33_hidden_states_that_a_config_asks_for_are_planned_for():
    """What transformers captures by hooks of its own is captured in planning, too: a list of all hidden states."""
    model, batch = tiny_model("llama", layers=6, hidden=64), tiny_batch("llama", batch=4, tokens=64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    hf_ckpt.install(model)
    model.config.output_hidden_states = True
    enable(model, {"policy": "budget", "budget": "1GiB"})
    step(model, batch)
    plan = plan_of_least(installation(model).planned.costs)
    hf_ckpt.install(model, plan)
    enable(model)
    step(model, batch)
    model.zero_grad(set_to_none=True)
    with LiveBytes(model, batch) as live:
        model(**without_cache(model, batch)).loss.backward()
    model.zero_grad(set_to_none=True)
    assert abs(live.peak_bytes / plan.prediction.peak_bytes - 1) <= 0.03
    del optimizer


# --- every row has its test -------------------------------------------------------------------------------------------


def test_row_23_the_planner_counts_what_kbit_preparation_casts_up():
    """Norms and embeddings in float32 make hidden states float32, twice what a bf16 model's are."""
    peaks = {}
    for prepared in (False, True):
        model = tiny_model("llama", dtype=torch.bfloat16)
        if prepared:
            model.is_loaded_in_8bit = True  # all that PEFT looks at
            model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        for parameter in model.parameters():  # as a loader leaves packed weights: in their own type
            if prepared and parameter.dim() == 2 and parameter.shape[0] != model.config.vocab_size:
                parameter.data = parameter.data.to(torch.bfloat16)
        model = lora(model, target_modules=["q_proj", "v_proj"])
        batch = tiny_batch("llama", batch=4, tokens=64)
        casts = torch.autocast("cpu", torch.bfloat16)
        situation = autoplan.Situation({"decoder": (4, 64)}, autocast=torch.bfloat16)
        hf_ckpt.install(model, "full")
        enable(model)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        with casts:
            step(model, batch)
        model.zero_grad(set_to_none=True)
        with LiveBytes(model, batch) as live, casts:
            model(**without_cache(model, batch)).loss.backward()
        with hf_ckpt.paused(model):
            predicted = autoplan.prediction_of(model, hf_ckpt.describe(model).plan, situation, trial)
        del optimizer
        assert abs(live.peak_bytes / predicted.peak_bytes - 1) < 0.05, (prepared, live.peak_bytes, predicted)
        peaks[prepared] = live.peak_bytes
    assert peaks[True] > 1.1 * peaks[False]


@pytest.mark.compat
@pytest.mark.parametrize("work", [_writes_data, _clamps_without_a_graph])
def test_row_20_under_the_users_hooks_nothing_can_be_proved(work):
    """`selective` dropped what unknown blocks had changed behind autograd's back, where hooks hid that."""
    found = {}
    for policy in (None, "selective"):
        model = remote(work)
        if policy is not None:
            hf_ckpt.install(model, policy)
            enable(model)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach().clone(), lambda tensor: tensor):
            found[policy] = remote_steps(model)
    for expected, got in zip(found[None], found["selective"], strict=True):
        assert_same(expected, got)
    assert min(hf_ckpt.describe(model).recomputed.values()) > 0


@pytest.mark.compat
def test_row_20_what_is_changed_in_place_is_not_offloaded(lanes):
    """What comes back from host memory would be what the block has made of its input."""
    expected = remote_steps(remote(_adds_to_its_input))
    model = remote(_adds_to_its_input)
    hf_ckpt.install(model, {"policy": "offload"})
    enable(model)
    for one, other in zip(expected, remote_steps(model), strict=True):
        assert_same(one, other)
    assert set(hf_ckpt.describe(model).recomputed.values()) == {3}
    assert not hf_ckpt.describe(model).moved
    model = remote(_writes_data)  # it leaves its input alone: from the second forward on that moves
    hf_ckpt.install(model, {"policy": "offload"})
    enable(model)
    remote_steps(model, 1)
    assert not hf_ckpt.describe(model).moved
    remote_steps(model, 1)
    assert len(hf_ckpt.describe(model).moved) == 2


def test_row_20_memory_that_runs_out_in_a_trial_is_no_proof(monkeypatch):
    model = remote(_writes_data_of_a_norm)
    hf_ckpt.install(model, "selective")
    enable(model)

    def runs_out(value):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(values, "_hand_out", runs_out)
    with pytest.raises(torch.OutOfMemoryError):
        remote_steps(model, 1)
    assert not any(region.failed for region in installation(model).regions.values())


def test_row_20_a_plan_for_blocks_that_work_in_place_is_refused_with_the_reason():
    model = tiny_model("llama", layers=2)

    class InPlace(type(model.model.layers[0])):
        def forward(self, hidden_states, **kwargs):
            return hidden_states.add_(self.mlp(self.input_layernorm(hidden_states.clone())))

    for layer in model.model.layers:
        layer.__class__ = InPlace
    hf_ckpt.install(model, {"budget": "1GiB"})
    enable(model)
    with pytest.raises(HfCkptError, match="work in place on their hidden states") as raised:
        step(model, tiny_batch("llama"))
    assert "LlamaForCausalLM" in str(raised.value)


# Tests of rows that are elsewhere.
ELSEWHERE = {
    4: ("test_distributed.py::test_ddp_gradients_are_those_of_ddp_without_hf_ckpt",),
    6: (
        "test_doctor.py::test_a_fault_is_found_and_its_twin_is_not",
        "test_deepspeed.py::test_row_06_frozen_parameters_under_an_old_zero3_are_refused",
    ),
    8: (
        "test_configs.py::test_exactly_one_owner_of_checkpointing",
        "test_distributed.py::test_row_08_a_second_owner_under_accelerates_fsdp2_is_refused",
    ),
    9: ("test_distributed.py::test_row_09_one_region_for_each_planned_block_and_none_nested",),
    12: ("test_autoplan.py::test_a_head_in_chunks_where_it_is_allowed_and_nothing_else_fits",),
    14: ("test_solver.py::test_more_memory_never_costs_time",),
    16: ("test_moves.py::test_a_plan_moves_only_what_it_has_to",),
    17: ("test_offload.py::test_two_hundred_steps_in_any_order",),
    23: (
        "test_clients.py::test_lora_on_a_quantised_base",
        "test_clients.py::test_preparing_for_kbit_training_does_not_keep_the_plan_off",
    ),
    27: ("test_offload.py::test_a_host_budget_counts_powers_of_two",),
    28: (
        "test_oom.py::test_any_point_of_a_step",
        "test_oom.py::test_a_planned_policy_is_planned_again_for_less",
        "test_oom.py::test_the_batch_is_halved_after_the_last_plan_only",
    ),
    29: ("test_callback.py::test_row_29_resume_equals_one_run_also_with_another_policy",),
    33: ("test_rebuild.py::test_routing_is_kept", "test_doctor.py::test_only_full_routes_again_in_backward"),
    34: (
        "test_compile.py::test_blocks",
        "test_compile.py::test_a_whole_model",
        "test_compile.py::test_less_than_the_compiler_saves_by_itself",
        "test_compile.py::test_not_compiled_again",
    ),
}


def test_every_row_has_a_test():
    """Of the 35 rows of the list, each has a test here by its number, or one elsewhere by its name."""
    this, functions = Path(__file__), {}
    for name in {this.name, *(test.partition("::")[0] for tests in ELSEWHERE.values() for test in tests)}:
        tree = ast.parse(this.with_name(name).read_text(encoding="utf-8"))
        functions[name] = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    rows = range(1, 36)
    here = {int(name.split("_")[2]) for name in functions[this.name] if name.startswith("test_row_")}
    assert here <= set(rows)
    for row, tests in ELSEWHERE.items():
        for test in tests:
            file, _, function = test.partition("::")
            assert function in functions[file], (row, test)
    assert set(rows) == here | ELSEWHERE.keys()
