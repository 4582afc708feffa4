"""The guard retries steps after artificial out-of-memory errors: anywhere in a step, repeatedly, above a limit.

Training continues with the same results, and operations are counted.
"""

from __future__ import annotations

import copy

import pytest
import torch
from accelerate.utils.memory import should_reduce_batch_size
from helpers.failing import (
    FULL,
    HEAD,
    MESSAGE,
    OFFLOAD,
    SELECTIVE,
    Limited,
    bytes_of,
    forward_and_backward,
    one_step,
    plain,
    seed,
)
from helpers.sparing import sparing
from helpers.steps import assert_same, gradients, without_cache
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import hf_ckpt
from hf_ckpt.errors import OutOfPlansError
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.models.tiny import FAMILIES, tiny_batch, tiny_model
from hf_ckpt.training.guard import OomGuard, tighten

pytestmark = pytest.mark.usefixtures("host_memory", "little_to_collect")


STRIDE = {"llama": 29, "gpt2": 41, "bert": 41, "t5": 101}
"""Operations between tested points: a prime, so that all kinds of operations are tested."""


@pytest.mark.long
@sparing("family", FAMILIES, "llama", "bert")
def test_any_point_of_a_step(family):
    expected, drawn = plain(family)
    model = tiny_model(family, layers=2, dropout=0.1)
    hf_ckpt.install(model, {"policy": "selective", "check_every": 0})
    model.gradient_checkpointing_enable()
    one_step(model, family)  # create what is made once per process
    found, _, operations = one_step(model, family, OomGuard(model))
    assert_same(expected, found)
    touched = untouched = 0
    for at in [*range(0, operations, STRIDE[family]), operations - 1]:
        hf_ckpt.install(model, "selective")
        guard = OomGuard(model)
        counts = []

        def counted(step, *args, guard=guard, counts=counts):
            def run(*args):
                counts.append(args)
                return step(*args)

            return guard(run, *args)

        found, later, _ = one_step(model, family, counted, [at])
        assert_same(expected, found, f"out of memory at operation {at} of {operations}")
        assert later == drawn, at
        assert guard.attempts == 1
        assert guard.taken == [FULL], at
        done = hf_ckpt.describe(model)
        assert {str(action) for _, action in done.plan.actions} == {"full"}
        assert set(done.recomputed.values()) <= {1, 2}  # of blocks that were recomputed
        assert len(counts) in (3, 4)
        touched += len(counts) == 4  # the first micro-step ran again with the second
        untouched += len(counts) == 3
    assert touched > 5, "no failure came after the first gradient of the second micro-step"
    assert untouched > 5


@pytest.mark.parametrize(
    ("spec", "lora"),
    [
        (None, True),
        ("none", False),
        ("full", True),
        ({"offload": "saved", "policy": "selective"}, False),
        ({"segments": 1}, False),
    ],
)
def test_from_any_plan(spec, lora):
    """Gradients stay bit-equal from any plan down to offloading; without one, nothing is installed before an error."""
    models = [tiny_model("llama", layers=3, dropout=0.1) for _ in range(2)]
    if lora:
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], lora_dropout=0.1, init_lora_weights=False)
        for number, model in enumerate(models):
            torch.manual_seed(5)
            models[number] = peft.get_peft_model(model, config)
    expected, drawn, _ = one_step(models[0], "llama")
    model = models[1]
    if spec is not None:
        hf_ckpt.install(model, spec)
        model.gradient_checkpointing_enable()
    taken = []
    for at in (30, 401, 650)[: 3 if spec in (None, "none") else 1]:
        guard = OomGuard(model, exact=True)
        found, later, _ = one_step(model, "llama", guard, [at])
        assert_same(expected, found, f"{spec} at {at}")
        assert later == drawn
        assert guard.attempts == 1
        taken += guard.taken
    assert taken == [SELECTIVE, FULL, OFFLOAD][-len(taken) :]
    assert {str(action) for _, action in hf_ckpt.describe(model).plan.actions} == {"offload"}
    assert min(hf_ckpt.describe(model).recomputed.values()) > 0


@settings(max_examples=12)
@given(at=st.lists(st.integers(0, 2500), min_size=1, max_size=4, unique=True))
def test_several_times_in_one_step(at):
    expected, drawn = plain("llama")
    model = tiny_model("llama", layers=2, dropout=0.1)
    guard = OomGuard(model, exact=True)
    reached = []

    def run(step, *args):
        return guard(step, *args)

    try:
        found, later, operations = one_step(model, "llama", run, at)
    except OutOfPlansError:
        assert guard.taken == [SELECTIVE, FULL, OFFLOAD]
        assert guard.attempts > 3
        return
    reached = [point for point in at if point < operations]
    assert guard.attempts == len(reached)
    assert len(guard.taken) <= len(reached)
    assert_same(expected, found, f"{at}")
    assert later == drawn


