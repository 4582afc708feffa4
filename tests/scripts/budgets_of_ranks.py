"""One rank of trainings under a budget with DDP, FSDP1, FSDP2 or DeepSpeed; see ranks.py and `helpers.budget_ranks`.

Every case trains without hf_ckpt, under `full`, and under a budget that is the same on all ranks. Each rank writes
its results, which `helpers.budget_ranks` reads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import gc
import json
import logging
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from helpers.budget_runs import Make, Scenario, Trained, Watch, run_of, trained
from helpers.steps import enable
from ranks import run_cases, without_cache, wrapped
from torch import nn

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.compat.peft import add_lora
from hf_ckpt.models.tiny import tiny_batch, tiny_model

LAYERS, HIDDEN, BATCH = 8, 96, 3


def build(case: dict[str, Any]) -> nn.Module:
    layers = LAYERS // 2 if case["family"] == "t5" else LAYERS
    model: nn.Module = without_cache(tiny_model(case["family"], layers=layers, hidden=HIDDEN, attention="sdpa"))
    if case["lora"]:
        torch.manual_seed(1)
        model = add_lora(model, rank=4, lora_dropout=0.05, init_lora_weights=False)
    return model.train()


def make(case: dict[str, Any], kept: list[Any]) -> Make:
    """A row of `budget_runs`; the object that trains is stored in `kept`."""

    def made(spec: dict[str, Any] | None) -> Scenario:
        model = build(case)
        if spec is not None:
            hf_ckpt.install(model)
            enable(model, spec)
        trainer = (DeepSpeed if case["way"].startswith("zero") else Wrapped)(model, case)
        kept[:] = [trainer]
        settled = 4 * case["accumulate"] if len(case["tokens"][0]) == 1 else 0
        return Scenario(model, functools.partial(train, trainer, case), trainer.holders(), settled)

    return made


def train(trainer: Wrapped, case: dict[str, Any], watch: Watch) -> None:
    torch.manual_seed(5 + dist.get_rank())
    lengths, longest = case["tokens"][dist.get_rank()], [max(each) for each in zip(*case["tokens"], strict=True)]
    for step in range(case["steps"]):
        tokens, shape = lengths[step % len(lengths)], longest[step % len(lengths)]
        for micro in range(case["accumulate"]):
            batch = tiny_batch(
                case["family"], batch=BATCH, tokens=tokens, seed=1000 * dist.get_rank() + 10 * step + micro
            )
            with watch.step(f"{shape:4d}" if len(lengths) > 1 else ""):
                trainer.micro_step(batch, last=micro == case["accumulate"] - 1)


# --- wrappers ---------------------------------------------------------------------------------------------------------


class Wrapped:
    """A model in DDP, FSDP1 or FSDP2, and its optimizer."""

    def __init__(self, model: nn.Module, case: dict[str, Any]) -> None:
        self.case = case
        options = {"use_orig_params": True} if case["way"] == "fsdp1" else case["options"]
        self.model: Any = wrapped(model, case["way"], case["half"], **options)
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-3)

    def holders(self) -> tuple[Any, ...]:
        return ()

    def micro_step(self, batch: dict[str, torch.Tensor], last: bool) -> None:
        waits = contextlib.nullcontext()
        if self.case["way"] == "fsdp2":
            self.model.set_requires_gradient_sync(last)
        elif not last:
            waits = self.model.no_sync()
        with waits:
            loss = self.model(**batch).loss / self.case["accumulate"]
            loss.backward()
        del loss
        if last:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def weights(self) -> dict[str, torch.Tensor]:
        """This rank's shard of every parameter."""
        return {name: compat.distributed.local(value).detach().clone() for name, value in self.model.named_parameters()}


class DeepSpeed(Wrapped):
    """ZeRO with the case's stage."""

    def __init__(self, model: nn.Module, case: dict[str, Any]) -> None:
        import deepspeed

        self.case = case
        buckets = ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size")
        keys = {
            "zero_optimization": {
                "stage": int(case["way"][-1]),
                **dict.fromkeys(buckets, HIDDEN * HIDDEN),  # as with `auto`; the default is 2 GB
                "stage3_param_persistence_threshold": 10 * HIDDEN,
            },
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_accumulation_steps": case["accumulate"],
            "bf16": {"enabled": case["half"]},
        }
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        self.model = deepspeed.initialize(model=model, optimizer=optimizer, config=keys)[0]

    def holders(self) -> tuple[Any, ...]:
        parts = [getattr(parameter, "ds_tensor", None) for parameter in self.model.parameters()]
        return ({"parts": [part for part in parts if part is not None]},)

    def micro_step(self, batch: dict[str, torch.Tensor], last: bool) -> None:
        loss = self.model(**batch).loss
        self.model.backward(loss)
        del loss
        self.model.step()

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: getattr(p, "ds_tensor", p).detach().clone() for name, p in self.model.named_parameters()}


# --- cases ------------------------------------------------------------------------------------------------------------


def ran(
    case: dict[str, Any], spec: dict[str, Any] | None, settle: bool = False
) -> tuple[Trained, dict[str, torch.Tensor]]:
    """Run a training; returns it and this rank's final weights. With `settle`, it ends once peaks stop changing."""
    kept: list[Wrapped] = []
    gc.collect()
    done = trained(make(case, kept), spec, settle=settle)
    return done, kept.pop().weights()


@functools.cache
def references(words: str) -> tuple[dict[str, torch.Tensor], int, int]:
    """This rank's weights without hf_ckpt, and the largest peaks of all ranks under `full` and without hf_ckpt."""
    keep, weights = ran(json.loads(words), None)
    full, _ = ran(json.loads(words), {"policy": "full"}, settle=True)
    if full.error:
        raise ValueError(f"it does not train under `full`: {full.error}")
    peaks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(peaks, (full.peak_bytes, keep.peak_bytes))
    return weights, *(max(each) for each in zip(*peaks, strict=True))


def run_case(case: dict[str, Any], _: Path) -> dict[str, Any]:
    share = case.pop("share")
    expected, full_bytes, keep_bytes = references(json.dumps(case))
    budget = round(full_bytes + share * (keep_bytes - full_bytes))
    done, weights = ran(case, {"policy": "budget", "budget": budget})
    run = run_of(done, full_bytes, budget, expected, weights)
    return {"run": dataclasses.asdict(run)}


if __name__ == "__main__":
    logging.getLogger("hf_ckpt").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    if any(case["way"].startswith("zero") for case in json.loads(Path(sys.argv[1]).read_text()).values()):
        import deepspeed

        deepspeed.init_distributed("gloo")
    else:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    run_cases(run_case)
