"""`budget` and `auto` during training: what is measured, when the plan comes, and how changes are handled.

No phase lasts for ever, whatever steps and batches come, and the count of live bytes never outlives its step.
"""

import collections
import contextlib
import copy
import functools
import gc
import importlib
import itertools
import logging
import pickle
import random
import re
import sys
import threading

import pytest
import torch
import transformers
from helpers.adapters import with_lora
from helpers.failing import run_out
from helpers.micro_steps import OperationClock
from helpers.planned import budgeted, live_peak, model_of, raced
from helpers.ranks import one_rank
from helpers.snapshots import snapshot
from helpers.sparing import sparing
from helpers.steps import assert_near, assert_same, cache_argument, enable, gradients, planned, step, without_cache
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_modes
from torch.utils.checkpoint import checkpoint

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.attach.record import installation
from hf_ckpt.errors import HfCkptError, InfeasibleError
from hf_ckpt.measure.levels import Boundary, Levels
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.models.tiny import tiny_batch, tiny_model
from hf_ckpt.spec.actions import FULL, KEEP, Action
from hf_ckpt.training import recorder
from hf_ckpt.training.batches import StepForwards
from hf_ckpt.training.guard import OomGuard
from hf_ckpt.training.measurements import TIMED_STEPS
from hf_ckpt.training.phases import MOST_FAILURES, RACE_STEPS, Phase

LAYERS = 4
BATCH = tiny_batch("llama", batch=4, tokens=64)
PLANNED = 2 + TIMED_STEPS + 4 * RACE_STEPS + 2
"""Steps after which every plan is made and checked: two that are measured, the timed ones, a race of four plans at
most, and two under the plan."""


def forward_and_backward(model, batch=BATCH):
    model(**without_cache(model, batch)).loss.backward()


def run(model, batches, optimizer=None):
    """Run training steps; returns each step's actions, block by block."""
    seen = []
    for batch in batches:
        forward_and_backward(model, batch)
        seen.append([action for _, action in hf_ckpt.describe(model).plan.actions])
        if optimizer is not None:
            optimizer.step()
        model.zero_grad(set_to_none=True)
    return seen


@functools.cache
def half(share=0.5, layers=LAYERS):
    """A budget half-way between the peaks of `full` and of no checkpointing, without an optimizer."""
    peaks = []
    for policy in ("full", "none"):
        model = model_of("llama", layers=layers)
        planned(model, policy)
        peaks.append(live_peak(model, BATCH))
    return int(peaks[0] + share * (peaks[1] - peaks[0]))


def trained(steps, budget=None, layers=LAYERS):
    """A model after some steps under a budget, and its session."""
    model = model_of("llama", layers=layers)
    budgeted(model, budget or half(layers=layers))
    run(model, [BATCH] * steps)
    return model, installation(model).session


def actions(model):
    return {action for _, action in hf_ckpt.describe(model).plan.actions}


def current(model):
    """What the session of a model has planned for the last batch."""
    return getattr(installation(model).session, "planned", None)


def test_a_run_is_measured_and_planned_for(caplog, monkeypatch):
    """A run measures two steps under `full`, times two, races plans, and then plans.

    Gradients are those of no checkpointing in each step. Afterwards nothing is measured, and no hook is left. The watch
    begins in the third forward under the plan.
    """
    monkeypatch.setattr("hf_ckpt.training.session.Session.room_bytes", lambda *args: 1 << 30)
    caplog.set_level("INFO", logger="hf_ckpt")
    plain, model, budget = model_of("llama"), model_of("llama"), half(layers=6)
    forward_and_backward(plain)
    expected = gradients(plain)
    budgeted(model, budget)
    plans, phases, checks = [], [], []
    for _ in range(PLANNED + 3):
        forward_and_backward(model)
        assert_same(expected, gradients(model))
        model.zero_grad(set_to_none=True)
        planned, described = current(model), hf_ckpt.describe(model)
        plans.append([action for _, action in described.plan.actions])
        phases.append(planned.phase)
        assert described.measuring == (f"measuring ({planned.phase.value})" if planned.is_provisional else None)
        checks += [] if planned.is_provisional else [described.watched.checks]
    raced = phases.count(Phase.RACE)
    assert raced in (0, 2 * RACE_STEPS, 3 * RACE_STEPS, 4 * RACE_STEPS)
    before = [Phase.MEASURE] * 2 + [Phase.TIME] * TIMED_STEPS + [Phase.RACE] * raced + [Phase.CHECK]
    assert phases == before + [Phase.PLAN] * (len(phases) - len(before))
    assert [set(plan) for plan in plans[:2]] == [{FULL}] * 2
    assert all(FULL in plan and len(set(plan)) > 2 for plan in plans[2:4])
    assert plans[len(before) - 1 :] == [plans[-1]] * (len(plans) - len(before) + 1)
    assert plans[-1] != plans[0]
    assert checks[:4] == [0, 0, 1, 1]
    session = installation(model).session
    assert (session.planning.measured_steps, session.recorder) == (len(before), None)
    hooks = (hook for module in model.modules() for hook in module._forward_hooks.values())
    assert not any(isinstance(hook, functools.partial) for hook in hooks)
    assert not any(region.trials for region in installation(model).functions.made.values() if hasattr(region, "trials"))
    assert not dispatch_modes()
    assert sum(described.recomputed.values()) > 0
    real = live_peak(model, BATCH)
    assert real <= budget
    assert planned.plan.prediction.peak_bytes == pytest.approx(real, rel=0.002)
    assert planned.of_batch.measured_bytes == pytest.approx(real, rel=0.002)
    assert caplog.text.count("planned for 4 x 64 tokens") == 1
    assert "of this plan, without other models" in str(described)  # a count of live tensors does not see them


def test_a_measured_step_ends_before_ddp_waits_for_other_ranks(monkeypatch):
    """So a rank that races sees its own time only. Here, gradients of other ranks arrive when the step has ended; DDP
    waits for them, so a step that ended after that would never end."""
    model = model_of("llama", layers=2)
    budgeted(model, "9MiB")
    waiting, ended = [], []

    def exchange(state, bucket):
        future = torch.futures.Future()
        waiting.append((future, bucket.buffer()))
        if installation(model).session.recorder is None:
            arrive()
        return future

    def arrive():
        for future, buffer in waiting:
            future.set_result(buffer)
        waiting.clear()

    def mark(levels, what, *more):
        marked(levels, what, *more)
        if what is Boundary.END:
            ended.append(current(model).phase)
            assert waiting
            arrive()

    marked = Levels.mark
    monkeypatch.setattr(Levels, "mark", mark)
    with one_rank():
        shared = DistributedDataParallel(model)
        shared.register_comm_hook(None, exchange)
        for _ in range(PLANNED + 2):
            shared(**without_cache(model, BATCH)).loss.backward()
            model.zero_grad(set_to_none=True)
    assert ended.count(Phase.RACE) >= 2 * RACE_STEPS


