"""`hf_ckpt.predict` gives one answer however the model is named, and its plan has the predicted effect."""

from __future__ import annotations

import functools
import json

import pytest
import torch
from helpers.planned import SIZES, live_peak, model_of, without_state
from helpers.steps import assert_same, enable, step

import hf_ckpt
from hf_ckpt.cli.main import main
from hf_ckpt.errors import HfCkptError, InfeasibleError
from hf_ckpt.forecast.batches import sizes_of_batch
from hf_ckpt.forecast.model import load_config
from hf_ckpt.forecast.presets import presets
from hf_ckpt.forecast.question import Workload
from hf_ckpt.models.tiny import tiny_batch

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


def test_a_forecast_has_the_question_the_plan_and_other_budgets():
    found, told = of_mini()
    assert isinstance(found, hf_ckpt.Forecast)
    assert found.workload == Workload("mini-llama", batch=4, tokens=256)
    assert (found.device, found.budget_bytes) == ("a10", 320 * 2**20)
    assert found.plan.active()
    assert found.floor_bytes < found.peak_bytes == found.plan.prediction.peak_bytes <= found.budget_bytes
    assert found.step_seconds == found.plan.prediction.step_seconds > 0
    assert told[0] == "reading the model"
    assert "measuring steps with 4 x 256 tokens, on fake tensors" in told
    other = found.within(found.usual[0].peak_bytes)
    assert not other.plan.active()
    assert other.step_seconds < found.step_seconds
    assert other.within("320MiB") == found.within("320MiB")
    with pytest.raises(InfeasibleError) as raised:
        found.within(found.floor_bytes - 1)
    assert raised.value.floor_bytes == sum(raised.value.parts.values()) == found.floor_bytes


@pytest.mark.long
@pytest.mark.parametrize("way", ["config", "file", "command"])
def test_a_preset_its_config_its_file_and_the_command_have_one_answer(way, capsys):
    expected = json.loads(json.dumps(answer(of_mini()[0])))
    if way == "command":
        words = "plan mini-llama --batch 4 --seq 256 --device a10 --budget 320MiB --json"
        assert main(words.split()) == 0
        found = json.loads(capsys.readouterr().out)
        assert found == json.loads(json.dumps(of_mini()[0].to_dict()))
        return
    model = load_config("mini-llama") if way == "config" else presets()["mini-llama"]
    assert json.loads(json.dumps(answer(hf_ckpt.predict(model, **MINI)))) == expected


@pytest.mark.slow
@pytest.mark.parametrize("rank", [None, 4])
def test_a_live_model_its_config_and_batches_of_tensors_are_one_training(rank):
    model, asked = without_state(model_of(lora=rank is not None)), TINY if rank is None else TINY | {"budget": "20MiB"}
    live = of_tiny() if rank is None else hf_ckpt.predict(model, tiny_batch("llama", **SIZES), **asked)
    by_config = hf_ckpt.predict(model.config, dtype="float32", lora=rank, **SIZES, **asked)
    assert live.workload.model == "LlamaForCausalLM"
    assert live.plan == by_config.plan
    assert live.plan.active()
    assert (live.peak_bytes, live.step_seconds) == (by_config.peak_bytes, by_config.step_seconds)


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


@pytest.mark.parametrize(
    ("model", "fields", "told"),
    [
        (model_of(), {"lora": 4}, "a live model has its own lora"),
        (model_of(), {"dtype": "bfloat16", "attention": "eager"}, "a live model has its own attention, dtype"),
        ("no such model!", {"device": "a10"}, "cannot read a model's config"),
        ("gpt2", {"lorra": 4}, "'lorra' cannot be asked; did you mean 'lora'"),
    ],
)
def test_what_cannot_be_asked_is_refused(model, fields, told):
    with pytest.raises(HfCkptError, match=told):
        hf_ckpt.predict(model, 2, **fields)
