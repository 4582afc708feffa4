"""FSDP2 on two CPU processes (gloo): one region a block, one owner, and no collective more than without hf_ckpt."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch.distributed.fsdp
from helpers.processes import each_rank, run_on_ranks, wanted
from helpers.ranks import LAYERS, MIXED, STACKS, blocks
from helpers.sparing import sparing

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not hasattr(torch.distributed.fsdp, "fully_shard"), reason="new in torch 2.6"),
]
Results = list[dict[str, Any]]  # one dictionary of cases for each rank


@dataclasses.dataclass(frozen=True)
class FSDPCase:
    family: str
    when: str = "before"
    """Enabled `before` or `after` fully_shard."""
    half: bool = False
    """Parameters in bfloat16 for forward and backward."""
    dropout: float = 0.0
    every: int = 1
    save: tuple[str, ...] = ()
    """What stays under `selective`; empty: `full`."""
    head: int | str = "full"
    """Tokens a chunk; a sharded head is run as a whole all the same."""
    mixed: bool = False

    def to_dict(self) -> dict[str, Any]:
        if self.mixed:
            return {**dataclasses.asdict(self), "spec": MIXED}
        spec: dict[str, Any] = {"policy": "full"} if not self.save else {"policy": "selective", "save": list(self.save)}
        return {**dataclasses.asdict(self), "spec": {**spec, "every_n_layers": self.every, "head": self.head}}


FSDP_CASES: dict[str, FSDPCase] = {
    f"{family}-{name}": FSDPCase(family, **options)
    for family in STACKS
    for name, options in {
        "before": {},
        "after": {"when": "after"},
        "every_2": {"every": 2},
        "bf16": {"half": True},
        "bf16-dropout": {"half": True, "dropout": 0.1},
        "selective": {"save": ("linear", "attention")},
        "selective-bf16": {"half": True, "dropout": 0.1, "save": ("linear", "attention")},
        "selective-attention": {"half": True, "save": ("attention",)},
        "mixed": {"mixed": True},
        "mixed-after-bf16": {"mixed": True, "when": "after", "half": True, "dropout": 0.1},
        "head": {"head": 4},
        "head-after": {"head": 4, "when": "after"},
    }.items()
}
KINDS = {"llama": "LlamaDecoderLayer", "bert": "BertLayer", "t5": "T5Block"}
FSDP_STEPS = 2
OWNERS = {owner: {"owner": owner} for owner in ("ours", "theirs", "both")}
"""Who checkpoints: hf_ckpt, accelerate's FSDP plugin, or both, of which the plugin came later."""
each_case = sparing("name", FSDP_CASES, "llama-before", "t5-mixed-after-bf16", "bert-selective", "llama-head")


