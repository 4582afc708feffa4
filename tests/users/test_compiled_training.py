"""Training of compiled models: nothing is compiled again, LoRA, the Trainer, budgets, hooks of the user."""

from __future__ import annotations

import contextlib
import os

import pytest
import torch
import torch._dynamo
from accelerate.state import AcceleratorState, GradientState, PartialState
from helpers.compiled import FULL, LAYERS, SELECTIVE, compiled_step, each_block_replaced, small
from helpers.steps import assert_same, enable, gradients, without_cache
from helpers.trainers import FLAG, trainer
from peft import LoraConfig, get_peft_model

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.models.blocks import base_model, find_blocks
from hf_ckpt.models.tiny import tiny_batch, tiny_model

pytestmark = pytest.mark.usefixtures("nothing_compiled")


def graphs_of_training(spec, way, layers):
    """Graphs after each of six steps: lengths alternate, and the plan goes off and on between them in every way."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    model = small("llama", layers)
    if spec is not None:
        hf_ckpt.install(model, spec)
        enable(model)
    run = way(model, backend="aot_eager")
    graphs, losses = [], []
    for number in range(6):
        batch = without_cache(model, tiny_batch("llama", tokens=16 + 8 * (number % 2), seed=number))
        loss = run(**batch).loss
        loss.backward()
        losses.append(loss.item())
        model.eval()
        away = hf_ckpt.paused(model) if number % 2 or spec is None else disabled(model)
        with away if spec is not None else contextlib.nullcontext(), torch.no_grad():
            run(**batch)
        model.train()
        graphs.append(counters["stats"]["unique_graphs"])
    assert not counters["graph_break"]
    if spec is not None:
        assert len(hf_ckpt.describe(model).in_graphs) == layers
    return graphs, {"loss": torch.tensor(losses), **gradients(model)}


@contextlib.contextmanager
def disabled(model):
    getattr(model, compat.DISABLE_NAMES[-1])()
    yield
    enable(model)


@pytest.mark.slow
@pytest.mark.parametrize("way", [each_block_replaced, torch.compile], ids=["blocks", "whole"])
def test_not_compiled_again(way):
    """As many graphs as without us: for training and evaluation, one length and any length; whatever we put on a
    model again and again, and on block after block. (torch.compile gives up after eight.)"""
    layers = 10 if way is each_block_replaced else 2
    expected, numbers = graphs_of_training(None, way, layers)
    assert expected == [2, 4, 4, 4, 4, 4]
    for spec in (SELECTIVE, {"policy": "full", "segments": 2}):
        graphs, found = graphs_of_training(spec, way, layers)
        assert graphs == expected, spec
        assert_same(numbers, found, spec)


def with_adapters():
    torch.manual_seed(0)
    config = LoraConfig(
        r=4, lora_dropout=0.2, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False
    )
    return get_peft_model(tiny_model("llama", layers=LAYERS, attention="sdpa", dropout=0.1), config)


@pytest.mark.slow
@pytest.mark.parametrize("way", [each_block_replaced, torch.compile], ids=["blocks", "whole"])
def test_adapters_with_dropout(way):
    """What is run again in a graph draws the same dropout: bit-equal to compiled without us. (`save` without linear
    layers, because SAC also keeps what frozen ones make, which no backward needs: more than without it.)"""
    plain = compiled_step(None, way, model=with_adapters())
    for spec in (FULL, {**SELECTIVE, "save": ["attention"]}):
        ours = compiled_step(spec, way, model=with_adapters())
        assert_same(plain.found, ours.found, spec)
        assert all(name == "loss" or bool(value.isfinite().all() and value.any()) for name, value in ours.found.items())
        assert ours.graphs == plain.graphs
        assert ours.saved_bytes < plain.saved_bytes
        assert ours.warned <= plain.warned
        assert len(ours.description.in_graphs) == LAYERS


# --- the Trainer ------------------------------------------------------------------------------------------------------


def trained(folder, monkeypatch, spec, *, regional=False, compiles=True):
    """Three steps of a Trainer that compiles: losses and gradient norms, all that was logged, model, graphs."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", str(regional))
    model = small("llama")
    if spec:
        hf_ckpt.install(model)
    asked = {FLAG: spec is not None, f"{FLAG}_kwargs": spec}
    compiling = {"torch_compile": True, "torch_compile_backend": "aot_eager"} if compiles else {}
    job = trainer(folder, model, max_steps=3, **compiling, **asked)
    try:
        job.train()
    finally:
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
    logs = [row for row in job.state.log_history if "loss" in row]
    assert not counters["graph_break"]
    return [(row["loss"], row["grad_norm"]) for row in logs], logs, model, counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.parametrize("regional", [False, True], ids=["whole", "regional"])
