"""One rank of tests on two processes: DDP, FSDP, ZeRO, the Trainer and accelerate; see `helpers.ranks`.

Every case trains the same model on the same batches without and with hf_ckpt, and fails if gradients or weights
differ. Other results are written for the tests.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import faulthandler
import functools
import json
import os
import sys
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from helpers import budgets
from helpers.adapters import with_lora
from helpers.counting import counted_calls, every_message
from helpers.ranks import Case
from helpers.steps import assert_near, assert_same, planned
from helpers.tiles import split_by_hand
from helpers.trainers import FLAG, Rows, trainer
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import TrainerCallback

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.attach.described import lost_blocks
from hf_ckpt.attach.record import installation
from hf_ckpt.logs import forget_warnings
from hf_ckpt.models.blocks import find_blocks
from hf_ckpt.models.tiny import tiny_batch, tiny_model
from hf_ckpt.training.ranks import RanksPlanning

# --- models -----------------------------------------------------------------------------------------------------------


def build(case: Case) -> nn.Module:
    sizes: dict[str, Any] = {"layers": 8, "hidden": 96} if case.share is not None else {}
    attention = {"attention": "sdpa"} if case.compiled or sizes else {}
    model: nn.Module = tiny_model(case.family, dropout=case.dropout, **sizes, **attention).train()
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "use_cache"):  # T5's stacks have their own configs
            module.config.use_cache = False  # a cache changes memory layouts, and so the last bits of T5
    if case.model == "headless":
        model = model.bert  # its pooler's parameters do not affect a loss on hidden states
    elif case.model.startswith("lora"):
        saved = ["lm_head"] if case.model == "lora, saved" else None
        model = with_lora(model, case.family, lora_dropout=case.dropout, modules_to_save=saved)
    return model


def wrapped(model: nn.Module, case: Case) -> nn.Module:
    """The model as ranks share it."""
    if case.by in ("alone", "marked"):
        return model
    blocks = find_blocks(model).modules.values()
    if case.by == "ddp":
        return DistributedDataParallel(model, **case.options)
    if case.by == "fsdp1":
        policy = ModuleWrapPolicy({type(block) for block in blocks})
        options = {"device_id": torch.device("cpu"), "use_orig_params": True}
        return FullyShardedDataParallel(model, auto_wrap_policy=policy, **options)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    types = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if case.half else None)
    parts = [part for block in blocks for part in (block.self_attn, block.mlp)] if case.model == "parts" else []
    for module in (*parts, *blocks, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=types)
    return model


def shards(model: nn.Module) -> dict[str, torch.Tensor]:
    """This rank's shard of every parameter."""
    return {name: compat.distributed.local(value).detach().clone() for name, value in model.named_parameters()}


# --- what happened ----------------------------------------------------------------------------------------------------


class Collectives(TorchDispatchMode):
    """Records collectives with the sizes that they send: ranks with different ones would deadlock."""

    def __init__(self) -> None:
        super().__init__()
        self.met: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            sizes = [value.numel() for value in tree_leaves(args) if isinstance(value, torch.Tensor)]
            self.met.append(f"{func} {sizes}")
        return func(*args, **(kwargs or {}))


def counts(model: nn.Module, calls: dict[str, int] | None, texts: list[str]) -> dict[str, Any]:
    """hf_ckpt's counts beside those without it."""
    described = hf_ckpt.describe(model)
    found = {"forwards": described.forwards, "recomputed": described.recomputed}
    return {"calls": calls, "messages": " ".join(texts), **found}


# --- loops ------------------------------------------------------------------------------------------------------------


def loss_of(model: nn.Module, case: Case, number: int) -> torch.Tensor:
    """The loss of a micro-step; every rank and micro-step has its own batch."""
    rank = dist.get_rank()
    rows = 2 if case.share is None else 3
    first, second = (
        tiny_batch(
            case.family,
            seed=10 * number + 2 * rank + place,
            batch=rows,
            tokens=case.tokens[(rank + (number + place if case.turns else 0)) % len(case.tokens)],
        )
        for place in (0, 1)
    )
    if case.model == "headless":
        first.pop("labels")
        return model(**first).last_hidden_state.square().mean()
    loss = model(**first).loss
    return torch.exp(loss - model(**second).loss) if case.pair else loss


