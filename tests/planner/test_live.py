"""`budget` and `auto` in training: planned on the first batch, again for a larger one, within the budget."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
from helpers.planned import SIZES, budgeted, live_peak, model_of, without_state
from helpers.sparing import sparing
from helpers.steps import assert_same, enable, step, without_cache

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.attach.record import installation
from hf_ckpt.errors import HfCkptError, InfeasibleError
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.models.tiny import FAMILIES, tiny_batch, tiny_model
from hf_ckpt.planner import live
from hf_ckpt.planner.shapes import BatchShape
from hf_ckpt.prediction import optimizers
from hf_ckpt.spec.spec import Spec

pytestmark = [pytest.mark.compat, pytest.mark.usefixtures("few_actions")]


@pytest.fixture(autouse=True)
def measurements_end():
    """A measurement of a step ends with its model, which no test shall leave to the next one."""
    yield
    gc.collect()


@pytest.mark.long
@sparing(("family", "lora"), [(family, lora) for family in FAMILIES for lora in (False, True)], ("llama", False))
def test_it_fits_and_gives_the_same_gradients(family, lora):
    """The measured peak is within the budget and within 3 % of the prediction; gradients are those without a plan."""
    model = without_state(model_of(family, lora=lora, dropout=0.1))
    batch = tiny_batch(family, **SIZES)
    expected = step(model, batch)
    none = live_peak(model, batch)
    for share in (0.85, 0.65):
        budgeted(model, int(none * share))
        assert_same(expected, step(model, batch), f"{family} within {share}")
        done = hf_ckpt.describe(model)
        assert sum(done.recomputed.values()) > 0
        measured, predicted = live_peak(model, batch), done.plan.prediction.peak_bytes
        assert measured <= none * share
        assert abs(measured / predicted - 1) <= 0.03, (family, measured, predicted)
        hf_ckpt.uninstall(model)


@pytest.mark.long
def test_a_head_in_chunks_where_it_is_allowed_and_nothing_else_fits():
    """The peak is the head's: with chunks the budget is kept, without them it cannot be."""
    model = without_state(tiny_model("llama", layers=3, hidden=64, attention="sdpa", vocab_size=4000))
    batch = tiny_batch("llama", batch=4, tokens=256)
    expected = step(model, batch)
    budgeted(model, "1MiB")
    with pytest.raises(InfeasibleError, match='the head in chunks \\("head": "auto"\\)') as refused:
        step(model, batch)
    budget = int(refused.value.floor_bytes * 0.8)
    budgeted(model, budget, head="auto")
    found = step(model, batch)
    done = hf_ckpt.describe(model)
    assert done.plan.head == "auto"
    assert done.chunked_heads == 1
    assert live_peak(model, batch) <= budget
    for name, gradient in expected.items():
        assert torch.allclose(found[name], gradient, rtol=0, atol=0.05 * float(gradient.abs().max())), name


@pytest.mark.long
@sparing(("lora", "budget"), [(False, "36MiB"), (True, "20MiB")], (True, "20MiB"))
def test_verify_plans_too(lora, budget):
    model, batch = model_of(lora=lora), tiny_batch("llama", **SIZES)
    result = hf_ckpt.verify(model, batch, {"policy": "budget", "budget": budget})
    assert result, result
    assert result.plan.prediction is not None
    assert sum(result.recomputed.values()) > 0


@pytest.mark.long
def test_a_model_without_a_head_is_planned_for():
    """Such a model runs its stack itself, so that the hooks of both are in one place."""
    model = model_of().model
    budgeted(model, "1GiB")
    for _ in range(2):
        model(input_ids=tiny_batch("llama")["input_ids"])[0].square().mean().backward()
    assert installation(model).planned.plan == hf_ckpt.describe(model).plan
    assert {action.kind for _, action in hf_ckpt.describe(model).plan.actions} == {"keep"}


