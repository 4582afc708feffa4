"""`selective` with blocks of all kinds: hooks, functions, frozen and compiled parts, adapters, kinds of backward."""

import contextlib

import pytest
import torch
import torch._dynamo
from accelerate.hooks import attach_align_device_hook
from helpers.adapters import with_lora
from helpers.sparing import in_turn
from helpers.steps import assert_same, outcome, step, without_cache
from helpers.toys import SAVES, SCALE, WEIGHT, Norm, plain_and_ours, rebuilt, same_steps, same_toys, toy
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from hf_ckpt.engines.rebuild.full_selective import FullSelectiveRegion
from hf_ckpt.engines.rebuild.region import RebuildRegion
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.models.blocks import find_blocks
from hf_ckpt.models.tiny import TINY_FAMILIES, tiny_batch

pytestmark = pytest.mark.usefixtures("unwatched")
NORM = Norm()
BEFORE = WEIGHT[:8] + WEIGHT[8:]

# --- small blocks -----------------------------------------------------------------------------------------------------


class FusedNorm(torch.autograd.Function):
    """Like Liger's norms, saves its own statistics."""

    @staticmethod
    def forward(ctx, x, weight):
        rstd = x.pow(2).mean(-1, keepdim=True).rsqrt()
        ctx.save_for_backward(x, rstd, weight)
        return x * rstd * weight

    @staticmethod
    def backward(ctx, gradient):
        x, rstd, weight = ctx.saved_tensors
        scaled = gradient * weight
        by_x = rstd * (scaled - x * rstd.pow(2) * (scaled * x).mean(-1, keepdim=True))
        return by_x, (gradient * x * rstd).sum((0, 1))


def under_no_grad(x):  # as in a router or target
    with torch.no_grad():
        seen = NORM(x)
    return x * seen * SCALE


def norm_three_times(x):
    x = x + NORM(functional.silu(x))
    return functional.silu(NORM(x)) * NORM(x)


def norm_that_fails(x):  # a failed attempt, then another
    with contextlib.suppress(RuntimeError):
        NORM(x[..., :3])
    return functional.silu(NORM(x)) * NORM(x)


def reads_what_was_computed_before(x):
    return x * BEFORE * SCALE


def custom(x):
    y = FusedNorm.apply(functional.silu(x) * x, NORM.weight)
    return functional.silu(y) * y


# What a block does -> (tensors that autograd saves, those of them that are dropped, those that hooks of the user get).
BLOCKS = {
    under_no_grad: (3, 1, 3),
    norm_three_times: (22, 21, 1),
    norm_that_fails: (21, 21, 1),
    reads_what_was_computed_before: (4, 1, 3),
    custom: (9, 3, 4),
}


@pytest.mark.trap(13)
@pytest.mark.parametrize("block", BLOCKS)
def test_tensors_saved_and_dropped(block):
    """Modules that run several times or without gradients are rebuilt; tensors that custom functions save are kept.

    Hooks of the user get each tensor that is kept once.
    """
    region = same_toys(block, parameters=(SCALE, NORM.weight))
    assert (region.saved_tensors, region.dropped_tensors) == BLOCKS[block][:2]
    stored = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: stored.append(tensor) or tensor, torch.clone):
        RebuildRegion("toy", save=SAVES[0])(block, torch.randn(2, 8, 16, requires_grad=True).neg())
    assert len({id(tensor) for tensor in stored}) == len(stored) == BLOCKS[block][2]
    assert all(tensor.is_leaf for tensor in stored)  # they hold no graph


def test_a_number_stays_a_number_inside_the_users_hooks():
    """A copy of it would have the type float64, and so would results without dimensions."""

    def block(x):
        return functional.silu(1.7 / (x.mean() * SCALE)) * x

    region = RebuildRegion("toy", save=())
    expected = toy(block)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        assert_same(expected, toy(block, region))
    assert region.recomputed == 2


