"""Models and inputs of the benchmarks."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from inputs import optimizer_for, random_inputs

from hf_ckpt.models.tiny import FAMILIES, tiny_model
from hf_ckpt.prediction.batches import step_of_model
from hf_ckpt.prediction.workload import Workload, real_model


@pytest.fixture
def workload(request, tmp_path):
    """A small workload of a family."""
    model = tiny_model(request.param, layers=2)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    return Workload(str(tmp_path), batch=2, tokens=16, attention="eager")


@pytest.mark.parametrize("workload", FAMILIES, indirect=True)
def test_batches_are_random_and_masked_nowhere(workload):
    model = real_model(workload)
    inputs, again, other = (random_inputs(workload, model, "cpu", seed) for seed in (0, 0, 1))
    assert bool(inputs["attention_mask"].all())
    assert len(inputs["input_ids"].unique()) > 8
    expected = {name: value.shape for name, value in step_of_model(workload, model).batch.items()}
    assert {name: value.shape for name, value in inputs.items() if name != "use_cache"} == expected
    assert torch.equal(inputs["input_ids"], again["input_ids"])
    assert not torch.equal(inputs["input_ids"], other["input_ids"])
    assert torch.isfinite(model(**inputs).loss)


@pytest.mark.parametrize("name", ["BertForTokenClassification", "BertForMultipleChoice", "BertForMaskedLM"])
@pytest.mark.parametrize("workload", ["bert"], indirect=True)
def test_labels_are_ones_that_the_task_has(workload, name):
    workload = dataclasses.replace(workload, batch=3, architecture=name)
    model = real_model(workload)
    assert torch.isfinite(model(**random_inputs(workload, model, "cpu")).loss)


@pytest.mark.parametrize("workload", ["bert"], indirect=True)
def test_optimizers_are_torchs_own(workload):
    model = real_model(dataclasses.replace(workload, lora=2))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    kinds = (("adamw", torch.optim.AdamW, None), ("sgd", torch.optim.SGD, 0), ("momentum", torch.optim.SGD, 0.9))
    for name, kind, momentum in kinds:
        optimizer = optimizer_for(name, model)
        assert type(optimizer) is kind
        assert optimizer.defaults.get("momentum") == momentum
        assert len(optimizer.param_groups[0]["params"]) == len(trained) < len(list(model.parameters()))
