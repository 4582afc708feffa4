"""A process for tests/engines/test_compiled.py: runs a step of compiled blocks for each share in its arguments.

For each share, it prints hits and misses of inductor's and AOTAutograd's caches on disk, and the sum of all gradients.
"""

from __future__ import annotations

import json
import sys

import torch
import torch._dynamo

import hf_ckpt
from hf_ckpt.models.tiny import tiny_batch, tiny_model

WORDS = ("hit", "miss", "bypass")

if __name__ == "__main__":
    counters = torch._dynamo.utils.counters
    for share in sys.argv[1:]:
        counters.clear()
        model = tiny_model("llama", layers=2, attention="sdpa")
        hf_ckpt.install(model, {"compile": "blocks", "share": float(share)})
        model.gradient_checkpointing_enable()
        model(**tiny_batch("llama", tokens=32)).loss.backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        found = {
            "graphs": {word: counters["inductor"][f"fxgraph_cache_{word}"] for word in WORDS},
            "autograd": {word: counters["aot_autograd"][f"autograd_cache_{word}"] for word in WORDS},
            "in_graphs": len(hf_ckpt.describe(model).in_graphs),
            "gradients": [gradient.double().sum().item() for gradient in gradients],
        }
        print(json.dumps(found))
