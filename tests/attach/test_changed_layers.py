"""Layers that are added, removed or replaced while a plan is enabled: the plan is put on those that the model has."""

import copy
import pickle
import weakref

import pytest
import torch
from helpers.installed import ALL, forward_hooks
from helpers.steps import assert_same, enable, planned, recomputed, step, without_collector
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.attach.enable import exchange
from hf_ckpt.attach.record import installation
from hf_ckpt.attach.switches import FLAG, FUNCTION
from hf_ckpt.models.blocks import find_blocks
from hf_ckpt.models.tiny import tiny_batch, tiny_model
from hf_ckpt.planner.policies import make_plan
from hf_ckpt.spec.spec import Spec
from hf_ckpt.training.install import Decider

BATCH = tiny_batch("llama")
BUDGET = {"policy": "budget", "budget": "1GiB"}


def new_layer(model, index):
    torch.manual_seed(index)
    return LlamaDecoderLayer(model.config, index).train()


def replaced(model):
    model.model.layers[2] = new_layer(model, 2)


def appended(model):
    model.model.layers.append(copy.deepcopy(model.model.layers[1]))


def inserted(model):
    model.model.layers.insert(0, copy.deepcopy(model.model.layers[3]))


def removed(model):
    del model.model.layers[1:3]


def swapped(model):
    layers = model.model.layers
    layers[0], layers[3] = layers[3], layers[0]


def shared(model):
    model.model.layers[3] = model.model.layers[1]


def stack_replaced(model):
    model.model.layers = nn.ModuleList(new_layer(model, index) for index in range(3))


def moved_in(model):
    other = tiny_model("llama", seed=1)
    if installation(model) is not None:
        planned(other, "selective")
    model.model.layers[1] = other.model.layers[2]


CHANGES = (replaced, appended, inserted, removed, swapped, shared, stack_replaced, moved_in)


def changed(model, change):
    """Change a model's layers, and return weak references to those that it had and does not have any more."""
    before = list(find_blocks(model).modules.values())
    change(model)
    model.config.num_hidden_layers = len(model.model.layers)
    after = set(find_blocks(model).modules.values())
    return [weakref.ref(module) for module in before if module not in after]


def functions(model):
    return {name: vars(module).get(FUNCTION) for name, module in find_blocks(model).modules.items()}


CASES = [*(("full", change) for change in CHANGES), ("selective", appended), ("selective", moved_in)]


