"""A skeleton, without weights and depth, describes the same model as the one that it was made from."""

from __future__ import annotations

import copy
import functools
import threading

import pytest
import torch
import transformers
from accelerate.hooks import ModelHook, add_hook_to_module
from helpers.steps import enable, without_cache
from peft import LoraConfig, get_peft_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hf_ckpt
from hf_ckpt.attach.record import installation
from hf_ckpt.compat.peft import add_lora
from hf_ckpt.errors import HfCkptError
from hf_ckpt.models.blocks import find_blocks, frozen_prefix
from hf_ckpt.models.tiny import FAMILIES, tiny_batch, tiny_model
from hf_ckpt.prediction.skeleton import skeleton_from_config, skeleton_of

pytestmark = pytest.mark.compat
each_family = pytest.mark.parametrize("family", FAMILIES)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
each_tuning = pytest.mark.parametrize("tuning", ["everything", "lora"])

_SIZES = {"vocab_size": 320, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "pad_token_id": 0}
_GEMMA = {**_SIZES, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8, "num_hidden_layers": 7}
OTHERS = {
    "Gemma2ForCausalLM": _GEMMA,
    "Gemma3ForCausalLM": _GEMMA,
    "MT5ForConditionalGeneration": {
        "vocab_size": 320,
        "d_model": 32,
        "d_ff": 64,
        "d_kv": 8,
        "num_heads": 4,
        "num_layers": 3,
        "num_decoder_layers": 5,
        "decoder_start_token_id": 0,
    },
    "GPTJForCausalLM": {"vocab_size": 320, "n_embd": 32, "n_layer": 4, "n_head": 4, "rotary_dim": 4},
    "RobertaForMaskedLM": {**_SIZES, "num_hidden_layers": 4},
    "OPTForCausalLM": {**_SIZES, "num_hidden_layers": 4, "ffn_dim": 64, "word_embed_proj_dim": 32},
    "BartForConditionalGeneration": {
        "vocab_size": 320,
        "d_model": 32,
        "pad_token_id": 0,
        "encoder_layers": 4,
        "decoder_layers": 3,
        **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
        **{f"{side}_ffn_dim": 64 for side in ("encoder", "decoder")},
    },
}


def other_config(name):
    return getattr(transformers, name).config_class(**OTHERS[name])


def other_model(name):
    torch.manual_seed(0)
    return getattr(transformers, name)(other_config(name)).train()


def model_of(family, tuning="everything", **options):
    model = tiny_model(family, **options)
    return add_lora(model, rank=4).train() if tuning == "lora" else model


def rows(skeleton):
    return [stack.row for stack in skeleton.stacks]


def assert_describes(skeleton, model):
    """Check that depths, names and bytes are the model's."""
    found = find_blocks(model)
    assert (skeleton.family, skeleton.model) == (found.family, found.model)
    assert tuple(block for stack in skeleton.stacks for block in stack.blocks) == found.blocks
    assert [stack.name for stack in skeleton.stacks] == list(dict.fromkeys(block.stack for block in found.blocks))
    for stack in skeleton.stacks:
        assert len(stack.row) == len(stack.blocks)
        assert set(stack.row) == set(range(len(stack.kinds)))
        assert stack.row[0] == 0
        for block, kind in zip(stack.blocks, stack.row, strict=True):
            parameters = list(found.modules[block.name].parameters())
            assert block.name == f"{stack.container}.{block.index}"
            assert stack.kinds[kind].weights.nbytes == sum(parameter.nbytes for parameter in parameters)
            assert stack.kinds[kind].frozen == (block.name in frozen_prefix(model, found))
    parameters = list(model.parameters())
    tensors = [(tuple(parameter.shape), parameter.element_size(), parameter.requires_grad) for parameter in parameters]
    assert sorted(skeleton.weights.tensors) == sorted(tensors)
    assert skeleton.weights.nbytes == sum(parameter.nbytes for parameter in parameters)
    assert skeleton.weights.gradients == sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
    assert skeleton.buffers == sum(buffer.nbytes for buffer in model.buffers())


def run(skeleton, model, batch):
    """Run a step of an assembled model; returns names of blocks that ran, and of parameters without a gradient."""
    ran = []
    for name, module in find_blocks(model).modules.items():
        module.register_forward_hook(functools.partial(_append, ran, name))
    with skeleton.fake:
        inputs = {name: torch.zeros_like(value) for name, value in batch.items()}
        model(**without_cache(model, inputs)).loss.backward()
    left = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    for parameter in model.parameters():
        parameter.grad = None
    return ran, left


def _append(ran, name, *_):
    ran.append(name)


def assert_fake(module):
    tensors = [*module.parameters(), *module.buffers()]
    assert all(isinstance(tensor.data, FakeTensor) for tensor in tensors)
    assert all(tensor.device.type == "cpu" for tensor in tensors)


# --- kinds ----------------------------------------------------------------------------------------------------------