def train(shared: nn.Module, case: Case, watch: budgets.Watch | None = None) -> dict[str, Any]:
    """Train; without a `watch`, returns losses, and this rank's shard of the gradients of every step."""
    torch.manual_seed(100 + dist.get_rank())
    optimizer = torch.optim.AdamW([p for p in shared.parameters() if p.requires_grad], lr=1e-3)
    for number, parameter in enumerate(shared.parameters() if case.by == "marked" else ()):
        parameter.ds_id = number
        parameter._z3_optimizer = types.SimpleNamespace(optimizer=optimizer)
    losses, gradients = [], {}
    micros = [case.accumulate + case.more * ((step + dist.get_rank()) % 2) for step in range(case.steps)]
    for step, micro in ((step, micro) for step, number in enumerate(micros) for micro in range(number)):
        last = micro == micros[step] - 1
        if isinstance(shared, FSDPModule):
            shared.set_requires_gradient_sync(last)
        waits = shared.no_sync() if not last and hasattr(shared, "no_sync") else contextlib.nullcontext()
        if watch is not None:
            watch.begin()
        with waits:
            loss = loss_of(shared, case, step * case.accumulate + micro) / case.accumulate
            loss.backward()
            losses.append(loss.item())
            del loss
            if not last:
                continue
            for name, parameter in shared.named_parameters() if watch is None else ():
                if parameter.requires_grad:
                    own = compat.distributed.local(parameter.grad) if parameter.grad is not None else None
                    gradients[f"{step} {name}"] = None if own is None else own.clone()
            optimizer.step()
            optimizer.zero_grad()
    return {"loss": torch.tensor(losses), **gradients}


def in_loop(case: Case) -> dict[str, Any]:
    if case.by == "alone" and dist.get_rank():
        return {}
    counted = (case.by == "fsdp2" or case.budget) and not case.compiled
    plain, theirs, ours = build(case), Collectives(), Collectives()
    keys = list(plain.state_dict())
    if "mlp" in case.specs[0]:
        split_by_hand(plain, case.specs[0]["mlp"])
    shared_plain = wrapped(plain, case)
    with theirs if counted else contextlib.nullcontext():
        expected = train(shared_plain, case)
    if case.fails and dist.get_rank() == 1:
        RanksPlanning._lacking = lambda session: 1 // 0
    with every_message() as texts:
        model = build(case)
        shared = wrapped(model, case) if case.order == "after" else None
        if case.order != "stock":
            hf_ckpt.install(shared or model)
        spec = case.specs[dist.get_rank() % len(case.specs)]
        find_blocks(model).base.gradient_checkpointing_enable(spec)
        shared = shared or wrapped(model, case)
        # A hook inside a block would keep it eager.
        counting = contextlib.nullcontext() if case.compiled else counted_calls(model)
        with counting as calls, ours if counted else contextlib.nullcontext():
            found = train(shared, case)
    if case.compiled:
        assert_near(expected, found, 1e-5)
    else:
        assert_same(expected, found)
    described = hf_ckpt.describe(shared)
    raced = len(installation(find_blocks(model).base).session.planning.race.ratios) if case.budget else 0
    return {
        **counts(shared, calls, texts),
        "collectives": [theirs.met, ours.met],
        "measuring": described.measuring,
        "raced": raced,
        "chunked_heads": described.chunked_heads,
        "in_graphs": list(described.in_graphs),
        "by_others": list(described.compiled_by_others),
        "kinds": sorted({block.kind for block, _ in described.plan.actions}),
        "same_keys": list(model.state_dict()) == keys,
        "plan": [[block.name, str(action)] for block, action in described.plan.actions],
    }


# --- budgets ----------------------------------------------------------------------------------------------------------


def trained(case: Case, spec: dict[str, Any] | None) -> tuple[budgets.Trained, dict[str, torch.Tensor]]:
    """A training under a spec, or without hf_ckpt for None, and this rank's final weights."""
    kept = []

    def row(spec: dict[str, Any] | None) -> tuple[nn.Module, Callable[[budgets.Watch], Any]]:
        model = build(case)
        if spec is not None:
            planned(model, spec)
        kept.append(wrapped(model, case))
        return model, functools.partial(train, kept[0], case)

    done = budgets.trained(row, spec)
    return done, shards(kept.pop())


