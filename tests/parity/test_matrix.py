"""Every action in every way of training: gradients equal to no checkpointing, bit for bit, and exact counts.

Each cell compares a step under hf_ckpt with the same step without it, and checks each block's engine, number of
recomputations and moved bytes. The step without hf_ckpt runs once per family and mode. Some modes change the model
between forward and backward; blocks must then recompute what the forward computed.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable

import pytest
import torch
from helpers.adapters import TARGETS, lora_config, with_lora
from helpers.changed import PowerNorm, without_forward_state
from helpers.lanes import Delayed, lanes_of
from helpers.others import other_model
from helpers.steps import ROUNDING, ROUNDING_16, assert_near, assert_same, enable, outcome, without_cache
from helpers.versions import skip_where_absent
from torch import nn

import hf_ckpt
from hf_ckpt.attach.record import installation
from hf_ckpt.engines.full import FullRegion
from hf_ckpt.engines.offload import Group, OffloadRegion
from hf_ckpt.engines.rebuild.full_selective import FullSelectiveRegion
from hf_ckpt.engines.rebuild.region import RebuildRegion
from hf_ckpt.engines.rebuild.values import Kept
from hf_ckpt.engines.segments import SegmentRegion
from hf_ckpt.models.blocks import find_blocks
from hf_ckpt.models.tiny import FAMILIES, tiny_batch, tiny_model

LAYERS = 3
STACKS = {
    "llama": {"decoder": "model.layers"},
    "gpt2": {"decoder": "transformer.h"},
    "bert": {"encoder": "bert.encoder.layer"},
    "t5": {"encoder": "encoder.block", "decoder": "decoder.block"},
}


# --- ways of training -----------------------------------------------------------------------------------------------


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
    autocast: str = ""
    """The parts under bf16 autocast: none, `forward`, or also backward (`all`)."""
    adapters: str = ""
    """Who adds LoRA: nobody, `peft`, or the model itself (`hub`); `two` adds an actor and a critic."""
    options: dict = dataclasses.field(default_factory=dict, hash=False)
    """Options of the adapters."""
    enable_first: bool = False
    """Whether checkpointing is enabled before adapters are added."""
    inside: Callable | None = None
    """Makes a module with buffers to add to each block."""
    loop: str = "one step"
    change: Callable | None = None
    """A generator that changes the model; it yields at the forward, and perhaps at the backward."""
    families: tuple[str, ...] = tuple(FAMILIES)

    @property
    def forwards(self):
        """How often every block runs."""
        return {"accumulation": 3, "two losses": 2, "actor and critic": 2, "with reference": 2}.get(self.loop, 1)

    @property
    def backwards(self):
        """How often backward passes through every block."""
        return 2 if self.loop == "kept graph" else self.forwards

    def model(self, family):
        """A new model, the same each time."""
        model = copy.deepcopy(built(family, self.dropout, self.attention, self.dtype))
        for block in find_blocks(model).modules.values() if self.inside else ():
            block.mlp.act_fn = nn.Sequential(block.mlp.act_fn, self.inside())
        return model.requires_grad_(self.loop != "input embeddings")

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
        first_stack = next(iter(STACKS[family].values()))
        below = range(LAYERS - 1) if "layers_to_transform" in self.options else ()
        return {f"{first_stack}.{index}" for index in below}

    def loss(self, model, family, number):
        """Loss number `number` of the step."""
        batch = tiny_batch(family, seed=number)
        batch["attention_mask"][1, -3:] = 0  # so that masks matter
        batch = dict(without_cache(model, batch))
        if self.loop == "functional call":  # meta-learning: computed parameters, and backward outside of the call
            fast = {name: parameter * 1.5 for name, parameter in model.named_parameters()}
            return torch.func.functional_call(model, fast, (), batch).loss
        if self.loop == "input embeddings":  # soft prompts and attributions, with all weights frozen
            model.embeds = model.get_input_embeddings()(batch.pop("input_ids")).requires_grad_()
            return model(inputs_embeds=model.embeds, **batch).loss
        if self.loop == "actor and critic":  # two forwards before one backward
            model.set_adapter(("default", "critic")[number])
        if self.loop == "with reference" and number == 0:  # of a preference loss, with gradients
            with model.disable_adapter():
                return model(**batch).loss
        return model(**batch).loss

    def train(self, model, family):
        """Train in this mode; returns losses and gradients."""
        model.zero_grad(set_to_none=True)
        torch.manual_seed(7)
        change = self.change(model, family) if self.change else iter(())
        next(change, None)
        losses = []
        for number in range(self.forwards):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bool(self.autocast)):
                losses.append(self.loss(model, family, number))
                if self.autocast == "all":
                    losses[-1].backward()
            if self.loop == "accumulation":
                (losses[-1] / 3).backward()
        for name, parameter in model.named_parameters() if self.adapters == "two" else ():
            parameter.requires_grad_(parameter.requires_grad or "lora_" in name)
        next(change, None)
        if self.loop == "kept graph":
            losses[0].backward(retain_graph=True)
        if self.loop != "accumulation" and self.autocast != "all":
            sum(losses).backward()
        next(change, None)
        found = outcome(model, torch.stack([loss.detach() for loss in losses]))
        if self.inside:
            found |= {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}
        return found | ({"embeds": model.embeds.grad} if self.loop == "input embeddings" else {})


def inner_modules(model, family):
    """Linear layers of the feed-forwards."""
    return [module for name, module in model.named_modules() if name.endswith(f".{TARGETS[family][1]}")]


def evaluated(model, family):
    yield
    model.eval()
    yield
    assert not any(module.training for module in model.modules())


def other_dropout(model, family):
    yield
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5


def removed_hooks(model, family):
    handles = [module.register_forward_hook(lambda *found: found[2] * 2) for module in inner_modules(model, family)]
    yield
    for handle in handles:
        handle.remove()
    yield
    assert not any(module._forward_hooks for module in inner_modules(model, family))


def added_hooks(model, family):
    yield
    for module in inner_modules(model, family):
        module.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    yield
    assert all(module._forward_pre_hooks for module in inner_modules(model, family))


def other_attention(model, family):
    yield
    model.set_attn_implementation("eager")
    yield
    assert model.config._attn_implementation == "eager"


def replaced_module(model, family):
    yield
    for block in model.model.layers:
        block.mlp.act_fn = nn.Tanh()


def other_scaling(model, family):
    yield
    for module in model.modules():
        if hasattr(module, "scale_layer"):
            module.scale_layer(3.0)


def frozen_blocks(model, family):
    yield
    for block in find_blocks(model).modules.values():
        block.requires_grad_(False)
    yield
    model.requires_grad_(True)


BF16 = torch.bfloat16
LAST = {"layers_to_transform": [LAYERS - 1]}
LLAMA = {"families": ("llama",)}
MODES = {
    "plain": Mode(),
    "sdpa": Mode(attention="sdpa"),
    "dropout": Mode(dropout=0.1),
    "bf16": Mode(dtype=BF16, dropout=0.1, attention="sdpa"),
    "autocast": Mode(autocast="forward", dropout=0.1),
    "autocast around backward": Mode(autocast="all", attention="sdpa"),
    "accumulation": Mode(loop="accumulation", autocast="forward", dropout=0.1, attention="sdpa"),
    "two losses": Mode(loop="two losses", dropout=0.1),
    "kept graph": Mode(loop="kept graph", dropout=0.1),
    "LoRA": Mode(adapters="peft", attention="sdpa"),
    "enabled, then LoRA": Mode(adapters="peft", enable_first=True, dropout=0.1),
    "hub, then enabled": Mode(adapters="hub", dropout=0.1),
    "enabled, then hub": Mode(adapters="hub", enable_first=True, dtype=BF16),
    "LoRA on the last layer": Mode(adapters="peft", options=LAST, dropout=0.1),
    "lora_dropout": Mode(adapters="peft", options={"lora_dropout": 0.1}, dtype=BF16, dropout=0.1, attention="sdpa"),
    "modules to save": Mode(
        adapters="peft", options={"modules_to_save": ["classifier"]}, dropout=0.1, families=("bert",)
    ),
    "input embeddings": Mode(loop="input embeddings", families=("gpt2",)),
}
CHANGED = {
    "functional call": Mode(loop="functional call"),
    "eval": Mode(dropout=0.1, change=evaluated),
    "two adapters": Mode(adapters="two", loop="actor and critic", **LLAMA),
    "reference": Mode(adapters="two", loop="with reference", **LLAMA),
    "batch norm": Mode(inside=functools.partial(nn.BatchNorm1d, 16), loop="two losses", **LLAMA),
    "a buffer that counts": Mode(inside=PowerNorm, loop="two losses", **LLAMA),
    "other dropout": Mode(dropout=0.1, change=other_dropout, families=("gpt2",)),
    "hooks removed": Mode(change=removed_hooks, **LLAMA),
    "hooks added": Mode(change=added_hooks, **LLAMA),
    "other attention": Mode(dropout=0.1, attention="sdpa", change=other_attention, **LLAMA),
    "a module replaced": Mode(change=replaced_module, **LLAMA),
    "other scaling": Mode(adapters="peft", change=other_scaling, **LLAMA),
    "frozen": Mode(change=frozen_blocks, **LLAMA),
}
"""Modes in which something changes between forward and backward."""


@functools.cache
def reference(family, mode):
    """The results of the mode without hf_ckpt. They are shared, so do not change them."""
    mode = (MODES | CHANGED)[mode]
    skip_where_absent(family, mode.attention)
    return mode.train(mode.adapted(mode.model(family), family), family)


# --- actions --------------------------------------------------------------------------------------------------------

REGIONS = {
    "full": FullRegion,
    "full+selective": FullSelectiveRegion,
    "selective": RebuildRegion,
    "moved": RebuildRegion,
    "segment": SegmentRegion,
    "offload": OffloadRegion,
}


@dataclasses.dataclass(frozen=True)
class Asked:
    """A spec, and the expected engines, written out by hand."""

    spec: dict
    engines: str
    """The engine of each block in a stack; `-` for none."""
    modes: tuple[str, ...] = tuple(MODES)
    """The modes to compare in."""
    t5: tuple[dict, str, str] | None = None
    """For T5 and its two stacks: the spec, the encoder's engines, the decoder's engines."""

    def spec_for(self, family):
        """The spec for this family."""
        return self.t5[0] if family == "t5" and self.t5 else self.spec

    def engines_for(self, family):
        """Block name -> engine, for all blocks with an engine."""
        rows = self.t5[1:] if family == "t5" and self.t5 else [self.engines] * len(STACKS[family])
        pairs = [
            (f"{path}.{index}", engine)
            for path, row in zip(STACKS[family].values(), rows, strict=True)
            for index, engine in enumerate(row.split())
        ]
        assert len(pairs) == LAYERS * len(STACKS[family])
        return {name: engine for name, engine in pairs if engine != "-"}


def selective(*save, **keys):
    return {"policy": "selective", **({"save": list(save)} if save else {}), **keys}


def rule(layers, policy, **keys):
    return {"layers": layers, "policy": policy, **keys}


# Engines cannot tell who added the adapters, so only some actions run in these modes.
RARE = ("autocast around backward", "hub, then enabled", "enabled, then hub")
COMMON = tuple(mode for mode in MODES if mode not in RARE)
# Modes in which the choice of blocks may matter, and modes in which the form of an action may.
CHOICES = ("dropout", "LoRA", "hub, then enabled", "LoRA on the last layer")
FORMS = ("plain", "sdpa", "dropout", "bf16", "autocast", "lora_dropout")
BOTH = " ".join(["full+selective"] * LAYERS)
ACTIONS = {
    "none": Asked({"policy": "none"}, "- - -", ("plain", "LoRA")),
    "full": Asked({"policy": "full"}, "full full full"),
    "random state kept": Asked({"preserve_rng_state": True}, "full full full", ("dropout",)),
    "random state not kept": Asked(
        {"preserve_rng_state": False, "determinism_check": "none"}, "full full full", ("plain",)
    ),
    "every 2": Asked({"every_n_layers": 2}, "full - full", CHOICES),
    "layers": Asked(
        {"layers": "-2--1"},
        "- full full",
        CHOICES,
        ({"layers": {"encoder": "0,2", "decoder": "1"}}, "full - full", "- full -"),
    ),
    "rules": Asked(
        {"rules": [rule("0-2", "full"), rule("1,-1", "none")]},
        "full - -",
        CHOICES,
        (
            {"policy": "full", "rules": [rule("1-2", "none", stack="encoder"), rule("0", "none", stack="decoder")]},
            "full - -",
            "- full full",
        ),
    ),
    "selective": Asked(selective(), "selective selective selective"),
    "save attention": Asked(selective("attention"), "selective selective selective"),
    "save linear": Asked(selective("linear"), "selective selective selective", FORMS),
    "selective, every 2": Asked(selective(every_n_layers=2), "selective - selective", ("dropout",)),
    "full+selective": Asked({"policy": "full+selective"}, BOTH, ("dropout", "autocast", "kept graph", "bf16")),
    "both, save attention": Asked({"policy": "full+selective", "save": ["attention"]}, BOTH, ("sdpa", "lora_dropout")),
    "both, save linear": Asked({"policy": "full+selective", "save": ["linear"]}, BOTH, ("dropout",)),
    "selective, full and none": Asked(
        selective(rules=[rule("1", "full"), rule("2", "none")]), "selective full -", (*CHOICES, "accumulation")
    ),
    "full around selective": Asked(
        {"policy": "full", "rules": [rule("1", "selective")]}, "full selective full", ("bf16", "LoRA on the last layer")
    ),
    "1 segment": Asked({"segments": 1}, "segment segment segment", (*FORMS, "LoRA on the last layer")),
    "2 segments": Asked({"segments": 2}, "segment segment segment", COMMON),
    "3 segments": Asked({"segments": 3}, "segment segment segment", ("dropout", "sdpa")),
    # The last block of a stack moves nothing, because its backward comes at once.
    "offload": Asked({"policy": "offload"}, "offload offload full", COMMON),
    "saved": Asked(
        selective(offload="saved"), "moved moved selective", (*FORMS, "two losses", "LoRA", "LoRA on the last layer")
    ),
    "saved, save attention": Asked(selective("attention", offload="saved"), "moved moved selective", FORMS),
    "head": Asked({"policy": "none", "head": 5}, "- - -"),
    "head and selective": Asked(selective(head=5), "selective selective selective", FORMS),
}
# Actions whose engines recompute blocks in different ways.
CHANGES = ("full", "selective", "save attention", "2 segments", "offload", "full around selective")
# Actions that also run on the oldest transformers.
COMPAT = ("full", "layers", "selective", "1 segment", "2 segments")


def cells():
    found = []
    for family in FAMILIES:
        for action, asked in ACTIONS.items():
            if action.startswith("head") and family == "bert":  # a classifier has no head to chunk
                continue
            marks = [pytest.mark.compat] if action in COMPAT else []
            for mode in (*asked.modes, *(CHANGED if action in CHANGES else ())):
                if family in (MODES | CHANGED)[mode].families:
                    found.append(pytest.param(family, action, mode, marks=marks, id=f"{family}-{action}-{mode}"))
    return found


# --- cells ----------------------------------------------------------------------------------------------------------


def prepared(family, spec, mode):
    """The model with its plan enabled and its adapters added, in the mode's order."""
    model = mode.model(family)
    if not mode.enable_first:
        model = mode.adapted(model, family)
    hf_ckpt.install(model)
    enable(model, spec)
    return mode.adapted(model, family) if mode.enable_first else model


