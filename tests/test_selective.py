"""The rebuild engine and SAC: what is dropped is made again exactly, and whatever users do around it is safe."""

from __future__ import annotations

import copy
import gc
import pickle
import threading

import pytest
import torch
import transformers
from conftest import assert_same, enable, gradients, step, without_cache
from torch import nn
from torch.nn import functional

import hf_ckpt
from hf_ckpt.engines import recipes
from hf_ckpt.engines.rebuild import RebuildRegion, _running
from hf_ckpt.engines.sac import OPERATIONS, SacRegion, operations
from hf_ckpt.errors import HfCkptError, InPlaceError, NothingSavedError, ReplayError
from hf_ckpt.install import installation
from hf_ckpt.measure import LiveBytes
from hf_ckpt.tiny import FAMILIES, tiny_batch, tiny_model

SELECTIVE = {"policy": "selective"}
each_save = pytest.mark.parametrize("save", [["linear", "attention"], ["attention"], ["linear"]], ids="+".join)


def selective(family="llama", spec=SELECTIVE, **options):
    model = tiny_model(family, layers=2, **options)
    hf_ckpt.install(model, spec)
    enable(model)
    return model


def rebuilt(model):
    return sum(hf_ckpt.describe(model).recomputed.values())


def region(save=("linear", "attention")):
    return RebuildRegion("toy", save=save)


# --- the recipe table -----------------------------------------------------------------------------------------------


def _inputs(dtype=torch.float32):
    torch.manual_seed(0)
    return torch.randn(2, 8, 16, dtype=dtype).requires_grad_()


def _qkv(x):
    return [x.view(2, 8, 4, 4).transpose(1, 2) * factor for factor in (1.0, 0.5, 2.0)]


WEIGHT = torch.linspace(-1, 1, 256).view(16, 16).requires_grad_()
BIAS = torch.linspace(-1, 1, 16).requires_grad_()
# Node -> a function whose product saves the node's result, which must then be made again. `y` is saved by itself first.
TOYS = {
    "SiluBackward0": functional.silu,
    "GeluBackward0": lambda y: functional.gelu(y, approximate="tanh"),
    "ReluBackward0": lambda y: torch.relu(y) * 2.0,
    "LeakyReluBackward0": lambda y: functional.leaky_relu(y, 0.2),
    "TanhBackward0": lambda y: torch.tanh(y) * 2.0,
    "SigmoidBackward0": lambda y: torch.sigmoid(y) * 2.0,
    "MishBackward0": functional.mish,
    "ErfBackward0": torch.erf,
    "MulBackward0": lambda y: y * y.detach(),
    "DivBackward0": lambda y: y / (y.detach().abs() + 1),
    "NegBackward0": lambda y: -y,
    "PowBackward0": lambda y: y.pow(3),
    "RsqrtBackward0": lambda y: torch.rsqrt(y * y),
    "SqrtBackward0": lambda y: torch.sqrt(y * y),
    "AbsBackward0": torch.abs,
    "AddBackward0": lambda y: torch.add(y, y, alpha=3),
    "SubBackward0": lambda y: torch.sub(y, y * y, alpha=2),
    "ToCopyBackward0": lambda y: y.to(torch.bfloat16),
    "CloneBackward0": lambda y: y.transpose(0, 1).contiguous().transpose(0, 1),
    "CatBackward0": lambda y: torch.cat([y[..., 8:], -y[..., :8]], -1),
    "MeanBackward1": lambda y: y.mean(-1, keepdim=True),
    "NativeDropoutBackward0": lambda y: torch.native_dropout(y, 0.25, True)[0],
    "ViewBackward0": lambda y: (y * y).view(2, 8, 4, 4).view(2, 8, 16),
    "UnsafeViewBackward0": lambda y: torch.ops.aten._unsafe_view(y * y, [2, 8, 16]),
    "ReshapeAliasBackward0": lambda y: torch.ops.aten._reshape_alias(y * y, [2, 8, 16], [128, 16, 1]),
    "AliasBackward0": lambda y: torch.ops.aten.alias(y * y),
    "TBackward0": lambda y: (y * y).view(16, 16).t().view(2, 8, 16),
    "TransposeBackward0": lambda y: (y * y).transpose(-1, -2).transpose(1, 2),
    "PermuteBackward0": lambda y: (y * y).permute(0, 2, 1).permute(0, -1, 1),
    "ExpandBackward0": lambda y: (y * y)[:, :1].expand(2, 8, 16),
    "UnsqueezeBackward0": lambda y: (y * y).unsqueeze(1).view(2, 8, 16),
    "SliceBackward0": lambda y: (y * y)[:, 2:6:2],
    "SelectBackward0": lambda y: (y * y)[:, -1],
    "MmBackward0": lambda y: torch.mm(y.view(16, 16), WEIGHT),
    "AddmmBackward0": lambda y: torch.addmm(BIAS, y.view(16, 16), WEIGHT),
    "BmmBackward0": lambda y: torch.bmm(y, y.transpose(1, 2)),
    "SoftmaxBackward0": lambda y: torch.softmax(y, -1) * 2.0,
    "ScaledDotProductFlashAttentionForCpuBackward0": lambda y: functional.scaled_dot_product_attention(*_qkv(y)),
}
# Rows that are exercised elsewhere, or cannot be here.
ELSEWHERE = {"EmbeddingBackward0"}


