"""The rebuild engine, end to end and under what users do around and inside a block. Row by row: test_recipe_table.py.

Every comparison is with the same step without hf_ckpt, and counts what was rebuilt.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
import transformers
from conftest import assert_frees_everything, assert_same, enable, gradients, step, without_cache
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import hf_ckpt
from hf_ckpt.engines.full import FullRegion
from hf_ckpt.engines.rebuild import RebuildRegion, _running, _warn_nothing_dropped, enter_module, leave_module
from hf_ckpt.engines.sac import SacRegion
from hf_ckpt.errors import HfCkptError, InPlaceError, ReplayError
from hf_ckpt.families import find_blocks
from hf_ckpt.install import installation
from hf_ckpt.measure import LiveBytes
from hf_ckpt.tiny import FAMILIES, tiny_batch, tiny_model

SELECTIVE = {"policy": "selective"}
SAVES = (["linear", "attention"], ["attention"], ["linear"])
LAYERS = 2
TARGETS = {
    "llama": ["q_proj", "up_proj"],
    "gpt2": ["c_attn", "c_fc"],
    "bert": ["query", "dense"],
    "t5": ["q", "wi"],
}
each_family = pytest.mark.parametrize("family", FAMILIES)
each_save = pytest.mark.parametrize("save", SAVES, ids="+".join)


@pytest.fixture(autouse=True)
def no_tape_left():
    yield
    assert _running.tape is None


def plain_and_ours(family="llama", save=SAVES[0], layers=LAYERS, **options):
    """The same model twice, the second one with `selective` enabled."""
    plain = tiny_model(family, layers=layers, **options)
    ours = tiny_model(family, layers=layers, **options)
    hf_ckpt.install(ours, {**SELECTIVE, "save": save})
    enable(ours)
    return plain, ours


def rebuilt(model):
    return sum(hf_ckpt.describe(model).recomputed.values())


def same_steps(run, family="llama", save=SAVES[0], **options):
    """`run` gives the same on both models, and something was rebuilt."""
    plain, ours = plain_and_ours(family, save, **options)
    assert_same(run(plain), run(ours), f"{family} {save}")
    assert rebuilt(ours) > 0
    return ours


# --- toy blocks -----------------------------------------------------------------------------------------------------

SCALE = nn.Parameter(torch.tensor(0.7))
WEIGHT = nn.Parameter(torch.linspace(-1, 1, 256).view(16, 16).contiguous())


class Norm(nn.Module):
    """A small module, hooked as a family's norms are."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 16))
        self.register_forward_pre_hook(enter_module, with_kwargs=True)
        self.register_forward_hook(leave_module)

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


def toy(block, region=None, *, dtype=torch.float32, parameters=(SCALE, WEIGHT)):
    """Gradients of a block's input and of the parameters, by the region if one is given."""
    for parameter in parameters:
        parameter.grad = None
    torch.manual_seed(1)
    x = torch.randn(2, 8, 16, dtype=dtype).requires_grad_()
    inner = x * 1  # a block's input has a graph
    out = region(block, inner) if region else block(inner)
    out.float().square().sum().backward()
    return {"x": x.grad} | {str(place): parameter.grad for place, parameter in enumerate(parameters)}


def same_toys(block, *, save=SAVES[0], dtype=torch.float32, parameters=(SCALE, WEIGHT), rebuilds=True):
    region = RebuildRegion("toy", save=tuple(save))
    expected = toy(block, dtype=dtype, parameters=parameters)
    assert_same(expected, toy(block, region, dtype=dtype, parameters=parameters))
    assert (region.recomputed > 0) == rebuilds
    return region


# --- changes in place -----------------------------------------------------------------------------------------------


def _changed_without_a_graph(x):
    y = functional.silu(x)
    with torch.no_grad():
        y.clamp_(-0.1, 0.5)
    return functional.silu(y) * y


def _norm_changed_without_a_graph(x, norm=Norm()):  # noqa: B008
    y = norm(x)
    with torch.no_grad():
        y.mul_(2.0)
    return functional.silu(y) * y


def _input_scaled(x):
    x.mul_(2.0)
    return functional.silu(x) * x


def _input_added_to(x):
    y = torch.tanh(x)
    x.add_(1.0)
    return y * 2.0 + x


def _residual(x):
    x += (x.detach().clone().view(-1, 16) @ WEIGHT).view(2, 8, 16)
    return functional.silu(x) * x


def _residual_after_a_norm(x, norm=Norm()):  # noqa: B008
    hidden = norm(x.clone())
    x.add_(hidden)
    return functional.silu(x) * x


def _view_changed(x):
    y = functional.silu(x)
    y[:, :4].mul_(3.0)
    return functional.silu(y) * y


def _part_written(x):
    y = functional.silu(x) * 2.0
    y[:, 0] = 0.0
    return functional.silu(y) * y


