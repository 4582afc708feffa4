"""`hf_ckpt.predict` gives one answer however the model is named, and its plan has the predicted effect."""

from __future__ import annotations

import functools
import json

import pytest
import torch
from helpers.planned import SIZES, live_peak, model_of, without_state
from helpers.sparing import sparing
from helpers.steps import assert_same, enable, step

import hf_ckpt
from hf_ckpt.cli.main import main
from hf_ckpt.errors import HfCkptError, InfeasibleError
from hf_ckpt.models.tiny import tiny_batch
from hf_ckpt.planner.budgets import peak_of_least
from hf_ckpt.prediction.batches import sizes_of_batch
from hf_ckpt.prediction.question import Workload
from hf_ckpt.prediction.workload import load_config, presets

MINI = {"batch": 4, "tokens": 256, "device": "a10", "budget": "320MiB"}
TINY = {"device": "cpu", "budget": "30MiB", "optimizer": "sgd"}


def answer(forecast):
    """Everything in a forecast except the model's name."""
    found = forecast.to_dict()
    del found["workload"]["model"]
    return found | {"assumed": found["assumed"].partition(": ")[2]}


@functools.cache
def of_mini():
    """The forecast for a preset by name, and its progress messages."""
    told = []
    return hf_ckpt.predict("mini-llama", on_progress=told.append, **MINI), told


@functools.cache
def of_tiny():
    """The forecast for a live model without hf_ckpt installed."""
    return hf_ckpt.predict(without_state(model_of()), tiny_batch("llama", **SIZES), **TINY)


# --- one answer -----------------------------------------------------------------------------------------------------


@pytest.mark.long
@sparing("way", ["config", "file", "name of the file"], "config")
def test_a_preset_its_config_and_its_file_are_one_model(way):
    file = presets()["mini-llama"]
    model = {"config": load_config("mini-llama"), "file": file, "name of the file": str(file)}[way]
    found, expected = hf_ckpt.predict(model, **MINI), of_mini()[0]
    assert found.plan == expected.plan
    assert answer(found) == answer(expected)


def test_what_a_forecast_says():
    found, told = of_mini()
    assert isinstance(found, hf_ckpt.Forecast)
    assert found.workload == Workload("mini-llama", batch=4, tokens=256)
    assert (found.device.name, found.budget_bytes) == ("a10", 320 * 2**20)
    assert found.plan.active()
    assert found.peak_bytes == found.plan.prediction.peak_bytes <= found.budget_bytes
    assert found.step_seconds == found.plan.prediction.step_seconds > 0
    assert {option.name for option in found.usual} >= {"none", "full", "every_n_layers: 2"}
    assert (found.frontier, found.max_batch, found.max_tokens) == ((), None, None)
    assert told[0] == "reading the model"
    assert {"tracing blocks with 4 x 256 tokens", "comparing"} <= set(told)


@pytest.mark.long
def test_the_command_prints_the_same(capsys):
    words = ["--batch", "4", "--seq", "256", "--device", "a10", "--budget", "320MiB", "--json"]
    assert main(["plan", "mini-llama", *words]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(of_mini()[0].to_dict()))


@pytest.mark.slow
@sparing("rank", [None, 4], None)
def test_a_live_model_and_its_config_are_one_model(rank):
    model, asked = without_state(model_of(lora=rank is not None)), TINY if rank is None else TINY | {"budget": "20MiB"}
    live = of_tiny() if rank is None else hf_ckpt.predict(model, tiny_batch("llama", **SIZES), **asked)
    by_config = hf_ckpt.predict(model.config, dtype="float32", lora=rank, **SIZES, **asked)
    assert live.workload.model == "LlamaForCausalLM"
    assert live.plan == by_config.plan
    assert live.plan.active()
    assert (live.peak_bytes, live.step_seconds) == (by_config.peak_bytes, by_config.step_seconds)


# --- batches --------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_batch_of_tensors_and_its_sizes_are_one_batch():
    by_sizes = hf_ckpt.predict(without_state(model_of()), SIZES["batch"], tokens=SIZES["tokens"], **TINY)
    assert answer(by_sizes) == answer(of_tiny()) | {"workload": answer(by_sizes)["workload"]}
    assert (of_tiny().workload.batch, of_tiny().workload.tokens) == (4, 128)


def test_what_a_batch_tells():
    batch = tiny_batch("t5", batch=3, tokens=16)
    batch["labels"] = batch["labels"][:, :5]
    assert sizes_of_batch(batch) == {"batch": 3, "tokens": 16, "target_tokens": 5, "padded": False}
    batch["attention_mask"][0, :2] = 0
    assert sizes_of_batch(batch)["padded"]
    ids = batch["input_ids"]
    assert sizes_of_batch({"input_ids": ids, "labels": ids[:, 0]}) == {"batch": 3, "tokens": 16}
    for missing in ({}, {"input_ids": None}, {"input_ids": ids[0]}, {"inputs_embeds": torch.ones(3, 16, 8)}):
        with pytest.raises(HfCkptError, match=r"the batch needs `input_ids` of shape \[batch, tokens\]"):
            hf_ckpt.predict("gpt2", missing)


# --- the plan -------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_plan_does_on_the_model_what_was_predicted():
    """A plan on the model does not change the forecast, and the forecast's plan has its predicted peak."""
    model, batch = without_state(model_of()), tiny_batch("llama", **SIZES)
    expected = step(model, batch)
    hf_ckpt.install(model, {"layers": "0"})
    enable(model)
    step(model, batch)
    before = hf_ckpt.describe(model)
    found = hf_ckpt.predict(model, batch, **TINY)
    assert hf_ckpt.describe(model) == before
    assert answer(found) == answer(of_tiny())
    assert hf_ckpt.install(model, found.plan).enabled
    assert_same(expected, step(model, batch))
    counts = hf_ckpt.describe(model).recomputed
    assert {name for name, times in counts.items() if times} == found.plan.active().keys() != set()
    peak = live_peak(model, batch)  # of the second step: the watch checks the third forward
    assert peak == pytest.approx(found.peak_bytes, rel=0.03)
    assert peak <= found.budget_bytes


@pytest.mark.slow
def test_what_does_not_fit_says_how_much_does():
    with pytest.raises(InfeasibleError) as raised:
        hf_ckpt.predict(without_state(model_of()), **SIZES, **TINY | {"budget": "1MiB"})
    floor = raised.value.floor_bytes
    assert floor == sum(raised.value.parts.values())
    assert floor == peak_of_least(of_tiny().costs)
    assert floor > raised.value.budget_bytes == 2**20


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"lora": 4}, "lora"),
        ({"dtype": "bfloat16", "attention": "eager"}, "attention, dtype"),
        ({"architecture": "X"}, "arch"),
    ],
)
def test_what_a_live_model_has_already_is_refused(fields, named):
    with pytest.raises(HfCkptError, match=f"a live model has its own {named}"):
        hf_ckpt.predict(model_of(), 2, **fields)


def test_what_cannot_be_asked_is_refused():
    with pytest.raises(HfCkptError, match="cannot read a model's config"):
        hf_ckpt.predict("no such model!", device="a10")
    with pytest.raises(HfCkptError, match="'lorra' cannot be asked; did you mean 'lora'"):
        hf_ckpt.predict("gpt2", lorra=4)
