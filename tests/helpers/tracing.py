"""Trace models and run them, to compare predicted with real bytes."""

from __future__ import annotations

import contextlib
import signal

import torch
import transformers

import hf_ckpt
from helpers.sparing import sparing
from hf_ckpt import compat
from hf_ckpt.attach.attach import trial
from hf_ckpt.compat.peft import add_lora
from hf_ckpt.costs.timeline import timeline, worst_timeline
from hf_ckpt.forecast.devices import DEVICES
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.models.blocks import base_model, find_blocks
from hf_ckpt.models.tiny import FAMILIES, tiny_model
from hf_ckpt.prediction.skeleton import skeleton_of
from hf_ckpt.prediction.trace import Step, trace_costs
from hf_ckpt.spec.actions import FULL, KEEP, SELECTIVE
from hf_ckpt.spec.plan import Plan

CPU = DEVICES["cpu"]
TUNINGS = ("everything", "lora")
PEAK = {"layers": 6, "hidden": 64}
"""Shape of models whose peak with `PEAK_BATCH` is mostly activations; many CPUs are slow in 16 bits."""
PEAK_BATCH = {"batch": 4, "tokens": 128}
TOLERANCE = 0.03
"""Largest relative error of a predicted peak."""
a_family = sparing("family", FAMILIES, "llama")
"""Every family; only one runs by default."""


# --- models and plans -------------------------------------------------------------------------------------------------


def model_of(family, tuning="everything", *, attention="sdpa", **options):
    """A tiny model to train; T5 of transformers 4 has only eager attention."""
    if attention == "sdpa" and family == "t5" and not transformers.T5ForConditionalGeneration._supports_sdpa:
        attention = "eager"
    model = tiny_model(family, attention=attention, **options)
    return add_lora(model, rank=4).train() if tuning == "lora" else model


def plan_of(model, actions):
    """The plan that gives the model's blocks these actions, in order."""
    found = find_blocks(model)
    return Plan(found.family, found.model, tuple(zip(found.blocks, actions, strict=True)))


def chosen(costs, choice):
    """The actions of a choice, block by block."""
    return [costs.actions[action] for stack in choice for action in stack]


def mixed(costs):
    """A choice that mixes all actions in every stack."""
    order = (2, 0, 3, 1, 1, 3, 0, 2)

    def one(stack, place):
        choices = stack.choices[stack.kinds[place]]
        return choices[order[place % len(order)] % len(choices)]

    return tuple(tuple(one(stack, place) for place in range(len(stack.kinds))) for stack in costs.stacks)


def plans_of(costs):
    """Name -> choice: one for each action, and a mixed one."""
    plans = {str(action): costs.uniform(number) for number, action in enumerate(costs.actions)}
    return {**plans, "mixed": mixed(costs)}


# --- steps ------------------------------------------------------------------------------------------------------------


def inputs_of(model, batch):
    """The batch, without a cache if the model would build one."""
    return {**batch, "use_cache": False} if compat.wants_use_cache(base_model(model)) else dict(batch)


def loss_of(model, inputs):
    """The loss of a step; returning from this function frees the outputs before the backward, as in a Trainer."""
    return model(**inputs).loss


def micro_steps(model, batch, autocast=None):
    """Peaks of the first and the second micro-step."""
    peaks = []
    for parameter in model.parameters():
        parameter.grad = None
    for _ in range(2):
        inputs = inputs_of(model, batch)
        with LiveBytes(model, inputs) as counter:
            with torch.autocast("cpu", autocast) if autocast else contextlib.nullcontext():
                loss = loss_of(model, inputs)
            loss.backward()
        del loss
        peaks.append(counter.peak_bytes)
    for parameter in model.parameters():
        parameter.grad = None
    return peaks


def real_peaks(model, actions, batch, autocast=None):
    """Peaks of the model by `LiveBytes`; checks that every block with an action was recomputed."""
    with trial(model, plan_of(model, actions)):
        peaks = micro_steps(model, batch, autocast=autocast)
        told = hf_ckpt.describe(model)
    wanted = {block.name for block, action in told.plan.actions if action != KEEP}
    assert {name for name, times in told.recomputed.items() if times} == wanted
    return peaks


# --- predicted and real peaks -----------------------------------------------------------------------------------------


def deviations(costs, choice, peaks):
    """Relative errors of the predicted peaks of both micro-steps."""
    predicted = [timeline(costs, choice, accumulated).peak_bytes for accumulated in (False, True)]
    assert worst_timeline(costs, choice).peak_bytes == max(predicted)
    return [ours / theirs - 1 for ours, theirs in zip(predicted, peaks, strict=True)]


def assert_near(found):
    """Check the errors in `found`: name -> relative errors."""
    worst = max(found, key=lambda name: max(map(abs, found[name])))
    told = ", ".join(f"{deviation:+.2%}" for deviation in found[worst])
    print(f"largest deviation: {told} under {worst}")
    assert max(map(abs, found[worst])) <= TOLERANCE, f"largest deviation: {told} under {worst}; all: {found}"


def near_real(model, batch, actions=(KEEP, SELECTIVE, FULL), **keys):
    """Compare uniform plans and a mixed one with real tensors, in both micro-steps. Returns the costs."""
    around = Step(batch, accumulation=2, optimizer="sgd", **keys)
    costs = trace_costs(skeleton_of(model), around, CPU, actions=actions)
    plans, autocast = plans_of(costs), keys.get("autocast")
    peaks = {name: real_peaks(model, chosen(costs, choice), batch, autocast) for name, choice in plans.items()}
    assert_near({name: deviations(costs, choice, peaks[name]) for name, choice in plans.items()})
    return costs


@contextlib.contextmanager
def within(seconds):
    """Fail instead of hanging."""

    def stop(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except TimeoutError:
        raise AssertionError(f"no end after {seconds} s") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