IN_PLACE = {
    "relu_": lambda x: functional.relu_(functional.silu(x) * x) * SCALE,
    "dropout": lambda x: functional.silu(functional.dropout(functional.silu(x) * 2.0, 0.5, True, True)) * SCALE,
    "dropout of the input": lambda x: functional.silu(functional.dropout(x, 0.5, True, True)) * SCALE,
    "input scaled": _input_scaled,
    "input added to": _input_added_to,
    "residual": _residual,
    "residual after a norm": _residual_after_a_norm,
    "view": _view_changed,
    "part written": _part_written,
    "without a graph": _changed_without_a_graph,
    "norm, without a graph": _norm_changed_without_a_graph,
}


@pytest.mark.compat
@each_save
@pytest.mark.parametrize("name", IN_PLACE)
def test_a_change_in_place_is_harmless_or_said(name, save):
    """What autograd accepts gives the same gradients here, or an error that names the block; never other gradients."""
    block = IN_PLACE[name]
    expected = toy(block)
    region = RebuildRegion("toy", save=tuple(save))
    try:
        found = toy(block, region)
    except InPlaceError as error:
        assert "block 'toy'" in str(error)  # noqa: PT017
    else:
        assert_same(expected, found)
    assert region.forwards == 1
    assert region.kept or region.dropped


@pytest.mark.parametrize("name", ["relu_", "dropout", "view", "part written", "input scaled", "residual"])
def test_common_changes_in_place_are_harmless(name):
    region = RebuildRegion("toy", save=("linear", "attention"))
    assert_same(toy(IN_PLACE[name]), toy(IN_PLACE[name], region))
    assert region.forwards == 1
    assert region.kept or region.dropped


def test_what_autograd_refuses_is_refused():
    """silu saves its input, which is then changed."""

    def block(x):
        y = functional.silu(x)
        x.add_(y)
        return functional.silu(x) * x

    with pytest.raises(RuntimeError, match="inplace operation"):
        toy(block)
    with pytest.raises(InPlaceError, match="changed in place"):
        toy(block, RebuildRegion("toy", save=("linear", "attention")))


@each_family
def test_embeddings_changed_by_a_hook(family):
    """A hook writes into the embeddings without a graph: looking them up again would undo it."""

    def write(module, args, output):
        with torch.no_grad():
            output[:, :3] = 0.1
        return output

    def run(model):
        model.get_input_embeddings().register_forward_hook(write)
        return step(model, tiny_batch(family))

    same_steps(run, family)


def test_noisy_embeddings():
    """NEFTune adds noise to what the embedding returns."""

    def run(model):
        model.get_input_embeddings().register_forward_hook(lambda module, args, out: out + torch.rand_like(out))
        return step(model, tiny_batch("llama"))

    same_steps(run)


def test_a_change_in_place_of_what_stays_is_found():
    """Autograd's own check does not see tensors that hooks hold."""

    def block(x):
        middle = torch.cumprod(x, -1)  # has no recipe
        known = functional.silu(middle)  # saves `middle`
        out = known * known
        with torch.no_grad():
            middle.mul_(2)
        return out

    with pytest.raises(InPlaceError, match=r"block 'toy'.*changed in place"):
        toy(block, RebuildRegion("toy", save=()))


# --- memory ---------------------------------------------------------------------------------------------------------


@each_save
@each_family
def test_a_graph_without_a_backward_frees_everything(family, save):
    """With the garbage collector off: no reference cycle holds activations."""
    _, model = plain_and_ours(family, save, dtype=torch.bfloat16, dropout=0.1)
    assert_frees_everything(model, tiny_batch(family))
    assert rebuilt(model) > 0


def test_an_exception_frees_everything():
    """As when memory runs out in a forward that the user catches."""
    _, model = plain_and_ours()
    batch = without_cache(model, tiny_batch("llama"))
    expected = step(model, batch)
    original = model.model.layers[1].mlp.down_proj.forward

    def broken(x):
        raise RuntimeError("out of memory")

    gc.collect()
    gc.disable()
    try:
        with LiveBytes(model) as live:
            model.model.layers[1].mlp.down_proj.forward = broken
            with contextlib.suppress(RuntimeError):
                model(**batch)
            model.model.layers[1].mlp.down_proj.forward = original
            assert live.current_bytes - live.start_bytes <= 256
    finally:
        gc.enable()
    before = rebuilt(model)
    assert_same(expected, step(model, batch))
    assert rebuilt(model) == 2 * before > 0


@each_save
@each_family
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_kept_and_dropped_add_up(family, save, dtype):
    """To the byte: without us, autograd holds what is dropped and kept, less what is kept to rebuild from."""
    plain, ours = plain_and_ours(family, save, dtype=dtype, dropout=0.1, attention="eager")
    block, storages = find_blocks(plain).modules, {}
    name, block = next((name, one) for name, one in block.items() if name.endswith("1"))

    def pack(tensor):
        if not isinstance(tensor, nn.Parameter) and not isinstance(tensor._base, nn.Parameter):
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage
        return tensor

    forward = block.forward

    def watched(*args, **kwargs):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return forward(*args, **kwargs)

    block.forward = watched
    assert_same(step(plain, tiny_batch(family)), step(ours, tiny_batch(family)))
    region = installation(ours).regions[name]
    held, kept, dropped, instead = (
        sum(parts)
        for parts in (
            [storage.nbytes() for storage in storages.values()],
            *(found.values() for found in (region.kept, region.dropped, region.kept_to_rebuild)),
        )
    )
    assert region.dropped
    assert kept + dropped - instead == held


