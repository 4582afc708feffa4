"""torch.compile: the same numbers as compiled without us, in no more graphs, with less saved for backward.

All backends but one run kernels of eager mode, so the same operations are run with and without checkpointing, and
gradients are bit-equal; inductor fuses and rounds anew, so there is a tolerance.
"""

import contextlib
import functools
import inspect
import logging
import os
import warnings
from typing import Any, NamedTuple

import pytest
import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import compile_regions
from conftest import assert_same, checkpoints_compiled, enable, gradients, without_cache
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

import hf_ckpt
from hf_ckpt import callback, compat
from hf_ckpt.engines import rebuild
from hf_ckpt.families import base_model, find_blocks
from hf_ckpt.tiny import FAMILIES, tiny_batch, tiny_model

LAYERS = 2
FULL, SELECTIVE, MIXED = {"policy": "full"}, {"policy": "selective"}, {"policy": "full", "every_n_layers": 2}
INSIDE = "__call__" not in vars(compat.GradientCheckpointingLayer)
"""Whether the checkpoint is inside of what `block.compile()` compiles; around it before transformers 5."""


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch):
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "propagate", False)  # pytest would keep all of it
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


# --- ways to compile --------------------------------------------------------------------------------------------------


def each_block(model, **options):
    for block in find_blocks(model).modules.values():
        block.compile(**options)
    return model


def each_block_replaced(model, **options):
    for name, block in find_blocks(model).modules.items():
        parent, _, place = name.rpartition(".")
        setattr(base_model(model).get_submodule(parent), place, torch.compile(block, **options))
    return model


def each_forward(model, **options):
    for block in find_blocks(model).modules.values():
        block.forward = torch.compile(block.forward, **options)
    return model


def in_place(model, **options):
    model.compile(**options)
    return model


class Compiled(NamedTuple):
    """What one training step left."""

    found: dict[str, Any]
    """Loss and gradients."""
    saved_bytes: int
    """For backward, parameters left out."""
    graphs: int
    breaks: int
    regions: list[int]
    """Checkpointed regions, graph by graph."""
    warned: frozenset[Any]
    description: Any


def compiled_step(spec, way, *, family="llama", compiler="aot_eager", layers=LAYERS, fullgraph=True, model=None):
    """Compile a model with `spec` installed, or without us, and take a step."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    batch = tiny_batch(family)
    if model is None:
        model = small(family, layers)
    if spec is not None:
        hf_ckpt.install(model, spec)
        enable(model)
    regions: list[int] = []
    options = {} if way is compile_regions else {"fullgraph": fullgraph}  # PEFT's and accelerate's wrappers may break
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        run = way(model, backend=checkpoints_compiled(regions, compiler), **options)
        torch.manual_seed(7)
        loss = run(**without_cache(model, batch)).loss
        loss.backward()
    found = {name.replace("_orig_mod.", ""): gradient for name, gradient in gradients(model).items()}
    graphs = counters["stats"]["unique_graphs"]
    saved = saved_bytes(run, model, without_cache(model, batch))
    assert counters["stats"]["unique_graphs"] == graphs  # looking changes nothing
    return Compiled(
        {"loss": loss.detach(), **found},
        saved,
        graphs,
        sum(counters["graph_break"].values()),
        regions,
        frozenset((warning.category, str(warning.message)) for warning in warned),
        hf_ckpt.describe(model) if spec is not None else None,
    )


def small(family, layers=LAYERS):
    keys = {"problem_type": "single_label_classification"} if family == "bert" else {}  # else set by the first forward
    attention = "sdpa" if family != "t5" or INSIDE else "eager"
    return tiny_model(family, layers=layers, attention=attention, **keys)


def saved_bytes(run, model, batch):
    """What autograd holds after a forward, each storage once."""
    storages = {parameter.untyped_storage()._cdata: 0 for parameter in model.parameters()}
    alive = []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in storages:
            storages[storage._cdata] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = run(**batch).loss
    del loss
    return sum(storages.values())


@functools.cache
def without_us(way, family="llama", compiler="aot_eager", layers=LAYERS):
    return compiled_step(None, way, family=family, compiler=compiler, layers=layers)


def same_but_smaller(spec, way, *, planned, at_most=1.0, **options):
    """A step with `spec` against one without us; returns both."""
    plain, ours = without_us(way, **options), compiled_step(spec, way, **options)
    assert_same(plain.found, ours.found, f"{spec} {way.__name__}")
    assert ours.breaks == plain.breaks == 0
    assert ours.warned <= plain.warned
    assert sum(plain.regions) == 0
    assert len(ours.description.in_graphs) == planned
    assert not sum(ours.description.forwards.values())  # nothing is counted in a graph, and nothing is claimed
    assert 0 < ours.saved_bytes < plain.saved_bytes * at_most
    return plain, ours


# --- numbers, graphs, memory ------------------------------------------------------------------------------------------


@pytest.mark.skipif(not INSIDE, reason="block.compile() is inside of the checkpoint")
@pytest.mark.parametrize("family", FAMILIES)
def test_blocks(family):
    """One graph for all blocks of a kind, as without us; two where some are planned and others not."""
    each = {"family": family, "layers": 1 if family == "t5" else LAYERS}  # its blocks are of as many kinds already
    plain, full = same_but_smaller(FULL, each_block, planned=2, at_most=0.5, **each)
    _, selective = same_but_smaller(SELECTIVE, each_block, planned=2, **each)
    half = {"rules": [{"stack": "encoder", "layers": "0", "policy": "full"}]} if family == "t5" else MIXED
    _, mixed = same_but_smaller(half, each_block, planned=1, **each)
    assert full.saved_bytes < selective.saved_bytes
    assert full.saved_bytes < mixed.saved_bytes
    assert full.regions == selective.regions == [1] * plain.graphs
    assert set(mixed.regions) == {0, 1}
    assert mixed.graphs <= 2 * plain.graphs


@pytest.mark.parametrize("family", FAMILIES)
def test_a_whole_model(family):
    """One graph, with every planned block in it."""
    each = {"family": family, "layers": 1 if family == "t5" else LAYERS}
    plain, full = same_but_smaller(FULL, torch.compile, planned=2, at_most=0.5, **each)
    _, selective = same_but_smaller(SELECTIVE, torch.compile, planned=2, **each)
    assert full.saved_bytes < selective.saved_bytes
    assert full.regions == selective.regions == [2]
    assert full.graphs == selective.graphs == plain.graphs == 1


@pytest.mark.parametrize("spec", [FULL, SELECTIVE], ids=["full", "selective"])
@pytest.mark.parametrize("way", [each_block_replaced, each_forward, in_place, compile_regions])
def test_other_ways_to_compile(way, spec):
    """accelerate's regional compilation has the rest of the model in graphs of its own."""
    if way is each_forward and not INSIDE:
        pytest.skip("a compiled forward is inside of the checkpoint")
    plain, ours = same_but_smaller(spec, way, planned=LAYERS)
    assert sum(ours.regions) == (LAYERS if way is in_place else 1)
    assert ours.graphs == plain.graphs


