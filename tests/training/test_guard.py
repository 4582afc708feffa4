"""The guard retries steps that run out of memory with plans that need less, and the training goes on as if nothing had
happened. Errors are artificial; results are compared bit by bit, and operations and attempts are counted."""

import contextlib
import copy
import functools
import json
import random
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest
import torch
from accelerate.utils.memory import should_reduce_batch_size
from helpers.adapters import with_lora
from helpers.custom import custom_loss, model_of_averages, moving_average
from helpers.failing import MESSAGE, Failing, run_out, train
from helpers.sparing import sparing
from helpers.steps import assert_same, enable, gradients, planned, without_cache
from helpers.tables import keyed, table
from helpers.trainers import FLAG, trainer
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import hf_ckpt
from hf_ckpt import __main__, compat
from hf_ckpt.attach.record import installation
from hf_ckpt.errors import HfCkptError, NoBlocksError, OutOfPlansError
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.models.tiny import TINY_FAMILIES, tiny_batch, tiny_model
from hf_ckpt.planner.policies import tighter_plan
from hf_ckpt.spec.actions import COMPILED, Action
from hf_ckpt.spec.actions import SAVE_CLASSES as SAVE
from hf_ckpt.spec.plan import Block, Plan
from hf_ckpt.training import guard as guarding
from hf_ckpt.training.guard import OomGuard, tighten
from hf_ckpt.training.out_of_memory import REPORT_FILE

SELECTIVE, FULL, OFFLOAD = "selective (save linear, attention)", "full", "offload"
HEAD = "the head in chunks"
FINE = contextlib.nullcontext()


@pytest.fixture(autouse=True)
def host_memory(monkeypatch):
    """Pretend that the CPU has host memory: these tests check only that plans offload."""
    monkeypatch.setattr(guarding, "lane_of", lambda device: device)


class FailingAllocator(TorchDispatchMode):
    """Counts operations and how often it was entered, and runs out of memory at some operations."""

    def __init__(self, *at):
        super().__init__()
        self.at, self.operations, self.runs = set(at), 0, 0

    def __enter__(self):
        self.runs += 1
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations += 1
        if self.operations - 1 in self.at:
            run_out()
        return func(*args, **(kwargs or {}))


def forward_and_backward(model, batch):
    """A micro-step that draws from every source of random numbers."""
    scale = 1 + 0.01 * (random.random() + float(numpy.random.rand()) + float(torch.rand(())))
    loss = model(**without_cache(model, batch)).loss * scale / 2
    loss.backward()
    return loss.detach()


def seed():
    """Seed every source of random numbers."""
    random.seed(3)
    numpy.random.seed(3)
    torch.manual_seed(3)


def two_micro_steps(model, guard=None, at=(), family="llama"):
    """Losses and gradients, random draws after them, and the count of what ran; the operations `at` fail."""
    model.zero_grad()
    seed()
    allocator = FailingAllocator(*at)

    def step(*args):
        with allocator:  # not around the guard
            return forward_and_backward(*args)

    batches = [(model, tiny_batch(family, seed=number)) for number in range(2)]
    losses = [step(*batch) if guard is None else guard(step, *batch) for batch in batches]
    draws = random.random(), float(numpy.random.rand()), float(torch.rand(()))
    return {"loss": torch.stack(losses), **gradients(model)}, draws, allocator


def actions(model):
    return {str(action) for _, action in hf_ckpt.describe(model).plan.actions}


# --- retries ----------------------------------------------------------------------------------------------------------

STRIDE = {"llama": 29, "gpt2": 41, "bert": 41, "t5": 101}
"""Operations between tested points: a prime, so that all kinds of operations are tested."""


@pytest.mark.trap(28)
@pytest.mark.long
@sparing("family", TINY_FAMILIES, "llama", "bert")
def test_the_guard_survives_a_failure_at_any_point_of_a_step(family):
    """In the second micro-step, the first one runs again, too."""
    expected, drawn, _ = two_micro_steps(tiny_model(family, layers=2, dropout=0.1), family=family)
    model = planned(tiny_model(family, layers=2, dropout=0.1), {"policy": "selective", "check_every": 0})
    two_micro_steps(model, family=family)  # create what is made once per process
    operations = two_micro_steps(model, OomGuard(model), family=family)[2].operations
    runs = []
    for at in [*range(0, operations, STRIDE[family]), operations - 1]:
        hf_ckpt.install(model, "selective")
        guard = OomGuard(model)
        found, later, allocator = two_micro_steps(model, guard, [at], family)
        assert_same(expected, found, f"out of memory at operation {at} of {operations}")
        assert later == drawn, at
        assert (guard.attempts, guard.taken) == (1, [FULL]), at
        assert actions(model) == {"full"}
        assert set(hf_ckpt.describe(model).recomputed.values()) <= {1, 2}
        runs.append(allocator.runs)
    assert set(runs) == {3, 4}
    assert min(runs.count(3), runs.count(4)) > 5