def test_every_row_that_was_seen_to_run_is_run():
    seen = {name for name, row in recipes.TABLE.items() if row.seen}
    assert seen == set(TOYS) | ELSEWHERE
    unseen = {name for name, row in recipes.TABLE.items() if not row.seen}
    assert unseen == {
        "ScaledDotProductFlashAttentionBackward0",
        "ScaledDotProductEfficientAttentionBackward0",
        "ScaledDotProductCudnnAttentionBackward0",
    }  # CUDA only


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("node", TOYS)
def test_a_row_makes_the_same_bits(node, dtype, monkeypatch):
    """The result is saved by a product with a parameter. Without the row, nothing of this node is rebuilt."""
    used = []
    row = recipes.TABLE[node]

    def prepare(found, metadata):
        made = row.prepare(found, metadata)
        return made and (lambda *operands: used.append(node) or made(*operands))

    monkeypatch.setitem(recipes.TABLE, node, recipes.Row(row.op_class, prepare, row.constants))
    weights = [tensor.detach().to(dtype).requires_grad_() for tensor in (WEIGHT, BIAS)]
    monkeypatch.setitem(globals(), "WEIGHT", weights[0])
    monkeypatch.setitem(globals(), "BIAS", weights[1])

    def block(x):
        y = x * x  # known: x is the block's own input
        result = TOYS[node](y)
        return result.float() * scale

    scale = torch.tensor(1.5, requires_grad=True)
    found = []
    for function in (block, lambda x: region(())(block, x)):
        x = _inputs(dtype)
        leaf = x * 1  # a block's input has a graph
        torch.manual_seed(3)
        function(leaf).square().sum().backward()
        found.append((x.grad, scale.grad.clone(), weights[0].grad, weights[1].grad))
        scale.grad = weights[0].grad = weights[1].grad = None
    for plain, ours in zip(*found, strict=True):
        assert (plain is None) == (ours is None)
        assert plain is None or torch.equal(plain, ours)
    assert used, f"the row {node} was not used"


def test_an_embedding_is_looked_up_again():
    model = selective()
    baseline = step(tiny_model("llama", layers=2), tiny_batch("llama"))
    assert_same(baseline, step(model, tiny_batch("llama")))
    first = installation(model).regions["model.layers.0"]
    assert first.reaches_back
    assert "EmbeddingBackward0" not in first.kept
    assert first.recomputed > 0
    other = selective()
    other.model.layers[0]._hf_hook = None  # as if something moved parameters in and out
    assert_same(baseline, step(other, tiny_batch("llama")))
    first = installation(other).regions["model.layers.0"]
    assert not first.reaches_back
    assert first.kept["EmbeddingBackward0"] == 2 * 16 * 32 * 4


# --- what is saved --------------------------------------------------------------------------------------------------


