"""Configs of trainings and launchers, what `hf-ckpt doctor` finds in them, and the program itself."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from hf_ckpt.cli import main
from hf_ckpt.doctor.facts import ACCELERATE, TRAINING, ConfigFile, Facts, ModelFacts
from hf_ckpt.doctor.rules import diagnose

ROOT = Path(__file__).parent.parent.parent
SHIPPED = [*sorted((ROOT / "configs" / "accelerate").glob("*.yaml")), *(ROOT / "configs" / "recipes").glob("*.yaml")]
VERSIONS = {"torch": "2.13.0+cpu", "transformers": "5.23.0", "accelerate": "1.15.0"}
KWARGS = "gradient_checkpointing_kwargs"

LLAMA = ModelFacts("llama", "llama", {"vocab_size": 128256, "attention_dropout": 0.0}, (("decoder", 32),))
T5 = ModelFacts("t5", "t5", {"dropout_rate": 0.1, "classifier_dropout": 0.0}, (("encoder", 3), ("decoder", 3)))
GPT2 = ModelFacts("gpt2", "gpt2", {"attn_pdrop": 0.0, "summary_first_dropout": 0.1}, (("decoder", 12),))
MIXTRAL = ModelFacts("mixtral", "mixtral", {"text": {"num_local_experts": 8}}, (("decoder", 4),), named=False)


def train(**values):
    """Training arguments."""
    return ConfigFile("train.yaml", TRAINING, values)


def asking(spec=None, **values):
    """Training arguments that ask for checkpointing."""
    return train(gradient_checkpointing=True, **({} if spec is None else {KWARGS: spec}), **values)


def launch(**values):
    """A launcher's config."""
    return ConfigFile("launch.yaml", ACCELERATE, values)


def fsdp(**options):
    """A launcher's config with FSDP."""
    return launch(distributed_type="FSDP", fsdp_config={f"fsdp_{name}": value for name, value in options.items()})


def zero(stage):
    """A launcher's config with DeepSpeed."""
    return launch(distributed_type="DEEPSPEED", deepspeed_config={"zero_stage": stage})


def facts_of(*files, versions=None, **others):
    """Facts of these files, with the versions above by default."""
    return Facts(tuple(files), VERSIONS | (versions or {}), **others)


def found(seen, code):
    """Findings with this code."""
    return [finding for finding in diagnose(seen) if finding.code == code]


FULL, PLAIN = {"policy": "full"}, {"use_reentrant": False}


def write(path, values):
    """Write a mapping as JSON or YAML, depending on the path's suffix; returns the path as text."""
    path.write_text(json.dumps(values) if path.suffix == ".json" else yaml.safe_dump(values))
    return str(path)


def codes(*words, capsys):
    """(exit code, {code: severity}) of the program with --json."""
    code = main.main(["doctor", "--json", *words])
    return code, {row["code"]: row["severity"] for row in json.loads(capsys.readouterr().out)["findings"]}
