"""Trainings with trainers and scripts of other libraries, and exact comparisons between two trainings."""

from __future__ import annotations

import dataclasses

import torch
import transformers
from transformers import TrainerCallback, set_seed

import hf_ckpt
from helpers.counting import counted_calls, every_message
from helpers.steps import assert_same, gradients
from helpers.tables import table
from hf_ckpt.attach.described import lost_blocks
from hf_ckpt.attach.record import installation

LAYERS = 3
MIXED = {"rules": [{"layers": "0", "policy": "full"}, {"layers": "1", "policy": "selective"}]}
PLANS = {"full": {"policy": "full"}, "selective": {"policy": "selective"}, "mixed": MIXED}
TEXTS = [f"the quick brown fox {row} " * (1 + row % 3) for row in range(20)]
PROMPTS = [f"say {row}: " for row in range(20)]
TASKS = {
    "sft": {"text": TEXTS},
    "dpo": {"prompt": PROMPTS, "chosen": TEXTS, "rejected": [text[:: row % 3 - 5] for row, text in enumerate(TEXTS)]},
    "grpo": {"prompt": PROMPTS},
    "reward": {"chosen": TEXTS, "rejected": [text[::-2] for text in TEXTS]},
    "kto": {"prompt": PROMPTS, "completion": TEXTS, "label": [row % 2 == 0 for row in range(20)]},
    "rloo": {"prompt": PROMPTS},
    "distillation": {"prompt": PROMPTS, "completion": TEXTS},
    "orpo": {"prompt": PROMPTS, "chosen": TEXTS, "rejected": [text[::-2] for text in TEXTS]},
}
COMMON = table(__file__, "clients.yaml")["common"]
OF_TRAINER = table(__file__, "clients.yaml")["of_trainer"]
STEPS = COMMON["max_steps"]
# Parts of messages with the word "checkpoint" that other libraries give.
UPSTREAM = ("`gradient_checkpointing", "`is_gradient_checkpointing`", "gradient_checkpointing_enable`", "LOAD REPORT")


@dataclasses.dataclass
class Run:
    """The results of a training."""

    model: torch.nn.Module
    logs: list[dict]
    """Every logged value except times."""
    tensors: list[dict[str, torch.Tensor]]
    """The gradients of every step, then the final weights."""
    computed: dict[str, int]
    """Block -> how often it computed with gradients, recomputations included; not counted by hf_ckpt."""
    messages: list[str]
    """Warnings of any kind."""


def assert_trained_alike(reference: Run, run: Run, plan: str, message: str = "") -> None:
    """Check that all results are bit-equal, and that the plan stayed on to the end, for every forward with gradients.

    hf_ckpt must have given no message, or one with the text `message`.
    """
    assert run.logs == reference.logs
    assert len(reference.tensors) == STEPS + 1
    for wanted, got in zip(reference.tensors, run.tensors, strict=True):
        assert_same(wanted, got)
    assert installation(reference.model) is None
    done = hf_ckpt.describe(run.model)
    assert done.enabled
    assert lost_blocks(run.model) == ()
    actions = {"full": ["full"] * LAYERS, "selective": ["selective"] * LAYERS, "mixed": ["full", "selective", "keep"]}
    for (name, passes), action in zip(reference.computed.items(), actions[plan], strict=True):
        assert passes >= STEPS
        assert run.computed[name] == passes * (2 if action == "full" else 1), name
        assert done.forwards.get(name, 0) == (0 if action == "keep" else passes), name
        if action == "selective":
            # Operations. A first block with adapters, without a gradient to its input, rebuilds two: its noise is kept.
            assert done.recomputed[name] >= 2 * passes, name
        else:
            assert done.recomputed.get(name, 0) == done.forwards.get(name, 0), name
    assert bool(done.dropped_tensors) == ("selective" in actions[plan])
    ours = [text for text in run.messages if "checkpoint" in text or "hf_ckpt" in text]
    ours = [text for text in ours if not any(part in text for part in UPSTREAM)]
    assert [message in text for text in ours] == [True] * bool(message), ours


class Watch(TrainerCallback):
    """Records gradients before every optimizer step."""

    def __init__(self):
        self.gradients = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradients.append(gradients(model))


def trained(make) -> Run:
    """Train the Trainer that `make(callback)` returns."""
    watch = Watch()
    with every_message() as messages:
        set_seed(3)
        trainer = make(watch)
        trainer.remove_callback(transformers.PrinterCallback)
        with counted_calls(trainer.model, only_training=True) as computed:
            trainer.train()
    tensors = [*watch.gradients, dict(trainer.model.named_parameters())]
    return Run(trainer.model, logs_of(trainer), tensors, computed, messages)


def logs_of(trainer) -> list[dict]:
    """Every logged value except times."""
    times = ("time", "runtime", "per_second")
    rows = trainer.state.log_history
    return [{key: value for key, value in row.items() if not any(part in key for part in times)} for row in rows]
