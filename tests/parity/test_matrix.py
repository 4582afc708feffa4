"""Every action in every way of training: results equal to no checkpointing, bit for bit, and exact counts.

A cell is a model, a spec and a way of training. It compares losses, gradients, buffers and the random state at the end
with the same training without hf_ckpt, which runs once per model and way. It checks each block's engine, how often the
block was recomputed, and which bytes were moved. In some ways the model changes between forward and backward; blocks
must then recompute what the forward computed.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import io
import itertools
import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from helpers.adapters import TARGETS, lora_config, with_lora
from helpers.custom import in_threads, without_forward_state
from helpers.experts import EXPERTS, experts
from helpers.lanes import Delayed, lanes_of
from helpers.others import OTHERS, other_model
from helpers.ranks import one_rank
from helpers.steps import ROUNDING, ROUNDING_16, assert_near, assert_same, outcome, planned, step, without_cache
from helpers.tables import table
from helpers.tiles import split_by_hand
from helpers.unusual_models import MODELS, unusual_batch, unusual_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.attach.record import installation
from hf_ckpt.engines.full import FullRegion
from hf_ckpt.engines.host_memory import Group
from hf_ckpt.engines.rebuild.values import Kept
from hf_ckpt.models.blocks import find_blocks
from hf_ckpt.models.tiny import TINY_FAMILIES, tiny_batch, tiny_model

LAYERS = 3
STACKS, REGIONS = table(__file__, "stacks.yaml").values()


# --- how losses and backwards follow each other -----------------------------------------------------------------------
# Each function gets a model, a function that returns the loss with a number, and one to call between forward and
# backward. It returns the losses.


def one_backward(model, loss, between):
    return two_losses(model, loss, between, count=1)


def two_losses(model, loss, between, count=2):
    losses = [loss(number) for number in range(count)]
    between()
    sum(losses).backward()
    return losses


def accumulation(model, loss, between):
    losses = []
    for number in range(3):
        losses.append(loss(number))
        (losses[-1] / 3).backward()
    return losses


def kept_graph(model, loss, between):
    losses = [loss(0)]
    losses[0].backward(retain_graph=True)
    losses[0].backward()
    return losses


def second_derivative(model, loss, between):
    losses = [loss(0)]
    first = torch.autograd.grad(losses[0], list(model.parameters()), create_graph=True, allow_unused=True)
    sum(value.square().sum() for value in first if value is not None).backward()
    return losses


def optimizer_inside_backward(model, loss, between):
    """Parameters change as soon as their gradient exists; later recomputations must not read them."""

    def update(parameter):
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.1)
        parameter.grad = None

    handles = [parameter.register_post_accumulate_grad_hook(update) for parameter in model.parameters()]
    losses = accumulation(model, loss, between)
    for handle in handles:
        handle.remove()
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()  # what is compared
    return losses


def backward_in_another_thread(model, loss, between):
    losses = [loss(number) for number in range(2)]
    for each in losses:
        in_threads(each.backward)
    return losses


def forwards_in_two_threads(model, loss, between):
    """Two threads run the same block at once and share its function, like replicas of nn.DataParallel."""
    barrier, losses, main = threading.Barrier(2), {}, threading.current_thread()

    def meet(module, args):
        if threading.current_thread() is not main and len(losses) < 2:  # only in the forward
            barrier.wait(timeout=20)

    handles = [layer.mlp.register_forward_pre_hook(meet) for layer in model.model.layers]
    in_threads(*(functools.partial(lambda number: losses.update({number: loss(number)}), n) for n in range(2)))
    for handle in handles:
        handle.remove()
    for number in range(2):
        losses[number].backward()
    return [losses[0], losses[1]]


def resumed(model, loss, between):
    """A step and a save; then the weights change, and the next step loads what was saved, as new parameters."""
    losses = [loss(0)]
    losses[0].backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    file = io.BytesIO()
    torch.save((model.state_dict(), torch.get_rng_state()), file)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    file.seek(0)
    state, random_state = torch.load(file)
    model.load_state_dict(state, assign=True)
    torch.set_rng_state(random_state)
    losses.append(loss(1))
    losses[1].backward()
    return losses


def own_checkpoint_around_the_model(model, loss, between):
    """Chunked losses and GradCache checkpoint whole forwards; torch then unpacks each saved tensor only once."""
    return one_backward(model, lambda number: checkpoint(loss, number, use_reentrant=False), between)


def own_hooks_around_the_model(model, loss, between):
    """The hooks hold copies. TRL's also end if a tensor is fetched twice or never."""
    copies, numbers = {}, itertools.count()

    def pack(tensor):
        number = next(numbers)
        copies[number] = tensor.clone()
        return number

    with torch.autograd.graph.saved_tensors_hooks(pack, copies.pop):
        losses = one_backward(model, loss, between)
    assert next(numbers) > len(copies) == 0
    return losses


