"""One rank of tests on two processes: DDP, FSDP, ZeRO, the Trainer and accelerate; see ranks.py.

Every case trains the same model on the same batches without and with hf_ckpt, and fails if gradients or weights
differ. Other results are written for the tests.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import peft
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from helpers.ranks import Case
from helpers.steps import assert_near, assert_same
from ranks import counted_calls, heard, run_cases, without_cache, wrapped
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Trainer, TrainingArguments

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.attach.attach import lost_blocks
from hf_ckpt.logs import forget_warnings
from hf_ckpt.models.blocks import find_blocks
from hf_ckpt.models.tiny import tiny_batch, tiny_model

ROWS = 2  # per rank
TARGETS = {"llama": ["q_proj", "v_proj"], "bert": ["query", "value"], "t5": ["q", "v"]}
SAVED = {"llama": ["lm_head"], "bert": ["pooler", "classifier"], "t5": ["lm_head"]}


# --- models -----------------------------------------------------------------------------------------------------------


def build(case: Case) -> nn.Module:
    options = {"attention": "sdpa"} if case.compiled else {}
    model: nn.Module = without_cache(tiny_model(case.family, dropout=case.dropout, **options))
    if case.model == "headless":
        model = model.bert  # its pooler's parameters do not affect a loss on hidden states
    elif case.model == "frozen":  # up to block 2
        model.get_input_embeddings().requires_grad_(False)
        for block in list(find_blocks(model).modules.values())[:2]:
            block.requires_grad_(False)
    elif case.model.startswith("lora"):
        config = peft.LoraConfig(
            r=4,
            target_modules=TARGETS[case.family],
            modules_to_save=SAVED[case.family] if case.model == "lora, saved" else None,
            lora_dropout=case.dropout,
            init_lora_weights=False,  # zeros in B would make all gradients of A zero
        )
        torch.manual_seed(1)
        model = peft.get_peft_model(model, config)
    return model.train()


# --- steps ------------------------------------------------------------------------------------------------------------


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


def loss_of(model: nn.Module, case: Case, step: int) -> torch.Tensor:
    rank = dist.get_rank()
    seeds = [10 * step + 2 * rank + number for number in range(2)]
    sizes = {"batch": ROWS, "tokens": case.tokens[rank % len(case.tokens)]}
    first, second = (tiny_batch(case.family, seed=seed, **sizes) for seed in seeds)
    if case.model == "headless":
        first.pop("labels")
        return model(**first).last_hidden_state.square().mean()
    if case.steps != "pair":
        return model(**first).loss
    # Like a preference loss: two forwards, one backward through both.
    chosen, rejected = (log_likelihood(model, batch) for batch in (first, second))
    return -nn.functional.logsigmoid(chosen - rejected).mean()


def log_likelihood(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(**batch).logits
    labels = batch["labels"][:, : logits.shape[1]]
    return logits.log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1).mean(-1)


def train(shared: nn.Module, model: nn.Module, case: Case) -> tuple[dict[str, Any], list[str]]:
    """Losses, this rank's shard of the gradients after each reduced backward, and the collectives of FSDP2."""
    torch.manual_seed(100 + dist.get_rank())
    losses, found, collectives = [], {}, Collectives()
    counted = isinstance(shared, FSDPModule) and not case.compiled
    steps = {"accumulate": 3, "repeat": 2}.get(case.steps, 1)
    for step in range(steps):
        last = case.steps != "accumulate" or step == steps - 1
        if isinstance(shared, FSDPModule):
            shared.set_requires_gradient_sync(last)
        waits = shared.no_sync() if not last and hasattr(shared, "no_sync") else contextlib.nullcontext()
        with collectives if counted else contextlib.nullcontext(), waits:
            loss = loss_of(shared, case, step)
            loss.backward()
        losses.append(loss.detach())
        if last:
            for name, parameter in model.named_parameters():
                gradient = parameter.grad
                assert gradient is None or isinstance(gradient, DTensor) == case.by.startswith("fsdp2"), name
                if parameter.requires_grad:
                    found[f"{step} {name}"] = None if gradient is None else compat.distributed.local(gradient).clone()
            model.zero_grad(set_to_none=True)
    return {"loss": torch.stack(losses), **found}, collectives.met


def in_steps(case: Case, _: Path) -> dict[str, Any]:
    plain = build(case)
    keys = list(plain.state_dict())
    expected, theirs = train(wrapped(plain, case.by.partition("-")[0], case.half, **case.options), plain, case)
    said: list[str] = []
    forget_warnings()
    with heard(said):
        model = build(case)
        spec = case.specs[dist.get_rank() % len(case.specs)]
        shared = None if case.order == "before" else wrapped(model, case.by, case.half, **case.options)
        if case.order != "stock":
            hf_ckpt.install(shared or model)
        find_blocks(model).base.gradient_checkpointing_enable(spec)
        shared = shared or wrapped(model, case.by, case.half, **case.options)
        # A hook inside a block would keep it eager.
        with contextlib.nullcontext() if case.compiled else counted_calls(model) as calls:
            got, ours = train(shared, model, case)
    if not case.compiled:
        assert_same(expected, got)
    else:
        assert_near(expected, got, 0.04 if case.half else 1e-5)  # 5 rounding units of bfloat16
    described = hf_ckpt.describe(shared)
    return {
        "collectives": [theirs, ours],
        "calls": calls,
        "forwards": described.forwards,
        "recomputed": described.recomputed,
        "chunked_heads": described.chunked_heads,
        "in_graphs": list(described.in_graphs),
        "by_others": list(described.compiled_by_others),
        "kinds": sorted({block.kind for block, _ in described.plan.actions}),
        "same_keys": list(model.state_dict()) == keys,
        "said": " ".join(said),
    }


