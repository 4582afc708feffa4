"""The chunked head in training loops, and what it leaves in memory."""

from __future__ import annotations

import gc

import pytest
import torch
from helpers.heads import CHUNK, WORDS, batch_of, calls, error, labels_for, lazy, on, toy, trained
from helpers.steps import assert_near
from torch import distributed, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainingArguments

from hf_ckpt.engines.head.logits import Logits
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.models.tiny import tiny_batch, tiny_model


class Watched(Trainer):
    """A Trainer that notes the logits which the model returned."""

    def compute_loss(self, model, inputs, return_outputs=False, **keys):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **keys)
        self.seen = [*getattr(self, "seen", []), outputs["logits"]]
        return (loss, outputs) if return_outputs else loss


@pytest.mark.compat
@pytest.mark.parametrize("options", [{}, {"label_smoothing_factor": 0.1}], ids=["plain", "smoothed"])
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_trainer(name, options, tmp_path, whole):
    """Losses are divided by `num_items_in_batch` over two micro-batches with unequal numbers of labels, or smoothed."""
    batch = tiny_batch(name, batch=12, tokens=32)
    generator = torch.Generator().manual_seed(1)
    batch["labels"][torch.rand(batch["labels"].shape, generator=generator) < 0.4] = -100
    if name == "t5":
        batch["decoder_input_ids"] = batch["labels"].clamp(min=0)  # smoothing takes the labels away
    rows = [{key: value[index] for key, value in batch.items()} for index in range(12)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
        save_strategy="no",
        max_steps=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        optim="sgd",
        learning_rate=0.5,
        **options,
    )
    found = []
    for head in ("full", CHUNK):
        model = on(tiny_model(name, layers=1), head)
        model.accepts_loss_kwargs = name != "t5"
        trainer = Watched(model, arguments, train_dataset=rows)
        trainer.train()
        found.append({key: p.detach().clone() for key, p in model.named_parameters()})
        assert calls(model) == (6 if head == CHUNK else 0)
        assert all((type(logits) is Logits) == (head == CHUNK) for logits in trainer.seen)
    start = dict(tiny_model(name, layers=1).named_parameters())
    moved = [{key: value - start[key].detach() for key, value in one.items()} for one in found]
    assert_near(*found, most=1e-6)
    assert error(*moved) < 1e-4  # differences of parameters, which are rounded to 6e-8 of their size
    assert not whole


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_ddp(options, whole):
    expected, _ = trained(tiny_model("llama", layers=1), batch_of("llama"))
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        model = on(tiny_model("llama", layers=1))
        wrapped = DistributedDataParallel(model, **options)
        for step_number in range(3):
            got, outputs = trained(wrapped, {**batch_of("llama"), "use_cache": False})
            assert_near(expected, {name.removeprefix("module."): value for name, value in got.items()})
            assert calls(model) == step_number + 1
            assert type(outputs.logits) is Logits
        assert not whole
        wrapped.zero_grad()
        loss_of_outputs = wrapped(**batch_of("llama"), use_cache=False).logits.float().square().mean()
        loss_of_outputs.backward()
        ours = model.lm_head.weight.grad.clone()
    finally:
        distributed.destroy_process_group()
    plain = tiny_model("llama", layers=1)
    plain(**batch_of("llama"), use_cache=False).logits.float().square().mean().backward()
    torch.testing.assert_close(ours, plain.lm_head.weight.grad)


def copy_for_a_thread(module):
    """What `nn.DataParallel` makes of a module for another device, where weights are no parameters."""
    copied = module._replicate_for_data_parallel()
    for name, child in module.named_children():
        copied._modules[name] = copy_for_a_thread(child)
    for name, parameter in module._parameters.items():
        # As they are on the other device; here, they have other values.
        (copied._parameters if parameter is None else vars(copied))[name] = None if parameter is None else 2 * parameter
    return copied


def test_a_copy_of_data_parallel_uses_its_own_weights(whole):
    """Another device's head must not run here: gradients reach the original through the copy."""
    found = []
    for plan in (None, CHUNK):
        model = tiny_model("llama", layers=1)
        copied = copy_for_a_thread(model if plan is None else on(model))
        copied(**batch_of("llama"), use_cache=False).loss.backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert found[0]["lm_head.weight"].abs().max() > 0
    assert calls(model) == 0
    model(**batch_of("llama"), use_cache=False).loss.backward()  # the original still runs in chunks
    assert calls(model) == 1
    assert not whole


# --- memory -----------------------------------------------------------------------------------------------------------


def peak_of(head, hidden, labels, make, **holders):
    """The most bytes alive during forward, loss and backward, above those that were alive before."""
    with LiveBytes(head, {"hidden": hidden, "labels": labels}) as live:
        logits = make(head, hidden * 1)
        functional.cross_entropy(logits.float().view(-1, logits.shape[-1]), labels).backward()
        return live.peak_bytes - live.start_bytes


@pytest.mark.long
@pytest.mark.parametrize(
    ("dtype", "tokens", "size", "trained", "least"),
    [(torch.float32, 2048, 256, True, 4), (torch.float32, 2048, 32, False, 7), (torch.bfloat16, 1024, 32, False, 3)],
    ids=["float32", "float32, frozen", "bfloat16, frozen"],
)
def test_the_peak_falls(dtype, tokens, size, trained, least, whole):
    """The peak falls by `least` times where `auto` takes 256 tokens at a time, as it does here."""
    torch.manual_seed(0)
    head = nn.Linear(size, 32000, bias=False).to(dtype).requires_grad_(trained)
    hidden = torch.randn(1, tokens, size, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, 32000, (tokens,))
    plain = peak_of(head, hidden, labels, nn.Module.__call__)
    head.weight.grad = hidden.grad = None
    ours = peak_of(head, hidden, labels, lambda head, hidden: lazy(head, hidden, "auto"))
    assert plain > tokens * 32000 * (dtype.itemsize + 4)
    assert plain >= least * ours, plain / ours
    assert not whole


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["plain", "autocast"])
def test_nothing_stays_alive(autocast, whole):
    """Gradients, which are computed before the backward, go with the loss, also while the garbage collector is off."""
    head, hidden = toy(tokens=(4, 256))
    labels = labels_for((4, 256)).view(-1)
    gc.collect()
    gc.disable()
    try:
        with LiveBytes(head, {"hidden": hidden, "labels": labels}) as live:
            with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
                logits = lazy(head, hidden * 1, 64)
                loss = functional.cross_entropy(logits.float().view(-1, WORDS), labels)
            held = live.current_bytes - live.start_bytes
            assert held < logits.nbytes
            loss.backward()
            head.weight.grad = head.bias.grad = hidden.grad = None
            assert not whole
            logits.exp()
            assert live.current_bytes - live.start_bytes > logits.nbytes / 2
            del logits, loss
            whole.clear()
            assert live.current_bytes == live.start_bytes
    finally:
        gc.enable()
