"""Trainings with trainers and scripts of other libraries, and exact comparisons between two trainings."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import warnings
from collections.abc import Callable

import torch
import transformers
from transformers import TrainerCallback, set_seed

import hf_ckpt
from hf_ckpt.attach.attach import lost_blocks
from hf_ckpt.attach.record import installation
from hf_ckpt.models.blocks import base_model, find_blocks

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
TIMES = ("time", "runtime", "per_second")  # parts of the names of logged times
UPSTREAM = ("`gradient_checkpointing", "`is_gradient_checkpointing`", "only defines `gradient_checkpointing_enable`")


@dataclasses.dataclass
class Run:
    """The results of a training."""

    model: torch.nn.Module
    logs: list[dict]
    """Every logged value except times."""
    gradients: list[dict[str, torch.Tensor]]
    """One dictionary per step."""
    weights: dict[str, torch.Tensor]
    passes: int
    """Forwards of the model with gradients, in train mode."""
    computed: list[int]
    """How often each block computed with gradients, recomputations included; counted inside the block, not by
    hf_ckpt."""
    messages: list[str]
    """Warnings of any kind."""


def assert_same_training(reference: Run, run: Run, equal: Callable[..., bool] = torch.equal) -> None:
    """Compare all results with `equal`, bit for bit by default; fail if no gradients are nonzero."""
    assert len(reference.gradients) == len(run.gradients) == STEPS
    assert run.logs == reference.logs
    moved = [name for step in reference.gradients for name, value in step.items() if bool(value.any())]
    assert len(set(moved)) > LAYERS
    for place, (wanted, got) in enumerate(zip(reference.gradients, run.gradients, strict=True)):
        assert wanted.keys() == got.keys()
        differing = [name for name, value in wanted.items() if not equal(value, got[name])]
        assert differing == [], f"gradients of step {place}"
    assert reference.weights.keys() == run.weights.keys()
    assert [name for name, value in reference.weights.items() if not equal(value, run.weights[name])] == []


def assert_carried_out(plan: str, reference: Run, run: Run) -> None:
    """Check that the plan stays on to the end, and that every forward with gradients, and no other, used it."""
    assert reference.computed == [reference.passes] * LAYERS, "the reference is checkpointed"
    assert installation(reference.model) is None
    done = hf_ckpt.describe(run.model)
    assert done.enabled
    assert lost_blocks(run.model) == ()
    assert run.passes == reference.passes >= STEPS
    actions = {"full": ["full"] * LAYERS, "selective": ["selective"] * LAYERS, "mixed": ["full", "selective", "keep"]}
    names = list(find_blocks(run.model).modules)
    for name, action, computed in zip(names, actions[plan], run.computed, strict=True):
        assert computed == run.passes * (2 if action == "full" else 1), name
        assert done.forwards.get(name, 0) == (0 if action == "keep" else run.passes), name
        if action == "selective":
            assert done.recomputed[name] >= 3 * run.passes, name  # operations
        else:
            assert done.recomputed.get(name, 0) == done.forwards.get(name, 0), name
    assert bool(done.dropped_tensors) == ("selective" in actions[plan])


class Watch(TrainerCallback):
    """Records gradients before every optimizer step."""

    def __init__(self):
        self.gradients = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        found = {name: parameter.grad for name, parameter in model.named_parameters()}
        self.gradients.append({name: value.clone() for name, value in found.items() if value is not None})


@contextlib.contextmanager
def counted(model):
    """Count, in train mode, [forwards with gradients] of a model and [computations with gradients] of each block."""
    base = base_model(model)
    found = find_blocks(base)
    passes, computed, handles = [0], [0] * len(found.blocks), []

    def count(counts, place):
        def hook(module, args, kwargs=None):
            counts[place] += torch.is_grad_enabled() and module.training

        return hook

    handles.append(found.owners[-1].register_forward_pre_hook(count(passes, 0)))
    for place, block in enumerate(found.modules.values()):
        inside = getattr(block, "mlp", None) or block.intermediate
        handles.append(inside.register_forward_pre_hook(count(computed, place)))
    yield passes, computed
    for handle in handles:
        handle.remove()


@contextlib.contextmanager
def every_message():
    """The texts of Python's warnings and of all loggers."""
    said = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    names = ("", "transformers", "datasets", "sentence_transformers")  # loggers that do not propagate
    loggers = [logging.getLogger(name) for name in names]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield said
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
    said.extend(str(warning.message) for warning in caught)


def trained(make) -> Run:
    """Train the Trainer that `make(callback)` returns."""
    watch = Watch()
    with every_message() as messages:
        set_seed(3)
        trainer = make(watch)
        trainer.remove_callback(transformers.PrinterCallback)
        with counted(trainer.model) as (passes, computed):
            trainer.train()
    weights = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    return Run(trainer.model, logs_of(trainer), watch.gradients, weights, passes[0], computed, messages)


def logs_of(trainer) -> list[dict]:
    rows = trainer.state.log_history
    return [{key: value for key, value in row.items() if not any(part in key for part in TIMES)} for row in rows]


def words_of(settings) -> list[str]:
    """Settings as command-line arguments."""
    found = []
    for name, value in settings.items():
        found += [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return found


def asked_by(spec) -> list[str]:
    return words_of({"gradient_checkpointing": True, "gradient_checkpointing_kwargs": spec})


OFF = words_of({"gradient_checkpointing": False})
