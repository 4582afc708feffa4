"""transformers' Trainer: its argument carries the spec, and its enable calls keep the plan."""

import copy
import json

import pytest
import torch
from helpers.installed import ALL
from helpers.steps import recomputed
from helpers.trainers import FLAG, Rows, trainer
from transformers import HfArgumentParser, Trainer, TrainingArguments

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.models.tiny import tiny_model

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
