"""Unmodified trainers of TRL give the same logs, gradients and final weights."""

from __future__ import annotations

import datasets
import pytest
import transformers
from helpers.clients import (
    COMMON,
    GRPO,
    MIXED,
    PLANS,
    STEPS,
    TASKS,
    TEXTS,
    UPSTREAM,
    assert_carried_out,
    assert_same_training,
    trained,
)
from helpers.sparing import sparing
from helpers.steps import input_gradient_hooks
from peft import LoraConfig, get_peft_model

import hf_ckpt
from hf_ckpt.errors import SpecError

pytestmark = pytest.mark.usefixtures("quiet_and_alone")
LOADED_FIRST = [f"trl.{kind}Trainer" for kind in ("SFT", "DPO", "GRPO", "Reward", "KTO", "RLOO")]


def letters(completions, **_):
    """A reward for GRPO."""
    return [float(sum(map(ord, text)) % 7) for text in completions]


def adapters():
    return LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=0.1)


@pytest.fixture(scope="module")
def known():
    """Trainings without checkpointing, each run once."""
    return {}


@pytest.fixture
def trl_run(base, tmp_path, known):
    """Train with one of TRL's trainers; with a spec, install hf_ckpt and pass the spec to the trainer."""
    import trl

    kinds = {
        "sft": (trl.SFTTrainer, trl.SFTConfig, {}),
        "dpo": (trl.DPOTrainer, trl.DPOConfig, {}),
        "grpo": (trl.GRPOTrainer, trl.GRPOConfig, GRPO),
        "reward": (trl.RewardTrainer, trl.RewardConfig, {}),
        "kto": (trl.KTOTrainer, trl.KTOConfig, {}),
        "rloo": (trl.RLOOTrainer, trl.RLOOConfig, {"num_generations": 2, "max_completion_length": 8}),
    }

    def run(kind, spec=None, *, lora=False, wrapped=False, columns=None, installed=None, **settings):
        trainer_class, config_class, own = kinds[kind]
        on = spec is not None or installed is not None
        key = repr((kind, lora, wrapped, columns, settings))
        if not on and key in known:
            return known[key]
        flags = {"gradient_checkpointing": on, "gradient_checkpointing_kwargs": None if spec is None else dict(spec)}

        def make(callback):
            auto = transformers.AutoModelForCausalLM
            if kind == "reward":
                auto = transformers.AutoModelForSequenceClassification
            model = auto.from_pretrained(base, **({"num_labels": 1} if kind == "reward" else {}))
            if wrapped:
                model = get_peft_model(model, adapters())
            if on:
                hf_ckpt.install(model, installed)
            return trainer_class(
                model=model,
                args=config_class(output_dir=str(tmp_path), **{**COMMON, **flags, **own, **settings}),
                train_dataset=datasets.Dataset.from_dict(columns or TASKS[kind]),
                processing_class=transformers.AutoTokenizer.from_pretrained(base),
                callbacks=[callback],
                **({"reward_funcs": letters} if kind in ("grpo", "rloo") else {}),
                **({"peft_config": adapters()} if lora else {}),
            )

        done = trained(make)
        if not on:
            known[key] = done
        return done

    return run


@sparing(("kind", "lora"), [(kind, lora) for kind in ("sft", "dpo", "grpo") for lora in (False, True)], ("sft", True))
def test_trl_trains_the_same_under_every_plan(trl_run, kind, lora):
    """TRL trains the same under every plan, with generation in GRPO and with reference models in DPO."""
    reference = trl_run(kind, lora=lora)
    for plan, spec in PLANS.items():
        run = trl_run(kind, spec, lora=lora)
        assert_same_training(reference, run)
        assert_carried_out(plan, reference, run)
        ours = [text for text in run.messages if "checkpoint" in text or "hf_ckpt" in text or "cache" in text]
        assert [text for text in ours if not text.startswith(UPSTREAM)] == []
        assert run.model.config.use_cache == reference.model.config.use_cache
        assert input_gradient_hooks(run.model) == 0  # TRL asks PEFT models for one


