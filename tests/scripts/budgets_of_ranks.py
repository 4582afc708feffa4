"""One rank of trainings under a budget with DDP, FSDP1 or FSDP2; see ranks.py and `helpers.budget_ranks`.

Every case trains without hf_ckpt, under `full`, and under a budget that is the same on all ranks. Each rank writes
which expectations failed.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import logging
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from helpers.budgets import Row, Trained, Training, Watch, differing, missed, trained
from helpers.steps import enable
from peft import LoraConfig, get_peft_model
from ranks import run_cases, without_cache, wrapped
from torch import nn

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.models.tiny import tiny_batch, tiny_model

LAYERS, HIDDEN, BATCH = 8, 96, 3


def row(case: dict[str, Any], kept: list[Any]) -> Row:
    """A row of `budgets`; the object that trains is stored in `kept`."""

    def made(spec: dict[str, Any] | None) -> Training:
        model: nn.Module = without_cache(tiny_model("llama", layers=LAYERS, hidden=HIDDEN, attention="sdpa"))
        if case["lora"]:
            torch.manual_seed(1)
            config = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.05, init_lora_weights=False)
            model = get_peft_model(model, config)
        model.train()
        if spec is not None:
            hf_ckpt.install(model)
            enable(model, spec)
        trainer = Wrapped(model, case)
        kept[:] = [trainer]
        return Training(model, functools.partial(train, trainer, case))

    return made


def train(trainer: Wrapped, case: dict[str, Any], watch: Watch) -> None:
    rank = dist.get_rank()
    torch.manual_seed(5 + rank)
    for step in range(case["steps"]):
        for micro in range(case["accumulate"]):
            seed = 1000 * rank + 10 * step + micro
            batch = tiny_batch("llama", batch=BATCH, tokens=case["tokens"][rank], seed=seed)
            with watch.step():
                trainer.micro_step(batch, last=micro == case["accumulate"] - 1)


class Wrapped:
    """A model in DDP, FSDP1 or FSDP2, and its optimizer."""

    def __init__(self, model: nn.Module, case: dict[str, Any]) -> None:
        self.case = case
        options = {"use_orig_params": True} if case["way"] == "fsdp1" else {}
        self.model: Any = wrapped(model, case["way"], case["half"], **options)
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-3)

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


def ran(case: dict[str, Any], spec: dict[str, Any] | None) -> tuple[Trained, dict[str, torch.Tensor]]:
    """Run a training; returns it and this rank's final weights."""
    kept: list[Wrapped] = []
    done = trained(row(case, kept), spec)
    return done, kept.pop().weights()


@functools.cache
def references(words: str) -> tuple[dict[str, torch.Tensor], int, int]:
    """This rank's weights without hf_ckpt, and the largest peaks of all ranks under `full` and without hf_ckpt."""
    keep, weights = ran(json.loads(words), None)
    full, _ = ran(json.loads(words), {"policy": "full"})
    peaks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(peaks, (full.peak_bytes, keep.peak_bytes))
    return weights, *(max(each) for each in zip(*peaks, strict=True))


def run_case(case: dict[str, Any], _: Path) -> dict[str, Any]:
    share = case.pop("share")
    expected, full_bytes, keep_bytes = references(json.dumps(case))
    budget = round(full_bytes + share * (keep_bytes - full_bytes))
    done, weights = ran(case, {"policy": "budget", "budget": budget})
    return {"missed": [*missed(done.steps, budget, full_bytes), *differing(expected, weights, done.recomputed)]}


if __name__ == "__main__":
    logging.getLogger("hf_ckpt").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    run_cases(run_case)
