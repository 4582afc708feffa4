"""DDP and FSDP2 on two CPU processes (gloo) train as without hf_ckpt, and recompute exactly the planned blocks.

Reentrant checkpointing fails in such cases with "marked as ready twice"; the control case shows it.
"""

from __future__ import annotations

from typing import Any

import pytest
from helpers.processes import each_rank, run_on_ranks
from helpers.ranks import LAYERS, Case, assert_as_planned
from helpers.tables import table

pytestmark = pytest.mark.long
Results = list[dict[str, Any]]  # one dictionary of cases per rank

TABLE = table(__file__, "ranks.yaml")


TABLE_PARTS = ("fsdp2", "segments", "owners", "ddp", "budget", "together", "trainer", "control")


def cases(part):
    return {name: Case(**row) for name, row in TABLE[part].items()}


FSDP2, SEGMENTS, OWNERS, DDP, BUDGET, TOGETHER, TRAINER, CONTROL = map(cases, TABLE_PARTS)
KINDS = {"llama": "LlamaDecoderLayer", "bert": "BertLayer", "t5": "T5Block"}


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The results of the cases whose tests are selected."""
    tests = [item for item in request.session.items if "ranks" in getattr(item, "fixturenames", ())]
    names = {item.callspec.params["name"] for item in tests}
    # What may fail in a backward comes last.
    every = FSDP2 | SEGMENTS | OWNERS | DDP | BUDGET | TRAINER | TOGETHER | CONTROL
    cases = {name: case for name, case in every.items() if name in names}
    return run_on_ranks(cases, tmp_path_factory.mktemp("ranks"))


def assert_trained(case: Case, results: Results, name: str) -> None:
    """Check counts; the worker has compared gradients."""
    for rank, result in enumerate(each_rank(results, name)):
        assert result["kinds"] == [KINDS[case.family]]  # not FSDP's subclass
        if case.compiled:
            assert result["in_graphs"] == case.blocks()
            assert result["by_others"] == []
        else:
            assert_as_planned(case, rank, result)


@pytest.mark.trap(4)
@pytest.mark.compat
@pytest.mark.parametrize("name", DDP)
def test_ddp_trains_as_without_hf_ckpt(ranks: Results, name: str) -> None:
    assert_trained(DDP[name], ranks, name)


@pytest.mark.compat
@pytest.mark.parametrize("name", CONTROL)
def test_ddp_fails_with_reentrant_checkpointing(ranks: Results, name: str) -> None:
    assert all("marked as ready twice" in result[name].get("error", "") for result in ranks)


@pytest.mark.trap(8)
@pytest.mark.parametrize("name", FSDP2)
def test_fsdp2_trains_as_without_hf_ckpt(ranks: Results, name: str) -> None:
    """Recomputation gathers no parameters again: otherwise ranks with different plans would deadlock."""
    case = FSDP2[name]
    assert_trained(case, ranks, name)
    for result in each_rank(ranks, name):
        without, with_plan = result["collectives"]
        assert with_plan == without
        assert bool(with_plan) == (not case.compiled)
        assert result["same_keys"]
        assert result["chunked_heads"] == 0
        assert ("its parameters are sharded or moved" in result["messages"]) == ("head" in case.specs[0])
    said = [result["messages"].count("parts of blocks are sharded one by one") for result in each_rank(ranks, name)]
    assert sum(said) == (case.model == "parts")  # a recomputation frees nothing before its backward


@pytest.mark.parametrize("name", SEGMENTS)
def test_sharded_blocks_run_again_for_the_next_one(ranks: Results, name: str) -> None:
    """FSDP2 gathers each of them once more, on all ranks alike; FSDP1, and parts that are sharded, cannot."""
    case = SEGMENTS[name]
    assert_trained(case, ranks, name)
    for result in each_rank(ranks, name):
        without, with_plan = map(len, result["collectives"])
        assert with_plan - without == case.forwards * sum(block[-1] in case.passing for block in case.blocks())
        assert ("their parameters are freed" in result["messages"]) == (not case.passing)
    first, second = (result["collectives"][1] for result in each_rank(ranks, name))
    assert first == second


@pytest.mark.parametrize("name", BUDGET)
def test_ranks_measure_and_plan_without_waiting_for_each_other(ranks: Results, name: str) -> None:
    """Whatever each of them runs, hf_ckpt adds no collective. The worker has compared gradients."""
    trained = [result for result in each_rank(ranks, name) if result]
    assert len(trained) == (1 if BUDGET[name].by == "alone" else 2)
    for result in trained:
        without, with_plans = result["collectives"]
        assert with_plans == without
        assert result["measuring"] is None
        assert result["raced"] > 1
        assert sum(result["recomputed"].values()) > 0


@pytest.mark.parametrize("name", TOGETHER)
def test_ranks_agree_on_what_they_recompute(ranks: Results, name: str) -> None:
    """As under ZeRO-3, where other recomputations would gather other parameters. The worker has compared gradients."""
    if TOGETHER[name].fails:
        first, second = (results[name]["error"] for results in ranks)
        assert "rank 1 cannot plan for its steps, and all ranks need one plan: ZeroDivisionError" in first
        assert "ZeroDivisionError" in second
        return
    first, second = each_rank(ranks, name)
    for what in ("plan", "recomputed", "calls"):
        assert first[what] == second[what]
    assert sum(first["recomputed"].values()) > 0
    if name == "other lengths":  # under a tight budget, times decide which plan is checked, and replaced
        assert first["measuring"] is second["measuring"] is None


@pytest.mark.parametrize("name", TRAINER)
def test_the_trainer_under_ddp_ends_with_the_weights_it_has_without_checkpointing(ranks: Results, name: str) -> None:
    for rank, result in enumerate(each_rank(ranks, name)):
        assert result["wrapper"] == "DistributedDataParallel"
        assert result["find_unused_parameters"] is False
        assert_as_planned(TRAINER[name], rank, result)


@pytest.mark.trap(8, 9)
@pytest.mark.parametrize("name", OWNERS)
def test_accelerates_fsdp2_has_one_owner_of_checkpointing(ranks: Results, name: str) -> None:
    """`fsdp_activation_checkpointing: true` in accelerate's settings is refused beside a plan, in either order."""
    for rank, result in enumerate(each_rank(ranks, name)):
        assert result["is_fsdp2"]
        assert ("FSDPCheckpointWrapper" in result["units"]) == (name == "both")  # accelerate follows its settings
        if name == "ours":
            assert result["looking for lost blocks"] == ""
            assert result["units"].count("FSDPLlamaDecoderLayer") == LAYERS
            assert result["same_keys"]
            assert_as_planned(OWNERS[name], rank, result)
        else:
            assert "`activation_checkpointing: true` in the FSDP settings" in result["training"]
            for doing in ("training", "looking for lost blocks", "installing"):
                assert result[doing].startswith("OwnerConflictError"), doing