@each_tuning
@each_family
def test_what_a_live_model_is(family, tuning):
    model = model_of(family, tuning, layers=5)
    skeleton = skeleton_of(model)
    assert_describes(skeleton, model)
    # T5's first block has the position bias.
    assert rows(skeleton) == ([(0, 1, 1, 1, 1)] * 2 if family == "t5" else [(0,) * 5])
    assert_fake(skeleton.base)
    for stack in skeleton.stacks:
        for kind in stack.kinds:
            assert_fake(kind.module)


@pytest.mark.parametrize(
    ("name", "expected"), [("Gemma2ForCausalLM", (0, 1, 0, 1, 0, 1, 0)), ("Gemma3ForCausalLM", (0, 0, 0, 0, 0, 1, 0))]
)
def test_types_of_layers_are_kinds(name, expected):
    skeleton = skeleton_of(other_model(name))
    assert rows(skeleton) == [expected]
    assert [kind.layer_type for kind in skeleton.stacks[0].kinds] == ["sliding_attention", "full_attention"]


def test_adapters_on_some_layers_only():
    config = LoraConfig(r=4, target_modules=["q_proj"], layers_to_transform=[1, 3])
    model = get_peft_model(tiny_model("llama", layers=5), config)
    skeleton = skeleton_of(model)
    # Block 0 is frozen below the first adapter; block 2 is not, because backward passes through it.
    assert rows(skeleton) == [(0, 1, 2, 1, 2)]
    assert [kind.frozen for kind in skeleton.stacks[0].kinds] == [True, False, False]
    assert_describes(skeleton, model)


def test_what_makes_a_kind_of_its_own():
    model = tiny_model("llama", layers=6)
    layers = model.model.layers
    layers[1].mlp.up_proj.weight.requires_grad_(False)
    layers[2].to(torch.bfloat16)
    layers[3].mlp.up_proj = nn.Linear(32, 96)
    layers[4].mlp.act_fn = nn.Tanh()
    skeleton = skeleton_of(model)
    assert rows(skeleton) == [(0, 1, 2, 3, 4, 0)]
    assert_describes(skeleton, model)


# --- tied and unusual tensors ---------------------------------------------------------------------------------------
def test_plain_tensors_of_modules():
    model = tiny_model("llama", layers=3)
    model.scale = torch.ones(3)
    model.model.layers[1].mlp.scale = torch.ones(3)
    model.model.layers[1].mlp.scales = {"other": torch.ones(3)}
    skeleton = skeleton_of(model)
    assert_describes(skeleton, model)
    assert model.scale.sum() == 3
    with skeleton.assembled([[0, 0]]) as assembled:
        assert not any(
            isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)
            for module in assembled.modules()
            for value in vars(module).values()
        )


