"""Trainings with trainers and scripts of other libraries, and exact comparisons between two trainings."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import warnings

import torch
import transformers
from transformers import TrainerCallback, set_seed

import hf_ckpt
from helpers.steps import assert_same, gradients
from hf_ckpt.attach.attach import lost_blocks
from hf_ckpt.attach.record import installation
from hf_ckpt.models.blocks import find_blocks

STEPS, LAYERS = 5, 3
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
# TRL's defaults are kept: it computes in bf16 and enables checkpointing.
COMMON = {
    "max_steps": STEPS,
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-2,
    "use_cpu": True,
    "report_to": "none",
    "logging_steps": 1,
    "save_strategy": "no",
    "disable_tqdm": True,
}
GRPO = {"num_generations": 2, "max_completion_length": 8, "beta": 0.04, "num_iterations": 2}
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
            assert done.recomputed[name] >= 3 * passes, name  # operations
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


@contextlib.contextmanager
def counted(model):
    """Block -> how often it computed with gradients in train mode, counted by a hook inside the block."""
    computed, handles = {}, []
    for name, block in find_blocks(model).modules.items():

        def count(module, args, name=name):
            computed[name] += torch.is_grad_enabled() and module.training

        computed[name] = 0
        handles.append((getattr(block, "mlp", None) or block.intermediate).register_forward_pre_hook(count))
    yield computed
    for handle in handles:
        handle.remove()


@contextlib.contextmanager
def every_message():
    """The texts of Python's warnings and of all loggers."""
    texts = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())
    names = ("", "transformers", "datasets", "sentence_transformers")  # loggers that do not propagate
    with contextlib.ExitStack() as undo, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for logger in map(logging.getLogger, names):
            logger.addHandler(handler)
            undo.callback(logger.removeHandler, handler)
        yield texts
    texts.extend(str(warning.message) for warning in caught)


def trained(make) -> Run:
    """Train the Trainer that `make(callback)` returns."""
    watch = Watch()
    with every_message() as messages:
        set_seed(3)
        trainer = make(watch)
        trainer.remove_callback(transformers.PrinterCallback)
        gc.freeze()  # a Trainer collects garbage before it trains, which would take longer than the training
        with counted(trainer.model) as computed:
            trainer.train()
        gc.unfreeze()
    tensors = [*watch.gradients, dict(trainer.model.named_parameters())]
    return Run(trainer.model, logs_of(trainer), tensors, computed, messages)


def logs_of(trainer) -> list[dict]:
    """Every logged value except times."""
    times = ("time", "runtime", "per_second")
    rows = trainer.state.log_history
    return [{key: value for key, value in row.items() if not any(part in key for part in times)} for row in rows]