@pytest.mark.parametrize(*keyed(table(__file__, "tightened.yaml"), "spec", "lora", "at"), ids=str)
def test_the_guard_tightens_any_plan(spec, lora, at):
    """Gradients stay bit-equal from any plan down to offloading."""
    models = [tiny_model("llama", layers=3, dropout=0.1) for _ in range(2)]
    plain, model = [with_lora(model, "llama") for model in models] if lora else models
    expected, drawn, _ = two_micro_steps(plain)
    if spec is not None:
        planned(model, spec)
    taken = []
    for points in at:
        guard = OomGuard(model, exact=True)
        found, later, _ = two_micro_steps(model, guard, points)
        assert_same(expected, found, f"{spec} at {points}")
        assert (later, guard.attempts) == (drawn, len(points))
        taken += guard.taken
    assert taken == [SELECTIVE, FULL, OFFLOAD][-len(taken) :]
    assert actions(model) == {"offload"}
    assert min(hf_ckpt.describe(model).recomputed.values()) > 0


def test_nothing_of_a_failed_attempt_is_held():
    model, batch = tiny_model("llama", layers=8), tiny_batch("llama", tokens=128, batch=4)
    guard = OomGuard(model)
    at_start, peak = [], []

    def step(live):
        at_start.append(live.current_bytes)
        loss = model(**without_cache(model, batch)).loss
        peak.append(live.current_bytes)
        if len(at_start) < 3:
            run_out()
        loss.backward()

    with LiveBytes(model) as live:
        guard(step, live)
    assert guard.taken == [SELECTIVE, FULL]
    assert max(at_start) - min(at_start) < 0.01 * (peak[0] - at_start[0]), (at_start, peak)


def counts(block, hidden, shift):
    """Counts in attributes of the block, of a linear layer in it and of its model, and in a list and a tensor."""
    model = block.model()
    block.calls += 1
    block.one.calls = getattr(block.one, "calls", 0) + 1
    model.calls += 1
    block.log.append(model.calls)
    block.load = block.load + hidden.detach().mean()
    return moving_average(block, hidden * (block.calls + block.one.calls + len(block.log) + block.load), shift)


def model_that_counts():
    model = model_of_averages()
    model.calls = 0
    for block in model.layers:
        block.calls, block.log, block.load, block.work, block.model = 0, [], torch.zeros(()), counts, weakref.ref(model)
    return model


@pytest.mark.parametrize("make", [model_of_averages, model_that_counts])
def test_a_retry_begins_with_the_buffers_and_attributes_that_a_step_replaced(make):
    found = []
    for failing in ([], [True]):
        model = make()
        guard, attempts = OomGuard(model), len(failing)

        def step(number, model=model, failing=failing):
            loss = custom_loss(model, number)
            if failing:
                run_out(failing.clear())
            loss.backward()

        for number in range(2):
            guard(step, number)
        counted = [getattr(module, "calls", 0) for module in model.modules()]
        logged = [len(getattr(block, "log", [])) for block in model.layers]
        counts = {"counts": torch.tensor([*counted, *logged])}
        found.append({"loss": None, **gradients(model), **dict(model.named_buffers()), **counts})
        assert guard.attempts == attempts
    assert_same(*found)
    assert sum(hf_ckpt.describe(model).recomputed.values()) > 0


def test_only_buffers_that_change_are_copied_for_every_micro_step():
    """Codes of quantised weights never; other large ones before the first micro-step, and small ones before all."""
    model, mebi = model_of_averages(), 2**20
    model.register_buffer("codes", torch.zeros(4 * mebi, dtype=torch.uint8))
    model.layers[0].register_buffer("table", torch.zeros(mebi))
    guard, held = OomGuard(model), []

    def step(number):
        custom_loss(model, number).backward()
        held.append(live.current_bytes)

    with LiveBytes(model) as live:
        for number in range(6):
            guard(step, number)
    copied = [guard._steps[number][1].before.stored for number in range(6)]
    assert [sum(each.values is not None and each.values.nbytes > mebi for each in state) for state in copied] == [1] + [
        0
    ] * 5
    assert max(held) - live.start_bytes < 5 * mebi
    with pytest.raises(OutOfPlansError, match="`codes` was overwritten, and has no copy"):
        guard(lambda: run_out(model.codes.add_(1)))


