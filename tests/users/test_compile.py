"""torch.compile: the same numbers as compiled without us, in no more graphs, with less saved for backward.

All backends but one run kernels of eager mode, so the same operations are run with and without checkpointing, and
gradients are bit-equal; inductor fuses and rounds anew, so there is a tolerance.
"""

from __future__ import annotations

import pytest
import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config
from accelerate.utils import compile_regions
from helpers.compiled import (
    FULL,
    INSIDE,
    LAYERS,
    MIXED,
    SELECTIVE,
    compiled_step,
    each_block,
    each_block_replaced,
    each_forward,
    in_place,
    same_but_smaller,
    small,
    without_us,
)
from helpers.sparing import sparing
from helpers.steps import assert_same

from hf_ckpt.models.blocks import find_blocks
from hf_ckpt.models.tiny import FAMILIES

pytestmark = pytest.mark.usefixtures("nothing_compiled")


@pytest.mark.long
@pytest.mark.skipif(not INSIDE, reason="block.compile() is inside of the checkpoint")
@sparing("family", FAMILIES, "llama")
def test_blocks(family):
    """One graph for all blocks of a kind, as without us; two where some are planned and others not."""
    each = {"family": family, "layers": 1 if family == "t5" else LAYERS}  # its blocks are of as many kinds already
    plain, full = same_but_smaller(FULL, each_block, planned=2, at_most=0.5, **each)
    _, selective = same_but_smaller(SELECTIVE, each_block, planned=2, **each)
    half = {"rules": [{"stack": "encoder", "layers": "0", "policy": "full"}]} if family == "t5" else MIXED
    _, mixed = same_but_smaller(half, each_block, planned=1, **each)
    assert full.saved_bytes < selective.saved_bytes
    assert full.saved_bytes < mixed.saved_bytes
    assert full.regions == selective.regions == [1] * plain.graphs
    assert set(mixed.regions) == {0, 1}
    assert mixed.graphs <= 2 * plain.graphs


@pytest.mark.long
@sparing("family", FAMILIES, "llama")
def test_a_whole_model(family):
    """One graph, with every planned block in it."""
    each = {"family": family, "layers": 1 if family == "t5" else LAYERS}
    plain, full = same_but_smaller(FULL, torch.compile, planned=2, at_most=0.5, **each)
    _, selective = same_but_smaller(SELECTIVE, torch.compile, planned=2, **each)
    assert full.saved_bytes < selective.saved_bytes
    assert full.regions == selective.regions == [2]
    assert full.graphs == selective.graphs == plain.graphs == 1


WAYS = [
    (way, spec) for way in (each_block_replaced, each_forward, in_place, compile_regions) for spec in (FULL, SELECTIVE)
]


@sparing(("way", "spec"), WAYS, (each_block_replaced, FULL), (each_forward, SELECTIVE))
def test_other_ways_to_compile(way, spec):
    """accelerate's regional compilation has the rest of the model in graphs of its own."""
    if way is each_forward and not INSIDE:
        pytest.skip("a compiled forward is inside of the checkpoint")
    plain, ours = same_but_smaller(spec, way, planned=LAYERS)
    assert sum(ours.regions) == (LAYERS if way is in_place else 1)
    assert ours.graphs == plain.graphs