@pytest.mark.parametrize(
    ("spec", "change"),
    [*CASES, (BUDGET, replaced), (BUDGET, appended)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_the_plan_is_put_on_the_layers_that_the_model_has(spec, change):
    """From the next forward on. What was replaced is freed, and copies of planned blocks keep nothing of the plan."""
    plain, model = tiny_model("llama"), planned(tiny_model("llama"), spec)
    step(model, BATCH)
    model(**BATCH)  # under a budget, its graph is measured when a layer is copied
    changed(plain, change)
    expected = step(plain, BATCH)
    with without_collector():
        gone = changed(model, change)
        assert_same(expected, step(model, BATCH))
        assert [module() for module in gone] == [None] * len(gone)
    assert functions(model) == installation(model).regions
    assert list(functions(model)) == [block.name for block, _ in hf_ckpt.describe(model).plan.actions]
    assert sorted(set(recomputed(model))) == sorted(functions(model))
    hf_ckpt.uninstall(model)
    assert forward_hooks(model) == forward_hooks(plain)
    assert not any(vars(module).keys() & {FLAG, FUNCTION} for module in find_blocks(model).modules.values())


@pytest.mark.parametrize("change", [replaced, appended, removed])
@pytest.mark.parametrize("off", ["paused", "disabled"])
def test_layers_that_change_while_the_plan_is_off_get_it_too(off, change):
    model = planned(tiny_model("llama"))
    step(model, BATCH)
    with without_collector():
        if off == "paused":
            with hf_ckpt.paused(model):
                gone = changed(model, change)
        else:
            getattr(model, compat.transformers.DISABLE_NAMES[-1])()
            gone = changed(model, change)
            enable(model)
        step(model, BATCH)
        assert [module() for module in gone] == [None] * len(gone)
    assert recomputed(model) == list(functions(model))


def test_a_plan_that_does_not_fit_any_more_is_said_once(caplog):
    model = planned(tiny_model("llama"), {"layers": "1,3"})
    changed(model, removed)
    for _ in range(2):
        step(model, BATCH)
    assert recomputed(model) == ["model.layers.1"] * 2
    assert (
        caplog.text.count(
            "the layers of LlamaForCausalLM have changed, and its plan does not fit: new ones keep everything"
        )
        == 1
    )
    assert "names 3, but stack 'decoder' has blocks 0 to 1" in caplog.text


def test_a_new_head_runs_in_chunks_and_counts_stay():
    model = planned(tiny_model("llama"), {"head": 5})
    step(model, BATCH)
    model.resize_token_embeddings(400)
    step(model, BATCH)
    described = hf_ckpt.describe(model)
    assert (described.chunked_heads, set(described.recomputed.values())) == (2, {2})


def test_two_models_exchange_layers():
    """Each plans the layers that it has, also if the other one is uninstalled."""
    plain = [tiny_model("llama", seed=seed) for seed in range(2)]
    models = [planned(tiny_model("llama", seed=seed), spec) for seed, spec in enumerate(("full", "selective"))]
    for one, other in (plain, models):
        one.model.layers[0], other.model.layers[3] = other.model.layers[3], one.model.layers[0]
    expected = [step(model, BATCH) for model in plain]
    for model, gradients in zip(models, expected, strict=True):
        assert_same(gradients, step(model, BATCH))
    assert [sorted(set(recomputed(model))) for model in models] == [ALL, ALL]
    before = recomputed(models[1])
    hf_ckpt.uninstall(models[0])
    assert_same(expected[1], step(models[1], BATCH))
    assert recomputed(models[1]) == sorted(2 * before)
    hf_ckpt.uninstall(models[1])
    assert [forward_hooks(model) for model in models] == [forward_hooks(model) for model in plain]


def test_an_evaluation_frees_a_replaced_layer_too():
    model = planned(tiny_model("llama"))
    step(model, BATCH)
    with without_collector(), torch.no_grad():
        (gone,) = changed(model, replaced)
        model(**BATCH)
        assert gone() is None


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_notice_changes_of_their_own_layers(copied):
    model = planned(tiny_model("llama"))
    twin = copied(model)
    twin.model.layers[2] = new_layer(twin, 2)
    for each in (model, twin):
        step(each, BATCH)
        assert recomputed(each) == ALL
    assert functions(model)[ALL[2]] is not functions(twin)[ALL[2]]


@pytest.mark.parametrize("spec", ["full", {"policy": "selective", "head": "auto"}, BUDGET], ids=str)
def test_a_model_without_blocks_trains_on(spec, caplog):
    """All layers were taken out. That is said once, and nothing of the plan stays."""
    plain, model = tiny_model("llama"), planned(tiny_model("llama"), spec)
    step(model, BATCH)
    with without_collector():
        gone = list(map(weakref.ref, model.model.layers))
        for each in (plain, model):
            each.model.layers = nn.ModuleList()
        for _ in range(2):
            assert_same(step(plain, BATCH), step(model, BATCH))
        assert [module() for module in gone] == [None] * len(gone)
    assert caplog.text.count("has no blocks any more") == 1
    assert forward_hooks(model) == forward_hooks(plain)
    assert vars(model).keys() == vars(plain).keys()


def test_functions_that_are_made_in_a_running_forward_know_their_model(monkeypatch):
    """PEFT calls the model past its hooks, so that the hook of the stack is the first, and plans for the batch."""
    model = planned(tiny_model("llama"), "full")
    monkeypatch.setattr(compat.distributed, "parameters_stay", lambda module: False)
    record = installation(model)
    other = make_plan(Spec.parse("full+selective"), *(find_blocks(model).blocks, "llama", "LlamaForCausalLM"))
    model.forward(**BATCH, use_cache=False).loss.backward()

    def planning(self, base, record, *args):
        exchange(base, record, other)

    monkeypatch.setattr(Decider, "before_forward", planning)
    model.forward(**BATCH, use_cache=False).loss.backward()
    assert sorted(recomputed(model)) == sorted(2 * ALL)
    for function in record.functions.made.values():
        assert not function.parameters_stay
        assert function.above
    assert len(record.functions.made) == 2 * len(ALL)
