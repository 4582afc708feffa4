"""Steps of compiled models, and comparisons of them with the same models compiled without hf_ckpt."""

from __future__ import annotations

import functools
import warnings
from typing import Any, NamedTuple

import torch
import torch._dynamo
from accelerate.utils import compile_regions

import hf_ckpt
from helpers.steps import assert_same, checkpoints_compiled, enable, gradients, step, without_cache
from hf_ckpt import compat
from hf_ckpt.models.blocks import base_model, find_blocks
from hf_ckpt.models.tiny import tiny_batch, tiny_model

LAYERS = 2
FULL, SELECTIVE, MIXED = {"policy": "full"}, {"policy": "selective"}, {"policy": "full", "every_n_layers": 2}
INSIDE = "__call__" not in vars(compat.GradientCheckpointingLayer)
"""Whether the checkpoint is inside of what `block.compile()` compiles; around it before transformers 5."""


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


def kept(model, batch):
    """A step, and the bytes that autograd keeps for it, parameters and buffers left out."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    seen = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        found = step(model, batch)
    return found, sum(seen.values())