@each_save
def test_what_stays_alive_is_what_was_counted(save):
    norm = Norm()

    def block(x):
        hidden = norm(x)
        return x + functional.silu(hidden @ WEIGHT) * hidden @ WEIGHT

    region = RebuildRegion("toy", save=tuple(save))
    x = torch.randn(2, 64, 16).requires_grad_() * 1
    with LiveBytes({"x": x}, norm, {"weight": WEIGHT}) as live:
        out = region(block, x)
        alive = live.current_bytes - live.start_bytes - out.nbytes
    assert alive == sum(region.kept.values()) - x.nbytes  # which was there before
    out.sum().backward()


def test_hidden_states_that_the_user_keeps_hold_nothing_else():
    """`output_hidden_states=True`, held after the backward."""
    for family in FAMILIES:
        alive = []
        for model in plain_and_ours(family, layers=4):
            batch = without_cache(model, tiny_batch(family))
            step(model, batch)
            model.zero_grad(set_to_none=True)
            with LiveBytes(model) as live:
                outputs = model(**batch, output_hidden_states=True)
                outputs.loss.backward()
                model.zero_grad(set_to_none=True)
                states = outputs.get("hidden_states") or outputs.get("decoder_hidden_states")
                del outputs
                alive.append(live.current_bytes - live.start_bytes)
                assert states
        assert alive[1] <= alive[0], family


def test_describe_tells_bytes_by_class():
    _, model = plain_and_ours()
    step(model, tiny_batch("llama"))
    found = hf_ckpt.describe(model)
    tokens, hidden, inner = 2 * 16, 32, 64
    assert found.dropped["activation"] == LAYERS * tokens * inner * 4  # silu's result
    assert found.dropped["pointwise"] == LAYERS * tokens * inner * 4  # the product that goes into the last linear
    assert found.kept["UnsafeViewBackward0"] >= LAYERS * 2 * tokens * inner * 4  # gate and up
    assert found.dropped["LlamaRMSNorm"] >= LAYERS * 2 * tokens * hidden * 4
    assert "dropped, to be rebuilt in the last forward" in str(found)


def test_a_float32_upcast_is_kept_as_16_bits():
    """The norm's class is unknown here, so its operations stand alone."""

    def block(x):
        x = x.cumsum(-1)  # has no recipe, and saves nothing
        wide = x.float()
        return (wide.pow(2).mean(-1, keepdim=True).rsqrt() * wide).to(x.dtype) * SCALE

    region = same_toys(block, dtype=torch.bfloat16)
    assert region.kept["ToCopyBackward0"] == 2 * 8 * 16 * 2


def test_nothing_to_drop_is_said_once(caplog):
    _warn_nothing_dropped.cache_clear()
    for _ in range(2):
        same_toys(lambda x: torch.cumprod(x, -1), save=["linear"], parameters=(), rebuilds=False)
    assert sum("found nothing in a block that can be rebuilt" in record.message for record in caplog.records) == 1


@pytest.mark.compat
@each_save
@each_family
def test_bytes_fall_and_gradients_stay(family, save):
    alive = []

    def run(model):
        batch = without_cache(model, tiny_batch(family, tokens=64))
        with LiveBytes(model) as live:
            loss = model(**batch).loss
        alive.append(live.current_bytes - live.start_bytes)
        loss.backward()
        return {"loss": loss.detach(), **gradients(model)}

    same_steps(run, family, save)
    assert alive[1] < 0.9 * alive[0]


# --- several backwards ----------------------------------------------------------------------------------------------


@each_save
@each_family
def test_a_second_derivative(family, save):
    def run(model):
        loss = model(**without_cache(model, tiny_batch(family))).loss
        first = torch.autograd.grad(loss, list(model.parameters()), create_graph=True, allow_unused=True)
        sum(value.square().sum() for value in first if value is not None).backward()
        return {"loss": loss.detach(), **gradients(model)}

    same_steps(run, family, save)


@each_save
@each_family
def test_a_graph_that_is_kept_gives_the_same_twice_and_grows_no_more(family, save):
    def run(model):
        model.zero_grad()
        loss = model(**without_cache(model, tiny_batch(family))).loss
        with LiveBytes() as live:
            for _ in range(2):
                loss.backward(retain_graph=True)
                used = live.current_bytes
            loss.backward(retain_graph=True)
            assert live.current_bytes == used
        return {"loss": loss.detach(), **gradients(model)}

    same_steps(run, family, save)


@each_save
def test_parts_of_a_graph_one_after_another(save):
    """Gradients of one parameter at a time, from the last to the first and back."""

    def run(model):
        loss = model(**without_cache(model, tiny_batch("llama"))).loss
        named = dict(model.named_parameters())
        found = {"loss": loss.detach()}
        for turn, names in enumerate((list(named), list(named)[::-1])):
            for name in names:
                found[f"{name} {turn}"] = torch.autograd.grad(loss, named[name], retain_graph=True)[0]
        return found

    same_steps(run, save=save, layers=1)


