"""What a compiled graph would run and keep in memory, found on graphs without compiling them."""

from __future__ import annotations

import pytest
import torch
from machine import CpuAllocations
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from hf_ckpt.engines.fused import FakeGraph, units_of
from hf_ckpt.measure.live import LiveBytes


def graph_of(function, *shapes):
    """The graph of a function of tensors; its results come as a tuple, as compilers have them."""

    def results(*args):
        found = function(*args)
        return found if isinstance(found, tuple) else (found,)

    inputs = [torch.randn(*shape) for shape in shapes]
    return make_fx(results, decomposition_table=select_decomp_table(), tracing_mode="fake")(*inputs)


def units(graph):
    """For each unit: (operation or None for a fused group, how many tensors it reads, shapes of what it writes)."""
    return [
        (
            None if unit.operation is None else unit.operation.target.overloadpacket.__name__,
            len(unit.reads),
            [tuple(node.meta["val"].shape) for node in unit.writes],
        )
        for unit in units_of(graph.graph)
    ]


def test_what_lies_between_two_products_is_one_group():
    graph = graph_of(lambda x, w, v: (torch.sigmoid(x @ w) * 2 + 1) @ v, (4, 8), (8, 16), (16, 2))
    assert units(graph) == [("mm", 2, [(4, 16)]), (None, 1, [(4, 16)]), ("mm", 2, [(4, 2)])]


def test_a_norm_is_one_group_with_its_sums():
    def norm(x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    assert units(graph_of(norm, (4, 8))) == [(None, 1, [(4, 8)])]


def test_cheap_results_are_computed_by_each_reader_and_heavy_ones_are_written():
    def shapes(do):
        def run(x, w):
            found = do(x)
            first = found @ w
            return first @ w.t() + found  # another group reads it behind two products

        return [written for _, _, written in units(graph_of(run, (4, 8), (8, 8)))]

    assert shapes(torch.exp)[0] == [(4, 8)]

    def cheap(x, y, w):
        found = x + y
        return (found * 3).exp() @ w, torch.relu((x @ w) + found)

    read = {source.name for unit in units_of(graph_of(cheap, (4, 8), (4, 8), (8, 8)).graph) for source in unit.reads}
    assert "add" not in read


def test_sums_over_tokens_are_apart_from_what_they_sum_up():
    def run(x, w):
        found = torch.sigmoid(x @ w)
        return found, found.sum(0)

    assert units(graph_of(run, (4, 8), (8, 8))) == [
        ("mm", 2, [(4, 8)]),
        (None, 1, [(4, 8)]),
        (None, 1, [(8,)]),
    ]


def test_each_of_several_results_is_freed_by_itself():
    def run(x, w):
        values, _places = torch.sort(x)  # a kernel of its own
        return values @ w

    (first, second) = units_of(graph_of(run, (4, 8), (8, 8)).graph)
    assert first.writes[0].name == "getitem"
    assert [node for node in first.writes if node in second.reads] == [first.writes[0]]


def run_on_fakes(graph, *shapes):
    """Peak of the bytes of live tensors while the graph runs, its inputs left out."""
    fake = FakeGraph(graph)
    with torch._subclasses.fake_tensor.FakeTensorMode():
        args = [torch.empty(*shape) for shape in shapes]
        with LiveBytes(torch.nn.Identity(), {str(number): arg for number, arg in enumerate(args)}) as live:
            given = list(args)
            result = fake(args)
    assert args == []  # they are given up, so that they can be freed
    assert len(given) == len(shapes)
    return result, live.peak_bytes - live.start_bytes


def test_it_takes_memory_for_what_is_written_only():
    shapes = (64, 64), (64, 64)
    graph = graph_of(lambda x, w: torch.relu(torch.sigmoid(x @ w) * 3 - 1), *shapes)
    (result,), peak = run_on_fakes(graph, *shapes)
    assert result.shape == (64, 64)
    assert peak == 64 * 64 * 4  # in the memory of the product


def test_an_order_that_needs_less_is_taken():
    """Wide results one after the other, rather than all at once as the graph has them."""
    width = 64

    def run(x, *ws):
        wide = [x @ w for w in ws]
        first, *others = ((each @ each.t()).sigmoid() for each in wide)
        return sum(others, first)

    shapes = [(8, 8)] + [(8, 8 * width)] * 4
    _, peak = run_on_fakes(graph_of(run, *shapes), *shapes)
    one = 8 * 8 * width * 4
    assert one < peak < 2 * one


@pytest.mark.long
def test_its_peak_is_that_of_compiled_code():
    """That of a forward here; see `test_compiled_plans` for whole steps of models."""
    shapes = (32, 64), (64, 256), (256, 64)

    def run(x, w, v):
        return torch.nn.functional.silu(x @ w) @ v + x

    _, predicted = run_on_fakes(graph_of(run, *shapes), *shapes)
    args = [torch.randn(*shape) for shape in shapes]
    compiled = torch.compile(run)
    with torch.no_grad():
        compiled(*args)
        with CpuAllocations() as found:
            compiled(*args)
    assert found.peak_bytes == pytest.approx(predicted, rel=0.02)
