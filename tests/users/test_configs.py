"""Every shipped config is valid, has one owner of checkpointing, and has working commands in its header."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from helpers.scripts import ROOT, complaints, launch, metrics
from transformers import TrainingArguments

ACCELERATE = sorted((ROOT / "configs" / "accelerate").glob("*.yaml"))
RECIPE_CONFIGS = sorted((ROOT / "configs" / "recipes").glob("*.yaml"))
HAS_GPU = torch.cuda.is_available()

NAMES = ("fsdp2", "deepspeed_zero2", "deepspeed_zero3")
each_launch_config = pytest.mark.parametrize("path", ACCELERATE, ids=lambda path: path.stem)


def header(path: Path) -> list[str]:
    """The comment lines at the beginning of a file, without `#`."""
    lines = path.read_text().splitlines()
    length = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    return [line[1:].removeprefix(" ") for line in lines[:length]]


def commands(path: Path) -> list[list[str]]:
    """The indented commands of a header, as lists of words."""
    text = "\n".join(header(path)).replace("\\\n", " ")
    return [shlex.split(line) for line in text.splitlines() if line.startswith("  ")]


def settings(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every (dotted key, value) of nested mappings."""
    for key, inner in value.items():
        if isinstance(inner, dict):
            yield from settings(inner, f"{prefix}{key}.")
        else:
            yield prefix + key, inner


# --- configs/accelerate ---------------------------------------------------------------------------------------------


def test_the_five_ways_to_launch():
    assert [path.stem for path in ACCELERATE] == ["ddp", "deepspeed_zero2", "deepspeed_zero3", "fsdp2", "single"]


@each_launch_config
def test_accelerate_reads_it(path):
    config = load_config_from_file(str(path))
    kinds = {"single": "NO", "ddp": "MULTI_GPU", "fsdp2": "FSDP"}
    assert config.distributed_type.value == kinds.get(path.stem, "DEEPSPEED")
    assert config.num_processes == (1 if path.stem == "single" else 8)


@each_launch_config
def test_launcher_knows_every_key(path):
    """Nested keys are launcher options: the launcher accepts unknown keys, which then do nothing."""
    known = set(vars(launch_command_parser().parse_args(["script.py"])))
    config = yaml.safe_load(path.read_text())
    nested = {key for name, value in config.items() if isinstance(value, dict) for key in value}
    assert nested <= known


@each_launch_config
def test_exactly_one_owner_of_checkpointing(path):
    owners = [line for line in header(path) if line.startswith("Owner of checkpointing:")]
    assert len(owners) == 1
    assert owners[0].startswith("Owner of checkpointing: hf_ckpt, and nobody else.")
    others = {key: value for key, value in settings(yaml.safe_load(path.read_text())) if "checkpointing" in key}
    if path.stem == "fsdp2":
        assert others == {"fsdp_config.fsdp_activation_checkpointing": False}
    else:
        assert others == {}


@each_launch_config
def test_header_says_how_to_launch(path):
    own_script, recipe = commands(path)
    parser = launch_command_parser()
    for words in (own_script, recipe):
        assert words[:2] == ["accelerate", "launch"]
        assert Path(parser.parse_args(words[2:]).config_file) == path.relative_to(ROOT)
    own = parser.parse_args(own_script[2:])
    assert (own.module, own.training_script) == (True, "hf_ckpt")
    script, *flags = own.training_script_args
    assert script == "your_script.py"
    assert json.loads(flags[flags.index("--activation_checkpointing_kwargs") + 1]) == {"policy": "full"}
    ours = parser.parse_args(recipe[2:])
    assert (ROOT / ours.training_script).is_file()
    assert (ROOT / ours.training_script_args[0]).is_file()


