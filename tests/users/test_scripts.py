"""Unmodified training scripts: TRL's own, one like transformers' examples, and a loop with Accelerate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.clients import COMMON, GRPO, LAYERS, OFF, PLANS, STEPS, TASKS, TEXTS, asked_by, logs_of, words_of
from helpers.processes import SCRIPTS
from helpers.sparing import sparing
from safetensors.torch import load_file

from hf_ckpt.models.tiny import byte_tokenizer, tiny_model

pytestmark = pytest.mark.usefixtures("quiet_and_alone")
SCRIPTS_OF_TRL = {
    "sft": ["--use_peft", "--lora_r", "2", "--lora_target_modules", "all-linear"],
    "dpo": [],
    "grpo": ["--reward_funcs", "letters.letters", *words_of(GRPO)],
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


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


def assert_same_weights(wanted: Path, got: Path, what: str = "") -> None:
    expected, found = weights_in(wanted), weights_in(got)
    assert expected.keys() == found.keys(), what
    assert [name for name, value in expected.items() if not torch.equal(value, found[name])] == [], what


@sparing("kind", SCRIPTS_OF_TRL, "grpo")
def test_unmodified_scripts_of_trl(script, trl_words, tmp_path, kind):
    """`trl sft`, `trl dpo` and `trl grpo` train the same under `python -m hf_ckpt`, unmodified."""
    module = f"trl.scripts.{kind}"
    reference, none = script(module, *trl_words(kind, tmp_path / "off", *OFF), hooked=None)
    assert none is None
    assert reference.args.gradient_checkpointing is False
    for plan, spec in PLANS.items():
        run, done = script(module, *trl_words(kind, tmp_path / plan, *asked_by(spec)))
        assert logs_of(run) == logs_of(reference)
        assert_same_weights(tmp_path / "off", tmp_path / plan, plan)
        assert done.enabled
        assert set(done.forwards.values()) == {STEPS}
        assert len(done.forwards) == (2 if plan == "mixed" else LAYERS)
        fulls = [done.recomputed[name] for name in done.forwards if done.plan.active()[name].kind == "full"]
        assert fulls == [STEPS] * {"full": LAYERS, "selective": 0, "mixed": 1}[plan]
        assert bool(done.dropped_tensors) == (plan != "full")


@pytest.fixture
def clm_words(tmp_path):
    """Arguments of an example script: a GPT-2 with dropout, evaluated and saved half-way and at the end."""
    base = tmp_path / "gpt2"
    tiny_model("gpt2", layers=LAYERS, hidden=16, dropout=0.1).save_pretrained(base)
    byte_tokenizer().save_pretrained(base)
    for name in ("train", "validation"):
        (tmp_path / f"{name}.txt").write_text("\n".join(TEXTS * 2))
    settings = {name: value for name, value in COMMON.items() if name not in ("save_strategy", "max_steps")}
    settings |= {"model_name_or_path": base, "train_file": "train.txt", "validation_file": "validation.txt"}
    settings |= {"do_train": True, "do_eval": True, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2}
    settings |= {"max_steps": 4, "lr_scheduler_type": "constant"}
    return lambda out, *more: [*words_of(settings | {"output_dir": out}), *more]


def test_an_example_script_trains_evaluates_saves_and_resumes(script, clm_words, tmp_path):
    """Two steps and two resumed steps equal four steps, even if the plan changes in between."""
    clm = SCRIPTS / "run_clm.py"
    reference, _ = script(clm, *clm_words(tmp_path / "off"), hooked=None)
    assert sum("eval_accuracy" in row for row in reference.state.log_history) == 3  # two half-way
    run, done = script(clm, *clm_words(tmp_path / "full", *asked_by(PLANS["full"])))
    assert logs_of(run) == logs_of(reference)
    assert done.recomputed == done.forwards == {f"transformer.h.{block}": 4 for block in range(LAYERS)}
    assert_same_weights(tmp_path / "off", tmp_path / "full")
    middle = tmp_path / "full" / "checkpoint-2"
    assert_same_weights(tmp_path / "off" / "checkpoint-2", middle)

    for name, spec in {**PLANS, "none": {"policy": "none"}}.items():
        out = tmp_path / f"resumed-{name}"
        run, done = script(clm, *clm_words(out, "--resume_from_checkpoint", str(middle), *asked_by(spec)))
        assert run.state.global_step == 4
        assert_same_weights(tmp_path / "off", out, name)
        assert logs_of(run)[:-2] == logs_of(reference)[:-2], name  # without the totals, which cover two steps here
        assert set(done.forwards.values()) == (set() if name == "none" else {2})


def test_a_plain_loop_of_accelerate_accumulates(script, tmp_path):
    """A loop with accumulation and dropout trains the same, although it never enables checkpointing."""
    loop = SCRIPTS / "accelerate_loop.py"
    options = ["--steps", str(STEPS), "--accumulate", "2", "--dropout", "0.1"]
    script(loop, tmp_path / "off", *options, hooked=None)
    wanted = json.loads((tmp_path / "off" / "rank0.json").read_text())
    weights = torch.load(tmp_path / "off" / "rank0.pt")
    assert wanted["enabled"] is None
    assert len(wanted["losses"]) == 2 * STEPS
    for plan, spec in PLANS.items():
        script(loop, tmp_path / plan, *options, hooked=["--spec", json.dumps(spec)])
        found = json.loads((tmp_path / plan / "rank0.json").read_text())
        assert found["enabled"]
        assert found["losses"] == wanted["losses"]
        got = torch.load(tmp_path / plan / "rank0.pt")
        assert [name for name, value in weights.items() if not torch.equal(value, got[name])] == []
        full = {"full": 4, "selective": 0, "mixed": 1}[plan]
        assert sum(times == 2 * STEPS for times in found["recomputed"].values()) == full
        assert len(found["recomputed"]) == (2 if plan == "mixed" else 4)
