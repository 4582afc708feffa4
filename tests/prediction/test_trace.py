"""Traces: that they change nothing, what they refuse, and what they count besides blocks."""

from __future__ import annotations

import pytest
import torch
import transformers
from helpers.sparing import sparing
from helpers.steps import assert_same, enable, step
from helpers.tracing import CPU, TUNINGS, model_of
from transformers.utils import import_utils

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.attach.record import installation
from hf_ckpt.costs.timeline import timeline
from hf_ckpt.errors import HfCkptError
from hf_ckpt.models.blocks import base_model, find_blocks
from hf_ckpt.models.tiny import FAMILIES, tiny_batch, tiny_model
from hf_ckpt.prediction import trace
from hf_ckpt.prediction.runs import short_row
from hf_ckpt.prediction.skeleton import skeleton_of
from hf_ckpt.prediction.trace import Step, trace_costs, trace_rows
from hf_ckpt.spec.actions import FULL, KEEP, SELECTIVE

# --- tracing changes nothing ----------------------------------------------------------------------------------------


def everything_about(model):
    """Everything that tracing must not change, in comparable form."""
    record = installation(model)
    return {
        "state": {name: value.clone() for name, value in model.state_dict().items()},
        "objects": {name: (id(parameter), parameter.data_ptr()) for name, parameter in model.named_parameters()},
        "grads": {n: None if p.grad is None else (id(p.grad), p.grad.clone()) for n, p in model.named_parameters()},
        "requires_grad": {name: parameter.requires_grad for name, parameter in model.named_parameters()},
        "hooks": {
            (name, kind): [type(hook).__qualname__ for hook in getattr(module, kind).values()]
            for name, module in model.named_modules()
            for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        },
        "attributes": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "training": {name: module.training for name, module in model.named_modules()},
        "config": base_model(model).config.to_dict(),
        "random": torch.get_rng_state(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "gradients are on": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "is_fake_tensor": getattr(import_utils, "is_fake_tensor", None),
        "record": None if record is None else (id(record), record.enabled, record.plan, dict(record.regions)),
        "counts": None if record is None else hf_ckpt.describe(model),
    }


def assert_equal_trees(before, after, where=""):
    assert type(before) is type(after), where
    if isinstance(before, dict):
        assert before.keys() == after.keys(), where
        for key, value in before.items():
            assert_equal_trees(value, after[key], f"{where}/{key}")
    elif isinstance(before, torch.Tensor):
        assert torch.equal(before, after), where
    elif isinstance(before, tuple):
        for place, (one, other) in enumerate(zip(before, after, strict=True)):
            assert_equal_trees(one, other, f"{where}/{place}")
    else:
        assert before == after, where


@pytest.mark.compat
@sparing(
    ("family", "installed"),
    [("llama", "nothing"), ("llama", "disabled"), *((family, "enabled") for family in FAMILIES)],
    *(("llama", "nothing"), ("llama", "enabled")),
)
def test_tracing_changes_nothing(family, installed):
    model = model_of(family, "lora" if family == "gpt2" else "everything", hidden=32, layers=3, dropout=0.1)
    next(model.parameters()).requires_grad_(False)
    found = find_blocks(model)
    found.modules[found.blocks[0].name].register_forward_hook(lambda *_: None)
    if installed != "nothing":
        hf_ckpt.install(model, {"policy": "selective", "rules": [{"layers": "1", "policy": "full"}]})
        enable(model)
        step(model, tiny_batch(family))
        if installed == "disabled":
            getattr(base_model(model), compat.DISABLE_NAMES[-1])()
    expected = step(model, tiny_batch(family))
    before = everything_about(model)
    with hf_ckpt.paused(model):
        costs = trace_costs(skeleton_of(model), Step(tiny_batch(family)), CPU, actions=(KEEP, SELECTIVE, FULL))
    assert_equal_trees(before, everything_about(model))
    assert len(costs.stacks[0].blocks) == 3
    assert_same(expected, step(model, tiny_batch(family)))
    if installed == "enabled":
        times = set(hf_ckpt.describe(model).forwards.values())
        assert times == {3}  # the three steps here, not the traced ones


# --- errors ---------------------------------------------------------------------------------------------------------


class ReadsItsLogits(transformers.LlamaForCausalLM):
    """Reads a value, which fake tensors do not have."""

    def forward(self, *args, **kwargs):
        found = super().forward(*args, **kwargs)
        if float(found.logits.detach().sum()) > 1e9:
            raise ValueError("too large")
        return found


@pytest.mark.compat
def test_a_model_that_cannot_run_on_fake_tensors():
    torch.manual_seed(0)
    model = ReadsItsLogits(tiny_model("llama").config).train()
    hf_ckpt.install(model, "full")
    enable(model)
    step(model, tiny_batch("llama"))
    before = everything_about(model)
    with hf_ckpt.paused(model):
        skeleton = skeleton_of(model)
    for _ in range(2):
        with pytest.raises(
            HfCkptError,
            match="ReadsItsLogits cannot be planned for, because how large its tensors are depends on their values",
        ):
            trace_costs(skeleton, Step(tiny_batch("llama")), CPU)
        assert_equal_trees(before, everything_about(model))
        assert not len(skeleton.base.model.layers)
    assert step(model, tiny_batch("llama"))["loss"] > 0


def test_an_error_of_the_plan_is_told_as_it_is(monkeypatch):
    def refusing(model, plan):
        raise HfCkptError("not today")

    monkeypatch.setattr(trace, "trial", refusing)
    with pytest.raises(HfCkptError, match=r"^not today$"):
        trace_costs(skeleton_of(tiny_model("llama")), Step(tiny_batch("llama")), CPU)


# --- memory outside of blocks ---------------------------------------------------------------------------------------


@pytest.mark.compat
@sparing(
    ("family", "tuning"),
    [(f, t) for f in FAMILIES for t in TUNINGS],
    *(("llama", t) for t in TUNINGS),
    ("t5", "everything"),
)
def test_bytes_that_are_always_there(family, tuning):
    model = model_of(family, tuning, hidden=32, layers=3)
    batch = tiny_batch(family)
    costs = trace_costs(skeleton_of(model), Step(batch, accumulation=3), CPU, actions=(FULL,))
    static = costs.static
    assert static.parameters == sum(parameter.nbytes for parameter in model.parameters())
    assert static.buffers == sum(buffer.nbytes for buffer in model.buffers())
    assert static.gradients == sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    assert static.optimizer == 2 * static.gradients
    assert static.batch == sum(value.nbytes for value in batch.values())
    assert (costs.tokens, costs.accumulation) == (batch["input_ids"].numel(), 3)
    assert costs.modes == (False, True)


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_what_was_run_is_not_run_again(family, monkeypatch):
    """Parts of a skeleton are run once for all micro-steps and optimizers; padding needs new runs."""
    ran = []
    monkeypatch.setattr(trace, "_run", lambda *given, run=trace._run: ran.append(given) or run(*given))
    skeleton, batch = skeleton_of(tiny_model(family)), tiny_batch(family)
    once = trace_costs(skeleton, Step(batch), CPU, actions=(KEEP, FULL))
    count = len(ran)
    again = trace_costs(skeleton, Step(batch, accumulation=4, optimizer="sgd"), CPU, actions=(KEEP, FULL))
    assert len(ran) == count > 1
    assert (again.stacks, again.head) == (once.stacks, once.head)
    assert (again.accumulation, again.static.optimizer) == (4, 0)
    trace_costs(skeleton, Step(batch, padded=True), CPU, actions=(KEEP, FULL))
    assert len(ran) == 2 * count


# --- assembled timelines ----------------------------------------------------------------------------------------------


@sparing(
    ("family", "autocast"),
    [(family, autocast) for family in FAMILIES for autocast in (None, torch.bfloat16)],
    *(("llama", None), ("llama", torch.bfloat16), ("t5", None)),
)
def test_a_timeline_is_the_step_that_was_traced(family, autocast):
    """For a model as deep as its short form, parts begin with at most two hidden states more than in the trace."""
    skeleton = skeleton_of(model_of(family, hidden=32, layers=4 if family == "t5" else 3))
    assert all(short_row(stack.row) == stack.row for stack in skeleton.stacks)
    batch, actions = tiny_batch(family), (FULL, SELECTIVE, KEEP)
    asked, hidden = Step(batch, autocast=autocast), batch["input_ids"].numel() * 32 * 4
    costs = trace_costs(skeleton, asked, CPU, actions=actions)
    names = [stack.name for stack in skeleton.stacks]
    for number, action in enumerate(actions):
        rows = [tuple((kind, number) for kind in stack.row) for stack in skeleton.stacks]
        run = trace_rows(skeleton, rows, asked, CPU, actions)
        blocks = {block.name: block for stack in skeleton.stacks for block in stack.blocks}
        seen = 0
        for moment in timeline(costs, costs.uniform(number)).moments:
            if moment.block is not None:
                block, what = blocks[moment.block], "backward" if moment.backward else "forward"
                place = what, names.index(block.stack), block.index
            elif moment.label == "head and loss, backward" and len(names) == 1:
                place = "head back", 0, 0
            else:
                continue
            began = moment.start_bytes - moment.gradient_bytes - costs.static.always
            assert 0 <= began - run.starts[place][0] <= 2 * hidden, (action, place)
            assert abs(moment.phase.net - run.phases[place].net) <= hidden or not moment.backward, (action, place)
            seen += 1
        assert seen == 2 * len(blocks) + (len(names) == 1)
