"""One rank of tests/test_distributed.py: every case under FSDP2, see ranks.py.

Each case runs twice with the same weights and data, with hf_ckpt and without. Cases with an `owner` go
through accelerate's FSDP2 plugin. The test judges what is written down.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import run_cases, without_cache
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import hf_ckpt
from hf_ckpt.engines import full
from hf_ckpt.families import find_blocks
from hf_ckpt.install import _warn_plain_head, lost_blocks
from hf_ckpt.tiny import tiny_batch, tiny_model


def shard(model: nn.Module, half: bool) -> None:
    options = {
        "mesh": init_device_mesh("cpu", (dist.get_world_size(),)),
        "reshard_after_forward": True,
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16) if half else MixedPrecisionPolicy(),
    }
    for block in find_blocks(model).modules.values():
        fully_shard(block, **options)
    fully_shard(model, **options)


class CollectiveCount(TorchDispatchMode):
    """Counts collectives by name: checkpointing must not gather a block's parameters once more than FSDP2 does."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.counts[str(func)] = self.counts.get(str(func), 0) + 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def counted_regions() -> Iterator[dict[str, int]]:
    """Calls of torch's checkpoint function that hf_ckpt makes, and how deep they nest (1 is not nested)."""
    counts = {"regions": 0, "depth": 0, "deepest": 0}
    original = full.checkpoint

    def counting(fn: Any, *args: Any, **options: Any) -> Any:
        def inside(*inner: Any) -> Any:
            counts["depth"] += 1
            counts["deepest"] = max(counts["deepest"], counts["depth"])
            try:
                return fn(*inner)
            finally:
                counts["depth"] -= 1

        counts["regions"] += 1
        return original(inside, *args, **options)

    full.checkpoint = counting
    try:
        yield counts
    finally:
        full.checkpoint = original


@contextlib.contextmanager
def heard(said: list[str]) -> Iterator[None]:
    """Collects what hf_ckpt logs."""
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hf_ckpt").addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger("hf_ckpt").removeHandler(handler)


def train(model: nn.Module, case: dict[str, Any]) -> dict[str, Any]:
    """Two accumulated backwards, each on this rank's rows."""
    rows = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    torch.manual_seed(100 + dist.get_rank())
    losses = []
    with CollectiveCount() as collectives:
        for step in range(2):
            batch = {n: v[rows] for n, v in tiny_batch(case["family"], batch=4, seed=step).items()}
            loss = model(**batch).loss
            loss.backward()
            losses.append(loss.item())
    grads = {n: p.grad for n, p in model.named_parameters()}
    return {
        "losses": losses,
        "sharded": all(isinstance(g, DTensor) for g in grads.values()),
        "gradients": {n: None if g is None else g.full_tensor() for n, g in grads.items()},
        "collectives": collectives.counts,
    }


def by_hand(case: dict[str, Any]) -> dict[str, Any]:
    def build() -> nn.Module:
        return without_cache(tiny_model(case["family"], dropout=case["dropout"]))

    model = build()
    keys = set(model.state_dict())
    if case["when"] == "before":
        hf_ckpt.install(model)
        model.gradient_checkpointing_enable(case["spec"])
    shard(model, case["half"])
    if case["when"] == "after":
        hf_ckpt.install(model)
        model.gradient_checkpointing_enable(case["spec"])
    said: list[str] = []
    _warn_plain_head.cache_clear()  # once a process
    with counted_regions() as counts, heard(said):
        ours = train(model, case)
    described = hf_ckpt.describe(model)

    reference = build()
    shard(reference, case["half"])
    plain = train(reference, case)
    return {
        "losses_differ": ours["losses"] != plain["losses"],
        "sharded": ours["sharded"],
        "unlike_plain_fsdp": [n for n, g in ours["gradients"].items() if not torch.equal(g, plain["gradients"][n])],
        "zero": [n for n, g in ours["gradients"].items() if not g.any()],
        "collectives": [ours["collectives"], plain["collectives"]],
        "same_keys": set(model.state_dict()) == keys,
        "kinds": sorted({block.kind for block, _ in described.plan.actions}),
        "chunked_heads": described.chunked_heads,
        "said": " ".join(said),
        "regions": counts["regions"],
        "deepest": counts["deepest"],
        "forwards": described.forwards,
        "recomputed": described.recomputed,
    }


def through_accelerate(case: dict[str, Any]) -> dict[str, Any]:
    """Through accelerate's own FSDP2 code."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    AcceleratorState._reset_state(reset_partial_state=True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        reshard_after_forward=True,
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    # accelerate drops the plugin where the processes have no GPU. Put it where it lies with GPUs; its own code, which
    # runs on the CPU as well, does the rest.
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    try:
        return _train_prepared(accelerator, case["owner"])
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def _train_prepared(accelerator: Any, owner: str) -> dict[str, Any]:
    """`owner`: who checkpoints. `ours`, `theirs` (and we are asked after), or `both` (we are asked before)."""
    result: dict[str, Any] = {"is_fsdp2": accelerator.is_fsdp2}
    model = tiny_model("llama")
    hf_ckpt.install(model)
    plugin = accelerator.state.fsdp_plugin
    plugin.activation_checkpointing = owner == "theirs"
    with _refusal(result, "enabling"):
        model.gradient_checkpointing_enable({"policy": "full"})
    result["enabled"] = hf_ckpt.describe(model).enabled
    plugin.activation_checkpointing = owner != "ours"
    if owner == "theirs":
        hf_ckpt.uninstall(model)
    prepared, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    result["units"] = [type(module).__name__ for module in prepared.modules() if isinstance(module, FSDPModule)]
    with _refusal(result, "looking for lost blocks"):
        lost_blocks(prepared)
    with _refusal(result, "installing"):
        hf_ckpt.install(prepared)
    if owner == "ours":
        with counted_regions() as counts:
            accelerator.backward(prepared(**tiny_batch("llama", seed=dist.get_rank())).loss)
        result |= {"recomputed": hf_ckpt.describe(prepared).recomputed, **counts}
    return result


@contextlib.contextmanager
def _refusal(result: dict[str, Any], doing: str) -> Iterator[None]:
    try:
        yield
    except hf_ckpt.HfCkptError as error:
        result[doing] = f"{type(error).__name__}: {error}"


def run_case(case: dict[str, Any], _: Path) -> dict[str, Any]:
    return through_accelerate(case) if "owner" in case else by_hand(case)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run_cases(run_case)
