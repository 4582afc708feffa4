"""One rank of tests/users/test_ddp.py: every case under DDP, see ranks.py.

Each case runs three times with the same weights and data: DDP with hf_ckpt, DDP without, and one process without
either on the batches of both ranks together. What they had in common is written down; the test judges it.
"""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import counted_calls, run_cases, without_cache
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hf_ckpt
from hf_ckpt.models.blocks import find_blocks
from hf_ckpt.models.tiny import tiny_batch, tiny_model

PER_RANK = 2
LORA_TARGETS = {"llama": ["q_proj", "v_proj"], "bert": ["query", "value"], "t5": ["q", "v"]}
LORA_SAVED = {"llama": ["lm_head"], "bert": ["pooler", "classifier"], "t5": ["lm_head"]}
Gradients = dict[str, torch.Tensor | None]


def build(case: dict[str, Any]) -> nn.Module:
    family, change = case["family"], case["change"]
    model: nn.Module = tiny_model(family, dropout=case["dropout"])
    if change == "headless":
        model = model.bert  # its pooler has parameters, and no part in a loss on the hidden states
    elif change == "frozen_below_2":
        model.get_input_embeddings().requires_grad_(False)
        for block in list(find_blocks(model).modules.values())[:2]:
            block.requires_grad_(False)
    elif change.startswith("lora"):
        import peft

        config = peft.LoraConfig(
            r=4,
            target_modules=LORA_TARGETS[family],
            modules_to_save=LORA_SAVED[family] if change == "lora_and_saved" else None,
            lora_dropout=0.05 if change == "lora_dropout" else 0.0,
            init_lora_weights=False,  # the usual zeros in B make every gradient of A zero
        )
        torch.manual_seed(1)
        model = peft.get_peft_model(model, config)
    return model.train()


def batch_of(case: dict[str, Any], number: int, rows: slice) -> dict[str, torch.Tensor]:
    whole = tiny_batch(case["family"], batch=PER_RANK * dist.get_world_size(), seed=number)
    return {name: value[rows] for name, value in whole.items()}


def loss_of(model: nn.Module, case: dict[str, Any], step: int, rows: slice) -> torch.Tensor:
    batch = batch_of(case, 2 * step, rows)
    if case["change"] == "headless":
        batch.pop("labels")
        return model(**batch).last_hidden_state.square().mean()
    if case["steps"] != "pair":
        return model(**batch).loss
    # The shape of a preference loss: two forwards, one backward through both.
    chosen, rejected = (log_likelihood(model, each) for each in (batch, batch_of(case, 2 * step + 1, rows)))
    return -nn.functional.logsigmoid(chosen - rejected).mean()


def log_likelihood(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(**batch).logits
    labels = batch["labels"][:, : logits.shape[1]]
    return logits.log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1).mean(-1)


def train(model: nn.Module, case: dict[str, Any], rows: slice) -> tuple[list[float], list[Gradients]]:
    """Losses, and the gradients after each backward that is synchronised."""
    torch.manual_seed(100 + rows.start)  # dropout differs between ranks, not between the runs of one rank
    losses: list[float] = []
    gradients: list[Gradients] = []
    steps = {"accumulate": 3, "repeat": 2}.get(case["steps"], 1)
    for step in range(steps):
        synchronised = case["steps"] != "accumulate" or step == steps - 1
        waiting = getattr(model, "no_sync", None) if not synchronised else None
        with waiting() if waiting else contextlib.nullcontext():
            loss = loss_of(model, case, step, rows)
            loss.backward()
        losses.append(loss.item())
        if synchronised:
            inner = model.module if isinstance(model, DistributedDataParallel) else model
            gradients.append({n: p.grad for n, p in inner.named_parameters() if p.requires_grad})
            model.zero_grad(set_to_none=True)
    return losses, [{n: None if g is None else g.clone() for n, g in each.items()} for each in gradients]


def run_case(case: dict[str, Any], _: Path) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    mine, all_rows = slice(PER_RANK * rank, PER_RANK * (rank + 1)), slice(0, PER_RANK * world)

    model = build(case)
    if case["owner"] == "stock":  # no hf_ckpt: what transformers itself does with these kwargs
        model.gradient_checkpointing_enable(case["spec"])
        ddp = DistributedDataParallel(model, **case["ddp"])
    elif case["owner"] == "wrapped":  # installed on what DDP has wrapped already
        ddp = DistributedDataParallel(model, **case["ddp"])
        hf_ckpt.install(ddp, case["spec"])
        find_blocks(ddp).base.gradient_checkpointing_enable()
    else:
        hf_ckpt.install(model)
        find_blocks(model).base.gradient_checkpointing_enable(case["spec"])
        ddp = DistributedDataParallel(model, **case["ddp"])
    with counted_calls(model) as calls:
        losses, ours = train(ddp, case, mine)
    if case["owner"] == "stock":
        return {"calls": calls}
    described = hf_ckpt.describe(ddp)

    plain_losses, plain = train(DistributedDataParallel(without_cache(build(case)), **case["ddp"]), case, mine)
    _, single = train(without_cache(build(case)), case, all_rows)
    return {
        "losses_differ": losses != plain_losses,
        "trainable": len(ours[0]),
        "missing": sorted({name for each in ours for name, gradient in each.items() if gradient is None}),
        "zero": sorted({n for each in ours for n, g in each.items() if g is not None and not g.any()}),
        "unlike_plain_ddp": sorted(
            {n for a, b in zip(ours, plain, strict=True) for n in a if not same(a[n], b.get(n))}
        ),
        "error_to_one_process": max(relative_error(a, b) for a, b in zip(ours, single, strict=True)),
        "digest": digest(ours),
        "forwards": described.forwards,
        "recomputed": described.recomputed,
        "calls": calls,
        "enabled": described.enabled,
        "says_it_checkpoints": says_it_checkpoints(find_blocks(model).base),
    }


def says_it_checkpoints(base: Any) -> bool:
    names = ("is_activation_checkpointing", "is_gradient_checkpointing")  # the second is older, and now deprecated
    return bool(getattr(base, next(name for name in names if hasattr(type(base), name))))


def same(ours: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return ours is other if ours is None or other is None else torch.equal(ours, other)


def relative_error(ours: Gradients, other: Gradients) -> float:
    """Largest difference of any gradient, relative to the model's largest: BERT's key biases have none but rounding."""
    if any((ours[name] is None) != (gradient is None) for name, gradient in other.items()):
        return float("inf")
    pairs = [(ours[name], gradient) for name, gradient in other.items() if gradient is not None]
    largest = max(gradient.abs().max().item() for _, gradient in pairs)
    return max((mine - gradient).abs().max().item() for mine, gradient in pairs) / largest


def digest(gradients: list[Gradients]) -> str:
    total = hashlib.sha256()
    for each in gradients:
        for name in sorted(each):
            gradient = each[name]
            total.update(name.encode() + (b"none" if gradient is None else gradient.numpy().tobytes()))
    return total.hexdigest()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run_cases(run_case)