def test_settings_of_sharding():
    fsdp, zero2, zero3 = (
        load_config_from_file(str(ROOT / "configs" / "accelerate" / f"{name}.yaml")) for name in NAMES
    )
    assert fsdp.fsdp_config["fsdp_version"] == 2
    assert fsdp.fsdp_config["fsdp_auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP"
    assert fsdp.fsdp_config["fsdp_reshard_after_forward"] is True
    for stage, config in ((2, zero2.deepspeed_config), (3, zero3.deepspeed_config)):
        assert config["zero_stage"] == stage
        assert "deepspeed_config_file" not in config  # a separate file could add a second owner


# --- configs/recipes ------------------------------------------------------------------------------------------------


def test_every_recipe_has_its_yaml_and_every_yaml_its_recipe():
    scripts = {path.stem for path in (ROOT / "recipes").glob("*.py")} - {"common", "demo"}
    assert {path.stem for path in RECIPE_CONFIGS} == scripts


@pytest.mark.parametrize("path", RECIPE_CONFIGS, ids=lambda path: path.stem)
def test_recipe_and_yaml_name_each_other(path):
    assert commands(path) == [["python", f"recipes/{path.name.replace('.yaml', '.py')}", str(path.relative_to(ROOT))]]
    script = (ROOT / "recipes" / f"{path.stem}.py").read_text()
    assert str(path.relative_to(ROOT)) in script
    launchers = re.findall(r"configs/accelerate/\S+\.yaml", script)
    assert launchers
    assert all((ROOT / name).is_file() for name in launchers)


# --- launches -------------------------------------------------------------------------------------------------------

UNCHANGED_SCRIPT = """
from transformers import HfArgumentParser, Trainer, TrainingArguments

from hf_ckpt.models.tiny import tiny_batch, tiny_model

args, = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
batch = tiny_batch("llama", batch=8)
rows = [{name: column[index] for name, column in batch.items()} for index in range(8)]
model = tiny_model("llama")
Trainer(model=model, args=args, train_dataset=rows).train()
functions = [vars(block).get("_gradient_checkpointing_func") for block in model.model.layers]
print([getattr(function, "recomputed", None) for function in functions])
"""


def start(path: Path | str, *words: str | Path, cache: Path, **environment: str) -> Any:
    """Run `accelerate launch` with one of the configs."""
    config = f"configs/accelerate/{path}.yaml"
    return launch("-m", "accelerate.commands.launch", "--config_file", config, *words, cache=cache, **environment)


def tiny_recipe(name: str, out: Path) -> list[str | Path]:
    """Arguments that run a recipe with --tiny."""
    return [f"recipes/{name}.py", f"configs/recipes/{name}.yaml", "--tiny", "--output_dir", out]


@pytest.mark.long
def test_single_launches_an_unchanged_script(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(UNCHANGED_SCRIPT)
    new_name = hasattr(TrainingArguments, "activation_checkpointing")
    flag = "--activation_checkpointing" if new_name else "--gradient_checkpointing"
    flags = [flag, f"{flag}_kwargs", '{"policy": "full", "layers": "0-2"}']
    run = ["--output_dir", tmp_path / "out", "--use_cpu", "--max_steps", "2", "--per_device_train_batch_size", "4"]
    run += ["--report_to", "none", "--save_strategy", "no"]
    done = start("single", "--cpu", "--mixed_precision", "no", "-m", "hf_ckpt", script, *flags, *run, cache=tmp_path)
    assert done.returncode == 0, done.stderr
    assert complaints(done.stderr) == []
    assert "hf_ckpt: LlamaForCausalLM: full on blocks 0-2 of 4" in done.stderr
    assert "[2, 2, 2, None]" in done.stdout  # layers 0-2, 2 steps


@pytest.mark.slow
def test_ddp_launches_a_recipe_on_two_processes(tmp_path):
    out = tmp_path / "out"
    # Not `--cpu`, with which the launcher starts one process only. Without a GPU it chooses gloo itself.
    two = ["--num_processes", "2", "--main_process_port", "0", "--mixed_precision", "no"]
    done = start("ddp", *two, "-m", "hf_ckpt", *tiny_recipe("lora_llama", out), cache=tmp_path)
    assert done.returncode == 0, done.stderr
    assert complaints(done.stderr) == []
    assert "16 checkpointed block calls, 16 recomputations" in done.stdout
    assert metrics(out)[0]["world_size"] == 2
    # Packed: 2 ranks x 2 rows x 64 tokens per step, divided by the slowest rank's time.
    steps = [row for row in metrics(out) if row["event"] == "log"]
    assert [round(row["time/tokens_per_s"] * row["time/step_s"]) for row in steps] == [256] * 4


@pytest.mark.gpu
@pytest.mark.skipif(
    not HAS_GPU, reason="accelerate applies FSDP and DeepSpeed on an accelerator only, and none is here"
)
@pytest.mark.parametrize(
    "path", [path for path in ACCELERATE if path.stem not in ("single", "ddp")], ids=lambda p: p.stem
)
def test_sharded_configs_launch(tmp_path, path):
    if path.stem.startswith("deepspeed"):
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    out = tmp_path / "out"
    words = [*tiny_recipe("full_gpt2", out), "--use_cpu", "false"]
    one = ["--num_processes", "1", "--main_process_port", "0"]
    done = start(path.stem, *one, *words, cache=tmp_path, CUDA_VISIBLE_DEVICES="0")
    assert done.returncode == 0, done.stderr
    assert "16 checkpointed block calls" in done.stdout
    assert "dropped, to be rebuilt" in done.stdout
