"""Every way to run a step, alone on a model: what it runs again, what it saves, and its gradients."""

from __future__ import annotations

import collections
import dataclasses
import sys

import pytest
import session
import torch
from session import Session
from torch.utils._python_dispatch import TorchDispatchMode
from ways import COMPILED, NONE, OUR_WAYS, OURS_COMPILED, PEERS, TRL, Way, known_ways, wanted

from hf_ckpt import compat
from hf_ckpt.errors import HfCkptError, MissingDependencyError
from hf_ckpt.prediction.workload import Workload

EAGER = [way for way in (*PEERS, *OUR_WAYS) if way.group not in (COMPILED, OURS_COMPILED) and not way.to_host]
TO_HOST = ["offload (HF)", "activation offloading (TRL)", "full, activation offloading (TRL)", "offload"]
NAMED = {way.name: way for way in (*PEERS, *OUR_WAYS)}


def measured(workload, way, path):
    """Figures of one way, in this process."""
    alone = Session(workload, way)
    try:
        found = alone.compare(path, way is NONE)
        return {**found, **alone.peaks(), "live_bytes": alone.live_peak(), "seconds": alone.timed()}
    finally:
        alone.close()


@pytest.fixture(scope="module")
def figures(workload, tmp_path_factory):
    path = tmp_path_factory.mktemp("figures") / "gradients.pt"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "keep_freed_memory", lambda: None)
        return {way.name: measured(workload, way, path) for way in EAGER}


@pytest.mark.long
@pytest.mark.parametrize("name", [way.name for way in EAGER])
def test_every_way_runs_something_again_and_gives_the_same_gradients(figures, name):
    row = figures[name]
    if name == "none":
        assert (row["recomputed"], row["repeatable"]) == (None, True)
        return
    assert row["recomputed"] > 0
    if "head" in name:  # sums in another order
        assert 0 < row["difference"] < 1e-5
        assert row["first_difference"] is not None
    else:
        assert (row["first_difference"], row["difference"]) == (None, 0.0)
    assert row["seconds"] > 0


@pytest.mark.parametrize("name", [way.name for way in EAGER])
def test_the_allocator_and_the_count_of_tensors_agree(figures, name):
    """On this model no kernel takes scratch memory to speak of."""
    assert figures[name]["allocated_bytes"] == pytest.approx(figures[name]["live_bytes"], rel=0.01)


def test_ways_save_what_they_say(figures):
    peak = {name: row["allocated_bytes"] for name, row in figures.items()}
    assert peak["none"] > peak["every_n_layers: 4 (HF)"] > peak["every_n_layers: 2 (HF)"] > peak["full (HF)"]
    assert peak["none"] > peak["SAC, all matmuls + attention"] > peak["SAC, every 2nd matmul + attention"]
    assert peak["SAC, every 2nd matmul + attention"] > peak["SAC, attention"] > peak["full"]
    assert peak["none"] > peak["selective"] > peak["selective, save attention"]
    assert peak["full"] == pytest.approx(peak["full (HF)"], rel=0.001)
    assert peak["head in chunks"] < peak["none"]


def test_transformers_runs_each_of_its_blocks_again(figures):
    names = ("full (HF)", "every_n_layers: 2 (HF)", "every_n_layers: 3 (HF)", "every_n_layers: 4 (HF)")
    assert [figures[name]["recomputed"] for name in names] == [5, 3, 2, 2]


class Watching(TorchDispatchMode):
    """Counts products of matrices and attention."""

    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "products", "attention"),
    [
        ("none", 0, 0),
        ("SAC, all matmuls + attention", 0, 0),
        ("SAC, every 2nd matmul + attention", 3, 0),  # k_proj, o_proj and up_proj of seven
        ("SAC, attention", 6, 0),  # but for the last, which nothing needs
        ("full (HF)", 6, 1),
    ],
)
def test_what_is_run_again_in_a_block(small, own_allocator, name, products, attention):
    """Against no checkpointing, in a LLaMA of 2 blocks."""
    counts = {}
    for way in ("none", name):
        alone = Session(small, NAMED[way])
        alone.step()
        with Watching() as watching:
            alone.backward()
        alone.close()
        counts[way] = watching.counts
    more = {operation: counts[name][operation] - counts["none"][operation] for operation in counts[name]}
    found = {
        kind: sum(count for operation, count in more.items() if kind in operation) for kind in ("aten.mm", "_flash")
    }
    assert found == {"aten.mm": 2 * products, "_flash": 2 * attention}


