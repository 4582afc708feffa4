"""Every shipped config is valid, has one owner of checkpointing, and has working commands in its header."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from helpers.processes import ROOT, python
from helpers.tables import table
from helpers.trainers import metrics

ACCELERATE = sorted((ROOT / "configs" / "accelerate").glob("*.yaml"))
RECIPE_CONFIGS = sorted((ROOT / "configs" / "recipes").glob("*.yaml"))
each_launch_config = pytest.mark.parametrize("path", ACCELERATE, ids=lambda path: path.stem)


def header(path: Path) -> str:
    """The comment at the beginning of a file."""
    return re.match(r"(?:#.*\n)+", path.read_text())[0].replace("#", "").replace("\\\n", " ")


def commands(path: Path) -> list[list[str]]:
    """The indented commands of a header, as lists of words."""
    return [shlex.split(line) for line in header(path).splitlines() if line.startswith("   ")]


# --- configs/accelerate ---------------------------------------------------------------------------------------------


@each_launch_config
def test_accelerate_reads_every_config(path):
    """The launcher accepts unknown nested keys, which then do nothing; checkpointing has one owner."""
    config = load_config_from_file(str(path)).to_dict()
    written = yaml.safe_load(path.read_text())
    expected = table(__file__, "configs.yaml")[path.stem]
    config |= config.get("fsdp_config", {}) | config.get("deepspeed_config", {})
    assert {key: config.get(key) for key in expected} == expected
    nested = {key: value for inner in written.values() if isinstance(inner, dict) for key, value in inner.items()}
    assert nested.keys() <= vars(launch_command_parser().parse_args(["script.py"])).keys()
    assert header(path).count("Owner of checkpointing: hf_ckpt, and nobody else.") == 1
    others = {key: value for key, value in {**written, **nested}.items() if "checkpointing" in key}
    assert others == ({"fsdp_activation_checkpointing": False} if path.stem == "fsdp2" else {})


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


# --- configs/recipes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", RECIPE_CONFIGS, ids=lambda path: path.stem)
def test_recipe_and_yaml_name_each_other(path):
    assert commands(path) == [["python", f"recipes/{path.name.replace('.yaml', '.py')}", str(path.relative_to(ROOT))]]
    script = (ROOT / "recipes" / f"{path.stem}.py").read_text()
    assert str(path.relative_to(ROOT)) in script
    launchers = re.findall(r"configs/accelerate/\S+\.yaml", script)
    assert launchers
    assert all((ROOT / name).is_file() for name in launchers)
    scripts = {path.stem for path in (ROOT / "recipes").glob("*.py")} - {"common", "demo"}
    assert {path.stem for path in RECIPE_CONFIGS} == scripts


# --- launches -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ddp_launches_a_recipe_on_two_processes(tmp_path):
    out = tmp_path / "out"
    # Not `--cpu`, with which the launcher starts one process only. Without a GPU it chooses gloo itself.
    two = ["--num_processes", "2", "--main_process_port", "0", "--mixed_precision", "no"]
    start = ["-m", "accelerate.commands.launch", "--config_file", "configs/accelerate/ddp.yaml"]
    recipe = ["recipes/lora_llama.py", "configs/recipes/lora_llama.yaml", "--tiny", "--output_dir", out]
    extra = {"HF_HOME": str(tmp_path)}
    done = python(*start, *two, "-m", "hf_ckpt", *recipe, cwd=ROOT, extra=extra)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("hf_ckpt: ") == 3  # the plan, who checkpoints, and the table, on the first rank
    assert "16 forwards of planned blocks; 16 recomputations" in done.stdout
    assert metrics(out, "start")[0]["world_size"] == 2
    assert len(metrics(out)) == 4
