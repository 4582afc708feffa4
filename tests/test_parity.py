"""The same seed gives the same gradients, bit for bit, and exactly the planned blocks are recomputed."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from conftest import assert_same, enable, gradients, recomputed, step, without_cache
from peft import LoraConfig, get_peft_model

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.tiny import FAMILIES, tiny_batch, tiny_model

LAYERS = 4
STACKS = {
    "llama": {"decoder": "model.layers"},
    "gpt2": {"decoder": "transformer.h"},
    "bert": {"encoder": "bert.encoder.layer"},
    "t5": {"encoder": "encoder.block", "decoder": "decoder.block"},
}
TARGETS = {
    "llama": ["q_proj", "v_proj"],
    "gpt2": ["c_attn"],
    "bert": ["query", "value"],
    "t5": ["q", "v"],
}
# Spec -> the blocks it means, written out by hand for every stack.
SPECS = {
    "none": ({"policy": "none"}, {"encoder": [], "decoder": []}),
    "full": ({"policy": "full"}, {"encoder": [0, 1, 2, 3], "decoder": [0, 1, 2, 3]}),
    "every 2": ({"every_n_layers": 2}, {"encoder": [0, 2], "decoder": [0, 2]}),
    "layers": ({"layers": "0,-2--1"}, {"encoder": [0, 2, 3], "decoder": [0, 2, 3]}),
    "rules": (
        {"rules": [{"layers": "0-3", "policy": "full"}, {"layers": "1,-1", "policy": "none"}]},
        {"encoder": [0, 2], "decoder": [0, 2]},
    ),
    "selective": ({"policy": "selective"}, {"encoder": [0, 1, 2, 3], "decoder": [0, 1, 2, 3]}),
    "selective, attention stays": (
        {"policy": "selective", "save": ["attention"]},
        {"encoder": [0, 1, 2, 3], "decoder": [0, 1, 2, 3]},
    ),
    "selective, linear stays": (
        {"policy": "selective", "save": ["linear"]},
        {"encoder": [0, 1, 2, 3], "decoder": [0, 1, 2, 3]},
    ),
    "selective by SAC": (
        {"policy": "selective", "engine": "sac"},
        {"encoder": [0, 1, 2, 3], "decoder": [0, 1, 2, 3]},
    ),
    "selective and full": (
        {"policy": "full", "rules": [{"layers": "1-2", "policy": "selective"}]},
        {"encoder": [0, 1, 2, 3], "decoder": [0, 1, 2, 3]},
    ),
}
# T5 has two stacks to tell apart.
T5_SPECS = SPECS | {
    "layers": (
        {"layers": {"encoder": "0,3", "decoder": "1-2"}},
        {"encoder": [0, 3], "decoder": [1, 2]},
    ),
    "rules": (
        {
            "policy": "full",
            "rules": [
                {"stack": "encoder", "layers": "1-3", "policy": "none"},
                {"stack": "decoder", "layers": "0", "policy": "none"},
            ],
        },
        {"encoder": [0], "decoder": [1, 2, 3]},
    ),
}


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How a model is fine-tuned, and whether checkpointing is enabled before or after the adapters come."""

    name: str
    adapter: str | None = None
    enable_first: bool = False
    last_layer_only: bool = False
    lora_dropout: float = 0.0

    def apply(self, model, family):
        if self.adapter is None:
            return model
        # Random adapters: with the usual zeros in B, no gradient would reach A.
        config = LoraConfig(
            r=4,
            target_modules=TARGETS[family],
            lora_dropout=self.lora_dropout,
            layers_to_transform=[LAYERS - 1] if self.last_layer_only else None,
            fan_in_fan_out=family == "gpt2",
            init_lora_weights=False,
        )
        torch.manual_seed(1)
        if self.adapter == "peft":
            return get_peft_model(model, config)
        model.add_adapter(config)
        return model.train()

    def below_first_trainable(self, family):
        """Blocks that no trainable parameter comes before."""
        first_stack = next(iter(STACKS[family].values()))
        return {f"{first_stack}.{index}" for index in range(LAYERS - 1)} if self.last_layer_only else set()