def until_planned(model, batch):
    """Train until nothing is left to measure."""
    for _ in range(40):
        forward_and_backward(model, batch)
        model.zero_grad(set_to_none=True)
        if installation(model).measuring is None:
            return
    raise AssertionError("still measuring")


def under_budget(policy, *, trained=True):
    """A model under a planned policy, its batch, and a copy without hf_ckpt."""
    model, batch = tiny_model("llama", layers=3, dropout=0.1), tiny_batch("llama", tokens=64, batch=4)
    reference = copy.deepcopy(model)
    planned(model, {"policy": policy, **({"budget": "1GiB"} if policy == "budget" else {})})
    if trained:
        until_planned(model, batch)
    return model, batch, reference


@pytest.mark.parametrize("policy", ["budget", pytest.param("auto", marks=pytest.mark.long)])
def test_a_planned_policy_plans_again_for_less(policy):
    model, batch, reference = under_budget(policy)
    guard, peaks = OomGuard(model, exact=True), []
    session = installation(model).session

    def step(*args):
        forward_and_backward(*args)
        peaks.append(hf_ckpt.describe(model).plan.prediction.peak_bytes)
        if peaks[-1] > 0.75 * peaks[0]:
            run_out()

    seed()
    guard(step, model, batch)
    assert (len(peaks), peaks[-1] <= 0.81 * peaks[0]) == (1 + guard.attempts, True)
    assert peaks == sorted(peaks, reverse=True)
    assert [change.startswith("plans for at most ") for change in guard.taken] == [True] * guard.attempts
    seed()
    forward_and_backward(reference, batch)
    assert_same(gradients(reference), gradients(model))
    assert sum(hf_ckpt.describe(model).recomputed.values()) > 0
    until_planned(model, batch)
    assert hf_ckpt.describe(model).plan.prediction.peak_bytes <= 0.9 * peaks[-2]  # the rest of the run, too
    assert installation(model).session is session


@pytest.mark.long
def test_no_plan_of_a_budget_is_left_at_the_end():
    model, batch, _ = under_budget("budget")
    guard = OomGuard(model, exact=True)
    with pytest.raises(OutOfPlansError, match="no tighter plan"):
        guard(lambda: (forward_and_backward(model, batch), run_out()))
    assert 3 < guard.attempts < 20
    assert guard.taken[-1] == OFFLOAD


@pytest.mark.parametrize(
    ("failing", "taken"),
    [
        ({0}, ["fewer trials"]),
        ({1}, ["no trials"]),
        ({0, 2}, ["fewer trials", "no trials"]),
    ],
    ids=str,
)
def test_memory_that_runs_out_in_trials_ends_no_budget(failing, taken):
    """The step is repeated with fewer trials or none, and steps are still measured and planned for."""
    model, batch, reference = under_budget("budget", trained=False)
    guard = OomGuard(model)
    attempts = iter(range(100))

    def step():
        forward_and_backward(model, batch)
        if next(attempts) in failing:
            run_out()

    for _ in range(4):
        model.zero_grad(set_to_none=True)
        guard(step)
    until_planned(model, batch)
    seed()
    forward_and_backward(model, batch)
    seed()
    forward_and_backward(reference, batch)
    assert_same(gradients(reference), gradients(model))
    description = hf_ckpt.describe(model)
    assert [" ".join(change.split()[:2]) for change in guard.taken] == taken
    assert (description.spec["policy"], description.measuring, description.plan.head) == ("budget", None, "whole")
    assert not installation(model).session.planned.is_over


def test_a_planned_policy_goes_on_with_the_next_plan_while_it_measures():
    """The plan that ran is tightened, and stays for batches of every size."""
    model, batch, reference = under_budget("budget", trained=False)
    guard, plans = OomGuard(model, exact=True), []

    def step(*args):
        forward_and_backward(*args)
        plans.append(hf_ckpt.describe(model).plan)
        if len(plans) < 3:
            run_out()

    seed()
    guard(step, model, batch)
    assert guard.taken[0] == "fewer trials of other actions"
    assert plans[2].actions == tighter_plan(plans[1], chunks=False)[0].actions
    assert installation(model).session is None
    seed()
    forward_and_backward(reference, batch)
    assert_same(gradients(reference), gradients(model))
    assert sum(hf_ckpt.describe(model).recomputed.values()) > 0
    forward_and_backward(model, tiny_batch("llama", tokens=96, batch=4))
    assert hf_ckpt.describe(model).plan == plans[2]