# The last block of an offloaded stack is `full`: of another class, in a graph of its own.
@pytest.mark.parametrize(
    ("spec", "blocks", "graphs"),
    [
        ({"policy": "offload"}, LAYERS, 2),
        ({"policy": "full", "segments": 1}, LAYERS, 1),
        ({"policy": "full", "head": "auto"}, LAYERS, 1),
        ({"policy": "selective", "save": ["attention"], "offload": "saved"}, LAYERS, None),
        (MIXED, 1, None),
        ({"rules": [{"layers": "0", "policy": "full"}, {"layers": "1", "policy": "selective"}]}, LAYERS, None),
    ],
    ids=["offload", "segments", "head", "selective", "mixed", "rules"],
)
def test_every_action(spec, blocks, graphs):
    """Whatever stands beside checkpointing lets the compiler have the blocks, one by one, and the head as a whole."""
    if INSIDE and graphs:
        _, by_block = same_but_smaller(spec, each_block, planned=blocks)
        assert by_block.graphs == graphs
    _, whole = same_but_smaller(spec, torch.compile, planned=blocks)
    assert whole.graphs == 1
    assert whole.regions == [blocks]
    assert whole.description.head_in_graph == ("head" in spec)
    assert not whole.description.chunked_heads
    assert ("where it runs as a whole: the head" in str(whole.description)) == ("head" in spec)
    assert f"where nothing is counted: {blocks} blocks" in str(whole.description)


def test_less_than_the_compiler_saves_by_itself():
    """Inductor's partitioner recomputes by itself what is cheap; the policy is not lost in that."""
    partitioned = {"compiler": "aot_eager_decomp_partition"}
    way = each_block if INSIDE else each_block_replaced
    _, full = same_but_smaller(FULL, way, planned=LAYERS, at_most=0.5, **partitioned)
    _, selective = same_but_smaller(SELECTIVE, way, planned=LAYERS, **partitioned)
    _, least = same_but_smaller({**SELECTIVE, "save": ["attention"]}, way, planned=LAYERS, at_most=0.5, **partitioned)
    assert max(full.saved_bytes, least.saved_bytes) < selective.saved_bytes


