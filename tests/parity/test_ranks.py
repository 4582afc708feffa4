"""DDP and FSDP2 on two CPU processes (gloo) train as without hf_ckpt, and recompute exactly the planned blocks.

Reentrant checkpointing fails in such cases with "marked as ready twice"; the control case shows it.
"""

from __future__ import annotations

from typing import Any

import pytest
from helpers.processes import each_rank, run_on_ranks
from helpers.ranks import LAYERS, MIXED, Case, assert_as_planned

pytestmark = pytest.mark.long
Results = list[dict[str, Any]]  # one dictionary of cases per rank

FULL, SELECTIVE, OFFLOAD = {"policy": "full"}, {"policy": "selective"}, {"policy": "offload"}
EVERY_2, SEGMENTS, HEAD = {"policy": "full", "every_n_layers": 2}, {"segments": 2}, {**FULL, "head": 4}
COMPILED = {"compile": "blocks", "share": 0.3}
UNUSED, STATIC = {"find_unused_parameters": True}, {"static_graph": True}
DDP = {
    "lora, saved, static_graph": Case("ddp", model="lora, saved", steps=2, options=STATIC),
    "installed on ddp": Case("ddp", order="after"),
    "bert, unused pooler": Case("ddp", "bert", model="headless", options=UNUSED),
    "t5, segments, accumulate": Case("ddp", "t5", (SEGMENTS,), accumulate=3),
    "pair, static_graph": Case("ddp", pair=True, options=STATIC),
    "compiled": Case("ddp", specs=(COMPILED,)),
}
FSDP2 = {
    "fsdp2, head": Case("fsdp2", specs=(HEAD,)),
    "fsdp2, tiles": Case("fsdp2", specs=({**FULL, "mlp": 10},), accumulate=3),
    "fsdp2, lora, bf16": Case("fsdp2", model="lora", half=True),
    "fsdp2, t5, every_2, accumulate": Case("fsdp2", "t5", (EVERY_2,), accumulate=3),
    "fsdp2, t5, mixed, after, bf16": Case("fsdp2", "t5", (MIXED,), order="after", half=True, dropout=0.1),
    # Each rank has its own plan and its own batches.
    "fsdp2, full beside none": Case("fsdp2", specs=(FULL, {"policy": "none"}), tokens=(16, 48), steps=2),
    "fsdp2, selective beside mixed": Case("fsdp2", specs=(SELECTIVE, MIXED), tokens=(48, 16), steps=2),
    "fsdp2, offload": Case("fsdp2", specs=(OFFLOAD,), tokens=(16, 48)),
    "fsdp2, compiled": Case("fsdp2", specs=(COMPILED,)),
    "fsdp2, compiled, mixed": Case(
        "fsdp2", specs=({"compile": "blocks", "policy": "none", "rules": [{"layers": "1", "policy": "full"}]},)
    ),
}
TRAINER = {
    "trainer, mixed": Case("trainer", specs=(MIXED,), dropout=0.1, steps=2, accumulate=2),
    "trainer, t5, every_2": Case("trainer", "t5", (EVERY_2,), dropout=0.1, steps=2, accumulate=2),
}
OWNERS = {owner: Case("accelerate", owner=owner) for owner in ("ours", "both")}
CONTROL = {"control": Case("ddp", specs=({"use_reentrant": True},), order="stock", options=UNUSED)}
"""Runs last, because it fails during a backward. It runs without hf_ckpt and shows that these cases can fail."""
KINDS = {"llama": "LlamaDecoderLayer", "bert": "BertLayer", "t5": "T5Block"}


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The results of the cases whose tests are selected."""
    tests = [item for item in request.session.items if "ranks" in getattr(item, "fixturenames", ())]
    names = {item.callspec.params["name"] for item in tests}
    cases = {name: case for name, case in (FSDP2 | OWNERS | DDP | TRAINER | CONTROL).items() if name in names}
    return run_on_ranks(cases, tmp_path_factory.mktemp("ranks"))


def assert_trained(case: Case, results: Results, name: str) -> None:
    """Check counts; the worker has compared gradients."""
    for rank, found in enumerate(each_rank(results, name)):
        assert found["kinds"] == [KINDS[case.family]]  # not FSDP's subclass
        if case.compiled:
            assert found["in_graphs"] == case.blocks()
            assert found["by_others"] == []
        else:
            assert_as_planned(case, rank, found)


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
    for found in each_rank(ranks, name):
        theirs, ours = found["collectives"]
        assert ours == theirs
        assert bool(ours) == (not case.compiled)
        assert found["same_keys"]
        assert found["chunked_heads"] == 0
        assert ("its parameters are sharded or moved" in found["messages"]) == (case.specs == (HEAD,))


@pytest.mark.parametrize("name", TRAINER)
def test_the_trainer_under_ddp_ends_with_the_weights_it_has_without_checkpointing(ranks: Results, name: str) -> None:
    for rank, found in enumerate(each_rank(ranks, name)):
        assert found["wrapper"] == "DistributedDataParallel"
        assert found["find_unused_parameters"] is False
        assert_as_planned(TRAINER[name], rank, found)


@pytest.mark.trap(8, 9)
@pytest.mark.parametrize("name", OWNERS)
def test_accelerates_fsdp2_has_one_owner_of_checkpointing(ranks: Results, name: str) -> None:
    """`fsdp_activation_checkpointing: true` in accelerate's settings is refused beside a plan, in either order."""
    for rank, found in enumerate(each_rank(ranks, name)):
        assert found["is_fsdp2"]
        assert ("FSDPCheckpointWrapper" in found["units"]) == (name == "both")  # accelerate follows its settings
        if name == "ours":
            assert found["enabling"] == found["looking for lost blocks"] == ""
            assert found["units"].count("FSDPLlamaDecoderLayer") == LAYERS
            assert found["same_keys"]
            assert_as_planned(OWNERS[name], rank, found)
        else:
            assert "fsdp_activation_checkpointing" in found["enabling"]
            for doing in ("enabling", "looking for lost blocks", "installing"):
                assert found[doing].startswith("OwnerConflictError"), doing
