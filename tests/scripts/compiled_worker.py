"""One rank of tests/users/test_compiled_ranks.py: compiled blocks under DDP and FSDP2, see ranks.py.

Each case trains a step with compiled blocks on the rank's own batch, and once more in eager mode without hf_ckpt.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import compile_regions
from ranks import run_cases
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hf_ckpt
from hf_ckpt.models.blocks import find_blocks
from hf_ckpt.models.tiny import tiny_batch, tiny_model


def sharded(model: nn.Module) -> nn.Module:
    for block in find_blocks(model).modules.values():
        fully_shard(block)
    return fully_shard(model)


def compiled_and_sharded(model: nn.Module) -> nn.Module:
    """As accelerate does with `use_regional_compilation`: in place, and before blocks are sharded."""
    for block in find_blocks(model).modules.values():
        block.compile(backend="aot_eager")
    return sharded(model)


def ddp_and_compiled(model: nn.Module) -> nn.Module:
    """As accelerate does without FSDP."""
    found: nn.Module = compile_regions(DistributedDataParallel(model), backend="aot_eager")
    return found


WRAPPERS = {
    "ddp": DistributedDataParallel,
    "fsdp2": sharded,
    "ddp-regions": ddp_and_compiled,
    "fsdp2-regions": compiled_and_sharded,
}


def gradients(case: dict[str, Any], spec: dict[str, Any] | None) -> tuple[dict[str, torch.Tensor], nn.Module]:
    model = tiny_model(case["family"], layers=3, attention="sdpa").train()
    if spec is not None:
        hf_ckpt.install(model, spec)
        model.gradient_checkpointing_enable()
    wrapped = WRAPPERS[case["by"] if spec is not None else case["by"].partition("-")[0]](model)
    batch = tiny_batch(case["family"], batch=2, tokens=32, seed=dist.get_rank())
    wrapped(**batch).loss.backward()
    found = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, name
        found[name] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return found, model


def trained(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    ours, model = gradients(case, {"compile": "blocks", **case["spec"]})
    plain, _ = gradients(case, None)
    gaps = [float((ours[name] - plain[name]).norm() / (plain[name].norm() + 1e-12)) for name in plain]
    told = hf_ckpt.describe(model)
    return {
        "largest_gap": max(gaps),
        "in_graphs": len(told.in_graphs),
        "by_others": len(told.compiled_by_others),
        "blocks": len(find_blocks(model).blocks),
        "shares": [action.share for _, action in told.plan.actions],
        "sums": sorted(float(value.double().abs().sum()) for value in ours.values()),
    }


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run_cases(trained)