# The last block of an offloaded stack is `full`: of another class, in a graph of its own.
@pytest.mark.long
@sparing(
    ("spec", "blocks", "graphs"),
    [
        ({"policy": "offload"}, LAYERS, 2),
        ({"policy": "full", "segments": 1}, LAYERS, 1),
        ({"policy": "full", "head": "auto"}, LAYERS, 1),
        ({"policy": "selective", "save": ["attention"], "offload": "saved"}, LAYERS, None),
        (MIXED, 1, None),
        ({"rules": [{"layers": "0", "policy": "full"}, {"layers": "1", "policy": "selective"}]}, LAYERS, None),
    ],
    (MIXED, 1, None),
    ids=["offload", "segments", "head", "selective", "mixed", "rules"],
)
def test_every_action(spec, blocks, graphs):
    """Whatever stands beside checkpointing lets the compiler have the blocks, one by one, and the head as a whole."""
    if INSIDE and graphs:
        _, by_block = same_but_smaller(spec, each_block, planned=blocks)
        assert by_block.graphs == graphs
    _, whole = same_but_smaller(spec, torch.compile, planned=blocks)
    assert whole.graphs == 1
    assert whole.regions == [blocks]
    assert whole.description.head_in_graph == ("head" in spec)
    assert not whole.description.chunked_heads
    assert ("where it runs as a whole: the head" in str(whole.description)) == ("head" in spec)
    assert f"where nothing is counted: {blocks} blocks" in str(whole.description)


@pytest.mark.slow
def test_less_than_the_compiler_saves_by_itself():
    """Inductor's partitioner recomputes by itself what is cheap; the policy is not lost in that."""
    partitioned = {"compiler": "aot_eager_decomp_partition"}
    way = each_block if INSIDE else each_block_replaced
    _, full = same_but_smaller(FULL, way, planned=LAYERS, at_most=0.5, **partitioned)
    _, selective = same_but_smaller(SELECTIVE, way, planned=LAYERS, **partitioned)
    _, least = same_but_smaller({**SELECTIVE, "save": ["attention"]}, way, planned=LAYERS, at_most=0.5, **partitioned)
    assert max(full.saved_bytes, least.saved_bytes) < selective.saved_bytes


@pytest.mark.slow
@pytest.mark.parametrize("way", [each_block, torch.compile], ids=["blocks", "whole"])
def test_inductor(way, tmp_path, monkeypatch):
    """Loss and gradients as by kernels of eager mode, within rounding; nothing comes from an earlier run's cache."""
    if way is each_block and not INSIDE:
        way = each_block_replaced
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    plain = without_us(way, layers=1)
    no_cache = torch._inductor.config.patch(fx_graph_cache=False, compile_threads=1)
    with no_cache, torch._functorch.config.patch(enable_autograd_cache=False):
        full, selective = (compiled_step(spec, way, compiler="inductor", layers=1) for spec in (FULL, SELECTIVE))
    for ours in (full, selective):
        assert list(ours.found) == list(plain.found)
        for name, value in plain.found.items():
            torch.testing.assert_close(ours.found[name], value, rtol=1e-4, atol=1e-6, msg=name)
        assert ours.regions == [1]
        assert (ours.graphs, ours.breaks) == (1, 0)
    assert full.saved_bytes < selective.saved_bytes < plain.saved_bytes


@pytest.mark.compat
def test_a_compiled_block_is_checkpointed_or_says_so(caplog):
    """Where the checkpoint is around what is compiled, `full` recomputes all of it, and `selective` cannot look in."""
    plain = without_us(each_block)
    names = set(find_blocks(small("llama")).modules)
    for spec in (FULL, SELECTIVE):
        ours = compiled_step(spec, each_block)
        assert_same(plain.found, ours.found, spec)
        assert ours.breaks == 0
        assert ours.graphs <= plain.graphs + (torch.__version__ < "2.9")  # seen with 2.8: a graph more
        if INSIDE:
            assert set(ours.description.in_graphs) == names
        elif spec is FULL:
            assert all(ours.description.recomputed[name] == 1 for name in names)
        if INSIDE or spec is FULL:
            assert ours.saved_bytes < plain.saved_bytes
    assert ("compile the whole model instead" in caplog.text) == (not INSIDE)


@pytest.mark.compat
@sparing("spec", [FULL, SELECTIVE], FULL, ids=["full", "selective"])
def test_a_whole_model_is_checkpointed(spec):
    _, ours = same_but_smaller(spec, torch.compile, planned=LAYERS)
    assert ours.regions == [LAYERS]
