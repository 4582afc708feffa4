"""Trainer, plain loops of Accelerate and its launcher under DDP: the weights of training without checkpointing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.processes import SCRIPTS, each_rank, python, read_ranks, run_on_ranks, wanted
from helpers.ranks import MIXED, blocks

pytestmark = pytest.mark.slow
Results = list[dict[str, Any]]  # one dictionary of cases for each rank


TRAINER_FAMILIES = ("llama", "bert", "t5")
TRAINER_FORWARDS = 4  # two steps of two micro-batches
TRAINER_SPECS: dict[str, dict[str, Any]] = {
    "selective": {"policy": "selective"},
    "mixed": MIXED,
    # On the CPU `auto` and large budgets keep everything; this one lies between what plans can do.
    "budget": {"policy": "budget", "budget": "1300KiB"},
}
MORE_TRAINING = {f"{how}-{name}": (how, spec) for how in ("trainer", "loop") for name, spec in TRAINER_SPECS.items()}


CASES = {
    family: {"family": family, "spec": {"policy": "full", "every_n_layers": 2}, "how": "trainer"}
    for family in TRAINER_FAMILIES
} | {name: {"family": "llama", "spec": spec, "how": how} for name, (how, spec) in MORE_TRAINING.items()}


@pytest.fixture(scope="module")
def trainer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run_on_ranks("trainer_worker.py", wanted(request, CASES), tmp_path_factory.mktemp("trainer"))


@pytest.mark.parametrize("name", CASES)
def test_training_under_ddp_ends_with_the_weights_it_has_without_checkpointing(trainer: Results, name: str) -> None:
    weights = set()
    for found in each_rank(trainer, name):
        plain, ours = found["plain"], found["ours"]
        assert plain["wrapper"] == ours["wrapper"] == "DistributedDataParallel"
        assert len(ours["losses"]) == (TRAINER_FORWARDS if name.startswith("loop") else 2)
        assert ours["losses"] == plain["losses"]
        assert ours["before"] == plain["before"]
        assert ours["after"] == plain["after"] != plain["before"]
        assert ours["use_cache"] == plain["use_cache"]
        weights.add(ours["after"])
    assert len(weights) == 1


@pytest.mark.parametrize("name", TRAINER_FAMILIES)
def test_trainer_under_ddp_recomputes_every_second_block_of_each_stack(trainer: Results, name: str) -> None:
    for found in each_rank(trainer, name):
        assert found["recomputed"] == dict.fromkeys(blocks(name, every=2), TRAINER_FORWARDS)
        assert found["forwards"] == found["recomputed"]


@pytest.mark.parametrize("name", MORE_TRAINING)
def test_trainer_and_plain_loops_recompute_what_is_planned(trainer: Results, name: str) -> None:
    spec = MORE_TRAINING[name][1]
    first, second = each_rank(trainer, name)
    assert first["recomputed"] == second["recomputed"]
    for found in (first, second):
        # Trainer's second micro-step, which finds gradients, is planned for once more: a block that one of the plans
        # keeps has one call less.
        planned_again = spec == TRAINER_SPECS["budget"] and name.startswith("trainer")
        assert set(found["forwards"].values()) <= {TRAINER_FORWARDS, TRAINER_FORWARDS - planned_again}
        assert all(found["recomputed"].values())
        if spec == MIXED:
            assert list(found["recomputed"]) == ["model.layers.0", "model.layers.2"]
            assert found["recomputed"]["model.layers.0"] == TRAINER_FORWARDS
        else:
            assert found["recomputed"]


@pytest.mark.parametrize("name", TRAINER_FAMILIES)
def test_trainer_under_ddp_says_nothing_about_checkpointing(trainer: Results, name: str) -> None:
    for found in each_rank(trainer, name):
        assert found["ours"]["complaints"] == []
        assert found["ours"]["find_unused_parameters"] is False
    if name == "llama":  # the same net catches what the first run without checkpointing makes DDP complain about
        assert any("find_unused_parameters" in text for text in trainer[0][name]["plain"]["complaints"])


def test_a_script_that_never_asks_is_checkpointed_when_prepared_for_ddp(tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text("policy: full\nlayers: '0,-1'\n")
    # Not `--cpu`: with that, accelerate starts one process unless MPI is there. The script says Accelerator(cpu=True).
    options = ["--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--main_process_port", "0"]
    done = python(
        *["-m", "accelerate.commands.launch", *options, "--mixed_precision", "no", "--dynamo_backend", "no"],
        *["-m", "hf_ckpt", "--spec", spec, SCRIPTS / "accelerate_loop.py", tmp_path / "out"],
        extra={"HF_HOME": str(tmp_path / "home")},  # accelerate looks for a default configuration there
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "never enabled" not in done.stderr
    for found in read_ranks(tmp_path / "out"):
        assert (found["processes"], found["wrapper"]) == (2, "DistributedDataParallel")
        assert found["enabled"]
        assert found["spec"] == {"policy": "full", "layers": "0,-1"}
        assert len(found["losses"]) == 2
        assert found["recomputed"] == {"model.layers.0": 2, "model.layers.3": 2}
