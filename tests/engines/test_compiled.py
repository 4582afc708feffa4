"""Blocks that are compiled by themselves: what a share keeps, in how many graphs, and the same gradients."""

from __future__ import annotations

import copy
import logging
import pickle

import pytest
import torch
import torch._dynamo
from helpers.adapters import with_lora
from helpers.compiled import kept
from helpers.sparing import sparing
from helpers.steps import ROUNDING_16, assert_near, assert_same, enable, outcome, step
from torch._inductor.exc import InvalidCxxCompiler
from torch.utils.flop_counter import FlopCounterMode

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.compat import compiler
from hf_ckpt.engines import compiled as engine
from hf_ckpt.errors import HfCkptError
from hf_ckpt.models.blocks import base_model, find_blocks
from hf_ckpt.models.tiny import FAMILIES, tiny_batch, tiny_model

pytestmark = pytest.mark.usefixtures("nothing_compiled")
SHARES = (1.0, 0.5, 0.0)
BLOCKS = {"compile": "blocks"}


def compiled(spec, family="llama", lora=False, **options):
    layers = 1 if family == "t5" else 2  # its blocks are of as many kinds already
    model = tiny_model(family, **{"layers": layers, "attention": "sdpa", **options})
    model = with_lora(model, family, lora_dropout=0.0) if lora else model
    hf_ckpt.install(model, {**BLOCKS, **spec})
    enable(model)
    return model


