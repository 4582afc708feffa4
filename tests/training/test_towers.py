"""A policy for each stack: a tower is left as it is, and the other stacks get a plan within a budget."""

import pytest
import torch
from helpers.adapters import lora_config
from helpers.others import other_model
from helpers.steps import assert_same, enable, step
from helpers.unusual_models import unusual_batch, unusual_model
from peft import get_peft_model

import hf_ckpt
from hf_ckpt.attach.record import installation
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.models.blocks import find_blocks

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
    assert not installation(model).session.planned.measures
    assert max(live.peak_bytes, found.measured_bytes) <= (least + most) // 2
    assert {action.kind for action in actions} == {"keep" if fixed == "none" else fixed}
    frozen = name == "llava, adapters"
    assert any(found.recomputed.get(block) for block in tower) == (fixed == "selective" and not frozen)
    assert any(count for block, count in found.recomputed.items() if block not in tower)


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
