"""The guard retries steps after artificial out-of-memory errors: anywhere in a step, repeatedly, above a limit.

Training continues with the same results, and operations are counted.
"""

from __future__ import annotations

import copy
import json
import sys

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
    train,
)
from helpers.sparing import sparing
from helpers.steps import assert_same, gradients, without_cache
from torch import nn

import hf_ckpt
from hf_ckpt import __main__
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
        assert (guard.attempts, guard.taken) == (1, [FULL]), at
        done = hf_ckpt.describe(model)
        assert {str(action) for _, action in done.plan.actions} == {"full"}
        assert set(done.recomputed.values()) <= {1, 2}  # of blocks that were recomputed
        assert len(counts) in (3, 4)
        touched += len(counts) == 4  # the first micro-step ran again with the second
        untouched += len(counts) == 3
    assert touched > 5, "no failure came after the first gradient of the second micro-step"
    assert untouched > 5


@pytest.mark.parametrize(
    ("spec", "lora", "at"),
    [
        (None, True, [[30], [401], [650]]),
        ("none", False, [[30], [401], [650]]),
        (None, False, [[100, 101, 102]]),  # in each attempt at one step
        ("full", True, [[30]]),
        ({"offload": "saved", "policy": "selective"}, False, [[30]]),
        ({"segments": 1}, False, [[30]]),
    ],
    ids=str,
)
def test_from_any_plan(spec, lora, at):
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
    for points in at:
        guard = OomGuard(model, exact=True)
        found, later, _ = one_step(model, "llama", guard, points)
        assert_same(expected, found, f"{spec} at {points}")
        assert later == drawn
        assert guard.attempts == len(points)
        taken += guard.taken
    assert taken == [SELECTIVE, FULL, OFFLOAD][-len(taken) :]
    assert {str(action) for _, action in hf_ckpt.describe(model).plan.actions} == {"offload"}
    assert min(hf_ckpt.describe(model).recomputed.values()) > 0


def trajectory(model, batches, run, zeros=False):
    """Losses of optimizer steps with two micro-steps each, and the final weights."""
    seed()
    stepper = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-2)
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
    plainly = lambda step, *args: step(*args)  # noqa: E731
    expected = trajectory(tiny_model(family, dropout=0.1), batches, plainly, zeros)
    peaks = {}
    for policy in ("none", "selective", "full"):
        measured = tiny_model(family, dropout=0.1)
        hf_ckpt.install(measured, {"policy": policy, "check_every": 0})
        measured.gradient_checkpointing_enable()
        with LiveBytes(measured) as live:
            trajectory(measured, batches, plainly)
        peaks[policy] = live.peak_bytes
    assert peaks["full"] < peaks["selective"] < peaks["none"]
    model = tiny_model(family, dropout=0.1)
    guard, attempts = OomGuard(model), []

    def run(step, *args):
        loss = guard(step, *args)
        attempts.append(guard.attempts)
        return loss

    with Limited((peaks["selective"] + peaks["full"]) // 2, model) as allocator:
        found = trajectory(model, batches, run, zeros)
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
    assert guard.taken == [SELECTIVE, FULL, HEAD, OFFLOAD]
    assert guard.attempts == 5  # without a plan, then with four
    # The model can still train.
    guard(forward_and_backward, model, batch)
    assert min(hf_ckpt.describe(model).recomputed.values()) > 0


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
    guard, predicted = OomGuard(model, exact=True), []

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


# --- Trainers ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """History and weights of a training that never runs out of memory."""
    return train(tmp_path_factory.mktemp("plain"), ())[1:]


def test_trainer_goes_on_as_if_nothing_had_happened(tmp_path, undisturbed):
    history, weights = undisturbed
    trainer, found, others = train(tmp_path / "guarded", (hf_ckpt.OomGuardMixin,), at=(1, 4, 7))
    assert found == history
    assert_same({"loss": None, **weights}, {"loss": None, **others})
    assert (trainer.oom_guard.attempts, trainer.oom_guard.taken) == (3, [SELECTIVE, FULL, HEAD])
    assert type(trainer).calls > 12 + 3 - 1  # 12 micro-steps, three of them retried, and the micro-steps before them
    assert min(hf_ckpt.describe(trainer.model).recomputed.values()) > 0


def test_on_the_command_line(tmp_path, monkeypatch, undisturbed):
    script = tmp_path / "script.py"
    script.write_text(
        "import json, sys\n"
        "from helpers.failing import train\n"
        "trainer, history, _ = train(sys.argv[1], (), at=(2,))\n"
        "found = {'attempts': trainer.oom_guard.attempts, 'taken': trainer.oom_guard.taken, 'history': history}\n"
        "open(sys.argv[2], 'w').write(json.dumps(found))\n"
    )
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    out = tmp_path / "found.json"
    assert __main__.main(["--oom-guard", str(script), str(tmp_path / "guarded"), str(out)]) == 0
    assert json.loads(out.read_text()) == {"attempts": 1, "taken": [SELECTIVE], "history": undisturbed[0]}