# One step of a loop over tokens, from the state before it -> the operations that are rebuilt for each step.
LOOPS = {
    "saves its state": (lambda state, x: state * x.sigmoid() + x, 2),
    "saves nothing": (lambda state, x: state * 1.0001 + 0.001, 0),
    "norms": (lambda state, x: NORM(state), 1),
}


@pytest.mark.parametrize("kind", [RebuildRegion, FullSelectiveRegion])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_long_loop_over_tokens(loop, kind, caplog):
    """Each step would be rebuilt from the one before, deeper than Python allows. Some states in between are kept."""
    step_of, rebuilt_ones = LOOPS[loop]

    def block(x):
        state = functional.silu(x)
        for _ in range(400):
            state = step_of(state, x)
        return functional.silu(state) * state

    region = kind("toy", save=("linear",))
    assert_same(toy(block), toy(block, region))
    rebuilt_count = getattr(region, "rebuilding", region).recomputed
    assert 0.9 * 400 * rebuilt_ones <= rebuilt_count <= 400 * (rebuilt_ones + 1)
    assert "cannot name" not in caplog.text


class Doubled(nn.Linear):
    def forward(self, x):
        return functional.linear(x, self.weight, self.bias * 2)


class Twins(nn.Module):
    """Applies one frozen weight twice, with frozen biases of their own."""

    def __init__(self, apply):
        super().__init__()
        self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 16)
        self.two.weight, self.apply_both = self.one.weight, apply
        self.requires_grad_(False)

    def forward(self, x):
        return torch.cat([functional.silu(y) for y in self.apply_both(self.one, self.two, x)])


# How -> the number of the two results that are dropped.
APPLIED = {
    "two layers": (lambda one, two, x: (one(x), two(x)), 2),
    "a function": (lambda one, two, x: (functional.linear(x, one.weight, one.bias), two(x)), 1),
    "another forward": (lambda one, two, x: (one(x), Doubled.forward(two, x)), 1),
}


@pytest.mark.parametrize("how", APPLIED)
def test_a_frozen_bias_is_the_one_that_was_added(how):
    """Autograd holds no frozen bias. It is known if a linear layer adds its own; otherwise the result is kept."""
    apply, dropped = APPLIED[how]
    region = same_toys(Twins(apply).forward, save=["attention"], parameters=())
    assert region.dropped_tensors == dropped


class Quantised4(nn.Parameter):
    """A parameter subclass, as in bitsandbytes."""


@pytest.mark.parametrize("kind", [nn.Parameter, Quantised4, torch.Tensor.requires_grad_])
def test_views_of_leaves(kind):
    leaf = kind(torch.linspace(-1, 1, 256).view(16, 16).clone())
    with torch.no_grad():
        leaf.mul_(2.0)  # as most parameters are initialised

    def block(x):
        return functional.silu((x @ leaf.t()) * leaf[3]) @ leaf.view(4, 4, 16).transpose(0, 1).reshape(16, 16)

    for save in SAVES:
        same_toys(block, save=save, parameters=(leaf,))


def test_an_inference_tensor_goes_through():
    with torch.inference_mode():
        features = torch.randn(2, 4)
    assert torch.equal(RebuildRegion("toy", save=())(lambda x: x * 2, features), features * 2)


HALVES, SWAP, MASK = torch.full((16,), 0.5), torch.tensor([1, 0]), torch.zeros(8, 8)
# Functions that a block runs under its own checkpoint. Most of them could be rebuilt if the checkpoint did not store
# their saved tensors.
UNDER_A_CHECKPOINT = {
    "operands with a graph": lambda y: functional.gelu(y @ WEIGHT) * y,
    "a constant": lambda y: functional.silu(y * HALVES) * 1.5 * HALVES,
    "dropout": lambda y: functional.dropout(y, 0.3) * SCALE * HALVES,
    "indices": lambda y: functional.silu(y)[SWAP] * SCALE,
    "an embedding": lambda y: y * functional.embedding(torch.arange(8), WEIGHT),
    "attention": lambda y: functional.scaled_dot_product_attention(*(y.view(2, 1, 8, 16),) * 3, attn_mask=MASK)[:, 0],
    "a norm": lambda y: NORM(y) * SCALE,
    "a checkpoint": lambda y: checkpoint(lambda z: functional.silu(z) * HALVES, y * HALVES, use_reentrant=False),
}


