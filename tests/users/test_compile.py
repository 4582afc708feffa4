"""The user's torch.compile: the same results as compiled without hf_ckpt, in as many graphs, with less saved.

All backends but inductor run eager kernels, so gradients are bit-equal with and without checkpointing.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any, NamedTuple

import pytest
import torch
import torch._dynamo
from accelerate.utils import compile_regions
from helpers.compiled import each_block, each_block_replaced, each_forward, in_place, kept
from helpers.planned import raced
from helpers.sparing import sparing
from helpers.steps import assert_same, enable, outcome, planned, without_cache
from helpers.tables import table

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.errors import HfCkptError
from hf_ckpt.logs import forget_warnings
from hf_ckpt.models.blocks import find_blocks
from hf_ckpt.models.tiny import TINY_FAMILIES, tiny_batch, tiny_model
from hf_ckpt.units import counted

pytestmark = pytest.mark.usefixtures("nothing_compiled")
LAYERS = 2
FULL, SELECTIVE = {"policy": "full"}, {"policy": "selective"}
BUDGET = {"policy": "budget", "budget": "1GiB"}


class Compiled(NamedTuple):
    """The results of one training step."""

    found: dict[str, Any]  # loss and gradients
    saved_bytes: int  # for backward, without parameters
    graphs: int
    regions: list[int]  # checkpointed regions per graph
    warned: frozenset[Any]
    description: Any


def small(family="llama", layers=LAYERS, spec=None):
    """A small model, with `spec` or without hf_ckpt, and the counters of Dynamo, which has forgotten all graphs."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    keys = {"problem_type": "single_label_classification"} if family == "bert" else {}  # else set in a forward
    model = tiny_model(family, layers=layers, attention="sdpa", **keys)
    if spec is not None:
        planned(model, spec)
    return model, torch._dynamo.utils.counters


def checkpoints_compiled(counts):
    """A compiler backend that appends to `counts` the number of checkpointed regions in each graph."""

    def backend(graph, inputs):
        counts.append(sum("checkpoint" in str(node.target) for node in graph.graph.nodes if node.op == "call_function"))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    return backend


def compiled_step(spec, way, family="llama", layers=LAYERS):
    """Compile a model, with `spec` installed or without hf_ckpt, and run a step."""
    model, counters = small(family, layers, spec)
    batch = without_cache(model, tiny_batch(family))
    regions: list[int] = []
    options = {} if way is compile_regions else {"fullgraph": True}  # accelerate's wrappers may break
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        run = way(model, backend=checkpoints_compiled(regions), **options)
        torch.manual_seed(7)
        loss = run(**batch).loss
        loss.backward()
    found = {name.replace("_orig_mod.", ""): value for name, value in outcome(model, loss).items()}
    graphs = counters["stats"]["unique_graphs"]
    _, saved = kept(run, batch)
    assert counters["stats"]["unique_graphs"] == graphs  # measuring compiles nothing
    assert sum(counters["graph_break"].values()) == 0
    texts = frozenset((warning.category, str(warning.message)) for warning in warned)
    return Compiled(found, saved, graphs, regions, texts, hf_ckpt.describe(model) if spec is not None else None)


@functools.cache
def without_us(way, *sizes):
    return compiled_step(None, way, *sizes)


def same_but_smaller(spec, way, planned, *sizes):
    """Compare a step under `spec` with one without hf_ckpt."""
    plain, ours = without_us(way, *sizes), compiled_step(spec, way, *sizes)
    assert_same(plain.found, ours.found, f"{spec} {way.__name__}")
    assert ours.warned <= plain.warned
    assert sum(plain.regions) == 0
    assert len(ours.description.in_graphs) == planned
    assert not sum(ours.description.forwards.values())  # nothing is counted inside a graph
    assert 0 < ours.saved_bytes < plain.saved_bytes
    return plain, ours


# --- one step ---------------------------------------------------------------------------------------------------------

CASES = [("llama", way) for way in (each_block, each_block_replaced, each_forward, compile_regions, in_place)]
CASES += [(name, way) for name in TINY_FAMILIES for way in (each_block, torch.compile) if (name, way) not in CASES]


@pytest.mark.long
@sparing(
    ("family", "way"),
    CASES,
    *[("llama", way) for way in (each_block, each_block_replaced, compile_regions, torch.compile)],
)
def test_a_compiled_model_trains_the_same_and_saves_less(family, way):
    """There is one graph for all blocks of a kind, or for the model, as without hf_ckpt."""
    sizes = family, 1 if family == "t5" else LAYERS  # its encoder and decoder blocks already differ
    plain, full = same_but_smaller(FULL, way, 2, *sizes)
    _, selective = same_but_smaller(SELECTIVE, way, 2, *sizes)
    assert full.saved_bytes < 0.5 * plain.saved_bytes
    assert full.saved_bytes == selective.saved_bytes  # there, `selective` runs as `full`
    assert "`selective` runs as `full` in graphs" in str(selective.description)
    assert full.graphs == selective.graphs == plain.graphs
    regions = 2 if way in (torch.compile, in_place) or family == "t5" else 1
    assert sum(full.regions) == sum(selective.regions) == regions


IN_GRAPHS = table(__file__, "graphs.yaml")


@pytest.mark.long
@sparing("name", IN_GRAPHS, "mixed")
def test_every_action_runs_in_graphs(name):
    """Every action lets the compiler see blocks, one by one or in a whole model; a chunked head then runs whole."""
    spec, blocks, graphs = IN_GRAPHS[name].values()
    _, by_block = same_but_smaller(spec, each_block, blocks)
    assert by_block.graphs == graphs
    _, whole = same_but_smaller(spec, torch.compile, blocks)
    assert whole.graphs == 1
    assert whole.regions == [blocks]
    assert ("in a graph" in whole.description.head_ran) == ("head" in spec)
    assert not whole.description.chunked_heads
    assert f"where nothing is counted: {counted(blocks, 'block')}" in str(whole.description)