@each_family
def test_three_micro_steps(family):
    def run(model):
        model.zero_grad()
        torch.manual_seed(0)
        for seed in range(3):
            (model(**without_cache(model, tiny_batch(family, seed=seed))).loss / 3).backward()
        return gradients(model)

    same_steps(run, family, dropout=0.1)


@each_save
@each_family
def test_an_optimizer_that_steps_inside_backward(family, save):
    """Parameters change as soon as their gradient is there; nothing rebuilt later may read them."""

    def update(parameter):
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.1)
        parameter.grad = None

    def run(model):
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        for seed in range(2):
            model(**without_cache(model, tiny_batch(family, seed=seed))).loss.backward()
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    same_steps(run, family, save)


@pytest.mark.parametrize("backward_inside", [False, True])
@each_family
def test_autocast(family, backward_inside):
    def run(model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**without_cache(model, tiny_batch(family))).loss
            if backward_inside:
                loss.backward()
        if not backward_inside:
            loss.backward()
        return {"loss": loss.detach(), **gradients(model)}

    same_steps(run, family)


def test_two_forwards_before_a_backward():
    def run(model):
        torch.manual_seed(0)
        losses = [model(**without_cache(model, tiny_batch("llama", seed=seed))).loss for seed in range(2)]
        sum(losses).backward()
        return {"loss": losses[0].detach(), **gradients(model)}

    same_steps(run, dropout=0.1)


def test_freezing_between_forward_and_backward_is_said():
    _, model = plain_and_ours()
    loss = model(**without_cache(model, tiny_batch("llama"))).loss
    for parameter in model.model.layers[0].input_layernorm.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(ReplayError, match="LlamaRMSNorm saved"):
        loss.backward()


# --- hooks of the user ----------------------------------------------------------------------------------------------


def _moved_away():
    """Hooks like save_on_cpu's with a device that nobody sees: activations become bytes."""
    moved = []

    def pack(tensor):
        if isinstance(tensor, nn.Parameter) or not tensor.is_floating_point():
            return tensor
        moved.append(tensor.nbytes)
        return tensor.detach().float().numpy().tobytes(), tensor.shape, tensor.stride(), tensor.dtype

    def unpack(packed):
        if isinstance(packed, torch.Tensor):
            return packed
        data, shape, stride, dtype = packed
        plain = torch.frombuffer(bytearray(data), dtype=torch.float32).view(shape)
        if 0 in stride:
            return plain.to(dtype)
        return torch.empty_strided(shape, stride, dtype=dtype).copy_(plain)  # another layout rounds differently

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack), moved


@each_save
@each_family
def test_hooks_around_the_model_get_what_stays(family, save):
    """Activations that stay go through the user's hooks and nowhere else: nothing but the outputs is left behind."""
    plain, ours = plain_and_ours(family, save)
    expected = step(plain, tiny_batch(family, tokens=64))
    left, through = [], []
    for model in (plain, ours):
        batch = without_cache(model, tiny_batch(family, tokens=64))
        model.zero_grad()
        torch.manual_seed(7)
        hooks, moved = _moved_away()
        with LiveBytes(model) as live:
            with hooks:
                loss = model(**batch).loss
            left.append(live.current_bytes - live.start_bytes)
            loss.backward()
        assert_same(expected, {"loss": loss.detach(), **gradients(model)})
        through.append(sum(moved))
    assert rebuilt(ours) > 0
    assert 0 < through[1] < through[0]
    assert left[1] <= left[0] + 10_000, "activations stay on the device beside their copies"


@each_save
@each_family
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_hooks_that_unpack_once_only(family, save, dropout):
    """And nothing is asked of them while the forward runs."""

    def run(model):
        store, asked = {}, []

        def pack(tensor):
            key = object()
            store[key] = tensor
            return key

        def unpack(key):
            asked.append(key)
            return store.pop(key)

        torch.manual_seed(3)
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            loss = model(**without_cache(model, tiny_batch(family))).loss
        assert not asked
        loss.backward()
        return {"loss": loss.detach(), **gradients(model)}

    same_steps(run, family, save, dropout=dropout)


@each_save
@each_family
def test_the_users_own_checkpoint_around_the_model(family, save):
    """Chunked losses and GradCache checkpoint whole forwards; torch lets each packed tensor be asked for once."""

    def run(model):
        torch.manual_seed(3)
        batch = without_cache(model, tiny_batch(family))
        loss = checkpoint(lambda: model(**batch).loss, use_reentrant=False)
        loss.backward()
        return {"loss": loss.detach(), **gradients(model)}

    same_steps(run, family, save, dropout=0.1)


@each_save
def test_the_users_own_checkpoint_inside_a_block(save):
    def block(x):
        y = functional.silu(x) * x
        y = checkpoint(lambda y: functional.gelu(y @ WEIGHT) * y, y, use_reentrant=False)
        return functional.silu(y) * y

    same_toys(block, save=save)


@each_save
def test_save_on_cpu_inside_and_around(save):
    def block(x):
        y = functional.silu(x) * x
        with torch.autograd.graph.save_on_cpu():
            y = functional.silu(y @ WEIGHT) * y
        return functional.gelu(y) * y

    def around(x):
        with torch.autograd.graph.save_on_cpu():
            return RebuildRegion("toy", save=tuple(save))(block, x)

    same_toys(block, save=save)
    assert_same(toy(block), toy(around))


