"""A Trainer that runs out of memory on purpose."""

import torch
from transformers import Trainer

from helpers.trainers import FLAG, Rows, trainer
from hf_ckpt.models.tiny import tiny_model

MESSAGE = "CUDA out of memory. Tried to allocate 2.00 GiB."


def run_out(*_):
    """Raise an out-of-memory error."""
    raise torch.OutOfMemoryError(MESSAGE)


class Failing(Trainer):
    """Runs out of memory in some calls of `compute_loss`: after the forward, or in the backward."""

    calls, at = 0, ()

    def compute_loss(self, model, inputs, *args, **kwargs):
        number, self.calls = self.calls, self.calls + 1
        labels = inputs.pop("labels")  # as Trainer itself does for label smoothing
        loss = super().compute_loss(model, {**inputs, "labels": labels}, *args, **kwargs)
        if number in self.at and number % 2 == 0:
            run_out()
        elif number in self.at:  # in the backward, after some gradients
            left, watched = [0], loss if number % 4 == 1 else model.get_input_embeddings().weight
            watched.register_hook(lambda gradient: run_out() if left and left.pop() == 0 else None)
        return loss


def train(folder, *mixins, at=()):
    """Train for six steps of two micro-steps; returns the Trainer, its history and the weights."""
    model = tiny_model("llama", dropout=0.1)
    model.config.use_cache = False
    options = {FLAG: False, f"{FLAG}_kwargs": None, "max_steps": 6, "gradient_accumulation_steps": 2}
    kind = type("Tested", (*mixins, Failing), {"at": at})
    run = trainer(folder, model, kind=kind, rows=Rows(count=24), **options)
    run.train()
    keys = ("loss", "grad_norm", "learning_rate", "epoch", "step")
    history = [{key: row[key] for key in keys if key in row} for row in run.state.log_history]
    return run, history, {name: value.clone() for name, value in model.state_dict().items()}
