"""Graphs of compiled blocks in torch's caches on disk, and passes of the user over them."""

from __future__ import annotations

import json

import pytest
import torch
import torch._inductor.config
from helpers.processes import SCRIPTS, python
from helpers.steps import assert_near, enable, step
from torch._inductor.custom_graph_pass import CustomGraphPass

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.engines import compiled
from hf_ckpt.models.tiny import tiny_batch, tiny_model

pytestmark = pytest.mark.usefixtures("nothing_compiled")


def process(folder, *shares):
    extra = {"TORCHINDUCTOR_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    done = python(SCRIPTS / "graph_cache.py", *shares, extra=extra, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.slow
def test_a_second_process_finds_the_graphs_of_the_first(tmp_path):
    """Those of forward and backward of the same share, and no others."""
    (first,) = process(tmp_path, "0.5")
    again, other = process(tmp_path, "0.5", "0")
    assert first["graphs"] == other["graphs"] == {"hit": 0, "miss": 2, "bypass": 0}
    assert first["autograd"] == other["autograd"] == {"hit": 0, "miss": 1, "bypass": 0}
    assert again["graphs"] == {"hit": 2, "miss": 0, "bypass": 0}
    assert again["autograd"] == {"hit": 1, "miss": 0, "bypass": 0}
    assert again["in_graphs"] == first["in_graphs"] == 2
    assert again["gradients"] == first["gradients"]


class Adding(CustomGraphPass):
    """A pass of a user, which adds a number to each reciprocal square root."""

    def __init__(self, number, name):
        self.number, self.name = number, name
        self.graphs = 0

    def __call__(self, graph):
        self.graphs += 1
        for node in [node for node in graph.nodes if node.target is torch.ops.aten.rsqrt.default]:
            with graph.inserting_after(node):
                more = graph.call_function(torch.ops.aten.add.Tensor, (node, self.number))
            more.meta = dict(node.meta)
            node.replace_all_uses_with(more, delete_user_cb=lambda user, more=more: user is not more)

    def uuid(self):
        return self.name


def passes_of(given, share=0.5):
    """The pass while blocks are compiled, beside one that the user has set."""
    with torch._inductor.config.patch(joint_custom_post_pass=given), compat.keeping(share):
        return torch._inductor.config.joint_custom_post_pass


def test_caches_know_the_pass_of_the_user():
    """Without a name for it nothing is cached, as torch has it."""
    alone, beside, other = (passes_of(given).uuid() for given in (None, Adding(0, "mine"), Adding(1, "other")))
    assert len({alone, beside, other}) == 3
    assert all(alone[0] in each for each in (beside, other))
    assert "mine" in beside
    assert passes_of(Adding(0, None)).uuid() is None
    assert passes_of(lambda graph: None).uuid() is None


@pytest.mark.slow
def test_the_pass_of_the_user_runs():
    """Over the one graph of both blocks; `describe` counts them as without it."""

    def stepped():
        torch._dynamo.reset()
        compiled._compiled.cache_clear()
        model = tiny_model("llama", layers=2, attention="sdpa")
        hf_ckpt.install(model, {"compile": "blocks", "share": 0.0})
        enable(model)
        found = step(model, tiny_batch("llama", tokens=32))
        assert len(hf_ckpt.describe(model).in_graphs) == 2
        return found

    plain = stepped()
    for number in (0.0, 0.5):
        mine = Adding(number, f"adds {number}")
        with torch._inductor.config.patch(joint_custom_post_pass=mine):
            found = stepped()
        assert mine.graphs <= 1  # 0 where a cache on disk has it
        if not number:
            assert_near(plain, found)
            continue
        with pytest.raises(AssertionError):
            assert_near(plain, found)


def test_draws_are_kept_of_what_the_user_adds():
    """Their pass comes first."""

    def adds(graph):
        source = next(iter(graph.nodes))
        with graph.inserting_after(source):
            graph.call_function(torch.ops.aten.rand.default, ([2],))

    graph = torch.fx.Graph()
    graph.output(graph.placeholder("given"))
    passes_of(adds)(graph)
    kept = [node for node in graph.nodes if "recompute" in node.meta]
    assert [node.target for node in kept] == [torch.ops.aten.rand.default]