# --- Trainers ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """History and weights of a training that never runs out of memory."""
    return train(tmp_path_factory.mktemp("plain"))[1:]


def test_a_trainer_goes_on_as_if_nothing_had_happened(tmp_path, undisturbed):
    history, weights = undisturbed
    trainer, found, others = train(tmp_path, hf_ckpt.OomGuardMixin, at=(1, 4, 7))
    assert found == history
    assert_same({"loss": None, **weights}, {"loss": None, **others})
    assert (trainer.oom_guard.attempts, trainer.oom_guard.taken) == (3, [SELECTIVE, FULL, HEAD])
    assert trainer.calls > 12 + 3 - 1  # 12 micro-steps, three of them retried, and the micro-steps before them
    assert min(hf_ckpt.describe(trainer.model).recomputed.values()) > 0


class RunsOutInEvaluation(Failing):
    """Its evaluations run out of memory with more than two rows."""

    rows = ()

    def prediction_step(self, model, inputs, *args, **kwargs):
        self.rows = (*self.rows, len(inputs["input_ids"]))
        if self.rows[-1] > 2:
            run_out()
        return super().prediction_step(model, inputs, *args, **kwargs)


WORKERS = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}


@pytest.mark.parametrize(
    ("mixins", "loading"),
    [
        pytest.param((hf_ckpt.OomGuardMixin,), {}, id="mixin"),
        pytest.param((), {}, id="command line"),
        pytest.param((hf_ckpt.OomGuardMixin,), WORKERS, id="persistent workers", marks=pytest.mark.long),
    ],
)
def test_an_evaluation_that_runs_out_is_run_again_with_smaller_batches(tmp_path, mixins, loading, caplog):
    """Random numbers of the training are those of a run whose evaluations fit."""
    found = []
    for rows, kind in ((2, Failing), (4, type("Guarded", (*mixins, RunsOutInEvaluation), {}))):
        model = tiny_model("llama", dropout=0.1)
        sizes = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 2, "per_device_eval_batch_size": rows}
        sizes |= loading
        run = trainer(tmp_path, model, kind=kind, evaluate=True, **{FLAG: False, f"{FLAG}_kwargs": None}, **sizes)
        with contextlib.nullcontext() if mixins else guarding.guard_trainers():
            run.train()
        losses = [{key: row[key] for key in row if key in ("loss", "eval_loss")} for row in run.state.log_history]
        found.append((losses, {"loss": None, **model.state_dict()}))
    assert found[0][0] == found[1][0]
    assert_same(found[0][1], found[1][1])
    assert run.rows == (4, 2, 2, 2, 2)  # of four rows
    assert not {"training_step", "evaluate", "_evaluate"} & vars(run).keys()
    assert (run.args.per_device_eval_batch_size, installation(model)) == (2, None)
    assert "out of memory in the evaluation" in (tmp_path / REPORT_FILE).read_text()


def test_the_guard_on_the_command_line(tmp_path, monkeypatch, undisturbed):
    script, out = tmp_path / "script.py", tmp_path / "found.json"
    script.write_text(
        "import json, sys\n"
        "from helpers.failing import train\n"
        "trainer, history, _ = train(sys.argv[1], at=(2,))\n"
        "open(sys.argv[2], 'w').write(json.dumps([trainer.oom_guard.attempts, trainer.oom_guard.taken, history]))\n"
    )
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert __main__.main(["--oom-guard", str(script), str(tmp_path), str(out)]) == 0
    assert json.loads(out.read_text()) == [1, [SELECTIVE], undisturbed[0]]


SCRIPT = """
import torch
from helpers.failing import Failing
from helpers.trainers import FLAG, Rows, trainer
from hf_ckpt.models.tiny import tiny_model

class OwnStep(Failing):
    at = (2,)

    def training_step(self, model, inputs, num_items_in_batch=None):  # like OnlineDPO of TRL
        loss = self.compute_loss(model.train(), self._prepare_inputs(inputs))
        self.accelerator.backward(loss)
        return loss.detach()

class NoBlocks(torch.nn.Linear):
    def forward(self, input_ids, **_):
        return {"loss": super().forward(input_ids.float()).mean()}

def train(model, **options):
    run = trainer("out", model, rows=Rows(tokens=12), **{FLAG: False, f"{FLAG}_kwargs": None}, **options)
    run.train()
    return run

"""