@pytest.mark.compat
@each_save
@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_fall_and_gradients_stay(family, save):
    def live(model):
        torch.manual_seed(0)
        with LiveBytes(model) as counted:
            outputs = model(**without_cache(model, tiny_batch(family, tokens=64)))
        kept = counted.current_bytes - counted.start_bytes
        outputs.loss.backward()
        return kept

    plain = tiny_model(family, layers=2)
    model = selective(family, {**SELECTIVE, "save": save})
    assert live(model) < 0.9 * live(plain)
    assert_same(step(plain, tiny_batch(family)), step(model, tiny_batch(family)))
    assert rebuilt(model) > 0


def test_describe_tells_bytes_by_class():
    model = selective()
    step(model, tiny_batch("llama"))
    found = hf_ckpt.describe(model)
    tokens, hidden, inner = 2 * 16, 32, 64
    assert found.dropped["activation"] == 2 * tokens * inner * 4  # silu's result, one a block
    assert found.dropped["pointwise"] == 2 * tokens * inner * 4  # the product that goes into the last linear
    assert found.kept["UnsafeViewBackward0"] >= 2 * 2 * tokens * inner * 4  # gate and up
    assert found.dropped["LlamaRMSNorm"] >= 2 * 2 * tokens * hidden * 4
    assert "dropped, to be rebuilt in the last forward" in str(found)


def test_a_float32_upcast_is_kept_as_16_bits():
    """The norm's class is unknown here, so its operations stand alone."""

    def block(x):
        wide = x.float()
        return (wide.pow(2).mean(-1, keepdim=True).rsqrt() * wide).to(x.dtype) * 2.0

    x = _inputs(torch.bfloat16)
    middle = x + x  # not the block's input itself
    ours = region()
    out = ours(lambda _: block(middle), torch.zeros(1))
    assert "ToCopyBackward0" in ours.kept or "AddBackward0" in ours.kept
    out.sum().backward()
    ours_grad, x.grad = x.grad, None
    block(x + x).sum().backward()
    assert torch.equal(ours_grad, x.grad)
    assert ours.recomputed


def test_nothing_to_drop_is_said_once(caplog):
    for _ in range(2):
        region(("linear",))(lambda x: torch.cumprod(x, -1), _inputs() * 1).sum().backward()
    assert [record.message for record in caplog.records if "nothing in a block" in record.message].__len__() <= 1


# --- safety ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_forward_without_backward_leaves_nothing(family):
    left = []
    for model in (tiny_model(family, layers=2, dtype=torch.bfloat16), selective(family, dtype=torch.bfloat16)):
        batch = without_cache(model, tiny_batch(family))
        step(model, batch)
        model.zero_grad(set_to_none=True)
        gc.collect()
        gc.disable()
        try:
            with LiveBytes(model) as live:
                outputs = model(**batch)
                assert live.current_bytes > live.start_bytes + 10_000
                del outputs
                left.append(live.current_bytes - live.start_bytes)
        finally:
            gc.enable()
    assert left[1] == left[0] < 1000  # what the loop above still names
    assert _running.tape is None


@each_save
def test_retain_graph_and_double_backward(save):
    plain, model = tiny_model("llama", layers=2), selective(spec={**SELECTIVE, "save": save})
    found = []
    for one in (plain, model):
        loss = one(**without_cache(one, tiny_batch("llama"))).loss
        loss.backward(retain_graph=True)
        once = gradients(one)
        loss.backward()
        twice = gradients(one)
        found.append({"loss": loss.detach(), **once} | {f"{name} twice": value for name, value in twice.items()})
    assert_same(*found)
    found = []
    for one in (plain, model):
        hidden = one(**without_cache(one, tiny_batch("llama"))).logits
        parameters = [one.model.layers[0].mlp.up_proj.weight, one.model.layers[1].mlp.gate_proj.weight]
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            first = torch.autograd.grad(hidden.square().mean(), parameters, create_graph=True)
            second = torch.autograd.grad(sum(value.square().sum() for value in first), parameters)
        found.append({"loss": hidden.detach(), "0": second[0], "1": second[1]})
    assert_same(*found)


