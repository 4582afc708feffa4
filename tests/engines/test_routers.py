"""A recomputed block sends tokens to the same experts as its forward, even if scores differ in the last bit."""

import pytest
import torch
import transformers
from helpers.experts import EXPERTS, IMPLEMENTATIONS, MORE_EXPERTS, ONE_BY_ONE, experts
from helpers.sparing import sparing
from helpers.steps import ENGINES, RUN_AGAIN, assert_near, assert_same, enable, planned, step
from peft import LoraConfig, get_peft_model
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.compile_fx import compile_fx
from torch.nn import functional
from torch.overrides import TorchFunctionMode

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.engines import routers as routing
from hf_ckpt.engines.running import running
from hf_ckpt.models.blocks import find_blocks
from hf_ckpt.models.parts import routers
from hf_ckpt.models.tiny import TINY_FAMILIES, tiny_batch, tiny_model

pytestmark = pytest.mark.usefixtures("unwatched")

ALL = (*EXPERTS, *MORE_EXPERTS)
BATCH = tiny_batch("llama", tokens=24)
needs_routers = pytest.mark.skipif(ONE_BY_ONE is None, reason="routers of transformers 4 return something else")


def routers_of(model):
    return [router for block in find_blocks(model).modules.values() for router in routers(block)]


class Noise(TorchFunctionMode):
    """Changes about half of the routers' scores by their last bit, differently in each call."""

    def __init__(self, model):
        super().__init__()
        self.weights = {getattr(router, "classifier", router).weight.data_ptr() for router in routers_of(model)}
        self.calls = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        if function is functional.linear and args[1].data_ptr() in self.weights:
            self.calls += 1
            drawn = torch.rand(results.shape, generator=torch.Generator().manual_seed(self.calls)) < 0.5
            values = results.detach()
            results = results + (torch.nextafter(values, torch.full_like(values, torch.inf)) - values) * drawn
        return results


def tied(model):
    """The model, whose routers now score all experts equally, up to rounding."""
    with torch.no_grad():
        for router in routers_of(model):
            getattr(router, "classifier", router).weight.fill_(1.0)
    return model


def noisy_step(model, batch=BATCH, place=-1):
    """A step with noisy scores, and for each router the choices that it returns at a place, one after another."""
    lists = [[] for _ in routers_of(model)]
    for router, results in zip(routers_of(model), lists, strict=True):
        router.register_forward_hook(lambda _, args, output, results=results: results.append(output[place].clone()))
    with Noise(model):
        return step(model, batch), lists


@pytest.mark.trap(33)
@needs_routers
@sparing(
    ("name", "spec"),
    [(name, spec) for name in ALL for spec in RUN_AGAIN],
    *((name, "full") for name in ALL),
    ("mixtral", "offload"),
)
def test_the_same_experts_whatever_the_last_bit(name, spec, lanes):
    plain, _ = noisy_step(tied(experts(name)))
    model = planned(tied(experts(name)), RUN_AGAIN[spec])
    results, lists = noisy_step(model)
    assert_near(plain, results, 1e-4)
    for first, *again in lists:
        assert again
        assert all(torch.equal(first, each) for each in again)
    described = hf_ckpt.describe(model)
    assert {*described.recomputed.values()} == {1}
    assert bool(described.moved) == (spec == "offload")


