"""The phases of a session under `budget`: none lasts for ever, whatever steps and batches come, and the count of live
bytes on a CPU never outlives its step."""

from __future__ import annotations

import gc
import random
import threading

import pytest
import torch
from helpers.planned import budgeted
from helpers.steps import without_cache
from helpers.trainers import FLAG, trainer
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from hf_ckpt.attach.record import installation
from hf_ckpt.models.blocks import find_blocks
from hf_ckpt.models.tiny import tiny_batch, tiny_model
from hf_ckpt.spec.actions import FULL, KEEP, candidates

pytestmark = pytest.mark.usefixtures("steady_times")
STEPS = 2 + (len(candidates()) - 1) + 2
"""Steps before the plan of a batch size in a regular run: under `full` without and with the state of the optimizer, for
each other action, and two timed ones."""
LOST = 3
"""The most further steps that one irregular step costs."""


class Loop:
    """A training of a small model under a budget in which everything can be kept."""

    def __init__(self, budget="1GiB", optimizer=torch.optim.AdamW):
        self.model = tiny_model("llama", layers=4, hidden=32)
        self.batch = tiny_batch("llama", batch=2, tokens=16)
        self.longer = tiny_batch("llama", batch=2, tokens=24)
        self.optimizer = optimizer(self.model.parameters(), lr=0.0)
        budgeted(self.model, budget)

    def loss(self, batch=None):
        return self.model(**without_cache(self.model, batch or self.batch)).loss

    def clear(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, batch=None):
        self.loss(batch).backward()
        self.clear()

    @property
    def planned(self):
        return installation(self.model).planned

    @property
    def has_plan(self):
        """Whether the last step had the plan of its batch, which keeps more than `full`."""
        actions = {action for _, action in self.planned.plan.actions}
        return self.planned.phase in ("check", "plan") and actions != {FULL}


def fails(loop, where):
    """A step that an error ends."""

    def fail(*_):
        raise RuntimeError("on purpose")

    block = list(find_blocks(loop.model).modules.values())[1]
    handle = block.mlp.register_forward_hook(fail) if where == "forward" else None
    try:
        loss = loop.loss()
        if where == "backward":
            loss.register_hook(fail)
        if where == "loss":
            fail()
        loss.backward()
    except RuntimeError:
        loop.optimizer.zero_grad()
    else:
        raise AssertionError("nothing failed")
    finally:
        if handle is not None:
            handle.remove()


def evaluates(loop):
    with torch.no_grad():
        loop.model.eval()(**without_cache(loop.model, tiny_batch("llama", batch=8, tokens=32)))
    loop.model.train()
    loop.step()


def in_a_thread(loop):
    thread = threading.Thread(target=loop.step)
    thread.start()
    thread.join()


def freezes(loop):
    for parameter in find_blocks(loop.model).modules["model.layers.0"].parameters():
        parameter.requires_grad_(not parameter.requires_grad)
    loop.optimizer.zero_grad()
    loop.step()


def with_autocast(loop):
    with torch.autocast("cpu", torch.bfloat16):
        loop.step()


IRREGULAR = {
    "neither step nor zero_grad": lambda loop: loop.loss().backward(),
    "no zero_grad": lambda loop: (loop.loss().backward(), loop.optimizer.step()),
    "no backward": lambda loop: (loop.loss(), loop.clear()),
    "two forwards": lambda loop: ((loop.loss() + loop.loss()).backward(), loop.clear()),
    "two backwards": lambda loop: (loop.loss().backward(), loop.loss().backward(), loop.clear()),
    "error in the forward": lambda loop: fails(loop, "forward"),
    "error in the loss": lambda loop: fails(loop, "loss"),
    "error in the backward": lambda loop: fails(loop, "backward"),
    "evaluation": evaluates,
    "another shape": lambda loop: loop.step(loop.longer),
    "another thread": in_a_thread,
    "another block frozen": freezes,
    "autocast": with_autocast,
}


@pytest.mark.parametrize("kind", IRREGULAR)
def test_an_irregular_step_delays_the_plan_by_few_steps(kind):
    """Whenever an irregular step comes, the plan is on again soon, and no count of live bytes is left."""
    for at in (2, STEPS + 1):
        loop = Loop()
        for number in range(STEPS + LOST + 1):
            IRREGULAR[kind](loop) if number == at else loop.step()
            assert not _get_current_dispatch_mode_stack(), (at, number)
        extra = 0
        while not loop.has_plan and extra < 50:
            loop.step()
            extra += 1
        again = STEPS if kind in ("another block frozen", "autocast") else LOST  # measured anew
        assert extra <= again, (at, extra)
        assert {action for _, action in loop.planned.plan.actions} == {KEEP}


