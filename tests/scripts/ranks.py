"""Code shared by the workers that run under torchrun."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from hf_ckpt.models.blocks import find_blocks


def without_cache(model: nn.Module) -> nn.Module:
    """The model without key/value cache, which would change memory layouts, and so the last bits of T5."""
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "use_cache"):  # T5's stacks have their own configs
            module.config.use_cache = False
    return model


def wrapped(model: nn.Module, by: str, half: bool = False, **options: Any) -> nn.Module:
    """The model as ranks share it; with `half`, FSDP computes in bfloat16."""
    blocks = find_blocks(model).modules.values()
    computed_in = torch.bfloat16 if half else None
    if by == "ddp":
        return DistributedDataParallel(model, **options)
    if by == "fsdp1":
        policy = ModuleWrapPolicy({type(block) for block in blocks})
        options |= {"mixed_precision": MixedPrecision(param_dtype=computed_in)} if half else {}
        return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"), **options)
    mesh, types = init_device_mesh("cpu", (dist.get_world_size(),)), MixedPrecisionPolicy(param_dtype=computed_in)
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=types)
    return model


@contextlib.contextmanager
def heard(said: list[str]) -> Iterator[None]:
    """Collect the log messages of hf_ckpt."""
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hf_ckpt").addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger("hf_ckpt").removeHandler(handler)


@contextlib.contextmanager
def counted_calls(model: nn.Module) -> Iterator[dict[str, int]]:
    """Block name -> runs of its first inner module, counted without hf_ckpt."""
    calls: dict[str, int] = {}
    handles = []
    for name, block in find_blocks(model).modules.items():
        calls[name] = 0
        first = next(module for module in block.modules() if not list(module.children()))

        def count(*_: object, name: str = name) -> None:
            calls[name] += 1

        handles.append(first.register_forward_pre_hook(count))
    yield calls
    for handle in handles:
        handle.remove()


def run_cases(run_case: Callable[[dict[str, Any], Path], dict[str, Any]]) -> None:
    """Run the cases in the file sys.argv[1] one by one, and write their results to OUT/rank<n>.json."""
    cases, out = Path(sys.argv[1]), Path(sys.argv[2])
    results: dict[str, Any] = {}
    for name, case in json.loads(cases.read_text()).items():
        faulthandler.dump_traceback_later(240, exit=True)  # shows where a deadlock is
        try:
            results[name] = run_case(case, out)
        except Exception:  # reported by its test; other cases still run
            results[name] = {"error": traceback.format_exc()}
        (out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(results))
    dist.barrier()
    time.sleep(0.2)  # for gloo's threads, see accelerate_loop.py
    dist.destroy_process_group()
