"""Calls that other libraries make on an installed model: the plan stays, and harmful calls are refused."""

from __future__ import annotations

import logging

import pytest
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin
from helpers.installed import ALL
from helpers.steps import assert_same, enable, input_gradient_hooks, recomputed, step

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.engines import full
from hf_ckpt.errors import OwnerConflictError, SpecError
from hf_ckpt.models.tiny import tiny_batch, tiny_model


@pytest.mark.compat
def test_the_plan_survives_generation_in_trl():
    """TRL disables checkpointing around generation and enables it with its own kwargs: the plan must come back."""
    model = tiny_model("llama")
    hf_ckpt.install(model, {"layers": "1"})
    enable(model)
    for again in ({"use_reentrant": False}, None, {}):
        getattr(model, compat.transformers.DISABLE_NAMES[-1])()
        model.generate(tiny_batch("llama")["input_ids"][:, :4], max_new_tokens=2)
        enable(model, again)
        step(model, tiny_batch("llama"))
    assert recomputed(model) == ["model.layers.1"] * 3


@pytest.mark.compat
@pytest.mark.parametrize(
    "asked",
    [
        *(None, {}, {"use_reentrant": False}, {"use_reentrant": True}),
        *({"determinism_check": "none"}, {"preserve_rng_state": True}),
    ],
    ids=str,
)
def test_checkpointing_is_never_reentrant(monkeypatch, caplog, asked):
    """Checkpointing is never reentrant: torch's default for `{}` is, and ignores keyword inputs and frozen inputs."""
    calls = []
    real = full.checkpoint

    def recorder(function, *args, **kwargs):
        calls.append(kwargs)
        return real(function, *args, **kwargs)

    monkeypatch.setattr(full, "checkpoint", recorder)
    model = tiny_model("llama")
    hf_ckpt.install(model)
    enable(model, asked)
    enable(model, asked)
    step(model, tiny_batch("llama"))
    assert len(calls) == 4
    assert all(call["use_reentrant"] is False for call in calls)
    warned = caplog.text.count("recomputes non-reentrantly: same gradients, fewer conditions")
    assert warned == (asked == {"use_reentrant": True})


REFUSED = [
    *(
        ({"every_n_layers": every}, "`every_n_layers` must be a whole number of at least 1")
        for every in (0, -1, 1.5, "2", None)
    ),
    ({"determinism_chek": "none"}, "did you mean `determinism_check`"),
    ({"preserve_rng": True}, "did you mean `preserve_rng_state`"),
    ({"every_n_layer": 2}, "did you mean `every_n_layers`"),
    ({"use_rentrant": False}, "did you mean `use_reentrant`"),
    ({"ploicy": "full"}, "did you mean `policy`"),
]


@pytest.mark.compat
@pytest.mark.parametrize(("asked", "said"), REFUSED, ids=str)
def test_what_others_accept_in_silence_is_refused_with_the_reason(asked, said):
    """Every call refuses invalid values and keys, which otherwise do nothing, or crash late (0 layers)."""
    model = tiny_model("llama")
    with pytest.raises(SpecError, match=said):
        hf_ckpt.install(model, asked)
    hf_ckpt.install(model)
    for name in compat.transformers.ENABLE_NAMES:
        with pytest.raises(SpecError, match=said):
            getattr(model, name)(asked)
    assert not hf_ckpt.describe(model).enabled


@pytest.mark.compat
@pytest.mark.parametrize(
    "asked", [{"every_n_layers": 2}, {"policy": "full", "every_n_layers": 2, "offload": False}], ids=str
)
def test_every_n_layers_counts_each_stack(asked):
    """`every_n_layers` counts each stack of T5 by itself; one counter for both would take decoder block 1."""
    model = tiny_model("t5", layers=3)
    hf_ckpt.install(model)
    enable(model, asked)
    step(model, tiny_batch("t5"))
    assert recomputed(model) == [f"{stack}.block.{index}" for stack in ("encoder", "decoder") for index in (0, 2)]
    getattr(model, compat.transformers.ENABLE_NAMES[-1])(
        None, every_n_layers=3
    )  # as Trainer passes it, not in the kwargs
    assert list(hf_ckpt.describe(model).plan.active()) == ["encoder.block.0", "decoder.block.0"]


@pytest.mark.parametrize("of_the_process", [False, True], ids=["model", "process"])
def test_accelerates_own_checkpointing_is_a_second_owner(monkeypatch, everywhere, of_the_process):
    """hf_ckpt refuses accelerate's FSDP checkpointing as a second owner; under FSDP2 it redraws dropout."""
    model = tiny_model("llama")
    everywhere(None if of_the_process else model)
    for owns in (True, False):
        plugin = FullyShardedDataParallelPlugin(activation_checkpointing=owns)
        monkeypatch.setattr(AcceleratorState, "_shared_state", {"fsdp_plugin": plugin})
        if owns:
            with pytest.raises(OwnerConflictError, match=r"fsdp_activation_checkpointing: true.*needs one owner"):
                enable(model)
            assert not any(block.gradient_checkpointing for block in model.model.layers)
        else:
            enable(model)
            assert hf_ckpt.describe(model).enabled


# --- hooks on embeddings ----------------------------------------------------------------------------------------------


def test_hooks_on_embeddings_do_not_pile_up():
    """Repeated enable calls do not pile up embedding hooks, which transformers would leave behind without handles."""
    model = tiny_model("llama")
    hf_ckpt.install(model)
    for _ in range(3):
        enable(model)
        model.enable_input_require_grads()  # as PEFT and TRL do
    assert input_gradient_hooks(model) == 0
    getattr(model, compat.transformers.DISABLE_NAMES[-1])()
    hf_ckpt.uninstall(model)
    assert input_gradient_hooks(model) == 0


def test_hooks_on_embeddings_that_lost_their_handle_before_install():
    """Plans remove embedding hooks from before install, even those without a handle; uninstalling restores them."""
    model = tiny_model("llama")
    embedding = model.get_input_embeddings()
    model.enable_input_require_grads()
    model.enable_input_require_grads()
    before = dict(embedding._forward_hooks)
    assert len(before) == 2
    hf_ckpt.install(model)
    enable(model)
    assert len(embedding._forward_hooks) == 0
    hf_ckpt.uninstall(model)
    assert len(embedding._forward_hooks) == 2


# --- eval mode --------------------------------------------------------------------------------------------------------


def test_eval_mode_with_gradients_is_said_once(caplog):
    """Eval mode with gradients warns once: blocks are checkpointed in train mode only, so memory may run out."""
    model = tiny_model("llama")
    expected = step(model, tiny_batch("llama"))
    hf_ckpt.install(model)
    enable(model)
    with caplog.at_level(logging.WARNING, "hf_ckpt"):
        step(model, tiny_batch("llama"))
        assert not caplog.records
        model.eval()
        for _ in range(2):
            assert_same(expected, step(model, tiny_batch("llama")))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "LlamaModel runs in eval mode with gradients on" in caplog.text
    assert recomputed(model) == ALL  # from the step in train mode


@pytest.mark.parametrize("training", [True, False])
def test_evaluation_neither_warns_nor_recomputes(caplog, training):
    """Evaluation does not warn or recompute, even in train mode."""
    model = tiny_model("llama").train(training)
    hf_ckpt.install(model)
    enable(model)
    with torch.no_grad():
        model(**tiny_batch("llama"))
    with torch.inference_mode():
        model(**tiny_batch("llama"))
    model.requires_grad_(False).eval()(**tiny_batch("llama"))  # a frozen model does not train
    assert not caplog.records
    assert sum(hf_ckpt.describe(model).forwards.values()) == 0