@pytest.mark.parametrize("layers", [1, 2])
def test_single_blocks_of_a_kind_are_timed(layers):
    """With frozen embeddings, the first block is one, because its hidden states require no gradients."""
    model = model_of("llama", layers=layers)
    model.get_input_embeddings().requires_grad_(False)
    budgeted(model, "1GiB")
    phases = [run(model, [BATCH]) and current(model).phase for _ in range(PLANNED)]
    assert phases.count(Phase.TIME) == TIMED_STEPS
    entered = installation(model).session.planning.entered.entrants
    assert all(entrant.seconds > 0 for entrant in entered)


# --- irregular steps --------------------------------------------------------------------------------------------------

STEPS = 3 + TIMED_STEPS
"""Steps before plans of a batch size race, in a regular run: under `full` without the state of the optimizer, twice
with it, and the timed ones."""
LOST = 3
"""The most further steps that one irregular step costs."""


class Loop:
    """A training of a small model under a budget in which everything can be kept."""

    def __init__(self, layers=2):
        self.model = tiny_model("llama", layers=layers, hidden=32)
        self.batch = tiny_batch("llama", batch=2, tokens=16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0)
        budgeted(self.model, "1GiB")

    def loss(self, batch=None):
        return self.model(**without_cache(self.model, batch or self.batch)).loss

    def clear(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, batch=None):
        self.loss(batch).backward()
        self.clear()

    @property
    def has_plan(self):
        """Whether the last step had the plan of its batch, or one that races to be it."""
        return current(self.model).phase in (Phase.RACE, Phase.CHECK, Phase.PLAN)


def fails(loop, where):
    """A step that an error ends."""

    def fail(*_):
        raise ArithmeticError("on purpose")

    def step():
        loss = loop.loss()
        if where == "backward":
            loss.register_hook(fail)
        fail() if where == "loss" else loss.backward()

    block = loop.model.model.layers[1]
    handle = block.mlp.register_forward_hook(fail if where == "forward" else lambda *_: None)
    with pytest.raises(ArithmeticError):
        step()
    loop.optimizer.zero_grad()
    handle.remove()


def evaluates(loop):
    with torch.no_grad():
        loop.model.eval()(**without_cache(loop.model, tiny_batch("llama", batch=8, tokens=32)))
    loop.model.train()
    loop.step()


def pauses(loop):
    """As TRL does between steps to generate completions."""
    loop.step()
    with hf_ckpt.paused(loop.model), torch.no_grad():
        loop.loss()


def in_a_thread(loop):
    thread = threading.Thread(target=loop.step)
    thread.start()
    thread.join()


def freezes(loop):
    for parameter in loop.model.model.layers[0].parameters():
        parameter.requires_grad_(not parameter.requires_grad)
    loop.optimizer.zero_grad()
    loop.step()


def with_autocast(loop):
    with torch.autocast("cpu", torch.bfloat16):
        loop.step()


def retained(loss):
    loss.backward(retain_graph=True)
    loss.backward()


IRREGULAR = {
    "neither step nor zero_grad": lambda loop: loop.loss().backward(),
    "no zero_grad": lambda loop: (loop.loss().backward(), loop.optimizer.step()),
    "no backward": lambda loop: (loop.loss(), loop.clear()),
    "two forwards": lambda loop: ((loop.loss() + loop.loss()).backward(), loop.clear()),
    "two backwards of a graph": lambda loop: (retained(loop.loss()), loop.clear()),
    "two backwards": lambda loop: (loop.loss().backward(), loop.loss().backward(), loop.clear()),
    "error in the forward": lambda loop: fails(loop, "forward"),
    "error in the loss": lambda loop: fails(loop, "loss"),
    "error in the backward": lambda loop: fails(loop, "backward"),
    "evaluation": evaluates,
    "pause": pauses,
    "another shape": lambda loop: loop.step(tiny_batch("llama", batch=2, tokens=24)),
    "another thread": in_a_thread,
    "another block frozen": freezes,
    "autocast": with_autocast,
}


@sparing("kind", IRREGULAR, "two forwards", "error in the backward", "evaluation", "another block frozen")
def test_an_irregular_step_delays_the_plan_by_few_steps(kind):
    """Whenever an irregular step comes, the plan is on again soon, and no count of live bytes is left."""
    again = STEPS if kind in ("another block frozen", "autocast") else LOST  # measured anew
    for at in (2, STEPS + 1):
        loop = Loop()
        for number in range(STEPS + LOST + 1 + again):
            if number <= STEPS + LOST or not loop.has_plan:
                IRREGULAR[kind](loop) if number == at else loop.step()
            assert not dispatch_modes(), (at, number)
        assert loop.has_plan


@sparing(
    "kind, every",
    [
        *((kind, 2) for kind in IRREGULAR),  # two sorts of steps that take turns
        *((kind, 1) for kind in ("pause", "two forwards", "two backwards of a graph", *list(IRREGULAR)[:2])),
    ],
    ("no backward", 2),
    ("error in the forward", 2),
    ("another shape", 2),
    ("autocast", 2),
    ("no zero_grad", 1),
    ("two backwards of a graph", 1),
)
def test_irregular_steps_all_the_time_do_not_keep_the_plan_away(kind, every):
    """The regular steps, or the irregular ones if they have become the rule, get plans within twice as many steps, and
    what they cost."""
    loop = Loop()
    plans = []
    for number in range(4 * (STEPS + LOST)):
        loop.step() if number % every else IRREGULAR[kind](loop)
        plans.append(loop.has_plan)
    assert any(plans[-2:])
    assert not dispatch_modes()


def joins(loop):
    (loop.loss() + loop.loss()).backward()
    loop.clear()


def fails_once_in_a_pair(loop):
    """A second forward raises, the first one's loss is trained, and then weights are frozen."""
    first = loop.loss()
    fails(loop, "forward")
    first.backward()
    loop.clear()
    loop.model.model.layers[0].requires_grad_(False)
    loop.step()


def adds_a_group(loop):
    loop.optimizer.add_param_group({"params": [loop.model.lm_head.weight]})
    loop.step()


def takes_another_optimizer(loop):
    """The state of the old one is gone, and that of the new one as large."""
    loop.optimizer = torch.optim.AdamW(loop.optimizer.param_groups[0]["params"], lr=0.0)
    loop.step()


NOTICED = {
    "a second forward": joins,
    "another optimizer": takes_another_optimizer,
    "an error, then frozen weights": fails_once_in_a_pair,
    "a group of the optimizer": adds_a_group,
    "lower blocks in eval mode": lambda loop: loop.model.model.layers[:2].eval(),
    "more blocks": lambda loop: (setattr(loop.model.config, "num_hidden_layers", 4), loop.step()),
    "attention": lambda loop: loop.model.set_attn_implementation("sdpa"),
}


