"""One rank of tests/users/test_fsdp2_runs.py and test_fsdp2_steps.py: every case under FSDP2, see ranks.py.

Each case runs twice with the same weights and data, with hf_ckpt and without. Cases with an `owner` go
through accelerate's FSDP2 plugin; those with `tokens` are steps of training on batches that differ between ranks. The
test judges what is written down.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import heard, run_cases, without_cache
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.attach.attach import lost_blocks
from hf_ckpt.attach.record import installation
from hf_ckpt.compat.fsdp import _shard_groups
from hf_ckpt.engines import full
from hf_ckpt.logs import forget_warnings
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.models.blocks import base_model, find_blocks
from hf_ckpt.models.tiny import tiny_batch, tiny_model
from hf_ckpt.planner import live


def shard(model: nn.Module, half: bool, *apart: nn.Module) -> None:
    options = {
        "mesh": init_device_mesh("cpu", (dist.get_world_size(),)),
        "reshard_after_forward": True,
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16) if half else MixedPrecisionPolicy(),
    }
    for unit in (*find_blocks(model).modules.values(), *apart):
        fully_shard(unit, **options)
    fully_shard(model, **options)


class CollectiveCount(TorchDispatchMode):
    """Counts collectives by name: checkpointing must not gather a block's parameters once more than FSDP2 does."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}
        self.order: list[str] = []
        """With the size of what is sent or gathered: ranks that differ in either wait for each other for ever."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.counts[str(func)] = self.counts.get(str(func), 0) + 1
            sizes = [value.numel() for value in tree_leaves(args) if isinstance(value, torch.Tensor)]
            self.order.append(f"{func} {sizes}")
        return func(*args, **(kwargs or {}))


class RankBytes(LiveBytes):
    """`LiveBytes` of one rank: FSDP2 keeps the storages of gathered parameters, and makes them empty and full again."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> None:
        self._counted: dict[int, int] = {}
        super().__init__(batch)
        self._parameters = [found for group in _shard_groups(model) for found in group.fsdp_params]
        shards = [found.sharded_param for found in self._parameters]
        gradients = [shard.grad for shard in shards if shard.grad is not None]
        for value in [*model.buffers(), *tree_leaves(list(optimizer.state.values())), *shards, *gradients]:
            if isinstance(value, torch.Tensor):
                self._count(value)
        self.rank_peak = 0

    def _count(self, tensor: torch.Tensor) -> bool:
        storage = compat.local(tensor).untyped_storage()
        new = super()._count(compat.local(tensor))
        if new:
            self._counted[storage._cdata] = storage.nbytes()
        return new

    def _freed(self, key: int, size: int) -> None:
        super()._freed(key, size)
        self._counted.pop(key, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        total = self.current_bytes
        for parameter in self._parameters:
            for output in parameter.all_gather_outputs:
                storage = output.untyped_storage()
                total += storage.nbytes() - self._counted.get(storage._cdata, 0)
        self.rank_peak = max(self.rank_peak, total)
        return result


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
    forget_warnings()
    with counted_regions() as counts, heard(said):
        ours = train(model, case)
    described = hf_ckpt.describe(model)

    reference = build()
    shard(reference, case["half"])
    plain = train(reference, case)
    alone = build()
    for step in range(2):
        alone(**tiny_batch(case["family"], batch=4, seed=step)).loss.backward()
    single = {n: p.grad for n, p in alone.named_parameters()}
    return {
        "error_to_one_process": max(
            ((g - single[n]).abs().max() / single[n].abs().max()).item()
            for n, g in ours["gradients"].items()
            if not n.endswith("key.bias")  # BERT's have no gradient but rounding
        ),
        "actions": [action.kind for _, action in described.plan.actions],
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


def through_accelerate(case: dict[str, Any], folder: Path) -> dict[str, Any]:
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
        return _train_prepared(accelerator, case["owner"], folder)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def _train_prepared(accelerator: Any, owner: str, folder: Path) -> dict[str, Any]:
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
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    result["units"] = [type(module).__name__ for module in prepared.modules() if isinstance(module, FSDPModule)]
    with _refusal(result, "looking for lost blocks"):
        lost_blocks(prepared)
    with _refusal(result, "installing"):
        hf_ckpt.install(prepared)
    if owner == "ours":
        with counted_regions() as counts:
            accelerator.backward(prepared(**tiny_batch("llama", seed=dist.get_rank())).loss)
        result |= {"recomputed": hf_ckpt.describe(prepared).recomputed, **counts}
        result |= _saved_state(accelerator, prepared, optimizer, folder / "state")
    return result


def _saved_state(accelerator: Any, model: nn.Module, optimizer: Any, folder: Path) -> dict[str, Any]:
    """accelerate's own saving and loading: a step behind the saved state is undone, and comes out the same again."""

    def step() -> tuple[float, dict[str, torch.Tensor]]:
        optimizer.zero_grad()
        loss = model(**tiny_batch("llama", seed=7 + dist.get_rank())).loss
        accelerator.backward(loss)
        optimizer.step()
        return loss.item(), {name: compat.local(value).clone() for name, value in model.named_parameters()}

    accelerator.save_state(str(folder))
    first, weights = step()
    accelerator.load_state(str(folder))
    again, later = step()
    return {
        "state_files": sorted(file.name for file in folder.iterdir()),
        "losses_of_a_step_again": [first, again],
        "differing": [name for name, value in weights.items() if not torch.equal(value, later[name])],
        "recomputed_in_all": hf_ckpt.describe(model).recomputed,
    }


@contextlib.contextmanager
def _refusal(result: dict[str, Any], doing: str) -> Iterator[None]:
    try:
        yield
    except hf_ckpt.HfCkptError as error:
        result[doing] = f"{type(error).__name__}: {error}"


def build_for_steps(case: dict[str, Any]) -> nn.Module:
    sizes = {"layers": case["layers"], "hidden": case["hidden"]}
    model: nn.Module = without_cache(tiny_model(case["family"], attention="sdpa", **sizes))
    if case["lora"]:
        import peft

        torch.manual_seed(1)
        config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        model = peft.get_peft_model(model, config)
    return model


def spec_of(case: dict[str, Any]) -> dict[str, Any]:
    return case["specs"][dist.get_rank() % len(case["specs"])]


def in_steps(case: dict[str, Any], _: Path) -> dict[str, Any]:
    """Optimizer steps with hf_ckpt beside the same without; every rank has sequences of its own length."""
    ours, plain = build_for_steps(case), build_for_steps(case)
    hf_ckpt.install(ours)
    base_model(ours).gradient_checkpointing_enable(spec_of(case))
    for model in (ours, plain):
        apart = [base_model(model).get_input_embeddings(), base_model(model).get_output_embeddings()]
        shard(model, case["half"], *(apart if case["apart"] else []))
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.001) for model in (ours, plain)]
    steps = []
    for number, tokens in enumerate(case["tokens"][dist.get_rank()]):
        batches = [
            tiny_batch(case["family"], batch=4, tokens=tokens, seed=10 * number + micro)
            for micro in range(case["micro_steps"])
        ]
        recomputed = hf_ckpt.describe(ours).recomputed
        for optimizer in optimizers:
            optimizer.zero_grad()
        gc.collect()
        gc.disable()  # a cycle that waits for the collector would count
        with CollectiveCount() as own, RankBytes(ours, optimizers[0], batches[0]) as memory:
            backward(ours, batches, case["held_back"])
        gc.enable()
        with CollectiveCount() as theirs:
            backward(plain, batches, case["held_back"])
        described, record = hf_ckpt.describe(ours), installation(ours)
        prediction = described.plan.prediction
        steps.append(
            {
                "different": different(ours, plain),
                "order": own.order,
                "plain_order": theirs.order,
                "peak": memory.rank_peak,
                "predicted": prediction.peak_bytes if prediction else None,
                "actions": [f"{action.kind} {action.save}" for _, action in described.plan.actions],
                "recomputed": sum(described.recomputed.values()) - sum(recomputed.values()),
                "shape": str(record.planned.shape) if record.planned else "",
                "held_back": record.planned is not None and record.planned.shape.held_back,
            }
        )
        for optimizer in optimizers:
            optimizer.step()
    return {"steps": steps}