def test_the_second_backward_needs_no_more_memory():
    model = selective()
    with LiveBytes(model) as live:
        loss = model(**without_cache(model, tiny_batch("llama"))).loss
        loss.backward(retain_graph=True)
        after_one = live.current_bytes
        loss.backward(retain_graph=True)
        assert live.current_bytes == after_one


def test_part_of_a_graph():
    plain, model = tiny_model("llama", layers=2), selective()
    found = []
    for one in (plain, model):
        loss = one(**without_cache(one, tiny_batch("llama"))).loss
        (value,) = torch.autograd.grad(loss, [one.model.layers[1].mlp.up_proj.weight])
        found.append({"loss": loss.detach(), "part": value})
    assert_same(*found)


def test_a_change_in_place_is_found():
    """Autograd's own check does not see tensors that hooks hold."""

    def block(x):
        middle = torch.cumprod(x, -1)  # has no recipe
        known = functional.silu(middle)  # saves `middle`
        out = known * known
        with torch.no_grad():
            middle.mul_(2)
        return out

    out = region()(block, _inputs() * 1)
    with pytest.raises(InPlaceError, match=r"block 'toy'.*changed in place"):
        out.sum().backward()


def _input_changed(x):
    x.mul_(2.0)
    return functional.silu(x) * x


def _clamped_without_a_graph(x):
    y = functional.silu(x)
    with torch.no_grad():
        y.clamp_(-0.1, 0.5)
    return functional.silu(y) * y


def _mean_in_another_dtype(x):
    mean = functional.silu(x).mean(-1, keepdim=True, dtype=torch.float32)
    return mean * mean.exp()


class _WithVariable(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.variable = torch.zeros(2)  # the name autograd's own leaves have
        return x * 3

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


def _custom_with_variable(x):
    y = _WithVariable.apply(x)
    return y * y


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "block", [_input_changed, _clamped_without_a_graph, _mean_in_another_dtype, _custom_with_variable]
)
def test_what_could_go_wrong_in_silence(block, dtype):
    """Each of these gave other gradients without any error in an early version of the engine."""
    found = []
    for function in (block, lambda x: region()(block, x)):
        x = _inputs(dtype)
        function(x * 1).float().sum().backward()
        found.append({"loss": x.grad, "x": x.grad})
    assert_same(*found)


def test_an_embedding_changed_without_a_graph():
    found = []
    for model in (tiny_model("llama", layers=2), selective()):

        def change(module, args, output):
            with torch.no_grad():
                output[:, :3] = 0.1
            return output

        model.model.embed_tokens.register_forward_hook(change)
        step(model, tiny_batch("llama"))  # from the second step on, a block may look an embedding up again
        found.append(step(model, tiny_batch("llama")))
    assert_same(*found)


def test_a_norm_without_gradients_and_one_that_raises(monkeypatch):
    found = []
    for model in (tiny_model("llama", layers=2), selective()):
        mlp = model.model.layers[0].mlp
        norm = model.model.layers[0].input_layernorm
        original = mlp.forward

        def forward(x, norm=norm, original=original):
            with torch.no_grad():
                scale = norm(x)
            with pytest.raises(RuntimeError, match="size of tensor"):
                norm(x[..., :3])
            return original(x) * scale

        monkeypatch.setattr(mlp, "forward", forward)
        found.append(step(model, tiny_batch("llama")))
    assert_same(*found)


def test_the_users_own_checkpoint_around_the_model():
    """It lets every tensor be unpacked once only."""
    from torch.utils.checkpoint import checkpoint

    found = []
    for model in (tiny_model("llama", layers=2), selective()):
        batch = without_cache(model, tiny_batch("llama"))
        loss = checkpoint(lambda model=model, batch=batch: model(**batch).loss, use_reentrant=False)
        loss.backward()
        found.append({"loss": loss.detach(), **gradients(model)})
    assert_same(*found)