@pytest.mark.trap(49)
@pytest.mark.compat
@pytest.mark.parametrize("save", SAVES, ids="+".join)
@pytest.mark.parametrize("name", UNDER_A_CHECKPOINT)
def test_the_users_own_checkpoint_inside_a_block(name, save):
    """A checkpointed function runs again only in backward; tensors around it are rebuilt."""
    calls = []

    def inner(y):
        calls.append(name)
        return UNDER_A_CHECKPOINT[name](y)

    def block(x):
        return functional.silu(checkpoint(inner, functional.silu(x) * SCALE, use_reentrant=False)) * SCALE

    expected = toy(block)
    for kind in (RebuildRegion, FullSelectiveRegion):
        region = kind("toy", save=tuple(save))
        calls.clear()
        assert_same(expected, toy(block, region))
        assert region.recomputed > 0
        assert 2 <= len(calls) <= 2 + (kind is FullSelectiveRegion)  # once with the block, and then by itself
        assert kind is FullSelectiveRegion or region.dropped_tensors


# --- models -----------------------------------------------------------------------------------------------------------


def is_norm(name):
    return "norm" in name.lower() or "ln_" in name


def merged_and_unmerged(model, family):
    """Gradients before merging adapters, while they are merged, with trained norms, and after unmerging."""
    model = with_lora(model, family)
    results = step(model, tiny_batch(family))
    model.merge_adapter()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad or is_norm(name))
    results |= {f"{name}, merged": value for name, value in step(model, tiny_batch(family)).items()}
    model.unmerge_adapter()
    return results | {f"{name}, after": value for name, value in step(model, tiny_batch(family)).items()}


def frozen(trains):
    """Train the parameters that `trains(place, name)` names. A node may then hold no operand; its result is kept."""

    def run(model, family):
        for place, (name, parameter) in enumerate(model.named_parameters()):
            parameter.requires_grad_(trains(place, name))
        return step(model, tiny_batch(family))

    return run


def hooked(part, register, hook, **options):
    """Register the user's hook on modules whose class is called so, or on the input embeddings."""

    def run(model, family):
        named = [module for module in model.modules() if type(module).__name__.endswith(part)]
        for module in [model.get_input_embeddings()] if part == "Embedding" else named:
            getattr(module, register)(hook, **options)
        return step(model, tiny_batch(family))

    return run


def with_global_hook(model, family):
    """torch calls a global hook after each forward, before the hooks of the module itself."""
    norms = [module for module in model.modules() if type(module).__name__.endswith("Norm")]
    changed = nn.modules.module.register_module_forward_hook(
        lambda module, args, output: output * 1.5 if module in norms else None
    )
    with changed:
        return step(model, tiny_batch(family))


def written_to(module, args, output):
    with torch.no_grad():
        (output[0] if isinstance(output, tuple) else output)[:, :3] = 0.1


def with_weights_elsewhere(model, family):
    """accelerate fetches the weights of each module in a block only while it runs."""
    for block in find_blocks(model).modules.values():
        attach_align_device_hook(block, torch.device("cpu"), offload=True, weights_map=block.state_dict())
        assert all(parameter.is_meta for parameter in block.parameters())
    return step(model, tiny_batch(family))


def backward_twice(model, family):
    """A graph that is kept gives the same gradients twice, and grows by nothing else."""
    model.zero_grad()
    with LiveBytes(model) as live:
        loss = model(**without_cache(model, tiny_batch(family))).loss
        before = live.current_bytes
        for _ in range(2):
            loss.backward(retain_graph=True)
        grown = torch.tensor(live.current_bytes - before)
    return {"grown": grown, **outcome(model, loss)}