def backward(model: Any, batches: list[dict[str, torch.Tensor]], held_back: bool) -> None:
    for number, batch in enumerate(batches):
        model.set_requires_gradient_sync(not held_back or number == len(batches) - 1)
        model(**batch).loss.backward()


def different(ours: nn.Module, plain: nn.Module) -> list[str]:
    """Names of parameters whose gradients, or whose values, differ in a bit."""
    pairs = zip(ours.named_parameters(), plain.parameters(), strict=True)
    return [name for (name, mine), other in pairs if not (same(mine.grad, other.grad) and same(mine, other))]


def same(mine: Any, other: Any) -> bool:
    if mine is None or other is None:
        return mine is other
    return torch.equal(compat.local(mine), compat.local(other))


def refused(case: dict[str, Any], _: Path) -> dict[str, Any]:
    """What each rank says to the first batch; whoever waited for another would never say anything."""
    model = build_for_steps(case)
    result: dict[str, Any] = {}
    hf_ckpt.install(model)
    base_model(model).gradient_checkpointing_enable(spec_of(case))
    shard(model, False)
    original = live.plan_within
    if case["broken_rank"] == dist.get_rank():
        live.plan_within = cannot_plan
    try:
        with _refusal(result, "said"):
            model(**tiny_batch(case["family"], batch=4, tokens=case["tokens"][dist.get_rank()][0]))
    finally:
        live.plan_within = original
    return result


