"""Running out of memory, by an allocator that fails on purpose: at every point of a step, again and again, above a
limit. The training goes on as if it had not happened, and what runs is counted."""

from __future__ import annotations

import copy
import functools
import gc
import json
import random
import sys

import numpy
import pytest
import torch
from accelerate.utils.memory import find_executable_batch_size, should_reduce_batch_size
from conftest import assert_same, gradients, without_cache
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import SCRIPTS, python, torchrun
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Trainer, TrainingArguments

import hf_ckpt
from hf_ckpt import __main__ as entry
from hf_ckpt import callback, compat
from hf_ckpt.errors import HfCkptError, NoBlocksError, OutOfPlansError
from hf_ckpt.install import installation, step_down, trial
from hf_ckpt.measure import LiveBytes
from hf_ckpt.oom import REPORT_FILE, OomGuard, guarded_training_step
from hf_ckpt.plan import Action, Block, Plan
from hf_ckpt.planner import tighter_plan
from hf_ckpt.tiny import FAMILIES, tiny_batch, tiny_model

MESSAGE = "CUDA out of memory. Tried to allocate 2.00 GiB."
SELECTIVE = "`selective` for blocks that kept everything"
FULL = "`full` for `selective` blocks"
OFFLOAD = "hidden states in host memory"
HEAD = "the head in chunks"


@pytest.fixture(autouse=True)
def somewhere_to_offload_to(monkeypatch):
    """The CPU has no host memory beside its own. That a plan is taken is seen here; test_offload.py moves."""
    monkeypatch.setattr(sys.modules["hf_ckpt.install"], "lane_of", lambda device: device)