# --- the Trainer, also with DeepSpeed ---------------------------------------------------------------------------------


def by_trainer(case: Case, folder: Path, spec: dict[str, Any] | None) -> tuple[nn.Module, dict[str, Any], Any]:
    """Train two steps of two micro-batches; returns the model, losses and weights, and (wrapper, block calls)."""
    AcceleratorState._reset_state(reset_partial_state=False)
    GradientState._reset_state()
    model = build(case)
    options: dict[str, Any] = {"deepspeed": _zero(case)} if case.by.startswith("zero") else {}
    if spec is not None:
        hf_ckpt.install(model)
        options |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": spec}
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        max_steps=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=0.01,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=7,
        **options,
    )
    whole = tiny_batch(case.family, batch=16)
    rows = [{name: value[row] for name, value in whole.items()} for row in range(16)]
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    before = _weights(model)
    with counted_calls(model) as calls:
        trainer.train()
    after = _weights(model)
    assert any(not torch.equal(value, after[name]) for name, value in before.items())
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return model, {"loss": torch.tensor(losses), **after}, (trainer.model_wrapped, calls)


def _zero(case: Case) -> dict[str, Any]:
    automatic = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    return {
        "zero_optimization": {"stage": int(case.by[-1])},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        **dict.fromkeys(automatic, "auto"),
        **case.options,
    }


def _weights(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_id"):  # ZeRO-3
            with deepspeed.zero.GatheredParameters([parameter]):
                found[name] = parameter.detach().clone()
        else:
            found[name] = parameter.detach().clone()
    return found


def in_trainer(case: Case, folder: Path) -> dict[str, Any]:
    _, expected, _ = by_trainer(case, folder, None)
    (spec,) = case.specs
    said: list[str] = []
    forget_warnings()
    try:
        with heard(said):
            model, got, (shared, calls) = by_trainer(case, folder, spec)
    except hf_ckpt.HfCkptError as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    assert_same(expected, got)
    described = hf_ckpt.describe(model)
    return {
        "wrapper": type(shared).__name__,
        "find_unused_parameters": getattr(shared, "find_unused_parameters", None),
        "stage": shared.zero_optimization_stage() if hasattr(shared, "zero_optimization_stage") else None,
        "split": all(hasattr(parameter, "ds_id") for parameter in model.parameters()),
        "calls": calls,
        "forwards": described.forwards,
        "recomputed": described.recomputed,
        "said": " ".join(said),
    }


# --- accelerate's FSDP2 -----------------------------------------------------------------------------------------------


def through_accelerate(owner: str) -> dict[str, Any]:
    """Run accelerate's own code; `owner` checkpoints: `ours`, `theirs` (hf_ckpt comes later), `both` (it is first)."""
    from accelerate import Accelerator
    from accelerate.state import PartialState
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
    # accelerate drops the plugin if processes have no GPU. Set it as with GPUs; accelerate's code also works on the
    # CPU.
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    try:
        return _prepared(accelerator, owner)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def _prepared(accelerator: Any, owner: str) -> dict[str, Any]:
    result: dict[str, Any] = {"is_fsdp2": accelerator.is_fsdp2}
    model = without_cache(tiny_model("llama"))
    keys = list(model.state_dict())
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
        with counted_calls(prepared) as calls:
            accelerator.backward(prepared(**tiny_batch("llama", seed=7 + dist.get_rank())).loss)
        recomputed = hf_ckpt.describe(prepared).recomputed
        result |= {"calls": calls, "recomputed": recomputed, "same_keys": list(prepared.state_dict()) == keys}
    return result


@contextlib.contextmanager
def _refusal(result: dict[str, Any], doing: str) -> Iterator[None]:
    try:
        yield
    except hf_ckpt.HfCkptError as error:
        result[doing] = f"{type(error).__name__}: {error}"


# --- all cases --------------------------------------------------------------------------------------------------------


def run_case(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    if "owner" in case:
        return through_accelerate(case["owner"])
    asked = Case(**case)
    return in_trainer(asked, folder) if asked.by == "trainer" or asked.by[:4] == "zero" else in_steps(asked, folder)


if __name__ == "__main__":
    # Inductor is slow, and other tests cover it.
    compat.compiler.compile_graph = lambda graph, inputs: lookup_backend("aot_eager_decomp_partition")(graph, inputs)
    if '"zero' in Path(sys.argv[1]).read_text():
        import deepspeed

        deepspeed.init_distributed("gloo")
    else:
        dist.init_process_group("gloo")
    run_cases(run_case)