@pytest.mark.parametrize("change", NOTICED)
def test_what_a_plan_depends_on_is_noticed_in_the_next_step(change):
    loop = Loop(layers=4)
    loop.model.lm_head.weight = torch.nn.Parameter(loop.model.lm_head.weight.detach().clone())  # not tied
    others = [p for p in loop.model.parameters() if p is not loop.model.lm_head.weight]
    loop.optimizer = torch.optim.AdamW(others, lr=0.0)
    loop.model.config.num_hidden_layers = 2 if change == "more blocks" else 4
    while current(loop.model) is None or current(loop.model).phase is not Phase.PLAN:
        loop.step()
    NOTICED[change](loop)
    joins(loop) if change == "a second forward" else loop.step()
    assert current(loop.model).phase is Phase.MEASURE


def test_the_state_of_an_optimizer_that_steps_while_the_plan_is_off_is_counted():
    hooks = importlib.import_module("torch.optim.optimizer")._global_optimizer_pre_hooks
    before = [*hooks]
    loop = Loop()
    for _ in range(STEPS + 12):
        loop.loss().backward()
        with hf_ckpt.paused(loop.model):
            loop.clear()
    state_bytes = sum(value.nbytes for state in loop.optimizer.state.values() for value in state.values())
    assert always_held(loop.model) > state_bytes + sum(parameter.nbytes for parameter in loop.model.parameters())
    hf_ckpt.uninstall(loop.model)
    assert [*hooks] == before


def is_counting():
    return any(isinstance(mode, LiveBytes) for mode in dispatch_modes())


@pytest.mark.parametrize("has_backward", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_no_count_outlives_an_optimizer_step_in_a_measured_step(fails, has_backward):
    """torch calls no hook after one that fails; its caller may go on without this model."""
    loop = Loop()
    loss = loop.loss()
    if has_backward:
        loss.backward()
    del loss
    assert current(loop.model).phase is Phase.MEASURE
    other = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    seen = []
    other.register_step_pre_hook(lambda *_: seen.append(is_counting()))
    if fails:
        other.register_step_pre_hook(run_out)
    with pytest.raises(torch.OutOfMemoryError) if fails else contextlib.nullcontext():
        other.step()
    assert seen == [True]
    assert not is_counting()


def test_a_backward_in_another_thread_than_the_forward_is_not_measured(caplog):
    """A CPU runs it in the thread that calls it, where a count of live bytes does not see it."""
    loop = Loop()
    for _ in range(9):
        losses = []
        thread = threading.Thread(target=lambda losses=losses: losses.append(loop.loss()))
        thread.start()
        thread.join()
        losses.pop().backward()
        loop.clear()
    assert "cannot be measured" in caplog.text
    assert actions(loop.model) == {FULL}


def test_two_threads_in_one_model_are_refused():
    loop = Loop()
    refused = []

    def second(*_):
        with pytest.raises(HfCkptError, match="in another thread, too, and `budget` plans for one step at a time"):
            loop.loss()
        refused.append(True)

    def first(*_):
        handle.remove()
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()

    handle = loop.model.model.layers[1].register_forward_hook(first)
    loop.step()
    assert refused
    in_a_thread(loop)  # in turn


def test_blocks_above_an_early_exit_keep_nothing():
    """The loss is on hidden states within the model. The graph of the others stays, as a variable holds the output."""
    loop = Loop(layers=4)
    for _ in range(PLANNED):
        output = loop.model(**without_cache(loop.model, loop.batch), output_hidden_states=True)
        output.hidden_states[2].square().mean().backward()
        loop.clear()
    assert current(loop.model).phase is Phase.PLAN
    plan = [action for _, action in hf_ckpt.describe(loop.model).plan.actions]
    assert plan == [KEEP, KEEP, FULL, FULL]


CHANGES = {
    "freeze": lambda model: model.model.layers[0].requires_grad_(False),
    "cast": lambda model: model.to(torch.bfloat16),
    "remove": lambda model: setattr(model.model, "layers", model.model.layers[:-1]),
}


@pytest.mark.trap(44)
@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_changes_is_measured_again(change):
    model, session = trained(PLANNED)
    assert len(session.planning.plans) == 1
    CHANGES[change](model)
    plans = run(model, [BATCH] * PLANNED)
    assert [len(actions) for actions in plans] == [len(model.model.layers)] * PLANNED
    assert set(plans[0]) == {FULL}
    assert plans[-1] == plans[-2]
    assert current(model).batch == [*session.planning.plans][-1]


def test_copied_blocks_that_call_another_attention_are_of_a_kind_of_their_own():
    """A copy of a layer has a config of its own, which later changes of the model's attention do not reach."""
    model = tiny_model("llama", layers=LAYERS, attention="sdpa")
    model.model.layers.append(copy.deepcopy(model.model.layers[-1]))
    model.config.num_hidden_layers = len(model.model.layers)
    model.set_attn_implementation("eager")
    plain = copy.deepcopy(model)
    budgeted(model, "1GiB")
    run(model, [BATCH] * 3)
    action = Action("selective", ("attention",))
    planned(plain, {"policy": action.kind, "save": [*action.save], "check_every": 0})
    measurements = installation(model).session.planning.measurements
    predicted = measurements.costs(current(model).batch).peak(dict.fromkeys(measurements.blocks, action))
    assert predicted == pytest.approx(live_peak(plain, BATCH), rel=0.01)


def in_a_checkpoint(model):
    """A step inside a checkpoint of the user. torch ends its recomputation by an exception."""
    run_model = lambda ids: model(input_ids=ids, use_cache=False).logits  # noqa: E731
    checkpoint(run_model, BATCH["input_ids"], use_reentrant=False).mean().backward()
    model.zero_grad(set_to_none=True)


@pytest.mark.parametrize("compiles", [False, True], ids=["in a checkpoint", "compiles a loss for each length"])
def test_steps_that_cannot_be_measured_are_given_up(compiles, monkeypatch, caplog):
    model = model_of("llama", layers=2)
    budgeted(model, "1GiB")
    if compiles:
        monkeypatch.setattr(compat.compiler, "compiled_graphs", itertools.count().__next__)
    for _ in range(10):
        run(model, [BATCH]) if compiles else in_a_checkpoint(model)
    assert caplog.text.count("cannot be measured") == 1
    assert actions(model) == {FULL}
    assert installation(model).session.planning.measured_steps == 8
    assert hf_ckpt.describe(model).measuring == "gave up after 8 steps in a row that could not be measured"
    run(model, [BATCH] * 3)
    assert hf_ckpt.describe(model).watched.checks == 1  # in what the device has left
    assert not dispatch_modes()


def test_blocks_that_save_nothing_are_kept(capsys):
    """Only the head is trained. Once a block is trained, too, steps are measured."""
    model = model_of("llama", layers=LAYERS)
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    budgeted(model, half(), check_every=1)
    plans = run(model, [BATCH] * 3)
    assert [set(plan) for plan in plans] == [{FULL}, {KEEP}, {KEEP}]
    assert capsys.readouterr().err.count("no block saves anything for the backward of 4 x 64 tokens") == 1
    assert hf_ckpt.describe(model).measuring is None
    model.model.layers[0].requires_grad_(True)
    run(model, [BATCH] * PLANNED)
    assert current(model).plan.prediction.peak_bytes <= half()


# --- batches of many shapes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seed", "share"),
    [(0, 1.05), *(pytest.param(*case, marks=pytest.mark.long) for case in [(1, 1.25), (2, 3.0)]), ("sorted", 3.0)],
)
def test_a_plan_comes_in_a_bounded_number_of_steps_for_every_sequence_of_shapes(seed, share):
    """Random sequences of shapes, or a dataset that is sorted by length. `share` of the model's bytes is the room.

    The most steps without a plan of their batch: two under `full` for each size, the timed ones, and a race.
    """
    chosen = random.Random(seed)
    pool = [(chosen.choice((1, 2, 4)), chosen.randrange(4, 65, 4)) for _ in range(4)]
    shapes = [chosen.choice(pool) for _ in range(40)] + 3 * pool
    if seed == "sorted":
        shapes = pool = [(2, tokens) for tokens in range(16, 56)]
    sizes = []
    for rows, tokens in pool:
        if not any(r == rows and 0.8 <= t / tokens <= 1.25 for r, t in sizes):
            sizes.append((rows, tokens))
    model = tiny_model("llama", layers=3, hidden=32)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    budgeted(model, f"{int(weights * (1 + share))}B")
    measures = []
    for rows, tokens in (*shapes, *pool[-4:]):
        run(model, [tiny_batch("llama", batch=rows, tokens=tokens)])
        measures.append(current(model).is_provisional)
    assert sum(measures) <= 2 * len(sizes) + TIMED_STEPS + 4 * RACE_STEPS
    assert not any(measures[-4:])