CHATS = [
    [{"role": "user", "content": f"hi {row}"}, {"role": "assistant", "content": text[:40]}]
    for row, text in enumerate(TEXTS)
]
OPTIONS = {
    "packing": ("sft", {"packing": True, "max_length": 64}),
    "padding-free": ("sft", {"padding_free": True, "max_length": None}),
    "assistant only": ("sft", {"assistant_only_loss": True, "columns": {"messages": CHATS}}),
    "dft": ("sft", {"loss_type": "dft"}),
    "label smoothing": ("sft", {"label_smoothing_factor": 0.1}),  # reads logits
    "fp32, accumulation": ("sft", {"bf16": False, "gradient_accumulation_steps": 2}),
    "precomputed reference": ("dpo", {"precompute_ref_log_probs": True, "lora": True}),
    "two losses": ("dpo", {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5], "ld_alpha": 0.5}),
    "adapters of the user": ("dpo", {"wrapped": True}),  # TRL adds another as the reference
    "reference that follows": ("dpo", {"sync_ref_model": True, "ref_model_sync_steps": 2}),
    "old completions": ("grpo", {"steps_per_generation": 2, "gradient_accumulation_steps": 2, "lora": True}),
    "reward model": ("reward", {}),
    "kto": ("kto", {}),
    "rloo": ("rloo", {"lora": True}),
}


@sparing("options", OPTIONS, "packing", "label smoothing")
def test_trl_trains_the_same_with(trl_run, options):
    kind, settings = OPTIONS[options]
    reference, run = trl_run(kind, **settings), trl_run(kind, MIXED, **settings)
    assert_same_training(reference, run)
    assert_carried_out("mixed", reference, run)


def test_trl_enables_what_was_installed_where_nothing_is_asked(trl_run):
    """TRL enables an installed spec by default: its configs set `gradient_checkpointing=True`."""
    reference, run = trl_run("sft"), trl_run("sft", installed=MIXED)
    assert_same_training(reference, run)
    assert_carried_out("mixed", reference, run)


def test_switches_of_trl_that_mean_another_owner_are_named(trl_run):
    with pytest.raises(SpecError, match=r"`selective` is TRL's switch .* ask for `policy: selective`"):
        trl_run("sft", {"selective": True})


# --- the head in chunks ---------------------------------------------------------------------------------------------


@sparing("kind", ["sft", "dpo", "grpo"], "sft")
def test_trl_never_calls_the_head_and_that_is_said(trl_run, kind):
    """TRL's losses use the head's weight in their own tiles, so the head is never called; a warning says so."""
    reference, run = trl_run(kind), trl_run(kind, {"policy": "full", "head": 4})
    assert_same_training(reference, run)
    assert_carried_out("full", reference, run)
    assert hf_ckpt.describe(run.model).chunked_heads == 0
    (said,) = [text for text in run.messages if "in chunks" in text]
    assert "because nobody calls it" in said
    assert "TRL" in said


def test_losses_of_trl_that_read_logits_go_through_the_head_in_chunks(trl_run):
    """TRL's label smoothing reads logits, which come from chunks: equal up to rounding, which Adam amplifies."""
    settings = {"label_smoothing_factor": 0.1, "bf16": False}
    reference, run = trl_run("sft", **settings), trl_run("sft", {"policy": "full", "head": 8}, **settings)
    assert hf_ckpt.describe(run.model).chunked_heads == run.passes == reference.passes == STEPS
    assert [text for text in run.messages if "in chunks" in text or "asked for the logits" in text] == []
    for name, value in reference.gradients[0].items():
        assert (value - run.gradients[0][name]).norm() <= 1e-5 * value.norm(), name
    for wanted, got in zip(reference.logs, run.logs, strict=True):
        near = {key: 1e-4 if key == "grad_norm" else 1e-5 for key in wanted}
        assert got == {key: pytest.approx(value, rel=near[key]) for key, value in wanted.items()}
    assert run.logs[0]["mean_token_accuracy"] == reference.logs[0]["mean_token_accuracy"]
