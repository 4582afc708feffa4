"""A plain Accelerate loop with accumulation and dropout that never enables checkpointing: OUT.

hf_ckpt is used only in the last lines, to write what was recomputed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from hf_ckpt.models.tiny import tiny_batch, tiny_model

STEPS, ACCUMULATE = 5, 2


def main() -> None:
    out = Path(sys.argv[1])
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    model = tiny_model("llama", dropout=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    columns = tiny_batch("llama", batch=2 * STEPS * ACCUMULATE)
    rows = [{name: value[row] for name, value in columns.items()} for row in range(2 * STEPS * ACCUMULATE)]
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=2))
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    accelerator.end_training()

    import hf_ckpt
    from hf_ckpt.attach.record import installation

    out.mkdir()
    recomputed = {} if installation(model) is None else hf_ckpt.describe(model).recomputed
    (out / "found.json").write_text(json.dumps({"losses": losses, "recomputed": recomputed}))
    accelerator.save_model(model, out)


if __name__ == "__main__":
    main()