TUNINGS = (
    Tuning("full fine-tuning"),
    Tuning("get_peft_model, then enable", "peft"),
    Tuning("enable, then get_peft_model", "peft", enable_first=True),
    Tuning("add_adapter, then enable", "hub"),
    Tuning("enable, then add_adapter", "hub", enable_first=True),
    Tuning("LoRA on the last layer", "peft", last_layer_only=True),
    Tuning("lora_dropout", "peft", lora_dropout=0.1),
)


def padded_batch(family):
    """A batch whose second row is shorter, so that masks take part."""
    batch = tiny_batch(family)
    batch["attention_mask"][1, -3:] = 0
    return batch


def skip_where_absent(family, attention):
    """T5 has no sdpa before transformers 5."""
    try:
        tiny_model(family, layers=1, attention=attention)(**tiny_batch(family))
    except ValueError as error:
        pytest.skip(f"{family} has no {attention} attention in this transformers: {str(error)[:80]}")


def check(family, tuning, spec_name, baseline, make):
    """Train one step with the plan: gradients as without, and exact counts."""
    what = f"{tuning.name}, {spec_name}"
    spec, wanted = (T5_SPECS if family == "t5" else SPECS)[spec_name]
    model = make()
    if tuning.enable_first:
        hf_ckpt.install(model)
        enable(model, spec)
    model = tuning.apply(model, family)
    if not tuning.enable_first:
        hf_ckpt.install(model)
        enable(model, spec)
    assert_same(baseline, step(model, padded_batch(family)), what)
    planned = [f"{path}.{index}" for stack, path in STACKS[family].items() for index in wanted[stack]]
    frozen = tuning.below_first_trainable(family)
    found = hf_ckpt.describe(model)
    assert found.forwards == dict.fromkeys(planned, 1), what
    rebuilt = {
        name
        for name, action in found.plan.active().items()
        if action.kind == "selective" and spec.get("engine") != "sac"
    }
    assert [name for name in recomputed(model) if name not in rebuilt] == [
        name for name in planned if name not in frozen | rebuilt
    ], what
    # `selective` counts operations: at least one in every block above the first trainable parameter.
    assert {name for name in rebuilt if found.recomputed[name]} == rebuilt - frozen, what
    assert not rebuilt - frozen or sum(found.dropped.values()) > 0, what
    assert set(found.frozen) == frozen & set(planned), what


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_combination_has_the_gradients_of_no_checkpointing(family, dtype, attention):
    skip_where_absent(family, attention)
    for dropout in (0.0, 0.1):

        def make(dropout=dropout):
            return tiny_model(family, layers=LAYERS, dropout=dropout, attention=attention, dtype=dtype)

        for tuning in TUNINGS:
            baseline = step(tuning.apply(make(), family), padded_batch(family))
            for spec_name in SPECS:
                check(family, tuning, spec_name, baseline, make)


@pytest.mark.compat
@pytest.mark.parametrize("family", FAMILIES)
def test_core_parity(family):
    """The part of the product above that runs on the oldest transformers too."""

    def make():
        return tiny_model(family, layers=LAYERS, dropout=0.1)

    for tuning in TUNINGS:
        baseline = step(tuning.apply(make(), family), padded_batch(family))
        for spec_name in ("full", "layers"):
            check(family, tuning, spec_name, baseline, make)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_comparison_notices_other_dropout_masks(family):
    """Were dropout not drawn at all, the dropout half of this file would prove nothing."""
    model = tiny_model(family, dropout=0.1)
    with pytest.raises(AssertionError, match="differs"):
        assert_same(step(model, tiny_batch(family), seed=7), step(model, tiny_batch(family), seed=8))


