"""Enable and disable calls of scripts and libraries: the plans they apply, and the requests they refuse."""

from __future__ import annotations

import inspect
import logging

import pytest
import torch
from helpers.installed import ALL, active, flags
from helpers.steps import assert_same, enable, input_gradient_hooks, recomputed, step
from peft import LoraConfig, get_peft_model

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.attach.attach import lost_blocks
from hf_ckpt.attach.record import installation
from hf_ckpt.engines import full
from hf_ckpt.errors import SpecError
from hf_ckpt.models.tiny import tiny_batch, tiny_model

pytestmark = pytest.mark.compat


def planned(spec=None, family="llama"):
    model = tiny_model(family)
    hf_ckpt.install(model, spec)
    return model


def plan_of(family, spec, **keys):
    return hf_ckpt.install(tiny_model(family, **keys), spec).plan


def disable(model):
    getattr(model, compat.transformers.DISABLE_NAMES[-1])()


BARE = {
    "nothing": ((), {}),
    "None": ((None,), {}),
    "empty": (({},), {}),
    "use_reentrant": (({"use_reentrant": False},), {}),
    "defaults by position": ((None, 1, False), {}),
    "defaults inside": (({"every_n_layers": 1, "offload": False, "use_reentrant": False},), {}),
    "by keyword": ((), {"gradient_checkpointing_kwargs": None}),
    "by the new keyword": ((), {"activation_checkpointing_kwargs": {"use_reentrant": False}}),
}


@pytest.mark.parametrize("name", compat.transformers.ENABLE_NAMES)
@pytest.mark.parametrize(("args", "kwargs"), BARE.values(), ids=BARE.keys())
def test_a_bare_enable_keeps_the_plan(name, args, kwargs):
    for spec in ({"layers": "1,-1"}, plan_of("llama", {"layers": "1,-1"})):
        model = planned(spec)
        getattr(model, name)(*args, **kwargs)
        assert active(model) == [ALL[1], ALL[3]]


@pytest.mark.parametrize("name", compat.transformers.ENABLE_NAMES)
@pytest.mark.parametrize("keyword", ["gradient_checkpointing_kwargs", "activation_checkpointing_kwargs", None])
def test_new_keys_replace_the_plan_and_stay(name, keyword):
    model = planned({"layers": "0"})
    asked = {"layers": "2-3"}
    call = getattr(model, name)
    call(asked) if keyword is None else call(**{keyword: asked})
    assert active(model) == ALL[2:]
    call()
    assert active(model) == ALL[2:]
    call({"policy": "full", "every_n_layers": 2})
    assert active(model) == [ALL[0], ALL[2]]
    call(None, every_n_layers=3)  # as Trainer passes it
    assert active(model) == [ALL[0], ALL[3]]


@pytest.mark.parametrize("given", [False, True], ids=["spec", "plan"])
def test_options_alone_keep_the_choice_of_blocks(given):
    model = planned(plan_of("llama", {"layers": "1"}) if given else {"layers": "1"})
    enable(model, {"preserve_rng_state": False, "determinism_check": "none"})
    assert active(model) == [ALL[1]]
    region = installation(model).regions[ALL[1]]
    assert (region.preserve_rng_state, region.determinism_check) == (False, "none")
    enable(model, {"policy": "full"})
    assert active(model) == ALL  # a policy replaces both


def test_hooks_answer_as_transformers_methods_do():
    """The replaced methods keep transformers' parameter names, and return nothing."""
    model = planned()
    for name in compat.transformers.ENABLE_NAMES:
        hook = getattr(model, name)
        names = ["gradient_checkpointing_kwargs", "every_n_layers", "offload"]
        assert list(inspect.signature(hook).parameters)[:3] == names
        assert hook() is None
    for name in compat.transformers.DISABLE_NAMES:
        assert getattr(model, name)() is None


@pytest.mark.parametrize("asked", [None, {}, {"use_reentrant": False}, {"use_reentrant": True}], ids=str)
def test_checkpointing_is_never_reentrant(monkeypatch, caplog, asked):
    """Checkpointing is never reentrant: torch's default for `{}` is, and ignores keyword inputs and frozen inputs."""
    calls = []
    real = full.checkpoint

    def recorder(function, *args, **kwargs):
        calls.append(kwargs)
        return real(function, *args, **kwargs)

    monkeypatch.setattr(full, "checkpoint", recorder)
    model = planned()
    for _ in range(2):
        enable(model, asked)
    step(model, tiny_batch("llama"))
    assert [call["use_reentrant"] for call in calls] == [False] * 4
    warned = caplog.text.count("recomputes non-reentrantly: same gradients, fewer conditions")
    assert warned == (asked == {"use_reentrant": True})