# --- what other libraries do ------------------------------------------------------------------------------------------


ddp = DistributedDataParallel
static_ddp = functools.partial(ddp, static_graph=True)
ddp_with_unused = functools.partial(ddp, find_unused_parameters=True)


def sharded(model):
    """The model under FSDP2."""
    mesh = init_device_mesh("cpu", (1,))
    for module in (*find_blocks(model).modules.values(), model):
        fully_shard(module, mesh=mesh)
    return model


# --- what changes between forward and backward ------------------------------------------------------------------------
# Generators: they run to their `yield` before the forward, to its end before the backward.


def set_everywhere(attribute, value, kinds=nn.Module):
    """Set an attribute of all modules of these kinds that have it."""

    def change(model):
        yield
        for module in model.modules():
            if isinstance(module, kinds) and hasattr(module, attribute):
                setattr(module, attribute, value)

    return change


evaluated = set_everywhere("training", False)
other_dropout = set_everywhere("p", 0.5, nn.Dropout)
replaced_modules = set_everywhere("act_fn", nn.Tanh())
other_numbers = set_everywhere("variance_epsilon", 1.0)


def feed_forwards(model):
    """The last linear layer of each feed-forward."""
    names = tuple(f".{names[1]}" for names in TARGETS.values())
    return [module for name, module in model.named_modules() if name.endswith(names)]


def removed_hooks(model):
    handles = [module.register_forward_hook(lambda *call: call[2] * 2) for module in feed_forwards(model)]
    yield
    for handle in handles:
        handle.remove()


def added_hooks(model):
    yield
    for module in feed_forwards(model):
        module.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def other_forwards(model):
    yield
    for module in feed_forwards(model):
        module.forward = torch.zeros_like


def other_order(model):
    """The same parameters with equal shapes in another order, as after `prune.remove`."""
    yield
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            bias, weight = module._parameters.pop("bias"), module._parameters.pop("weight")
            module._parameters.update(bias=bias, weight=weight)


def other_attention(model):
    yield
    model.set_attn_implementation("eager")


def other_scaling(model):
    yield
    for module in model.modules():
        if hasattr(module, "scale_layer"):
            module.scale_layer(3.0)


def frozen_blocks(model):
    yield
    for block in find_blocks(model).modules.values():
        block.requires_grad_(False)


def own_checkpoint_inside_a_block(model):
    """The norm at the end of BERT's blocks runs under a checkpoint."""
    for block in find_blocks(model).modules.values():
        block.output.forward = functools.partial(checkpoint, block.output.forward, use_reentrant=False)
    yield


