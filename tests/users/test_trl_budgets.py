"""Budgets under TRL's trainers, whose losses never make all logits: a fused head in tiles of its own."""

from __future__ import annotations

import datasets
import pytest
import transformers
from helpers.budgets import SHARES, assert_budgets_hold, count_steps
from helpers.clients import COMMON
from helpers.sparing import sparing
from peft import LoraConfig

import hf_ckpt
from hf_ckpt.models.tiny import tiny_model

pytestmark = pytest.mark.usefixtures("quiet_and_alone", "few_actions")
LOADED_FIRST = [f"trl.{kind}Trainer" for kind in ("SFT", "DPO", "GRPO")]
TEXTS = [f"row {row} " * 14 for row in range(8)]
LONGER = [text[: 40 + 10 * row] for row, text in enumerate(TEXTS)]
PROMPTS = [f"say {row}: " for row in range(8)]
KINDS = {
    "sft": ("SFT", {"text": TEXTS}, {}),
    "sft, lengths that grow": ("SFT", {"text": LONGER}, {"train_sampling_strategy": "sequential"}),
    "sft, smoothed": ("SFT", {"text": TEXTS}, {"label_smoothing_factor": 0.1}),  # and a forward for figures to log
    "dpo": ("DPO", {"prompt": PROMPTS, "chosen": TEXTS, "rejected": TEXTS[::-1]}, {}),
    "grpo": ("GRPO", {"prompt": PROMPTS}, {"num_generations": 2, "max_completion_length": 48}),
}


def letters(completions, **_):
    """A reward."""
    return [float(sum(map(ord, text)) % 7) for text in completions]


@pytest.mark.long
@sparing(("kind", "shares"), [("sft", (0.25,)), *((kind, SHARES) for kind in KINDS)], ("sft", (0.25,)))
def test_real_peaks_stay_within_budgets(kind, shares, base, tmp_path):
    import trl

    name, columns, settings = KINDS[kind]

    def train(spec):
        model = tiny_model("llama", layers=4, hidden=128, attention="sdpa")
        if spec is not None:
            hf_ckpt.install(model)
        own = {"max_steps": 3, "per_device_train_batch_size": 2, "bf16": False, **settings}
        flags = {"gradient_checkpointing": spec is not None, "gradient_checkpointing_kwargs": spec}
        trainer = getattr(trl, f"{name}Trainer")(
            model=model,
            args=getattr(trl, f"{name}Config")(output_dir=str(tmp_path), **{**COMMON, **flags, **own}),
            train_dataset=datasets.Dataset.from_dict(columns),
            processing_class=transformers.AutoTokenizer.from_pretrained(base),
            peft_config=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
            **({"reward_funcs": letters} if name == "GRPO" else {}),
        )
        peaks = count_steps(trainer)
        trainer.train()
        return trainer, peaks

    assert_budgets_hold(train, shares, first=kind == "sft, smoothed")