@pytest.fixture(autouse=True, scope="module")
def little_to_collect():
    """The garbage collector runs after every failure; what other tests left need not be looked through each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class Failing(TorchDispatchMode):
    """Counts operations of steps, not those of a guard around them, and runs out of memory at some of them."""

    def __init__(self, *at, inside=True):
        super().__init__()
        self.at, self.operations, self.inside = set(at), 0, inside

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not self.inside:
            return func(*args, **(kwargs or {}))
        self.operations += 1
        if self.operations - 1 in self.at:
            raise torch.OutOfMemoryError(MESSAGE)
        return func(*args, **(kwargs or {}))


def under(allocator, step):
    """The step, with the allocator at work in it."""

    def run(*args):
        allocator.inside = True
        try:
            return step(*args)
        finally:
            allocator.inside = False

    return run


class Limited(LiveBytes):
    """Runs out of memory when more bytes are alive than allowed."""

    def __init__(self, limit, *holders):
        super().__init__(*holders)
        self.limit = limit

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.current_bytes > self.limit:
            raise torch.OutOfMemoryError(MESSAGE)
        return result


def forward_and_backward(model, batch, share=0.5):
    """A micro-step with a draw of its own from every source of random numbers."""
    scale = 1 + 0.01 * (random.random() + float(numpy.random.rand()) + float(torch.rand(())))
    loss = model(**without_cache(model, batch)).loss * scale * share
    loss.backward()
    return loss.detach()


def bytes_of(model):
    return LiveBytes(model).start_bytes


def seed(number=3):
    random.seed(number)
    numpy.random.seed(number)
    torch.manual_seed(number)


def draws():
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))


def one_step(model, family, run=None, at=(), **sizes):
    """Gradients of two micro-steps, what is drawn afterwards, and how many operations they took."""
    run = run or (lambda step, *args: step(*args))
    model.zero_grad(set_to_none=True)
    seed()
    batches = [tiny_batch(family, seed=number, **sizes) for number in range(2)]
    with Failing(*at, inside=False) as allocator:
        losses = [run(under(allocator, forward_and_backward), model, batch) for batch in batches]
    found = {"loss": torch.stack(losses), **gradients(model)}
    return found, draws(), allocator.operations


def plain(family):
    """The same without hf_ckpt: gradients, and draws."""
    return one_step(tiny_model(family, layers=2, dropout=0.1), family)[:2]


STRIDE = {"llama": 29, "gpt2": 41, "bert": 41, "t5": 101}
"""Of the points tried; a prime, so that every kind of operation has its turn."""


@pytest.mark.parametrize("family", FAMILIES)
def test_any_point_of_a_step(family):
    expected, drawn = plain(family)
    model = tiny_model(family, layers=2, dropout=0.1)
    hf_ckpt.install(model, "selective")
    model.gradient_checkpointing_enable()
    found, _, operations = one_step(model, family, OomGuard(model))
    assert_same(expected, found)
    touched = untouched = 0
    for at in [*range(0, operations, STRIDE[family]), operations - 1]:
        hf_ckpt.install(model, "selective")
        guard = OomGuard(model, folder=None)
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
        assert set(done.recomputed.values()) <= {1, 2}  # of what ran again
        assert len(counts) in (3, 4)
        touched += len(counts) == 4  # the first micro-step ran again with the second
        untouched += len(counts) == 3
    assert touched > 5, "no failure came after the first gradient of the second micro-step"
    assert untouched > 5


@pytest.mark.parametrize("spec", [None, "none", "full", {"offload": "saved", "policy": "selective"}, {"segments": 1}])
@pytest.mark.parametrize("lora", [False, True])
def test_from_any_plan(spec, lora):
    """Bit-equal down to offloading; without a plan nothing is installed until memory runs out."""
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
    for at in (30, 401, 650):
        guard = OomGuard(model, exact=True, folder=None)
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
    guard = OomGuard(model, exact=True, folder=None)
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
    """Losses of optimizer steps of two micro-steps each, and the weights at the end."""
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


@pytest.mark.parametrize(("family", "zeros"), [*((family, False) for family in FAMILIES), ("llama", True)])
def test_a_limit_is_kept_from_the_step_on_that_met_it(family, zeros):
    """Longer batches come in the middle: the plan gets tight at the first of them, and stays so."""
    batches = [tiny_batch(family, seed=n, tokens=16 if n < 4 else 96, batch=4) for n in range(10)]
    plain_model, model = (tiny_model(family, dropout=0.1) for _ in range(2))
    seed()
    expected = trajectory(plain_model, batches, zeros=zeros)
    peaks = {}
    for policy in ("none", "selective", "full"):
        measured = tiny_model(family, dropout=0.1)
        hf_ckpt.install(measured, policy)
        measured.gradient_checkpointing_enable()
        with LiveBytes(measured) as live:
            trajectory(measured, batches)
        peaks[policy] = live.peak_bytes
    assert peaks["full"] < peaks["selective"] < peaks["none"]
    guard = OomGuard(model, folder=None)
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


def test_nothing_of_a_failed_attempt_is_held():
    model = tiny_model("llama", layers=8)
    hf_ckpt.install(model, "none")
    guard = OomGuard(model, folder=None)
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


def test_out_of_plans(tmp_path):
    model = tiny_model("llama", dropout=0.1)
    batch = tiny_batch("llama", tokens=64)
    guard = OomGuard(model, folder=tmp_path / "new")
    with Limited(bytes_of(model) + 20_000, model), pytest.raises(OutOfPlansError) as raised:
        guard(forward_and_backward, model, batch)
    assert all(parameter.grad is None for parameter in model.parameters())
    error = raised.value
    assert should_reduce_batch_size(error)  # accelerate's own way out comes next
    assert error.tried == tuple(guard.taken)
    assert set(error.tried) == {SELECTIVE, FULL, OFFLOAD, HEAD}
    assert guard.attempts == 5  # without a plan, and with four
    # The parts are those of the batch that failed, and they are the whole peak.
    report = json.loads((tmp_path / "new" / REPORT_FILE).read_text())
    assert report["batch"] == "2 x 64 tokens"
    assert sum(error.parts.values()) == report["prediction"]["peak_bytes"]
    assert error.parts["weights and optimizer state"] >= 3 * bytes_of(model)  # AdamW, as nothing says otherwise
    for part in (MESSAGE, "2 x 64 tokens", REPORT_FILE, *(name for name, size in error.parts.items() if size)):
        assert part in str(error)
    assert any("forward_and_backward" in line for line in report["traceback"])
    assert Plan.from_dict(report["plan"]) == hf_ckpt.describe(model).plan
    # What is left behind is a model that trains.
    guard(forward_and_backward, model, batch)
    assert min(hf_ckpt.describe(model).recomputed.values()) > 0


def test_the_batch_is_halved_after_the_last_plan_only():
    model = tiny_model("llama", layers=2)
    hf_ckpt.install(model, "full")
    model.gradient_checkpointing_enable()
    peaks = {}
    for size in (2, 4):
        with trial(model, {"policy": "offload", "head": "auto"}), LiveBytes(model) as live:
            forward_and_backward(model, tiny_batch("llama", batch=size, tokens=64))
        model.zero_grad()
        peaks[size] = live.peak_bytes
    sizes = []
    guard = OomGuard(model, folder=None)

    @find_executable_batch_size(starting_batch_size=4)
    def train(batch_size):
        sizes.append((batch_size, len(guard.taken)))
        with Limited(peaks[2] + 50_000, model):
            guard(forward_and_backward, model, tiny_batch("llama", batch=batch_size, tokens=64))

    assert peaks[4] > peaks[2] + 100_000
    train()
    assert [size for size, _ in sizes] == [4, 3, 2] or [size for size, _ in sizes] == [4, 2]
    assert sizes[0][1] == 0
    assert sizes[1][1] == 2, "every plan was tried before the batch was made smaller"


def test_chunked_head_is_left_out_where_exact_gradients_are_wanted():
    for exact, last in ((False, {OFFLOAD, HEAD}), (True, {OFFLOAD})):
        model = tiny_model("llama")
        hf_ckpt.install(model, "full")
        model.gradient_checkpointing_enable()
        guard = OomGuard(model, exact=exact, folder=None)
        with Limited(bytes_of(model) + 20_000, model), pytest.raises(OutOfPlansError):
            guard(forward_and_backward, model, tiny_batch("llama"))
        assert set(guard.taken) == last
    guard = OomGuard(tiny_model("bert"), folder=None)  # it has no head to take in chunks
    with Limited(bytes_of(guard.model) + 20_000, guard.model), pytest.raises(OutOfPlansError):
        guard(forward_and_backward, guard.model, tiny_batch("bert"))
    assert guard.taken == [SELECTIVE, FULL, OFFLOAD]


def test_a_chunked_head_agrees_to_rounding():
    plain_model, model = (tiny_model("llama", layers=2, dropout=0.1) for _ in range(2))
    expected, drawn, _ = one_step(plain_model, "llama", tokens=320)
    hf_ckpt.install(model, "full")
    model.gradient_checkpointing_enable()
    guard = OomGuard(model, folder=None)
    found, later, _ = one_step(model, "llama", guard, [60], tokens=320)
    assert guard.taken == [HEAD], "before offloading, because logits weigh more than hidden states"
    assert hf_ckpt.describe(model).chunked_heads > 0
    assert later == drawn
    for name, value in expected.items():
        assert torch.linalg.vector_norm(found[name] - value) <= 1e-5 * torch.linalg.vector_norm(value), name


@pytest.mark.parametrize("policy", ["budget", "auto"])
def test_a_planned_policy_is_planned_again_for_less(policy):
    model, batch = tiny_model("llama", dropout=0.0), tiny_batch("llama", tokens=64, batch=4)
    reference = copy.deepcopy(model)
    seed()
    forward_and_backward(reference, batch)
    hf_ckpt.install(model, {"policy": policy, **({"budget": "4MiB"} if policy == "budget" else {})})
    model.gradient_checkpointing_enable()
    seed()
    guard = OomGuard(model, exact=True, folder=None)
    predicted = []

    def step(*args):
        forward_and_backward(*args)
        predicted.append(hf_ckpt.describe(model).plan.prediction.peak_bytes)
        if len(predicted) < 3:
            raise torch.OutOfMemoryError(MESSAGE)

    guard(step, model, batch)
    assert guard.taken[0].startswith("a plan for ")
    assert predicted[1] <= 0.9 * predicted[0]
    assert predicted[2] < predicted[1]
    assert_same(gradients(reference), gradients(model))
    assert sum(hf_ckpt.describe(model).recomputed.values()) > 0
    while step_down(model, exact=True):  # it ends, and a larger batch does not bring the planned policy back
        pass
    forward_and_backward(model, tiny_batch("llama", tokens=96, batch=4))
    assert {str(action) for _, action in hf_ckpt.describe(model).plan.actions} == {"offload"}


def test_nothing_is_offloaded_where_there_is_no_host(monkeypatch):
    """On a CPU, `segments` keep less than what offloading would leave there."""
    monkeypatch.undo()
    model = tiny_model("llama")
    hf_ckpt.install(model, {"segments": 2})
    model.gradient_checkpointing_enable()
    assert step_down(model) == HEAD
    assert step_down(model) is None
    assert hf_ckpt.describe(model).plan.segments()


def test_where_the_first_plan_comes_from():
    stock = tiny_model("llama")
    stock.gradient_checkpointing_enable({"use_reentrant": False})
    assert step_down(stock, exact=True) == OFFLOAD  # transformers' own checkpointing was `full` already
    waiting = tiny_model("llama")
    hf_ckpt.install(waiting, {"policy": "full", "layers": "0-1"})
    assert "full" in step_down(waiting)
    assert hf_ckpt.describe(waiting).enabled
    assert len(hf_ckpt.describe(waiting).forwards) == 2
    assert step_down(waiting) == SELECTIVE
    spec = installation(waiting).spec
    waiting.gradient_checkpointing_enable()  # a bare call keeps the tighter plan
    assert installation(waiting).spec == spec
    assert {action.kind for _, action in installation(waiting).plan.actions} == {"full", "selective"}


def test_options_of_the_spec_stay():
    model = tiny_model("llama")
    hf_ckpt.install(model, {"policy": "selective", "engine": "sac", "determinism_check": "none"})
    model.gradient_checkpointing_enable()
    assert step_down(model) == FULL
    spec = installation(model).spec
    assert (spec.engine, spec.determinism_check) == ("sac", "none")


# --- what is not rescued --------------------------------------------------------------------------------------------


def test_other_errors_pass_and_leave_the_guard_usable():
    expected, _ = plain("llama")
    model = tiny_model("llama", layers=2, dropout=0.1)
    guard = OomGuard(model, folder=None)

    def broken(*args):
        forward_and_backward(*args)
        raise ValueError("of the user's own")

    with pytest.raises(ValueError, match="of the user's own"):
        guard(broken, model, tiny_batch("llama"))
    assert guard.attempts == 0
    assert installation(model) is None
    found, _, _ = one_step(model, "llama", guard, [900])
    assert guard.attempts == 1
    assert_same(expected, found)


def test_gradients_of_before_cannot_be_made_again():
    model = tiny_model("llama", layers=2)
    guard = OomGuard(model, folder=None)
    forward_and_backward(model, tiny_batch("llama"))
    before = gradients(model)
    with Failing(10):  # in the forward: nothing of theirs is touched
        guard(forward_and_backward, model, tiny_batch("llama", seed=1))
    assert guard.attempts == 1
    model.zero_grad()
    for name, parameter in model.named_parameters():
        parameter.grad = before[name]
    with Failing() as counted:
        guard(forward_and_backward, model, tiny_batch("llama", seed=1))
    with Failing(counted.operations - 9), pytest.raises(OutOfPlansError, match="gradients before the guarded steps"):
        guard(lambda: forward_and_backward(model, tiny_batch("llama", seed=1)))


@pytest.mark.parametrize("kind", [torch.optim.SGD, functools.partial(torch.optim.AdamW, fused=True)])
def test_an_optimizer_inside_backward_is_noticed(kind):
    """Fused ones do not even count as a change of the weights."""
    model = tiny_model("llama", layers=2)
    for parameter in model.parameters():
        optimizer = kind([parameter], lr=0.1)

        def step_and_forget(parameter, optimizer=optimizer):
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step_and_forget)
    for _ in range(2):  # the first one makes the optimizers' state
        with Failing() as counted:
            forward_and_backward(model, tiny_batch("llama"))
    guard = OomGuard(model, folder=None)
    with Failing(counted.operations - 10), pytest.raises(OutOfPlansError, match="optimizer inside it"):
        guard(forward_and_backward, model, tiny_batch("llama"))
    assert not guard._steps


def test_weights_outside_the_model_are_not_trained_twice():
    """A loss with weights of its own: their gradients come first, before any of the model's."""
    grads = {}
    for at in (None, "in backward"):
        model = tiny_model("llama", layers=2)
        torch.manual_seed(0)
        outside = nn.Linear(32, 1)
        guard = OomGuard(model, also=outside.parameters(), folder=None)
        failing = [at]

        def step(model=model, outside=outside, failing=failing):
            hidden = model.model(**without_cache(model, {"input_ids": tiny_batch("llama")["input_ids"]}))[0]
            if failing.pop() if failing else None:
                hidden.register_hook(_run_out)
            outside(hidden).square().mean().backward()

        guard(step)
        grads[at] = {"loss": None, **gradients(model), **gradients(outside)}
        assert guard.attempts == bool(at)
    assert_same(grads[None], grads["in backward"])