class PowerNorm(nn.Module):
    """Divides by a running buffer after updating it in place, so that the output depends on a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("figure", torch.ones(()))

    def forward(self, x):
        with torch.no_grad():
            self.figure.mul_(0.5).add_(x.abs().mean())
        return torch.sigmoid(x / self.figure.clone())


batch_norm = functools.partial(nn.BatchNorm1d, 16)

# --- ways of training -------------------------------------------------------------------------------------------------


@functools.cache
def built(family, dropout, attention, dtype):
    """The model that cells copy: copying is faster than building."""
    return tiny_model(family, layers=LAYERS, dropout=dropout, attention=attention, dtype=dtype)


@dataclasses.dataclass(frozen=True)
class Mode:
    """A way of training a model."""

    dropout: float = 0.0
    attention: str = "eager"
    dtype: torch.dtype = torch.float32
    autocast: bool = False
    adapters: str = ""
    """Who adds LoRA: nobody, `peft`, or the model itself (`hub`); `two` adds an actor and a critic."""
    options: dict = dataclasses.field(default_factory=dict, hash=False)
    """Options of the adapters."""
    enable_first: bool = False
    """Whether checkpointing is enabled before adapters are added."""
    inside: Callable | None = None
    """Makes a module with buffers to add to each block."""
    way: Callable = one_backward
    forwards: int = 1
    backwards: int | None = 1
    """How often backward passes through every block; None if that is not counted."""
    loss: str = ""
    """How the loss is computed, if not by a call of the model."""
    change: Callable | None = None
    share: Callable | None = None
    """Wraps the model for data-parallel training."""
    under_hooks: bool = False
    """Whether the user's hooks on saved tensors are around the model. Under them nothing is moved."""
    families: Sequence[str] = dataclasses.field(default=TINY_FAMILIES, hash=False)

    def model(self, family):
        """A new model, the same each time."""
        try:
            model = copy.deepcopy(built(family, self.dropout, self.attention, self.dtype))
        except ValueError as error:  # T5 has no sdpa before transformers 5
            pytest.skip(f"{family} has no {self.attention} attention in this transformers: {str(error)[:80]}")
        for block in find_blocks(model).modules.values() if self.inside else ():
            block.mlp.act_fn = nn.Sequential(block.mlp.act_fn, self.inside())
        return model.requires_grad_(self.loss != "of input embeddings")

    def adapted(self, model, family):
        """The model with its adapters, if the mode has some."""
        if not self.adapters:
            return model
        model = with_lora(model, family, hub=self.adapters == "hub", **{"lora_dropout": 0.0, **self.options})
        if self.adapters == "two":
            model.add_adapter("critic", lora_config(family, lora_dropout=0.1))
            for name, parameter in model.named_parameters():
                parameter.requires_grad_("lora_" in name or "norm" in name or "embed" in name)
        return model.train()

    def frozen(self, family):
        """Names of the blocks before the first trainable parameter."""
        below = range(LAYERS - 1) if "layers_to_transform" in self.options else ()
        return {f"{STACKS[family][0]}.{index}" for index in below}

    def loss_of(self, model, family, number):
        """Loss number `number` of the training."""
        batch = tiny_batch(family, seed=number)
        batch["attention_mask"][1, -3:] = 0  # so that masks matter
        batch = dict(without_cache(model, batch))
        if self.loss == "of computed parameters":  # meta-learning; the backward comes after the call
            fast = {name: parameter * 1.5 for name, parameter in model.named_parameters()}
            return torch.func.functional_call(model, fast, (), batch).loss
        if self.loss == "of input embeddings":  # soft prompts and attributions, with all weights frozen
            model.embeds = model.get_input_embeddings()(batch.pop("input_ids")).requires_grad_()
            return model(inputs_embeds=model.embeds, **batch).loss
        if self.loss == "of two adapters":
            model.set_adapter(("default", "critic")[number])
        return model(**batch).loss

    def train(self, model, family):
        """Train in this mode: losses, gradients and buffers, and the random state at the end."""
        if self.share is None:
            return self.train_by(model, model, family)
        with one_rank():
            return self.train_by(self.share(model), model, family)

    def train_by(self, shared, model, family):
        model.zero_grad(set_to_none=True)
        torch.manual_seed(7)
        change = self.change(model) if self.change else iter(())
        next(change, None)

        def loss(number):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.autocast):
                return self.loss_of(shared, family, number)

        def between():
            next(change, None)
            for name, parameter in model.named_parameters():  # PEFT freezes adapters that are not active
                parameter.requires_grad_(parameter.requires_grad or (self.adapters == "two" and "lora_" in name))

        losses = self.way(model, loss, between)
        if self.change is frozen_blocks:
            model.requires_grad_(True)
        results = outcome(model, torch.stack([loss.detach() for loss in losses]))
        results = {name: value if value is None else compat.distributed.local(value) for name, value in results.items()}
        results |= {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers() if self.inside}
        if self.loss == "of input embeddings":
            results["embeds"] = model.embeds.grad
        return results, torch.get_rng_state()


