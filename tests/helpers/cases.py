"""Random models, plans for them, and ways of training them."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import torch
from hypothesis import strategies as st

import hf_ckpt
from helpers.adapters import TARGETS, with_lora
from helpers.lanes import Delayed, Eager
from helpers.others import other_model
from helpers.steps import enable, gradients, without_cache
from hf_ckpt.models.blocks import find_blocks
from hf_ckpt.models.tiny import FAMILIES, tiny_batch, tiny_model
from hf_ckpt.spec.actions import KEEP, Action
from hf_ckpt.spec.plan import Plan

OTHERS = {
    "opt": ("OPTForCausalLM", {"max_position_embeddings": 64}),
    # Four norms a block, sliding windows on every other one, logits capped.
    "gemma2": ("Gemma2ForCausalLM", {"sliding_window": 5, "final_logit_softcapping": 3.0}),
    "masked_lm": ("BertForMaskedLM", {"max_position_embeddings": 64}),
}
KINDS = (*FAMILIES, *OTHERS)
LORA = TARGETS | {"opt": ["q_proj", "fc1"], "gemma2": ["q_proj", "up_proj"], "masked_lm": ["query", "dense"]}
BATCHES = {"bert": "bert", "t5": "t5"}


def model_of_kind(kind, **options):
    """A small model of a family, or another one."""
    if kind not in OTHERS:
        return tiny_model(kind, **options)
    name, keys = OTHERS[kind]
    return other_model(name, **options, **keys)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, a plan for it, and how it is trained."""

    kind: str
    layers: int
    dropout: float
    attention: str
    dtype: str
    tuning: str
    cut: int
    """For the tunings `prefix` and `suffix`: the first block that is not, or that is, frozen."""
    batch: int
    tokens: int
    padding: str
    micro: str
    through: str
    """What the gradient comes from: the loss, hidden states, or both."""
    state: int
    """For gradients from one hidden state: which one."""
    actions: tuple[Action, ...]
    head: int | str
    lane: type | None
    by: str
    """How the plan is given: as an object, or as a file of this name."""
    host_budget: int | None
    adapters_first: bool

    def model(self):
        """A new model, always the same one."""
        dtype = torch.bfloat16 if self.dtype == "bf16" else torch.float32
        options = {"layers": self.layers, "dropout": self.dropout, "attention": self.attention, "dtype": dtype}
        model = model_of_kind(self.kind, **options)
        if self.tuning in ("prefix", "suffix"):
            names = list(find_blocks(model).modules)
            named = list(model.named_parameters())
            first = next(n for n, (name, _) in enumerate(named) if name.startswith(f"{names[self.cut % len(names)]}."))
            for _, parameter in named[:first] if self.tuning == "prefix" else named[first:]:
                parameter.requires_grad_(False)
        return model

    def adapted(self, model):
        """The model with its adapters, if the case has some."""
        if self.tuning != "lora":
            return model
        return with_lora(model, self.kind, targets=LORA[self.kind], lora_dropout=self.dropout)

    def batches(self):
        """The batches of the micro-steps."""
        found = []
        for seed in range(1 if self.micro == "one" else 2):
            family = BATCHES.get(self.kind, "llama")
            batch = tiny_batch(family, batch=self.batch, tokens=self.tokens, seed=seed)
            if self.padding != "none":
                pads = max(1, self.tokens // 3)
                here = (-1, slice(0, pads) if self.padding == "left" else slice(self.tokens - pads, None))
                batch["attention_mask"][here] = 0
                if batch["labels"].shape == batch["input_ids"].shape and self.batch > 1:
                    batch["labels"][here] = -100
            found.append(batch)
        return found

    def loss(self, model, batch):
        """The loss of one micro-step."""
        inputs = dict(without_cache(model, batch))
        if self.through == "tuple":
            return model(**inputs, return_dict=False)[0]
        if self.through == "loss":
            return model(**inputs).loss
        outputs = model(**inputs, output_hidden_states=True)
        name = (
            "hidden_states" if self.kind != "t5" else ("encoder_hidden_states", "decoder_hidden_states")[self.cut % 2]
        )
        states = outputs[name]
        if self.through == "states":
            return outputs.loss + sum(state.float().square().mean() for state in states[1:])
        return states[self.state % len(states)].float().square().mean()

    def needed(self, blocks):
        """Names of the blocks that the gradient comes through."""
        if self.through != "hidden":
            return set(blocks)
        state = self.state % (self.layers + 1)
        stack = "" if self.kind != "t5" else ("encoder.", "decoder.")[self.cut % 2]
        found = {name for name in blocks if name.startswith(stack) and int(name.rpartition(".")[2]) < state}
        return found | (
            {name for name in blocks if name.startswith("encoder.")} if stack == "decoder." and state else set()
        )

    def step(self, model):
        """Losses and gradients, or None where nothing needs a gradient."""
        model.zero_grad(set_to_none=True)
        torch.manual_seed(7)
        losses = []
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.dtype == "autocast"):
            for batch in self.batches():
                losses.append(self.loss(model, batch))
                if not losses[-1].requires_grad:
                    return None
                if self.micro != "together":
                    losses[-1].backward()
        if self.micro == "together":
            sum(losses).backward()
        return {"loss": torch.stack([loss.detach() for loss in losses]), **gradients(model)}

    def plan(self, model):
        """The case's actions, for the blocks of this model."""
        found = find_blocks(model)
        pairs = []
        for block in found.blocks:
            action = self.actions[len(pairs)]
            earlier = pairs[-1][0].stack if pairs else None
            if action.segment is not None and earlier == block.stack and pairs[-1][1].segment is not None:
                # 1 joins the segment before, 0 begins a new one
                number = pairs[-1][1].segment + (action.segment == 0)
                action = dataclasses.replace(action, segment=number)
            elif action.segment is not None:
                used = [other.segment for other_block, other in pairs if other_block.stack == block.stack]
                action = dataclasses.replace(action, segment=max([n for n in used if n is not None], default=-1) + 1)
            pairs.append((block, action))
        return Plan(found.family, found.model, tuple(pairs), head=self.head)

    def install(self, model):
        """Put the plan on the model, and return it."""
        plan = self.plan(model)
        if self.by == "install":
            hf_ckpt.install(model, plan)
            enable(model)
            return plan
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / self.by
            plan.save(path)
            spec = {"plan": str(path)} | ({"host_budget": self.host_budget} if self.host_budget else {})
            hf_ckpt.install(model)
            enable(model, spec)
        return plan


