"""Budgets for compiled blocks: their steps are measured, plans mix shares, and peaks stay within the budget."""

from __future__ import annotations

import pytest
import torch
from helpers.adapters import with_lora
from helpers.sparing import sparing
from helpers.steps import assert_near, assert_same, enable, gradients, without_cache
from machine import Allocations

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.attach.record import installation
from hf_ckpt.errors import HfCkptError
from hf_ckpt.models.tiny import FAMILIES, tiny_batch, tiny_model
from hf_ckpt.spec.actions import COMPILED, candidates

pytestmark = [
    pytest.mark.usefixtures("nothing_compiled", "unwatched"),
    pytest.mark.skipif(not compat.transformers.HOOKS_STAY_OUTSIDE, reason="compiled blocks are not measured"),
]
STEPS = 2 * len(candidates(compiled=True)) + 2 + 2
"""Most steps before a plan is checked: two of each share, of which the first compiles; two timed steps; two checks."""


class Training:
    """A training with compiled blocks, under a budget or a fixed share."""

    def __init__(self, spec, family="llama", kind=""):
        model = tiny_model(family, layers=8, hidden=64, attention="sdpa")
        self.model = with_lora(model, family, lora_dropout=0.0) if "lora" in kind else model
        self.autocast = torch.bfloat16 if "bf16" in kind else None
        self.batch = without_cache(self.model, tiny_batch(family, batch=4, tokens=64))
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.0, fused=True)
        hf_ckpt.install(self.model, {"compile": "blocks", **spec})
        enable(self.model)

    def forward_and_backward(self, **sizes):
        batch = tiny_batch("llama", batch=4, **sizes) if sizes else self.batch
        with torch.autocast("cpu", self.autocast, enabled=self.autocast is not None):
            self.model(**batch).loss.backward()

    def step(self, **sizes):
        self.forward_and_backward(**sizes)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return self.planned

    @property
    def planned(self):
        return installation(self.model).planned

    def peak(self):
        """Bytes of the peak of a step, from torch's public profiler."""
        held = [*self.model.parameters(), *self.model.buffers()]
        held += [value for state in self.optimizer.state.values() for value in state.values()]
        with Allocations(*held) as seen:
            self.forward_and_backward()
        return seen.peak_bytes

    def shares(self):
        return [action.share for _, action in self.planned.plan.actions]


def peaks_of_shares(**model):
    peaks = []
    for share in (0.0, 1.0):
        training = Training({"share": share}, **model)
        for _ in range(2):
            training.step()
        peaks.append(training.peak())
    return peaks


def budget_is_held(part, **model):
    low, high = peaks_of_shares(**model)
    budget = round(low + part * (high - low))
    training = Training({"budget": budget}, **model)
    phases = [training.step().phase for _ in range(STEPS)]
    assert phases[-1] == "plan"
    error = training.planned.plan.prediction.peak_bytes / training.planned.measured_bytes - 1
    # Without room to try them, the first and last block count as those between: 1.7 % too high in LLaMA with LoRA.
    assert -0.005 <= error <= (0.02 if model.get("kind") == "lora" else 0.01)
    assert training.peak() <= 1.005 * budget
    assert 0 < sum(training.shares()) < len(training.shares())
    assert len(hf_ckpt.describe(training.model).in_graphs) == len(training.shares())
    return training


@pytest.mark.long
@pytest.mark.usefixtures("steady_times")
@sparing(("family", "kind"), [(f, k) for f in FAMILIES for k in ("", "lora", "bf16")], ("llama", ""))
def test_a_budget_is_held_with_the_same_gradients(graphs, family, kind):
    """Peaks are predicted as exactly as without compilation, and gradients do not change.

    How much of the budget a plan uses depends on measured times, and is not tested.
    """
    training = budget_is_held(0.5, family=family, kind=kind)
    reference = Training({"share": 1.0}, family, kind)
    reference.forward_and_backward()
    assert_same(gradients(reference.model), gradients(training.model))


@pytest.mark.slow
@pytest.mark.usefixtures("steady_times")
@sparing("family", FAMILIES, "gpt2")
def test_budgets_are_held_by_inductor(family):
    training = budget_is_held(0.5, family=family)
    reference = Training({"share": 1.0}, family)
    reference.forward_and_backward()
    assert_near(gradients(reference.model), gradients(training.model))


@pytest.mark.long
def test_a_step_that_compiles_is_not_measured(graphs):
    """Each share has a step that compiles and one that is measured; a new length compiles once more."""
    training, compiled = Training({"budget": "1GiB"}), []
    for sizes in [{"tokens": 64}] * STEPS + [{"tokens": 96}] * STEPS:
        before = len(graphs)
        phase = training.step(**sizes).phase
        compiled.append((phase, len(graphs) > before))
    assert [phase for phase, new in compiled if new][:3] == ["measure full", "try actions", "try actions"]
    measured = [phase for phase, new in compiled[:STEPS] if not new]
    assert measured[:6] == ["measure full", "try actions", "try actions", "time", "time", "check"]
    assert compiled[-1] == ("plan", False)


@pytest.mark.long
def test_the_users_profiler_goes_first(graphs):
    """While the user profiles, nothing is measured; afterwards the run goes on to its plan."""
    training = Training({"budget": "1GiB"})
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        phases = {training.step().phase for _ in range(4)}
    assert phases == {"measure full"}
    assert profile.key_averages()
    assert training.step().phase == "measure full"
    assert [training.step().phase for _ in range(STEPS)][-1] == "plan"
    assert not compat.profiler.profiler_is_active()


def test_until_there_is_a_plan_blocks_keep_their_inputs(graphs):
    training = Training({"budget": "1GiB"})
    training.step()
    assert {action for _, action in training.planned.plan.actions} == {COMPILED}
    assert "share 0" in str(hf_ckpt.describe(training.model))


def test_versions_that_cannot_be_measured_are_named(monkeypatch):
    monkeypatch.setattr(compat.transformers, "HOOKS_STAY_OUTSIDE", False)
    with pytest.raises(HfCkptError, match=r"together with its hooks; 5\.23 does not. Give a `share`"):
        Training({"budget": "1GiB"}).step()
