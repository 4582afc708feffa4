"""DistributedDataParallel on two CPU processes (gloo): it trains as it does without hf_ckpt, and recomputes exactly.

Reentrant checkpointing ends with "marked as ready twice" in such cases; two of them show it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from helpers.processes import each_rank, run_on_ranks, wanted
from helpers.ranks import MIXED, STACKS, blocks
from helpers.sparing import sparing

pytestmark = pytest.mark.long

Results = list[dict[str, Any]]  # one dictionary of cases for each rank


@dataclasses.dataclass(frozen=True)
class DDPCase:
    family: str
    ddp: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Options of DistributedDataParallel."""
    steps: str = "one"
    """`one`, `pair` (two forwards, one backward), `accumulate` (two under no_sync, then one), `repeat` (twice)."""
    change: str = ""
    """What is done to the model first; see `build` in the worker."""
    every: int = 1
    dropout: float = 0.0
    policy: str = "full"
    segments: int | None = None
    mlp: int | str = "full"
    owner: str = "hf_ckpt"
    """`hf_ckpt`, `wrapped` (installed on the DDP module), or `stock` (transformers alone, reentrant)."""

    @property
    def forwards(self) -> int:
        return {"one": 1, "pair": 2, "accumulate": 3, "repeat": 2}[self.steps]

    @property
    def blocks(self) -> list[str]:
        named = blocks(self.family)
        return [name.removeprefix("bert.") for name in named] if self.change == "headless" else named

    @property
    def recomputed(self) -> dict[str, int]:
        """How often each planned block runs again; `selective` ones never do."""
        if self.policy == "mixed":
            return {name: self.forwards if name.endswith(".0") else 0 for name in self.blocks if name[-1] in "02"}
        planned = {name: self.forwards for name in self.blocks if int(name.rpartition(".")[2]) % self.every == 0}
        if self.change == "frozen_below_2":  # no gradient goes through them, so nothing of theirs is ever needed again
            planned |= dict.fromkeys(self.blocks[:2], 0)
        return planned

    def to_dict(self) -> dict[str, Any]:
        spec: dict[str, Any] = {"policy": self.policy, "every_n_layers": self.every}
        if self.segments is not None:
            spec = {"segments": self.segments}
        if self.mlp != "full":
            spec["mlp"] = self.mlp
        if self.policy == "mixed":
            spec = MIXED
        if self.owner == "stock":
            spec = {"use_reentrant": True}
        return {**dataclasses.asdict(self), "spec": spec}


UNUSED = {"find_unused_parameters": True}
DDP_CASES: dict[str, DDPCase] = {
    f"{family}-{name}": DDPCase(family, **options)
    for family in STACKS
    for name, options in {
        "plain": {},
        "find_unused": {"ddp": UNUSED},
        "every_2": {"every": 2},
        "accumulate": {"steps": "accumulate"},
        "accumulate-find_unused": {"steps": "accumulate", "ddp": UNUSED},
        "static_graph": {"steps": "repeat", "ddp": {"static_graph": True}},
        "bucket_view": {"steps": "repeat", "ddp": {"gradient_as_bucket_view": True}},
        "dropout": {"dropout": 0.1},
        "lora": {"change": "lora"},
        "lora-find_unused": {"change": "lora", "ddp": UNUSED},
        "lora-dropout": {"change": "lora_dropout", "dropout": 0.1},
        "modules_to_save": {"change": "lora_and_saved"},
        "modules_to_save-find_unused": {"change": "lora_and_saved", "ddp": UNUSED},
        "modules_to_save-static_graph": {"change": "lora_and_saved", "steps": "repeat", "ddp": {"static_graph": True}},
        "installed_on_ddp": {"owner": "wrapped"},
        "selective": {"policy": "selective"},
        "selective-lora-dropout": {"policy": "selective", "change": "lora_dropout", "dropout": 0.1},
        "selective-accumulate": {"policy": "selective", "steps": "accumulate"},
        "mixed": {"policy": "mixed"},
        "mixed-find_unused": {"policy": "mixed", "ddp": UNUSED},
        "mixed-lora-dropout": {"policy": "mixed", "change": "lora_dropout", "dropout": 0.1},
        "segments": {"segments": 2},
        "segments-accumulate": {"segments": 1, "steps": "accumulate"},
        "segments-lora-dropout": {"segments": 2, "change": "lora_dropout", "dropout": 0.1},
    }.items()
} | {
    "pair": DDPCase("llama", steps="pair"),
    "pair-find_unused": DDPCase("llama", steps="pair", ddp=UNUSED),
    "pair-static_graph": DDPCase("llama", steps="pair", ddp={"static_graph": True}),
    "pair-lora": DDPCase("llama", steps="pair", change="lora"),
    "pair-t5": DDPCase("t5", steps="pair"),
    "unused_pooler": DDPCase("bert", change="headless", ddp=UNUSED),
    "frozen_below_2": DDPCase("llama", change="frozen_below_2"),
}
TILED = {
    "tiled": DDPCase("llama", mlp=5),
    "tiled-t5-accumulate": DDPCase("t5", mlp=5, steps="accumulate"),
    "tiled-lora-find_unused": DDPCase("llama", mlp=5, change="lora", ddp=UNUSED, policy="selective"),
    "tiled-bert-static_graph": DDPCase("bert", mlp=5, steps="repeat", ddp={"static_graph": True}),
}
"""Feed-forwards in chunks, whose gradients are those of the whole up to rounding."""
# Last, since they fail half-way through a backward. Not hf_ckpt: they show that these cases can fail.
CONTROLS = {
    "control-find_unused": DDPCase("llama", owner="stock", ddp=UNUSED),
    "control-pair": DDPCase("llama", owner="stock", steps="pair"),
}


