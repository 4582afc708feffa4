"""A policy for each stack: a tower is left as it is, and the other stacks get a plan within a budget."""

import dataclasses

import pytest
import torch
from helpers.adapters import lora_config
from helpers.lanes import Eager, lanes_of
from helpers.others import other_model
from helpers.steps import assert_same, enable, planned, step
from helpers.unusual_models import unusual_batch, unusual_model
from peft import get_peft_model

import hf_ckpt
from hf_ckpt.attach.record import installation
from hf_ckpt.costs.costs import with_offloading
from hf_ckpt.forecast.devices import this_device
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.models.blocks import find_blocks
from hf_ckpt.models.tiny import tiny_batch, tiny_model
from hf_ckpt.spec.actions import FULL, OFFLOAD, Action
from hf_ckpt.training import plans

pytestmark = pytest.mark.usefixtures("unwatched")


SOUND = {"input_features": torch.randn(2, 16, 128), "labels": torch.randint(5, 320, (2, 48))}


def adapted():
    """LLaVA with adapters on the attention of its language model; the tower is frozen."""
    torch.manual_seed(1)
    names = r".*language_model.*\.(q_proj|v_proj)"
    return get_peft_model(unusual_model("llava"), lora_config("llama", targets=names)).train()


MODELS = {
    **{name: lambda name=name: unusual_model(name) for name in ("gemma3", "qwen3_vl", "llava")},
    "llava, adapters": adapted,
    "whisper": lambda: other_model("WhisperForConditionalGeneration", layers=4),
}


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("fixed", ["none", "selective"])
def test_a_budget_plans_the_other_stacks_only(name, fixed):
    torch.manual_seed(0)
    model = MODELS[name]()
    batch = SOUND if name == "whisper" else unusual_batch(name.split(",")[0], batch=2, tokens=96)
    first, second = dict.fromkeys(block.stack for block in find_blocks(model).blocks)
    tower = [block.name for block in find_blocks(model).blocks if block.stack == first]
    expected = step(model, batch)

    def peak(spec):
        hf_ckpt.install(model, spec)
        enable(model)
        with LiveBytes(model) as live:
            step(model, batch)
        return live.peak_bytes

    least, most = (peak({"policy": {first: fixed, second: policy}}) for policy in ("full", "none"))
    hf_ckpt.install(model, {"policy": {first: fixed, second: "budget"}, "budget": (least + most) // 2})
    enable(model)
    actions = set()
    for _ in range(24):
        with LiveBytes(model) as live:
            assert_same(expected, step(model, batch))
        given = {block.name: action for block, action in hf_ckpt.describe(model).plan.actions}
        actions.update(given[block] for block in tower)
    found = hf_ckpt.describe(model)
    assert not installation(model).session.planned.is_provisional
    assert max(live.peak_bytes, found.measured_bytes) <= (least + most) // 2
    assert {action.kind for action in actions} == {"keep" if fixed == "none" else fixed}
    frozen = name == "llava, adapters"
    assert any(found.recomputed.get(block) for block in tower) == (fixed == "selective" and not frozen)
    assert any(count for block, count in found.recomputed.items() if block not in tower)


ACTIONS = {  # what a rule says of a stack -> the action of its blocks
    "offload": ({"policy": "offload"}, OFFLOAD),
    "full": ({"policy": "full"}, FULL),
    "saves linear": ({"policy": "selective", "save": ["linear"]}, Action("selective", ("linear",))),
}


@pytest.mark.parametrize("name", ACTIONS)
def test_a_rule_may_have_an_action_that_no_plan_chooses(name, monkeypatch):
    """Its blocks keep their action, and others may offload."""
    rule, action = ACTIONS[name]
    bandwidth = {"host_bandwidth": 1e9, "launch_nanoseconds": 1}
    monkeypatch.setattr(plans, "this_device", lambda devices: dataclasses.replace(this_device(devices), **bandwidth))
    monkeypatch.setattr(plans, "with_offloading", lambda *args: costs.extend(with_offloading(*args)) or costs)
    costs = []
    model, batch = tiny_model("t5", layers=2), tiny_batch("t5", batch=2, tokens=16)
    expected = step(model, batch)
    rules = [{"stack": "encoder", **rule}]
    with lanes_of(Eager):
        planned(model, {"policy": "budget", "budget": "400KiB", "host_budget": "1GiB", "rules": rules})
        for _ in range(18):
            assert_same(expected, step(model, batch))
            model.zero_grad(set_to_none=True)
        found = hf_ckpt.describe(model)
        assert found.measuring is None
        assert [given for block, given in found.plan.actions if block.stack == "encoder"] == [action] * 2
        assert sum(found.recomputed.values()) > 0
    choices = [(call.block.stack, call.costs.keys()) for candidate in costs for call in candidate.calls]
    assert {tuple(actions) for stack, actions in choices if stack == "encoder"} == {(action,)}
    assert any(OFFLOAD in actions for stack, actions in choices if stack == "decoder")


@pytest.mark.parametrize(
    ("spec", "same"),
    [
        ({"vision": "none", "decoder": "full"}, {"policy": "none", "rules": ["vision none", "decoder full"]}),
        ({"vision": "full", "decoder": "auto"}, {"policy": "auto", "rules": ["vision full", "decoder auto"]}),
    ],
)
def test_policies_of_stacks_are_rules(spec, same):
    rules = [dict(zip(("stack", "policy"), rule.split(), strict=True)) for rule in same["rules"]]
    asked = hf_ckpt.Spec.parse({"policy": spec, "rules": [{"stack": "head", "policy": "none"}]})
    assert asked.to_dict() == {"policy": same["policy"], "rules": [*rules, {"stack": "head", "policy": "none"}]}
    assert hf_ckpt.Spec.parse(asked.to_dict()) == asked