@contextlib.contextmanager
def other_arguments(model):
    """Storages of the parameters, and of all block inputs except hidden states."""
    found = [parameter.untyped_storage() for parameter in model.parameters()]

    def look(block, args, kwargs):
        tensors = torch.utils._pytree.tree_leaves((args[1:], kwargs))
        found.extend(tensor.untyped_storage() for tensor in tensors if isinstance(tensor, torch.Tensor))

    blocks = find_blocks(model).modules.values()
    handles = [block.register_forward_pre_hook(look, with_kwargs=True) for block in blocks]
    yield found
    for handle in handles:
        handle.remove()


def check_counts(mode, engines, frozen, found, regions):
    """Check that every planned block used its engine, and was recomputed as often as needed unless frozen."""
    assert {name: type(region) for name, region in regions.items()} == {
        name: REGIONS[engine] for name, engine in engines.items()
    }
    assert found.forwards == dict.fromkeys(engines, mode.forwards)
    if mode.loop != "input embeddings":  # all are frozen, but recomputed for the inputs' gradient
        assert set(found.frozen) == frozen & engines.keys()
    for name, engine in engines.items():
        times, region = found.recomputed[name], regions[name]
        if engine == "full+selective":
            assert region.rebuilding.recomputed > 0
        if name in frozen:
            assert times == 0, name
        elif REGIONS[engine] is RebuildRegion:  # counts operations
            assert times > 0, name
            assert times % mode.backwards == 0, name
            assert region.dropped_tensors > 0, name
        elif engine == "segment" and name != region.segment[-1]:  # once more, to make the next block's input
            assert times == 2 * mode.backwards, name
        else:
            assert times == mode.backwards, name


