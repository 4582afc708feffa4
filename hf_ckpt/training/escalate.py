"""Enable a plan that needs less memory after a step has run out of memory."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_ckpt import compat
from hf_ckpt.attach.attach import adopt, end_watch, put_on
from hf_ckpt.attach.record import Installation, carriers, installation, is_on, spec_of
from hf_ckpt.engines.host import lane_of
from hf_ckpt.models.blocks import base_model, find_blocks, vocabulary_head
from hf_ckpt.planner.policies import tighter_plan
from hf_ckpt.training.install import install_one


def step_down(model: nn.Module, *, exact: bool = False) -> str | None:
    """Enable the next plan that needs less memory, between two attempts at a step.

    Under `budget` and `auto`, the first change is a lower budget. After that, and for all other plans, one action
    changes at a time: `keep` to `selective`, `selective` to `full`, `full` to `offload` (not on a CPU), and the head to
    chunks. A plan that is not enabled is enabled first. On a model without a plan, `selective` comes first, or the
    change after `full` if transformers' own checkpointing is enabled.

    Args:
        model: a PreTrainedModel, plain or wrapped.
        exact: do not run the head in chunks, because its gradients are not bit-equal.

    From then on, the watch checks nothing, because there is no room.

    Returns the change in words; None if no plan needs less.
    """
    base = base_model(model)
    record = installation(base)
    is_new = record is None
    if record is None:
        kept = not any(is_on(module) for module in carriers(base).values())
        install_one(base, "none" if kept else "full")
        record = installation(base)
        assert record is not None
    end_watch(record)
    plan = record.plan
    if not (record.enabled or is_new) and (plan.active() or plan.head != "full" or plan.mlp != "full"):
        put_on(find_blocks(base), record)
        return f"the installed plan (`{record.spec.policy}`)"
    changed: str | None = None if record.session is None else record.session.lower(record)
    if changed is not None:
        return changed
    head = None if exact else vocabulary_head(base)
    chunks = head is not None and "forward" not in vars(head) and compat.parameters_stay(base)
    offload = lane_of(next(base.parameters()).device) is not None
    head_first = head is not None and _head_weighs_more(head, record)
    tighter = tighter_plan(record.plan, chunks=chunks, offload=offload, head_first=head_first)
    if tighter is None:
        return None
    plan, name = tighter
    found = find_blocks(base)
    adopt(found, record, spec_of(plan, record.spec), plan)
    put_on(found, record)
    return name


def _head_weighs_more(head: nn.Module, record: Installation) -> bool:
    """Whether the logits of a token, their float32 copy and its gradient have more elements than the token's hidden
    states in all blocks."""
    weight: Any = head.weight
    vocabulary, hidden = weight.shape
    return bool(3 * vocabulary > len(record.plan.actions) * hidden)