@pytest.mark.slow
def test_a_compiled_budget_is_kept(workload, own_allocator, monkeypatch, tmp_path):
    """With a backend that partitions as inductor does, and compiles nothing."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model: compile_(model, backend="aot_eager_decomp_partition"))
    from torch._functorch import config

    before = config.activation_memory_budget
    plain = measured(workload, NONE, tmp_path / "gradients.pt")
    peaks = {}
    for share in (0.3, 1.0):
        row = measured(workload, NAMED[f"compiled, budget {share:g}"], tmp_path / "gradients.pt")
        assert row["difference"] < 1e-4
        assert row["recomputed"] is None  # inside a graph
        peaks[share] = row["allocated_bytes"]
        torch._dynamo.reset()
    assert peaks[0.3] < 0.9 * peaks[1.0]
    assert peaks[1.0] <= 1.05 * plain["allocated_bytes"]
    assert config.activation_memory_budget == before


# --- what is not there ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TO_HOST)
def test_moving_to_the_host_needs_another_device(small, own_allocator, name):
    with pytest.raises(HfCkptError, match="needs an accelerator"):
        Session(small, NAMED[name])


def test_every_way_that_moves_is_known():
    assert [way.name for way in (*PEERS, *OUR_WAYS) if way.to_host] == TO_HOST


def test_trl_is_not_there(small, own_allocator, monkeypatch):
    monkeypatch.setitem(sys.modules, "trl.models.activation_offloading", None)
    with pytest.raises(MissingDependencyError, match="pip install trl"):
        Session(small, Way("activation offloading", TRL, {"full": False}))


@pytest.mark.parametrize(
    ("flag", "name", "said"),
    [
        ("HAS_EVERY_N_LAYERS", "every_n_layers: 2 (HF)", "has no every_n_layers"),
        ("HAS_OWN_OFFLOAD", "offload (HF)", "has no offload"),
    ],
)
def test_transformers_without_these_options(small, own_allocator, monkeypatch, flag, name, said):
    monkeypatch.setattr(compat, flag, False)
    with pytest.raises(HfCkptError, match=said):
        Session(small, dataclasses.replace(NAMED[name], to_host=False))


def test_models_without_a_vocabulary_have_no_head_to_cut(configs, own_allocator):
    with pytest.raises(HfCkptError, match="BertForSequenceClassification has no head over a vocabulary"):
        Session(Workload(configs["bert"], batch=2, tokens=16), NAMED["head in chunks"])


def test_optimizers_that_torch_does_not_have(small, own_allocator):
    with pytest.raises(HfCkptError, match="of PyTorch's own, but not with lion"):
        Session(dataclasses.replace(small, optimizer="lion"), NONE)


def test_ways_that_nobody_knows():
    assert known_ways(["transformers", "selective"]) == ("transformers", "selective")
    with pytest.raises(HfCkptError, match=r"a way must be one of none, transformers, .* but is 'slective' instead"):
        known_ways(["slective"])
    assert [way.name for way in wanted(["TRL", "full"])] == ["none", *TO_HOST[1:3], "full"]


# --- steps of a session -----------------------------------------------------------------------------------------------


def test_adapters_have_gradients_from_the_first_step_on(small, own_allocator):
    alone = Session(dataclasses.replace(small, batch=2, lora=4), NONE)
    alone.step()
    gradients = {name: value.grad for name, value in alone.model.named_parameters() if value.requires_grad}
    assert gradients
    assert all("lora" in name and bool(value.any()) for name, value in gradients.items())


def test_accumulated_micro_steps_add_up(small, own_allocator):
    two_rows = dataclasses.replace(small, batch=2)
    once, twice = (Session(dataclasses.replace(two_rows, accumulation=number), NONE) for number in (1, 2))
    for alone in (once, twice):
        alone.backward()
    pairs = zip(once.model.parameters(), twice.model.parameters(), strict=True)
    assert all(torch.allclose(one.grad, two.grad, atol=1e-6) for one, two in pairs)  # the same batch, half of it twice
    assert twice.facts() == {"blocks": 2, "tokens": 2 * 2 * 16}