def test_shorter_batches_take_the_plan_of_longer_ones_and_get_their_own():
    """A batch that is much shorter than all others is measured; others need no step under `full`.

    A plan that keeps everything fits shorter batches only, so it may race once more.
    """
    batches = {tokens: tiny_batch("llama", batch=4, tokens=tokens) for tokens in (16, 36, 40, 60)}
    model, session = trained(PLANNED)
    long, steps = current(model), session.planning.measured_steps
    for tokens in (60, 60):
        run(model, [batches[tokens]])
        assert current(model).batch == long.batch
    assert session.planning.measured_steps == steps
    for tokens, read in ((16, 3), (40, 2)):  # the peak under a plan is known from 16 and 64 tokens
        before = session.planning.measured_steps
        run(model, [batches[tokens]] * 2)
        assert current(model).batch.forwards[0].rows_and_tokens == (4, tokens)
        run(model, [batches[tokens]] * (2 + 4 * RACE_STEPS))
        assert session.planning.measured_steps - before in (read, read + RACE_STEPS, read + 2 * RACE_STEPS)
    steps = session.planning.measured_steps
    run(model, [batches[36]])
    assert session.planning.measured_steps == steps
    assert {"4 x 16 tokens", "4 x 40 tokens", "4 x 64 tokens"} <= hf_ckpt.describe(model).plans.keys()


