"""Models and toy layers whose head runs in chunks, and comparisons with a plain head."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

import hf_ckpt
from helpers.adapters import with_lora
from helpers.others import other_model
from helpers.steps import assert_near, enable, outcome, without_cache
from hf_ckpt.engines.head.chunked import chunked
from hf_ckpt.engines.head.logits import Logits
from hf_ckpt.models.blocks import vocabulary_head
from hf_ckpt.models.tiny import VOCABULARY, tiny_batch, tiny_model

CHUNK = 5
"""Tokens per chunk."""


def on(model, head=CHUNK, **keys):
    """Run the model's head in chunks, and change nothing else."""
    hf_ckpt.install(model, {"policy": "none", "head": head, **keys})
    enable(model)
    return model


def calls(model):
    """How often the head has run in chunks."""
    return hf_ckpt.describe(model).chunked_heads


def error(truth, found):
    """Relative norm of the difference over all gradients together."""
    names = [name for name, value in truth.items() if value is not None and name != "loss"]
    assert names
    gap = sum(float((truth[name].double() - found[name].double()).square().sum()) for name in names)
    return (gap / sum(float(truth[name].double().square().sum()) for name in names)) ** 0.5


def trained(model, batch, autocast=None):
    """Loss and gradients of a step, and the model's outputs."""
    model.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
        outputs = model(**without_cache(model, batch))
    outputs.loss.backward()
    gradients = {name: value for name, value in outcome(model, outputs.loss).items() if value is not None}
    return gradients, outputs


# --- models -----------------------------------------------------------------------------------------------------------


def _tiny(family):
    return lambda dtype, **keys: tiny_model(family, layers=2, dtype=dtype, **keys)


def _other(name, **options):
    return lambda dtype, **keys: other_model(name, dropout=0.0, attention="eager", dtype=dtype, **options, **keys)


def bart(dtype, **keys):
    """The head adds a buffer to the logits; a new model has zeros there."""
    model = _other("BartForConditionalGeneration", layers=1, max_position_embeddings=64)(dtype, **keys)
    model.final_logits_bias += torch.linspace(0, 1, VOCABULARY, dtype=dtype)
    return model


MODELS = {
    **{family: _tiny(family) for family in ("llama", "gpt2", "t5")},
    "bert": _other("BertForMaskedLM"),
    "roberta": _other("RobertaForMaskedLM", max_position_embeddings=64),
    "gemma2": _other("Gemma2ForCausalLM", final_logit_softcapping=3.0),
    "bart": bart,
}


def batch_of(name):
    """23 tokens per sequence, so that the last chunk is shorter than the others."""
    batch = tiny_batch(
        "t5" if name in ("t5", "bart") else "llama", batch=2, tokens=46 if name in ("t5", "bart") else 23
    )
    if name in ("bert", "roberta"):
        batch["labels"][torch.rand(batch["labels"].shape, generator=torch.Generator().manual_seed(3)) < 0.6] = -100
    return batch


def adapted(model, how):
    """The model with adapters or frozen parameters: `how` says which parts are trained."""
    head = vocabulary_head(model)
    if how == "frozen head":
        head.requires_grad_(False)
    if how == "head only":
        model.requires_grad_(False)
        head.requires_grad_(True)
    if how in ("lora", "modules to save"):
        beside = {"targets": ["q_proj", "lm_head"]} if how == "lora" else {"modules_to_save": ["lm_head"]}
        return with_lora(model, "llama", lora_dropout=0.0, **{"targets": ["q_proj"], **beside})
    return model


# --- toy heads --------------------------------------------------------------------------------------------------------


TOKENS, HIDDEN, WORDS = (3, 7), 8, 50


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


def differentiate(work, make, head, hidden):
    """The result of `work` on the logits from `make`, and its gradients."""
    head.zero_grad(set_to_none=True)
    hidden.grad = None
    loss = work(make(head, hidden))
    loss.sum().backward()
    return {"loss": loss.detach(), "hidden": hidden.grad, **{name: p.grad for name, p in head.named_parameters()}}


def same_toys(work, whole, *, head=None, computed=0):
    """Check that a chunked head gives the results of a plain one, and that `computed` logits were computed as a
    whole."""
    head, hidden = toy(head=head)
    expected = differentiate(work, nn.Module.__call__, head, hidden)
    got = differentiate(work, lazy, head, hidden)
    assert expected["loss"].dtype == got["loss"].dtype
    assert expected["loss"].shape == got["loss"].shape
    assert_near(expected, got)
    assert len({id(logits) for logits in whole}) == computed


def loss_of(**options):
    """A function of logits that calls `cross_entropy` as models do."""
    labels = labels_for().view(-1)
    return lambda logits: functional.cross_entropy(logits.float().view(-1, WORDS), labels, **options)


def selected(logits):
    """Log probabilities of the labels, as TRL computes them in float32."""
    labels = labels_for(ignored=0.0).unsqueeze(-1)
    chosen = logits.gather(-1, labels).squeeze(-1)
    return chosen - torch.stack([torch.logsumexp(row, dim=-1) for row in logits])


class Doubled(torch.autograd.Function):
    """A function with a custom gradient, which the gradients of a later loss must pass through."""

    @staticmethod
    def forward(ctx, logits):
        return logits * 1.0

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class Passed(Doubled):
    """An identity function, such as DDP adds to the outputs of a model."""

    @staticmethod
    def forward(ctx, logits):
        return logits


def copy_for_a_thread(module):
    """A replica as `nn.DataParallel` makes for another device, in which weights are not parameters."""
    copied = module._replicate_for_data_parallel()
    for name, child in module.named_children():
        copied._modules[name] = copy_for_a_thread(child)
    for name, parameter in module._parameters.items():
        # They stand for weights on the other device; different values show which ones are used.
        (copied._parameters if parameter is None else vars(copied))[name] = None if parameter is None else 2 * parameter
    return copied
