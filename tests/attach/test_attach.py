"""`hf_ckpt.attach` by itself: it takes plans and a decider from its caller, and does not import the planner."""

from __future__ import annotations

import weakref

import pytest
import torch
from helpers.installed import ALL, active, flags, forward_hooks
from helpers.snapshots import snapshot
from helpers.steps import assert_same, cache_argument, enable, step

from hf_ckpt import compat
from hf_ckpt.attach.attach import attach, describe, detach, exchange, put_on, take_off, trial
from hf_ckpt.attach.record import GIVEN_PLAN, installation
from hf_ckpt.models.blocks import find_blocks
from hf_ckpt.models.tiny import tiny_batch, tiny_model
from hf_ckpt.spec.actions import FULL, KEEP, SELECTIVE
from hf_ckpt.spec.plan import Plan
from hf_ckpt.spec.spec import Spec

pytestmark = pytest.mark.compat
GIVEN = Spec(plan=GIVEN_PLAN)


def plan_of(model, *actions):
    found = find_blocks(model)
    return Plan(found.family, found.model, tuple(zip(found.blocks, actions, strict=True)))


def test_a_plan_by_hand_goes_on_and_comes_off():
    """`attach` enables nothing, `put_on` and `take_off` enable and disable the plan, `detach` leaves no trace."""
    model, plain = tiny_model("llama", dropout=0.1), tiny_model("llama", dropout=0.1)
    before, hooks = snapshot(model), forward_hooks(model)
    record = attach(model, GIVEN, plan_of(model, KEEP, FULL, KEEP, FULL))
    assert record is installation(model)
    assert record.decider is None
    assert flags(model) == []
    put_on(find_blocks(model), record)
    assert active(model) == [ALL[1], ALL[3]]
    enable(model, {"policy": "full"})  # without a decider, the plan stays
    assert_same(step(plain, tiny_batch("llama")), step(model, tiny_batch("llama")))
    assert set(describe(model).recomputed) == {ALL[1], ALL[3]}
    take_off(model, record)
    assert flags(model) == []
    assert installation(model) is record
    detach(model)
    model.zero_grad()
    assert forward_hooks(model) == hooks
    assert snapshot(model) == before


# --- deciders -------------------------------------------------------------------------------------------------------


class Deciding:
    """A decider, session and watch that give fixed answers and record the questions."""

    measured_bytes, measures, differences = None, False, ()

    def __init__(self, spec=None, on_enable=None, on_batch=None):
        self.spec, self.on_enable, self.plan = spec, on_enable, on_batch
        self.enabled, self.batches, self.watched = [], [], []

    @property
    def plans(self):
        """All plans of the decider."""
        return {"any batch": self.plan}

    def asked(self, found, record, asked):
        self.enabled.append((found.model, record.enabled, dict(asked)))
        return None if self.on_enable is None else (self.spec, self.on_enable)

    def session(self, base, record):
        self.base = weakref.ref(base)
        return self

    def watch(self, record):
        return self

    def on_batch(self, record, running, stack, args, kwargs):
        self.batches.append((stack, tuple(kwargs["input_ids"].shape)))
        if self.plan is not None:
            exchange(self.base(), record, self.plan, self)

    def on_forward(self, base, record, running):
        self.watched.append(record.plan)

    def after_forward(self, failed):
        """Nothing to do."""

    def stop(self, record=None):
        """Nothing to do."""

    def report(self):
        """Nothing to say."""


def test_every_enable_call_asks_the_decider():
    model = tiny_model("llama")
    decider = Deciding()
    attach(model, GIVEN, plan_of(model, FULL, KEEP, KEEP, KEEP), decider)
    for number, name in enumerate(compat.transformers.ENABLE_NAMES):
        getattr(model, name)({"policy": "selective"}, offload=True)
        asked = {"policy": "selective", "every_n_layers": 1, "offload": True}
        assert decider.enabled[number] == ("LlamaForCausalLM", number > 0, asked)
    assert active(model) == [ALL[0]]  # it answered None, so the plan stays
    decider.spec, decider.on_enable = Spec(policy="full"), plan_of(model, KEEP, FULL, FULL, KEEP)
    enable(model)
    assert len(decider.enabled) == len(compat.transformers.ENABLE_NAMES) + 1
    assert active(model) == ALL[1:3]
    assert describe(model).spec == {"policy": "full"}
    assert decider.batches == []  # fixed policies do not ask for every batch
    seen = len(decider.watched)
    step(model, tiny_batch("llama"))
    with trial(model, decider.on_enable):
        step(model, tiny_batch("llama"))
    assert decider.watched[seen:] == [decider.on_enable]  # the watch sees forwards, except in a trial


def test_every_training_batch_of_a_planned_policy_asks_the_decider():
    model, batch = tiny_model("llama"), tiny_batch("llama")
    decider = Deciding()
    spec = Spec.parse({"policy": "budget", "budget": "1GiB"})
    put_on(find_blocks(model), attach(model, spec, plan_of(model, *[FULL] * 4), decider))
    assert active(model) == ALL
    shape = tuple(batch["input_ids"].shape)
    assert decider.batches == [(None, shape)]  # the whole model's forward, not the inner stack's
    assert len(decider.watched) == 1
    decider.batches.clear()
    with torch.no_grad():
        model(**batch)
    model.eval()(**batch)
    assert decider.batches == []
    model.train()
    decider.plan = plan_of(model, KEEP, KEEP, FULL, KEEP)
    step(model, batch)
    assert installation(model).planned is decider
    assert describe(model).plan == decider.plan
    assert describe(model).spec == spec.to_dict()
    decider.plan = None
    assert active(model) == [ALL[2]]
    decider.plan = plan_of(model, KEEP, SELECTIVE, KEEP, KEEP)
    step(model, batch)
    assert model.model.layers[1].input_layernorm._forward_hooks  # functions that are new get their hooks
    decider.plan = None
    enable(model)
    assert installation(model).planned is not None


@pytest.mark.parametrize("whole", [True, False])
def test_a_plan_that_comes_in_the_forward_of_a_stack(whole):
    """A plan that comes during a stack's forward applies to that forward.

    Calling `forward` skips the model's hooks, so the stack's hooks ask; if the model is the stack, the new plan's hooks
    replace hooks that come after the asking one.
    """
    model = tiny_model("llama") if whole else tiny_model("llama").model
    blocks = [block.name for block in find_blocks(model).blocks]
    decider = Deciding(on_batch=plan_of(model, KEEP, FULL, KEEP, FULL))
    put_on(find_blocks(model), attach(model, Spec.parse("auto"), plan_of(model, *[FULL] * 4), decider))
    ids = tiny_batch("llama")["input_ids"]
    outputs = (model.forward if whole else model)(input_ids=ids, use_cache=True)
    assert decider.batches == [("decoder" if whole else None, tuple(ids.shape))]
    assert cache_argument(model) not in outputs  # no cache is built in a recomputed forward
    outputs[0].square().mean().backward()
    assert describe(model).recomputed == {blocks[1]: 1, blocks[3]: 1}
