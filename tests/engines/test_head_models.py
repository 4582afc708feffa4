"""The chunked head in models and training loops: gradients of the plain head up to rounding, with less memory."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import logging
import pickle

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from helpers.adapters import with_lora
from helpers.heads import (
    CHUNK,
    MODELS,
    WORDS,
    adapted,
    batch_of,
    calls,
    copy_for_a_thread,
    error,
    labels_for,
    lazy,
    on,
    toy,
    trained,
)
from helpers.steps import assert_near, assert_same, enable, step, without_cache
from torch import distributed, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainingArguments

import hf_ckpt
from hf_ckpt.attach.hooks import HeadForward
from hf_ckpt.engines.head.logits import Logits
from hf_ckpt.errors import HfCkptError
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.models.blocks import base_model
from hf_ckpt.models.tiny import VOCABULARY, tiny_batch, tiny_model

pytestmark = pytest.mark.usefixtures("unwatched")


def both(name, how="all", dtype=torch.float32, autocast=None, **keys):
    """Gradients of a plain and a chunked head, and the model in float32; checks that logits stay chunked."""
    plain = adapted(MODELS[name](dtype, **keys), how)
    ours = on(adapted(MODELS[name](dtype, **keys), how))
    batch = batch_of(name)
    expected, _ = trained(plain, batch, autocast)
    got, outputs = trained(ours, batch, autocast)
    assert calls(ours) == 1
    assert type(outputs.logits) is Logits
    assert outputs.logits.computed is None
    assert got["loss"].dtype == expected["loss"].dtype
    return expected, got, adapted(MODELS[name](dtype, **keys).float(), how)


@pytest.mark.compat
@pytest.mark.parametrize(
    ("name", "how", "tied"),
    [
        *((name, "all", tied) for name in MODELS for tied in (True, False)),
        *(("llama", how, False) for how in ("frozen head", "head only", "lora", "modules to save")),
    ],
)
def test_the_same_gradients(name, how, tied, whole):
    expected, got, _ = both(name, how, tie_word_embeddings=tied)
    if not tied and name == "llama":
        assert any("lm_head" in key for key in got) == (how != "frozen head")
    assert_near(expected, got)
    assert not whole


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["bf16", "autocast"])
@pytest.mark.parametrize(
    ("name", "how"),
    [*((name, "all") for name in MODELS), *(("llama", how) for how in ("frozen head", "head only", "lora"))],
)
def test_16_bit_gradients_are_no_worse(name, how, autocast, whole):
    dtype = torch.bfloat16 if autocast is None else torch.float32
    tied = {"tie_word_embeddings": False} if how != "all" else {}
    expected, got, exact = both(name, how, dtype, autocast, **tied)
    truth, _ = trained(exact, batch_of(name))
    assert error(truth, got) <= 1.2 * error(truth, expected)
    assert abs(got["loss"] - truth["loss"]) <= 1.2 * abs(expected["loss"] - truth["loss"]) + 1e-4
    assert not whole


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_only_tokens_with_a_label_are_computed(name, monkeypatch):
    rows = []
    linear = functional.linear

    def counted(given, weight, *bias):
        rows.append(len(given) if len(weight) == VOCABULARY else 0)
        return linear(given, weight, *bias)

    model, batch = on(MODELS[name](torch.float32)), batch_of(name)
    monkeypatch.setattr(functional, "linear", counted)
    trained(model, batch)
    labelled = int((batch["labels"] != -100).sum())
    assert sum(rows) == labelled < batch["labels"].numel() / 2
    assert max(rows) == CHUNK


@pytest.mark.compat
def test_logits_that_the_user_keeps():
    """Stored logits can be used after the backward, and saved."""
    plain, ours = (tiny_model("llama", layers=1) for _ in range(2))
    on(ours)
    expected, got = (trained(model, batch_of("llama"))[1] for model in (plain, ours))
    assert type(got.logits) is Logits
    assert torch.equal(got.logits.argmax(-1), expected.logits.argmax(-1))
    assert got.logits.computed is None
    saved = io.BytesIO()
    torch.save(got, saved)
    saved.seek(0)
    read = torch.load(saved, weights_only=False).logits
    for found in (got.logits.detach().cpu(), got.logits, read, pickle.loads(pickle.dumps(got.logits.detach()))):
        assert torch.equal(found + 0, expected.logits)
    assert torch.equal(got.logits[:, -1, :5], expected.logits[:, -1, :5])
    assert got.logits.detach().numpy().sum() == expected.logits.detach().numpy().sum()


# --- on a model -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "take_off",
    [
        hf_ckpt.uninstall,
        lambda model: model.gradient_checkpointing_disable(),
        lambda model: hf_ckpt.install(model, {"policy": "none"}),
    ],
    ids=["uninstall", "disable", "another spec"],
)
def test_what_was_put_on_comes_off(take_off):
    model = tiny_model("llama", layers=1)
    before = dict(vars(model.lm_head))
    on(model)
    enable(model)  # a second time
    step(model, batch_of("llama"))
    assert vars(model.lm_head).keys() - before.keys() == {"forward"}
    assert calls(model) == 1
    take_off(model)
    assert vars(model.lm_head) == before
    assert_same(step(tiny_model("llama", layers=1), batch_of("llama")), step(model, batch_of("llama")))


@pytest.mark.parametrize("again", [False, True])
def test_adapters_around_the_head_after_enabling(again):
    """Adapters added later leave only the head's base layer chunked, so logits are computed; enabling again helps."""
    plain, ours = (tiny_model("llama", layers=1) for _ in range(2))
    plain, ours = adapted(plain, "lora"), adapted(on(ours), "lora")
    if again:
        enable(ours)
    expected, got = (trained(model, batch_of("llama")) for model in (plain, ours))
    assert_near(expected[0], got[0])
    assert (type(got[1].logits) is Logits) == again
    assert calls(ours) == 1
    hf_ckpt.uninstall(ours)
    assert all("forward" not in vars(module) for module in base_model(ours).modules())


