"""Enable a plan that needs less memory after a step has run out of memory."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from hf_ckpt import compat
from hf_ckpt.attach.attach import adopt, end_watch, put_on
from hf_ckpt.attach.record import Installation, carriers, installation, is_on, spec_of
from hf_ckpt.engines.host import lane_of
from hf_ckpt.models.blocks import base_model, find_blocks, vocabulary_head
from hf_ckpt.spec.actions import ACTIONS, COMPILED, OFFLOAD
from hf_ckpt.spec.plan import Plan
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


def tighter_plan(
    plan: Plan, *, chunks: bool, offload: bool = True, head_first: bool = False
) -> tuple[Plan, str] | None:
    """The next plan that needs less memory, and its change in words; None if there is none.

    Each call replaces one action by the next in its record: `keep` by `selective`, `selective` by `full`, and `full` by
    `offload`; compiled blocks get the share 0. Blocks that keep their tensors in host memory still do. At the end, the
    head runs in chunks.

    Args:
        plan: any plan.
        chunks: whether the head can run in chunks.
        offload: whether there is host memory apart from the device's.
        head_first: whether the head runs in chunks before anything is offloaded.
    """
    kinds = {action.kind for _, action in plan.actions if action != COMPILED}  # which already keeps the least
    chunks = chunks and plan.head == "full"
    for record in ACTIONS.values():
        following = record.next
        if record.name not in kinds or following is None:
            continue
        if following == OFFLOAD and chunks and head_first:
            break
        if following == OFFLOAD and not offload:
            continue
        theirs = [action for _, action in plan.actions if action.kind == record.name]
        pairs = ((block, OFFLOAD if action.moved else following, action) for block, action in plan.actions)
        actions = tuple((block, new if action.kind == record.name else action) for block, new, action in pairs)
        words = ACTIONS["full"].next_in_words if all(action.moved for action in theirs) else record.next_in_words
        return dataclasses.replace(plan, actions=actions, prediction=None), words
    return (dataclasses.replace(plan, head="auto", prediction=None), "the head in chunks") if chunks else None