def argmax_model():
    """A seq2seq model whose routers call `argmax` and `max`."""
    sizes = {"vocab_size": 320, "d_model": 32, "num_experts": 4, "expert_capacity": 64, "decoder_start_token_id": 0}
    sizes |= {"d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0, "router_jitter_noise": 0.0}
    torch.manual_seed(0)
    config = transformers.SwitchTransformersConfig(**sizes)
    return tied(transformers.SwitchTransformersForConditionalGeneration(config).train())


@needs_routers
def test_the_same_largest_score_whatever_the_last_bit():
    batch, model = tiny_batch("t5", tokens=24), planned(argmax_model())
    plain, _ = noisy_step(argmax_model(), batch, 0)
    results, lists = noisy_step(model, batch, 0)
    assert_near(plain, results, 1e-4)
    assert all(torch.equal(first, again) for first, again in lists)  # every router ran again
    assert set(hf_ckpt.describe(model).recomputed.values()) == {1}
    assert len({*lists[0][0].argmax(-1).flatten().tolist()}) > 1


@pytest.mark.long
@needs_routers
def test_routers_of_compiled_blocks_run_once(nothing_compiled, monkeypatch):
    """Compiled blocks keep the choice of experts whatever their share."""
    backward = []

    def compile_graph(graph, inputs):
        with torch._functorch.config.patch(enable_autograd_cache=False):
            return compile_fx(graph, inputs, inner_compile=each)

    def each(graph, inputs, *, is_backward=False, **options):
        if is_backward:
            backward.append([node for node in graph.graph.nodes if node.target == torch.ops.aten.topk.default])
        return make_boxed_func(graph)

    monkeypatch.setattr(compat.compiler, "compile_graph", compile_graph)
    model = planned(experts("deepseek_v3"), {"compile": "blocks", "share": 0.0})
    assert_near(step(experts("deepseek_v3"), BATCH), step(model, BATCH))
    assert len(hf_ckpt.describe(model).in_graphs) == 2
    assert backward == [[]]


CASES = [(name, implementation) for name in EXPERTS for implementation in IMPLEMENTATIONS]
CASES += [pytest.param(name, None, marks=needs_routers) for name in MORE_EXPERTS]


@pytest.mark.compat
@pytest.mark.parametrize(("name", "implementation"), CASES)
def test_gradients_and_counts_under_every_spec(name, implementation, lanes):
    """Recomputation sends tokens to the same experts, also with jitter noise."""
    model = experts(name, implementation=implementation)
    expected = step(model, BATCH)
    routers = [key for key in expected if key.endswith((".gate.weight", ".router.weight"))]
    assert len(routers) == 2
    assert all(expected[key].any() for key in routers)
    hf_ckpt.install(model)
    for engine, spec in ENGINES.items():
        enable(model, spec)
        assert_same(expected, step(model, BATCH), engine)
        done = hf_ckpt.describe(model).recomputed
        assert [*done.values()] == [1, 1] if engine in RUN_AGAIN else all(done.values())


@needs_routers
def test_adapters_of_a_router():
    """PEFT writes to the router's weight in every forward; that does not count as a change before backward.

    Each accumulated forward keeps its own choices.
    """

    def adapted():
        torch.manual_seed(1)
        config = LoraConfig(r=4, init_lora_weights=False, target_modules=[], target_parameters=["mlp.gate.weight"])
        return get_peft_model(experts("qwen3_moe"), config).train()

    results = []
    for model in (adapted(), planned(adapted())):
        losses = [model(**tiny_batch("llama", seed=seed, tokens=24), use_cache=False).loss for seed in (1, 2)]
        sum(losses).backward()
        results.append(
            {"loss": losses[1].detach(), **{n: p.grad for n, p in model.named_parameters() if p.requires_grad}}
        )
    assert_same(*results)
    assert set(hf_ckpt.describe(model).recomputed.values()) == {2}


@needs_routers
@pytest.mark.parametrize("name", [*TINY_FAMILIES, *ALL])
def test_hooks_are_on_routers_only_and_come_off(name):
    model = planned(tiny_model(name) if name in TINY_FAMILIES else experts(name))
    inside = [module for block in find_blocks(model).modules.values() for module in block.modules()]
    hooked = [module for module in inside if module._forward_pre_hooks or module._forward_hooks]
    assert hooked == routers_of(model)
    assert ["Router" in type(module).__name__ for module in hooked] == [True] * (0 if name in TINY_FAMILIES else 2)
    hf_ckpt.uninstall(model)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in hooked)


@needs_routers
@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_an_error_in_a_router_leaves_nothing(error):
    model = planned(experts("mixtral"))

    def raises(*args):
        raise error("here")

    router = routers_of(model)[1]
    router.forward = raises
    with pytest.raises(error):
        step(model, BATCH)
    del router.forward
    assert running.choices is None
    assert torch._C._len_torch_function_stack() == 0
    assert_same(step(experts("mixtral"), BATCH), step(model, BATCH))


def test_what_is_kept_is_small():
    """Choices take one byte per expert and token; sparse attention, which chooses too many entries, is not kept."""
    for experts_there, kind in ((256, torch.uint8), (257, torch.int16), (40_000, torch.int32)):
        scores = torch.rand(3, experts_there)
        results = routing._small(scores.topk(8).indices, scores, -1)
        assert results.dtype == kind
        assert torch.equal(results.long(), scores.topk(8).indices)
    assert routing._small(torch.rand(3, 200).topk(65).indices, torch.rand(3, 200), -1) is None


def test_an_additional_router_call_in_backward_routes_anew():
    choices, scores = routing.Choices(), torch.tensor([[9.0, 5.0, 7.0]], requires_grad=True)
    with choices.of_one_run():
        choices.intercept(True)
        first = torch.tensor([[1.0, 3.0, 2.0]]).topk(k=1, dim=1)
    with choices.of_one_run(again=True):
        choices.intercept(True)
        again = torch.topk(input=scores, k=1)
        wider = torch.topk(torch.rand(2, 3), 1)
    assert first.indices.tolist() == again.indices.tolist() == [[1]]
    assert again.values.tolist() == [[5.0]]
    assert wider.indices.shape == (2, 1)
    (gradient,) = torch.autograd.grad(again.values.sum(), scores)
    assert gradient.tolist() == [[0.0, 1.0, 0.0]]