def test_compiled_models_have_a_plain_head(dynamo):
    expected, _ = trained(tiny_model("llama", layers=1), batch_of("llama"))
    model = on(tiny_model("llama", layers=1))
    compiled = torch.compile(model, backend="aot_eager")
    outputs = compiled(**without_cache(model, batch_of("llama")))
    outputs.loss.backward()
    got = {"loss": outputs.loss.detach(), **{name: p.grad.clone() for name, p in model.named_parameters()}}
    assert type(outputs.logits) is torch.Tensor
    assert calls(model) == 0
    trained(model, batch_of("llama"))
    assert calls(model) == 1
    assert_near(expected, got)


# --- when the head stays plain ----------------------------------------------------------------------------------------


@pytest.mark.compat
@pytest.mark.parametrize("name", ["llama", "t5", "bert"])
def test_evaluation_is_untouched(name):
    plain, ours = MODELS[name](torch.float32), on(MODELS[name](torch.float32))
    batch = without_cache(ours, batch_of(name))
    trained(ours, batch)
    for mode, context in ((True, torch.no_grad()), (False, torch.no_grad()), (False, contextlib.nullcontext())):
        with context:
            expected, got = (model.train(mode)(**batch) for model in (plain, ours))
        assert type(got.logits) is torch.Tensor
        assert torch.equal(expected.logits, got.logits)
        assert torch.equal(expected.loss, got.loss)
    if name != "bert":
        keys = {"max_new_tokens": 4, "do_sample": False}
        expected, got = (model.generate(batch["input_ids"][:, :8], **keys) for model in (plain, ours))
        assert torch.equal(expected, got)
    assert calls(ours) == 1


def _dropout_in_the_head():
    model = with_lora(tiny_model("llama", layers=1), "llama", targets=["lm_head"], lora_dropout=0.5)
    return model, "an active dropout"


def _hooked_by_accelerate():
    model = tiny_model("llama", layers=1)
    add_hook_to_module(model.model.layers[0], ModelHook())
    return model, "sharded or moved"


def _no_head():
    return tiny_model("bert", layers=1), "no projection onto a vocabulary"


def _foreign_forward():
    model = tiny_model("llama", layers=1)
    model.lm_head.forward = model.lm_head.forward
    return model, "something else has replaced its forward"


