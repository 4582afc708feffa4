"""Blocks that something else compiles too: the plan's share counts, and everything is given back afterwards."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import TorchDynamoPlugin, compile_regions
from accelerate.utils import other as accelerate_other
from helpers.compiled import each_block, each_block_replaced
from helpers.sparing import sparing
from helpers.steps import assert_near, assert_same, enable, step
from torch._dynamo.backends.registry import lookup_backend

import hf_ckpt
from hf_ckpt.models.blocks import find_blocks
from hf_ckpt.models.tiny import FAMILIES, tiny_batch, tiny_model

pytestmark = pytest.mark.usefixtures("nothing_compiled")
BLOCKS = ("model.layers.0", "model.layers.1")
BATCH = {"tokens": 16}
others = []
"""Graphs of other compilers than hf_ckpt."""


def others_compile(graph, inputs):
    """A backend that can be pickled."""
    others.append(graph)
    return lookup_backend("aot_eager")(graph, inputs)


@pytest.fixture(autouse=True)
def no_graphs_of_others():
    others.clear()


def regions_in_place(model, **options):
    """What accelerate does for DeepSpeed, and for FSDP2 in versions that know it."""
    accelerate_other.compile_regions_deepspeed(model, **options)
    return model


WAYS = [compile_regions, regions_in_place, each_block, each_block_replaced]


def small(family="llama", layers=2, **options):
    return tiny_model(family, layers=layers, attention="sdpa", **options)


def planned(model=None, spec=None):
    model = small() if model is None else model
    hf_ckpt.install(model, {"compile": "blocks", "share": 0.5} if spec is None else spec)
    enable(model)
    return model


def pickled(model):
    return pickle.loads(pickle.dumps(model))


def plainly_named(found):
    return {name.replace("_orig_mod.", ""): value for name, value in found.items()}


def stepped(model, family="llama"):
    return plainly_named(step(model, tiny_batch(family, **BATCH)))


def ways_in(model):
    """Everything by which torch.compile runs modules of a model: name and attribute -> value."""
    return {
        (name, attribute): vars(module)[attribute]
        for name, module in model.named_modules()
        for attribute in ("forward", "_compiled_call_impl")
        if attribute in vars(module)
    }


@sparing(
    ("way", "first"),
    [(way, first) for way in WAYS for first in (True, False)],
    (compile_regions, True),
    (compile_regions, False),
    (each_block, True),
)
def test_one_owner(graphs, way, first, caplog):
    """The numbers and the graphs of compiled blocks without another compiler, which keeps what is not in blocks."""
    expected = stepped(planned())
    assert len(graphs) == 1
    model = way(planned() if first else small(), backend=others_compile)
    model = model if first else planned(model)
    for _ in range(2):
        assert_same(expected, stepped(model))
    assert len(graphs) == 1
    outside = {compile_regions: 4, regions_in_place: 2}.get(way, 0)  # (embeddings,) positions, norm(, head)
    assert len(others) == outside
    told = hf_ckpt.describe(model)
    assert told.in_graphs == BLOCKS
    assert not told.compiled_by_others
    assert set(told.forwards.values()) == {2}
    assert caplog.text.count("compiled by hf_ckpt") == 1


@sparing(
    ("way", "off"),
    [(way, off) for way in WAYS for off in ("uninstall", "disable", "paused")],
    (compile_regions, "paused"),
    (each_block, "uninstall"),
)
def test_all_is_given_back(graphs, way, off):
    plain = way(small(), backend=others_compile)
    expected = stepped(plain)
    without_us = len(others)
    model = way(planned(), backend=others_compile)
    before = ways_in(model)
    ours = stepped(model)
    assert ways_in(model) != before
    if off == "paused":
        with hf_ckpt.paused(model):
            assert ways_in(model) == before
            assert_same(expected, stepped(model))
            assert len(others) == without_us
    else:
        hf_ckpt.uninstall(model) if off == "uninstall" else model.gradient_checkpointing_disable()
        assert ways_in(model) == before
        assert_same(expected, stepped(model))
    if off != "uninstall":
        if off == "disable":
            enable(model)
        assert_same(ours, stepped(model))
        assert ways_in(model) != before
        hf_ckpt.uninstall(model)
        assert ways_in(model) == before


@sparing(
    ("way", "copied"),
    [(way, copied) for way in WAYS for copied in (copy.deepcopy, pickled)],
    (compile_regions, copy.deepcopy),
    (each_block, pickled),
)
def test_copies_are_taken_over_too(graphs, way, copied):
    """torch compiles what it has wrapped anew in a copy, and leaves the rest uncompiled."""
    model = way(planned(), backend=others_compile)
    expected = stepped(model)
    twin = copied(model)
    assert_same(expected, stepped(twin))
    assert len(graphs) == 1
    told = hf_ckpt.describe(twin)
    assert (told.in_graphs, told.compiled_by_others) == (BLOCKS, ())
    before = ways_in(model)
    hf_ckpt.uninstall(twin)
    assert ways_in(model) == before
    assert_same(expected, stepped(model))


@sparing("family", FAMILIES, "bert")
def test_every_family(graphs, family):
    layers = 1 if family == "t5" else 2
    expected = stepped(planned(small(family, layers)), family)
    mine = len(graphs)
    model = compile_regions(planned(small(family, layers)), backend=others_compile)
    assert_same(expected, stepped(model, family))
    assert len(graphs) == mine
    assert set(hf_ckpt.describe(model).in_graphs) == set(find_blocks(model).modules)
    assert not hf_ckpt.describe(model).compiled_by_others


def test_plans_without_compile_leave_all_to_the_other(graphs):
    model = compile_regions(planned(spec={"policy": "full"}), backend=others_compile)
    before = ways_in(model)
    stepped(model)
    assert ways_in(model) == before
    assert len(others) == 5
    assert not graphs


@pytest.mark.slow
def test_a_plan_that_comes_in_the_middle_of_a_training(graphs):
    """The budget's first forward decides; the blocks are hf_ckpt's from that one on."""
    model = compile_regions(planned(spec={"compile": "blocks", "budget": "1GiB"}), backend=others_compile)
    stepped(model)
    told = hf_ckpt.describe(model)
    assert told.plan.prediction.budget_bytes == 2**30
    assert (told.in_graphs, told.compiled_by_others) == (BLOCKS, ())
    assert len(others) == 4


def test_a_second_wrapping_of_the_same_model(graphs):
    """accelerate makes a new model each time, which has the hooks of the first."""
    model = planned()
    expected = stepped(model)
    for _ in range(2):
        again = compile_regions(model, backend=others_compile)
        assert_same(expected, stepped(again))
    assert not hf_ckpt.describe(model).compiled_by_others
    assert len(graphs) == 1


@pytest.fixture
def accelerators(monkeypatch):
    """Make accelerators as in a process of their own."""
    states = (AcceleratorState, GradientState, PartialState)
    for state in states:
        state._reset_state()
    yield Accelerator
    for state in states:
        state._reset_state()


@pytest.mark.slow
def test_accelerates_regional_compilation(accelerators):
    """By accelerate itself, with inductor for both."""
    expected = stepped(planned())
    plugin = TorchDynamoPlugin(backend="inductor", use_regional_compilation=True)
    accelerator = accelerators(cpu=True, dynamo_plugin=plugin)
    model = planned()
    prepared = accelerator.prepare(model)
    assert_near(expected, stepped(prepared))
    for found in (hf_ckpt.describe(prepared), hf_ckpt.describe(model)):
        assert (found.in_graphs, found.compiled_by_others) == (BLOCKS, ())
    assert any(isinstance(module, torch._dynamo.OptimizedModule) for module in prepared.modules())
    before = stepped(prepared)
    hf_ckpt.uninstall(prepared)
    assert_near(before, stepped(prepared))
