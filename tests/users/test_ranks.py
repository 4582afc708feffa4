"""DDP and FSDP2 on two CPU processes (gloo) train as without hf_ckpt, and recompute exactly the planned blocks.

Reentrant checkpointing fails in such cases with "marked as ready twice"; the control case shows it.
"""

from __future__ import annotations

from typing import Any

import pytest
from helpers.processes import each_rank, run_on_ranks, wanted
from helpers.ranks import LAYERS, MIXED, Case
from helpers.sparing import sparing

pytestmark = pytest.mark.long
Results = list[dict[str, Any]]  # one dictionary of cases per rank

FULL, SELECTIVE, OFFLOAD = {"policy": "full"}, {"policy": "selective"}, {"policy": "offload"}
EVERY_2 = {"policy": "full", "every_n_layers": 2}
UNUSED, STATIC = {"find_unused_parameters": True}, {"static_graph": True}
DROPOUT = {"model": "lora", "dropout": 0.1}
DDP = {
    f"{family}-{name}": Case("ddp", family, **row)
    for family in ("llama", "bert", "t5")
    for name, row in {
        "plain": {},
        "every_2": {"specs": (EVERY_2,)},
        "accumulate": {"steps": "accumulate"},
        "static_graph": {"steps": "repeat", "options": STATIC},
        "lora-dropout": DROPOUT,
        "lora, saved-find_unused": {"model": "lora, saved", "options": UNUSED},
        "lora, saved-static_graph": {"model": "lora, saved", "steps": "repeat", "options": STATIC},
        "installed_on_ddp": {"order": "after"},
        "selective": {"specs": (SELECTIVE,)},
        "mixed-find_unused": {"specs": (MIXED,), "options": UNUSED},
        "segments-accumulate": {"specs": ({"segments": 2},), "steps": "accumulate"},
    }.items()
} | {
    "pair": Case("ddp", steps="pair"),
    "pair-static_graph": Case("ddp", steps="pair", options=STATIC),
    "unused_pooler": Case("ddp", "bert", model="headless", options=UNUSED),
    "frozen": Case("ddp", model="frozen"),
    "compiled": Case("ddp", specs=({"compile": "blocks", "share": 0.3},)),
}
FSDP2 = {
    f"fsdp2-{family}-{name}": Case("fsdp2", family, **row)
    for family in ("llama", "bert", "t5")
    for name, row in {
        "before": {},
        "accumulate": {"steps": "accumulate", "specs": (EVERY_2,)},
        "selective": {"specs": (SELECTIVE,), "steps": "repeat"},
        "selective-attention-bf16": {"specs": ({**SELECTIVE, "save": ["attention"]},), "half": True},
        "mixed-after-bf16": {"specs": (MIXED,), "order": "after", "half": True, "dropout": 0.1},
        "head": {"specs": ({**FULL, "head": 4},)},
        "head-after": {"specs": ({**FULL, "head": 4},), "order": "after"},
        # Each rank has its own plan and its own batches.
        "full-beside-none": {"specs": (FULL, {"policy": "none"}), "tokens": (16, 48), "steps": "repeat"},
        "selective-beside-mixed": {"specs": (SELECTIVE, MIXED), "tokens": (48, 16), "steps": "repeat"},
        "offload": {"specs": (OFFLOAD,), "tokens": (16, 48)},
    }.items()
} | {
    "fsdp2-lora": Case("fsdp2", model="lora", half=True),
    "fsdp2-compiled": Case("fsdp2", specs=({"compile": "blocks", "share": 0.3},)),
    "fsdp2-compiled, mixed": Case(
        "fsdp2", specs=({"compile": "blocks", "policy": "none", "rules": [{"layers": "1", "policy": "full"}]},)
    ),
}
CONTROL = {"control": Case("ddp", specs=({"use_reentrant": True},), order="stock", options=UNUSED)}
"""Runs last, because it fails during a backward. It runs without hf_ckpt and shows that these cases can fail."""
TRAINER = {
    "trainer-mixed": Case("trainer", specs=(MIXED,), dropout=0.1),
    "trainer-t5-every_2": Case("trainer", "t5", (EVERY_2,), dropout=0.1),
}
OWNERS = {owner: {"owner": owner} for owner in ("ours", "theirs", "both")}
"""Who checkpoints: hf_ckpt, accelerate's FSDP plugin, or both, with the plugin enabled later."""
KINDS = {"llama": "LlamaDecoderLayer", "bert": "BertLayer", "t5": "T5Block"}


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    cases = wanted(request, FSDP2 | OWNERS | DDP | TRAINER | CONTROL)
    return run_on_ranks("ranks_worker.py", cases, tmp_path_factory.mktemp("ranks"), timeout=900)


