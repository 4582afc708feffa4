"""Evaluation begins again in smaller batches if memory runs out."""

from __future__ import annotations

import pytest
import torch
import transformers
from helpers.trainers import FLAG, trainer
from transformers import Trainer

import hf_ckpt
from hf_ckpt.models.tiny import tiny_model

EVALUATING = {"evaluate": True, "eval_strategy": "steps", "eval_steps": 2, "max_steps": 2}


class Guarded(hf_ckpt.OomGuardMixin, Trainer):
    pass


KEPT_LOADER = {"dataloader_persistent_workers": True}
"""With this, a Trainer keeps the loader of its evaluations."""


def without_workers(dataset, persistent_workers, **options):
    """A `DataLoader` that needs no process, although its workers shall be persistent."""
    return torch.utils.data.DataLoader(dataset, **options)


@pytest.mark.parametrize(
    ("most", "sizes", "options"), [(4, {4}, {}), (2, {2, 4}, {}), (1, {1, 2, 4}, {}), (2, {2, 4}, KEPT_LOADER)]
)
def test_evaluation_in_smaller_batches_has_the_same_loss(most, sizes, options, tmp_path, monkeypatch, caplog):
    """`most` is the largest batch that the model evaluates without running out of memory."""
    monkeypatch.setattr(transformers.trainer, "DataLoader", without_workers)
    seen = []

    def run_out(model, args, kwargs):
        if not model.training:
            seen.append(len(kwargs["input_ids"]))
            if seen[-1] > most:
                raise torch.OutOfMemoryError("CUDA out of memory.")

    def losses(hook):
        model = tiny_model("llama")
        handle = model.register_forward_pre_hook(hook, with_kwargs=True)
        settings = {**EVALUATING, "per_device_eval_batch_size": 4, FLAG: False, **options}
        run = trainer(tmp_path, model, kind=Guarded, **settings)
        run.train()
        handle.remove()
        return [row["eval_loss"] for row in run.state.log_history if "eval_loss" in row]

    expected = losses(lambda *args: None)
    assert losses(run_out) == pytest.approx(expected, rel=1e-6)
    assert set(seen) == sizes
    assert caplog.text.count("out of memory in evaluation") == len(sizes) - 1


@pytest.mark.parametrize(("options", "size"), [({}, 1), ({"batch_eval_metrics": True}, 8)])
def test_an_evaluation_that_cannot_begin_again_is_an_error(options, size, tmp_path):
    """Of single rows; or with metrics that may have counted some batches."""

    def run_out(model, args):
        if not model.training:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    model = tiny_model("llama")
    model.register_forward_pre_hook(run_out)
    run = trainer(tmp_path, model, kind=Guarded, **EVALUATING, **options, **{FLAG: False})
    run.compute_metrics = lambda found, compute_result: {}
    with pytest.raises(torch.OutOfMemoryError):
        run.train()
    assert run.args.per_device_eval_batch_size == size
