"""Fixtures for tests of other libraries: quiet processes, a small base model on disk, scripts run in this process."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import datasets
import pytest
import transformers
from helpers.clients import LAYERS
from transformers import Trainer, set_seed

import hf_ckpt
from hf_ckpt.__main__ import main
from hf_ckpt.attach.record import installation
from hf_ckpt.models.tiny import byte_tokenizer, tiny_model


@pytest.fixture(scope="module")
def quiet_and_alone(tmp_path_factory):
    """No progress bars, and a separate data cache."""
    cache = datasets.config.HF_DATASETS_CACHE
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    datasets.config.HF_DATASETS_CACHE = tmp_path_factory.mktemp("cache")
    yield
    datasets.enable_progress_bars()
    transformers.utils.logging.enable_progress_bar()
    datasets.config.HF_DATASETS_CACHE = cache


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A folder with a small LLaMA and its tokenizer: DPO loads its reference model from the model's path."""
    folder = tmp_path_factory.mktemp("base")
    tiny_model("llama", layers=LAYERS, hidden=16).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def script(monkeypatch, tmp_path):
    """Run a script or module here, like `python -m hf_ckpt` or `python`; returns its Trainer after training."""
    monkeypatch.chdir(tmp_path)
    seen = []
    train = Trainer.train

    def train_and_note(self, *args, **kwargs):
        result = train(self, *args, **kwargs)
        seen.append((self, hf_ckpt.describe(self.model) if installation(self.model) else None))
        return result

    def run(name, *arguments, hooked=()):
        name, words = str(name), [str(word) for word in arguments]
        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "train", train_and_note)
            patch.setattr(sys, "argv", [name, *words])
            patch.setattr(sys, "path", list(sys.path))
            set_seed(0)  # adapters are initialised before a Trainer sets its seed
            if hooked is not None:
                assert main([*hooked, *(() if name.endswith(".py") else ("-m",)), name, *words]) == 0
            elif name.endswith(".py"):
                runpy.run_path(name, run_name="__main__")
            else:
                runpy.run_module(name, run_name="__main__", alter_sys=True)
        return seen.pop() if seen else None

    return run
