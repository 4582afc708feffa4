"""The chunked head in models and training loops: the gradients of the plain head up to rounding."""

import logging
import pickle
from unittest import mock

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from helpers.adapters import with_lora
from helpers.others import other_model
from helpers.steps import ROUNDING, assert_near, assert_same, enable, outcome, planned, step, without_cache
from helpers.tables import keyed, table
from torch import nn
from torch.nn import functional

import hf_ckpt
from hf_ckpt.engines.head.logits import Logits
from hf_ckpt.errors import ChangedBlockError
from hf_ckpt.models.blocks import vocabulary_head
from hf_ckpt.models.tiny import VOCABULARY, tiny_batch, tiny_model

pytestmark = pytest.mark.usefixtures("unwatched")
CHUNK = 5
"""Tokens per chunk of a model's head."""
TABLE = table(__file__, "heads.yaml")
OTHERS = TABLE["others"]
ADAPTERS = TABLE["adapters"]


def model_of(name, dtype=torch.float32, how="all", **keys):
    """A small model; `how` says which adapters it has and which of its parts are trained."""
    if name in OTHERS:
        class_name, options = OTHERS[name]
        model = other_model(class_name, dropout=0.0, attention="eager", dtype=dtype, **options, **keys)
    else:
        model = tiny_model(name, layers=1, dtype=dtype, **keys)
    if name == "bart":  # its head adds a buffer, which is zero in a new model
        model.final_logits_bias += torch.linspace(0, 1, VOCABULARY, dtype=dtype)
    if how in ADAPTERS:
        return with_lora(model, "llama", lora_dropout=0.0, **ADAPTERS[how])
    model.requires_grad_(how != "head only")
    vocabulary_head(model).requires_grad_(how != "frozen head")
    return model


def batch_of(name):
    """23 tokens per sequence, so that the last chunk is shorter than the others; few labels for RoBERTa."""
    both = name in ("t5", "bart")
    batch = tiny_batch("t5" if both else "llama", batch=2, tokens=46 if both else 23)
    if name == "roberta":
        batch["labels"][batch["labels"] % 5 < 3] = -100
    return batch


def on(model, head=CHUNK):
    """Run the model's head in chunks, and change nothing else."""
    return planned(model, {"policy": "none", "head": head})


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


def error(truth, results):
    """Relative norm of the difference over all gradients together."""
    names = sorted(truth.keys() - {"loss"})
    exact, got = (torch.cat([each[name].double().flatten() for name in names]) for each in (truth, results))
    return float((got - exact).norm() / exact.norm())


@pytest.mark.compat
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast"])
@pytest.mark.parametrize(*keyed(TABLE["cases"], "name", "how", "tied"))
def test_gradients_are_those_of_the_plain_head(name, how, tied, precision, whole):
    """In 16 bits, they are as close to the exact gradients."""
    keys = {"tie_word_embeddings": tied, "how": how}
    keys["dtype"] = torch.bfloat16 if precision == "bfloat16" else torch.float32
    autocast = torch.bfloat16 if precision == "autocast" else None
    expected, _ = trained(model_of(name, **keys), batch_of(name), autocast)
    ours = on(model_of(name, **keys))
    got, outputs = trained(ours, batch_of(name), autocast)
    assert calls(ours) == 1
    assert type(outputs.logits) is Logits
    assert not whole
    assert got["loss"].dtype == expected["loss"].dtype
    if not tied:
        assert any("lm_head" in key for key in got) == (how != "frozen head")
    if precision == "float32":
        assert_near(expected, got)
    else:
        truth, _ = trained(model_of(name, **keys).float(), batch_of(name))
        assert error(truth, got) <= 1.2 * error(truth, expected)
        assert abs(got["loss"] - truth["loss"]) <= 1.2 * abs(expected["loss"] - truth["loss"]) + 1e-4


def test_only_tokens_with_a_label_are_computed(monkeypatch):
    model, batch, linear = on(model_of("roberta")), batch_of("roberta"), mock.Mock(wraps=functional.linear)
    monkeypatch.setattr(functional, "linear", linear)
    trained(model, batch)
    rows = [len(call.args[0]) for call in linear.call_args_list if len(call.args[1]) == VOCABULARY]
    assert sum(rows) == int((batch["labels"] != -100).sum()) < batch["labels"].numel() / 2
    assert max(rows) == CHUNK


@pytest.mark.compat
def test_logits_that_the_user_keeps():
    """Stored logits can be used after the backward, copied and saved."""
    expected, got = (trained(model, batch_of("llama"))[1] for model in (model_of("llama"), on(model_of("llama"))))
    assert torch.equal(got.logits.argmax(-1), expected.logits.argmax(-1))
    assert got.logits.computed is None
    for results in (got.logits.detach().cpu(), got.logits, pickle.loads(pickle.dumps(got.logits.detach()))):
        assert torch.equal(results + 0, expected.logits)
    assert got.logits.detach().numpy().sum() == expected.logits.detach().numpy().sum()


# --- what changes behind the head -------------------------------------------------------------------------------------


def forward(model, **arguments):
    return model(**arguments).logits


def with_other_weights(model, **arguments):
    """As MAML does: the weights of this forward are computed, and gone when it has ended."""
    weights = {"lm_head.weight": model.lm_head.weight * 2}
    return torch.func.functional_call(model, weights, kwargs=arguments).logits


def as_reference(model, **arguments):
    """As DPO does, but with a gradient."""
    with model.disable_adapter():
        return model(**arguments).logits


def replace_weight(model):
    old = vocabulary_head(model).weight
    vocabulary_head(model).weight = nn.Parameter(old.detach() * 2, requires_grad=old.requires_grad)


