"""Enable and disable calls on an installed model: the plans they apply, and the requests they refuse."""

from __future__ import annotations

import inspect
import logging

import pytest
from helpers.installed import ALL, active, flags
from helpers.steps import enable, step

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.attach.attach import lost_blocks
from hf_ckpt.attach.record import installation
from hf_ckpt.errors import SpecError
from hf_ckpt.models.tiny import tiny_batch, tiny_model

pytestmark = pytest.mark.compat


BARE = {
    "nothing": ((), {}),
    "None": ((None,), {}),
    "empty": (({},), {}),
    "use_reentrant": (({"use_reentrant": False},), {}),
    "defaults beside": ((), {"every_n_layers": 1, "offload": False}),
    "defaults by position": ((None, 1, False), {}),
    "defaults inside": (({"every_n_layers": 1, "offload": False, "use_reentrant": False},), {}),
    "by keyword": ((), {"gradient_checkpointing_kwargs": None}),
    "by the new keyword": ((), {"activation_checkpointing_kwargs": {"use_reentrant": False}}),
}


@pytest.mark.parametrize("name", compat.transformers.ENABLE_NAMES)
@pytest.mark.parametrize(("args", "kwargs"), BARE.values(), ids=BARE.keys())
def test_a_bare_enable_keeps_the_plan(name, args, kwargs):
    model = tiny_model("llama")
    hf_ckpt.install(model, {"layers": "1,-1"})
    getattr(model, name)(*args, **kwargs)
    assert active(model) == [ALL[1], ALL[3]]


@pytest.mark.parametrize("name", compat.transformers.ENABLE_NAMES)
@pytest.mark.parametrize("keyword", ["gradient_checkpointing_kwargs", "activation_checkpointing_kwargs", None])
def test_new_keys_replace_the_plan_and_stay(name, keyword):
    model = tiny_model("llama")
    hf_ckpt.install(model, {"layers": "0"})
    asked = {"layers": "2-3"}
    call = getattr(model, name)
    call(asked) if keyword is None else call(**{keyword: asked})
    assert active(model) == ALL[2:]
    call()
    assert active(model) == ALL[2:]
    call({"policy": "full", "every_n_layers": 2})
    assert active(model) == [ALL[0], ALL[2]]
    call(None, every_n_layers=3)
    assert active(model) == [ALL[0], ALL[3]]


def test_options_alone_keep_the_choice_of_blocks():
    model = tiny_model("llama")
    hf_ckpt.install(model, {"layers": "1"})
    enable(model, {"preserve_rng_state": False, "determinism_check": "none"})
    assert active(model) == [ALL[1]]
    region = installation(model).regions[ALL[1]]
    assert (region.preserve_rng_state, region.determinism_check) == (False, "none")
    assert hf_ckpt.describe(model).spec == {
        "policy": "full",
        "layers": "1",
        "preserve_rng_state": False,
        "determinism_check": "none",
    }


def test_hooks_answer_as_transformers_methods_do():
    """The replaced methods keep transformers' parameter names, and return nothing."""
    model = tiny_model("llama")
    hf_ckpt.install(model)
    for name in compat.transformers.ENABLE_NAMES:
        hook = getattr(model, name)
        assert list(inspect.signature(hook).parameters)[:3] == [
            "gradient_checkpointing_kwargs",
            "every_n_layers",
            "offload",
        ]
        assert hook() is None
    for name in compat.transformers.DISABLE_NAMES:
        assert getattr(model, name)() is None


# --- refused requests -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", ["full", ["layers"], 3], ids=repr)
def test_kwargs_that_are_no_dict_are_a_spec_error(asked):
    model = tiny_model("llama")
    hf_ckpt.install(model)
    with pytest.raises(SpecError):
        enable(model, asked)
    assert flags(model) == []


def test_describe_counts_and_prints():
    model = tiny_model("t5")
    hf_ckpt.install(model, {"layers": {"encoder": "0", "decoder": "-1"}})
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
    model = tiny_model("llama")
    assert lost_blocks(model) == ()
    hf_ckpt.install(model, {"layers": "0-2"})
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
    model = tiny_model("llama")
    with caplog.at_level(logging.INFO, "hf_ckpt"):
        hf_ckpt.install(model)
        enable(model)
        step(model, tiny_batch("llama"))
        hf_ckpt.uninstall(model)
    (told,) = caplog.records
    assert (told.name, told.levelno) == ("hf_ckpt.plans", logging.INFO)


def test_the_head_can_be_asked_for_beside_a_plan_that_was_given():
    """A chunked head does not select blocks, so the given plan stays; bare enable calls keep the head."""
    model = tiny_model("llama")
    given = hf_ckpt.install(model, {"layers": "1-2"}).plan
    hf_ckpt.uninstall(model)
    hf_ckpt.install(model, given)
    enable(model, {"head": 8})
    assert (active(model), hf_ckpt.describe(model).plan.head) == ([ALL[1], ALL[2]], 8)
    enable(model)
    assert (active(model), hf_ckpt.describe(model).plan.head) == ([ALL[1], ALL[2]], 8)
    enable(model, {"head": "full"})
    assert hf_ckpt.describe(model).plan.head == "full"
    assert "forward" not in vars(model.lm_head)
