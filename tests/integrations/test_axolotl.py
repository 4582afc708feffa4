"""The axolotl plug-in, called as by axolotl 0.19, with axolotl's own classes if installed."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import re
import sys
import types
from pathlib import Path

import pytest
import yaml
from helpers.processes import python
from helpers.trainers import FLAG, trainer
from peft import LoraConfig, get_peft_model

import hf_ckpt
from hf_ckpt.errors import HfCkptError
from hf_ckpt.models.tiny import byte_tokenizer, tiny_model

CONFIG = {
    "plugins": ["hf_ckpt.integrations.axolotl.HfCkptPlugin"],
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"policy": "full", "layers": "0,-1"},
}


class PublishedPlugin:
    """The used part of axolotl 0.19's `BasePlugin`, for environments without axolotl."""

    def __init__(self): ...
    def register(self, cfg): ...
    def post_model_build(self, cfg, model): ...
    def add_callbacks_pre_trainer(self, cfg, model):
        return []


@pytest.fixture
def plugin(monkeypatch):
    """The plug-in, loaded by its name in the YAML."""
    if importlib.util.find_spec("axolotl") is None:
        for name in ("axolotl", "axolotl.integrations", "axolotl.integrations.base"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        sys.modules["axolotl.integrations.base"].BasePlugin = PublishedPlugin
    module, _, name = CONFIG["plugins"][0].rpartition(".")
    monkeypatch.delitem(sys.modules, module, raising=False)
    return getattr(importlib.import_module(module), name)()


def trained(plugin, tmp_path, *, lora):
    """A model after two steps, with axolotl's calls in its order."""
    plugin.register(CONFIG)
    model = tiny_model("llama")
    plugin.post_model_build(CONFIG, model)
    if lora:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=CONFIG["gradient_checkpointing_kwargs"])
        model = get_peft_model(model, LoraConfig(target_modules="all-linear", r=2))
    callbacks = plugin.add_callbacks_pre_trainer(CONFIG, model)
    checkpointing = {FLAG: True, f"{FLAG}_kwargs": CONFIG["gradient_checkpointing_kwargs"]}
    trainer(tmp_path, model, callbacks=callbacks, max_steps=2, **checkpointing).train()
    return model


@pytest.mark.parametrize("lora", [False, True], ids=["full fine-tuning", "lora"])
def test_a_training_is_planned_and_logged(plugin, tmp_path, lora):
    done = hf_ckpt.describe(trained(plugin, tmp_path, lora=lora))
    assert done.recomputed == {"model.layers.0": 2, "model.layers.3": 2}
    assert len((tmp_path / "hf_ckpt_metrics.jsonl").read_text().splitlines()) >= 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gradient_checkpointing": False}, "`gradient_checkpointing` must be true"),
        ({"gradient_checkpointing": "offload"}, "`gradient_checkpointing` must be true"),
        ({"gradient_checkpointing_kwargs": {"polcy": "full"}}, "did you mean `policy`"),
        ({"gradient_checkpointing_kwargs": {"use_reentrant": 1}}, "use_reentrant"),
        ({"activation_offloading": True}, "`activation_offloading` cannot be used"),
        (
            {"selective_checkpointing": True, "layer_offloading": True},
            "`selective_checkpointing` and `layer_offloading`",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_the_model_is_loaded(plugin, changes, said):
    plugin.register(CONFIG)
    plugin.register(CONFIG | {"gradient_checkpointing_kwargs": None})
    with pytest.raises(HfCkptError) as caught:
        plugin.register(CONFIG | changes)
    assert said in str(caught.value)


def test_its_methods_are_axolotls(plugin):
    base = type(plugin).__mro__[1]
    own = [name for name, value in vars(type(plugin)).items() if inspect.isfunction(value)]
    assert sorted(own) == ["add_callbacks_pre_trainer", "post_model_build", "register"]
    for name in own:
        published, ours = (list(inspect.signature(getattr(kind, name)).parameters) for kind in (base, type(plugin)))
        assert published == ours


def test_the_yaml_that_is_shown_is_the_way_to_ask(plugin):
    page = (Path(__file__).parent.parent.parent / "docs" / "integrations.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```text\n(plugins:.*?)^```", page, re.DOTALL | re.MULTILINE)
    docstring = inspect.getmodule(type(plugin)).__doc__.partition("In the YAML of a training:")[2]
    asked = yaml.safe_load(shown)
    assert asked == yaml.safe_load(docstring)
    assert asked["plugins"] == CONFIG["plugins"]
    plugin.register(asked)


# --- axolotl's own command, in an environment that has it -------------------------------------------------------------

TRAINING = {
    "base_model": "model",
    "tokenizer_type": "AutoTokenizer",
    "special_tokens": {"pad_token": "<pad>"},
    "datasets": [{"path": "rows.jsonl", "type": "alpaca"}],
    "dataset_prepared_path": "prepared",
    "val_set_size": 0,
    "sequence_len": 256,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 1,
    "max_steps": 3,
    "num_epochs": 1,
    "learning_rate": 0.001,
    "optimizer": "adamw_torch",
    "lr_scheduler": "constant",
    "logging_steps": 1,
    "seed": 3,
    "bf16": False,
    "tf32": False,
    "attn_implementation": "sdpa",
}


@pytest.mark.slow
def test_its_command_trains_with_the_plan(tmp_path):
    pytest.importorskip("axolotl")
    tiny_model("llama", layers=4).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    rows = [{"instruction": f"say {number}", "input": "", "output": "word " * 8} for number in range(16)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    losses = {}
    for name, more in {"with": CONFIG, "without": {}}.items():
        training = {**TRAINING, **more, "output_dir": name}
        (tmp_path / "train.yaml").write_text(yaml.safe_dump(training))
        words = ("-m", "axolotl.cli.train", "train.yaml")
        done = python(*words, cwd=tmp_path, extra={"AXOLOTL_DO_NOT_TRACK": "1", "DO_NOT_TRACK": "1"})
        assert done.returncode == 0, done.stderr[-3000:]
        assert ("2 of 4 blocks" in done.stdout + done.stderr) == (name == "with")
        (state,) = (tmp_path / name).glob("checkpoint-3/trainer_state.json")
        logged = json.loads(state.read_text())["log_history"]
        losses[name] = [(row["loss"], row["grad_norm"]) for row in logged if "loss" in row]
    assert len(losses["with"]) == len(losses["without"]) == 3
    assert losses["with"] == losses["without"]
    assert '"action": "full"' in (tmp_path / "with" / "hf_ckpt_metrics.jsonl").read_text()