def test_buffers_are_put_back():
    model = tiny_model("llama", layers=2)
    model.norm_of_batches = nn.BatchNorm1d(4)
    guard = OomGuard(model, folder=None)
    tries = []

    def step():
        model.norm_of_batches(torch.arange(8.0).reshape(2, 4) + len(tries))
        tries.append(0)
        if len(tries) == 1:
            _run_out()
        forward_and_backward(model, tiny_batch("llama"))

    guard(step)
    assert model.norm_of_batches.num_batches_tracked == 1
    expected = nn.BatchNorm1d(4)
    expected(torch.arange(8.0).reshape(2, 4) + 1)
    assert torch.equal(model.norm_of_batches.running_mean, expected.running_mean)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("zero", ["before", "after", "never"])
def test_steps_that_end_themselves_are_not_kept(fused, zero):
    """The optimizer was meant to stay outside; what was done before it cannot be, and is not, done again."""
    model = tiny_model("llama", layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    guard = OomGuard(model, folder=None)

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
    guard, tries = OomGuard(model, folder=None), []

    def step():
        tries.append(0)
        if len(tries) == 2:
            _run_out()
        forward_and_backward(model, tiny_batch("llama"))

    for _ in range(2):
        guard(lambda: guard(step))
    assert (len(tries), guard.attempts) == (3, 1)

    def give_up():
        raise OutOfPlansError(MESSAGE)

    with pytest.raises(OutOfPlansError):
        guard(give_up)
    assert guard.attempts == 1


def test_a_report_that_cannot_be_written_hides_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    model = tiny_model("llama", layers=2)
    guard = OomGuard(model, folder=tmp_path / "file" / "folder")
    with (
        Limited(bytes_of(model) + 20_000, model),
        pytest.raises(OutOfPlansError, match="could not be written") as raised,
    ):
        guard(forward_and_backward, model, tiny_batch("llama"))
    assert should_reduce_batch_size(raised.value)
    assert not guard._steps


def test_a_plan_that_cannot_be_put_on_hides_nothing():
    class Pair(type(tiny_model("llama", layers=2))):
        pass

    model = Pair(tiny_model("llama", layers=2).config).train()
    hf_ckpt.install(model, "full")
    model.gradient_checkpointing_enable()
    guard = OomGuard(model.model, folder=None)  # an inner model of one that is installed

    with pytest.raises(OutOfPlansError, match="out of memory") as raised:
        guard(_run_out)
    assert isinstance(raised.value.__cause__, torch.OutOfMemoryError)


def test_a_model_that_is_wrapped_later_is_noticed(monkeypatch):
    model = tiny_model("llama", layers=2)
    guard = OomGuard(model, folder=None)
    guard(forward_and_backward, model, tiny_batch("llama"))
    model.zero_grad()
    monkeypatch.setattr(compat, "ranks", lambda: 2)
    with pytest.raises(HfCkptError, match="there are 2 ranks"):
        guard(forward_and_backward, model, tiny_batch("llama"))


def test_a_model_that_is_sharded_later_is_noticed():
    model = tiny_model("llama", layers=2)
    guard = OomGuard(model, folder=None)
    model.inner = type("FSDPLinear", (nn.Linear,), {})(2, 2)  # `fully_shard` works in place
    with pytest.raises(HfCkptError, match="policy: budget"):
        guard(forward_and_backward, model, tiny_batch("llama"))


def test_data_parallel_inside_a_compiled_model_is_seen(monkeypatch):
    """accelerate compiles last, around DistributedDataParallel."""
    wrapped = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.process_group = None
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    assert compat.data_parallel(torch.compile(wrapped)) is wrapped
    assert compat.data_parallel(torch.compile(nn.Linear(2, 2))) is None


def test_a_model_without_blocks_is_refused_before_it_runs():
    with pytest.raises(NoBlocksError):
        OomGuard(nn.Linear(2, 2))


@pytest.mark.parametrize("name", ["FSDPLinear", "DeepSpeedEngine"])
def test_ranks_in_lockstep_are_refused(name):
    model = tiny_model("llama", layers=2)
    model.inner = type(name, (nn.Linear,), {})(2, 2)
    with pytest.raises(HfCkptError, match="policy: budget"):
        OomGuard(model)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."), True),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried"),
            True,
        ),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"), True),
        (RuntimeError("The size of tensor a (3) must match"), False),
        (ValueError("out of memory"), False),
        (KeyboardInterrupt(), False),
    ],
)
@pytest.mark.compat
def test_what_counts_as_out_of_memory(error, expected):
    assert compat.is_out_of_memory(error) is expected