FAST = (
    "llama-lora-dropout",
    "llama-mixed-find_unused",
    "bert-selective",
    "t5-every_2",
    "t5-accumulate",
    "pair-static_graph",
    "unused_pooler",
)
each_case = sparing("name", DDP_CASES, *FAST)


@pytest.fixture(scope="module")
def ddp(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    cases = {name: case.to_dict() for name, case in wanted(request, {**DDP_CASES, **TILED, **CONTROLS}).items()}
    return run_on_ranks("ddp_worker.py", cases, tmp_path_factory.mktemp("ddp"))


@pytest.mark.compat
@each_case
def test_ddp_gradients_are_those_of_ddp_without_hf_ckpt(ddp: Results, name: str) -> None:
    for found in each_rank(ddp, name):
        assert not found["losses_differ"]
        assert found["unlike_plain_ddp"] == []
        unused = ["pooler.dense.bias", "pooler.dense.weight"] if name == "unused_pooler" else []
        assert found["missing"] == unused
        assert found["zero"] == []
        assert found["trainable"] > len(unused)


@pytest.mark.compat
@sparing("name", [n for n in DDP_CASES if "dropout" not in n], *(n for n in FAST if "dropout" not in n))
def test_ddp_gradients_are_those_of_one_process(ddp: Results, name: str) -> None:
    # Not with dropout: the ranks draw masks of their own.
    assert all(found["error_to_one_process"] < 2e-6 for found in each_rank(ddp, name))


@pytest.mark.slow
@pytest.mark.parametrize("name", TILED)
def test_ddp_with_feed_forwards_in_chunks(ddp: Results, name: str) -> None:
    """Each parameter's gradient is reduced once: those of one process on the batches of both ranks, up to rounding."""
    for found in each_rank(ddp, name):
        assert found["error_to_one_process"] < 2e-6
        assert found["missing"] == found["zero"] == []
        assert found["unlike_plain_ddp"]  # it ran in chunks


@pytest.mark.compat
@each_case
def test_ddp_recomputes_exactly_what_is_planned_on_each_rank(ddp: Results, name: str) -> None:
    case = DDP_CASES[name]
    for found in each_rank(ddp, name):
        assert found["enabled"]
        assert found["forwards"] == dict.fromkeys(case.recomputed, case.forwards)
        if case.policy == "selective":  # operations are rebuilt, and no block runs again
            assert all(found["recomputed"].values())
            assert found["calls"] == dict.fromkeys(case.blocks, case.forwards)
            continue
        if case.policy == "mixed":
            counted = found["recomputed"]
            assert {n: counted[n] for n in counted if n.endswith(".0")} == {
                n: case.forwards for n in case.blocks if n.endswith(".0")
            }
            assert all(counted[n] for n in case.blocks if n.endswith(".2"))
        else:
            assert found["recomputed"] == case.recomputed
        # The same by a count of our own: how often the first module inside each block ran.
        assert found["calls"] == {n: case.forwards + case.recomputed.get(n, 0) for n in case.blocks}


@pytest.mark.compat
@each_case
def test_ddp_ranks_end_with_one_gradient_and_truthful_flags(ddp: Results, name: str) -> None:
    first, second = each_rank(ddp, name)
    assert first["digest"] == second["digest"]
    # Trainer reads it to choose find_unused_parameters.
    assert first["says_it_checkpoints"]


@pytest.mark.compat
@sparing("name", CONTROLS, "control-find_unused")
def test_the_same_cases_fail_with_reentrant_checkpointing(ddp: Results, name: str) -> None:
    assert all("marked as ready twice" in result[name].get("error", "") for result in ddp)