def set_another_adapter(model):
    model.add_adapter("other", model.peft_config["default"])
    model.set_adapter("other")


SWITCHES = {
    "weight": ("all", forward, replace_weight),
    "frozen weight": ("frozen head", forward, replace_weight),
    "weights of a call": ("all", with_other_weights, lambda model: None),
    "reference": ("lora", as_reference, lambda model: None),
    "scaling": ("lora", forward, lambda model: vocabulary_head(model).scaling.update(default=8.0)),
    "adapters off": ("lora", forward, lambda model: model.base_model.disable_adapter_layers()),
    "another adapter": ("lora", forward, set_another_adapter),
}


@pytest.mark.compat
@pytest.mark.trap(77)
@pytest.mark.parametrize("early", [True, False], ids=["before the loss", "before backward"])
@pytest.mark.parametrize("name", SWITCHES)
def test_the_head_runs_as_it_was_in_the_forward(name, early, whole):
    how, run, switch = SWITCHES[name]
    batch, results = batch_of("llama"), []
    words = batch["labels"].unsqueeze(-1)
    for prepare in (lambda model: model, on):
        model = prepare(model_of("llama", how=how, tie_word_embeddings=False))
        model.get_input_embeddings().requires_grad_(True)  # gets its gradient through the head
        logits = run(model, input_ids=batch["input_ids"], use_cache=False)
        parameters = {key: each for key, each in model.named_parameters() if each.requires_grad}
        if early:
            switch(model)
        loss = (logits.gather(-1, words).squeeze(-1) - logits.logsumexp(-1)).mean()  # backward runs the head again
        if not early:
            switch(model)
        now = dict(vocabulary_head(model).named_parameters())
        loss.backward()
        assert all(each is now[key] for key, each in vocabulary_head(model).named_parameters())
        results.append({"loss": loss.detach(), **{key: each.grad for key, each in parameters.items()}})
    assert_near(*results)
    assert calls(model) == 1
    assert not whole


def test_adapters_that_are_merged_before_backward_are_refused():
    model = on(model_of("llama", how="lora"))
    loss = forward(model, **without_cache(model, batch_of("llama"))).logsumexp(-1).sum()
    model.merge_adapter()
    with pytest.raises(ChangedBlockError, match="'head': adapters were merged"):
        loss.backward()


# --- on a model -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("take_off", [hf_ckpt.uninstall, lambda model: model.gradient_checkpointing_disable()])
def test_what_was_put_on_comes_off(take_off):
    model = model_of("llama")
    before = dict(vars(model.lm_head))
    on(model)
    enable(model)  # a second time
    assert vars(model.lm_head).keys() - before.keys() == {"forward"}
    take_off(model)
    assert vars(model.lm_head) == before


@pytest.mark.parametrize(("chunk", "ran"), [(46, "as a whole, because with so few"), (45, "chunks of 45 tokens")])
def test_one_chunk_is_the_plain_head(chunk, ran):
    model = on(model_of("llama"), chunk)
    expected, got = (step(each, batch_of("llama")) for each in (model_of("llama"), model))
    assert_near(expected, got, ROUNDING if chunk < 46 else 0)
    assert calls(model) == (chunk < 46)
    assert f"head, last call: {ran}" in str(hf_ckpt.describe(model))


# --- when the head stays plain ----------------------------------------------------------------------------------------


@pytest.mark.compat
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_evaluation_and_generation_are_untouched(name):
    plain, ours = model_of(name), on(model_of(name))
    batch = without_cache(ours, batch_of(name))
    for mode, with_gradients in ((True, False), (False, False), (False, True)):
        with torch.set_grad_enabled(with_gradients):
            expected, got = (model.train(mode)(**batch) for model in (plain, ours))
        assert type(got.logits) is torch.Tensor
        assert torch.equal(expected.logits, got.logits)
    keys = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(*(model.generate(batch["input_ids"][:, :8], **keys) for model in (plain, ours)))
    assert calls(ours) == 0


REASONS = {
    "an active dropout": lambda model: with_lora(model, "llama", targets=["lm_head"], lora_dropout=0.5),
    "its weights are computed": lambda model: nn.utils.weight_norm(model.lm_head),
    "sharded or moved": lambda model: add_hook_to_module(model.model.layers[0], ModelHook()),
    "no projection onto a vocabulary": lambda model: None,
    "replaced its forward": lambda model: setattr(model.lm_head, "forward", model.lm_head.forward),
}


@pytest.mark.parametrize("reason", REASONS)
def test_the_reason_why_a_head_stays_plain_is_said_once(reason, caplog):
    family = "bert" if "projection" in reason else "llama"
    plain, model = (tiny_model(family, layers=1) for _ in range(2))
    for each in (plain, model):
        REASONS[reason](each)
    batch = tiny_batch(family)
    assert_same(step(plain, batch), step(on(model), batch))
    step(model, batch)
    enable(model)
    assert calls(model) == 0
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [reason in message for message in said] == [True]


def test_a_head_that_nobody_calls_is_said_once(caplog):
    """As with TRL, whose loss uses the weight of the head."""
    model, batch = on(model_of("llama")), batch_of("llama")
    for _ in range(3):
        step(model, batch)
        model.model(batch["input_ids"])  # two forwards in a row may not reach the head
    assert "it is never called" not in caplog.text
    for _ in range(5):
        hidden = model.model(batch["input_ids"]).last_hidden_state
        (hidden @ model.lm_head.weight.T).sum().backward()
    assert caplog.text.count("it is never called") == 1
    assert "head, last call: none, because it is never called" in str(hf_ckpt.describe(model))
