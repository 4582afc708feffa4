"""Models and toy layers whose head runs in chunks, and comparisons with a plain head."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

import hf_ckpt
from helpers.adapters import with_lora
from helpers.others import other_model
from helpers.steps import enable, outcome, without_cache
from hf_ckpt.engines.head.logits import Logits, chunked
from hf_ckpt.models.blocks import vocabulary_head
from hf_ckpt.models.tiny import VOCABULARY, tiny_batch, tiny_model

CHUNK = 5
"""Tokens per chunk of a model's head."""
TOKENS, HIDDEN, WORDS = (3, 7), 8, 50
"""Sizes of the toy heads."""
OTHERS = {
    "roberta": ("RobertaForMaskedLM", {"max_position_embeddings": 64}),
    "gemma2": ("Gemma2ForCausalLM", {"final_logit_softcapping": 3.0}),
    "bart": ("BartForConditionalGeneration", {"layers": 1, "max_position_embeddings": 64}),
}
"""Models whose heads do more than one product, or have few labels."""


def model_of(name, dtype=torch.float32, how="all", **keys):
    """A small model; `how` says which adapters it has and which of its parts are trained."""
    if name in OTHERS:
        class_name, options = OTHERS[name]
        model = other_model(class_name, dropout=0.0, attention="eager", dtype=dtype, **options, **keys)
    else:
        model = tiny_model(name, layers=1, dtype=dtype, **keys)
    if name == "bart":  # its head adds a buffer, which is zero in a new model
        model.final_logits_bias += torch.linspace(0, 1, VOCABULARY, dtype=dtype)
    if how == "head only":
        model.requires_grad_(False)
    if how in ("head only", "frozen head"):
        vocabulary_head(model).requires_grad_(how == "head only")
    if how == "lora":
        return with_lora(model, "llama", lora_dropout=0.0, targets=["q_proj", "lm_head"])
    if how == "modules to save":
        return with_lora(model, "llama", lora_dropout=0.0, targets=["q_proj"], modules_to_save=["lm_head"])
    return model


def batch_of(name):
    """23 tokens per sequence, so that the last chunk is shorter than the others; few labels for RoBERTa."""
    both = name in ("t5", "bart")
    batch = tiny_batch("t5" if both else "llama", batch=2, tokens=46 if both else 23)
    if name == "roberta":
        batch["labels"][torch.rand(batch["labels"].shape, generator=torch.Generator().manual_seed(3)) < 0.6] = -100
    return batch


def on(model, head=CHUNK, **keys):
    """Run the model's head in chunks, and change nothing else."""
    hf_ckpt.install(model, {"policy": "none", "head": head, **keys})
    enable(model)
    return model


def calls(model):
    """How often the head has run in chunks."""
    return hf_ckpt.describe(model).chunked_heads


def trained(model, batch, autocast=None):
    """Loss and gradients of a step, and the model's outputs."""
    model.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
        outputs = model(**without_cache(model, batch))
    outputs.loss.backward()
    return {name: value for name, value in outcome(model, outputs.loss).items() if value is not None}, outputs


def error(truth, found):
    """Relative norm of the difference over all gradients together."""
    names = [name for name, value in truth.items() if value is not None and name != "loss"]
    assert names
    gap = sum(float((truth[name].double() - found[name].double()).square().sum()) for name in names)
    return (gap / sum(float(truth[name].double().square().sum()) for name in names)) ** 0.5


def toy(dtype=torch.float32, tokens=TOKENS, head=None, seed=2):
    """A linear head, and hidden states for it."""
    torch.manual_seed(seed)
    head = head or nn.Linear(HIDDEN, WORDS).to(dtype)
    return head, torch.randn(*tokens, HIDDEN, dtype=dtype, requires_grad=True)


def lazy(head, hidden, chunk=4):
    """The head's logits, in chunks."""
    logits = chunked(head, lambda given: type(head).forward(head, given), hidden, chunk)
    assert type(logits) is Logits
    return logits


def labels_for(tokens=TOKENS, ignored=0.3, seed=0):
    """Random labels, a share of them ignored."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, WORDS, tokens, generator=generator)
    labels[torch.rand(tokens, generator=generator) < ignored] = -100
    return labels


def loss_of(labels=None, **options):
    """A function of logits that calls `cross_entropy` as models do."""
    labels = labels_for().view(-1) if labels is None else labels
    return lambda logits: functional.cross_entropy(logits.float().view(-1, WORDS), labels, **options)


def differentiate(work, make, head, hidden):
    """The result of `work` on the logits from `make`, and its gradients."""
    head.zero_grad(set_to_none=True)
    hidden.grad = None
    loss = work(make(head, hidden))
    loss.sum().backward()
    return {"loss": loss.detach(), "hidden": hidden.grad, **{name: p.grad for name, p in head.named_parameters()}}