@pytest.mark.usefixtures("traced_once")
def test_until_the_first_batch_every_block_is_recomputed():
    model = model_of()
    budgeted(model, "1GiB")
    assert {action.kind for _, action in hf_ckpt.describe(model).plan.actions} == {"full"}
    assert installation(model).planned is None
    step(model, tiny_batch("llama"))
    assert {action.kind for _, action in hf_ckpt.describe(model).plan.actions} == {"keep"}


@pytest.mark.slow
def test_batches_of_new_sizes_are_planned_for():
    """Smaller ones, too, where they would recompute otherwise; sizes that came before are not."""
    model = without_state(model_of())
    budgeted(model, "30MiB")
    kinds, known = [], set()
    for batch, tokens in ((2, 64), (1, 32), (4, 64), (2, 128), (4, 96), (4, 64), (2, 128)):
        step(model, tiny_batch("llama", batch=batch, tokens=tokens))
        planned = installation(model).planned
        kinds.append("known" if id(planned) in known else "new")
        known.add(id(planned))
        assert live_peak(model, tiny_batch("llama", batch=batch, tokens=tokens)) <= 30 * 2**20
    assert kinds == ["new", "known", "new", "new", "new", "known", "known"]
    assert "4 x 128 tokens" not in planned.plans


@pytest.mark.long
@pytest.mark.usefixtures("traced_once")
def test_padding_is_planned_for_once_it_comes():
    model = model_of()
    budgeted(model, "1GiB")
    batch = tiny_batch("llama")
    step(model, batch)
    assert not installation(model).planned.shape.padded
    batch["attention_mask"][0, :3] = 0
    step(model, batch)
    padded = installation(model).planned
    assert padded.shape.padded
    step(model, batch)
    assert installation(model).planned is padded


@pytest.mark.slow
def test_accumulated_gradients_are_planned_for_once_they_are_there():
    model, batch = without_state(model_of()), tiny_batch("llama", **SIZES)
    budgeted(model, "1GiB")
    model(**without_cache(model, batch)).loss.backward()
    assert installation(model).planned.shape.accumulation == 1
    with LiveBytes(model, batch) as live:
        model(**without_cache(model, batch)).loss.backward()
    planned = installation(model).planned
    assert planned.shape.accumulation == 2
    assert abs(live.peak_bytes / planned.plan.prediction.peak_bytes - 1) <= 0.03


def test_accelerate_says_how_many_steps_are_accumulated():
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    try:
        Accelerator(gradient_accumulation_steps=4, cpu=True)
        model = model_of()
        budgeted(model, "1GiB")
        step(model, tiny_batch("llama"))
        assert installation(model).planned.shape.accumulation == 2
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


@pytest.mark.long
def test_autocast_is_planned_for():
    """Casts of weights are kept by linear layers; the plan knows them."""
    model, batch = without_state(model_of()), tiny_batch("llama", **SIZES)
    budgeted(model, "1GiB")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(**without_cache(model, batch)).loss
    loss.backward()
    model.zero_grad(set_to_none=True)
    with LiveBytes(model, batch) as live:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**without_cache(model, batch)).loss
        loss.backward()
    planned = installation(model).planned
    assert planned.shape.autocast == torch.bfloat16
    assert abs(live.peak_bytes / planned.plan.prediction.peak_bytes - 1) <= 0.03


@pytest.mark.slow
def test_optimizer_state_counts_by_its_kind():
    model, batch = model_of(), tiny_batch("llama", **SIZES)
    peaks = []
    for make in (lambda p: torch.optim.SGD(p, lr=0.0), torch.optim.AdamW):
        optimizer = make(model.parameters())
        budgeted(model, "1GiB")
        step(model, batch)
        peaks.append(installation(model).planned.costs[0].static.optimizer)
        hf_ckpt.uninstall(model)
        del optimizer
    assert peaks == [0, 2 * sum(parameter.nbytes for parameter in model.parameters())]