def mode_of(row):
    """A row of `modes.yaml`, which names functions of this module."""
    functions = {key: globals()[row[key]] for key in ("way", "inside", "change", "share") if key in row}
    return Mode(**{**row, **functions, "dtype": getattr(torch, row.get("dtype", "float32"))})


GROUPS = {
    group: {name: mode_of(row) for name, row in rows.items()} for group, rows in table(__file__, "modes.yaml").items()
}
FORMS, CHANGED = GROUPS["FORMS"], GROUPS["CHANGED"]
MODES = {name: mode for modes in GROUPS.values() for name, mode in modes.items()}


@functools.cache
def reference(family, mode, tile=None):
    """The results of the mode without hf_ckpt. They are shared, so do not change them.

    With `tile`, feed-forwards are split into tiles of so many tokens, and autograd keeps all of them.
    """
    model = MODES[mode].adapted(MODES[mode].model(family), family)
    if tile is not None:
        split_by_hand(model, tile)
    return MODES[mode].train(model, family)


# --- actions ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Cell:
    """A spec, the expected engines, written out by hand, and what to compare it in."""

    spec: dict
    engines: str
    """The engine of each block, of every stack or of all; `-` for none."""
    modes: Sequence[str]
    families: Sequence[str]

    def engines_for(self, family):
        """Block name -> engine, for all blocks with an engine."""
        return {name: engine.rstrip(">") for name, engine in self._written(family) if engine != "-"}

    def passing_for(self, family):
        """Names of the blocks that backward runs once more for the next one."""
        return {name for name, engine in self._written(family) if engine.endswith(">")}

    def _written(self, family):
        names = [f"{stack}.{index}" for stack in STACKS[family] for index in range(LAYERS)]
        engines = self.engines.split()
        engines *= len(names) // len(engines)
        return list(zip(names, engines, strict=True))


GROUPS["COMMON"] = [mode for group in ("FORMS", "USUAL", "BY_OTHERS", "UNUSUAL") for mode in GROUPS[group]]
GROUPS["CHOICES"] = ["dropout", "LoRA on the last layer", "hub, then enabled"]
"""Modes in which the choice of blocks may matter."""


def cell(spec, engines, modes, families=TINY_FAMILIES):
    """A row of `actions.yaml`. Norms over tokens are refused in tiles."""
    names = [mode for name in modes for mode in GROUPS.get(name, (name,))]
    return Cell(spec, engines, [mode for mode in names if "mlp" not in spec or not MODES[mode].inside], families)


ACTIONS = {name: cell(**row) for name, row in table(__file__, "actions.yaml").items()}
EVERYWHERE = ("full", "selective", "save attention", "head")
"""Actions that are compared in `FORMS` in all families. Other cells run in one family by default, in turn."""
COMPAT = ("full", "layers", "selective")
"""Actions that also run on the oldest transformers."""