@each_family
def test_the_users_hook_on_a_norm(family):
    """It changes what the norm returns, comes before or after ours, and a backward hook rewrites a gradient."""

    def norms(model):
        return [module for module in model.modules() if type(module).__name__.endswith(("Norm", "LayerNorm"))]

    def before(model):
        for module in norms(model):
            module.register_forward_hook(lambda module, args, output: output * 1.5)
        return step(model, tiny_batch(family))

    def first(model):
        for module in norms(model):
            module.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,), prepend=True)
        return step(model, tiny_batch(family))

    def backward(model):
        for module in norms(model):
            module.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))
        return step(model, tiny_batch(family))

    for run in (before, first, backward):
        same_steps(run, family, ["attention"])


def test_the_users_hooks_around_the_model_see_what_stays():
    packed, unpacked = [], []

    def run(model):
        packed.clear()
        hooks = (lambda tensor: packed.append(tensor.shape) or tensor.clone(), lambda x: unpacked.append(1) or x)
        with torch.autograd.graph.saved_tensors_hooks(*hooks):
            return step(model, tiny_batch("llama"))

    same_steps(run)
    assert torch.Size([2, 16, 64]) in packed  # a block's gate projection
    assert unpacked


def test_the_users_hooks_inside_a_block():
    def block(x):
        y = functional.silu(x) * 2.0
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            y = functional.silu(y) * y
        return functional.gelu(y) * y

    same_toys(block)


# --- modules, exceptions, threads -----------------------------------------------------------------------------------


def test_a_norm_without_gradients_inside_a_block():
    """A router or a target that looks at a norm under no_grad."""
    norm = Norm()

    def block(x):
        with torch.no_grad():
            seen = norm(x)
        return x * seen * SCALE

    same_toys(block, parameters=(SCALE, norm.weight))


def test_a_norm_that_raises_and_is_caught():
    """A block that tries one way and falls back on another."""

    def fall_back(layer):
        norm, mlp = layer.post_attention_layernorm, layer.mlp
        original, original_mlp, broken = norm.forward, mlp.forward, []

        def forward(x):
            y = original(x)
            if broken:
                raise ValueError
            return y

        def with_fallback(x):
            broken.append(True)
            with contextlib.suppress(ValueError):
                norm(x)
            broken.clear()
            return original_mlp(x)

        norm.forward, mlp.forward = forward, with_fallback

    def run(model):
        for layer in model.model.layers:
            fall_back(layer)
        return step(model, tiny_batch("llama"))

    same_steps(run)


def test_a_norm_called_twice():
    norm = Norm()

    def block(x):
        x = x + norm(functional.silu(x))
        return functional.silu(norm(x)) * norm(x)

    region = same_toys(block, parameters=(norm.weight,))
    assert region.dropped["Norm"] > 0


