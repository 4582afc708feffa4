"""transformers' Trainer: its argument carries the spec, and its enable calls keep the plan."""

from __future__ import annotations

import copy
import json
import logging
import types

import pytest
import torch
from helpers.installed import ALL
from helpers.steps import recomputed
from helpers.trainers import FLAG, Rows, metrics, trainer
from transformers import HfArgumentParser, Trainer, TrainingArguments

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.models.tiny import tiny_model
from hf_ckpt.training import callback

NAMES = [name.replace("_enable", "") for name in compat.transformers.ENABLE_NAMES]


@pytest.mark.compat
def test_the_plan_survives_a_second_train(tmp_path):
    """The plan survives a second `train()`, in which Trainer enables checkpointing with its own defaults."""
    model = tiny_model("llama")
    hf_ckpt.install(model, {"layers": "2"})
    job = trainer(tmp_path, model, max_steps=1, **{f"{FLAG}_kwargs": None})
    job.train()
    assert recomputed(model) == [ALL[2]]
    getattr(model, compat.transformers.DISABLE_NAMES[-1])()
    job.train()
    assert recomputed(model) == [ALL[2]] * 2


@pytest.mark.compat
@pytest.mark.parametrize("name", NAMES)
def test_a_nested_spec_reaches_the_blocks_from_the_command_line(tmp_path, name):
    """A nested spec on the command line reaches the plan unchanged, and is saved and copied with the arguments."""
    spec = {"policy": "full", "layers": {"encoder": "0", "decoder": "1-2"}, "preserve_rng_state": False}
    words = ["--output_dir", str(tmp_path), "--use_cpu", "--report_to", "none", "--save_strategy", "no"]
    words += ["--max_steps", "1", "--per_device_train_batch_size", "2"]
    words += [f"--{name}", "True", f"--{name}_kwargs", json.dumps(spec)]
    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(words)
    kwargs = getattr(arguments, f"{name}_kwargs")
    torch.save(arguments, tmp_path / "arguments.bin")
    for saved in (copy.deepcopy(arguments), torch.load(tmp_path / "arguments.bin", weights_only=False)):
        assert json.loads(saved.to_json_string())[f"{name}_kwargs"] == getattr(saved, f"{name}_kwargs") == kwargs
    model = tiny_model("t5")
    hf_ckpt.install(model)
    Trainer(model, arguments, train_dataset=Rows("t5", 2)).train()
    assert recomputed(model) == ["encoder.block.0", "decoder.block.1", "decoder.block.2"]
    assert hf_ckpt.describe(model).spec == spec


LOGITS = 2 * 12 * 320 * 4
"""Bytes of the logits for two rows."""


@pytest.mark.trap(12)
@pytest.mark.parametrize(
    ("spec", "peak", "share", "said"),
    [
        ({"policy": "full"}, 3 * LOGITS, 1 / 3, True),
        ({"policy": "full"}, 5 * LOGITS, 1 / 5, False),
        ({"policy": "none"}, 3 * LOGITS, 1 / 3, False),
        ({"policy": "full", "head": 6}, 3 * LOGITS, 1 / 12, False),  # 6 of 24 tokens per chunk
        ({"policy": "full", "head": 6}, 3 * LOGITS, 1 / 12, True),  # and the loss reads all logits
    ],
    ids=str,
)
def test_a_warning_says_once_that_logits_are_most_of_the_peak(spec, peak, share, said, tmp_path, monkeypatch, caplog):
    """A warning says once that the logits are most of the peak, which checkpointing blocks cannot lower."""
    reading = {"reset": lambda: None, "peak_bytes": lambda: peak, "reserved_bytes": lambda: None}
    meter = types.SimpleNamespace(source="test allocator", exact=True, **reading)
    monkeypatch.setattr(callback, "PeakMeter", lambda devices: meter)
    run, reads = trainer(tmp_path, max_steps=3, **{f"{FLAG}_kwargs": spec}), said and "head" in spec
    run.compute_loss_func = (lambda outputs, *_, **__: outputs.logits.square().mean()) if reads else None
    with caplog.at_level(logging.WARNING, "hf_ckpt"):
        run.train()
    assert [row["memory/head_gib"] * 2**30 for row in metrics(tmp_path)] == [pytest.approx(share * peak)] * 3
    messages = [record.getMessage() for record in caplog.records if "alone are" in record.getMessage()]
    assert len(messages) == said
    if said:
        told = "computed as a whole for `torch.Tensor.square`" if reads else '"head": "auto"'
        assert all(
            part in messages[0] for part in ("LlamaForCausalLM alone are 33 % of the peak (30.00 KiB), and", told)
        )