@pytest.mark.parametrize("kind", IRREGULAR)
def test_irregular_steps_all_the_time_do_not_keep_the_plan_away(kind):
    """Every second step is irregular: the regular ones, or the irregular ones if they have become the rule, get plans
    within twice as many steps, and what they cost."""
    loop = Loop()
    plans = []
    for number in range(3 * (STEPS + LOST)):
        IRREGULAR[kind](loop) if number % 2 else loop.step()
        plans.append(loop.has_plan)
    assert any(plans[-2:])
    assert not _get_current_dispatch_mode_stack()


@pytest.mark.parametrize("start", ["gradients there before", "never cleared", "never cleared, no optimizer"])
def test_gradients_that_are_there_do_not_keep_the_plan_away(start):
    loop = Loop(optimizer=torch.optim.SGD)
    if start == "gradients there before":
        for parameter in loop.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    for _ in range(STEPS + LOST):
        loop.loss().backward()
        if "no optimizer" not in start:
            loop.optimizer.step()
        if "never" not in start:
            loop.optimizer.zero_grad()
    assert loop.has_plan


# --- batches of many shapes -------------------------------------------------------------------------------------------


def steps_without_a_plan(model, shapes):
    """Train with batches of these shapes; returns how many steps did not have a plan."""
    without = 0
    for sequences, tokens in shapes:
        batch = tiny_batch("llama", batch=sequences, tokens=tokens)
        model(**without_cache(model, batch)).loss.backward()
        model.zero_grad(set_to_none=True)
        without += installation(model).planned.measures
    return without


def most_steps(shapes):
    """The most steps without a plan: two under `full` for each size, two for each action (which is measured again on
    much larger batches), and two timed ones."""
    sizes = []
    for rows, tokens in shapes:
        if not any(r == rows and 0.8 <= t / tokens <= 1.25 for r, t in sizes):
            sizes.append((rows, tokens))
    return 2 * len(sizes) + 2 * (len(candidates()) - 1) + 2


@pytest.mark.parametrize(("seed", "share"), [(0, 1.05), (1, 1.25), (2, 3.0), ("sorted", 3.0)])
def test_a_plan_comes_in_a_bounded_number_of_steps_for_every_sequence_of_shapes(seed, share):
    """Random sequences of shapes, or a dataset that is sorted by length. `share` of the model's bytes is the room."""
    chosen = random.Random(seed)
    pool = [(chosen.choice((1, 2, 4)), chosen.randrange(4, 65, 4)) for _ in range(4)]
    shapes = [chosen.choice(pool) for _ in range(40)] + 3 * pool
    if seed == "sorted":
        shapes = pool = [(2, tokens) for tokens in range(16, 72)]
    model = tiny_model("llama", layers=3, hidden=32)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    budgeted(model, f"{int(weights * (1 + share))}B")
    assert steps_without_a_plan(model, shapes) <= most_steps(pool)
    assert steps_without_a_plan(model, pool[-4:]) == 0


# --- the count of live bytes ends with its step -----------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 4])
def test_no_count_is_left_on_when_a_trainer_ends(steps, tmp_path):
    loop = Loop()
    trainer(tmp_path, loop.model, max_steps=steps, **{f"{FLAG}_kwargs": None}).train()
    assert installation(loop.model).session.measured_steps > 0
    assert not _get_current_dispatch_mode_stack()


def test_a_count_holds_no_model_and_ends_with_it():
    """A model that is deleted in the middle of a measured step, by an interrupt, for example."""
    loop = Loop()

    def interrupt(*_):
        raise KeyboardInterrupt

    loop.model.get_input_embeddings().register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        loop.loss()
    assert _get_current_dispatch_mode_stack()
    del loop
    gc.collect()
    assert not _get_current_dispatch_mode_stack()


# --- models that are wrapped ------------------------------------------------------------------------------------------


def test_blocks_are_measured_below_a_wrapper():
    """FSDP1 that wraps by size puts modules around lists of blocks, whose names have further segments."""
    loop = Loop()

    class Wrapper(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self._fsdp_wrapped_module = inner

        def forward(self, *args, **kwargs):
            return self._fsdp_wrapped_module(*args, **kwargs)

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self._fsdp_wrapped_module, name)

    loop.model.model = Wrapper(loop.model.model)
    for _ in range(STEPS + 1):
        loop.step()
    assert loop.has_plan