def with_wide_feed_forwards():
    """A model whose blocks need less in tiles than under `full`."""
    sizes = {"hidden_size": 32, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = transformers.LlamaConfig(vocab_size=256, num_hidden_layers=4, **sizes)
    return transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa").train()


def one_row(tokens):
    ids = torch.randint(0, 256, (1, tokens))
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("rows", [[[512], [480], [480]], [[480], [512], [480]], [[480, 480]] * 2 + [[480]] * 2])
def test_what_tiles_need_in_a_batch_near_a_measured_one_is_known_for_both(rows):
    """As lengths of a padded data set; or a step has fewer forwards than the one that it is compared with."""
    model = with_wide_feed_forwards()
    budget = 7 << 19  # less than `full` needs
    budgeted(model, budget, mlp=64, check_every=0)
    for lengths in rows + rows[-1:] * 6:
        losses = [model(**one_row(tokens), use_cache=False).loss for tokens in lengths]
        sum(losses).backward()
        model.zero_grad(set_to_none=True)
    assert {action.kind for action in actions(model)} == {"full+tiles"}
    assert live_peak(model, one_row(lengths[0])) <= current(model).plan.prediction.peak_bytes <= budget


@pytest.mark.long
@pytest.mark.parametrize(("lengths", "measured"), [("random", 7), ("few", 7), ("sorted", 12)])
def test_bytes_of_most_lengths_follow_from_three_measured_ones(lengths, measured, caplog):
    """In 80 steps, the bytes of one without the optimizer's state are read, of the forwards and the backwards of three
    lengths, and of one under a plan; sorted lengths leave the measured ones behind. A race may follow."""
    caplog.set_level("INFO", logger="hf_ckpt")
    chosen = random.Random(0)
    kinds = {
        "random": [chosen.randint(35, 87) for _ in range(80)],
        "few": [64, 50, 75, 40, 80, 32, 90, 80] * 10,
        "sorted": list(range(20, 100)),
    }
    loop = Loop()
    own = 0
    phases = collections.Counter()
    for number, tokens in enumerate(kinds[lengths]):
        batch = tiny_batch("llama", batch=2, tokens=tokens)
        with LiveBytes(loop.model, batch, loop.optimizer) if number > 60 else contextlib.nullcontext() as live:
            loop.step(batch)
        planned = current(loop.model)
        phases[planned.phase] += 1
        if live and planned.plan.prediction and planned.batch.forwards[0].rows_and_tokens == (2, tokens):
            own += 1
            assert planned.plan.prediction.peak_bytes == pytest.approx(live.peak_bytes, rel=0.004)
    assert own
    assert {phase: phases[phase] for phase in (Phase.MEASURE, Phase.TIME, Phase.CHECK)} == {
        Phase.MEASURE: measured,
        Phase.TIME: TIMED_STEPS,
        Phase.CHECK: 1,
    }
    session = installation(loop.model).session
    # Kinds of plans are told, and not each of them.
    plans = session.planning.plans.values()
    assert caplog.text.count("planned for 2 x") < len(plans)
    by_length = [planned.plan.prediction.step_seconds for planned in sorted(plans, key=elements)]
    assert by_length == sorted(set(by_length))


def test_arguments_by_place_make_the_same_batches_as_those_by_name():
    """So a mask without a name is seen, too."""
    ids = torch.ones(2, 16, dtype=torch.long)
    padded = torch.ones_like(ids).index_fill(1, torch.tensor([15]), 0)
    calls = [((ids, padded), {"labels": ids}), ((), {"input_ids": ids, "attention_mask": padded, "labels": ids})]
    batches = []
    for args, kwargs in calls:
        model = tiny_model("llama", layers=2)
        budgeted(model, "1GiB")
        model(*args, **kwargs)
        batches.append(current(model).batch)
    assert batches[0] == batches[1]
    assert batches[0].forwards[0].padded


def elements(planned):
    return planned.batch.elements


def test_a_run_without_room_warns_once(caplog):
    """Whatever lengths come; for how many no plan fits is described."""
    model = tiny_model("llama", layers=2, hidden=32)
    budgeted(model, f"{int(1.1 * sum(parameter.nbytes for parameter in model.parameters()))}B")
    run(model, [tiny_batch("llama", batch=2, tokens=tokens) for tokens in (64, 32, 48, 16)] * PLANNED)
    assert caplog.text.count("no plan fits") == 1
    assert "sizes, for 4 of which no plan fits:" in str(hf_ckpt.describe(model))


@pytest.mark.parametrize("lora", [False, True])
def test_feed_forwards_in_tiles_are_planned_where_nothing_else_fits(lora):
    """With `mlp`. The peak is exact, and gradients are those of no checkpointing up to rounding."""
    plain = with_wide_feed_forwards()
    plain = with_lora(plain, "llama") if lora else plain
    batch = one_row(512)
    full, tiled, model = (copy.deepcopy(plain) for _ in range(3))
    planned(full, {"policy": "full", "check_every": 0})
    planned(tiled, {"policy": "full", "mlp": 64, "check_every": 0})
    budget = round(1.05 * live_peak(tiled, batch))
    assert budget < 0.7 * live_peak(full, batch)
    budgeted(model, budget, mlp=64, check_every=0)
    while current(model) is None or current(model).is_provisional:
        step(model, batch)
    plan = hf_ckpt.describe(model).plan
    assert {action.kind for _, action in plan.actions} == {"full+tiles"}
    assert live_peak(model, batch) == pytest.approx(plan.prediction.peak_bytes, rel=0.001)
    assert plan.prediction.peak_bytes <= budget
    assert_near(step(plain, batch), step(model, batch))
    assert min(hf_ckpt.describe(model).recomputed.values()) > 0


@pytest.mark.parametrize(
    ("family", "room"),
    [
        ("llama", 1.1),
        ("bert", 1.25),
        *(pytest.param(family, room, marks=pytest.mark.long) for family in ("gpt2", "t5") for room in (1.1, 1.25)),
    ],
)
def test_tight_budgets_get_plans_after_few_steps(family, room):
    """Little above the peak of `full`, something else is tried where it fits; measuring needs no more than `full`."""
    batch = tiny_batch(family, batch=4, tokens=64)
    layers = 2 if family == "t5" else LAYERS
    full = model_of(family, layers=layers)
    planned(full, "full")
    least = live_peak(full, batch)
    model = model_of(family, layers=layers)
    budgeted(model, round(room * least))
    phases = []
    while not phases or phases[-1] is not Phase.CHECK:
        with LiveBytes(model, batch) as live:
            forward_and_backward(model, batch)
        model.zero_grad(set_to_none=True)
        phases.append(current(model).phase)
        assert live.peak_bytes <= (1.01 * least if phases[-1] is Phase.MEASURE else room * least)
    assert len(phases) - phases.count(Phase.RACE) - 1 <= 2 + TIMED_STEPS
    plans = [entrant.plan for entrant in installation(model).session.planning.entered.entrants]
    assert not all(set(dict(plan.actions).values()) == {FULL} for plan in plans)


# --- what a step holds ------------------------------------------------------------------------------------------------


@pytest.mark.trap(45)
def test_micro_steps_are_planned_for_with_gradients(monkeypatch):
    """Later micro-steps hold gradients. Once the optimizer has stepped, plans count its state."""
    monkeypatch.setattr("gc.get_objects", None)  # walking all objects breaks other threads
    model = model_of("llama", layers=LAYERS)
    optimizer = torch.optim.AdamW(model.parameters())
    budgeted(model, 2 * half())
    for number in range(48):
        forward_and_backward(model)
        if number % 12 == 11:
            optimizer.step()
            optimizer.zero_grad()
    assert not current(model).is_provisional
    assert current(model).batch.has_gradients
    assert always_held(model) >= sum(value.nbytes for state in optimizer.state.values() for value in state.values())


def always_held(model):
    return dict(current(model).plan.prediction.parts)["weights and optimizer state"]


@pytest.mark.trap(29)
def test_when_an_optimizer_gets_a_state_the_step_under_full_is_measured_again():
    model, _ = trained(0, 2 * half())
    run(model, [BATCH] * PLANNED, torch.optim.SGD(model.parameters(), lr=0.0))
    for _ in range(3):  # without a state, as in loops that make an optimizer for each step
        assert set(run(model, [BATCH], torch.optim.SGD(model.parameters(), lr=0.0))[0]) != {FULL}
    plans = run(model, [BATCH] * 5, torch.optim.AdamW(model.parameters(), lr=0.0))
    assert set(plans[1]) == set(plans[2]) == {FULL} != set(plans[-1])  # its forwards, and then its backwards
    assert always_held(model) > 3 * sum(parameter.nbytes for parameter in model.parameters())


def test_a_second_forward_in_a_step_that_tries_something_runs_under_full():
    """As in DPO: what is timed has room beside one forward only."""
    model, _ = trained(2)
    first = model(**without_cache(model, BATCH)).loss
    assert actions(model) != {FULL}
    second = model(**without_cache(model, BATCH)).loss
    assert actions(model) == {FULL}
    assert hf_ckpt.describe(model).measuring == "measuring (paused)"
    (first + second).backward()


@pytest.mark.compat
@pytest.mark.parametrize("whole", [True, False])
def test_a_stack_is_planned_for_where_the_hooks_of_the_model_are_skipped(whole):
    """Calling `forward` skips them, so those of the stack choose the plan of their forward; the model may be a stack.

    No cache is built in a recomputed forward.
    """
    model = model_of(layers=LAYERS) if whole else model_of(layers=LAYERS).model
    budgeted(model, "1GiB")
    for number in range(PLANNED):
        outputs = (model.forward if whole else model)(input_ids=BATCH["input_ids"], use_cache=True)
        assert number > 3 or cache_argument(model) not in outputs
        outputs[0].square().mean().backward()
        model.zero_grad()
    assert current(model).phase is Phase.PLAN
    assert min(hf_ckpt.describe(model).recomputed.values()) > 1


def test_a_block_that_never_ran_is_planned_for_as_full():
    model = model_of("llama", layers=LAYERS)
    model.config.num_hidden_layers -= 1
    budgeted(model, 2 * half())
    plan = run(model, [BATCH] * PLANNED)[-1]
    assert plan[-1] == FULL
    assert {"keep", "full"} in raced(model)


# --- limits -----------------------------------------------------------------------------------------------------------


def grows(module, args, output):
    """A feed-forward that holds much more for its backward from some step on."""
    for _ in range(40):
        output = output.exp().log()
    return output


def test_a_plan_that_needs_more_than_predicted_lowers_the_limit_for_good(caplog):
    """Even the recomputation of one block exceeds this budget now, so that whichever plan wins does."""
    caplog.set_level("INFO", logger="hf_ckpt")
    model, _ = trained(3)  # all trials have run by now
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(grows)
    run(model, [BATCH] * PLANNED)
    assert current(model).of_batch.limit_bytes < half()
    assert "more than was predicted" in caplog.text
    run(model, [BATCH] * PLANNED)
    assert current(model).phase is Phase.PLAN
    assert current(model).of_batch.limit_bytes < half()


@pytest.mark.parametrize(("again", "shorter"), [(False, ()), (True, ()), (False, (36, 44, 52))])
def test_a_later_step_above_the_budget_voids_its_plan(again, shorter, capsys, monkeypatch):
    """Whatever has changed: here an attribute that a block reads. On a CPU every n-th step is a check step.

    If the next check finds it `again`, as measured steps do not show it, the limit is lowered. A plan that follows from
    `shorter` batches has no check of its own before the change.
    """
    monkeypatch.setattr(recorder, "DeviceClock", OperationClock)  # no plan depends on how busy the machine is
    model = model_of("llama", layers=LAYERS)

    def holds_more(module, args, output):
        """A feed-forward that may hold more for its backward."""
        is_later = installation(model).session.measured_bytes is not None
        for _ in range(model.config.more if is_later or not again else 0):
            output = output.exp().log1p()
        return output

    for layer in model.model.layers:
        layer.mlp.register_forward_hook(holds_more)
    model.config.more = 0
    budgeted(model, half(), check_every=4)
    for tokens in shorter:
        run(model, [tiny_batch("llama", batch=4, tokens=tokens)] * 9)
    run(model, [BATCH] * (2 if shorter else PLANNED))
    assert (hf_ckpt.describe(model).measured_bytes is None) == bool(shorter)
    model.config.more = 5 if again else 8
    peaks = [live_peak(model, BATCH) for _ in range(20)]
    assert max(peaks[:4]) > half() >= max(peaks[-3:])
    described = hf_ckpt.describe(model)
    assert described.voided == 1
    assert "measured again: 1 time, because a step under its plan exceeded the budget" in str(described)
    said = re.findall(r"a step of 4 x 64 tokens needed .*B, above the budget of .*B; .*", capsys.readouterr().err)
    assert [line.split("; ")[1] for line in said] == ["steps are measured again"]
    assert (current(model).of_batch.limit_bytes < half()) == again


@pytest.mark.long
def test_two_backwards_that_need_more_than_the_budget_void_their_plan():
    """The peak of such a step tells it from others."""
    model = model_of("llama")
    budgeted(model, half(layers=6), check_every=4)
    run(model, [BATCH] * PLANNED)
    budget = current(model).of_batch.measured_bytes
    limits = installation(model).session.planning.budget
    limits.bytes = limits.limit_bytes = budget  # whichever plan was the fastest has no room left
    peaks = []
    for _ in range(9):
        with LiveBytes(model, BATCH) as live:
            retained(model(**without_cache(model, BATCH)).loss)
        model.zero_grad(set_to_none=True)
        peaks.append(live.peak_bytes)
    assert max(peaks[:4]) > budget >= max(peaks[-3:])
    assert hf_ckpt.describe(model).voided == 1


def test_errors_of_the_user_end_no_planning():
    """Nor does a `verify` in steps now and then; in each of them, it is said that nothing can be measured."""
    loop = Loop()
    for _ in range(MOST_FAILURES):
        fails(loop, "forward")
    for _ in range(STEPS + 1):
        loop.step()
    assert loop.has_plan


def test_a_measurement_that_each_step_interrupts_is_given_up_until_the_model_changes(caplog):
    loop = Loop()
    for _ in range(MOST_FAILURES + 1):
        loss = loop.loss()
        hf_ckpt.verify(loop.model, loop.batch, "full")
        loss.backward()
        loop.clear()
    assert caplog.text.count("cannot be measured") == 1
    assert current(loop.model).phase is Phase.GIVEN_UP
    for number in range(STEPS + 2):
        loop.step() if number else freezes(loop)
    assert loop.has_plan


def test_the_plan_of_steps_with_two_backwards_holds_the_budget(monkeypatch):
    """The graph is held until the second one. Its gradients are those of no checkpointing."""
    monkeypatch.setattr(recorder, "DeviceClock", OperationClock)  # no plan depends on how busy the machine is
    plain, model = model_of("llama", layers=LAYERS), model_of("llama", layers=LAYERS)
    budgeted(model, half(), check_every=0)
    retained(plain(**without_cache(plain, BATCH)).loss)
    phases = []
    for _ in range(PLANNED + 1):
        with LiveBytes(model, BATCH) as live:
            retained(model(**without_cache(model, BATCH)).loss)
        assert live.peak_bytes <= half()
        assert_same(gradients(plain), gradients(model))
        model.zero_grad(set_to_none=True)
        phases.append(current(model).phase)
    assert phases[-1] is Phase.PLAN
    assert hf_ckpt.describe(model).voided == 0
    assert min(hf_ckpt.describe(model).recomputed.values()) > 2 * PLANNED


@pytest.mark.parametrize("turn", [1, 5, 20])
def test_sorts_of_steps_that_take_long_turns_have_one_plan(turn):
    """Expectations change with the turns only a few times, however many there are."""
    loop = Loop()
    forward = StepForwards().read(loop.model, None, (), loop.batch)
    forwards = StepForwards()
    changes = 0
    for number in range(40 * turn):
        before = forwards.begin(forward, False, (None, 0))
        if number // turn % 2:
            forwards.current.append(forward)
        forwards.learn()
        changes += forwards.begin(forward, False, (None, 0)) != before
    assert changes <= 9
    assert len(before) == 2


class Meter:
    """An accelerator's allocator, which a CPU does not have. It holds nothing."""

    peak_bytes = 0

    def read(self):
        return 0, self.peak_bytes

    look = read


def with_meter(model):
    """Give the session of a model an allocator's peak, and return that."""
    meter = installation(model).session.planning.budget.watch._meter = Meter()
    run(model, [BATCH] * 2)
    return meter


@pytest.mark.parametrize("joined", [False, True])
def test_a_step_above_the_budget_whose_blocks_save_nothing_goes_on(joined):
    """No plan needs less, also not if two forwards have one backward."""
    model = model_of("llama", layers=2)
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    budgeted(model, half())
    run(model, [BATCH] * 2)
    meter = with_meter(model)
    meter.peak_bytes = 2 * half()
    losses = [model(**without_cache(model, BATCH)).loss for _ in range(1 + joined)]
    sum(losses).backward()
    model.zero_grad(set_to_none=True)
    run(model, [BATCH] * 3)
    assert hf_ckpt.describe(model).voided == 0
    assert actions(model) == {KEEP}


@pytest.mark.parametrize("evaluates", [False, True])
def test_memory_that_runs_out_above_the_budget_is_planned_for_once(evaluates, capsys):
    """By the guard, also if an evaluation in the step that failed has shown that its plan is above the budget."""
    model, _ = trained(PLANNED, layers=2)
    meter = with_meter(model)
    guard = OomGuard(model)

    def step():
        if not guard.attempts:
            if not evaluates:
                model(**without_cache(model, BATCH))
            meter.peak_bytes = 2 * half()
            with torch.no_grad():
                run_out(model(**BATCH) if evaluates else None)
        meter.peak_bytes = 0
        forward_and_backward(model)

    guard(step)
    assert [change.startswith("plans for at most ") for change in guard.taken] == [True]
    assert (current(model).phase is Phase.MEASURE) == evaluates
    assert capsys.readouterr().err.count("above the budget") == hf_ckpt.describe(model).voided == evaluates


def with_layer_drop(share):
    """A model that skips blocks at random in training."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "word_embed_proj_dim": 128, "ffn_dim": 256, "num_hidden_layers": 6}
    config = transformers.OPTConfig(vocab_size=320, num_attention_heads=4, dropout=0.0, layerdrop=share, **sizes)
    config._attn_implementation = "sdpa"
    return transformers.OPTForCausalLM(config).train()


def gradients_of(model, seed):
    """The gradients of the parameters that a step uses."""
    torch.manual_seed(seed)
    forward_and_backward(model)
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.long
def test_steps_that_skip_blocks_at_random_are_planned_for_as_if_they_skipped_none():
    """LayerDrop. Gradients are those of no checkpointing in each step."""
    peaks = []
    for policy in ("full", "none"):
        model = with_layer_drop(0.0)
        planned(model, policy)
        peaks.append(live_peak(model, BATCH))
    plain, model = with_layer_drop(0.25), with_layer_drop(0.25)
    expected = [gradients_of(plain, seed) for seed in range(PLANNED)]
    calls = [sum(name.endswith("fc1.weight") for name in step) for step in expected]
    assert min(calls) < 6 == max(calls)
    budgeted(model, sum(peaks) // 2)
    for seed in range(PLANNED):
        assert_same(expected[seed], gradients_of(model, seed))
    described = hf_ckpt.describe(model)
    assert (described.measuring, described.voided) == (None, 0)
    assert sum(described.recomputed.values()) > 0
    model.model.decoder.layerdrop = 0.0
    real = live_peak(model, BATCH)
    assert real <= sum(peaks) // 2
    assert described.plan.prediction.peak_bytes == pytest.approx(real, rel=0.002)


def test_a_budget_below_the_weights_is_refused_at_once():
    with pytest.raises(InfeasibleError, match=r"no plan fits into 100\.00 KiB: the model and the state of its"):
        trained(1, "100KiB")


@pytest.mark.parametrize("quiet", [False, True])
def test_a_run_says_that_it_measures_and_what_it_planned(quiet, capsys, monkeypatch):
    """On stderr, unless someone sets a level or logs it; and only on the first rank."""
    logger = logging.getLogger("hf_ckpt")
    monkeypatch.setattr(logger, "level", logging.WARNING if quiet else logging.NOTSET)
    trained(PLANNED)
    said = capsys.readouterr().err
    parts = ["planned in the first steps", "measuring the first steps", "planned for 4 x 64 tokens (`budget`): "]
    assert [said.count(part) for part in parts] == [0 if quiet else 1] * 3
    monkeypatch.setenv("RANK", "1")
    trained(2)
    assert not capsys.readouterr().err


def test_a_budget_above_the_memory_is_said(caplog):
    trained(1, "900TiB")
    assert "the budget of 900.00 TiB exceeds the device's memory, " in caplog.text


@pytest.mark.trap(38)
@pytest.mark.parametrize("peak", ["blocks", "one sequence", "optimizer"])
def test_where_no_plan_fits_the_run_goes_on_with_the_least(peak, caplog):
    """If the optimizer's step is the peak, nothing is recomputed in vain. What would lower the peak is said."""
    model = model_of("llama", layers=LAYERS)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    if peak != "optimizer":
        batch = BATCH if peak == "blocks" else tiny_batch("llama", batch=1, tokens=256)
        budgeted(model, 2 * weights + 1000)
        run(model, [batch] * PLANNED)
    else:  # weights, gradients and two moments; the step needs temporary bytes, too
        budgeted(model, 4 * weights)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        run(model, [tiny_batch("llama", batch=1, tokens=4)] * (PLANNED + 1), optimizer)
        assert {"keep"} in raced(model)
        assert len(raced(model)) == 4  # simple plans that need no more than the first one
        assert "(no plan fits)" in str(hf_ckpt.describe(model))
    assert current(model).is_over
    (said,) = [record.message for record in caplog.records if "no plan fits" in record.message]
    assert ("and the optimizer alone need" in said) == (peak == "optimizer")
    assert ("a smaller batch" in said) == (peak == "blocks")
    assert "`host_budget`" not in said  # a CPU has none
    assert re.search(r"no plan fits into .*iB \(\d x \d+ tokens\)\. ", said)


def loss_of_call(model, batch):
    return model(**without_cache(model, batch)).loss


def loss_of_weight(model, batch):
    """As TRL computes it."""
    hidden = model.model(batch["input_ids"], use_cache=False).last_hidden_state
    logits = hidden[:, :-1] @ model.lm_head.weight.T
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch["labels"][:, 1:].flatten())


