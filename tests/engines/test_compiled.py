"""Blocks that are compiled one by one: what a share keeps, how many graphs there are, and equal gradients."""

import pickle

import pytest
import torch
import torch._dynamo
import torch._inductor.config
from accelerate.utils import compile_regions
from helpers.adapters import with_lora
from helpers.compiled import each_block, each_block_replaced, kept
from helpers.sparing import sparing
from helpers.steps import assert_near, assert_same, planned, step
from torch._inductor.exc import InvalidCxxCompiler
from torch.utils.flop_counter import FlopCounterMode

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.engines import compiled as engine
from hf_ckpt.errors import HfCkptError, OwnerConflictError
from hf_ckpt.logs import forget_warnings
from hf_ckpt.models.blocks import find_blocks
from hf_ckpt.models.tiny import TINY_FAMILIES, tiny_batch, tiny_model

pytestmark = pytest.mark.usefixtures("nothing_compiled", "unwatched")
SHARES = (1.0, 0.5, 0.0)
BLOCKS = {"compile": "blocks"}


def small(family="llama", **options):
    layers = 1 if family == "t5" else 2  # its encoder and decoder blocks already differ
    return tiny_model(family, **{"layers": layers, "attention": "sdpa", **options})


def compiled(spec, family="llama", **options):
    return planned(small(family, **options), {**BLOCKS, **spec})


