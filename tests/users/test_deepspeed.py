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
from helpers.custom import same_under
from helpers.processes import each_rank, run_on_ranks
from helpers.ranks import Case, assert_as_planned
from helpers.steps import enable, outcome, recomputed, step
from helpers.tables import keyed, table

import hf_ckpt
from hf_ckpt.errors import HfCkptError
from hf_ckpt.models.tiny import tiny_batch, tiny_model

TABLE = table(__file__, "zero.yaml")

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
@pytest.mark.parametrize(*keyed(TABLE["zero3"], "version", "frozen", "spec", "said"))
def test_zero3_trains_or_is_refused(version, frozen, spec, said, monkeypatch):
    model = under_zero3(version, frozen, spec, monkeypatch)
    if said is None:
        step(model, tiny_batch("llama"))
        assert recomputed(model) == Case("ddp").blocks()
    else:
        with pytest.raises(HfCkptError, match=said):
            step(model, tiny_batch("llama"))


class Owned(OrderedDict):
    """As the dicts that hold parameters under ZeRO-3: they are made for a module, so `copy` fails."""

    def __init__(self, owner: Any, *args: Any) -> None:
        super().__init__(*args)


def test_a_block_whose_dicts_have_no_copy_is_recomputed_with_the_attributes_of_its_forward():
    def make():
        model = tiny_model("llama", attention_dropout=0.5)
        for part in model.modules():
            part._parameters = Owned(part, part._parameters)
        return model

    def run(model):
        torch.manual_seed(7)
        loss = model(**tiny_batch("llama")).loss
        model.eval()
        loss.backward()
        return outcome(model, loss)

    same_under("full", run, make)


# --- with DeepSpeed -------------------------------------------------------------------------------------------------


ROWS = [(f"zero{stage}", name, row) for stage in (2, 3) for name, row in TABLE["cases"].items()]
CASES = {f"{zero}-{name}": Case(zero, steps=2, accumulate=2, **row) for zero, name, row in ROWS}
BUDGET = {"policy": "budget", "budget": "16GiB"}
BUDGETS = {f"{zero}-budget": Case(zero, steps=20, accumulate=2, specs=(BUDGET,)) for zero in ("zero2", "zero3")}
"""DeepSpeed counts with buckets of several GiB."""
TOGETHER = {name: Case("engine", steps=30, **row) for name, row in TABLE["together"].items()}


@pytest.fixture(scope="module")
def zero(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of the cases whose tests are selected."""
    tests = [item for item in request.session.items if "zero" in getattr(item, "fixturenames", ())]
    names = {item.callspec.params["name"] for item in tests}
    cases = {name: case for name, case in (CASES | BUDGETS | TOGETHER).items() if name in names}
    # DeepSpeed compiles an extension at its first start; killing that leaves a lock that blocks all later starts.
    extra = {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(Path(sys.prefix, "torch_extensions"))}
    return run_on_ranks(cases, tmp_path_factory.mktemp("zero"), extra=extra)


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
@pytest.mark.parametrize("name", [name for name, case in TOGETHER.items() if not case.fails])
def test_ranks_under_zero3_recompute_the_same_blocks(zero, name):
    """Other plans would gather other parameters, and wait for ever. The worker compares losses and weights."""
    case = TOGETHER[name]
    first, second = each_rank(zero, name)
    for what in ("plan", "recomputed", "calls"):
        assert first[what] == second[what]
    assert all(calls > case.steps * case.accumulate for calls in first["calls"].values())
    messages = first["messages"] + second["messages"]
    if name in ("other lengths", "lora"):  # under a tight budget, times decide which plan is checked, and replaced
        assert first["measuring"] is second["measuring"] is None
    assert ("no plan fits" in messages) >= (name == "no plan fits")


@pytest.mark.deepspeed
@pytest.mark.parametrize("name", [name for name, case in TOGETHER.items() if case.fails])
def test_no_rank_waits_for_one_that_cannot_plan(zero, name):
    first, second = (found[name]["error"] for found in zero)
    assert "rank 1 cannot plan for its steps, and all ranks need one plan: ZeroDivisionError" in first
    assert "ZeroDivisionError" in second