HEADS = {
    "called": (loss_of_call, "whole", 40),
    "it is never called": (loss_of_weight, "whole", 40),
    "few tokens": (loss_of_call, "whole", 10),
    "in chunks": (loss_of_call, 4, 40),
}


@pytest.mark.trap(12)
@pytest.mark.parametrize("kind", HEADS)
def test_a_head_in_chunks_is_advised_where_it_lowers_the_peak(kind, caplog):
    loss_of, head, tokens = HEADS[kind]
    model, batch = tiny_model("llama", layers=1, vocab_size=2000), tiny_batch("llama", batch=16, tokens=tokens)
    planned(model, {"policy": "budget", "budget": "1MiB", "head": head})
    for _ in range(PLANNED):
        loss_of(model, batch).backward()
        model.zero_grad(set_to_none=True)
    (said,) = [record.message for record in caplog.records if "no plan fits" in record.message]
    assert ("the head and its loss are the peak" in said) == (head == "whole")
    assert ('"head": "auto"' in said) == (kind == "called")


# --- a count of live bytes ends with its step -------------------------------------------------------------------------


def test_nothing_is_measured_while_the_plan_is_off():
    """Disabling, pausing or uninstalling during measurement leaves no hook and no dispatch mode."""
    model = model_of("llama", layers=LAYERS)
    before = snapshot(model)
    budgeted(model, half())
    run(model, [BATCH])
    output = model(**without_cache(model, BATCH))
    assert dispatch_modes()
    with hf_ckpt.paused(model):
        assert not dispatch_modes()
        run(model, [BATCH])
    del output
    run(model, [BATCH])
    getattr(model, compat.transformers.DISABLE_NAMES[-1])()
    assert not dispatch_modes()
    enable(model, {"policy": "budget", "budget": half()})
    run(model, [BATCH])
    hf_ckpt.uninstall(model)
    assert not dispatch_modes()
    assert snapshot(model) == before