def cells():
    for number, (action, cell) in enumerate(ACTIONS.items()):
        for place, mode in enumerate(cell.modes):
            families = [each for each in cell.families if each in MODES[mode].families]
            everywhere = action in EVERYWHERE and mode in FORMS
            for turn, family in enumerate(families):
                is_usual = turn == (number + place) % len(families)
                marks = [] if everywhere or is_usual else [pytest.mark.thorough]
                marks += [pytest.mark.compat] * (action in COMPAT)
                yield pytest.param(family, action, mode, marks=marks, id=f"{family}-{action}-{mode}")


# --- cells ------------------------------------------------------------------------------------------------------------


def prepared(family, spec, mode):
    """The model with its plan enabled and its adapters added, in the mode's order."""
    model = mode.model(family)
    if not mode.enable_first:
        model = mode.adapted(model, family)
    planned(model, spec)
    return mode.adapted(model, family) if mode.enable_first else model


def check_counts(mode, engines, frozen, passing, described, regions):
    """Check that every planned block used its engine, and was recomputed as often as needed unless frozen."""
    passing = set() if mode.under_hooks else passing
    expected = {name: REGIONS[engine] for name, engine in engines.items()}
    assert {name: type(region).__name__ for name, region in regions.items()} == expected
    assert described.forwards == dict.fromkeys(engines, mode.forwards)
    for name, engine in engines.items():
        times, region = described.recomputed[name], regions[name]
        if engine == "full+selective":
            assert region.rebuilding.recomputed > 0
        if engine == "full+tiles" and name not in frozen:
            assert [part.forwards == 0 < part.recomputed for part in region.parts.values()] == [True]
        around = mode.way is own_checkpoint_around_the_model  # under it nothing is dropped
        if name in frozen or (around and engine in ("selective", "moved")):
            assert times == 0, name
        elif mode.backwards is None:
            assert times > 0, name
        elif engine in ("selective", "moved"):  # counts operations
            assert times > 0, name
            assert times % mode.backwards == 0, name
            assert region.dropped_tensors > 0, name
        else:
            assert times == mode.backwards * (2 if name in passing else 1), name


def check_moved(mode, engines, frozen, described, lanes):
    """Check that the blocks moved tensors, and those under `offload` exactly their hidden states."""
    moving = {name for name, engine in engines.items() if engine in ("offload", "moved") and not mode.under_hooks}
    offloading = {name for name in described.moved if engines[name] == "offload"}
    assert described.moved.keys() - frozen == moving - frozen
    assert all(described.moved.values())
    for name in offloading:
        tokens = 8 if name.startswith("decoder.block.") else 16
        assert described.moved[name] == 2 * tokens * 32 * mode.dtype.itemsize, name
    if mode.forwards == mode.backwards == 1 and not frozen and offloading == described.moved.keys():
        for direction in ("out", "back"):  # each exactly once
            sizes = sorted(size for lane in lanes for kind, size in lane.log if kind == direction)
            assert sizes == sorted(described.moved.values())


@pytest.mark.trap(1, 5, 21, 22, 36, 40)
@pytest.mark.parametrize(("family", "action", "mode"), list(cells()))
def test_gradients_are_those_of_no_checkpointing(family, action, mode):
    (expected, random_state) = reference(family, mode, ACTIONS[action].spec.get("mlp"))
    mode = MODES[mode]
    engines = ACTIONS[action].engines_for(family)
    frozen = mode.frozen(family)
    moves = bool({"offload", "moved"} & set(engines.values()))
    with lanes_of(Delayed if moves else None) as lanes:
        model = prepared(family, ACTIONS[action].spec, mode)
        got, random_state_after = mode.train(model, family)
    described = hf_ckpt.describe(model)
    assert described.chunked_heads == (mode.forwards if action == "head" else 0)
    wide = mode.dtype is torch.bfloat16 or mode.autocast
    if action == "head" or ("tiles" in action and wide):  # sums of 16-bit gradients are in float32
        assert_near(expected, got, ROUNDING_16 if wide else ROUNDING, together=wide)
    else:
        assert_same(expected, got)
    assert torch.equal(random_state, random_state_after)
    check_counts(mode, engines, frozen, ACTIONS[action].passing_for(family), described, installation(model).regions)
    check_moved(mode, engines, frozen, described, lanes)


