"""Mixtures of experts: tokens go to the same experts when a block runs again, and `selective` asks no router twice."""

from __future__ import annotations

import pytest
from helpers.experts import EXPERTS, IMPLEMENTATIONS, experts
from helpers.steps import assert_same, enable, step, without_cache
from helpers.toys import SAVES
from torch.utils._python_dispatch import TorchDispatchMode

import hf_ckpt
from hf_ckpt.attach.record import installation
from hf_ckpt.models.tiny import tiny_batch

SPECS = ({"policy": "full"}, *({"policy": "selective", "save": save} for save in SAVES))


@pytest.mark.compat
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", EXPERTS)
def test_tokens_go_to_the_same_experts(name, implementation):
    """Routing flips at recomputation: gradients of experts that never saw a token; with jitter noise, always."""
    model, batch = experts(name, implementation=implementation), tiny_batch("llama")
    expected = step(model, batch)
    routers = [key for key in expected if key.endswith(".gate.weight")]
    assert len(routers) == 2
    assert all(expected[key].any() for key in routers)
    hf_ckpt.install(model)
    for spec in (*SPECS, {"policy": "selective", "engine": "sac"}):
        enable(model, spec)
        assert_same(expected, step(model, batch), f"{name} {spec}")
        assert all(count > 0 for count in hf_ckpt.describe(model).recomputed.values())
        regions = installation(model).regions.values()
        assert not any(getattr(region, "failed", False) for region in regions)
        assert all(getattr(region, "determinism_check", "default") == "default" for region in regions)


class TopK(TorchDispatchMode):
    """Counts choices of experts."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._schema.name == "aten::topk"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", EXPERTS)
def test_selective_keeps_what_was_chosen(name):
    """No expert is chosen again in backward: neither under any `save`, nor under `full`, which keeps the choice."""
    model = experts(name)
    batch = without_cache(model, tiny_batch("llama"))
    hf_ckpt.install(model)
    counts = []
    for spec in SPECS:
        enable(model, spec)
        loss = model(**batch).loss
        with TopK() as choices:
            loss.backward()
        counts.append(choices.count)
    assert counts == [0, 0, 0, 0]
    assert [*hf_ckpt.describe(model).recomputed.values()] != [0, 0]
