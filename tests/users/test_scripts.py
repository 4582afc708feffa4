"""Unmodified training scripts: TRL's own, and one with the Trainer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.clients import COMMON, OF_TRAINER, PLANS, STEPS, TASKS, logs_of
from helpers.processes import SCRIPTS
from helpers.sparing import sparing
from safetensors.torch import load_file

pytestmark = pytest.mark.usefixtures("quiet_and_alone")


def words_of(settings) -> list[str]:
    """Settings as command-line arguments."""
    found = []
    for name, value in settings.items():
        found += [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return found


def asked_by(spec) -> list[str]:
    return words_of({"gradient_checkpointing": True, "gradient_checkpointing_kwargs": spec})


SCRIPTS_OF_TRL = {
    "sft": ["--use_peft", "--lora_r", "2", "--lora_target_modules", "all-linear"],
    "dpo": [],
    "grpo": ["--reward_funcs", "letters.letters", *words_of(OF_TRAINER["grpo"])],
}


@pytest.fixture
def trl_words(base, tmp_path):
    """Command-line arguments of TRL's scripts, with their data."""
    (tmp_path / "letters.py").write_text(
        "def letters(completions, **_):\n    return [float(sum(map(ord, text)) % 7) for text in completions]\n"
    )

    def words(kind, out, *more):
        data = tmp_path / kind
        data.mkdir(exist_ok=True)
        rows = [dict(zip(TASKS[kind], row, strict=True)) for row in zip(*TASKS[kind].values(), strict=True)]
        (data / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
        named = {"model_name_or_path": base, "dataset_name": data, "output_dir": out}
        return words_of(COMMON | named) + SCRIPTS_OF_TRL[kind] + list(more)

    return words


def assert_same_weights(wanted: Path, got: Path) -> None:
    expected, found = (load_file(next(folder.glob("*.safetensors"))) for folder in (wanted, got))
    assert expected.keys() == found.keys()
    assert [name for name, value in expected.items() if not torch.equal(value, found[name])] == []


@sparing("kind", SCRIPTS_OF_TRL, "grpo")
def test_unmodified_scripts_of_trl(script, trl_words, tmp_path, kind):
    """`trl sft`, `trl dpo` and `trl grpo` train the same under `python -m hf_ckpt`, unmodified."""
    module = f"trl.scripts.{kind}"
    reference, none = script(
        module, *trl_words(kind, tmp_path / "off", "--gradient_checkpointing", "False"), hooked=None
    )
    assert none is None
    assert reference.args.gradient_checkpointing is False
    run, done = script(module, *trl_words(kind, tmp_path / "mixed", *asked_by(PLANS["mixed"])))
    assert logs_of(run) == logs_of(reference)
    assert_same_weights(tmp_path / "off", tmp_path / "mixed")
    assert done.enabled
    full, selective = done.forwards
    assert done.forwards == {full: STEPS, selective: STEPS}
    assert done.recomputed[full] == STEPS < done.recomputed[selective]


def test_a_trainer_script_evaluates_saves_and_resumes(script, tmp_path):
    """Two steps and two resumed steps equal four steps, even if the plan changes in between."""

    def words(name, *more):
        steps = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
        return [*words_of(COMMON | steps | {"output_dir": tmp_path / name, "lr_scheduler_type": "constant"}), *more]

    trainer = SCRIPTS / "trainer_script.py"
    reference, _ = script(trainer, *words("off"), hooked=None)
    assert sum("eval_loss" in row for row in reference.state.log_history) == 2
    run, done = script(trainer, *words("full", *asked_by(PLANS["full"])))
    assert logs_of(run) == logs_of(reference)
    assert done.recomputed == done.forwards == {f"model.layers.{block}": 4 for block in range(4)}
    middle = tmp_path / "full" / "checkpoint-2"
    for step in (2, 4):
        assert_same_weights(*(tmp_path / name / f"checkpoint-{step}" for name in ("off", "full")))
    for name, spec in {"mixed": PLANS["mixed"], "none": {"policy": "none"}}.items():
        asked = ["--resume_from_checkpoint", str(middle), *asked_by(spec)]
        run, done = script(trainer, *words(f"resumed-{name}", *asked))
        assert run.state.global_step == 4
        assert_same_weights(*(tmp_path / folder / "checkpoint-4" for folder in ("off", f"resumed-{name}")))
        assert logs_of(run)[:-1] == logs_of(reference)[:-1], name  # without the totals, which cover two steps here
        assert set(done.forwards.values()) == (set() if name == "none" else {2})