SAVES = (("linear", "attention"), ("attention",), ("linear",))
ACTION = st.one_of(
    st.just(KEEP),
    st.builds(Action, st.just("selective"), st.sampled_from(SAVES), moved=st.booleans()),
    st.builds(Action, st.just("full+selective"), st.sampled_from(SAVES)),
    st.just(Action("full")),
    st.just(Action("offload")),
    st.builds(Action, st.just("full"), segment=st.integers(0, 1)),
)


@st.composite
def cases(draw):
    """Random cases, of all that can be combined."""
    kind = draw(st.sampled_from(KINDS))
    layers = draw(st.integers(1, 4))
    whole = draw(st.sampled_from([None, None, None, "full", "selective", "offload", "segments"]))
    if whole is None:
        actions = draw(st.lists(ACTION, min_size=2 * layers, max_size=2 * layers))
    elif whole == "segments":
        actions = [Action("full", segment=int(draw(st.integers(0, 3)) > 0)) for _ in range(2 * layers)]
    elif whole == "selective":
        save, moved = draw(st.sampled_from(SAVES)), draw(st.booleans())
        actions = [Action("selective", save, moved=moved)] * (2 * layers)
    else:
        actions = [Action(whole)] * (2 * layers)
    return Case(
        kind=kind,
        layers=layers,
        dropout=draw(st.sampled_from([0.0, 0.1])),
        attention=draw(st.sampled_from(["eager", "sdpa"])) if kind != "gemma2" else "eager",
        dtype=draw(st.sampled_from(["fp32", "bf16", "autocast"])),
        tuning=draw(st.sampled_from(["all", "lora", "prefix", "suffix"])),
        cut=draw(st.integers(0, 7)),
        batch=draw(st.integers(1, 3)),
        tokens=draw(st.integers(3, 40)),
        padding=draw(st.sampled_from(["none", "right", "left"])),
        micro=draw(st.sampled_from(["one", "two", "together"])),
        through=draw(st.sampled_from(["loss", "loss", "tuple", "hidden", "states"])),
        state=draw(st.integers(0, 4)),
        actions=tuple(actions),
        head=draw(st.sampled_from(["full", "full", "auto", 1, 5, 16, 100])),
        lane=draw(st.sampled_from([None, Delayed, Eager])),
        by=draw(st.sampled_from(["install", "plan.json", "plan.yaml"])),
        host_budget=draw(st.sampled_from([None, None, 2048, 2**20])),
        adapters_first=draw(st.booleans()),
    )