def test_the_trainer_compiles(regional, tmp_path, monkeypatch, caplog):
    expected, _, _, plain_graphs = trained(tmp_path / "plain", monkeypatch, None, regional=regional)
    got, logs, model, graphs = trained(tmp_path / "ours", monkeypatch, {**FULL, "head": "auto"}, regional=regional)
    assert len(got) == 3
    assert got == expected
    assert graphs == plain_graphs
    found = hf_ckpt.describe(model)
    assert len(found.in_graphs) == LAYERS
    assert found.head_in_graph
    assert "torch.compile has it in a graph" in caplog.text
    assert all("time/step_s" in row and "time/recompute_share" not in row for row in logs)  # not known, so not 0


@pytest.mark.slow
def test_the_trainers_regions_are_taken_over(graphs, tmp_path, monkeypatch, caplog):
    """With compiled blocks in the plan, and nobody else's: the loss is that of training without another compiler."""
    spec = {"compile": "blocks", "share": 0.3}
    expected, _, plain, _ = trained(tmp_path / "alone", monkeypatch, spec, compiles=False)
    mine = len(graphs)
    got, _, model, _ = trained(tmp_path / "beside", monkeypatch, spec, regional=True)
    torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), rtol=1e-5, atol=0.0)
    assert len(graphs) == 2 * mine > 0
    assert "compiled by hf_ckpt" in caplog.text
    for each in (plain, model):
        told = hf_ckpt.describe(each)
        assert (len(told.in_graphs), told.compiled_by_others) == (LAYERS, ())
        assert set(told.forwards.values()) == {3}


@pytest.mark.long
def test_verify_says_that_it_cannot_look_into_graphs():
    model = small("llama", 1)
    run = torch.compile(model, backend="aot_eager")
    result = hf_ckpt.verify(run, tiny_batch("llama"), FULL)
    assert not result
    assert result.not_recomputed == result.in_graphs == ("model.layers.0",)
    assert "verify the model before it is compiled" in str(result)
    with torch.compiler.set_stance("force_eager"):
        eager = hf_ckpt.verify(run, tiny_batch("llama"), FULL)
    assert eager, eager
    assert "compiled" not in str(eager)


@pytest.mark.slow
def test_a_budget_is_planned_by_an_eager_forward():
    """In a graph no plan can be made, and every block is recomputed; the plan of an eager forward is compiled."""
    model = small("llama")
    hf_ckpt.install(model, {"policy": "budget", "budget": "1GiB"})
    enable(model)
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    batch = without_cache(model, tiny_batch("llama"))
    run(**batch).loss.backward()
    assert [action.kind for action in hf_ckpt.describe(model).plan.active().values()] == ["full"] * LAYERS
    model.zero_grad()
    with torch.compiler.set_stance("force_eager"):
        run(**batch)
    found = hf_ckpt.describe(model)
    assert found.plan.prediction.budget_bytes == 2**30
    assert not found.plan.active()  # there is room for everything
    run(**batch).loss.backward()
    counters = torch._dynamo.utils.counters
    assert (counters["stats"]["unique_graphs"], not counters["graph_break"]) == (2, True)


@pytest.mark.slow
def test_a_budget_is_planned_between_compiled_blocks():
    model = each_block_replaced(small("llama"), backend="aot_eager")
    hf_ckpt.install(model, {"policy": "budget", "budget": "1GiB"})
    enable(model)
    model(**without_cache(model, tiny_batch("llama"))).loss.backward()
    assert hf_ckpt.describe(model).plan.prediction.budget_bytes == 2**30


def test_hooks_of_the_user_around_the_model_are_counted():
    """What stays is counted, too, where saved-tensor hooks around the model say where."""
    model = small("llama")
    hf_ckpt.install(model, SELECTIVE)
    enable(model)
    assert isinstance(base_model(model), compat.PreTrainedModel)
    batch = without_cache(model, tiny_batch("llama"))
    model(**batch)
    expected = hf_ckpt.describe(model)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        model(**batch)
    found = hf_ckpt.describe(model)
    assert found.dropped
    assert found.kept.keys() >= expected.kept.keys()
    assert sum(found.kept.values()) >= sum(expected.kept.values()) > 0


def test_hooks_keep_their_numbers_apart():
    """Ours count down from -1, so that they never take the place of anybody else's."""
    model = small("llama")
    norm = find_blocks(model).modules["model.layers.0"].input_layernorm
    calls = []
    before = norm.register_forward_hook(lambda *_: calls.append("before"), always_call=True)
    hf_ckpt.install(model, SELECTIVE)
    enable(model)
    after = norm.register_forward_hook(lambda *_: calls.append("after"), always_call=True)
    assert after.id == before.id + 1 or after.id > before.id
    assert sorted(norm._forward_hooks) == [-1, before.id, after.id]
    model(**without_cache(model, tiny_batch("llama")))
    assert calls == ["before", "after"]
    hf_ckpt.uninstall(model)
    assert sorted(norm._forward_hooks) == sorted(norm._forward_hooks_always_called) == [before.id, after.id]
