"""Models whose blocks move saved tensors to host memory, and what tests read from them."""

from __future__ import annotations

import hf_ckpt
from helpers.steps import enable
from hf_ckpt.attach.record import installation
from hf_ckpt.models.tiny import tiny_model

OFFLOAD = {"policy": "offload"}
SAVED = {"policy": "selective", "offload": "saved"}


def said(caplog):
    """Messages of the engines."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("hf_ckpt.engines.")]


def ours(family="llama", spec=OFFLOAD, **options):
    """A small model with the plan enabled."""
    model = tiny_model(family, **options)
    hf_ckpt.install(model, spec)
    enable(model)
    return model


def regions(model):
    """The functions of the model's blocks."""
    return list(installation(model).regions.values())


def mover(model):
    """The mover that all blocks share."""
    (found,) = {region.mover for region in regions(model) if getattr(region, "mover", None) is not None}
    return found


def moved(model):
    """Block name -> bytes that its last forward moved."""
    return hf_ckpt.describe(model).moved
