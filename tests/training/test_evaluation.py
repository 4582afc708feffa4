"""Evaluation: it is warned of if its logits find no room, and begins again in smaller batches if memory runs out."""

from __future__ import annotations

import pytest
import torch
import transformers
from helpers.trainers import FLAG, trainer
from transformers import Trainer

import hf_ckpt
from hf_ckpt.models.tiny import tiny_model
from hf_ckpt.training import callback

ROW_BYTES = 12 * 320 * 4
"""Logits of one row: 12 tokens, 320 entries, float32."""
EVALUATING = {"evaluate": True, "eval_strategy": "steps", "eval_steps": 2, "max_steps": 2}


@pytest.mark.parametrize(
    ("room", "options", "warns"),
    [
        (4 * ROW_BYTES - 1, {}, True),
        (4 * ROW_BYTES, {}, False),
        (4 * ROW_BYTES - 1, {"batch_eval_metrics": True, "per_device_eval_batch_size": 2}, False),
        (None, {}, False),  # torch does not tell
        (1, {"compute_metrics": None}, False),
        (1, {"preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1)}, False),
    ],
)
def test_an_evaluation_whose_logits_find_no_room_is_warned_of(room, options, warns, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(callback, "spare_bytes", lambda devices: room)
    arguments = {key: value for key, value in options.items() if "eval" in key}
    run = trainer(tmp_path, **EVALUATING, **arguments)
    run.compute_metrics = lambda found, compute_result=True: {"rows": float(len(found.predictions))}
    for key in options.keys() - arguments.keys():
        setattr(run, key, options[key])
    run.train()
    assert ("gathers the logits of 4 rows, 60.00 KiB or more" in caplog.text) == warns


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