@pytest.mark.slow
@pytest.mark.parametrize("way", [each_block, torch.compile], ids=["blocks", "whole"])
def test_inductor(way, tmp_path, monkeypatch):
    """Loss and gradients as by kernels of eager mode, within rounding; nothing comes from an earlier run's cache."""
    if way is each_block and not INSIDE:
        way = each_block_replaced
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    plain = without_us(way, layers=1)
    no_cache = torch._inductor.config.patch(fx_graph_cache=False, compile_threads=1)
    with no_cache, torch._functorch.config.patch(enable_autograd_cache=False):
        full, selective = (compiled_step(spec, way, compiler="inductor", layers=1) for spec in (FULL, SELECTIVE))
    for ours in (full, selective):
        assert list(ours.found) == list(plain.found)
        for name, value in plain.found.items():
            torch.testing.assert_close(ours.found[name], value, rtol=1e-4, atol=1e-6, msg=name)
        assert ours.regions == [1]
        assert (ours.graphs, ours.breaks) == (1, 0)
    assert full.saved_bytes < selective.saved_bytes < plain.saved_bytes


# --- compiled once ----------------------------------------------------------------------------------------------------


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


# --- LoRA -------------------------------------------------------------------------------------------------------------


def with_adapters():
    torch.manual_seed(0)
    config = LoraConfig(
        r=4, lora_dropout=0.2, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False
    )
    return get_peft_model(tiny_model("llama", layers=LAYERS, attention="sdpa", dropout=0.1), config)


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


class Rows(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return {name: rows[0] for name, rows in tiny_batch("llama", batch=1, seed=index).items()}


def trained(tmp_path, monkeypatch, kwargs, *, regional):
    """Three steps of a compiling Trainer: losses and gradient norms, all that was logged, model, graphs."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", str(regional))
    model = small("llama")
    flag = "activation_checkpointing"
    if flag not in inspect.signature(TrainingArguments).parameters:
        flag = "gradient_checkpointing"
    asked = {flag: True, f"{flag}_kwargs": kwargs} if kwargs else {}
    args = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=3,
        per_device_train_batch_size=2,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        torch_compile=True,
        torch_compile_backend="aot_eager",
        **asked,
    )
    if kwargs:
        hf_ckpt.install(model)
    trainer = Trainer(
        model=model, args=args, train_dataset=Rows(), callbacks=[hf_ckpt.MemoryTimeCallback(summary=False)]
    )
    try:
        trainer.train()
    finally:
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
    logs = [row for row in trainer.state.log_history if "loss" in row]
    counters = torch._dynamo.utils.counters
    assert not counters["graph_break"]
    return [(row["loss"], row["grad_norm"]) for row in logs], logs, model, counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("regional", [False, True], ids=["whole", "regional"])
def test_the_trainer_compiles(regional, tmp_path, monkeypatch, caplog):
    expected, _, _, plain_graphs = trained(tmp_path / "plain", monkeypatch, None, regional=regional)
    callback._warn_head_in_graph.cache_clear()
    got, logs, model, graphs = trained(tmp_path / "ours", monkeypatch, {**FULL, "head": "auto"}, regional=regional)
    assert len(got) == 3
    assert got == expected
    assert graphs == plain_graphs
    found = hf_ckpt.describe(model)
    assert len(found.in_graphs) == LAYERS
    assert found.head_in_graph
    assert "torch.compile has it in a graph" in caplog.text
    assert all("time/step_s" in row and "time/recompute_share" not in row for row in logs)  # not known, so not 0


# --- what a compiled model hides --------------------------------------------------------------------------------------


@pytest.mark.compat
def test_a_compiled_block_is_checkpointed_or_says_so(caplog):
    """Where the checkpoint is around what is compiled, `full` recomputes all of it, and `selective` cannot look in."""
    rebuild._warn_nothing_dropped.cache_clear()
    plain = without_us(each_block)
    names = set(find_blocks(small("llama")).modules)
    for spec in (FULL, SELECTIVE):
        ours = compiled_step(spec, each_block)
        assert_same(plain.found, ours.found, spec)
        assert (ours.graphs, ours.breaks) == (plain.graphs, 0)
        if INSIDE:
            assert set(ours.description.in_graphs) == names
        elif spec is FULL:
            assert all(ours.description.recomputed[name] == 1 for name in names)
        if INSIDE or spec is FULL:
            assert ours.saved_bytes < plain.saved_bytes
    assert ("compile the whole model instead" in caplog.text) == (not INSIDE)


@pytest.mark.compat
@pytest.mark.parametrize("spec", [FULL, SELECTIVE], ids=["full", "selective"])
def test_a_whole_model_is_checkpointed(spec):
    _, ours = same_but_smaller(spec, torch.compile, planned=LAYERS)
    assert ours.regions == [LAYERS]


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


def test_a_budget_is_planned_by_an_eager_forward(caplog):
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
