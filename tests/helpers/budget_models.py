"""Budgets on trainings of models outside the four families, by name in `ROWS`; see `budget_runs`."""

from __future__ import annotations

import torch

import hf_ckpt
from helpers.budget_runs import Make, Scenario, Watch
from helpers.steps import enable
from helpers.unusual_models import IMAGE_TOKENS, MODELS, unusual_batch, unusual_model
from hf_ckpt.compat.peft import add_lora
from hf_ckpt.models.blocks import find_blocks

STEPS = 14


def training(name: str, change: str = "", accumulate: int = 1) -> Make:
    """A row that trains a model of `unusual_models` with AdamW, as it is or after a change."""

    def make(spec: dict | None) -> Scenario:
        model = CHANGES[change](unusual_model(name))
        if spec is not None:
            hf_ckpt.install(model)
            enable(model, spec)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)

        def train(watch: Watch) -> None:
            torch.manual_seed(5)
            for number in range(STEPS * accumulate):
                with watch.step():
                    loss = model(**unusual_batch(name, seed=number)).loss / accumulate
                    loss.backward()
                    del loss
                    if (number + 1) % accumulate == 0:
                        optimizer.step()
                        optimizer.zero_grad()

        return Scenario(model, train, settled=4 * accumulate)

    return make


def without_images(model):
    """The model with its vision parts frozen, as most people train it."""
    for name, parameter in model.named_parameters():
        if "vision" in name or "visual" in name:
            parameter.requires_grad_(False)
    return model


def with_adapters(model):
    """Adapters with dropout on every linear layer of the language model."""
    torch.manual_seed(1)
    blocks = [name for name in find_blocks(model).modules if not ("vision" in name or "visual" in name)]
    linears = [
        f"{block}.{name}"
        for block in blocks
        for name, module in model.get_submodule(block).named_modules()
        if isinstance(module, torch.nn.Linear)
    ]
    return add_lora(model, rank=4, lora_dropout=0.05, init_lora_weights=False, targets=linears).train()


CHANGES = {"": lambda model: model, "tower frozen": without_images, "lora": with_adapters}
ROWS = {
    **{name: training(name) for name in MODELS},
    **{f"{name}, tower frozen": training(name, "tower frozen") for name in IMAGE_TOKENS},
    **{f"{name}, lora": training(name, "lora") for name in (*IMAGE_TOKENS, "mixtral")},
    **{f"{name}, four micro-steps": training(name, accumulate=4) for name in ("qwen3_vl", "mixtral")},
}
"""Name -> `make` for every training of this file."""