def test_an_attribute_called_variable():
    """Leaves of the graph have it; a custom function's context may have one of its own."""

    class Triple(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.variable = x.detach()
            return x * 3

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 3

    same_toys(lambda x: functional.silu(Triple.apply(functional.silu(x) * x)) * SCALE)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_norm_whose_parameter_is_changed_before_backward_is_said(name):
    """As an optimizer step between forward and backward does. Autograd refuses it for the weight only."""
    norm = nn.LayerNorm(16)
    norm.register_forward_pre_hook(enter_module, with_kwargs=True)
    norm.register_forward_hook(leave_module)

    def block(x):
        out = functional.silu(norm(x) @ WEIGHT)
        if changes:
            with torch.no_grad():
                getattr(norm, name).add_(1.0)
        return out

    changes = False
    same_toys(block, parameters=(norm.weight, norm.bias))
    changes = True
    with pytest.raises(InPlaceError, match=r"block 'toy'.*changed in place"):
        toy(block, RebuildRegion("toy", save=("linear", "attention")))


def test_a_parameter_that_is_written_with_a_graph_is_freed():
    """A frozen memory slot that the block fills: the parameter has a graph then."""

    def left(run):
        x = torch.randn(4, 16, requires_grad=True)
        slot = nn.Parameter(torch.zeros(4, 16), requires_grad=False)

        def block(x):
            slot.copy_(x)
            return slot.exp_()

        run(block, x * 1)
        return weakref.ref(slot)

    gc.collect()
    gc.disable()
    try:
        assert left(lambda block, x: block(x))() is None
        region = RebuildRegion("toy", save=("linear", "attention"))
        assert left(region)() is None
        assert region.kept
    finally:
        gc.enable()


def test_functional_call():
    """Parameters are plain leaf tensors then, and the model has its own again when backward comes."""
    plain, model = plain_and_ours()
    found = []
    for one in (plain, model):
        leaves = {name: (1.5 * value.detach()).requires_grad_() for name, value in one.named_parameters()}
        loss = torch.func.functional_call(one, leaves, (), without_cache(one, tiny_batch("llama"))).loss
        loss.backward()
        found.append({"loss": loss.detach(), **{name: leaf.grad for name, leaf in leaves.items()}})
    assert_same(*found)
    assert rebuilt(model) > 0


class _Quantised4(nn.Parameter):
    """As bitsandbytes' parameters: of a class of their own."""


@pytest.mark.parametrize("kind", [nn.Parameter, _Quantised4, None], ids=["parameter", "subclass", "leaf"])
def test_views_of_leaves(kind):
    leaf = torch.linspace(-1, 1, 256).view(16, 16).clone()
    leaf = leaf.requires_grad_() if kind is None else kind(leaf)
    with torch.no_grad():
        leaf.mul_(2.0)  # initialised in place, as most are

    def block(x):
        return functional.silu((x @ leaf.t()) * leaf[3]) @ leaf.view(4, 4, 16).transpose(0, 1).reshape(16, 16)

    for save in SAVES:
        same_toys(block, save=save, parameters=(leaf,))


def test_an_output_changed_before_it_is_handed_over():
    """A block that ends in a norm and changes its result without a graph: the next block must not undo that."""

    def run(model):
        for block in model.bert.encoder.layer:
            block.output.register_forward_hook(halve)
        return step(model, tiny_batch("bert"))

    def halve(module, args, output):
        with torch.no_grad():
            output.mul_(0.5)

    for save in SAVES:
        same_steps(run, "bert", save, layers=4)


def test_an_inference_tensor_goes_through():
    with torch.inference_mode():
        features = torch.randn(2, 4)
    assert torch.equal(RebuildRegion("toy", save=())(lambda x: x * 2, features), features * 2)


@each_save
def test_two_threads_inside_one_block_at_once(save):
    """nn.DataParallel runs replicas in threads that share their region; both are inside the block at the same time."""
    norm = Norm()
    region, barrier = RebuildRegion("toy", save=tuple(save)), threading.Barrier(2)

    def block(x, wait=False):
        hidden = norm(functional.silu(x) * x)
        if wait:
            barrier.wait(timeout=10)
        hidden = functional.silu(hidden @ WEIGHT) * hidden
        if wait:
            barrier.wait(timeout=10)
        return norm(hidden) * SCALE

    found = {}

    def run(seed):
        torch.manual_seed(seed)
        x = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        region(lambda x: block(x, wait=True), x * 1).square().sum().backward()
        found[seed] = x.grad

    threads = [threading.Thread(target=run, args=(seed,)) for seed in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in (0, 1):
        x = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        block(x * 1).square().sum().backward()
        assert torch.equal(found[seed], x.grad)
    assert region.forwards == 2
    assert region.recomputed > 0


@each_family
def test_backward_in_another_thread(family):
    def run(model):
        loss = model(**without_cache(model, tiny_batch(family))).loss
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        return {"loss": loss.detach(), **gradients(model)}

    same_steps(run, family, ["attention"])


class _Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ran = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ran.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.compat
@each_save
@pytest.mark.parametrize("leaf", [False, True], ids=["computed", "leaf"])
def test_nothing_from_before_the_block_runs_again(save, leaf):
    """Inputs that the user computed, and inputs that are leaves (soft prompts)."""
    found, sines = [], []
    for model in plain_and_ours(save=save):
        torch.manual_seed(0)
        inputs = torch.randn(2, 8, 32).requires_grad_()
        # mish is nothing that the model itself uses, and has a recipe.
        embeds = inputs if leaf else functional.mish(functional.mish(inputs))
        loss = model(inputs_embeds=embeds, labels=torch.ones(2, 8, dtype=torch.long), use_cache=False).loss
        with _Operations() as operations:
            loss.backward()
        sines.append(operations.ran.count("aten.mish.default"))
        found.append({"loss": loss.detach(), "inputs": inputs.grad, **gradients(model)})
    assert_same(*found)
    assert sines == [0, 0]
    assert rebuilt(model) > 0


# --- what has no recipe ------------------------------------------------------------------------------------------


class _Quantised(torch.autograd.Function):
    """Like bitsandbytes: saves a weight of another type, and returns a gradient for the input only."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return x @ weight.float()

    @staticmethod
    def backward(ctx, gradient):
        (weight,) = ctx.saved_tensors
        return gradient @ weight.float().t(), None


class _FusedNorm(torch.autograd.Function):
    """Like Liger's: a norm of its own, with its statistics saved."""

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


def test_custom_functions_are_kept():
    weight, codes = nn.Parameter(torch.ones(16)), torch.arange(256, dtype=torch.int8).view(16, 16)

    def block(x):
        y = _FusedNorm.apply(functional.silu(x) * x, weight)
        return functional.silu(_Quantised.apply(y, codes)) * y

    region = same_toys(block, parameters=(weight,))
    assert any("_FusedNorm" in name for name in region.kept)


def test_routing_is_kept():
    """A router's choice is no recipe, so the same experts get the gradient."""
    experts, router = nn.ModuleList(nn.Linear(16, 16) for _ in range(4)), nn.Linear(16, 4)

    def block(x):
        weights, chosen = torch.topk(torch.softmax(router(functional.silu(x) * x), -1), 2)
        parts = torch.stack([expert(x) for expert in experts], -2)
        picked = torch.gather(parts, -2, chosen.unsqueeze(-1).expand(-1, -1, -1, 16))
        return x + (picked * weights.unsqueeze(-1)).sum(-2)

    same_toys(block, save=["attention"], parameters=[*experts.parameters(), *router.parameters()])


# --- adapters and frozen parts --------------------------------------------------------------------------------------


def _adapted(model, family, lora_dropout=0.1):
    torch.manual_seed(1)
    config = LoraConfig(
        r=4,
        lora_dropout=lora_dropout,
        init_lora_weights=False,
        target_modules=TARGETS[family],
        fan_in_fan_out=family == "gpt2",
    )
    return get_peft_model(model, config)


@pytest.mark.compat
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@each_family
def test_adapters_merged_and_unmerged(family, dtype):
    """Steps before merging, while merged (norms train), and after unmerging."""

    def run(model):
        model = _adapted(model, family)
        found = step(model, tiny_batch(family))
        model.merge_adapter()
        for name, parameter in model.named_parameters():
            if "norm" in name.lower() or "ln_" in name:
                parameter.requires_grad_(True)
        found |= {f"{name}, merged": value for name, value in step(model, tiny_batch(family)).items()}
        model.unmerge_adapter()
        return found | {f"{name}, after": value for name, value in step(model, tiny_batch(family)).items()}

    for save in SAVES:
        same_steps(run, family, save, dtype=dtype, dropout=0.1)


FREEZING = {
    "only norms": lambda place, name: "norm" in name.lower() or "ln_" in name,
    "no norms": lambda place, name: not ("norm" in name.lower() or "ln_" in name),
    "every other": lambda place, name: place % 2 == 1,
    "every third": lambda place, name: place % 3 == 0,
}


@pytest.mark.parametrize("which", FREEZING)
@each_family
def test_parts_that_are_frozen(family, which):
    """Operands without a gradient are read off the nodes; where a node does not hold them, the result is kept."""

    def run(model):
        for place, (name, parameter) in enumerate(model.named_parameters()):
            parameter.requires_grad_(FREEZING[which](place, name))
        return step(model, tiny_batch(family))

    for save in SAVES:
        same_steps(run, family, save)


# --- installation ---------------------------------------------------------------------------------------------------


@pytest.mark.compat
def test_a_saved_plan_comes_back(tmp_path):
    plain, model = plain_and_ours("t5", ["attention"])
    spec = {**SELECTIVE, "save": ["attention"], "rules": [{"stack": "encoder", "layers": "0", "policy": "full"}]}
    hf_ckpt.install(model, spec)
    saved = hf_ckpt.describe(model)
    saved.save(tmp_path / "plan.json")
    loaded = hf_ckpt.Plan.load(tmp_path / "plan.json")
    assert loaded == saved.plan
    for given in (loaded, {"plan": str(tmp_path / "plan.json")}):
        again = tiny_model("t5", layers=LAYERS)
        hf_ckpt.install(again, given)
        enable(again)
        assert_same(step(plain, tiny_batch("t5")), step(again, tiny_batch("t5")))
        regions = installation(again).regions
        assert type(regions["encoder.block.0"]) is FullRegion
        assert regions["decoder.block.1"].save == ("attention",)
        assert regions["decoder.block.1"].recomputed > 0
        assert hf_ckpt.describe(again).plan == saved.plan


@pytest.mark.compat
@each_family
def test_selective_full_and_none_side_by_side(family):
    spec = {
        **SELECTIVE,
        "rules": [{"layers": "1", "policy": "full"}, {"layers": "2", "policy": "none"}],
    }
    plain, model = tiny_model(family, dropout=0.1), tiny_model(family, dropout=0.1)
    hf_ckpt.install(model, spec)
    enable(model)
    assert_same(step(plain, tiny_batch(family)), step(model, tiny_batch(family)))
    found = hf_ckpt.describe(model)
    for block, action in found.plan.actions:
        assert action.kind == {1: "full", 2: "keep"}.get(block.index, "selective")
        wanted = {1: 1, 2: 0}.get(block.index)
        times = found.recomputed.get(block.name, 0)
        assert times == wanted if wanted is not None else times > 1, block.name


@pytest.mark.compat
@each_family
def test_copies_work_and_nothing_is_left_behind(family):
    _, model = plain_and_ours(family)
    expected = step(model, tiny_batch(family))
    twins = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for twin in twins:
        assert_same(expected, step(twin, tiny_batch(family)))
        assert rebuilt(twin) > 0
        assert installation(twin).regions.keys() == installation(model).regions.keys()
        assert all(
            region is not installation(model).regions[name] for name, region in installation(twin).regions.items()
        )
    for one in (model, *twins):
        hf_ckpt.uninstall(one)
        for name, module in one.named_modules():
            assert not module._forward_hooks, name
            assert not module._forward_pre_hooks, name
        assert_same(expected, step(one, tiny_batch(family)))


def test_another_policy_takes_the_hooks_off():
    _, model = plain_and_ours("bert")
    assert any(module._forward_hooks for module in model.modules())
    for change in ({"policy": "full"}, {"policy": "selective", "engine": "sac"}, {"policy": "none"}):
        hf_ckpt.install(model, change)
        enable(model)
        assert not any(module._forward_hooks for module in model.modules()), change
    hf_ckpt.install(model, SELECTIVE)
    enable(model)
    with hf_ckpt.paused(model):
        assert not any(module._forward_hooks for module in model.modules())
    assert any(module._forward_hooks for module in model.modules())


def test_every_engine_gives_one_gradient():
    expected = step(tiny_model("llama", layers=6, dropout=0.1), tiny_batch("llama"))
    for engine, kind in (("auto", RebuildRegion), ("rebuild", RebuildRegion), ("sac", SacRegion)):
        model = tiny_model("llama", layers=6, dropout=0.1)
        hf_ckpt.install(model, {**SELECTIVE, "engine": engine, "every_n_layers": 2})
        enable(model)
        assert_same(expected, step(model, tiny_batch("llama")))
        assert [type(region) for region in installation(model).regions.values()] == [kind] * 3
        assert all(hf_ckpt.describe(model).recomputed.values())


# --- other models ---------------------------------------------------------------------------------------------------

_SIZES = {
    "vocab_size": 320,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "pad_token_id": 0,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2, "head_dim": 8}
OTHERS = {
    "OPTForCausalLM": {"ffn_dim": 64, "word_embed_proj_dim": 32, **_SIZES},
    "Qwen3ForCausalLM": _GROUPED,
    "Gemma2ForCausalLM": _GROUPED,
    "MistralForCausalLM": _GROUPED,
    "Phi3ForCausalLM": _SIZES,
    "MixtralForCausalLM": {**_GROUPED, "num_local_experts": 4},
    "GPTNeoXForCausalLM": _SIZES,
    "FalconForCausalLM": _SIZES,
    "RobertaForMaskedLM": _SIZES,
    "DebertaV2ForMaskedLM": _SIZES,
    "BartForConditionalGeneration": {
        "vocab_size": 320,
        "d_model": 32,
        "pad_token_id": 0,
        **{f"{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("layers", "attention_heads")},
        **{f"{side}_ffn_dim": 64 for side in ("encoder", "decoder")},
    },
    "ViTForImageClassification": {**_SIZES, "image_size": 16, "patch_size": 4},
}


@pytest.mark.compat
@pytest.mark.parametrize("name", OTHERS)
def test_other_models(name):
    model_class = getattr(transformers, name)
    if name.startswith("ViT"):
        batch = {"pixel_values": torch.linspace(-1, 1, 1536).view(2, 3, 16, 16).sin(), "labels": torch.tensor([0, 1])}
    else:
        ids = tiny_batch("llama")["input_ids"]
        batch = {"input_ids": ids, "labels": ids}

    def make():
        torch.manual_seed(0)
        keys = {key: value for key, value in OTHERS[name].items() if not (name.startswith("ViT") and "token" in key)}
        return model_class(model_class.config_class(**keys)).train()

    expected = step(make(), batch)
    for save in SAVES:
        model = make()
        hf_ckpt.install(model, {**SELECTIVE, "save": save})
        enable(model)
        assert_same(expected, step(model, batch), f"{name} {save}")
        found = hf_ckpt.describe(model)
        assert all(found.recomputed.values()), save
        assert sum(found.dropped.values()) > 0


# --- torch.compile --------------------------------------------------------------------------------------------------


@pytest.fixture
def dynamo():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield torch._dynamo.utils.counters
    torch._dynamo.reset()


# A part of every block: without a small module of ours inside, with one, and one by itself.
PARTS = {
    "llama": ["mlp", "input_layernorm"],
    "gpt2": ["mlp", "ln_1"],
    "bert": ["intermediate", "output"],
    "t5": ["layer.0"],
}


@pytest.mark.parametrize(("family", "part"), [(family, part) for family, parts in PARTS.items() for part in parts])
def test_a_compiled_part_of_a_block_is_kept(family, part, dynamo):
    """What the compiler saves is not ours to make again; the rest of the block is."""

    def run(model):
        torch._dynamo.reset()
        for block in find_blocks(model).modules.values():
            block.get_submodule(part).compile(backend="aot_eager")
        return step(model, tiny_batch(family))

    for save in SAVES[:2]:
        same_steps(run, family, save)
    assert sum(dynamo["graph_break"].values()) == 0


def test_compiled_and_then_not(dynamo):
    """One model, one step compiled and one without: the region takes what fits each call."""
    plain, model = plain_and_ours(attention="sdpa")
    expected = step(plain, tiny_batch("llama"))
    compiled = torch.compile(model, backend="aot_eager")
    compiled(**without_cache(model, tiny_batch("llama"))).loss.backward()
    assert rebuilt(model) == 0
    assert_same(expected, step(model, tiny_batch("llama")))
    assert rebuilt(model) > 0


def test_engine_rebuild_refuses_to_be_compiled(dynamo):
    model = tiny_model("llama", layers=1)
    hf_ckpt.install(model, {**SELECTIVE, "engine": "rebuild"})
    enable(model)
    with pytest.raises(
        (HfCkptError, torch._dynamo.exc.TorchDynamoException), match=r"cannot work under torch\.compile"
    ):
        torch.compile(model, backend="aot_eager")(**without_cache(model, tiny_batch("llama")))