def trajectory(model, batches, run=None, optimizer=torch.optim.AdamW, zeros=False):
    """Losses of optimizer steps with two micro-steps each, and the final weights."""
    run = run or (lambda step, *args: step(*args))
    stepper = optimizer([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-2)
    losses = []
    for number, batch in enumerate(batches):
        losses.append(run(forward_and_backward, model, batch))
        if number % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            stepper.step()
            stepper.zero_grad(set_to_none=not zeros)
    return {"loss": torch.stack(losses), **{name: value.clone() for name, value in model.state_dict().items()}}


@pytest.mark.long
@sparing(
    ("family", "zeros"), [*((family, False) for family in FAMILIES), ("llama", True)], ("llama", True), ("bert", False)
)
def test_a_limit_is_kept_from_the_step_on_that_met_it(family, zeros):
    """When longer batches hit the limit, the guard tightens the plan at the first of them, and keeps it."""
    batches = [tiny_batch(family, seed=n, tokens=16 if n < 4 else 96, batch=4) for n in range(10)]
    plain_model, model = (tiny_model(family, dropout=0.1) for _ in range(2))
    seed()
    expected = trajectory(plain_model, batches, zeros=zeros)
    peaks = {}
    for policy in ("none", "selective", "full"):
        measured = tiny_model(family, dropout=0.1)
        hf_ckpt.install(measured, {"policy": policy, "check_every": 0})
        measured.gradient_checkpointing_enable()
        with LiveBytes(measured) as live:
            trajectory(measured, batches)
        peaks[policy] = live.peak_bytes
    assert peaks["full"] < peaks["selective"] < peaks["none"]
    guard = OomGuard(model)
    seed()
    attempts = []

    def run(step, *args):
        loss = guard(step, *args)
        attempts.append(guard.attempts)
        return loss

    with Limited((peaks["selective"] + peaks["full"]) // 2, model) as allocator:
        found = trajectory(model, batches, run, zeros=zeros)
    assert_same(expected, found)
    assert guard.taken == [SELECTIVE, FULL]
    assert attempts[3] == 0, "the short batches fit"
    assert attempts[-1] == attempts[4] == 2, "the plan stays tight"
    assert allocator.peak_bytes > peaks["full"]
    assert min(hf_ckpt.describe(model).recomputed.values()) > 0
    assert hf_ckpt.describe(model).watched is None, "a check has no room where memory has run out"


def test_nothing_of_a_failed_attempt_is_held():
    model = tiny_model("llama", layers=8)
    hf_ckpt.install(model, "none")
    guard = OomGuard(model)
    batch = tiny_batch("llama", tokens=128, batch=4)
    at_start, peak = [], []

    def step(live):
        at_start.append(live.current_bytes)
        loss = model(**without_cache(model, batch)).loss
        peak.append(live.current_bytes)
        if len(at_start) < 3:
            raise torch.OutOfMemoryError(MESSAGE)
        loss.backward()

    with LiveBytes(model) as live:
        guard(step, live)
    assert guard.taken == [SELECTIVE, FULL]
    assert max(at_start) - min(at_start) < 0.01 * (peak[0] - at_start[0]), (at_start, peak)


def test_out_of_plans():
    model = tiny_model("llama", dropout=0.1)
    batch = tiny_batch("llama", tokens=64)
    guard = OomGuard(model)
    with Limited(bytes_of(model) + 20_000, model), pytest.raises(OutOfPlansError, match="no tighter plan") as raised:
        guard(forward_and_backward, model, batch)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert should_reduce_batch_size(raised.value)  # accelerate can then reduce the batch size
    assert set(guard.taken) == {SELECTIVE, FULL, OFFLOAD, HEAD}
    assert guard.attempts == 5  # without a plan, then with four
    # The model can still train.
    guard(forward_and_backward, model, batch)
    assert min(hf_ckpt.describe(model).recomputed.values()) > 0


def test_a_chunked_head_agrees_to_rounding():
    plain_model, model = (tiny_model("llama", layers=2, dropout=0.1) for _ in range(2))
    expected, drawn, _ = one_step(plain_model, "llama", tokens=320)
    hf_ckpt.install(model, "full")
    model.gradient_checkpointing_enable()
    guard = OomGuard(model)
    found, later, _ = one_step(model, "llama", guard, [60], tokens=320)
    assert guard.taken == [HEAD], "before offloading, because logits weigh more than hidden states"
    assert hf_ckpt.describe(model).chunked_heads > 0
    assert later == drawn
    for name, value in expected.items():
        assert torch.linalg.vector_norm(found[name] - value) <= 1e-5 * torch.linalg.vector_norm(value), name


@pytest.mark.parametrize("policy", ["budget", "auto"])
def test_a_planned_policy_is_planned_again_for_less(policy, steady_times):
    model, batch = tiny_model("llama", dropout=0.0), tiny_batch("llama", tokens=64, batch=4)
    reference = copy.deepcopy(model)
    seed()
    forward_and_backward(reference, batch)
    hf_ckpt.install(model, {"policy": policy, **({"budget": "4MiB"} if policy == "budget" else {})})
    model.gradient_checkpointing_enable()
    for _ in range(9):  # until the plan is on
        forward_and_backward(model, batch)
        model.zero_grad(set_to_none=True)
    seed()
    guard = OomGuard(model, exact=True)
    predicted = []

    def step(*args):
        forward_and_backward(*args)
        prediction = hf_ckpt.describe(model).plan.prediction
        predicted.append(prediction.peak_bytes if prediction is not None else 0)  # none if every block offloads
        if len(predicted) < 3:
            raise torch.OutOfMemoryError(MESSAGE)

    guard(step, model, batch)
    assert guard.taken[0].startswith("a plan for ")
    assert predicted[1] <= 0.9 * predicted[0]
    assert predicted[2] < predicted[1]
    assert_same(gradients(reference), gradients(model))
    assert sum(hf_ckpt.describe(model).recomputed.values()) > 0
    while tighten(model, exact=True):  # ends at last; a larger batch does not restore the policy
        pass
    forward_and_backward(model, tiny_batch("llama", tokens=96, batch=4))
    assert {str(action) for _, action in hf_ckpt.describe(model).plan.actions} == {"offload"}