@pytest.mark.long
@pytest.mark.trap(34)
@pytest.mark.compat
def test_a_compiled_block_is_checkpointed_or_a_warning_says_why_not(caplog):
    """A compiled block is checkpointed; if the checkpoint is outside of it, `selective` cannot work and says so.

    Before transformers 5, `block.compile()` does not compile the checkpoint.
    """
    inside = "__call__" not in vars(compat.transformers.GradientCheckpointingLayer)
    plain = without_us(each_block)
    names = set(find_blocks(small()[0]).modules)
    for spec in (FULL, SELECTIVE):
        ours = compiled_step(spec, each_block)
        assert_same(plain.found, ours.found, spec)
        assert ours.graphs <= plain.graphs + (torch.__version__ < "2.9")  # with 2.8, one graph more
        if inside:
            assert set(ours.description.in_graphs) == names
        elif spec is FULL:
            assert all(ours.description.recomputed[name] == 2 for name in names)  # a second step counts saved bytes
        if inside or spec is FULL:
            assert ours.saved_bytes < plain.saved_bytes
    assert ("found nothing in blocks like" in caplog.text) == (not inside)


# --- trainings --------------------------------------------------------------------------------------------------------


def graphs_of_training(spec, way, layers):
    """Number of graphs after each of four steps of alternating lengths; the plan is paused between them."""
    model, counters = small(layers=layers, spec=spec)
    run = way(model, backend="aot_eager")
    graphs = []
    for number in range(4):
        batch = without_cache(model, tiny_batch("llama", tokens=16 + 8 * (number % 2), seed=number))
        loss = run(**batch).loss
        loss.backward()
        model.eval()
        with hf_ckpt.paused(model), torch.no_grad():
            run(**batch)
        model.train()
        if spec is not None:
            enable(model)
        graphs.append(counters["stats"]["unique_graphs"])
    assert not counters["graph_break"]
    if spec is not None:
        assert len(hf_ckpt.describe(model).in_graphs) == layers
    return graphs, outcome(model, loss)


@pytest.mark.slow
@pytest.mark.parametrize(("way", "layers"), [(each_block_replaced, 10), (torch.compile, 1)])
def test_enabling_and_pausing_a_plan_recompile_nothing(way, layers):
    """There are as many graphs as without hf_ckpt, in training and evaluation, for fixed and varying lengths.

    Enabling a plan repeatedly must not recompile: torch.compile gives up after eight graphs.
    """
    expected, found = graphs_of_training(None, way, layers)
    assert expected == [2, 4, 4, 4]
    for spec in (SELECTIVE, FULL):
        graphs, ours = graphs_of_training(spec, way, layers)
        assert graphs == expected, spec
        assert_same(found, ours, spec)


@pytest.mark.long
def test_verify_says_that_it_cannot_look_into_graphs():
    model, _ = small(layers=1)
    run = torch.compile(model, backend="aot_eager")
    result = hf_ckpt.verify(run, tiny_batch("llama"), FULL)
    assert not result
    assert result.problems[0].startswith("planned but not recomputed: model.layers.0 ")
    assert "verify the model before you compile it" in str(result)
    with torch.compiler.set_stance("force_eager"):
        eager = hf_ckpt.verify(run, tiny_batch("llama"), FULL)
    assert eager, eager
    assert "compiled" not in str(eager)


@pytest.mark.slow
def test_a_budget_is_planned_by_eager_steps():
    """Steps in a graph cannot be measured and run `full`; eager steps lead to a plan, which is then compiled."""
    model, counters = small(spec=BUDGET)
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    batch = without_cache(model, tiny_batch("llama"))
    run(**batch).loss.backward()
    assert [action.kind for action in hf_ckpt.describe(model).plan.active().values()] == ["full"] * LAYERS
    with torch.compiler.set_stance("force_eager"):
        for _ in range(20):
            model.zero_grad()
            run(**batch).loss.backward()
    model.zero_grad()
    described = hf_ckpt.describe(model)
    assert described.plan.prediction.budget_bytes == 2**30
    assert {"keep"} in raced(model)  # everything fits
    run(**batch).loss.backward()
    assert (counters["stats"]["unique_graphs"], not counters["graph_break"]) == (2, True)


@pytest.mark.parametrize("way", [each_block_replaced, each_forward, compile_regions])
def test_a_budget_of_blocks_that_are_compiled_on_a_cpu_is_refused(way):
    model, _ = small(spec=BUDGET)
    with pytest.raises(HfCkptError, match=r"cannot measure compiled blocks here: .* an accelerator whose allocator"):
        way(model, backend="aot_eager")(**without_cache(model, tiny_batch("llama")))


@pytest.mark.long
def test_a_graph_of_the_model_that_prevents_a_plan_is_said_once(caplog):
    """Under a budget nothing is measured in it, a head runs as a whole, and no share counts. Other plans work there."""
    for spec, warnings_ in ((FULL, 0), (BUDGET, 1), ({"policy": "none", "head": 5}, 1), ({"compile": "blocks"}, 1)):
        caplog.clear()
        forget_warnings()
        model, _ = small(layers=1, spec=spec)
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        for _ in range(2):
            compiled(**without_cache(model, tiny_batch("llama"))).loss.backward()
        assert caplog.text.count("part of the plan has no effect, because torch.compile") == warnings_