@pytest.mark.parametrize(
    ("line", "attempts", "said"),
    [
        ("trained = train(tiny_model('llama'), kind=OwnStep)", 1, []),
        ("trained = train(NoBlocks(12, 1))", None, ["the guard is off in this training: "]),
        ("trained = None", None, ["--oom-guard had no effect, because no Trainer"]),
    ],
    ids=["own step", "no blocks", "no Trainer"],
)
def test_a_script_is_guarded_or_told_why_not(tmp_path, monkeypatch, caplog, capsys, line, attempts, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    end = "print(getattr(getattr(trained, 'oom_guard', None), 'attempts', None))\n"
    (tmp_path / "script.py").write_text(f"{SCRIPT}{line}\n{end}")
    assert __main__.main(["--oom-guard", "script.py"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(attempts)
    warnings = [r.getMessage() for r in caplog.records if r.name.startswith("hf_ckpt") and r.levelname == "WARNING"]
    warnings = [text for text in warnings if "retrying the step" not in text]
    assert len(warnings) == len(said)
    assert all(part in text for part, text in zip(said, warnings, strict=True))


# --- what cannot be retried, and what is left alone -------------------------------------------------------------------


def test_the_guard_raises_out_of_plans_error():
    model, batch = tiny_model("llama", dropout=0.1), tiny_batch("llama")
    guard = OomGuard(model)
    with pytest.raises(OutOfPlansError, match="no tighter plan") as raised:
        guard(lambda: (forward_and_backward(model, batch), run_out()))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert should_reduce_batch_size(raised.value)  # accelerate can then reduce the batch size
    assert guard.taken == [SELECTIVE, FULL, HEAD, OFFLOAD]
    assert guard.attempts == 5  # without a plan, then with four
    guard(forward_and_backward, model, batch)  # the model can still train
    assert hf_ckpt.describe(model).watched is None  # no retry has room for a check
    assert min(hf_ckpt.describe(model).recomputed.values()) > 0


def test_other_errors_pass_and_leave_the_guard_usable():
    models = [tiny_model("llama", layers=2, dropout=0.1) for _ in range(2)]
    expected, _, _ = two_micro_steps(models[0])
    guard = OomGuard(models[1])

    def broken(*args):
        forward_and_backward(*args)
        raise ValueError("of the user's own")

    with pytest.raises(ValueError, match="of the user's own"):
        guard(broken, models[1], tiny_batch("llama"))
    assert guard.attempts == 0
    assert installation(models[1]) is None
    assert_same(expected, two_micro_steps(models[1], guard, [900])[0])
    assert guard.attempts == 1


def test_gradients_of_before_cannot_be_computed_again():
    model, batch = tiny_model("llama", layers=2), tiny_batch("llama")
    forward_and_backward(model, batch)
    before = gradients(model)
    with FailingAllocator(10), pytest.raises(OutOfPlansError, match="Gradients from before the guarded steps"):
        OomGuard(model)(forward_and_backward, model, batch)
    assert_same({"loss": None, **before}, {"loss": None, **gradients(model)})


@pytest.mark.parametrize("uses", [False, True])
@pytest.mark.parametrize("changes", [False, True])
def test_a_retry_needs_no_gradients_of_before_that_the_step_drops_without_using_them(uses, changes):
    """They are from outside of the guard, or of weights that have changed since."""
    found = []
    refused = pytest.raises(OutOfPlansError, match="needs gradients from before it, which cannot be computed again")
    for fails in (False, True):
        model = tiny_model("llama", layers=2)
        guard = OomGuard(model, exact=True)
        left = [fails]

        def step(model=model, left=left):
            norm = sum(parameter.grad.norm() for parameter in model.parameters())
            model.zero_grad()
            loss = model(**without_cache(model, tiny_batch("llama", seed=1))).loss
            (loss * norm if uses else loss).backward()
            if left.pop():
                run_out(left.append(False))

        first = functools.partial(forward_and_backward, model, tiny_batch("llama"))
        guard(first) if changes else first()
        with torch.no_grad():
            model.lm_head.weight.mul_(1.5 if changes else 1.0)
        with refused if uses and fails else FINE:
            guard(step)
        found.append({"loss": None, **gradients(model)})
        assert guard.attempts == fails
    if not uses:
        assert_same(*found)


@pytest.mark.parametrize("drops", ["first", "after the forward", "zeros", "never"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, functools.partial(torch.optim.AdamW, fused=True)])
@pytest.mark.parametrize("late", [False, True])
def test_a_retry_after_the_weights_have_changed(drops, kind, late):
    """A step that drops the gradients by itself is retried alone. Gradients that are kept cannot be computed again."""
    found, runs = [], []
    for fails in ([], [2]):
        model = tiny_model("llama", layers=2)
        optimizer, guard, left = kind(model.parameters(), lr=0.1), OomGuard(model, exact=True), list(fails)

        def step(number, model=model, optimizer=optimizer, left=left):
            runs.append(number)
            if drops in ("first", "zeros"):
                optimizer.zero_grad(set_to_none=drops == "first")
            loss = model(**without_cache(model, tiny_batch("llama", seed=number))).loss
            failing = number in left and not left.clear()
            if failing and not late:
                run_out()
            if drops == "after the forward":
                optimizer.zero_grad()
            loss.backward()
            if failing:
                run_out()

        refused = drops == "never" and fails
        for number in range(1, 3):
            with pytest.raises(OutOfPlansError, match="weights have changed") if refused and number == 2 else FINE:
                guard(step, number)
            optimizer.step()
        found.append({"loss": None, **gradients(model), **model.state_dict()})
        assert guard.attempts == len(fails)
    assert runs == [1, 2, 1, 2, 2]
    if drops != "never":
        assert_same(*found)


def test_a_step_that_drops_clipped_gradients_is_retried_alone():
    found, runs = [], []
    for fails in ([], [2, 3]):
        model = tiny_model("llama", layers=2)
        optimizer, guard, left = torch.optim.SGD(model.parameters(), lr=0.1), OomGuard(model, exact=True), list(fails)

        def step(number, model=model, optimizer=optimizer, left=left):
            runs.append(number)
            optimizer.zero_grad()
            loss = forward_and_backward(model, tiny_batch("llama", seed=number))
            if number in left:
                run_out(left.remove(number))
            return loss

        seed()
        for number in range(1, 4):
            guard(step, number)
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
        found.append({"loss": None, **gradients(model), **model.state_dict()})
        assert guard.attempts == len(fails)
    assert runs == [1, 2, 3, 1, 2, 2, 3, 3]
    assert_same(*found)


def test_a_step_in_which_a_fused_optimizer_has_stepped_is_not_retried():
    model = tiny_model("llama", layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step():
        forward_and_backward(model, tiny_batch("llama"))
        optimizer.step()
        run_out()

    with pytest.raises(OutOfPlansError, match="may have changed weights"):
        OomGuard(model)(step)


def test_a_second_thread_is_refused():
    guard = OomGuard(tiny_model("llama", layers=2))
    with ThreadPoolExecutor(1) as threads:
        with pytest.raises(HfCkptError, match="Another thread"):
            guard(lambda: threads.submit(guard, run_out).result())
        assert threads.submit(guard, lambda: 1).result() == 1
    assert guard.attempts == 0


@pytest.mark.parametrize("failing", [{1, 2}, {0, 1, 2}], ids=str)
def test_micro_steps_of_one_optimizer_step_run_out_one_after_the_other(failing):
    """The gradients that a retry has computed anew can be computed again, as those before it."""
    found = []
    for fails in (set(), failing):
        model = tiny_model("llama", layers=2, dropout=0.1)
        guard, attempts = OomGuard(model), len(fails)
        seed()
        left = set(fails)

        def step(number, model=model, left=left):
            at = [10] if number in left else []
            left.discard(number)
            with FailingAllocator(*at):
                return forward_and_backward(model, tiny_batch("llama", seed=number))

        losses = [guard(step, number) for number in range(3)]
        found.append({"loss": torch.stack(losses), **gradients(model)})
        assert (guard.attempts, len(guard._steps)) == (attempts, 3)
    assert_same(*found)


@pytest.mark.parametrize("kind", [torch.optim.SGD, functools.partial(torch.optim.AdamW, fused=True)])
def test_an_optimizer_inside_backward_is_noticed(kind):
    """Even fused ones, which do not mark weights as changed."""
    model, batch = tiny_model("llama", layers=2), tiny_batch("llama")
    for parameter in model.parameters():
        optimizer = kind([parameter], lr=0.1)

        def step_and_forget(parameter, optimizer=optimizer):
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step_and_forget)
    for _ in range(2):  # the first one creates optimizer state
        with FailingAllocator() as counted:
            forward_and_backward(model, batch)
    with FailingAllocator(counted.operations - 10), pytest.raises(OutOfPlansError, match="optimizer runs inside it"):
        OomGuard(model)(forward_and_backward, model, batch)


def test_weights_outside_the_model_are_not_trained_twice():
    """A retry does not add gradients of the loss's own weights twice, although they come before the model's."""
    found = []
    for failing in ([], [True]):
        model = tiny_model("llama", layers=2)
        torch.manual_seed(0)
        outside = nn.Linear(32, 1)
        guard, attempts = OomGuard(model, also=outside.parameters()), len(failing)

        def step(model=model, outside=outside, failing=failing):
            hidden = model.model(**without_cache(model, {"input_ids": tiny_batch("llama")["input_ids"]}))[0]
            if failing:
                failing.clear()
                hidden.register_hook(run_out)
            outside(hidden).square().mean().backward()

        guard(step)
        found.append({"loss": None, **gradients(model), **gradients(outside)})
        assert guard.attempts == attempts
    assert_same(*found)


@pytest.mark.parametrize(("zero", "fused"), [("before", False), ("after", True), ("never", False)])
def test_steps_that_end_themselves_are_not_kept(zero, fused):
    """If steps include the optimizer, the guard stores only the current one: earlier ones must not be repeated."""
    model = tiny_model("llama", layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    guard = OomGuard(model)

    def step():
        if zero == "before":
            optimizer.zero_grad()
        loss = model(**without_cache(model, tiny_batch("llama"))).loss
        if zero != "never":
            loss.backward()
            optimizer.step()
        if zero == "after":
            optimizer.zero_grad()

    for _ in range(4):
        guard(step)
    assert len(guard._steps) == 1


def test_a_guard_inside_the_same_guard_and_one_inside_another():
    model = tiny_model("llama", layers=2)
    guard, tries = OomGuard(model), []

    def step():
        tries.append(0)
        if len(tries) == 2:
            torch.empty(1 << 60, dtype=torch.uint8)  # a real error of the allocator
        forward_and_backward(model, tiny_batch("llama"))

    for _ in range(2):
        guard(lambda: guard(step))
    assert (len(tries), guard.attempts, guard.taken) == (4, 1, [SELECTIVE])  # and the first one again

    def give_up():
        raise OutOfPlansError(MESSAGE)

    with pytest.raises(OutOfPlansError):
        guard(give_up)
    assert guard.attempts == 1


def test_a_plan_that_cannot_be_put_on_hides_nothing():
    model = planned(tiny_model("llama", layers=2), "full")
    with pytest.raises(OutOfPlansError, match="out of memory") as raised:
        OomGuard(model.model)(run_out)  # an inner model of an installed one
    assert isinstance(raised.value.__cause__, torch.OutOfMemoryError)


def test_what_has_no_blocks_has_no_guard():
    bare = model_of_averages()
    bare.layers = nn.ModuleList()
    for model in (nn.Linear(2, 2), bare):
        with pytest.raises(NoBlocksError):
            OomGuard(model)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("what", ["FSDPLinear", "DeepSpeedEngine", "ranks"])
def test_several_ranks_are_refused(what, late, monkeypatch):
    """The guard refuses several ranks, also if the model is wrapped or sharded after the guard was created."""
    model = tiny_model("llama", layers=2)
    guard = OomGuard(model) if late else None
    if what == "ranks":
        monkeypatch.setattr(compat.distributed, "ranks", lambda: 2)
    else:
        model.inner = type(what, (nn.Linear,), {})(2, 2)
    with pytest.raises(HfCkptError, match="policy: budget"):
        (guard or OomGuard(model))(forward_and_backward, model, tiny_batch("llama"))


@pytest.mark.compat
def test_what_counts_as_out_of_memory():
    texts = table(__file__, "out_of_memory.yaml")
    errors = [torch.OutOfMemoryError("a card is full"), MemoryError(), *map(RuntimeError, texts)]
    others = [RuntimeError("The size of tensor a (3) must match"), ValueError("out of memory")]
    assert [error for error in errors if not compat.devices.is_out_of_memory(error)] == []
    assert not any(map(compat.devices.is_out_of_memory, [*others, KeyboardInterrupt()]))


# --- the next plan that needs less memory -----------------------------------------------------------------------------


def test_nothing_is_offloaded_where_there_is_no_host_memory(monkeypatch):
    monkeypatch.setattr(guarding, "lane_of", lambda device: None)
    model = planned(tiny_model("llama"), {"policy": "full"})
    assert [tighten(model), tighten(model)] == [HEAD, None]
    assert actions(model) == {FULL}


def test_where_the_first_plan_comes_from():
    stock = tiny_model("llama")
    enable(stock, {"use_reentrant": False})
    assert tighten(stock, exact=True) == OFFLOAD  # transformers' own checkpointing was `full` already
    waiting = tiny_model("llama")
    hf_ckpt.install(waiting, {"policy": "full", "layers": "0-1", "check_every": 7, "determinism_check": "none"})
    assert tighten(waiting) == "the installed plan (full on blocks 0-1 of 4)"
    assert len(hf_ckpt.describe(waiting).forwards) == 2
    assert tighten(waiting) == SELECTIVE
    spec = installation(waiting).spec
    assert (spec.check_every, spec.determinism_check) == (7, "none")
    enable(waiting)  # a bare call keeps the tighter plan
    assert installation(waiting).spec == spec
    assert actions(waiting) == {SELECTIVE, FULL}


def test_an_enable_call_with_the_options_of_the_user_keeps_the_tighter_plan():
    model = tiny_model("llama")
    options = {"policy": "selective", "layers": "0-1"}
    hf_ckpt.install(model)
    enable(model, options)
    assert tighten(model, exact=True) == SELECTIVE  # blocks 2 and 3
    for again in (options, {**options, "every_n_layers": 1, "offload": False}, None, {"use_reentrant": False}):
        enable(model, again)
        assert [action for _, action in hf_ckpt.describe(model).plan.actions] == [Action("selective", SAVE)] * 4
    getattr(model, compat.transformers.DISABLE_NAMES[-1])()
    assert tighten(model, exact=True) == FULL  # not "the installed plan", which memory ran out under
    enable(model, {"policy": "selective"})  # of all blocks: another wish
    assert actions(model) == {SELECTIVE}
    assert tighten(model, exact=True) == FULL
    hf_ckpt.install(model, {"policy": "selective"})
    assert actions(model) == {SELECTIVE}
    assert tighten(model, exact=True) == FULL
    del model.model.layers[3]  # the guard's plan is none for three layers
    enable(model)
    assert (len(hf_ckpt.describe(model).plan.actions), actions(model)) == (3, {SELECTIVE})


@pytest.mark.skipif(len(compat.transformers.ENABLE_NAMES) < 2, reason="transformers 4 checkpoints every layer")
def test_the_first_plan_is_what_transformers_checkpoints():
    model = tiny_model("llama")
    method = getattr(model, compat.transformers.ENABLE_NAMES[-1])
    method(every_n_layers=2)
    assert tighten(model, exact=True) == SELECTIVE  # blocks 1 and 3
    getattr(model, compat.transformers.ENABLE_NAMES[-1])(every_n_layers=2)
    assert [str(action) for _, action in hf_ckpt.describe(model).plan.actions] == [FULL, SELECTIVE] * 2


def test_no_plan_is_tried_twice():
    """Although the step installs its own plan each time."""
    model, batch = tiny_model("llama", layers=2), tiny_batch("llama")
    guard = OomGuard(model)

    def step():
        assert guard.attempts < 5
        run_out(planned(model, "selective"))

    with pytest.raises(OutOfPlansError, match="full"):
        guard(step)
    assert guard.taken == [FULL]
    guard(lambda: forward_and_backward(planned(model, "selective"), batch))


TILES, TILED = Action("full+tiles", tile="auto"), ["full+tiles (512 tokens)", "full+tiles (128 tokens)"]
MOVED, LINEARS_TOO = (Action("selective", ("linear", "attention"), moved=moved) for moved in (True, False))


@pytest.mark.compat
@pytest.mark.parametrize(
    ("actions", "chunks", "names"),
    [
        ([Action("keep")] * 2, True, [SELECTIVE, FULL, HEAD, OFFLOAD]),
        ([Action("keep"), Action("full")], False, [SELECTIVE, FULL, OFFLOAD]),
        ([MOVED, Action("full")], False, [OFFLOAD, OFFLOAD]),
        ([MOVED, LINEARS_TOO], False, ["offload and full", OFFLOAD]),
        ([Action("full")] * 3, False, [OFFLOAD]),
        ([Action("offload")], True, [HEAD]),
        ([Action("offload")], False, []),
        ([Action("full"), TILES], True, [TILED[0], TILED[1], HEAD, OFFLOAD]),
        ([TILES, Action("full+tiles", tile=512)], False, [" and ".join(TILED), TILED[1]]),
        ([Action("compiled", share=1.0), COMPILED], True, ["compiled (share 0)", HEAD]),
    ],
)
def test_tighter_plans(actions, chunks, names):
    pairs = ((Block(f"layers.{n}", "layers", n, "Layer"), action) for n, action in enumerate(actions))
    plan, found = Plan("llama", "Model", tuple(pairs)), []
    while (step := tighter_plan(plan, chunks=chunks)) is not None:
        assert step[0] != plan
        plan = step[0]
        found.append(step[1])
    assert found == names
    last = {"compiled": str(COMPILED), "full+tiles": TILED[1]}
    assert [str(action) for _, action in plan.actions] == [last.get(action.kind, OFFLOAD) for action in actions]
    assert (plan.head == "auto") == (HEAD in names)