def test_state_that_is_there_is_counted_as_it_is():
    model, batch = model_of(), tiny_batch("llama", **SIZES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    step(model, batch)
    optimizer.step()
    budgeted(model, "1GiB")
    step(model, batch)
    assert installation(model).planned.costs[0].static.optimizer == optimizers.state_bytes(optimizer)


@pytest.mark.usefixtures("traced_once")
def test_what_cannot_fit_says_what_fills_it():
    model = model_of()
    budgeted(model, "1MiB")
    with pytest.raises(InfeasibleError, match=r"no plan fits into 1\.00 MiB") as raised:
        step(model, tiny_batch("llama", **SIZES))
    assert raised.value.floor_bytes == sum(raised.value.parts.values())
    assert "LoRA" in str(raised.value)
    assert hf_ckpt.describe(model).enabled  # what was there before is still there
    enable(model, {"policy": "budget", "budget": raised.value.floor_bytes})
    step(model, tiny_batch("llama", **SIZES))


@pytest.mark.slow
def test_it_plans_through_peft_and_keeps_the_plan_over_disable_and_enable():
    model, batch = model_of(lora=True), tiny_batch("llama", **SIZES)
    base = model.get_base_model()
    budgeted(model, "1GiB")
    step(model, batch)
    planned = installation(model).planned
    base.gradient_checkpointing_disable()
    enable(model)
    step(model, batch)
    assert installation(model).planned is planned
    enable(model, {"policy": "budget", "budget": "2GiB"})
    step(model, batch)
    assert installation(model).planned is not planned


def test_nothing_is_planned_without_gradients_or_in_eval_mode():
    model, batch = model_of(), tiny_batch("llama")
    budgeted(model, "1GiB")
    with torch.no_grad():
        model(**batch)
    model.eval()(**batch)
    assert installation(model).planned is None


def test_random_state_and_the_model_are_as_before_planning():
    model, batch = model_of(dropout=0.1), tiny_batch("llama", **SIZES)
    names = {name for name, _ in model.named_parameters()}
    torch.manual_seed(3)
    before = torch.get_rng_state()
    live.plan_for(model, Spec.parse({"policy": "budget", "budget": "1GiB"}), BatchShape({"decoder": (4, 128)}))
    assert torch.equal(torch.get_rng_state(), before)
    assert {name for name, _ in model.named_parameters()} == names
    assert all(parameter.grad is None for parameter in model.parameters())
    assert "_hf_ckpt" not in vars(model)
    step(model, batch)


def test_saved_tensor_hooks_of_the_user_see_nothing_of_the_planning():
    model, batch = model_of(), tiny_batch("llama")
    budgeted(model, "1GiB")
    seen = []

    def pack(tensor):
        seen.append(type(tensor))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(**without_cache(model, batch)).loss.backward()
    assert seen
    assert not [kind for kind in seen if "Fake" in kind.__name__]


@pytest.mark.slow
def test_a_planned_model_copies_and_pickles():
    model, batch = model_of(), tiny_batch("llama", **SIZES)
    budgeted(model, "36MiB")
    step(model, batch)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert hf_ckpt.describe(twin).enabled
        step(twin, tiny_batch("llama", batch=8, tokens=128))
        assert installation(twin).planned.shape.sizes == {"decoder": (8, 128)}
    assert installation(model).planned.shape.sizes == {"decoder": (4, 128)}


def test_split_parameters_are_refused(monkeypatch):
    model = model_of()
    budgeted(model, "1GiB")
    monkeypatch.setattr(compat, "is_sharded", lambda model: True)
    with pytest.raises(HfCkptError, match="split over ranks by FSDP1 or ZeRO-3"):
        step(model, tiny_batch("llama"))


@pytest.mark.usefixtures("traced_once")
def test_a_saved_plan_of_a_budget_is_installed_without_planning(tmp_path):
    model, batch = model_of(), tiny_batch("llama", **SIZES)
    budgeted(model, "36MiB")
    step(model, batch)
    hf_ckpt.describe(model).save(tmp_path / "plan.yaml")
    other = model_of()
    hf_ckpt.install(other, {"plan": str(tmp_path / "plan.yaml")})
    assert hf_ckpt.describe(other).plan == hf_ckpt.describe(model).plan
    assert hf_ckpt.describe(other).plan.prediction == hf_ckpt.describe(model).plan.prediction