def test_the_head_can_be_asked_for_beside_a_plan_that_was_given():
    """A chunked head does not select blocks, so the given plan stays; bare enable calls keep the head."""
    model = planned(plan_of("llama", {"layers": "1-2"}))
    for asked, head in (({"head": 8}, 8), (None, 8), ({"head": "full"}, "full")):
        enable(model, asked)
        assert (active(model), hf_ckpt.describe(model).plan.head) == (ALL[1:3], head)
    assert "forward" not in vars(model.lm_head)


# --- what is told -----------------------------------------------------------------------------------------------------


def test_describe_counts_and_prints():
    model = planned({"layers": {"encoder": "0", "decoder": "-1"}}, "t5")
    enable(model)
    for _ in range(2):
        step(model, tiny_batch("t5"))
    found = hf_ckpt.describe(model)
    assert found.recomputed == found.forwards == {"encoder.block.0": 2, "decoder.block.3": 2}
    text = str(found)
    assert "encoder (4 x T5Block): full 0; keep 1-3" in text
    assert "decoder (4 x T5Block): keep 0-2; full 3" in text
    assert "4 checkpointed block calls, 4 recomputations" in text


def test_lost_blocks_are_named():
    """`lost_blocks` names blocks whose flags or functions someone else changed; the callback checks it at step 1."""
    model = planned({"layers": "0-2"})
    assert lost_blocks(model) == ()
    enable(model)
    assert lost_blocks(model) == ()
    model.model.layers[1].gradient_checkpointing = False
    model.model.layers[2]._gradient_checkpointing_func = lambda function, *args: function(*args)
    assert lost_blocks(model) == tuple(ALL[1:3])
    enable(model)
    assert lost_blocks(model) == ()
    assert active(model) == ALL[:3]


def test_only_the_plan_is_logged_above_debug_level(caplog):
    with caplog.at_level(logging.INFO, "hf_ckpt"):
        model = planned()
        enable(model)
        step(model, tiny_batch("llama"))
        hf_ckpt.uninstall(model)
    (told,) = caplog.records
    assert (told.name, told.levelno) == ("hf_ckpt.plans", logging.INFO)


def test_eval_mode_with_gradients_is_said_once(caplog):
    """Eval mode with gradients warns once: blocks are checkpointed in train mode only, so memory may run out."""
    expected = step(tiny_model("llama"), tiny_batch("llama"))
    model = planned()
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
    model = planned().train(training)
    enable(model)
    with torch.no_grad():
        model(**tiny_batch("llama"))
    with torch.inference_mode():
        model(**tiny_batch("llama"))
    model.requires_grad_(False).eval()(**tiny_batch("llama"))  # a frozen model does not train
    assert not caplog.records
    assert sum(hf_ckpt.describe(model).forwards.values()) == 0


# --- refused requests -------------------------------------------------------------------------------------------------


REFUSED = [
    *(({"every_n_layers": every}, "`every_n_layers` must be a whole number of at least 1") for every in (0, -1, 1.5)),
    ({"determinism_chek": "none"}, "did you mean `determinism_check`"),
]


@pytest.mark.parametrize(("asked", "said"), REFUSED, ids=str)
def test_what_others_accept_in_silence_is_refused_with_the_reason(asked, said):
    """Every call refuses invalid values and keys, which otherwise do nothing, or crash late (0 layers)."""
    model = tiny_model("llama")
    with pytest.raises(SpecError, match=said):
        hf_ckpt.install(model, asked)
    hf_ckpt.install(model)
    for name in compat.transformers.ENABLE_NAMES:
        for refused in (asked, "full", ["layers"], 3):  # the last three are no dicts
            with pytest.raises(SpecError, match=said if refused is asked else "must be a dict"):
                getattr(model, name)(refused)
    assert flags(model) == []
    assert not hf_ckpt.describe(model).enabled


# --- hooks on embeddings ----------------------------------------------------------------------------------------------


def test_hooks_on_embeddings_are_off_while_a_plan_is_on():
    """Repeated enable calls do not pile them up; those of before come back, even those without a handle."""
    model = tiny_model("llama")
    for _ in range(2):
        model.enable_input_require_grads()
    before = input_gradient_hooks(model)
    assert before > 0
    hf_ckpt.install(model)
    for _ in range(3):
        enable(model)
        model.enable_input_require_grads()  # as TRL does
        get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))  # PEFT calls it if checkpointing is on
        assert input_gradient_hooks(model) == 0
    disable(model)
    assert input_gradient_hooks(model) == before
    hf_ckpt.uninstall(model)
    assert input_gradient_hooks(model) == before
