"""LLaMA-Factory's own command and YAML under `python -m hf_ckpt`, in an environment that has it."""

from __future__ import annotations

import json

import pytest
import yaml
from helpers.processes import python

from hf_ckpt.models.tiny import byte_tokenizer, tiny_model

pytestmark = pytest.mark.slow
pytest.importorskip("llamafactory")

ROWS = [{"instruction": f"say {number}", "input": "", "output": "word " * 8} for number in range(16)]
TRAINING = {
    "model_name_or_path": "model",
    "stage": "sft",
    "finetuning_type": "lora",
    "lora_rank": 4,
    "do_train": True,
    "template": "default",
    "cutoff_len": 64,
    "dataset": "own",
    "dataset_dir": ".",
    "per_device_train_batch_size": 2,
    "max_steps": 3,
    "logging_steps": 1,
    "report_to": "none",
    "use_cpu": True,
    "seed": 3,
    "disable_gradient_checkpointing": True,
}


def test_its_trainer_runs_with_the_plan(tmp_path):
    tiny_model("llama", layers=4).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    (tmp_path / "dataset_info.json").write_text(json.dumps({"own": {"file_name": "rows.json"}}))
    losses = {}
    for name, words in {"with": ("-m", "hf_ckpt", "--spec", "policy=selective"), "without": ()}.items():
        training = {**TRAINING, "output_dir": name}
        (tmp_path / "train.yaml").write_text(yaml.safe_dump(training))
        done = python(*words, "-m", "llamafactory.launcher", "train.yaml", cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
        said = "hf_ckpt: LlamaForCausalLM: selective (save linear, attention) on all 4 blocks"
        assert (said in done.stdout + done.stderr) == (name == "with")
        logged = json.loads((tmp_path / name / "trainer_state.json").read_text())["log_history"]
        losses[name] = [(row["loss"], row["grad_norm"]) for row in logged if "loss" in row]
    assert len(losses["with"]) == 3
    assert losses["with"] == losses["without"]