def under_budget(case: Case) -> dict[str, Any]:
    """Which expectations failed under a budget that is the same on all ranks."""
    keep, expected = trained(case, None)
    full, _ = trained(case, {"policy": "full"})
    peaks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(peaks, (full.peak_bytes, keep.peak_bytes))
    full_bytes, keep_bytes = map(max, zip(*peaks, strict=True))
    budget = round(full_bytes + case.share * (keep_bytes - full_bytes))
    done, weights = trained(case, {"policy": "budget", "budget": budget})
    missed = budgets.missed(done.steps, budget, full_bytes)
    return {"missed": [*missed, *budgets.differing(expected, weights, done.recomputed)]}


# --- the Trainer, also with DeepSpeed ---------------------------------------------------------------------------------


def in_trainer(case: Case, folder: Path) -> dict[str, Any]:
    expected, *_ = by_trainer(case, folder, None)
    with every_message() as texts:
        found, model, shared, calls = by_trainer(case, folder, case.specs[0])
    assert_same(expected, found)
    return {
        **counts(model, calls, texts),
        "wrapper": type(shared).__name__,
        "find_unused_parameters": getattr(shared, "find_unused_parameters", None),
        "stage": shared.zero_optimization_stage() if case.by.startswith("zero") else None,
        "split": all(hasattr(parameter, "ds_id") for parameter in model.parameters()),
    }


def by_trainer(case: Case, folder: Path, spec: dict[str, Any] | None) -> tuple[Any, ...]:
    """Losses and changes of the weights, the model, its wrapper, and the calls of blocks."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    model = build(case)
    if spec is not None:
        hf_ckpt.install(model)
    zero = None
    if case.by.startswith("zero"):
        zero = json.loads(Path(__file__).with_name("zero.json").read_text())
        zero["zero_optimization"]["stage"] = int(case.by[-1])
    options = {
        "max_steps": case.steps,
        "gradient_accumulation_steps": case.accumulate,
        "learning_rate": 0.01,
        "deepspeed": zero,
        FLAG: spec is not None,
        f"{FLAG}_kwargs": spec,
    }
    run = trainer(folder, model, callbacks=[TrainerCallback()], rows=Rows(case.family), **options)
    before = whole_weights(model)
    with counted_calls(model) as calls:
        run.train()
    moved = {name: value - before[name] for name, value in whole_weights(model).items()}
    losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    return {"loss": torch.tensor(losses), **moved}, model, run.model_wrapped, calls


def in_engine(case: Case) -> dict[str, Any]:
    """Train in ZeRO-3 of DeepSpeed's engine, which gathers all parameters, however small they are."""
    expected, *_ = by_engine(case, None)
    if case.fails and dist.get_rank() == 1:
        RanksPlanning._lacking = lambda session: 1 // 0
    with every_message() as texts:
        found, model, calls = by_engine(case, case.specs[dist.get_rank() % len(case.specs)])
    assert_same(expected, found)
    described = hf_ckpt.describe(model)
    return {
        **counts(model, calls, texts),
        "measuring": described.measuring,
        "plan": [[block.name, str(action)] for block, action in described.plan.actions],
    }


