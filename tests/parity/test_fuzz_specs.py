"""Random specs on small models: each trains with the same gradients or is refused, and leaves no trace."""

from __future__ import annotations

import contextlib

import pytest
from helpers.fuzzing import NO_LANE_SAID, PLAIN_HEAD_SAID, Said, assert_equal, examples, is_chunked, train, unchanged
from helpers.installed import flags
from helpers.snapshots import snapshot
from helpers.specs import valid_specs
from helpers.steps import ROUNDING, assert_near, enable
from hypothesis import event, example, given
from hypothesis import strategies as st

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.errors import HfCkptError, InfeasibleError
from hf_ckpt.models.tiny import FAMILIES, tiny_batch, tiny_model
from hf_ckpt.spec.spec import Spec


def small_layers():
    """Texts that mostly fit three blocks."""
    return st.lists(st.sampled_from(["0", "1", "2", "-1", "-3", "0-1", "1-2", "-2--1", "0--1", "3"]), min_size=1).map(
        ",".join
    )


@st.composite
def fitting_specs(draw):
    """Valid specs whose numbers mostly fit models of three blocks; those that plan are left to a test of their own."""
    spec = draw(valid_specs().filter(lambda spec: spec["policy"] not in ("budget", "auto")))
    if draw(st.integers(0, 9)) == 0:
        return spec
    if isinstance(spec.get("layers"), dict):
        spec["layers"] = {stack: draw(small_layers()) for stack in spec["layers"]}
    elif "layers" in spec:
        spec["layers"] = draw(small_layers())
    if "rules" in spec:
        spec["rules"] = [{**rule, "layers": draw(small_layers())} for rule in spec["rules"]]
    if isinstance(spec.get("segments"), int):
        spec["segments"] = 1 + spec["segments"] % 3
    if isinstance(spec.get("head"), int):
        spec["head"] = 1 + spec["head"] % 17
    return spec


def put_on(model, given_spec, through_enable):
    """Install and enable a spec, which is given to the one call or the other."""
    hf_ckpt.install(model, None if through_enable else given_spec)
    assert flags(model) == []
    assert not hf_ckpt.describe(model).enabled
    enable(model, given_spec if through_enable else None)
    assert hf_ckpt.describe(model).spec == Spec.parse(given_spec).to_dict()


def check_trained(model, batch, expected, got):
    """The gradients are the same, and every planned block ran again."""
    described = hf_ckpt.describe(model)
    active = described.plan.active()
    assert described.forwards == dict.fromkeys(active, 1)
    for name, action in active.items():
        assert described.recomputed[name] > 0, name
        assert described.recomputed[name] == 1 or action.kind == "selective", name
    chunked = is_chunked(model, described.plan.head, batch)
    assert described.chunked_heads == chunked
    if chunked or described.plan.mlp != "full":
        assert_near(expected, got, 5 * ROUNDING)
    else:
        assert_equal(expected, got)


def check_on(family, given_spec, through_enable):
    """Install, enable, one step, disable, uninstall: each works or raises a typed error, and leaves no trace."""
    keeps_random_state = given_spec.get("preserve_rng_state", "auto") is not False
    same_masks = keeps_random_state and given_spec.get("mlp", "full") == "full"  # each chunk draws its own
    model = tiny_model(family, layers=3, dropout=0.1 if same_masks else 0.0)
    batch = tiny_batch(family, tokens=8)
    expected = train(model, batch)
    before = snapshot(model)
    with Said() as said:
        try:
            put_on(model, given_spec, through_enable)
        except HfCkptError as error:
            event(f"refused: {type(error).__name__}")
            assert through_enable or unchanged(model, before)
            hf_ckpt.uninstall(model)
            assert unchanged(model, before)
            return
        try:
            got = train(model, batch)
        except HfCkptError as error:
            event(f"refused in the forward: {type(error).__name__}")
        else:
            event("trained")
            check_trained(model, batch, expected, got)
        model.zero_grad(set_to_none=True)
        getattr(model, compat.DISABLE_NAMES[-1])()
        assert flags(model) == []
        assert_equal(expected, train(model, batch))
        hf_ckpt.uninstall(model)
        assert unchanged(model, before)
        assert_equal(expected, train(model, batch))
    assert not said.unexpected(NO_LANE_SAID, PLAIN_HEAD_SAID)


def check_on_every_family(given_spec, through_enable):
    for family in FAMILIES:
        check_on(family, given_spec, through_enable)


NO_ATTENTION_TO_SAVE = {"policy": "selective", "save": ["attention"], "engine": "sac"}


@pytest.mark.long
@examples(5)
@given(fitting_specs(), st.booleans())
@example(NO_ATTENTION_TO_SAVE, False)
def test_a_spec_works_on_every_family_or_is_refused(given_spec, through_enable):
    check_on_every_family(given_spec, through_enable)


@pytest.mark.slow
@examples(30, 0.2 / len(FAMILIES))
@given(fitting_specs(), st.booleans())
def test_many_specs_work_on_every_family_or_are_refused(given_spec, through_enable):
    check_on_every_family(given_spec, through_enable)


PLANNED = [{"budget": "1GiB"}, {"budget": 4096}, {"budget": "1GiB", "save": ["attention"]}, {"policy": "auto"}]
PLANNED += [{"budget": "600KiB", "host_budget": "1MiB"}, {"budget": "1TiB", "engine": "sac"}, {"budget": "50%"}]


def check_planned(given_spec, family, tokens):
    """A plan is made for the first batch, and trains with the same gradients; or what is asked for is refused."""
    model = tiny_model(family, layers=2, dropout=0.1)
    batch = tiny_batch(family, tokens=tokens)
    expected = train(model, batch)
    before = snapshot(model)
    with Said() as said:
        hf_ckpt.install(model, given_spec)
        enable(model)
        may_be_refused = InfeasibleError if given_spec.get("engine") != "sac" else HfCkptError
        with contextlib.suppress(may_be_refused):
            assert_equal(expected, train(model, batch))
            event("trained")
        model.zero_grad(set_to_none=True)
        getattr(model, compat.DISABLE_NAMES[-1])()
        assert flags(model) == []
        hf_ckpt.uninstall(model)
        assert unchanged(model, before)
    assert not said.unexpected(NO_LANE_SAID)


@pytest.mark.slow
@examples(2, 0.005)
@given(st.sampled_from(PLANNED), st.sampled_from(FAMILIES), st.integers(3, 17))
@example({"budget": 4096}, "t5", 8)
@example({"budget": "600KiB", "host_budget": "1MiB"}, "llama", 8)
def test_planned_specs(given_spec, family, tokens):
    check_planned(given_spec, family, tokens)