def test_models_are_copied_and_pickled_while_a_step_is_measured():
    model, _ = trained(1)
    output = model(**without_cache(model, BATCH))
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    output.loss.backward()
    expected = gradients(model)
    for copied in copies:
        assert installation(copied).session is None
        assert "measures the first training steps" in hf_ckpt.describe(copied).measuring
        copied.zero_grad(set_to_none=True)
        forward_and_backward(copied)
        assert_same(expected, gradients(copied))
        hf_ckpt.uninstall(copied)


def test_a_count_holds_no_model_and_ends_with_it():
    """A model that is deleted in the middle of a measured step, by an interrupt, for example."""
    loop = Loop()

    def interrupt(*_):
        raise KeyboardInterrupt

    loop.model.get_input_embeddings().register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        loop.loss()
    assert dispatch_modes()
    del loop
    gc.collect()
    assert not dispatch_modes()


def interrupt(*args):
    raise KeyboardInterrupt


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_a_count_ends_with_the_next_step_although_the_traceback_of_an_interrupted_one_is_kept(place):
    """As in a notebook after Ctrl-C. torch runs no hook then, and the traceback keeps the graph."""
    model = model_of("llama", layers=2)
    budgeted(model, 1 << 30)
    layer = model.model.layers[1]
    raises = layer.register_forward_hook(interrupt)
    if place == "backward":
        raises.remove()
        raises = layer.mlp.up_proj.weight.register_hook(interrupt)
    with pytest.raises(KeyboardInterrupt) as kept:
        forward_and_backward(model)
    raises.remove()
    assert kept.tb
    run(model, [BATCH] * PLANNED)
    assert not dispatch_modes()
    assert {"keep"} in raced(model)