@pytest.mark.long
@sparing("family", FAMILIES, "llama")
def test_a_share_keeps_less_and_changes_nothing(family):
    batch = tiny_batch(family, tokens=32)
    layers = 1 if family == "t5" else 2
    eager = kept(tiny_model(family, layers=layers, attention="sdpa"), batch)
    found = [kept(compiled({"share": share}, family), batch) for share in SHARES]
    sizes = [size for _, size in (eager, *found)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < 0.4 * sizes[0]
    for gradients, _ in found:
        assert_near(eager[0], gradients)


@sparing("family", FAMILIES, "llama")
def test_shares_are_bit_equal_where_kernels_are(graphs, family):
    """The same kernels run, whatever is run again; inductor may fuse each share in another way."""
    batch = tiny_batch(family, tokens=32)
    (first, most), (second, less), (third, least) = (kept(compiled({"share": s}, family), batch) for s in SHARES)
    assert_same(first, second)
    assert_same(first, third)
    assert most > less > least


@pytest.mark.slow
@sparing("family", ["llama", "gpt2", "bert"], "bert")
def test_backward_has_the_dropout_of_the_forward(family):
    """Whatever is run again, because the seeds are kept."""
    draws = {"attention_dropout": 0.3} if family == "llama" else {"dropout": 0.3}
    batch = tiny_batch(family, tokens=32)
    models = [compiled({"share": share}, family, **draws) for share in SHARES]
    first, *others = (step(model, batch) for model in models)
    assert all(len(hf_ckpt.describe(model).in_graphs) == 2 for model in models)
    plain = step(compiled({"share": 1.0}, family), batch)
    with pytest.raises(AssertionError):
        assert_near(plain, first)  # dropout is on
    for found in others:
        assert_near(first, found)


@pytest.mark.slow
def test_other_masks_in_backward_are_seen(monkeypatch):
    """What torch does by itself: the test above would fail."""
    monkeypatch.setattr(compiler, "_draws", lambda node: False)
    with torch._inductor.config.patch(force_disable_caches=True):
        first, last = (
            step(compiled({"share": share}, "bert", dropout=0.3), tiny_batch("bert")) for share in (1.0, 0.0)
        )
    with pytest.raises(AssertionError):
        assert_near(first, last)


@pytest.mark.long
def test_blocks_of_a_kind_share_graphs(graphs):
    """However many there are, and whatever the length after the second."""
    for layers in (2, 5):
        model = compiled({"share": 0.5}, layers=layers)
        for tokens in (16, 16, 24, 40):
            step(model, tiny_batch("llama", tokens=tokens))
    assert len(graphs) == 2
    mixed = compiled({"policy": "none", "rules": [{"layers": "0-1", "policy": "full", "share": 0.2}]}, layers=4)
    step(mixed, tiny_batch("llama"))
    assert len(graphs) == 4


def test_stacks_of_other_lengths_have_graphs_of_their_own_sizes(graphs):
    """An encoder and a decoder have blocks of one class; graphs for both lengths would be for any length, and keep
    other tensors than was planned."""
    model = compiled({"share": 0.0}, "t5")
    batch = tiny_batch("t5", tokens=16)
    assert batch["labels"].shape[1] != batch["input_ids"].shape[1]
    step(model, batch)
    assert len(graphs) == 2
    free = [size for graph in graphs for node in graph.graph.nodes for size in sizes(node)]
    assert free
    assert all(isinstance(size, int) for size in free)


def sizes(node):
    """The sizes of a node's result, numbers or symbols; none for what is not a tensor."""
    value = node.meta.get("example_value", node.meta.get("val"))
    return [value] if isinstance(value, torch.SymInt) else getattr(value, "shape", ())


def test_what_is_described_and_taken_off_again(graphs):
    plain, model = tiny_model("llama", layers=2, attention="sdpa"), compiled({"policy": "full"})
    batch = tiny_batch("llama")
    assert_near(step(plain, batch), step(model, batch))
    done = hf_ckpt.describe(model)
    assert done.in_graphs == tuple(find_blocks(model).modules)
    assert sum(done.forwards.values()) == 2
    assert {action.share for action in done.plan.active().values()} == {0.0}
    with hf_ckpt.paused(model):
        assert_same(step(plain, batch), step(model, batch))
    with torch.no_grad():
        model(**batch)
    hf_ckpt.uninstall(model)
    assert_same(step(plain, batch), step(model, batch))
    assert len(graphs) == 1


@pytest.mark.parametrize("way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_compiled_too(graphs, way):
    model = compiled({"share": 0.5})
    expected = step(model, tiny_batch("llama"))
    copied = way(model)
    assert_same(expected, step(copied, tiny_batch("llama")))
    assert len(graphs) == 1
    assert hf_ckpt.describe(copied).in_graphs


@pytest.mark.long
@sparing("share", SHARES, 0.5)
def test_adapters_autocast_and_accumulation(graphs, share):
    batch = tiny_batch("llama")
    plain = with_lora(tiny_model("llama", layers=2, attention="sdpa"), "llama", lora_dropout=0.0)
    model = compiled({"share": share}, lora=True)
    for each in (plain, model):
        with torch.autocast("cpu", torch.bfloat16):
            each(**batch).loss.backward()  # and a second backward on top of it
    assert_near(step(plain, batch), step(model, batch))
    assert len(graphs) == 4  # under autocast and without; the input of the first block needs no gradient


@pytest.mark.long
def test_two_micro_steps_under_autocast(graphs):
    """Bit-equal to the same compiled blocks without checkpointing."""

    def accumulated(model):
        for seed in (1, 2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(**tiny_batch("llama", seed=seed)).loss
            loss.backward()
        return outcome(model, loss)

    plain = accumulated(tiny_model("llama", layers=2, attention="sdpa"))
    models = [compiled({"share": share}) for share in SHARES]
    first, *others = (accumulated(model) for model in models)
    assert_near(plain, first, ROUNDING_16, together=True)
    for found in others:
        assert_same(first, found)
    for model in models:
        told = hf_ckpt.describe(model)
        assert len(told.in_graphs) == 2
        assert set(told.forwards.values()) == {2}
    assert len(graphs) == len(SHARES)
    once = compiled({"share": 0.0})
    with pytest.raises(AssertionError):
        assert_near(first, step(once, tiny_batch("llama", seed=2)), ROUNDING_16, together=True)


@pytest.mark.parametrize("share", [1.0, 0.0])
def test_generation_in_train_mode(graphs, share):
    """Without gradients blocks run as they are, with their cache; training goes on as before."""
    plain, model = tiny_model("llama", layers=2, attention="sdpa"), compiled({"share": share})
    prompt = {**tiny_batch("llama", tokens=8), "max_new_tokens": 6, "do_sample": False}
    prompt.pop("labels")
    before = step(model, tiny_batch("llama"))
    assert torch.equal(plain.generate(**prompt), model.generate(**prompt))
    assert model.training
    assert set(hf_ckpt.describe(model).forwards.values()) == {1}
    assert_same(before, step(model, tiny_batch("llama")))
    assert set(hf_ckpt.describe(model).forwards.values()) == {2}
    assert len(graphs) == 1


class Branching(torch.nn.Module):
    """Looks at values, which no graph can."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, hidden):
        out = self.inner(hidden)
        return out if out.sum().item() > 1e9 else out * 1.0


@pytest.mark.parametrize(("share", "again"), [(1.0, False), (0.5, True), (0.0, True)])
def test_blocks_that_do_not_compile_run_in_eager_mode(graphs, caplog, share, again):
    plain, model = tiny_model("llama", layers=2, attention="sdpa"), compiled({"share": share})
    for each in (plain, model):
        for layer in base_model(each).model.layers:
            layer.mlp = Branching(layer.mlp)
    for _ in range(2):
        assert_same(step(plain, tiny_batch("llama")), step(model, tiny_batch("llama")))
    assert caplog.text.count("do not compile") == 1
    assert "model.layers.*" in caplog.text
    done = hf_ckpt.describe(model)
    assert not done.in_graphs
    assert bool(sum(done.recomputed.values())) == again
    assert sum(done.forwards.values()) == 4 or share == 1


def test_without_a_compiler_there_is_one_error(monkeypatch):
    def compile_graph(graph, inputs):
        raise InvalidCxxCompiler

    monkeypatch.setattr(compat, "compile_graph", compile_graph)
    model = compiled({"share": 0.5})
    with pytest.raises(HfCkptError, match=r"model\.layers\.0.*install g\+\+ or clang.*leave `compile` out"):
        step(model, tiny_batch("llama"))


def test_errors_of_the_user_are_theirs(graphs):
    model = compiled({"share": 0.5})

    def broken(*args, **kwargs):
        raise KeyError("mine")

    base_model(model).model.layers[1].mlp.forward = broken
    with pytest.raises(KeyError, match="mine"):
        step(model, tiny_batch("llama"))
    assert graphs  # of the block before


def test_a_model_that_is_compiled_as_a_whole_has_its_blocks(graphs):
    plain, model = tiny_model("llama", layers=2, attention="sdpa"), compiled({"share": 0.5})
    whole = torch.compile(model, backend="aot_eager")
    found = {name.removeprefix("_orig_mod."): value for name, value in step(whole, tiny_batch("llama")).items()}
    assert_near(step(plain, tiny_batch("llama")), found)
    assert not graphs
    assert len(hf_ckpt.describe(model).in_graphs) == 2
    assert sum(hf_ckpt.describe(model).forwards.values()) == 0


# --- others ---------------------------------------------------------------------------------------------------------


def test_blocks_in_graphs_of_others_are_named():
    """A model that is compiled as a whole: no share counts, and it is said."""
    model = compiled({"share": 0.0})
    assert hf_ckpt.describe(model).compiled_by_others == ()
    torch.compile(model, backend="eager")(**tiny_batch("llama", tokens=8)).loss.backward()
    told = hf_ckpt.describe(model)
    assert told.compiled_by_others == tuple(find_blocks(model).modules)
    assert "compiled by something else, so that no share counts: 2 blocks" in str(told)


def test_the_callback_says_that_others_compile(graphs, caplog):
    callback = hf_ckpt.MemoryTimeCallback()
    model = compiled({"share": 0.0})
    with caplog.at_level(logging.WARNING, "hf_ckpt"):
        step(model, tiny_batch("llama", tokens=8))
        callback._tell_plan(None, None, model)
        assert "has no effect" not in caplog.text
    other = compiled({"share": 0.0})
    torch.compile(other, backend="eager")(**tiny_batch("llama", tokens=8)).loss.backward()
    with caplog.at_level(logging.WARNING, "hf_ckpt"):
        callback._tell_plan(None, None, other)
    assert '`compile: "blocks"` has no effect' in caplog.text


@pytest.mark.parametrize(("share", "again"), [(1.0, 0), (0.5, 2), (0.0, 2)])
def test_a_count_of_operations_sees_blocks_in_eager_mode(share, again):
    """torch compiles nothing then; blocks keep what the policy keeps that the share is nearest to."""
    batch = tiny_batch("llama", tokens=32)
    model = compiled({"share": share})
    with FlopCounterMode(display=False) as counter:  # which runs other kernels for some operations
        plain = step(tiny_model("llama", layers=2, attention="sdpa"), batch)
        found = step(model, batch)
    assert_same(plain, found)
    assert counter.get_total_flops() > 0
    told = hf_ckpt.describe(model)
    assert not told.in_graphs
    assert sum(1 for count in told.recomputed.values() if count) == again
    assert_near(plain, step(model, batch))
    assert len(hf_ckpt.describe(model).in_graphs) == 2


# --- verification ---------------------------------------------------------------------------------------------------


def test_verify_compares_with_the_same_blocks_at_share_1():
    model = tiny_model("llama", layers=2, attention="sdpa")
    result = hf_ckpt.verify(model, tiny_batch("llama", tokens=32), {**BLOCKS, "share": 0.0})
    assert result, result
    assert result.compiled == result.in_graphs == tuple(find_blocks(model).modules)
    eager, here = result.from_float64
    assert 0 < here < 2 * eager < 1e-5
    assert "2 blocks compiled" in str(result)


def test_verify_sees_compiled_blocks_that_compute_something_else(monkeypatch):
    right = engine._compiled

    def wrong(kind):
        run = right(kind)
        return run if kind.share else lambda *args: run(*args) * 1.001

    monkeypatch.setattr(engine, "_compiled", wrong)
    model = tiny_model("llama", layers=2, attention="sdpa")
    result = hf_ckpt.verify(model, tiny_batch("llama", tokens=32), {**BLOCKS, "share": 0.0})
    assert not result
    assert result.largest_difference > result.allowed_difference


@pytest.mark.slow
def test_no_distance_to_float64_where_numbers_are_drawn():
    model = tiny_model("bert", layers=2, attention="sdpa", dropout=0.1)
    result = hf_ckpt.verify(model, tiny_batch("bert", tokens=16), {**BLOCKS, "share": 0.0})
    assert result.from_float64 is None
    assert result.compiled
