"""Plans and specs from files and objects."""

from __future__ import annotations

import pytest
from helpers.installed import ALL, active
from helpers.snapshots import snapshot
from helpers.steps import enable

import hf_ckpt
from hf_ckpt.attach.record import installation
from hf_ckpt.errors import PlanMismatchError
from hf_ckpt.models.tiny import tiny_model

pytestmark = pytest.mark.compat


def plan_of(family, spec, **keys):
    return hf_ckpt.install(tiny_model(family, **keys), spec).plan


def test_a_plan_object_installs_and_stays():
    model = tiny_model("llama")
    hf_ckpt.install(model, plan_of("llama", {"layers": "0,2"}))
    for bare in (None, {}, {"use_reentrant": False}, {"every_n_layers": 1, "offload": False}):
        enable(model, bare)
        assert active(model) == [ALL[0], ALL[2]]


def test_options_keep_a_plan_object():
    """An enable call that selects no blocks keeps a given plan."""
    model = tiny_model("llama")
    hf_ckpt.install(model, plan_of("llama", {"layers": "0,2"}))
    enable(model, {"preserve_rng_state": False})
    assert active(model) == [ALL[0], ALL[2]]
    assert not installation(model).regions[ALL[0]].preserve_rng_state


def test_a_policy_replaces_a_plan_object():
    model = tiny_model("llama")
    hf_ckpt.install(model, plan_of("llama", {"layers": "0,2"}))
    enable(model, {"policy": "full"})
    assert active(model) == ALL


@pytest.mark.parametrize(
    "other", [("llama", {"layers": 3}), ("gpt2", {}), ("bert", {})], ids=["fewer layers", "gpt2", "bert"]
)
def test_a_plan_for_another_model_installs_nothing(other, tmp_path):
    family, keys = other
    plan = plan_of(family, "full", **keys)
    plan.save(tmp_path / "plan.json")
    model = tiny_model("llama")
    before = snapshot(model)
    for given in (plan, {"plan": str(tmp_path / "plan.json")}):
        with pytest.raises(PlanMismatchError, match="is for another model"):
            hf_ckpt.install(model, given)
        assert snapshot(model) == before
    hf_ckpt.install(model, {"layers": "1"})
    enable(model)
    with pytest.raises(PlanMismatchError):
        enable(model, {"plan": str(tmp_path / "plan.json")})
    assert active(model) == [ALL[1]]


def test_spec_files_install(tmp_path):
    path = tmp_path / "spec.yaml"
    path.write_text("policy: full\nlayers: 1-2\n", encoding="utf-8")
    model = tiny_model("llama")
    hf_ckpt.install(model, str(path))
    enable(model)
    assert active(model) == ALL[1:3]