def test_an_allocation_that_really_fails():
    """The CPU's own allocator, asked for more than there is: its error is recognised, and the step runs again."""
    model = tiny_model("llama", layers=2)
    guard = OomGuard(model, folder=None)
    tries = []

    def step():
        tries.append(0)
        if len(tries) == 1:
            torch.empty(1 << 60, dtype=torch.uint8)
        forward_and_backward(model, tiny_batch("llama"))

    guard(step)
    assert (len(tries), guard.attempts, guard.taken) == (2, 1, [SELECTIVE])


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the address space")
def test_the_kernel_gives_no_more_memory(tmp_path):
    """torch's own allocator fails, in a process whose address space is limited; nothing is injected."""
    out = tmp_path / "found.json"
    giving_back = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = python(SCRIPTS / "oom_limit.py", out, extra=giving_back)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert "can't allocate memory" in found["without"]
    assert found["attempts"] >= 1
    assert found["taken"]
    assert found["found"] == found["expected"]
    assert min(found["recomputed"].values()) > 0


# --- the next plan --------------------------------------------------------------------------------------------------


def plan_of(*actions, head="full"):
    pairs = ((Block(f"layers.{n}", "layers", n, "Layer"), action) for n, action in enumerate(actions))
    return Plan("llama", "Model", tuple(pairs), head=head)