@pytest.mark.compat
def test_t5_relative_position_bias():
    """Block 0 computes the position bias and every block adds it: its gradient passes through all of them."""
    model = tiny_model("t5", dropout=0.1)
    expected = step(model, tiny_batch("t5"))
    hf_ckpt.install(model)
    enable(model)
    got = step(model, tiny_batch("t5"))
    names = [name for name in expected if "relative_attention_bias" in name]
    assert [name.partition(".")[0] for name in names] == ["encoder", "decoder"]
    for name in names:
        assert expected[name].any(), name
        assert torch.equal(expected[name], got[name]), name
    assert recomputed(model) == [f"{stack}.block.{index}" for stack in ("encoder", "decoder") for index in range(4)]


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_autocast(family):
    model = tiny_model(family, dropout=0.1)

    def autocast_step():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return step(model, tiny_batch(family))

    expected = autocast_step()
    with pytest.raises(AssertionError, match="differs"):  # autocast does change the result
        assert_same(expected, step(model, tiny_batch(family)))
    hf_ckpt.install(model)
    enable(model)
    assert_same(expected, autocast_step())
    assert len(recomputed(model)) == len(hf_ckpt.describe(model).plan.actions)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_accumulation(family):
    """Two batches backward one after another, and two forwards before one backward."""
    model = tiny_model(family, dropout=0.1)
    batches = [without_cache(model, tiny_batch(family, seed=seed)) for seed in (0, 1)]

    def one_by_one():
        model.zero_grad()
        torch.manual_seed(7)
        for batch in batches:
            model(**batch).loss.backward()
        return gradients(model)

    def together():
        model.zero_grad()
        torch.manual_seed(7)
        sum(model(**batch).loss for batch in batches).backward()
        return gradients(model)

    expected = one_by_one(), together()
    hf_ckpt.install(model)
    enable(model)
    assert_same(expected[0], one_by_one())
    assert_same(expected[1], together())
    assert set(hf_ckpt.describe(model).recomputed.values()) == {4}


def test_a_graph_kept_for_a_second_backward_is_recomputed_again():
    model = tiny_model("llama")
    batch = without_cache(model, tiny_batch("llama"))

    def twice():
        model.zero_grad()
        loss = model(**batch).loss
        loss.backward(retain_graph=True)
        loss.backward()
        return gradients(model)

    expected = twice()
    hf_ckpt.install(model)
    enable(model)
    assert_same(expected, twice())
    assert set(hf_ckpt.describe(model).recomputed.values()) == {2}


def test_modules_to_save_train_beside_the_adapters():
    """PEFT keeps a trainable copy of the classifier behind a wrapper."""

    def make():
        return tiny_model("bert", dropout=0.1)

    def adapt(model):
        torch.manual_seed(1)
        config = LoraConfig(r=4, target_modules=["query"], modules_to_save=["classifier"], init_lora_weights=False)
        return get_peft_model(model, config)

    expected = step(adapt(make()), tiny_batch("bert"))
    assert any("classifier" in name and grad.any() for name, grad in expected.items() if grad is not None)
    model = adapt(make())
    hf_ckpt.install(model)
    enable(model)
    assert_same(expected, step(model, tiny_batch("bert")))
    assert len(recomputed(model)) == LAYERS


def test_gradients_of_input_embeddings():
    """Soft prompts and attributions ask for the gradient of `inputs_embeds`, with every weight frozen."""
    model = tiny_model("gpt2").requires_grad_(False)
    ids = tiny_batch("gpt2")["input_ids"]

    def gradient():
        embeds = model.transformer.wte(ids).requires_grad_(True)
        model(inputs_embeds=embeds, labels=ids, use_cache=False).loss.backward()
        return embeds.grad

    expected = gradient()
    hf_ckpt.install(model)
    enable(model)
    assert expected.any()
    assert torch.equal(expected, gradient())
    assert len(recomputed(model)) == LAYERS


@pytest.mark.parametrize("preserve", [True, False, "auto"])
def test_parity_without_dropout_holds_whatever_is_said_of_random_state(preserve):
    model = tiny_model("llama")
    expected = step(model, tiny_batch("llama"))
    hf_ckpt.install(model, {"preserve_rng_state": preserve, "determinism_check": "none"})
    enable(model)
    assert_same(expected, step(model, tiny_batch("llama")))
    assert len(recomputed(model)) == LAYERS


def test_recompute_counts_do_not_depend_on_the_name_of_the_call():
    """Each of the model's enable names gives the same counts."""
    for name in compat.ENABLE_NAMES:
        model = tiny_model("gpt2")
        hf_ckpt.install(model)
        getattr(model, name)({"every_n_layers": 2})
        step(model, tiny_batch("gpt2"))
        assert recomputed(model) == ["transformer.h.0", "transformer.h.2"], name