def test_feed_forwards_whose_layers_are_sharded_one_by_one_run_as_a_whole(caplog):
    """They would be gathered for every tile. A feed-forward that is sharded as a whole runs in tiles."""
    for inner, is_whole in (("mlp", False), ("mlp.up_proj", True)):
        model = prepared("llama", ACTIONS["tiles"].spec, MODES["plain"])
        with one_rank():
            fully_shard(model.model.layers[0].get_submodule(inner), mesh=init_device_mesh("cpu", (1,)))
            step(sharded(model), tiny_batch("llama"))
        assert any(installation(model).regions["model.layers.0"].parts.values()) != is_whole
        assert caplog.text.count("sharded one by one") == is_whole


# --- other architectures ----------------------------------------------------------------------------------------------


def architecture(name):
    """A small model and a batch."""
    if name in MODELS:
        return unusual_model(name), unusual_batch(name, batch=2, tokens=96)
    if "ViT" in name:
        return other_model(name), {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 1])}
    batch = tiny_batch("llama")
    if "Whisper" in name:
        batch = {"input_features": torch.randn(2, 16, 128), "labels": batch["labels"]}
    return (other_model if name in OTHERS else experts)(name), batch


THOROUGH = {*EXPERTS, *MODELS} - {"llava"}
ARCHITECTURES = [pytest.param(name, marks=pytest.mark.compat) for name in OTHERS]
ARCHITECTURES += [pytest.param(name, marks=[pytest.mark.thorough] * (name in THOROUGH)) for name in (*EXPERTS, *MODELS)]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_other_architectures(name):
    model, batch = architecture(name)
    expected = step(model, batch)
    for spec in (ACTIONS[action].spec for action in ("full", "selective", "save attention", "save linear", "every 2")):
        planned(model, spec)
        for _ in range(2):  # the first may be a trial of unknown blocks
            assert_same(expected, step(model, batch))
        again = hf_ckpt.describe(model).recomputed.values()
        assert any(again), spec
        assert name in MODELS or all(again), spec  # a model may not use the last blocks of its tower
        hf_ckpt.uninstall(model)


# --- whether cells can fail -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_modes_differ(family):
    """Dropout, autocast and bf16 change the loss: otherwise their cells would prove nothing."""
    losses = [reference(family, mode)[0]["loss"] for mode in ("plain", "dropout", "autocast", "bf16")]
    assert len({float(loss[0]) for loss in losses}) == 4
    # T5's first block computes the position bias that all blocks add, so its gradient passes through all blocks.
    biases = {name: value for name, value in reference(family, "plain")[0].items() if "attention_bias" in name}
    assert len(biases) == (2 if family == "t5" else 0)
    assert all(value.any() for value in biases.values())


def test_the_comparison_notices_what_is_not_moved(monkeypatch):
    monkeypatch.setattr(Group, "pack", lambda self, tensor: Kept(tensor, self.block))
    for action in ("offload", "saved", "saved, save attention"):
        with pytest.raises(AssertionError):
            test_gradients_are_those_of_no_checkpointing("llama", action, "plain")


@pytest.mark.parametrize("mode", CHANGED)
def test_each_change_would_show(mode, monkeypatch):
    """Without the restored state, every change leads to an error or to a difference."""
    monkeypatch.setattr(FullRegion, "state_for", without_forward_state)
    family = CHANGED[mode].families[0]
    expected, _ = reference(family, mode)
    with pytest.raises((RuntimeError, AssertionError)):
        assert_same(expected, CHANGED[mode].train(prepared(family, {"policy": "full"}, CHANGED[mode]), family)[0])
