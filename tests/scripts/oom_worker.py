"""One rank of tests/training: DistributedDataParallel under a guard, with an allocator that fails on some ranks.

Every case trains the same model on the same batches twice: plainly, by DistributedDataParallel alone, and guarded.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import without_cache
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import hf_ckpt
from hf_ckpt.errors import HfCkptError, OutOfPlansError
from hf_ckpt.models.tiny import tiny_batch, tiny_model
from hf_ckpt.planner import escalate
from hf_ckpt.training.guard import OomGuard

MICRO_STEPS = 2


class Failing(TorchDispatchMode):
    """Runs out of memory at some operations."""

    def __init__(self, at: set[int]) -> None:
        super().__init__()
        self.at, self.operations = at, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        if self.operations in self.at:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return func(*args, **(kwargs or {}))


def built(spec: str | None, **options: Any) -> DistributedDataParallel:
    model = without_cache(tiny_model("llama", layers=2, dropout=0.1))
    if spec is not None:
        hf_ckpt.install(model, spec)
        model.gradient_checkpointing_enable()
    return DistributedDataParallel(model, **options)


def micro_step(wrapped: nn.Module, number: int, gather: bool) -> None:
    batch = tiny_batch("llama", batch=1 + dist.get_rank(), tokens=16 + 8 * number, seed=10 * number + dist.get_rank())
    loss = wrapped(**batch).loss / MICRO_STEPS
    if gather:
        everywhere = torch.zeros(dist.get_world_size())
        dist.all_gather_into_tensor(everywhere, loss.detach().reshape(1))
    loss.backward()


def train(wrapped: DistributedDataParallel, guard: Any, at: list[set[int]], gather: bool = False) -> tuple[list, int]:
    """Two optimizer steps of two micro-steps: gradients and weights after each; and operations in the first step, up to
    the end of its last backward."""
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    torch.manual_seed(3 + dist.get_rank())
    found, operations = [], 0
    for step in range(2):
        with Failing(at[step]) as allocator:
            for number in range(MICRO_STEPS):
                wrapped.require_backward_grad_sync = number == MICRO_STEPS - 1

                def run(number: int = number, allocator: Failing = allocator) -> int:
                    micro_step(wrapped, number, gather)
                    return allocator.operations

                last = guard(run)
        operations = operations or last
        found += [parameter.grad.clone() for parameter in wrapped.parameters() if parameter.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    wrapped.require_backward_grad_sync = True
    found += [parameter.detach().clone() for parameter in wrapped.parameters()]
    return [*found, torch.rand(3)], operations


def plainly(function: Any) -> Any:
    return function()


def compare(
    spec: str | None, at: list[set[int]], expected: list, attempts: int, gather: bool = False, **options: Any
) -> dict[str, Any]:
    wrapped = built(spec, **options)
    guard = OomGuard(wrapped, exact=True, folder=None)
    found, _ = train(wrapped, guard, at, gather)
    done = hf_ckpt.describe(wrapped) if guard.taken or spec else None
    return {
        "equal": len(found) == len(expected) and all(map(torch.equal, expected, found)),
        "attempts": guard.attempts,
        "expected_attempts": attempts,
        "taken": guard.taken,
        "recomputed": None if done is None else sorted(done.recomputed.items()),
    }


def between_meetings(rank: int) -> str:
    """A rank fails between two meetings, while the other waits in the second: what it says."""
    wrapped = built(None)
    guard = OomGuard(wrapped, folder=None)
    guard._ranks.patience = 1.0

    def step() -> None:
        dist.all_reduce(torch.ones(1))
        if rank:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        dist.all_reduce(torch.ones(1))

    try:
        guard(step)
    except OutOfPlansError as error:
        if rank:  # the end of the test: in a training, this process ends here, and its launcher ends the other
            dist.all_reduce(torch.ones(1))
            guard._ranks.exchange(2, 0)
        return str(error)
    return ""


def main() -> None:
    out, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    faulthandler.dump_traceback_later(120, exit=True)  # a deadlock shows where
    dist.init_process_group("gloo")
    escalate.lane_of = lambda device: device  # as if there were host memory beside the CPU's
    nothing: list[set[int]] = [set(), set()]
    expected, _ = train(built(None), plainly, nothing)
    for _ in range(2):  # the first time, a process makes what it needs once
        unharmed = built("selective")
        _, operations = train(unharmed, OomGuard(unharmed), nothing)
    cases = {"no failure": compare("selective", nothing, expected, 0)}

    def one_fails(where: str, whose: int, point: int, spec: str | None = "selective") -> None:
        mine = rank == whose
        cases[where] = compare(spec, [{point} if mine else set(), set()], expected, int(mine))

    points = [*(5 + number * (operations // 8) for number in range(8)), operations - 3]
    for number, point in enumerate(points):  # of this rank: the ranks' operations are not as many
        for whose in (0, 1):
            one_fails(f"rank {whose} at point {number}", whose, point)
    one_fails("nothing installed", 1, 200, None)
    both = [{150 + 40 * rank, 700}, {90}]
    cases["both, twice, and in the next step"] = compare(None, both, expected, 3)
    unused = built(None, find_unused_parameters=True)
    unused_expected, _ = train(unused, plainly, nothing)
    at = [{400} if rank else set(), set()]
    cases["find_unused"] = compare("selective", at, unused_expected, rank, find_unused_parameters=True)
    # Where ranks meet in the step: before the meeting one rank runs it again, after it all of them do.
    for number, point in enumerate(points[::2]):
        for whose in (0, 1):
            at = [{point} if rank == whose else set(), set()]
            cases[f"gather, rank {whose} at {number}"] = compare("selective", at, expected, int(rank == whose), True)
    at = [{operations // 2 - 20, operations - 3}, {operations // 3}]
    cases["gather, both"] = compare(None, at, expected, 3, True)

    result: dict[str, Any] = {"cases": cases, "points": len(points), "out_of_plans": ["", ""]}
    # A rank without plans ends the training of all of them, instead of leaving them to wait.
    wrapped = built("selective")
    try:
        at = [set(), set(range(5, 10**6, 50)) if rank else set()]
        train(wrapped, OomGuard(wrapped, exact=True, folder=None), at)
    except OutOfPlansError as error:
        result["out_of_plans"][rank] = str(error)
    result["between_meetings"] = between_meetings(rank)
    for name, refused in {"static_graph": {"static_graph": True}, "hook": {}}.items():
        wrapped = built(None, **refused)
        if name == "hook":
            wrapped.register_comm_hook(None, lambda state, bucket: None)
        try:
            OomGuard(wrapped)
        except HfCkptError as error:
            result[name] = str(error)
    (out / f"rank{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    time.sleep(0.2)  # for gloo's threads, see accelerate_loop.py
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