def test_hooks_that_move_everything_off_leave_nothing_behind():
    """As `save_on_cpu` does on an accelerator."""
    kept = []
    for model in (tiny_model("llama", layers=2), selective()):
        batch = without_cache(model, tiny_batch("llama", tokens=64))
        step(model, batch)
        with LiveBytes(model) as live:
            before = live.current_bytes
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().numpy().copy(), torch.from_numpy):
                loss = model(**batch).loss
            kept.append(live.current_bytes - before)
            loss.backward()
    assert kept[1] < 30_000 + kept[0]  # a plain `selective` holds 260,000 here


def test_a_harmless_change_in_place():
    def block(x):
        hidden = functional.silu(x) * 2.0
        hidden += x
        hidden.relu_()
        return functional.silu(hidden) * hidden

    found = []
    for function in (block, lambda x: region()(block, x)):
        x = _inputs()
        function(x * 1).sum().backward()
        found.append({"loss": x.grad, "x": x.grad})
    assert_same(*found)


@pytest.mark.parametrize("backward_inside", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_autocast(family, backward_inside):
    plain, model = tiny_model(family, layers=2, attention="sdpa"), selective(family, attention="sdpa")
    found = []
    for one in (plain, model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = one(**without_cache(one, tiny_batch(family))).loss
            if backward_inside:
                loss.backward()
        if not backward_inside:
            loss.backward()
        found.append({"loss": loss.detach(), **gradients(one)})
    assert_same(*found)
    assert rebuilt(model) > 0


def test_accumulation_and_two_forwards_before_backward():
    plain, model = tiny_model("llama", layers=2, dropout=0.1), selective(dropout=0.1)
    found = []
    for one in (plain, model):
        torch.manual_seed(0)
        losses = [one(**without_cache(one, tiny_batch("llama", seed=seed))).loss for seed in range(2)]
        sum(losses).backward()
        for seed in range(3):
            (one(**without_cache(one, tiny_batch("llama", seed=seed))).loss / 3).backward()
        found.append({"loss": losses[0].detach(), **gradients(one)})
    assert_same(*found)


def test_the_users_hooks_around_the_model_see_what_stays():
    model, plain = selective(), tiny_model("llama", layers=2)
    baseline = step(plain, tiny_batch("llama"))
    step(model, tiny_batch("llama"))
    packed, unpacked = [], []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: packed.append(tensor.shape) or tensor.clone(), lambda tensor: unpacked.append(1) or tensor
    ):
        ours = step(model, tiny_batch("llama"))
    assert_same(baseline, ours)
    assert torch.Size([2, 16, 64]) in packed  # a block's gate projection
    assert unpacked


def test_the_users_hooks_inside_a_block():
    def block(x):
        y = functional.silu(x) * 2.0
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            y = functional.silu(y) * y
        return functional.gelu(y) * y

    found = []
    for function in (block, lambda x: region()(block, x)):
        x = _inputs()
        function(x * 1).sum().backward()
        found.append({"loss": x.grad, "x": x.grad})
    assert_same(*found)


def test_an_exception_in_a_forward_leaves_nothing(monkeypatch):
    model, plain = selective(), tiny_model("llama", layers=2)
    layer = model.model.layers[1].input_layernorm
    original = type(layer).forward
    monkeypatch.setattr(type(layer), "forward", lambda self, x: (_ for _ in ()).throw(RuntimeError("broken")))
    with pytest.raises(RuntimeError, match="broken"):
        step(model, tiny_batch("llama"))
    assert _running.tape is None
    monkeypatch.setattr(type(layer), "forward", original)
    assert_same(step(plain, tiny_batch("llama")), step(model, tiny_batch("llama")))


def test_threads_that_share_a_block():
    """nn.DataParallel runs replicas in threads, which share their regions."""
    model, plain = selective(), tiny_model("llama", layers=2)
    expected = [float(plain(**without_cache(plain, tiny_batch("llama", seed=seed))).loss) for seed in range(4)]
    losses = [None] * 4

    def run(seed):
        losses[seed] = model(**without_cache(model, tiny_batch("llama", seed=seed))).loss

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [float(loss) for loss in losses] == expected
    for seed, loss in enumerate(losses):
        loss.backward()  # of a forward in another thread
        plain(**without_cache(plain, tiny_batch("llama", seed=seed))).loss.backward()
    assert_same(gradients(plain), gradients(model))


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


class _Norm(torch.autograd.Function):
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
        return rstd * (scaled - x * rstd.pow(2) * (scaled * x).mean(-1, keepdim=True)), (gradient * x * rstd).sum(
            (0, 1)
        )


def test_custom_functions_are_kept():
    weight, codes = torch.ones(16, requires_grad=True), torch.arange(256, dtype=torch.int8).view(16, 16)

    def block(x):
        y = _Norm.apply(functional.silu(x) * x, weight)
        return functional.silu(_Quantised.apply(y, codes)) * y

    found, ours = [], region()
    for function in (block, lambda x: ours(block, x)):
        x = _inputs()
        function(x * 1).sum().backward()
        found.append({"loss": x.grad, "w": weight.grad})
        weight.grad = None
    assert_same(*found)
    assert ours.recomputed > 0
    assert any("_Norm" in name for name in ours.kept)


def test_a_hook_of_somebody_else_on_a_norm():
    found = []
    for model in (tiny_model("llama", layers=2), selective()):
        for layer in model.model.layers:
            layer.input_layernorm.register_forward_hook(lambda module, args, output: output * 1.5)
        found.append(step(model, tiny_batch("llama")))
    assert_same(*found)


@each_save
def test_nothing_from_before_the_block_runs_again(save):
    """Embeddings that are leaves, cheap operations on them, and a block whose chain could reach them."""
    found = []
    for model in (tiny_model("llama", layers=2), selective(spec={**SELECTIVE, "save": save})):
        leaf = torch.ones(1, 8, 32).requires_grad_()
        inputs = functional.silu(leaf) * leaf
        loss = model(inputs_embeds=inputs, labels=torch.ones(1, 8, dtype=torch.long), use_cache=False).loss
        if model is not None and installation(model):
            with torch.no_grad():
                leaf.mul_(1)  # what lies before the block is not ours to read again
            leaf_version = leaf._version
            assert leaf_version == 1
            continue
        loss.backward()
        found.append({"loss": loss.detach(), **gradients(model)})
    assert len(found) == 1
    model = selective(spec={**SELECTIVE, "save": save})
    leaf = torch.ones(1, 8, 32).requires_grad_()
    inputs = functional.silu(leaf) * leaf
    loss = model(inputs_embeds=inputs, labels=torch.ones(1, 8, dtype=torch.long), use_cache=False).loss
    loss.backward()
    assert_same(found[0], {"loss": loss.detach(), **gradients(model)})


def test_freezing_between_forward_and_backward_is_said():
    model = selective()
    loss = model(**without_cache(model, tiny_batch("llama"))).loss
    for parameter in model.model.layers[0].input_layernorm.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(ReplayError, match="LlamaRMSNorm saved"):
        loss.backward()


@pytest.mark.compat
@pytest.mark.parametrize("merged", [False, True])
def test_lora_merged_and_unmerged(merged):
    from peft import LoraConfig, get_peft_model

    found = []
    for model in (tiny_model("llama", layers=2), selective()):
        torch.manual_seed(1)
        config = LoraConfig(r=4, lora_dropout=0.1, init_lora_weights=False, target_modules=["q_proj", "up_proj"])
        adapted = get_peft_model(model, config)
        if merged:
            adapted.merge_adapter()
            adapted.unmerge_adapter()
        found.append(step(adapted, tiny_batch("llama")))
    assert_same(*found)
    assert rebuilt(adapted) > 0


def test_it_pickles_copies_and_comes_off():
    model = selective()
    baseline = step(model, tiny_batch("llama"))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same(baseline, step(twin, tiny_batch("llama")))
        assert rebuilt(twin) > 0
    hf_ckpt.uninstall(model)
    left = [name for name, module in model.named_modules() if module._forward_hooks or module._forward_pre_hooks]
    assert left == []


def test_routing_is_kept():
    """A router's choice is no recipe, so the same experts get the gradient."""
    experts, router = nn.ModuleList(nn.Linear(16, 16) for _ in range(4)), nn.Linear(16, 4)

    def block(x):
        weights, chosen = torch.topk(torch.softmax(router(functional.silu(x) * x), -1), 2)
        parts = torch.stack([expert(x) for expert in experts], -2)
        picked = torch.gather(parts, -2, chosen.unsqueeze(-1).expand(-1, -1, -1, 16))
        return x + (picked * weights.unsqueeze(-1)).sum(-2)

    found = []
    for function in (block, lambda x: region(("attention",))(block, x)):
        x = _inputs()
        function(x * 1).square().sum().backward()
        found.append({"loss": x.grad, **{n: p.grad for n, p in [*experts.named_parameters(), ("r", router.weight)]}})
        experts.zero_grad(set_to_none=True)
        router.zero_grad(set_to_none=True)
    assert_same(*found)


@pytest.mark.parametrize("name", ["OPT", "Qwen3", "Gemma2"])
def test_other_models(name):
    keys = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 320}
    more = {"OPT": {"ffn_dim": 64, "word_embed_proj_dim": 32}}.get(
        name, {"intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8}
    )
    found = []
    for spec in (None, SELECTIVE):
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(**keys, **more, pad_token_id=0)
        model = getattr(transformers, f"{name}ForCausalLM")(config).train()
        if spec:
            hf_ckpt.install(model, spec)
            enable(model)
        found.append(step(model, tiny_batch("llama")))
    assert_same(*found)
    assert rebuilt(model) > 0
    assert sum(hf_ckpt.describe(model).dropped.values()) > 0


# --- SAC and torch.compile ------------------------------------------------------------------------------------------


@pytest.mark.compat
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_sac_counts_what_stays(attention):
    model = selective(spec={**SELECTIVE, "engine": "sac"}, attention=attention, dropout=0.1)
    baseline = step(tiny_model("llama", layers=2, attention=attention, dropout=0.1), tiny_batch("llama"))
    assert_same(baseline, step(model, tiny_batch("llama")))
    for region_of_block in installation(model).regions.values():
        assert isinstance(region_of_block, SacRegion)
        assert region_of_block.matched >= 7  # its linear layers
        assert region_of_block.recomputed == 1


def test_sac_without_a_match_is_an_error():
    sac = SacRegion("toy", save=("attention",))
    with pytest.raises(NothingSavedError, match="`save` is \\['attention'\\]"):
        sac(lambda x: functional.silu(x) * x, _inputs())


def test_sac_knows_operations_of_this_build():
    assert operations(("linear",)) >= {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
    assert torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default in operations(("attention",))
    assert all(name.count(".") == 2 for names in OPERATIONS.values() for name in names)


@pytest.mark.parametrize("whole", [True, False], ids=["model", "block"])
def test_compiled(whole):
    """`engine: auto` is SAC there. The same numbers as compiled without us, within rounding, and no graph break."""
    torch._dynamo.reset()
    found = []
    for model in (tiny_model("llama", layers=2, attention="sdpa"), selective(attention="sdpa")):
        torch._dynamo.utils.counters.clear()
        if whole:
            compiled = torch.compile(model, backend="aot_eager")
        else:
            compiled = model
            for layer in model.model.layers:
                layer.compile(backend="aot_eager")
        loss = compiled(**without_cache(model, tiny_batch("llama"))).loss
        loss.backward()
        found.append({"loss": loss.detach(), **gradients(model)})
        assert sum(torch._dynamo.utils.counters["graph_break"].values()) == 0
    plain, ours = found
    assert plain.keys() == ours.keys()
    for name, value in plain.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-6)
    torch._dynamo.reset()


def test_rebuild_by_name_refuses_to_be_compiled():
    torch._dynamo.reset()
    model = selective(spec={**SELECTIVE, "engine": "rebuild"})
    with pytest.raises((HfCkptError, torch._dynamo.exc.TorchDynamoException), match=r"torch\.compile"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(**without_cache(model, tiny_batch("llama")))
    torch._dynamo.reset()