BOTH = ("linear", "attention")


@pytest.mark.compat
@pytest.mark.parametrize(
    ("actions", "options", "names", "last"),
    [
        ([Action("keep")] * 2, {"chunks": True}, [SELECTIVE, FULL, OFFLOAD, HEAD], "offload"),
        ([Action("keep")] * 2, {"chunks": True, "head_first": True}, [SELECTIVE, FULL, HEAD, OFFLOAD], "offload"),
        ([Action("keep"), Action("full")], {"chunks": False}, [SELECTIVE, FULL, OFFLOAD], "offload"),
        ([Action("selective", BOTH, moved=True), Action("full")], {"chunks": False}, [OFFLOAD, OFFLOAD], "offload"),
        ([Action("full", segment=0)] * 3, {"chunks": False}, [OFFLOAD], "offload"),
        ([Action("offload")], {"chunks": True}, [HEAD], "offload"),
        ([Action("offload")], {"chunks": False}, [], "offload"),
    ],
)
def test_tighter_plans(actions, options, names, last):
    plan, found = plan_of(*actions), []
    while (step := tighter_plan(plan, **options)) is not None:
        assert step[0] != plan
        plan = step[0]
        found.append(step[1])
    assert found == names
    assert {str(action) for _, action in plan.actions} == {last}
    assert (plan.head == "auto") == (HEAD in names)


