"""Trains with every step checked, to count false alarms of the watch.

watched.py              5,000 steps of random cases: family, adapters, dropout, precision, accumulation, policy; each
                        case is saved and resumed in a new model half-way
watched.py --out OUT    resumes an earlier run: OUT has a JSON line for each case

Run it from the repository root. It prints wrong gradients and alarms, and then exits with 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import random
import sys
from pathlib import Path
from typing import Any

import torch

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.models.blocks import base_model
from hf_ckpt.models.tiny import tiny_batch, tiny_model

CHOICES: dict[str, list[Any]] = {
    "family": ["llama", "gpt2", "bert", "t5"],
    "lora": [False, True],
    "dropout": [0.0, 0.1],
    "precision": ["float32", "autocast", "bfloat16"],
    "accumulation": [1, 3],
    "attention": ["eager", "sdpa"],
    "policy": [
        {"policy": "full"},
        {"policy": "full", "every_n_layers": 2},
        {"policy": "full", "segments": 2},
        {"policy": "selective"},
        {"policy": "selective", "save": ["attention"]},
        {"policy": "selective", "save": ["linear"]},
        {"policy": "full+selective"},
        {"policy": "selective", "head": 8},
        {"policy": "budget", "budget": "0"},
    ],
}


def cases(count: int) -> list[dict[str, Any]]:
    """Random cases; the same count gives the same cases."""
    chance = random.Random(0)
    return [{name: chance.choice(values) for name, values in CHOICES.items()} for _ in range(count)]


def make(case: dict[str, Any]) -> tuple[Any, Any]:
    """The model of a case in train mode with its policy enabled, and its optimizer."""
    dtype = torch.bfloat16 if case["precision"] == "bfloat16" else torch.float32
    model: Any = tiny_model(case["family"], dropout=case["dropout"], attention=case["attention"], dtype=dtype)
    if case["lora"]:
        torch.manual_seed(0)
        model = compat.peft.add_lora(model, rank=4, lora_dropout=case["dropout"], init_lora_weights=False)
    spec = dict(case["policy"])
    if "budget" in spec:  # weights, gradients, optimizer state, and some activations
        spec["budget"] = f"{5 * sum(p.nbytes for p in model.parameters())}B"
    hf_ckpt.install(model, {**spec, "check_every": 1})
    base_model(model).gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    return model.train(), optimizer


def train(model: Any, optimizer: Any, case: dict[str, Any], steps: range) -> None:
    autocast = torch.autocast("cpu", torch.bfloat16) if case["precision"] == "autocast" else contextlib.nullcontext()
    for step in steps:
        for micro in range(case["accumulation"]):
            with autocast:
                loss = model(**tiny_batch(case["family"], tokens=16, seed=10 * step + micro)).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def run(case: dict[str, Any], steps: int) -> dict[str, Any]:
    """Train a case for some steps and resume it half-way; returns the case and the watch's counts."""
    found = {"steps": 0, "checks": 0, "compared": 0, "left_out": 0, "differences": []}
    saved: tuple[Any, Any, Any] | None = None
    for part in (range(steps // 2), range(steps // 2, steps)):
        model, optimizer = make(case)
        if saved is not None:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            torch.set_rng_state(saved[2])
        train(model, optimizer, case, part)
        saved = model.state_dict(), optimizer.state_dict(), torch.get_rng_state()
        watched = hf_ckpt.describe(model).watched
        found["steps"] += len(part)
        if watched is not None:
            found["checks"] += watched.checks
            found["compared"] += watched.compared
            found["left_out"] += watched.left_out
            found["differences"] += watched.differences
    return {**case, **found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=250)
    parser.add_argument("--steps", type=int, default=20, help="of each case")
    parser.add_argument("--out", type=Path, help="where to add the JSON lines")
    asked = parser.parse_args()
    logging.getLogger("hf_ckpt").setLevel(logging.ERROR)
    done = asked.out.read_text(encoding="utf-8").splitlines() if asked.out and asked.out.exists() else []
    found = [json.loads(line) for line in done]
    for case in cases(asked.cases)[len(found) :]:
        found.append(run(case, asked.steps))
        if asked.out:
            with asked.out.open("a", encoding="utf-8") as lines:
                lines.write(f"{json.dumps(found[-1])}\n")
        for difference in found[-1]["differences"][:1]:
            print(json.dumps(case), difference, flush=True)
    sums = {key: sum(each[key] for each in found) for key in ("steps", "checks", "compared", "left_out")}
    print(len(found), "cases:", sums, "alarms:", sum(len(each["differences"]) for each in found))
    return int(any(each["differences"] for each in found))


if __name__ == "__main__":
    sys.exit(main())
