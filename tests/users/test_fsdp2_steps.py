"""FSDP2, steps of training on batches that differ between two ranks: budgets, plans of each rank's own, saving."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch.distributed.fsdp
from helpers.processes import each_rank, run_on_ranks, wanted
from helpers.ranks import MIXED

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(torch.distributed.fsdp, "fully_shard"), reason="new in torch 2.6"),
]
Results = list[dict[str, Any]]  # one dictionary of cases for each rank


@dataclasses.dataclass(frozen=True)
class StepCase:
    specs: list[dict[str, Any]]
    """Of each rank, or of all."""
    tokens: list[list[int]] = dataclasses.field(default_factory=lambda: [[64, 64], [64, 64]])
    """Of each rank: of its sequences in each step."""
    family: str = "llama"
    layers: int = 5
    hidden: int = 64
    lora: bool = False
    half: bool = False
    micro_steps: int = 1
    held_back: bool = False
    """Gradients of all micro-steps but the last are not reduced."""
    apart: bool = False
    """Embedding and head are units of their own, as accelerate makes them."""
    how: str = "steps"
    broken_rank: int = -1
    """That cannot plan."""


def budget(size: str) -> list[dict[str, Any]]:
    return [{"policy": "budget", "budget": size}]


PREDICTED = {  # with a budget in the lower half of what plans can do
    "budget-llama": StepCase(budget("4500KiB")),
    "budget-llama-lora-bf16": StepCase(budget("2300KiB"), lora=True, half=True),
    "budget-bert-lora": StepCase(budget("5MiB"), family="bert", lora=True, hidden=136, tokens=[[16, 16], [16, 16]]),
    # Too much without knowing that sharded blocks do not rebuild from norms of others.
    "budget-bert": StepCase(budget("5MiB"), family="bert"),
    "budget-llama-held_back": StepCase(budget("5000KiB"), micro_steps=2, held_back=True),
}
APART = "budget-llama-apart"
UNEQUAL = {
    APART: StepCase(budget("5MiB"), apart=True),
    "budget-unequal": StepCase(budget("5MiB"), layers=6, tokens=[[16, 32, 96], [48, 48, 48]]),
    "full-beside-keep": StepCase([{"policy": "full"}, {"policy": "none"}], tokens=[[16, 48], [48, 16]]),
    "selective-beside-mixed": StepCase([{"policy": "selective"}, MIXED], tokens=[[16, 48], [48, 16]]),
    "offload-unequal": StepCase([{"policy": "offload"}], tokens=[[16, 48], [48, 16]]),
}
REFUSED = {
    "segments": StepCase([{"policy": "full", "segments": 2}], how="refused"),
    "one-rank-cannot-plan": StepCase(budget("1GiB"), how="refused", broken_rank=1, tokens=[[16], [48]]),
}
STEP_CASES = {
    **PREDICTED,
    **UNEQUAL,
    **REFUSED,
    "checkpointed": StepCase([{"policy": "full", "every_n_layers": 2}], how="checkpointed", hidden=32),
}
TOLERANCE = 0.05
"""Of predicted peaks, against those counted. Where the peak lies in a place that the formula is generous about it is
above; below it only by what no formula knows of (masks, indices)."""
each_training = pytest.mark.parametrize("name", [*PREDICTED, *UNEQUAL])


@pytest.fixture(scope="module")
def fsdp2(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run_on_ranks("fsdp2_worker.py", wanted(request, STEP_CASES), tmp_path_factory.mktemp("steps"), timeout=900)


@each_training
def test_fsdp2_trains_as_without_hf_ckpt_whatever_other_ranks_recompute(fsdp2: Results, name: str) -> None:
    for found in each_rank(fsdp2, name):
        assert [step["different"] for step in found["steps"]] == [[] for _ in found["steps"]]


@each_training
def test_fsdp2_ranks_meet_in_the_same_collectives_whatever_they_recompute(fsdp2: Results, name: str) -> None:
    """A block's parameters are there in its backward anyway. Were they gathered once more where it is recomputed, ranks
    with other plans would wait for each other for ever."""
    agreed = 4 if name.startswith("budget") else 0  # to agree on a plan: twice a size, and what has it
    for found in each_rank(fsdp2, name):
        first, *later = found["steps"]
        assert len(first["order"]) == len(first["plain_order"]) + agreed
        assert all(step["order"] == step["plain_order"] for step in later)
        assert [one.split()[0] for one in first["order"] if "allgather_." not in one] == [
            one.split()[0] for one in first["plain_order"]
        ]
        recomputing = not all(action.startswith("keep") for action in first["actions"])
        assert all(bool(step["recomputed"]) == recomputing for step in found["steps"])


@pytest.mark.parametrize("name", PREDICTED)
def test_fsdp2_peaks_are_those_that_were_predicted(fsdp2: Results, name: str) -> None:
    """Of the second step, when the optimizer's state is there, against every live byte of this rank."""
    for found in each_rank(fsdp2, name):
        step = found["steps"][-1]
        assert len(set(step["actions"]) - {"keep ()"}) >= 1
        assert step["held_back"] == ("held_back" in name)
        assert abs(step["predicted"] / step["peak"] - 1) <= TOLERANCE
        unit = 1024 * (1024 if STEP_CASES[name].specs[0]["budget"].endswith("MiB") else 1)
        assert step["peak"] <= int(STEP_CASES[name].specs[0]["budget"][:-3]) * unit * 1.001