@pytest.mark.compat
def test_what_lies_in_host_memory_already_does_not_come_back():
    plan, _ = tighter_plan(plan_of(Action("selective", BOTH, moved=True), Action("selective", BOTH)), chunks=False)
    assert [str(action) for _, action in plan.actions] == ["offload", "full"]


# --- Trainer --------------------------------------------------------------------------------------------------------

ROWS = 24


class FailsAt:
    """A compute_loss that runs out of memory at some calls of it, before or after its forward."""

    calls = 0
    at: frozenset[int] = frozenset()

    def compute_loss(self, model, inputs, *args, **kwargs):
        type(self).calls += 1
        number = type(self).calls - 1
        labels = inputs.pop("labels")  # as Trainer itself does for label smoothing
        loss = super().compute_loss(model, {**inputs, "labels": labels}, *args, **kwargs)
        if number in self.at:
            if number % 2:  # in the backward, after some gradients
                loss.register_hook(_run_out) if number % 4 == 1 else model.get_input_embeddings().weight.register_hook(
                    _once(_run_out)
                )
            else:
                _run_out()
        return loss


def _run_out(*_):
    raise torch.OutOfMemoryError(MESSAGE)


def _once(function):
    left = [0]

    def hook(*args):
        if left:
            left.pop()
            function(*args)

    return hook