@pytest.mark.long
@sparing("family", TINY_FAMILIES, "llama")
def test_a_share_keeps_less_and_changes_nothing(family):
    batch = tiny_batch(family, tokens=32)
    eager = kept(small(family), batch)
    shares = SHARES if family == "llama" else SHARES[::2]  # inductor takes seconds for each
    results = [kept(compiled({"share": share}, family), batch) for share in shares]
    sizes = [size for _, size in (eager, *results)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < 0.4 * sizes[0]
    for gradients, _ in results:
        assert_near(eager[0], gradients)


@sparing("family", TINY_FAMILIES, "llama")
def test_shares_are_bit_equal_where_kernels_are(graphs, family):
    """Gradients are bit-equal if all shares run the same kernels; inductor may fuse each share differently."""
    batch = tiny_batch(family, tokens=32)
    (first, most), (second, less), (third, least) = (kept(compiled({"share": s}, family), batch) for s in SHARES)
    assert_same(first, second)
    assert_same(first, third)
    assert most > less > least


@pytest.mark.slow
@sparing("family", ["llama", "gpt2", "bert"], "bert")
def test_backward_has_the_dropout_of_the_forward(family):
    """For every share, backward uses the dropout masks of the forward, because seeds are saved."""
    draws = {"attention_dropout": 0.3} if family == "llama" else {"dropout": 0.3}
    batch = tiny_batch(family, tokens=32)
    models = [compiled({"share": share}, family, **draws) for share in SHARES]
    first, *others = (step(model, batch) for model in models)
    assert all(len(hf_ckpt.describe(model).in_graphs) == 2 for model in models)
    assert first["loss"] != step(compiled({"share": 1.0}, family), batch)["loss"]  # dropout is on
    for results in others:
        assert_near(first, results)


@pytest.mark.long
def test_blocks_of_a_kind_share_graphs(graphs):
    """Blocks of one kind share graphs, whatever their number, and whatever the length from the second on."""
    for layers in (2, 5):
        model = compiled({"share": 0.5}, layers=layers)
        for tokens in (16, 16, 24, 40):
            step(model, tiny_batch("llama", tokens=tokens))
    assert len(graphs) == 2
    mixed = compiled({"policy": "none", "rules": [{"layers": "0-1", "policy": "full", "share": 0.2}]}, layers=4)
    step(mixed, tiny_batch("llama"))
    assert len(graphs) == 4


@pytest.mark.trap(47)
@sparing("when", ["later", "in another model", "on every module", "of gradients"], "in another model")
def test_hooks_inside_a_block_are_refused(graphs, when, request):
    """torch ignores hooks that were added to a module after it was compiled, and would reuse graphs of other blocks."""
    batch, model = tiny_batch("llama"), compiled({"share": 0.5})
    step(model, batch)
    model = compiled({"share": 0.5}) if when == "in another model" else model
    mlp = model.model.layers[1].mlp
    register = {
        "on every module": torch.nn.modules.module.register_module_forward_hook,
        "of gradients": mlp.register_full_backward_hook,
    }.get(when, mlp.register_forward_hook)
    handle = register(lambda *args: None)
    request.addfinalizer(handle.remove)
    where = "all modules" if when == "on every module" else "a `LlamaMLP` inside"
    with pytest.raises(HfCkptError, match=rf"block 'model\.layers\.\d' is compiled, .* hook on {where}"):
        step(model, batch)
    handle.remove()
    step(model, batch)
    assert len(hf_ckpt.describe(model).in_graphs) == 2
    assert len(graphs) == 1


@pytest.mark.long
def test_stacks_of_other_lengths_have_graphs_of_their_own_sizes(graphs):
    """An encoder and a decoder of different lengths get separate graphs with fixed sizes.

    Their blocks share a class; graphs for any length would keep other tensors than planned.
    """
    batch = tiny_batch("t5", tokens=16)
    assert batch["labels"].shape[1] != batch["input_ids"].shape[1]
    step(compiled({"share": 0.0}, "t5"), batch)
    assert len(graphs) == 2
    values = [node.meta.get("example_value", node.meta.get("val")) for each in graphs for node in each.graph.nodes]
    sizes = [size for value in values for size in (getattr(value, "shape", None) or [value])]
    assert any(isinstance(size, int) for size in sizes)
    assert not any(isinstance(size, torch.SymInt) for size in sizes)


def test_a_compiled_plan_is_described_copied_paused_and_taken_off(graphs):
    plain, model = small(), compiled({"policy": "full"})
    batch = tiny_batch("llama")
    assert_near(step(plain, batch), step(model, batch))
    done = hf_ckpt.describe(model)
    assert done.in_graphs == tuple(find_blocks(model).modules)
    assert sum(done.forwards.values()) == 2
    assert {action.share for action in done.plan.active().values()} == {0.0}
    with hf_ckpt.paused(model):
        assert_same(step(plain, batch), step(model, batch))
    with torch.no_grad():  # blocks run eagerly, even if they fill a cache
        assert torch.equal(plain(**batch).logits, model(**batch).logits)
        prompt = {"input_ids": batch["input_ids"][:, :8], "max_new_tokens": 6, "do_sample": False}
        assert torch.equal(plain.generate(**prompt), model.generate(**prompt))
    assert set(hf_ckpt.describe(model).forwards.values()) == {1}
    copied = pickle.loads(pickle.dumps(model))
    assert_same(step(model, batch), step(copied, batch))
    assert len(hf_ckpt.describe(copied).in_graphs) == 2
    hf_ckpt.uninstall(model)
    assert_same(step(plain, batch), step(model, batch))
    assert len(graphs) == 1


@pytest.mark.long
@sparing("share", SHARES, 0.5)
def test_adapters_autocast_and_accumulation(graphs, share):
    batch = tiny_batch("llama")
    plain, model = (with_lora(small(), "llama", lora_dropout=0.0) for _ in range(2))
    planned(model, {**BLOCKS, "share": share})
    for each in (plain, model):
        with torch.autocast("cpu", torch.bfloat16):
            each(**batch).loss.backward()  # gradients also accumulate
    assert_near(step(plain, batch), step(model, batch))
    assert len(graphs) == 4  # with and without autocast; the first block's input needs no gradient


def no_compiler(graph, inputs):
    raise InvalidCxxCompiler


@pytest.mark.parametrize("missing", ["a graph", "a compiler"])
def test_blocks_that_do_not_compile_are_refused(missing, graphs, monkeypatch):
    model = compiled({"share": 0.5})
    if missing == "a compiler":
        monkeypatch.setattr(compat.compiler, "compile_graph", no_compiler)
    else:
        model.model.layers[1].mlp.forward = torch._dynamo.disable(model.model.layers[1].mlp.forward)
    what = "InvalidCxxCompiler: No working C" if missing == "a compiler" else "Unsupported: "
    with pytest.raises(HfCkptError, match=rf"block 'model.layers.\d' does not compile \({what}.*Leave `compile` out"):
        step(model, tiny_batch("llama"))


# --- other compilers ------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_blocks_in_graphs_of_others_are_named(graphs, caplog):
    """If the whole model is compiled, shares have no effect, and hf_ckpt says so."""
    callback, batch = hf_ckpt.MemoryTimeCallback(), tiny_batch("llama", tokens=8)
    model, other = (compiled({"share": 0.0}) for _ in range(2))
    step(model, batch)
    graphs_so_far = len(graphs)
    results = step(torch.compile(other, backend="aot_eager"), batch)
    assert_near(step(small(), batch), {name.removeprefix("_orig_mod."): value for name, value in results.items()})
    assert len(graphs) == graphs_so_far
    described = hf_ckpt.describe(other)
    assert described.compiled_by_others == described.in_graphs == tuple(find_blocks(model).modules)
    assert sum(described.forwards.values()) == 0
    assert "compiled by something else, so shares have no effect: 2 blocks" in str(described)
    text = "part of the plan has no effect, because torch.compile"
    assert caplog.text.count(text) == 1
    caplog.clear()
    forget_warnings()  # of the graph, which later steps do not trace again
    callback.on_substep_end(None, None, None, model=model)
    assert text not in caplog.text
    callback.on_substep_end(None, None, None, model=other)
    assert text in caplog.text


@pytest.mark.parametrize("way", [compile_regions, each_block, each_block_replaced])
@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_blocks_that_something_else_compiles_by_themselves_are_refused(first, way):
    """Blocks that something else compiles are refused: that compiler would decide what is kept, not the share."""
    model = small()
    if first == "theirs":
        model = way(model, backend="aot_eager")
    planned(model, {**BLOCKS, "share": 0.5})
    if first == "ours":
        model = way(model, backend="aot_eager")
    with pytest.raises(OwnerConflictError, match=r"block 'layers.0.*' of LlamaModel is compiled by something else"):
        step(model, tiny_batch("llama"))


def test_a_count_of_operations_sees_blocks_in_eager_mode(graphs):
    """While an operation counter is active, blocks run as `full`."""
    batch = tiny_batch("llama", tokens=32)
    model = compiled({"share": 0.5})
    with FlopCounterMode(display=False) as counter:  # runs other kernels for some operations
        plain = step(small(), batch)
        results = step(model, batch)
    assert_same(plain, results)
    assert counter.get_total_flops() > 0
    assert not hf_ckpt.describe(model).in_graphs
    assert set(hf_ckpt.describe(model).recomputed.values()) == {1}
    assert_near(plain, step(model, batch))
    assert len(hf_ckpt.describe(model).in_graphs) == 2


# --- verification ---------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_verify_compares_with_the_same_blocks_at_share_1(graphs, monkeypatch):
    right = engine._compiled

    def wrong(stack, kind, share):
        run = right(stack, kind, share)
        return run if share else lambda *args: run(*args) * 1.001

    for make in (right, wrong):
        monkeypatch.setattr(engine, "_compiled", make)
        model = small()
        result = hf_ckpt.verify(model, tiny_batch("llama", tokens=32), {**BLOCKS, "share": 0.0})
        assert bool(result) == (make is right), result
        assert set(result.recomputed) == set(find_blocks(model).modules)
        if result:
            assert "(allowed 1e-05)" in result.gradients
        else:
            assert "differs by" in result.problems[0]


# --- caches on disk, and the user's passes --------------------------------------------------------------------------


@pytest.mark.slow
def test_graphs_on_disk_are_found_by_their_share(tmp_path, monkeypatch):
    """As in a second process: the graphs for forward and backward of the same share are found, and no others."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    counters, results = torch._dynamo.utils.counters, []
    for share, hits in ((0.5, 0), (0.5, 1), (0.0, 0)):
        torch._dynamo.reset()
        engine._compiled.cache_clear()
        counters.clear()
        model = compiled({"share": share})
        results.append(step(model, tiny_batch("llama", tokens=32)))
        assert len(hf_ckpt.describe(model).in_graphs) == 2
        for kind, name, graphs in (("inductor", "fxgraph_cache", 2), ("aot_autograd", "autograd_cache", 1)):
            counted = [counters[kind][f"{name}_{word}"] for word in ("hit", "miss", "bypass")]
            assert counted == [graphs * hits, graphs * (1 - hits), 0], (share, kind)
    assert_same(*results[:2])


def test_another_pass_over_graphs_is_refused():
    taken = torch._inductor.config.patch(joint_custom_post_pass=lambda graph: None)
    with taken, pytest.raises(HfCkptError, match="joint_custom_post_pass"), compat.compiler.keeping(0.5):
        pass