def check_moved(family, mode, engines, frozen, found, regions, lanes, others):
    """Check that exactly the hidden states' bytes are in host memory, and that no other block inputs were moved."""
    moving = {name: engine for name, engine in engines.items() if engine in ("offload", "moved")}
    assert found.moved.keys() - frozen == moving.keys() - frozen
    for name, size in found.moved.items():
        if moving[name] == "offload":
            tokens = 8 if name.startswith("decoder.block.") else 16
            assert size == 2 * tokens * 32 * mode.dtype.itemsize, name
        assert size > 0, name
    (lane,) = lanes
    if mode.forwards == mode.backwards == 1 and not frozen and set(moving.values()) == {"offload"}:
        for way in ("out", "back"):  # each exactly once
            assert sorted(size for kind, size in lane.log if kind == way) == sorted(found.moved.values())
    assert others
    assert not {id(source()) for source in lane.sources} & {id(storage) for storage in others}


@pytest.mark.parametrize(("family", "action", "mode"), cells())
def test_gradients_are_those_of_no_checkpointing(family, action, mode):
    expected, asked, mode = reference(family, mode), ACTIONS[action], (MODES | CHANGED)[mode]
    engines, frozen = asked.engines_for(family), mode.frozen(family)
    moves = bool({"offload", "moved"} & set(engines.values()))
    with lanes_of(Delayed if moves else None) as lanes:
        model = prepared(family, asked.spec_for(family), mode)
        with other_arguments(model) if moves else contextlib.nullcontext() as others:
            got = mode.train(model, family)
    found, regions = hf_ckpt.describe(model), installation(model).regions
    if action.startswith("head"):
        assert found.chunked_heads == mode.forwards
        wide = mode.dtype is BF16 or bool(mode.autocast)
        assert_near(expected, got, ROUNDING_16 if wide else ROUNDING, together=wide)
    else:
        assert found.chunked_heads == 0
        assert_same(expected, got)
    check_counts(mode, engines, frozen, found, regions)
    if moves:
        check_moved(family, mode, engines, frozen, found, regions, lanes, others)