def train(folder, bases, at=(), spec=None, **options):
    kind = type("Tested", (*bases, FailsAt, Trainer), {"at": frozenset(at), "calls": 0})
    rows = [{name: value[0] for name, value in tiny_batch("llama", batch=1, seed=n).items()} for n in range(ROWS)]
    model = tiny_model("llama", dropout=0.1)
    model.config.use_cache = False
    if spec:
        hf_ckpt.install(model, spec)
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=6,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        **({compat.ENABLE_NAMES[-1].removesuffix("_enable"): True} if spec else {}),
        **options,
    )
    figures = hf_ckpt.MemoryTimeCallback(summary=False)
    trainer = kind(model=model, args=arguments, train_dataset=Dataset.from_list(rows), callbacks=[figures])
    trainer.train()
    keys = ("loss", "grad_norm", "learning_rate", "epoch", "step")
    history = [{key: row[key] for key in keys if key in row} for row in trainer.state.log_history]
    return trainer, history, {name: value.clone() for name, value in model.state_dict().items()}


def test_trainer_goes_on_as_if_nothing_had_happened(tmp_path):
    _, history, weights = train(tmp_path / "plain", ())
    trainer, found, others = train(tmp_path / "guarded", (hf_ckpt.OomGuardMixin,), at=(1, 4, 7))
    assert found == history
    assert_same({"loss": None, **weights}, {"loss": None, **others})
    assert trainer.oom_guard.attempts == 3
    assert trainer.oom_guard.taken == [SELECTIVE, FULL, HEAD] or trainer.oom_guard.taken == [SELECTIVE, FULL, OFFLOAD]
    assert type(trainer).calls > 12 + 3 - 1  # 12 micro-steps, three of them again, and what came before them
    assert min(hf_ckpt.describe(trainer.model).recomputed.values()) > 0