def one_parameter_after_another(model, family):
    """Gradients are requested one parameter at a time, in either order."""
    loss = model(**without_cache(model, tiny_batch(family))).loss
    named = [(name, parameter) for name, parameter in model.named_parameters() if "embed" not in name][-20:]
    results = {"loss": loss.detach()}
    for turn, pairs in enumerate((named, named[::-1])):
        for name, parameter in pairs:
            results[f"{name} {turn}"] = torch.autograd.grad(loss, parameter, retain_graph=True)[0]
    return results


SMALL = ("Norm", "Activation")
RUNS = {
    "adapters merged": merged_and_unmerged,
    "only norms trained": frozen(lambda place, name: is_norm(name)),
    "norms frozen": frozen(lambda place, name: not is_norm(name)),
    "every other parameter frozen": frozen(lambda place, name: place % 2 == 1),
    "two of three parameters frozen": frozen(lambda place, name: place % 3 == 0),
    "modules' outputs changed": hooked(SMALL, "register_forward_hook", lambda *results: results[2] * 1.5, prepend=True),
    "norms' outputs changed by a global hook": with_global_hook,
    "modules' inputs changed": hooked(SMALL, "register_forward_pre_hook", lambda module, args: (args[0] * 0.5,)),
    "norms' gradients changed": hooked(
        "Norm", "register_full_backward_hook", lambda module, inputs, outputs: (inputs[0] * 0.5,)
    ),
    "outputs of BERT's last norms written to": hooked("BertOutput", "register_forward_hook", written_to),
    "outputs of BERT's blocks written to": hooked("BertLayer", "register_forward_hook", written_to),
    "embeddings written to": hooked("Embedding", "register_forward_hook", written_to),
    "noise on embeddings": hooked(
        "Embedding", "register_forward_hook", lambda module, args, output: output + torch.rand_like(output)
    ),
    "weights elsewhere": with_weights_elsewhere,
    "a graph that is kept": backward_twice,
    "one gradient after another": one_parameter_after_another,
}


@pytest.mark.compat
@in_turn("name, family", RUNS, TINY_FAMILIES, ("outputs of BERT's last norms written to", "bert"))
def test_gradients_are_those_of_no_checkpointing(family, name):
    def run(model):
        torch.manual_seed(0)
        return RUNS[name](model, family)

    for save in SAVES:
        same_steps(run, family, save, dropout=0.1)


REBUILT = {"gpt2": 53, "bert": 97}
"""Operations and modules that one step runs again; fewer if layers with a frozen bias are kept."""


@pytest.mark.parametrize("family", REBUILT)
def test_linear_layers_with_a_frozen_bias_run_again(family):
    """Linear layers with a frozen bias are rebuilt under adapters, although autograd does not hold the bias.

    FSDP2 runs a block on gathered parameters, which differ from those between steps, so the test replaces them.
    """
    plain, model = plain_and_ours(family, ["attention"], layers=4, attention="sdpa")
    plain, model = (with_lora(each, family, lora_dropout=0.0) for each in (plain, model))
    expected, before = step(plain, tiny_batch(family)), 0
    for _ in range(2):
        assert_same(expected, step(model, tiny_batch(family)))
        assert rebuilt(model) - before == REBUILT[family]
        before = rebuilt(model)
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if not parameter.requires_grad:
                    setattr(module, name, nn.Parameter(parameter.clone(), requires_grad=False))


PARTS = [("llama", "mlp"), ("llama", "input_layernorm"), ("bert", "output")]
"""Parts of every block: one without a small module that hf_ckpt rebuilds, one by itself, one with such modules."""


@pytest.mark.parametrize(("family", "part"), PARTS)
def test_a_compiled_part_of_a_block_is_kept(family, part, nothing_compiled):
    """What the compiler saves in a compiled part is kept; the rest of the block is rebuilt."""

    def run(model):
        torch._dynamo.reset()
        for block in find_blocks(model).modules.values():
            block.get_submodule(part).compile(backend="aot_eager")
        return step(model, tiny_batch(family))

    for save in SAVES[:2]:
        same_steps(run, family, save)
    assert not torch._dynamo.utils.counters["graph_break"]