@pytest.mark.parametrize("make", [_dropout_in_the_head, _hooked_by_accelerate, _no_head, _foreign_forward])
def test_plain_with_the_reason_said_once(make, caplog):
    model, reason = make()
    plain = copy.deepcopy(model)
    batch = tiny_batch("bert" if make is _no_head else "llama")
    on(model)
    assert_same(step(plain, batch), step(model, batch))
    step(model, batch)
    enable(model)
    assert calls(model) == 0
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [reason in message for message in said] == [True]
    hf_ckpt.uninstall(model)
    assert all(not isinstance(vars(module).get("forward"), HeadForward) for module in model.modules())


def test_a_head_that_nobody_calls_is_said_once(caplog):
    """A warning says once if the head is never called, as with TRL, whose loss uses its weight."""
    model = on(tiny_model("llama", layers=1))
    batch = batch_of("llama")

    def said():
        return [record.getMessage() for record in caplog.records if "nobody calls it" in record.getMessage()]

    def fails(module, args):
        raise ZeroDivisionError

    for _ in range(3):
        handle = model.model.norm.register_forward_pre_hook(fails)
        with pytest.raises(ZeroDivisionError):
            step(model, batch)
        handle.remove()
        step(model, batch)
        with torch.no_grad():
            model.model(batch["input_ids"])
        model.eval()
        model.model(batch["input_ids"])
        model.train()
    assert calls(model) == 3
    assert said() == []
    for _ in range(5):
        hidden = model.model(batch["input_ids"]).last_hidden_state
        (hidden @ model.lm_head.weight.T).sum().backward()
    assert len(said()) == 1
    step(copy.deepcopy(model), batch)
    assert calls(model) == 3


def test_one_chunk_is_the_plain_head():
    model = on(tiny_model("llama", layers=1), 46)
    assert_same(step(tiny_model("llama", layers=1), batch_of("llama")), step(model, batch_of("llama")))
    assert calls(model) == 0
    assert "(46 tokens), because they are one chunk" in str(hf_ckpt.describe(model))
    hf_ckpt.install(model, {"policy": "none", "head": 45})
    assert "last call" not in str(hf_ckpt.describe(model))
    step(model, batch_of("llama"))
    assert calls(model) == 1
    assert "head, last call: chunks of 45 tokens" in str(hf_ckpt.describe(model))
    found = hf_ckpt.verify(model, batch_of("llama"), {"policy": "none", "head": "auto"})
    assert "head: 0 calls in chunks; last call: as a whole, with" in str(found)
    assert "last call: chunks of 7 tokens" in str(found)


# --- in training loops ----------------------------------------------------------------------------------------------


class Watched(Trainer):
    """A Trainer that records the logits returned by the model."""

    def compute_loss(self, model, inputs, return_outputs=False, **keys):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **keys)
        self.seen = [*getattr(self, "seen", []), outputs["logits"]]
        return (loss, outputs) if return_outputs else loss


@pytest.mark.compat
@pytest.mark.parametrize("options", [{}, {"label_smoothing_factor": 0.1}], ids=["plain", "smoothed"])
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_trainer(name, options, tmp_path, whole):
    """Chunks fit the Trainer, which divides losses by `num_items_in_batch`, or smooths labels."""
    batch = tiny_batch(name, batch=12, tokens=32)
    generator = torch.Generator().manual_seed(1)
    batch["labels"][torch.rand(batch["labels"].shape, generator=generator) < 0.4] = -100
    if name == "t5":
        batch["decoder_input_ids"] = batch["labels"].clamp(min=0)  # smoothing removes the labels
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


@pytest.mark.parametrize("options", [{"find_unused_parameters": True}, {"static_graph": True}], ids=str)
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


def test_a_copy_of_data_parallel_is_an_error():
    """A replica for another device, whose weights are no parameters, is refused by name; the original still runs."""
    model = on(tiny_model("llama", layers=1))
    with pytest.raises(HfCkptError, match="Use DistributedDataParallel"):
        copy_for_a_thread(model)(**batch_of("llama"), use_cache=False)
    assert calls(model) == 0
    model(**batch_of("llama"), use_cache=False).loss.backward()
    assert calls(model) == 1


# --- memory -----------------------------------------------------------------------------------------------------------


def peak_of(head, hidden, labels, make, **holders):
    """Peak bytes during forward, loss and backward, above the bytes before."""
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
    """With `auto`, here 256 tokens per chunk, the peak falls by at least the factor `least`."""
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
    """Gradients are computed before the backward, but freed with the loss, even with the garbage collector off."""
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