@pytest.fixture(scope="module")
def fsdp2(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    cases = {name: case.to_dict() for name, case in wanted(request, FSDP_CASES).items()} | wanted(request, OWNERS)
    return run_on_ranks("fsdp2_worker.py", cases, tmp_path_factory.mktemp("fsdp2"), timeout=900)


@each_case
def test_fsdp2_gradients_are_those_of_fsdp2_without_hf_ckpt(fsdp2: Results, name: str) -> None:
    for found in each_rank(fsdp2, name):
        assert not found["losses_differ"]
        assert found["sharded"]
        assert found["unlike_plain_fsdp"] == []
        assert found["zero"] == []
        assert found["chunked_heads"] == 0
        if not FSDP_CASES[name].half and not FSDP_CASES[name].dropout:
            assert found["error_to_one_process"] < 1e-4
        told = "its parameters are sharded or moved" in found["said"]
        assert told == (FSDP_CASES[name].head != "full" and FSDP_CASES[name].family != "bert")  # a classifier has none


@each_case
def test_one_region_for_each_planned_block_and_none_nested(fsdp2: Results, name: str) -> None:
    case = FSDP_CASES[name]
    planned = blocks(case.family, case.every)
    if case.mixed:
        planned = [block for block in planned if block.endswith((".0", ".2"))]
    for found in each_rank(fsdp2, name):
        assert found["kinds"] == [KINDS[case.family]]  # not FSDP's subclass of it
        if case.save:  # rebuilt from parameters that were gathered again, and by nobody's checkpoint function
            assert found["regions"] == 0
            assert found["forwards"] == dict.fromkeys(planned, FSDP_STEPS)
            assert all(found["recomputed"].values())
            continue
        assert found["deepest"] == 1
        if case.mixed:
            whole = [block for block in planned if block.endswith(".0")]
            assert found["regions"] == FSDP_STEPS * len(whole)
            assert found["forwards"] == dict.fromkeys(planned, FSDP_STEPS)
            assert all(found["recomputed"][block] == FSDP_STEPS for block in whole)
            assert all(found["recomputed"].values())
            continue
        assert found["regions"] == FSDP_STEPS * len(planned)
        assert found["deepest"] == 1
        assert found["recomputed"] == dict.fromkeys(planned, FSDP_STEPS)
        assert found["forwards"] == found["recomputed"]


@each_case
def test_fsdp2_communicates_no_more_than_without(fsdp2: Results, name: str) -> None:
    """Every block, and what is outside them, is gathered for the forward and again for the backward, and its gradients
    are reduced once; no action of ours adds to that."""
    units = len(blocks(FSDP_CASES[name].family)) + 1
    for found in each_rank(fsdp2, name):
        ours, plain = found["collectives"]
        assert ours == plain
        by_kind = {kind: sum(n for op, n in ours.items() if kind in op) for kind in ("allgather", "reduce_scatter")}
        assert by_kind == {"allgather": FSDP_STEPS * 2 * units, "reduce_scatter": FSDP_STEPS * units}
        assert found["same_keys"]


@pytest.mark.parametrize("name", ["ours"])
def test_accelerates_fsdp2_shards_a_model_with_a_plan(fsdp2: Results, name: str) -> None:
    for found in each_rank(fsdp2, name):
        assert found["is_fsdp2"]
        assert found["enabled"]
        assert found["units"].count("FSDPLlamaDecoderLayer") == LAYERS
        assert "FSDPCheckpointWrapper" not in found["units"]
        assert found["regions"] == LAYERS
        assert found["deepest"] == 1
        assert found["recomputed"] == dict.fromkeys(blocks("llama"), 1)


@pytest.mark.parametrize("name", ["ours"])
def test_accelerates_fsdp2_saves_and_loads_a_model_with_a_plan(fsdp2: Results, name: str) -> None:
    for found in each_rank(fsdp2, name):
        assert "pytorch_model_fsdp_0" in found["state_files"]
        first, again = found["losses_of_a_step_again"]
        assert first == again
        assert found["differing"] == []
        assert found["recomputed_in_all"] == dict.fromkeys(blocks("llama"), 3)


@pytest.mark.parametrize("name", ["theirs"])
def test_a_second_owner_under_accelerates_fsdp2_is_refused(fsdp2: Results, name: str) -> None:
    """`fsdp_activation_checkpointing: true` in accelerate's settings, and a plan of ours."""
    for found in each_rank(fsdp2, name):
        assert not found["enabled"]
        assert found["enabling"].startswith("OwnerConflictError")
        assert "fsdp_activation_checkpointing" in found["enabling"]
        assert "FSDPCheckpointWrapper" in found["units"]  # accelerate did what it was set to do
        assert found["installing"].startswith("OwnerConflictError")


@pytest.mark.parametrize("name", ["both"])
def test_a_second_owner_that_came_later_is_found(fsdp2: Results, name: str) -> None:
    for found in each_rank(fsdp2, name):
        assert found["enabled"]
        assert "FSDPCheckpointWrapper" in found["units"]
        assert found["looking for lost blocks"].startswith("OwnerConflictError")
        assert found["installing"].startswith("OwnerConflictError")
