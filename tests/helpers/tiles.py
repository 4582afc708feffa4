"""Models whose feed-forward runs in chunks, a chunked reference by hand, and counts of runs."""

from __future__ import annotations

import contextlib
import functools

import torch

import hf_ckpt
from helpers.steps import enable
from hf_ckpt.models.blocks import base_model, feed_forwards, find_blocks

CHUNK = 5
"""Tokens per chunk."""


def on(model, mlp=CHUNK, **spec):
    """Run the model's feed-forward in chunks; without a spec, blocks keep everything."""
    hf_ckpt.install(model, {**(spec or {"policy": "none"}), "mlp": mlp})
    enable(model)
    return model


def calls(model):
    """How often a feed-forward has run in chunks."""
    return hf_ckpt.describe(model).chunked_mlps


def owners(model):
    """(module, method name) of each feed-forward."""
    return [(found.owner, found.where[1]) for found in feed_forwards(find_blocks(model))]


@contextlib.contextmanager
def by_hand(model, tokens=CHUNK):
    """Split the input of each feed-forward and leave the rest to autograd: the draws are the same, and no memory is
    saved."""

    def split(plain):
        def run(hidden):  # transformers counts the parameters of BERT's method
            rows = hidden.reshape(1, -1, hidden.shape[-1])
            return torch.cat([plain(part) for part in rows.split(tokens, dim=1)], dim=1).view_as(hidden)

        return run

    found = owners(base_model(model))
    for owner, method in found:
        vars(owner)[method] = split(functools.partial(getattr(type(owner), method), owner))
    try:
        yield
    finally:
        for owner, method in found:
            del vars(owner)[method]


@contextlib.contextmanager
def counted_tokens(model):
    """A list of the number of tokens in each run of a feed-forward, with and without a graph."""
    seen = []
    classes = {(type(owner), method) for owner, method in owners(model)}
    before = {(kind, method): getattr(kind, method) for kind, method in classes}

    def counting(plain):
        def run(owner, hidden):
            seen.append(hidden.shape[:-1].numel())
            return plain(owner, hidden)

        return run

    for (kind, method), plain in before.items():
        setattr(kind, method, counting(plain))
    try:
        yield seen
    finally:
        for (kind, method), plain in before.items():
            setattr(kind, method, plain)
