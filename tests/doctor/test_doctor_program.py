"""Files that doctor reads or refuses, and the program's exit codes, table and JSON."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys

import pytest
import torch
from helpers.configs import FULL, KWARGS, ROOT, SHIPPED, VERSIONS, codes, write
from transformers import TrainingArguments

from hf_ckpt import compat
from hf_ckpt.cli import main
from hf_ckpt.doctor import facts
from hf_ckpt.doctor.facts import ACCELERATE, ADAPTER, DEEPSPEED, TRAINING, Facts
from hf_ckpt.doctor.rules import diagnose


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_configs_have_no_error(path):
    files = facts.read_files([path])
    expected = ACCELERATE if path.parent.name == "accelerate" else TRAINING
    assert [file.kind for file in files] == [expected]
    for versions in (VERSIONS, {**VERSIONS, "deepspeed": "0.19.3"}):
        assert {finding.severity for finding in diagnose(Facts(files, versions))} <= {"note"}


def test_every_recipe_goes_with_every_launch_config():
    launches = [path for path in SHIPPED if path.parent.name == "accelerate"]
    pairs = [(how, what) for how in launches for what in SHIPPED if what not in launches]
    assert len(pairs) == 20
    for pair in pairs:
        findings = diagnose(Facts(facts.read_files(pair), {**VERSIONS, "deepspeed": "0.19.3"}))
        assert {finding.code for finding in findings} == {"needs-hf-ckpt"}


def test_what_training_arguments_write_is_read(tmp_path):
    name = compat.ENABLE_NAMES[-1].removesuffix("_enable")
    options = {name: True, f"{name}_kwargs": {"policy": "ful"}}
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", **options)
    path = tmp_path / "args.json"
    path.write_text(args.to_json_string())
    files = facts.read_files([path])
    assert files[0].kind == TRAINING
    assert {finding.code for finding in diagnose(Facts(files, VERSIONS))} == {"spec", "needs-hf-ckpt"}


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (TRAINING, {"gradient_checkpointing": True}),
        (TRAINING, {"bf16": True, "activation_checkpointing": True}),
        (TRAINING, {"fsdp": "full_shard", "fsdp_config": {"activation_checkpointing": True}}),
        (ACCELERATE, {"distributed_type": "FSDP", "fsdp_config": {}, "mixed_precision": "bf16"}),
        (DEEPSPEED, {"bf16": {"enabled": True}, "activation_checkpointing": {"cpu_checkpointing": True}}),
        (DEEPSPEED, {"zero_optimization": {"stage": 3}, "optimizer": {}, "fp16": {"enabled": "auto"}}),
        (ADAPTER, {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"]}),
    ],
)
@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_kinds_are_recognised_by_their_keys(kind, values, suffix, tmp_path):
    (file,) = facts.read_files([write(tmp_path / f"config.{suffix}", values)])
    assert file.kind == kind


def test_named_files_are_read_too(tmp_path, capsys):
    block = {"activation_checkpointing": {}, "zero_optimization": {"stage": 3}}
    write(tmp_path / "ds.json", block)
    deepspeed = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "ds.json"}}
    by_launcher = write(tmp_path / "launch.yaml", {**deepspeed, "num_processes": 2})
    by_training = write(tmp_path / "train.yaml", {"output_dir": "x", "deepspeed": str(tmp_path / "ds.json")})
    inline = write(tmp_path / "inline.json", {"output_dir": "x", "deepspeed": block})
    for path in (by_launcher, by_training, inline):
        assert codes(path, capsys=capsys) == (0, {"deepspeed-block": "warning"})
    assert len(facts.read_files([by_launcher, by_training])) == 3
    write(tmp_path / "fsdp.json", {"activation_checkpointing": True})
    asked = {"output_dir": "x", "gradient_checkpointing": True, "fsdp": "full_shard", "fsdp_config": "fsdp.json"}
    code, seen = codes(write(tmp_path / "fsdp-train.yaml", asked), "--model", "llama-3.1-8b", capsys=capsys)
    assert (code, seen["two-owners"]) == (1, "error")


def test_all_unreadable_files_are_told_at_once(tmp_path, capsys):
    contents = {
        "broken.json": "{",
        "broken.yaml": "a: [",
        "tag.yaml": "a: !!bool maybe",
        "date.yaml": "a: 2026-99-99",
        "latin.yaml": b"a: \xff",
        "list.json": "[1]",
        "empty.yaml": "",
        "deep.json": "[" * 100_000,
        "deep.yaml": '{"a": ' * 45 + "1" + "}" * 45,
        "cycle.yaml": "output_dir: &a [*a]",
        "other.yaml": "name: me",
        "model.json": '{"model_type": "llama", "vocab_size": 3}',
        "names.yaml": "{output_dir: x, deepspeed: gone.json}",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    paths = [str(tmp_path / name) for name in contents]
    assert main.main(["doctor", *paths, str(tmp_path / "missing.yaml"), str(tmp_path), "nul\0.yaml"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == len(contents) + 3
    said = (
        *(
            "not valid JSON",
            "not valid YAML",
            "not valid YAML",
            "not valid YAML",
            "utf-8",
            "must hold a mapping of keys",
        ),
        *(
            "is empty",
            "nested too deep",
            "levels deep",
            "line 1 has the alias *a",
            "is no config that doctor knows",
            "give it as `--model",
        ),
        *("names it as `deepspeed`", "No such file", "directory", "null"),
    )
    for line, words in zip(lines, said, strict=True):
        assert words in line


# --- the program ----------------------------------------------------------------------------------------------------


def test_exit_codes_and_json(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(facts, "installed", lambda: VERSIONS)
    note = write(tmp_path / "note.yaml", {"gradient_checkpointing": True, KWARGS: FULL})
    warning = write(tmp_path / "warning.yaml", {KWARGS: FULL})
    error = write(tmp_path / "error.yaml", {"gradient_checkpointing": True, KWARGS: {"policy": "ful"}})
    assert codes(capsys=capsys) == (0, {})
    assert codes(note, "--strict", capsys=capsys) == (0, {"needs-hf-ckpt": "note"})
    assert codes(warning, capsys=capsys) == (0, {"kwargs-without-flag": "warning"})
    assert codes(warning, "--strict", capsys=capsys)[0] == 1
    assert codes(error, capsys=capsys)[0] == 1
    with pytest.raises(SystemExit, match="2"):
        main.main(["doctor", "--device", "abacus"])
    capsys.readouterr()
    main.main(["doctor", "--json", error, "--model", "gpt2"])
    printed = json.loads(capsys.readouterr().out)
    assert printed["files"] == {error: TRAINING}
    assert printed["versions"] == VERSIONS
    assert printed["model"] == "gpt2"
    assert set(printed["findings"][0]) == {"severity", "code", "where", "what", "fix"}


def test_the_table(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(facts, "installed", lambda: VERSIONS)
    rules = {"rules": [{"layers": "0", "policy": "[bold]"}]}
    assert main.main(["doctor", write(tmp_path / "t.yaml", {"gradient_checkpointing": True, KWARGS: rules})]) == 1
    printed = capsys.readouterr().out
    assert "transformers 5.23.0" in printed
    assert "[bold]" in printed  # not treated as markup
    assert main.main(["doctor"]) == 0
    assert "nothing found that would go wrong" in capsys.readouterr().out


def test_the_environment_alone_is_that_of_this_python(capsys):
    assert main.main(["doctor", "--json"]) == 0
    versions = json.loads(capsys.readouterr().out)["versions"]
    assert versions["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert versions["transformers"] == importlib.metadata.version("transformers")


@pytest.mark.parametrize("words", [["--help"], ["configs/accelerate/fsdp2.yaml", "configs/recipes/full_gpt2.yaml"]])
def test_nothing_heavy_is_imported(words):
    command = [sys.executable, "-X", "importtime", "-m", "hf_ckpt.cli.main", "doctor", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "hf_ckpt.errors" in imported
    assert not imported & {"torch", "transformers", "accelerate", "matplotlib"}
    if words == ["--help"]:
        assert "hf-ckpt doctor" in done.stdout
        assert not imported & {"yaml", "rich", "hf_ckpt.doctor"}


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "fits", "word"), [(2, True, "Fits: "), (4096, False, "Does not fit: ")])
def test_it_says_whether_the_training_fits_the_card(batch, fits, word, tmp_path, capsys):
    values = {"per_device_train_batch_size": batch, "max_length": 256, "bf16": True, "optim": "sgd"}
    words = ["doctor", write(tmp_path / "train.json", values), "--model", "mini-gpt2", "--device", "t4"]
    assert main.main([*words, "--json"]) == 0
    fit = json.loads(capsys.readouterr().out)["fit"]
    assert fit["fits"] is fits
    assert fit["told"].startswith(word)
    assert "T4" in fit["told"]
    assert main.main(words) == 0
    assert f"{fit['told']} What to write: {fit['ask']}" in capsys.readouterr().out
    # The suggested command gives the same answer.
    assert main.main(fit["ask"].split()[1:]) == (0 if fits else 2)
    assert fit["told"] in capsys.readouterr().out


def test_without_a_card_it_says_how_to_ask(tmp_path, capsys):
    path = write(tmp_path / "train.json", {"per_device_train_batch_size": 2, "model_name_or_path": "mini-gpt2"})
    assert main.main(["doctor", path, "--json"]) == 0
    asked = f"hf-ckpt plan mini-gpt2 --config {path} --device NAME"
    assert json.loads(capsys.readouterr().out)["fit"] == {"ask": asked}
    assert main.main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fit"] is None