@pytest.mark.parametrize("name", [APART])
def test_fsdp2_peaks_are_below_what_was_predicted_where_more_is_let_go(fsdp2: Results, name: str) -> None:
    """What is outside the blocks is taken to stay gathered; an embedding and a head of their own do not."""
    for found in each_rank(fsdp2, name):
        step = found["steps"][-1]
        assert step["peak"] <= step["predicted"] <= 1.2 * step["peak"]


@pytest.mark.parametrize("name", ["budget-unequal"])
def test_fsdp2_plans_agree_at_first_and_are_each_ranks_own_later(fsdp2: Results, name: str) -> None:
    first, second = (found["steps"] for found in each_rank(fsdp2, name))
    assert first[0]["actions"] == second[0]["actions"]
    assert [step["shape"] for step in first] == ["4 x 48 tokens", "4 x 32 tokens", "4 x 96 tokens"]
    assert [step["shape"] for step in second] == ["4 x 48 tokens"] * 3
    assert first[2]["actions"] != second[2]["actions"] == second[0]["actions"]


@pytest.mark.parametrize("name", ["segments"])
def test_fsdp2_refuses_segments_on_every_rank(fsdp2: Results, name: str) -> None:
    for found in each_rank(fsdp2, name):
        assert "Use `policy: full` without `segments`" in found["said"]


@pytest.mark.parametrize("name", ["one-rank-cannot-plan"])
def test_fsdp2_says_on_every_rank_that_one_cannot_plan(fsdp2: Results, name: str) -> None:
    first, second = each_rank(fsdp2, name)
    assert first["said"] == "HfCkptError: rank 1 cannot plan: not today"
    assert second["said"] == "HfCkptError: not today"


@pytest.mark.parametrize("name", ["checkpointed"])
def test_fsdp2_saves_and_loads_in_shards(fsdp2: Results, name: str) -> None:
    """By torch.distributed.checkpoint: what was saved says nothing of a plan, and training goes on as it would have."""
    for found in each_rank(fsdp2, name):
        assert found["same_keys"]
        assert found["saved_keys"]
        assert found["files"].count(".distcp") == 2
        assert found["loaded_otherwise"] == found["different"] == []
        assert found["losses"][0] == found["losses"][1]
        assert found["recomputed"] == [4 * 3, 3 * 3]  # blocks 0, 2, 4
