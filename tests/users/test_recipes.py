"""Every recipe runs as a user runs it, with its own script and YAML in its own process; and how recipes read data."""

from __future__ import annotations

import dataclasses
import importlib
import re
import sys
import warnings
from pathlib import Path

import pytest
import torch
import yaml
from helpers.processes import ROOT, python
from helpers.sparing import sparing
from helpers.steps import input_gradient_hooks
from helpers.tables import table
from helpers.trainers import metrics
from transformers import TrainingArguments

from hf_ckpt.models.tiny import byte_tokenizer
from hf_ckpt.spec.reading import POLICIES
from hf_ckpt.spec.spec import Spec

RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.py") if path.stem not in ("common", "demo"))
BLOCK_CALLS = {"lora_llama": 16, "full_gpt2": 16, "classify_bert": 16, "seq2seq_t5": 32}  # blocks times 4 steps


@pytest.fixture
def recipes(monkeypatch):
    """Import recipes and `common` as if from their own directory, and unload them afterwards."""
    monkeypatch.syspath_prepend(ROOT / "recipes")
    for name in ("common", *RECIPES):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module
    for name in ("common", *RECIPES):
        sys.modules.pop(name, None)


# --- in separate processes --------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.compat
@sparing("recipe", RECIPES, "full_gpt2")
def test_recipe_runs(recipe, tmp_path):
    out = tmp_path / "out"
    words = [f"recipes/{recipe}.py", f"configs/recipes/{recipe}.yaml", "--tiny", "--output_dir", out]
    done = python(*words, cwd=ROOT, extra={"HF_HOME": str(tmp_path / "cache")})
    assert done.returncode == 0, done.stderr
    lines = re.split(r"[\r\n]+", done.stderr)
    plans = [line for line in lines if line.startswith("hf_ckpt: ")]
    assert "blocks are checkpointed by hf_ckpt" in plans[-2]
    assert plans[-1] == "hf_ckpt: 4 steps of training"
    assert [line for line in lines if re.search(r"(?<!/)hf_ckpt(?!/)", line) and line not in plans] == []  # no warning
    calls, recomputed = map(int, re.search(r"(\d+) forwards of planned blocks; (\d+) recomp", done.stdout).groups())
    assert calls == BLOCK_CALLS[recipe]
    assert recomputed > calls if recipe == "full_gpt2" else recomputed == calls  # `selective` counts operations
    assert [row["step"] for row in metrics(out)] == [1, 2, 3, 4]
    assert any(out.glob("*.safetensors"))


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def common(recipes):
    return recipes("common")


class OptionsRead(Exception):
    """Ends a recipe once it has named its options."""


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_key_of_the_yaml_is_an_option(recipe, recipes, common, monkeypatch):
    known = set()
    module = recipes(recipe)

    def parse(*kinds):
        known.update(field.name for kind in kinds for field in dataclasses.fields(kind))
        raise OptionsRead

    monkeypatch.setattr(module, "parse", parse)
    with pytest.raises(OptionsRead):
        module.main()
    settings = yaml.safe_load((ROOT / "configs" / "recipes" / f"{recipe}.yaml").read_text())
    assert {re.sub("^activation_checkpointing", common.FLAG, key) for key in settings} <= known
    assert settings["activation_checkpointing"] is True
    assert Spec.parse(settings["activation_checkpointing_kwargs"]).policy in POLICIES


def parse(common, tmp_path: Path, text: str, *words: str):
    config = tmp_path / "options.yaml"
    config.write_text(text)
    kinds = (common.ModelArguments, common.DataArguments, TrainingArguments)
    return common.parse(*kinds, argv=[str(config), *words])


REFUSED = table(__file__, "refused.yaml")


@pytest.mark.parametrize(("text", "said"), REFUSED["options"])
def test_a_yaml_that_cannot_be_used_ends_the_program(common, tmp_path, capsys, text, said):
    with pytest.raises(SystemExit) as stopped:
        parse(common, tmp_path, text, "--tiny")
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_one_file_needs_no_brackets(common, tmp_path):
    _, data, _ = parse(common, tmp_path, "train_file: rows.jsonl\n", "--output_dir", str(tmp_path))
    assert data.train_file == ["rows.jsonl"]
    assert common.reader_of(data.train_file) == "json"


def test_command_line_beats_tiny_beats_yaml(common, tmp_path):
    text = "max_length: 100\nmax_steps: 200\nlearning_rate: 3e-4\nbf16: true\ndataset_name: some/data\n"
    options, data, args = parse(common, tmp_path, text, "--tiny", "--max_length", "7", "--output_dir", str(tmp_path))
    assert options.tiny
    assert (data.max_length, args.max_steps, args.learning_rate, args.bf16) == (7, 4, 3e-4, False)
    assert data.dataset_name is None
    assert all(Path(file).is_file() for file in data.train_file)
    with pytest.raises(ValueError, match="--max_lenght"):
        parse(common, tmp_path, text, "--tiny", "--max_lenght", "9")


@pytest.mark.compat
@pytest.mark.parametrize("prefix", ["activation", "gradient"])
@pytest.mark.parametrize("place", ["yaml", "flag"])
def test_either_name_of_the_flag_works_without_a_warning(common, tmp_path, prefix, place):
    name, text = f"{prefix}_checkpointing", "seed: 1"
    words = [f"--{name}", f"--{name}_kwargs", '{"policy": "full", "layers": "0-1"}']
    if place == "yaml":
        text, words = f"{name}: true\n{name}_kwargs: {{policy: full, layers: 0-1}}\n", []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, _, args = parse(common, tmp_path, text, "--tiny", "--output_dir", str(tmp_path), *words)
    assert args.gradient_checkpointing is True
    assert args.gradient_checkpointing_kwargs == {"policy": "full", "layers": "0-1"}


def test_a_base_in_4_bits_is_quantised_and_not_checkpointed_yet(recipes):
    import bitsandbytes

    recipe = recipes("lora_llama")
    model = recipe.load_base(recipe.LoraArguments(tiny=True, load_in_4bit=True), torch.float32)
    assert sum(isinstance(module, bitsandbytes.nn.Linear4bit) for module in model.modules()) == 4 * 7
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    assert input_gradient_hooks(model) == 0
    with pytest.raises(SystemExit, match="--gguf_file and --load_in_4bit exclude each other"):
        recipe.load_base(recipe.LoraArguments(gguf_file="a.gguf", load_in_4bit=True), torch.float32)


# --- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("files", "message"), REFUSED["data"])
def test_data_that_cannot_be_used_is_refused(common, tmp_path, monkeypatch, files, message):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    data = common.DataArguments(train_file=[str(tmp_path / name) for name in files] or None, max_length=64)
    with pytest.raises(SystemExit, match=message):
        common.pack(common.load_rows(data), byte_tokenizer(), data)


def test_a_text_of_one_line_has_no_pairs(recipes, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("one line\n")
    words = ["--tiny", "--train_file", str(tmp_path / "a.txt"), "--output_dir", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["seq2seq_t5.py", "configs/recipes/seq2seq_t5.yaml", *words])
    with pytest.raises(SystemExit, match="fewer than two pairs"):
        recipes("seq2seq_t5").main()