def test_a_forward_joins_no_step_that_an_interrupt_has_ended():
    """Without a traceback, the calls of the forward get the addresses of those that are gone."""
    model = model_of("llama", layers=2)
    budgeted(model, 1 << 30)
    raises = model.model.norm.register_forward_pre_hook(interrupt)
    with contextlib.suppress(KeyboardInterrupt):
        forward_and_backward(model)
    raises.remove()
    run(model, [BATCH] * 2)
    assert len(current(model).batch.forwards) == 1


def test_an_interrupt_in_the_forward_of_a_block_ends_the_count_at_once():
    """Although the traceback is kept, in each measured step, under each action that has a function."""
    model = model_of("llama", layers=2)
    budgeted(model, half(layers=2))
    counted = []
    kept = []

    def interrupt_and_note(*args):
        counted.append(bool(dispatch_modes()))
        raise KeyboardInterrupt

    for _ in range(4):
        raises = model.model.layers[0].mlp.register_forward_pre_hook(interrupt_and_note)
        with pytest.raises(KeyboardInterrupt) as interrupted:
            forward_and_backward(model)
        kept.append(interrupted)
        raises.remove()
        assert not dispatch_modes()
        run(model, [BATCH])
    assert sum(counted) >= 2


def interrupt_once(places, place, monkeypatch):
    """Raise KeyboardInterrupt once in a place of a step: a hook's handle is removed at once."""
    if isinstance(place, int):  # in the middle of an operation, as most do
        left = iter(range(place))
        count = LiveBytes._count_all

        def counts_and_raises(self, result):
            if next(left, None) is None:
                monkeypatch.undo()
                raise KeyboardInterrupt
            count(self, result)

        monkeypatch.setattr(LiveBytes, "_count_all", counts_and_raises)
        return

    def raises(*_):
        handle.remove()
        raise KeyboardInterrupt

    handle = places[place](raises)


PLACES = {
    "embedding": lambda model: model.get_input_embeddings().register_forward_hook,
    "between blocks": lambda model: model.model.layers[1].register_forward_pre_hook,
    "norm": lambda model: model.model.norm.register_forward_hook,
    "head": lambda model: model.lm_head.register_forward_hook,
    "backward of a block": lambda model: model.model.layers[0].mlp.up_proj.weight.register_hook,
    "backward of the embedding": lambda model: model.get_input_embeddings().weight.register_hook,
}


FOLLOWING = ["evaluation", "another model", "training", "uninstall", "del"]
ENDS = [
    pytest.param(place, following, marks=() if following == "another model" or place == 3 else pytest.mark.thorough)
    for place, following in itertools.product([*PLACES, "optimizer", 3, 150, 250, 420], FOLLOWING)
]


@pytest.mark.parametrize(("place", "following"), ENDS)
def test_an_interrupt_outside_of_blocks_ends_the_count_with_the_next_operation(place, following, monkeypatch):
    """Although its traceback, and the loss, are kept. A place that is a number is the operation that is interrupted."""
    model = model_of("llama", layers=2)
    budgeted(model, 1 << 30)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    places = {name: register(model) for name, register in PLACES.items()}
    places["optimizer"] = optimizer.register_step_post_hook
    interrupt_once(places, place, monkeypatch)
    kept = []

    def train():
        kept.append(model(**without_cache(model, BATCH)).loss)
        kept[-1].backward()
        optimizer.step()
        torch.zeros(1)

    with pytest.raises(KeyboardInterrupt) as interrupted:
        train()
    if following == "evaluation":
        with torch.no_grad():
            model.eval()(**BATCH)
    elif following == "another model":
        torch.nn.Linear(2, 2)(torch.zeros(2))
    elif following == "training":
        optimizer.zero_grad()
        run(model, [BATCH] * 3, optimizer)
        assert current(model).phase is Phase.TIME
    elif following == "uninstall":
        hf_ckpt.uninstall(model)
    else:
        del model, places, optimizer, kept[:], interrupted
        gc.collect()
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0).step()  # that of another model
    assert not dispatch_modes()
    assert sys.getprofile() is None


@pytest.mark.parametrize("steps", range(4))
def test_a_measured_step_that_keeps_its_graph_is_freed_with_its_loss(steps):
    model = model_of("llama", layers=2)
    budgeted(model, 1 << 30)
    run(model, [BATCH] * steps)
    given = []

    def see(module, args):
        given.append(StorageWeakRef(args[0].untyped_storage()))

    model.model.layers[1].register_forward_pre_hook(see)
    loss = model(**without_cache(model, BATCH)).loss
    loss.backward(retain_graph=True)
    assert not given[0].expired()
    del loss
    hf_ckpt.uninstall(model)
    del model
    gc.collect()
    assert all(each.expired() for each in given)
