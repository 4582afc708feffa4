"""Real runs of DeepSpeed's ZeRO-2 and ZeRO-3 on two CPU processes (gloo), if DeepSpeed is installed.

Run `pytest -m deepspeed` in an environment that has it: without it, these tests then fail instead of being skipped.
By default they are deselected. Tests that do not need DeepSpeed run everywhere.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.processes import each_rank, run_on_ranks
from helpers.ranks import MIXED, Case, assert_as_planned
from helpers.steps import assert_same, enable, outcome, recomputed, step

import hf_ckpt
from hf_ckpt.errors import HfCkptError
from hf_ckpt.models.tiny import tiny_batch, tiny_model

# --- without DeepSpeed ----------------------------------------------------------------------------------------------


def under_zero3(version: str, frozen: bool, spec: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model with a plan, and parameters as ZeRO-3 of this version marks them."""
    model = tiny_model("llama")
    model.get_input_embeddings().requires_grad_(not frozen)
    hf_ckpt.install(model)
    enable(model, spec)
    for number, parameter in enumerate(model.parameters()):
        parameter.ds_id = number
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version if name == "deepspeed" else real(name))
    return model


@pytest.mark.trap(6, 52)
@pytest.mark.parametrize("spec", [{"policy": "full"}, MIXED, {"use_reentrant": True}], ids=str)
def test_frozen_parameters_under_an_old_zero3_are_refused(spec, monkeypatch):
    """An old ZeRO-3 with frozen parameters is refused: backward would fail with a CheckpointError."""
    model = under_zero3("0.19.2", True, spec, monkeypatch)
    said = r"DeepSpeed 0\.19\.2 .*Install a DeepSpeed after 0\.19\.2, use ZeRO-2, .*`use_reentrant=True`"
    with pytest.raises(HfCkptError, match=said):
        step(model, tiny_batch("llama"))


@pytest.mark.parametrize(("version", "frozen"), [("0.19.3", True), ("0.20.0", True), ("0.19.2", False)])
def test_a_newer_zero3_or_one_without_frozen_parameters_trains(version, frozen, monkeypatch):
    model = under_zero3(version, frozen, {"policy": "full"}, monkeypatch)
    step(model, tiny_batch("llama"))
    assert recomputed(model) == Case("ddp").blocks()


class Owned(OrderedDict):
    """As the dicts that hold parameters under ZeRO-3: they are made for a module, so `copy` fails."""

    def __init__(self, owner: Any, *args: Any) -> None:
        super().__init__(*args)


def test_a_block_whose_dicts_have_no_copy_is_recomputed_with_the_attributes_of_its_forward():
    found = []
    for spec in ({"policy": "none"}, {"policy": "full"}):
        model = tiny_model("llama", attention_dropout=0.5)
        for part in model.modules():
            part._parameters = Owned(part, part._parameters)
        hf_ckpt.install(model)
        enable(model, spec)
        torch.manual_seed(7)
        loss = model(**tiny_batch("llama")).loss
        model.eval()
        loss.backward()
        found.append(outcome(model, loss))
    assert_same(*found)
    assert recomputed(model) == Case("ddp").blocks()


# --- with DeepSpeed -------------------------------------------------------------------------------------------------


CASES = {
    f"zero{stage}-{name}": Case(f"zero{stage}", steps=2, accumulate=2, **row)
    for stage in (2, 3)
    for name, row in {
        "mixed, dropout": {"specs": (MIXED,), "dropout": 0.1},
        "lora, full": {"model": "lora"},
        "lora, selective": {"model": "lora", "specs": ({"policy": "selective"},)},
    }.items()
}
BUDGETS = {
    f"zero{stage}-budget": Case(
        f"zero{stage}", steps=20, accumulate=2, specs=({"policy": "budget", "budget": "16GiB"},)
    )
    for stage in (2, 3)
}
"""DeepSpeed counts with buckets of several GiB."""
REFUSED = {"zero3-segments": Case("zero3", specs=({"policy": "full", "segments": 2},))}


@pytest.fixture(scope="module")
def zero(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    # DeepSpeed compiles an extension at its first start; killing that leaves a lock that blocks all later starts.
    extra = {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(Path(sys.prefix, "torch_extensions"))}
    return run_on_ranks(CASES | BUDGETS | REFUSED, tmp_path_factory.mktemp("zero"), extra=extra)


@pytest.mark.deepspeed
@pytest.mark.parametrize("name", CASES)
def test_zero_trains_as_without_hf_ckpt(zero, name):
    """The worker compares losses and weights; under ZeRO-3, frozen weights have their shape during recomputation."""
    case = CASES[name]
    for rank, found in enumerate(each_rank(zero, name)):
        assert found["wrapper"] == "DeepSpeedEngine"
        assert found["stage"] == int(case.by[-1])
        assert found["split"] == (case.by == "zero3")
        assert_as_planned(case, rank, found)


@pytest.mark.deepspeed
@pytest.mark.parametrize("name", BUDGETS)
def test_zero_trains_under_a_budget(zero, name):
    """Blocks run twice while they are measured, and once under the plan. The worker compares losses and weights."""
    forwards = 20 * 2
    for found in each_rank(zero, name):
        assert all(forwards < calls < 2 * forwards for calls in found["calls"].values())


@pytest.mark.deepspeed
def test_zero3_refuses_segments(zero):
    for results in zero:
        assert "Use `policy: full` without `segments`" in results["zero3-segments"]["error"]
