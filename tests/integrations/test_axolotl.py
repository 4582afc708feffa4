"""The axolotl plug-in, called as by axolotl 0.19."""

import importlib
import importlib.util
import inspect
import re
import sys
import types
from pathlib import Path

import pytest
import yaml
from helpers.tables import table
from helpers.trainers import FLAG, trainer
from peft import LoraConfig, get_peft_model

import hf_ckpt
from hf_ckpt.errors import HfCkptError
from hf_ckpt.models.tiny import tiny_model

CONFIG = {
    "plugins": ["hf_ckpt.integrations.axolotl.HfCkptPlugin"],
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"policy": "full", "layers": "0,-1"},
}


@pytest.fixture
def plugin(monkeypatch):
    """The plug-in, loaded by its name in the YAML. Its base class is an empty one where axolotl is not installed."""
    if importlib.util.find_spec("axolotl") is None:
        for name in ("axolotl", "axolotl.integrations", "axolotl.integrations.base"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        sys.modules["axolotl.integrations.base"].BasePlugin = type("BasePlugin", (), {})
    module, _, name = CONFIG["plugins"][0].rpartition(".")
    monkeypatch.delitem(sys.modules, module, raising=False)
    return getattr(importlib.import_module(module), name)()


@pytest.mark.parametrize("lora", [False, True], ids=["full fine-tuning", "lora"])
def test_a_training_is_planned_and_logged(plugin, tmp_path, lora):
    """With axolotl's calls in its order, by its names of arguments."""
    kwargs = CONFIG["gradient_checkpointing_kwargs"]
    plugin.register(cfg=CONFIG)
    model = tiny_model("llama")
    plugin.post_model_build(cfg=CONFIG, model=model)
    if lora:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
        model = get_peft_model(model, LoraConfig(target_modules="all-linear", r=2))
    callbacks = plugin.add_callbacks_pre_trainer(cfg=CONFIG, model=model)
    checkpointing = {FLAG: True, f"{FLAG}_kwargs": kwargs}
    trainer(tmp_path, model, callbacks=callbacks, max_steps=2, **checkpointing).train()
    assert hf_ckpt.describe(model).recomputed == {"model.layers.0": 2, "model.layers.3": 2}
    assert len((tmp_path / "hf_ckpt_metrics.jsonl").read_text().splitlines()) >= 1


def test_what_cannot_work_is_refused_before_the_model_is_loaded(plugin):
    plugin.register(CONFIG | {"gradient_checkpointing_kwargs": None})
    for changes, said in table(__file__, "axolotl.yaml"):
        with pytest.raises(HfCkptError, match=said):
            plugin.register(CONFIG | changes)


def test_the_yaml_that_is_shown_is_the_way_to_ask(plugin):
    page = (Path(__file__).parent.parent.parent / "docs" / "integrations.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```text\n(plugins:.*?)^```", page, re.DOTALL | re.MULTILINE)
    asked = yaml.safe_load(shown)
    assert asked == yaml.safe_load(inspect.getmodule(type(plugin)).__doc__.partition("In the YAML of a training:")[2])
    assert asked["plugins"] == CONFIG["plugins"]
    plugin.register(asked)