def assert_as_planned(case: Case, rank: int, found: dict[str, Any], forwards: int) -> None:
    """Check forwards and recomputations of each planned block, by hf_ckpt's count and by a count inside each block."""
    planned = case.planned(rank)
    assert found["forwards"] == dict.fromkeys(planned, forwards)
    frozen = case.blocks()[:2] if case.model == "frozen" else []
    whole = [name for name, kind in planned.items() if kind == "full" and name not in frozen]
    # Of a segment of two blocks, the first also runs again to make the second one's input.
    first = ("0", "2") if "segments" in case.specs[rank % len(case.specs)] else ()
    again = {name: forwards * (2 if name.endswith(first) else 1) for name in whole} | dict.fromkeys(frozen, 0)
    counts = {name: found["recomputed"][name] for name in planned}
    assert {name: counts[name] for name in (*whole, *frozen)} == again
    assert all(counts[name] for name, kind in planned.items() if kind == "selective")
    assert found["calls"] == {name: forwards + again.get(name, 0) for name in case.blocks()}


def assert_trained(case: Case, results: Results, name: str) -> None:
    """Check counts; the worker has compared gradients."""
    for rank, found in enumerate(each_rank(results, name)):
        assert found["kinds"] == [KINDS[case.family]]  # not FSDP's subclass
        if case.compiled:
            assert found["in_graphs"] == case.blocks()
            assert found["by_others"] == []
        else:
            assert_as_planned(case, rank, found, case.forwards)


@pytest.mark.compat
@sparing(
    "name",
    DDP,
    *("llama-lora-dropout", "llama-mixed-find_unused", "bert-selective", "t5-every_2", "t5-accumulate"),
    *("pair-static_graph", "unused_pooler", "frozen", "llama-installed_on_ddp"),
    "compiled",
)
def test_ddp_trains_as_without_hf_ckpt(ranks: Results, name: str) -> None:
    assert_trained(DDP[name], ranks, name)


@pytest.mark.compat
@pytest.mark.parametrize("name", CONTROL)
def test_ddp_fails_with_reentrant_checkpointing(ranks: Results, name: str) -> None:
    assert all("marked as ready twice" in result[name].get("error", "") for result in ranks)


@sparing(
    "name",
    FSDP2,
    *("fsdp2-llama-before", "fsdp2-t5-mixed-after-bf16", "fsdp2-bert-selective", "fsdp2-llama-head"),
    *("fsdp2-llama-full-beside-none", "fsdp2-llama-selective-beside-mixed", "fsdp2-llama-offload"),
    *("fsdp2-t5-accumulate", "fsdp2-lora"),
    *("fsdp2-compiled", "fsdp2-compiled, mixed"),
)
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
        has_head = case.family != "bert" and any("head" in spec for spec in case.specs)
        assert ("its parameters are sharded or moved" in found["said"]) == has_head


@pytest.mark.parametrize("name", TRAINER)
def test_the_trainer_under_ddp_ends_with_the_weights_it_has_without_checkpointing(ranks: Results, name: str) -> None:
    for rank, found in enumerate(each_rank(ranks, name)):
        assert found["wrapper"] == "DistributedDataParallel"
        assert found["find_unused_parameters"] is False
        assert_as_planned(TRAINER[name], rank, found, forwards=4)


@pytest.mark.parametrize("name", ["ours"])
def test_accelerates_fsdp2_trains_a_model_with_a_plan(ranks: Results, name: str) -> None:
    for found in each_rank(ranks, name):
        assert found["is_fsdp2"]
        assert found["enabled"]
        assert found["units"].count("FSDPLlamaDecoderLayer") == LAYERS
        assert "FSDPCheckpointWrapper" not in found["units"]
        assert found["recomputed"] == dict.fromkeys(Case("fsdp2").blocks(), 1)
        assert found["calls"] == dict.fromkeys(Case("fsdp2").blocks(), 2)
        assert found["same_keys"]


@pytest.mark.parametrize("name", ["theirs", "both"])
def test_a_second_owner_under_accelerates_fsdp2_is_refused(ranks: Results, name: str) -> None:
    """`fsdp_activation_checkpointing: true` in accelerate's settings is refused beside a plan, in either order."""
    for found in each_rank(ranks, name):
        assert found["enabled"] == (name == "both")
        assert "FSDPCheckpointWrapper" in found["units"]  # accelerate followed its settings
        seen = found["enabling" if name == "theirs" else "looking for lost blocks"]
        assert seen.startswith("OwnerConflictError")
        assert name == "both" or "fsdp_activation_checkpointing" in seen
        assert found["installing"].startswith("OwnerConflictError")