class Around(nn.Module):
    """Wraps a model like DistributedDataParallel."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_hooks_and_forwards_of_others_stay_behind(family):
    """Hooks, replaced forwards, compiled blocks and an enabled plan are not copied to the skeleton."""
    model = tiny_model(family, layers=3)
    hf_ckpt.install(model, {"policy": "selective", "rules": [{"layers": "1", "policy": "full"}]})
    enable(model)
    calls = []
    for module in find_blocks(model).modules.values():
        add_hook_to_module(module, ModelHook())
        module.register_forward_hook(lambda *_: calls.append("forward"))
        module.register_forward_pre_hook(lambda *_: calls.append("before"))
        module.register_full_backward_hook(lambda *_: calls.append("backward"))
        module._compiled_call_impl = calls.append
    model.enable_input_require_grads()
    with hf_ckpt.paused(model):
        skeleton = skeleton_of(Around(model))
    assert_describes(skeleton, Around(model))
    with skeleton.assembled(rows(skeleton)) as assembled:
        assert installation(assembled) is None
        for module in assembled.modules():
            assert not any(getattr(module, hooks) for hooks in HOOKS)
            assert not {"forward", "_hf_hook", "_old_forward", "_compiled_call_impl"} & vars(module).keys()
            assert not getattr(module, "gradient_checkpointing", False)
        ran, left = run(skeleton, assembled, tiny_batch(family))
        assert len(ran) == len(find_blocks(model).blocks)
        assert not left
    assert not calls
    assert installation(model).enabled


# --- assembled models -----------------------------------------------------------------------------------------------


def config_of(skeleton):
    return dict(vars(skeleton.base.config))


def is_empty(skeleton):
    modules = dict(skeleton.base.named_modules())
    return all(not len(modules[stack.container]) for stack in skeleton.stacks)


@each_family
def test_any_row_of_blocks_runs(family):
    model = tiny_model(family, layers=3).eval()
    skeleton = skeleton_of(model)
    before = copy.deepcopy(config_of(skeleton))
    batch = tiny_batch(family)
    for depth in (1, 2, 9):
        wanted = [[0, *[len(stack.kinds) - 1] * (depth - 1)] for stack in skeleton.stacks]
        with skeleton.assembled(wanted) as assembled:
            assert assembled is skeleton.base
            assert assembled.training
            found = find_blocks(assembled)
            assert len(found.blocks) == depth * len(skeleton.stacks)
            assert_fake(assembled)
            ids = {id(parameter) for module in found.modules.values() for parameter in module.parameters()}
            assert len(ids) == sum(len(list(module.parameters())) for module in found.modules.values())
            ran, left = run(skeleton, assembled, batch)
            assert ran == [block.name for block in found.blocks]
            assert not left
        assert is_empty(skeleton)
        assert config_of(skeleton) == before
    assert not model.training
    assert len(find_blocks(model).blocks) == 3 * len(skeleton.stacks)


def test_an_error_inside_leaves_nothing():
    skeleton = skeleton_of(other_model("Gemma3ForCausalLM"))
    before = copy.deepcopy(config_of(skeleton))
    with pytest.raises(ZeroDivisionError), skeleton.assembled(rows(skeleton)) as assembled:  # noqa: PT012
        assembled.config.use_cache = False
        assembled.config.of_the_test = 1
        raise ZeroDivisionError
    assert is_empty(skeleton)
    assert config_of(skeleton) == before
    with pytest.raises(IndexError), skeleton.assembled([[7]] * len(skeleton.stacks)):
        pass
    assert is_empty(skeleton)
    assert config_of(skeleton) == before
    with skeleton.assembled([[1, 0, 1]]) as assembled:  # a model picks masks by `config.layer_types`
        assert assembled.config.layer_types == ["full_attention", "sliding_attention", "full_attention"]
        assert assembled.config.num_hidden_layers == 3


# --- from a config --------------------------------------------------------------------------------------------------


def assert_same_skeletons(found, expected):
    assert (found.family, found.model) == (expected.family, expected.model)
    for ours, theirs in zip(found.stacks, expected.stacks, strict=True):
        assert (ours.name, ours.container, ours.owner) == (theirs.name, theirs.container, theirs.owner)
        assert ours.blocks == theirs.blocks
        assert ours.row == theirs.row
        for kind, other in zip(ours.kinds, theirs.kinds, strict=True):
            assert (kind.weights, kind.frozen, kind.layer_type) == (other.weights, other.frozen, other.layer_type)
    assert found.outside == expected.outside
    assert found.weights == expected.weights
    assert found.buffers == expected.buffers


@each_tuning
@pytest.mark.parametrize("layers", [1, 6])
@each_family
def test_the_config_says_what_the_model_says(family, layers, tuning):
    """A skeleton from a config creates only two blocks per stack, and equals the one from the model."""
    model = tiny_model(family, layers=layers)
    config, make = copy.deepcopy(model.config), type(model)._from_config
    lora = functools.partial(add_lora, rank=4) if tuning == "lora" else None
    asked = []

    def making(shallow):
        asked.append(len(find_blocks(made := make(shallow)).blocks))
        return made

    found = skeleton_from_config(config, making, lora)
    assert_same_skeletons(found, skeleton_of(model_of(family, tuning, layers=layers)))
    assert asked == [min(layers, 2) * len(found.stacks)]
    assert config.to_dict() == model.config.to_dict()
    assert_fake(found.base)


@pytest.mark.parametrize("name", OTHERS)
def test_configs_of_other_models_say_what_they_say(name):
    expected = skeleton_of(other_model(name))
    assert_describes(expected, other_model(name))
    found = skeleton_from_config(other_config(name), getattr(transformers, name)._from_config)
    assert_same_skeletons(found, expected)


class LargestReal(TorchDispatchMode):
    """Records the size of the largest real tensor."""

    def __init__(self):
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor) and value.device.type != "meta":
                self.nbytes = max(self.nbytes, value.untyped_storage().nbytes())
        return result


def test_a_model_of_70_billion_parameters_needs_no_memory():
    config = transformers.LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    make = functools.partial(transformers.LlamaForCausalLM._from_config, dtype=torch.bfloat16)
    with LargestReal() as made:
        skeleton = skeleton_from_config(config, make)
        with skeleton.assembled(rows(skeleton)) as assembled:
            assert_fake(assembled)
            assert len(find_blocks(assembled).blocks) == 80
            assert sum(parameter.nbytes for parameter in assembled.parameters()) == skeleton.weights.nbytes
    assert skeleton.weights.nbytes == pytest.approx(2 * 70.55e9, rel=0.001)
    assert made.nbytes <= 2**20


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["model", "block"])
def test_a_model_that_cannot_be_copied(where):
    model = tiny_model("llama", layers=2)
    holder = model if where == "model" else model.model.layers[0].mlp
    holder.lock = threading.Lock()
    with pytest.raises(HfCkptError, match=r"LlamaForCausalLM cannot be planned for, .*TypeError.*lock"):
        skeleton_of(model)
    del holder.lock
    assert_describes(skeleton_of(model), model)
