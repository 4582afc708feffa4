"""PEFT: adapters in any order, k-bit preparation, hooks on embeddings, and prefixes that come as a cache."""

import peft
import pytest
import torch
from helpers.adapters import with_lora
from helpers.custom import same_under
from helpers.experts import experts
from helpers.installed import ALL
from helpers.snapshots import snapshot
from helpers.steps import assert_near, assert_same, enable, input_gradient_hooks, planned, recomputed, step
from helpers.tables import table
from peft import LoraConfig, PrefixTuningConfig, ShiraConfig, get_peft_model

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.errors import HfCkptError
from hf_ckpt.models.tiny import tiny_batch, tiny_model


def lora(model, **options):
    return with_lora(model, "llama", **{"targets": ["q_proj"], "lora_dropout": 0.0, **options})


@pytest.mark.trap(3)
@pytest.mark.compat
def test_enable_calls_on_every_wrapper_reach_the_plan():
    """Enable calls on the PeftModel, the tuner and the base model all reach the plan."""
    model = lora(tiny_model("llama"))
    hf_ckpt.install(model)
    callers = (model, model.base_model, model.get_base_model())
    assert type(callers[0]) is not type(callers[1])
    for index, caller in enumerate(callers):
        for name in compat.transformers.ENABLE_NAMES:
            getattr(caller, name)({"layers": str(index)})
            assert list(hf_ckpt.describe(model).plan.active()) == [ALL[index]]
    step(model, tiny_batch("llama"))
    assert recomputed(model) == [ALL[2]]
    for caller in callers:
        getattr(caller, compat.transformers.DISABLE_NAMES[0])()
        assert not hf_ckpt.describe(model).enabled
        enable(model)


@pytest.mark.trap(18)
@pytest.mark.compat
@pytest.mark.parametrize("order", ["adapters first", "enable first", "inside", "transformers first"])
def test_frozen_blocks_below_the_first_adapter_are_not_recomputed(order):
    """Frozen blocks below the first adapter are not recomputed: plans remove hooks that require input gradients."""
    model = tiny_model("llama")
    if order == "transformers first":
        enable(model, {"use_reentrant": False})
    if order in ("enable first", "transformers first"):
        planned(model)
    wrapped = lora(model, hub=order == "inside", layers_to_transform=[2])
    hf_ckpt.install(wrapped)
    for _ in range(3):
        enable(wrapped)
    assert input_gradient_hooks(model) == 0
    inputs = {}
    for index, layer in enumerate(model.model.layers):
        layer.register_forward_pre_hook(lambda module, args, index=index: inputs.update({index: args[0].requires_grad}))
    step(wrapped, tiny_batch("llama"))
    assert inputs == {0: False, 1: False, 2: False, 3: True}
    assert recomputed(wrapped) == ALL[2:]
    assert hf_ckpt.describe(wrapped).frozen == tuple(ALL[:2])


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_prefix_tuning(family):
    """Prefix tuning trains keys and values in a cache: blocks get it under `selective`, and it is refused elsewhere."""
    model = get_peft_model(tiny_model(family), PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"))
    expected = step(model, tiny_batch(family))
    before = snapshot(model)
    for spec in ({"policy": "selective"}, {"policy": "selective", "save": ["attention"]}):
        planned(model, {**spec, "check_every": 1})
        assert_same(expected, step(model, tiny_batch(family)), str(spec))
        assert len(set(recomputed(model))) == 4
        assert hf_ckpt.describe(model).watched.differences == ()
    for spec in ({"policy": "full"}, {"policy": "selective", "rules": [{"layers": "0", "policy": "full"}]}):
        planned(model, spec)
        with pytest.raises(HfCkptError, match=r'a cache that is not empty.*Use "policy": "selective"'):
            step(model, tiny_batch(family))
    hf_ckpt.uninstall(model)
    model.zero_grad()
    assert snapshot(model) == before


@pytest.mark.parametrize(("kind", "options"), table(__file__, "adapters.yaml"))
def test_unusual_adapters_in_chunks(kind, options):
    config = getattr(peft, kind)(target_modules=["q_proj", "up_proj", "lm_head"], task_type="CAUSAL_LM", **options)
    model = get_peft_model(tiny_model("llama"), config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.05)
    expected, batch = step(model, tiny_batch("llama")), tiny_batch("llama")
    for tokens in (5, "auto"):
        planned(model, {"policy": "full", "head": tokens, "check_every": 1})
        assert_near(expected, step(model, batch))
        described = hf_ckpt.describe(model)
        assert recomputed(model) == ALL
        assert described.chunked_heads == (tokens == 5)
        assert described.watched.differences == ()
        hf_ckpt.uninstall(model)


@pytest.mark.parametrize(("spec", "times"), [({"policy": "full"}, 1), ({"policy": "selective"}, 3)], ids=str)
def test_adapters_that_save_sparse_tensors(spec, times):
    """Adapters may save sparse tensors, as SHiRA's do; these have no storage and no `nbytes`."""
    config = ShiraConfig(r=4, target_modules=["q_proj", "up_proj"], init_weights=False)
    model = get_peft_model(tiny_model("llama"), config)
    expected = step(model, tiny_batch("llama"))
    planned(model, spec)
    assert_same(expected, step(model, tiny_batch("llama")))
    # The input of the first block needs no gradient, so that its norm has no graph to be rebuilt from.
    assert len(recomputed(model)) >= times * len(ALL) - (spec["policy"] == "selective")


@pytest.mark.trap(79)
@pytest.mark.parametrize("spec", ["full", {"policy": "full+selective", "save": ["attention"]}])
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "llama"])
def test_lora_on_parameters(name, backwards, spec):
    """PEFT registers these parameters anew in each forward, in another order. Those of the LLaMA have one shape."""
    targets = ["q_proj.weight", "o_proj.weight"] if name == "llama" else ["experts.gate_up_proj", "experts.down_proj"]
    targets = targets[:: -1 if backwards else 1]

    def make():
        torch.manual_seed(0)
        model = tiny_model("llama") if name == "llama" else experts(name)
        config = LoraConfig(r=4, target_modules=[], target_parameters=targets, init_lora_weights=False)
        return get_peft_model(model, config)

    def run(model):
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        steps = []
        for number in range(2):
            steps.append(step(model, tiny_batch("llama"), seed=number))
            optimizer.step()
        return steps

    same_under(spec, run, make, times=2)