def by_engine(case: Case, spec: dict[str, Any] | None) -> tuple[Any, ...]:
    """Losses and weights, the model, and the calls of blocks."""
    import deepspeed

    model = build(case)
    if spec is not None:
        planned(model, spec)
    config = json.loads(Path(__file__).with_name("zero.json").read_text())
    few = {"stage3_prefetch_bucket_size": 5000, "reduce_bucket_size": 10000, "stage3_max_reuse_distance": 0}
    config["zero_optimization"] = {"stage": 3, "stage3_param_persistence_threshold": 0, **few}
    config |= {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": case.accumulate}
    del config["gradient_clipping"]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    losses = []
    with counted_calls(model) as calls:
        for number in range(case.steps * case.accumulate):
            more = case.later * (dist.get_rank() == 1 and 2 * number >= case.steps * case.accumulate)
            lengths = tuple(tokens + more for tokens in case.tokens)
            loss = loss_of(engine, dataclasses.replace(case, tokens=lengths), number)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return {"loss": torch.tensor(losses), **whole_weights(model)}, model, calls


def whole_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    named, gathered = dict(model.named_parameters()), contextlib.nullcontext()
    if any(hasattr(parameter, "ds_id") for parameter in named.values()):  # ZeRO-3
        import deepspeed

        gathered = deepspeed.zero.GatheredParameters(list(named.values()))
    with gathered:
        return {name: parameter.detach().clone() for name, parameter in named.items()}


# --- accelerate's FSDP2 -----------------------------------------------------------------------------------------------


def accelerator_with_fsdp2() -> Any:
    """accelerate's own FSDP2. It drops the plugin if processes have no GPU, but its code also works on the CPU."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        reshard_after_forward=True,
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    return accelerator


def refusal(call: Callable[..., Any], *arguments: Any) -> str:
    """hf_ckpt's error that the call raises, or an empty text."""
    try:
        call(*arguments)
    except hf_ckpt.HfCkptError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def in_accelerate(case: Case) -> dict[str, Any]:
    """Prepare and train a model by accelerate's own code."""
    accelerator = accelerator_with_fsdp2()
    plugin, result = accelerator.state.fsdp_plugin, {"is_fsdp2": accelerator.is_fsdp2}
    model = build(case)
    keys = list(model.state_dict())
    hf_ckpt.install(model)
    model.gradient_checkpointing_enable({"policy": "full"})
    plugin.activation_checkpointing = case.owner == "both"
    prepared, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    result["units"] = [type(module).__name__ for module in prepared.modules() if isinstance(module, FSDPModule)]
    result["looking for lost blocks"] = refusal(lost_blocks, prepared)
    if case.owner == "both":
        result["training"] = refusal(functools.partial(prepared, **tiny_batch("llama")))
        hf_ckpt.uninstall(model)
        result["installing"] = refusal(hf_ckpt.install, prepared)
    else:
        with counted_calls(prepared) as calls:
            accelerator.backward(prepared(**tiny_batch("llama", seed=7 + dist.get_rank())).loss)
        result |= {**counts(prepared, calls, []), "same_keys": list(prepared.state_dict()) == keys}
    return result


# --- all cases --------------------------------------------------------------------------------------------------------


def run_case(case: Case, folder: Path) -> dict[str, Any]:
    if case.share is not None:
        return under_budget(case)
    if case.by == "accelerate":
        return in_accelerate(case)
    if case.by == "engine":
        return in_engine(case)
    return in_loop(case) if case.by in ("ddp", "fsdp1", "fsdp2", "alone", "marked") else in_trainer(case, folder)


def main() -> None:
    """Run the cases in the file sys.argv[1] one by one, and write their results to sys.argv[2]/rank<n>.json."""
    path, out, rank = Path(sys.argv[1]), Path(sys.argv[2]), os.environ["RANK"]
    cases = {name: Case(**case) for name, case in json.loads(path.read_text()).items()}
    # Inductor is slow, and other tests cover it.
    compat.compiler.compile_graph = lambda graph, inputs: lookup_backend("aot_eager_decomp_partition")(graph, inputs)
    torch.set_num_threads(1)
    if any(case.by.startswith(("zero", "engine")) for case in cases.values()):
        import deepspeed

        deepspeed.init_distributed("gloo")
    else:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    results: dict[str, Any] = {}
    for name, case in cases.items():
        faulthandler.dump_traceback_later(480, exit=True)  # shows where a deadlock is
        AcceleratorState._reset_state(reset_partial_state=True)
        forget_warnings()
        try:
            results[name] = run_case(case, out)
        except Exception:  # reported by its test; other cases still run
            results[name] = {"error": traceback.format_exc()}
        (out / f"rank{rank}.json").write_text(json.dumps(results))
    # Leave without destroying the process group: shortly after a backward of DDP, that can deadlock, with or without
    # checkpointing (https://github.com/pytorch/pytorch/issues/56297). The launcher's store outlives the ranks.
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store.set(f"done {rank}", "")
    store.wait([f"done {other}" for other in range(dist.get_world_size())])
    os._exit(0)


if __name__ == "__main__":
    main()
