"""Fixtures for tests of other libraries: quiet processes, a small base model on disk, scripts run in this process."""

from __future__ import annotations

import gc
import importlib
import runpy
import sys
from pathlib import Path

import datasets
import pytest
import torch
import transformers
from helpers.clients import LAYERS
from helpers.scripts import RECIPES, ROOT
from transformers import Trainer, set_seed

import hf_ckpt
from hf_ckpt.__main__ import main
from hf_ckpt.attach.record import installation
from hf_ckpt.models.tiny import byte_tokenizer, tiny_model


@pytest.fixture(scope="module")
def quiet_and_alone(request, tmp_path_factory):
    """One thread, so that the order of sums is the same in all processes; no progress bars; a separate data cache.

    Imported objects are hidden from the garbage collector: a Trainer collects before it trains, which would take longer
    than the training. A test module's `LOADED_FIRST` names optional packages to import first.
    """
    for name in getattr(request.module, "LOADED_FIRST", ()):
        package, _, part = name.partition(".")
        getattr(importlib.import_module(package), part)  # loads it
    gc.collect()
    gc.freeze()
    threads, cache = torch.get_num_threads(), datasets.config.HF_DATASETS_CACHE
    torch.set_num_threads(1)
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    datasets.config.HF_DATASETS_CACHE = tmp_path_factory.mktemp("cache")
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)
    datasets.enable_progress_bars()
    transformers.utils.logging.enable_progress_bar()
    datasets.config.HF_DATASETS_CACHE = cache


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A folder with a small LLaMA and its tokenizer: DPO loads its reference model from the model's path."""
    folder = tmp_path_factory.mktemp("base")
    tiny_model("llama", layers=LAYERS, hidden=16).save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}A:{% generation %}{{ m.content }}{{ eos_token }}"
        "{% endgeneration %}{% else %}U:{{ m.content }}\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}A:{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def script(monkeypatch, tmp_path):
    """Run a script or module here, like `python -m hf_ckpt` or `python`; returns its Trainer after training."""
    monkeypatch.chdir(tmp_path)
    seen = []
    train = Trainer.train

    def noted(self, *args, **kwargs):
        result = train(self, *args, **kwargs)
        record = installation(self.model)
        seen.append((self, None if record is None else hf_ckpt.describe(self.model)))
        return result

    def run(name, *arguments, hooked=()):
        words = [str(word) for word in arguments]
        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "train", noted)
            patch.setattr(sys, "argv", [str(name), *words])
            patch.setattr(sys, "path", list(sys.path))
            set_seed(0)  # adapters are initialised before a Trainer sets its seed
            if hooked is not None:
                module = () if str(name).endswith(".py") else ("-m",)
                assert main([*hooked, *module, str(name), *words]) == 0
            elif str(name).endswith(".py"):
                runpy.run_path(str(name), run_name="__main__")
            else:
                runpy.run_module(name, run_name="__main__", alter_sys=True)
        return seen.pop() if seen else None

    return run


@pytest.fixture
def recipes(monkeypatch):
    """Import recipes and `common` as if from their own directory, and unload them afterwards."""
    monkeypatch.syspath_prepend(ROOT / "recipes")
    for name in ("common", *RECIPES):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module
    for name in ("common", *RECIPES):
        sys.modules.pop(name, None)