# --- whether cells can fail -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_modes_differ(family):
    """Dropout, autocast and bf16 change the loss: otherwise their cells would prove nothing."""
    losses = {mode: reference(family, mode)["loss"].flatten()[0] for mode in ("plain", "dropout", "autocast", "bf16")}
    assert len(set(map(float, losses.values()))) == 4
    # T5's first block computes the position bias that all blocks add, so its gradient passes through all blocks.
    biases = [name for name in reference("t5", "plain") if "relative_attention_bias" in name]
    assert [name.partition(".")[0] for name in biases] == ["encoder", "decoder"]
    assert all(reference("t5", "plain")[name].any() for name in biases)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_comparison_notices_other_dropout_masks(family, monkeypatch):
    expected, mode = reference(family, "dropout"), MODES["dropout"]
    monkeypatch.setattr(torch, "manual_seed", lambda seed, seeded=torch.manual_seed: seeded(seed + 1))
    with pytest.raises(AssertionError, match="differs"):
        assert_same(expected, mode.train(mode.model(family), family))


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
    expected = reference(family, mode)
    with pytest.raises((RuntimeError, AssertionError)):
        assert_same(expected, CHANGED[mode].train(prepared(family, {"policy": "full"}, CHANGED[mode]), family))


@pytest.mark.parametrize("kind", ["BertForMaskedLM", "OPTForCausalLM"])
def test_verify_of_a_head_in_chunks_where_gradients_are_zero_in_theory(kind):
    """`verify` accepts rounding in gradients that should be 0: a key bias shifts all scores of a query alike."""
    model = other_model(kind, dropout=0.0, attention="eager", max_position_embeddings=64)
    result = hf_ckpt.verify(model, tiny_batch("llama"), {"policy": "none", "head": 5})
    assert result, result