def cannot_plan(*_: Any) -> Any:
    raise hf_ckpt.HfCkptError("not today")


def checkpointed(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Two steps, saved in shards, and two more: by the same model, and by one that was loaded."""
    batches = [tiny_batch(case["family"], batch=4, seed=10 * step + dist.get_rank()) for step in range(4)]

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = build_for_steps(case)
        hf_ckpt.install(model)
        base_model(model).gradient_checkpointing_enable(spec_of(case))
        shard(model, False)
        return model, torch.optim.AdamW(model.parameters(), lr=0.001)

    def go_on(model: nn.Module, optimizer: torch.optim.Optimizer, steps: slice) -> list[float]:
        losses = []
        for batch in batches[steps]:
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    plain = build_for_steps(case)
    shard(plain, False)
    first = made()
    go_on(*first, slice(0, 2))
    before = {name: compat.local(value).clone() for name, value in first[0].state_dict().items()}
    path = folder / "sharded"
    dcp.save(dict(zip(("model", "optimizer"), get_state_dict(*first), strict=True)), checkpoint_id=str(path))

    second = made()
    go_on(*second, slice(2, 3))  # other weights and states, for loading to replace
    states = dict(zip(("model", "optimizer"), get_state_dict(*second), strict=True))
    dcp.load(states, checkpoint_id=str(path))
    set_state_dict(*second, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    loaded = {name: compat.local(value).clone() for name, value in second[0].state_dict().items()}
    losses = [go_on(model, optimizer, slice(2, 4)) for model, optimizer in (first, second)]
    return {
        "same_keys": list(before) == list(plain.state_dict()),
        "saved_keys": sorted(states["model"]) == sorted(plain.state_dict()),
        "loaded_otherwise": [name for name, value in before.items() if not torch.equal(value, loaded[name])],
        "files": sorted(file.suffix for file in path.iterdir()),
        "losses": losses,
        "different": different(first[0], second[0]),
        "recomputed": [sum(hf_ckpt.describe(model).recomputed.values()) for model, _ in (first, second)],
    }


HOWS = {"steps": in_steps, "refused": refused, "checkpointed": checkpointed}


def run_case(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    if "how" in case:
        return HOWS[case["how"]](case, folder)
    return through_accelerate(case, folder) if "owner" in case else by_hand(case)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run_cases(run_case)