def test_every_trainer_of_the_process(tmp_path, everywhere):
    _, history, weights = train(tmp_path / "plain", ())
    everywhere(spec="selective", around_training_step=guarded_training_step)
    trainer, found, others = train(tmp_path / "guarded", (), at=(0,), spec="selective")
    assert found == history
    assert_same({"loss": None, **weights}, {"loss": None, **others})
    assert (trainer.oom_guard.attempts, trainer.oom_guard.taken) == (1, [FULL])
    hf_ckpt.uninstall()
    assert Trainer.training_step.__qualname__ == "Trainer.training_step"
    assert not hasattr(Trainer.training_step, "__wrapped__")


def test_tokens_of_a_step_that_ran_twice_count_once(tmp_path):
    seen = []
    take = callback._TokenCounter.take

    def watched(self):
        seen.append(take(self))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(callback._TokenCounter, "take", watched)
        train(tmp_path, (hf_ckpt.OomGuardMixin,), at=(0, 3, 5))
    assert seen == [2 * 2 * 16] * 6


def test_on_the_command_line(tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text(
        "import json, sys\n"
        "import torch\n"
        "import test_oom\n"
        "trainer, history, _ = test_oom.train(sys.argv[1], (), at=(2,))\n"
        "found = {'attempts': trainer.oom_guard.attempts, 'taken': trainer.oom_guard.taken, 'history': history}\n"
        "open(sys.argv[2], 'w').write(json.dumps(found))\n"
    )
    _, history, _ = train(tmp_path / "plain", ())
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    out = tmp_path / "found.json"
    assert entry.main(["--oom-guard", str(script), str(tmp_path / "guarded"), str(out)]) == 0
    assert json.loads(out.read_text()) == {"attempts": 1, "taken": [SELECTIVE], "history": history}


# --- ranks ----------------------------------------------------------------------------------------------------------


def test_ranks_of_ddp(tmp_path):
    """Two ranks, one of them out of memory here and there; see the worker for what each case does."""
    torchrun("oom_worker.py", tmp_path, processes=2, timeout=150)
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    for rank, found in enumerate(ranks):
        for name, case in found["cases"].items():
            assert case["equal"], f"rank {rank}: {name}: {case}"
            assert case["attempts"] == case["expected_attempts"], f"rank {rank}: {name}: {case}"
        assert found["points"] == 9
        assert "static_graph" in found["static_graph"]
        assert "communication hook" in found["hook"]
        assert ("Other ranks wait inside the step" if rank else "another rank") in found["between_meetings"]
    for name in ranks[0]["cases"]:
        mine, yours = (found["cases"][name] for found in ranks)
        assert mine["taken"] == yours["taken"], f"ranks do not agree: {name}"
        assert len(mine["taken"]) == max(mine["attempts"], yours["attempts"])
        assert (
            name.startswith(("no failure", "both", "gather, both")) or sum([mine["attempts"], yours["attempts"]]) == 1
        )
    assert all(times for _, times in ranks[1]["cases"]["nothing installed"]["recomputed"])
    assert "no tighter plan is left" in ranks[1]["out_of_plans"][1]
    assert "another rank is out of memory." in ranks[0]["out_of_plans"][0]
