"""Steps that the guard cannot rescue, its error messages, and what it leaves unchanged."""

from __future__ import annotations

import functools

import pytest
import torch
from helpers.failing import (
    MESSAGE,
    SELECTIVE,
    Failing,
    forward_and_backward,
    one_step,
    plain,
    run_out,
)
from helpers.steps import assert_same, gradients, without_cache
from torch import nn

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.attach.record import installation
from hf_ckpt.errors import HfCkptError, NoBlocksError, OutOfPlansError
from hf_ckpt.models.tiny import tiny_batch, tiny_model
from hf_ckpt.training.guard import OomGuard

pytestmark = pytest.mark.usefixtures("host_memory", "little_to_collect")


def test_other_errors_pass_and_leave_the_guard_usable():
    expected, _ = plain("llama")
    model = tiny_model("llama", layers=2, dropout=0.1)
    guard = OomGuard(model)

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
    guard = OomGuard(model)
    forward_and_backward(model, tiny_batch("llama"))
    before = gradients(model)
    with Failing(10):  # in the forward, before gradients change
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
    """The guard notices optimizers inside backward, even fused ones, which do not mark weights as changed."""
    model = tiny_model("llama", layers=2)
    for parameter in model.parameters():
        optimizer = kind([parameter], lr=0.1)

        def step_and_forget(parameter, optimizer=optimizer):
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step_and_forget)
    for _ in range(2):  # the first one creates optimizer state
        with Failing() as counted:
            forward_and_backward(model, tiny_batch("llama"))
    guard = OomGuard(model)
    with Failing(counted.operations - 10), pytest.raises(OutOfPlansError, match="optimizer inside it"):
        guard(forward_and_backward, model, tiny_batch("llama"))
    assert not guard._steps


def test_weights_outside_the_model_are_not_trained_twice():
    """A retry does not add gradients of the loss's own weights twice, although they come before the model's."""
    grads = []
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
        grads.append({"loss": None, **gradients(model), **gradients(outside)})
        assert guard.attempts == attempts
    assert_same(*grads)


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
    assert (len(tries), guard.attempts, guard.taken) == (3, 1, [SELECTIVE])

    def give_up():
        raise OutOfPlansError(MESSAGE)

    with pytest.raises(OutOfPlansError):
        guard(give_up)
    assert guard.attempts == 1


def test_a_plan_that_cannot_be_put_on_hides_nothing():
    class Pair(type(tiny_model("llama", layers=2))):
        pass

    model = Pair(tiny_model("llama", layers=2).config).train()
    hf_ckpt.install(model, "full")
    model.gradient_checkpointing_enable()
    guard = OomGuard(model.model)  # an inner model of an installed one

    with pytest.raises(OutOfPlansError, match="out of memory") as raised:
        guard(run_out)
    assert isinstance(raised.value.__cause__, torch.OutOfMemoryError)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("what", ["FSDPLinear", "DeepSpeedEngine", "ranks"])
def test_several_ranks_are_refused(what, late, monkeypatch):
    """The guard refuses several ranks, also if the model is wrapped or sharded after the guard was created."""
    with pytest.raises(NoBlocksError):
        OomGuard(nn.Linear(2, 2))
    model = tiny_model("llama", layers=2)
    guard = OomGuard(model) if late else None
    if what == "ranks":
        monkeypatch.setattr(compat.distributed, "ranks", lambda: 2)
    else:
        model.inner = type(what, (nn.Linear,), {})(2, 2)
    with pytest.raises(HfCkptError, match="policy: budget"):
        (guard or OomGuard(model))(forward_and_backward, model, tiny_batch("llama"))


def _accelerator_error(code):
    """An error that torch (since 2.8) raises with the code of the driver."""
    error = getattr(torch, "AcceleratorError", type("AcceleratorError", (RuntimeError,), {}))("driver error")
    error.error_code = code
    return error


@pytest.mark.compat
def test_what_counts_as_out_of_memory():
    texts = (
        "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "MPS backend out of memory (MPS allocated: 1 GB)",
        "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
        "Native API failed: UR_RESULT_ERROR_OUT_OF_RESOURCES",
        "HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`",
        "NPU out of memory. Tried to allocate 1 GiB",
        "ERR00100 PTA call acl api failed. EL0004: Failed to allocate memory.",
        "FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::1",
    )
    errors = [torch.OutOfMemoryError(MESSAGE), MemoryError(), _accelerator_error(2), *map(RuntimeError, texts)]
    others = [RuntimeError("The size of tensor a (3) must match"), ValueError("out of memory"), KeyboardInterrupt()]
    assert [error for error in errors if not compat.devices.is_out_of_memory(error)] == []
    assert not any(map(compat.devices.is_out_of_memory, [*others, _accelerator_error(700)]))
