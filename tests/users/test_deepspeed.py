"""Real runs of DeepSpeed's ZeRO-2 and ZeRO-3 on two CPU processes (gloo), if DeepSpeed is installed.

Run `pytest -m deepspeed` in an environment that has it: without it, these tests then fail instead of being skipped.
By default they are deselected. Tests that do not need DeepSpeed run everywhere.
"""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.processes import each_rank, run_on_ranks
from helpers.ranks import MIXED, Case
from helpers.steps import enable, step

import hf_ckpt
from hf_ckpt.errors import HfCkptError
from hf_ckpt.models.tiny import tiny_batch, tiny_model

BLOCKS = [f"model.layers.{index}" for index in range(4)]
# DeepSpeed compiles an extension at its first start; killing that leaves a lock that blocks all later starts.
ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "TORCH_EXTENSIONS_DIR": str(Path(sys.prefix, "torch_extensions")),
}


# --- without DeepSpeed ----------------------------------------------------------------------------------------------


def as_zero3_has_it(model: Any, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, parameter in enumerate(model.parameters()):
        parameter.ds_id = number
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version if name == "deepspeed" else real(name))


@pytest.mark.parametrize("spec", [{"policy": "full"}, MIXED, {"use_reentrant": True}], ids=str)
def test_frozen_parameters_under_an_old_zero3_are_refused(spec, monkeypatch):
    """An old ZeRO-3 with frozen parameters is refused: backward would fail with a CheckpointError."""
    model = tiny_model("llama")
    model.get_input_embeddings().requires_grad_(False)
    hf_ckpt.install(model)
    enable(model, spec)
    as_zero3_has_it(model, "0.19.2", monkeypatch)
    said = r"DeepSpeed 0\.19\.2 .*Install a DeepSpeed after 0\.19\.2, use ZeRO-2, .*`use_reentrant=True`"
    with pytest.raises(HfCkptError, match=said):
        step(model, tiny_batch("llama"))


@pytest.mark.parametrize(("version", "frozen"), [("0.19.3", True), ("0.20.0", True), ("0.19.2", False)])
def test_a_later_deepspeed_or_nothing_frozen_is_not(version, frozen, monkeypatch):
    model = tiny_model("llama")
    model.get_input_embeddings().requires_grad_(not frozen)
    hf_ckpt.install(model, "full")
    enable(model)
    as_zero3_has_it(model, version, monkeypatch)
    step(model, tiny_batch("llama"))
    assert hf_ckpt.describe(model).recomputed == dict.fromkeys(BLOCKS, 1)


# --- with DeepSpeed -------------------------------------------------------------------------------------------------


CASES = {
    f"zero{stage}-{name}": Case(f"zero{stage}", **row)
    for stage in (2, 3)
    for name, row in {
        "full": {"dropout": 0.1},
        "selective": {"specs": ({"policy": "selective"},)},
        "mixed": {"specs": (MIXED,)},
        "lora-full": {"model": "lora"},
        "lora-selective": {"specs": ({"policy": "selective"},), "model": "lora"},
    }.items()
}
OTHERS = {"zero3-segments": Case("zero3", specs=({"policy": "full", "segments": 2},))}
FORWARDS = 4


@pytest.fixture(scope="module")
def zero(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("zero")
    return run_on_ranks("ranks_worker.py", CASES | OTHERS, folder, timeout=900, extra=ENVIRONMENT)


@pytest.mark.deepspeed
@pytest.mark.parametrize("name", CASES)
def test_zero_trains_as_without_hf_ckpt(zero, name):
    """The worker compares losses and weights; under ZeRO-3, frozen weights have their shape during recomputation."""
    case = CASES[name]
    for rank, found in enumerate(each_rank(zero, name)):
        assert found["wrapper"] == "DeepSpeedEngine"
        assert found["stage"] == int(case.by[-1])
        assert found["split"] == (case.by == "zero3")
        names = {block.removeprefix("base_model.model."): times for block, times in found["recomputed"].items()}
        calls = {block.removeprefix("base_model.model."): times for block, times in found["calls"].items()}
        planned = case.planned(rank)
        whole = [block for block, kind in planned.items() if kind == "full"]
        assert names.keys() == planned.keys()
        assert calls == {block: FORWARDS * (2 if block in whole else 1) for block in case.blocks()}
        assert all(names[block] == FORWARDS for block in whole)
        rebuilt = {block: times for block, times in names.items() if block not in whole}
        if rebuilt and case.by == "zero3":  # under ZeRO-3, a block may rebuild nothing; a warning then says so
            assert any(rebuilt.values()) != ("that can be rebuilt" in found["said"])
        else:
            assert all(rebuilt.values())
        assert set(found["forwards"].values()) == {FORWARDS}


@pytest.mark.deepspeed
def test_zero3_refuses_what_it_cannot_do(zero):
    for found in each_rank(zero, "zero3-segments"):
        assert "Use `policy: full` without `segments`" in found["refused"]
