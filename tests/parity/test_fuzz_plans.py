"""Random plans on random small models: gradients, counts, memory, and what is logged."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch
from helpers.cases import cases, model_of_kind
from helpers.fuzzing import (
    GENERIC_SAID,
    LIMIT_SAID,
    NO_LANE_SAID,
    NOTHING_SAID,
    PLAIN_HEAD_SAID,
    Said,
    assert_equal,
    examples,
    is_chunked,
)
from helpers.installed import flags
from helpers.lanes import DeviceBytes, lanes_of
from helpers.steps import CACHED_BYTES, ROUNDING, ROUNDING_16, assert_near
from hypothesis import assume, event, given

import hf_ckpt
from hf_ckpt.attach.record import installation
from hf_ckpt.engines import segments
from hf_ckpt.engines.rebuild import tape
from hf_ckpt.models.blocks import base_model, blocks_of_known_code, find_blocks, vocabulary_head
from hf_ckpt.models.tiny import tiny_batch


def check_case(case):
    """Check what is promised of every plan: gradients, counts, memory, and no unexpected warning."""
    plain = case.adapted(case.model())
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        expected = case.step(plain)
    plain_said = {str(warning.message) for warning in recorded}
    if expected is None:
        event("nothing needs a gradient")
    else:
        assume(all(bool(value.isfinite().all()) for value in expected.values() if value is not None))
    with lanes_of(case.lane), Said() as said:
        model = case.model()
        if case.adapters_first:
            model = case.adapted(model)
        plan = case.install(model)
        if not case.adapters_first:
            model = case.adapted(model)
        assert hf_ckpt.describe(model).plan == plan
        got = case.step(model)
        described = hf_ckpt.describe(model)
        assert (got is None) == (expected is None)
        if got is not None:
            check_gradients(case, model, expected, got, described)
            check_counts(case, model, plan, described)
        check_memory(case, model)
        unexpected = said.unexpected(*expected_to_be_said(case, model, described))
    assert not unexpected
    assert not {text for text in said.python() - plain_said if "is_gradient_checkpointing` is deprecated" not in text}
    assert tape.running.tape is None
    assert segments._open.run is None
    hf_ckpt.uninstall(model)
    assert flags(model) == []


def check_gradients(case, model, expected, got, described):
    uses_head = case.through != "hidden"
    in_chunks = described.chunked_heads > 0
    assert in_chunks == is_chunked(model, case.head, case.batches()[0]), "the head"
    if in_chunks and uses_head:
        fp32 = case.dtype == "fp32"
        assert_near(expected, got, 5 * ROUNDING if fp32 else ROUNDING_16, together=not fp32)
    else:
        assert_equal(expected, got)


def check_counts(case, model, plan, described):
    """Every planned block ran, and those that the gradient comes through were recomputed, once a micro-step."""
    active = plan.active()
    micro = 1 if case.micro == "one" else 2
    needed = case.needed(list(find_blocks(model).modules))
    assert described.forwards == dict.fromkeys(active, micro)
    frozen = set(described.frozen)
    together = {name: set(names) for _, names in plan.segments() for name in names}
    for name, action in active.items():
        times = described.recomputed[name]
        if name in frozen:  # a segment begins above
            assert times == 0, f"{name} is frozen, but was recomputed"
        elif together.get(name, {name}) & needed - frozen:
            assert times > 0, f"{name} was not recomputed"
            assert times == micro or action.kind == "selective", name
    last = {pairs[-1][0].name for pairs in plan.stacks().values()}
    moving = {name for name, action in active.items() if action.kind == "offload" or action.moved} - last
    assert described.moved.keys() <= moving
    if case.lane and (case.by == "install" or case.host_budget is None):
        sure = {name for name in moving if active[name].kind == "offload"} - frozen
        if micro == 1:  # the first forward of unknown code shows whether it works in place on what would be moved
            sure &= blocks_of_known_code(find_blocks(model))
        assert sure <= described.moved.keys()
    if case.lane is None:
        assert not described.moved


def check_memory(case, model):
    """Neither a step nor a forward alone leaves memory in use, with the garbage collector off."""
    model.zero_grad(set_to_none=True)
    batches = case.batches()
    gc.collect()
    gc.disable()
    try:
        with DeviceBytes(model, *batches) as live:
            case.step(model)
            model.zero_grad(set_to_none=True)
            after = live.current_bytes - live.start_bytes
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=case.dtype == "autocast"):
                loss = case.loss(model, batches[0])
            held = live.current_bytes - live.start_bytes
            del loss
            assert after <= CACHED_BYTES
            left = live.current_bytes - live.start_bytes
            assert left <= CACHED_BYTES
            assert held > left
    finally:
        gc.enable()
    for region in installation(model).regions.values():
        mover = getattr(region, "mover", None)
        assert mover is None or mover._in_use == 0


def expected_to_be_said(case, model, described):
    kinds = {action.kind for _, action in described.plan.actions}
    yield from [GENERIC_SAID] if case.kind == "opt" else []
    moving = any(action.kind == "offload" or action.moved for _, action in described.plan.actions)
    yield from [NO_LANE_SAID] if moving and case.lane is None else []
    yield from [LIMIT_SAID] if moving and case.by != "install" and case.host_budget else []
    yield from [PLAIN_HEAD_SAID] if case.head != "full" and vocabulary_head(base_model(model)) is None else []
    yield from [NOTHING_SAID] if "selective" in kinds and case.tuning in ("prefix", "suffix") else []


@pytest.mark.long
@examples(6)
@given(cases())
def test_any_plan_on_any_model(case):
    check_case(case)


@pytest.mark.thorough
@examples(50, 0.33)
@given(cases())
def test_many_plans_on_many_models(case):
    check_case(case)


@pytest.mark.parametrize("kind", ["masked_lm", "opt"])
def test_verify_of_a_head_in_chunks_where_gradients_are_zero_in_theory(kind):
    """The bias of an attention's keys moves all scores of a query alike, so its gradient is 0 but for rounding."""
    model = model_of_kind(kind, layers=2, dropout=0.0, attention="eager")
    result = hf_ckpt.verify(model, tiny_batch("llama"), {"policy": "none", "head": 5})
    assert result, result
