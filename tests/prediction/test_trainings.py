"""Quantised bases, selected adapters, DPO and packed sequences: predicted bytes compared with a count."""

from __future__ import annotations

import contextlib

import pytest
import torch
import transformers
from helpers.sparing import sparing
from helpers.tracing import CPU, assert_near, chosen, deviations, plan_of
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

import hf_ckpt
from hf_ckpt.attach.attach import trial
from hf_ckpt.compat.peft import add_lora
from hf_ckpt.errors import HfCkptError
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.models.tiny import tiny_model
from hf_ckpt.prediction.batches import step_of_workload
from hf_ckpt.prediction.trace import trace_costs
from hf_ckpt.prediction.workload import Workload, skeleton_of_workload
from hf_ckpt.spec.actions import FULL, KEEP

ACTIONS = (KEEP, FULL)
SIZES = {"batch": 2, "tokens": 192}
HALF = torch.bfloat16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A saved narrow LLaMA in bfloat16."""
    found = tmp_path_factory.mktemp("narrow")
    tiny_model("llama", layers=4, hidden=256, attention="sdpa").to(HALF).save_pretrained(found)
    return str(found)


def costs_of(workload):
    skeleton = skeleton_of_workload(workload, on_cpu=True)
    step = step_of_workload(workload, skeleton)
    return trace_costs(skeleton, step, CPU, actions=ACTIONS), step


def quantised(folder, bits, targets, double=True):
    four = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": HALF}
    asked = {**four, "bnb_4bit_use_double_quant": double} if bits == 4 else {"load_in_8bit": True}
    config = transformers.BitsAndBytesConfig(**asked)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=HALF, quantization_config=config)
    prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    return get_peft_model(model, LoraConfig(r=8, target_modules=targets, lora_dropout=0.1)).train()


def scales_of(model):
    """Scales and codes that bitsandbytes keeps besides quantised weights."""
    import bitsandbytes

    for module in model.modules():
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        if state is not None:
            yield from (state.absmax, state.code)
            yield from (state.offset, state.state2.absmax, state.state2.code) if state.nested else ()
        elif isinstance(module, bitsandbytes.nn.Linear8bitLt):
            yield module.state.SCB if module.state.SCB is not None else module.weight.SCB


def plain_loss(model, batch):
    with torch.autocast("cpu", HALF):
        return model(**batch, use_cache=False).loss


def counted(model, costs, batch, loss_of, *held):
    """Action -> predicted and real peaks of the first and second micro-step."""
    found = {}
    for number, action in enumerate(costs.actions):
        choice = costs.uniform(number)
        with trial(model, plan_of(model, chosen(costs, choice))):
            peaks = []
            model.zero_grad(set_to_none=True)
            for _ in range(2):
                with LiveBytes(model, batch, *held) as live:
                    loss_of(model, batch).backward()
                peaks.append(live.peak_bytes)
            recomputed = hf_ckpt.describe(model).recomputed
        assert all(recomputed.values()) == (action == FULL) or not recomputed
        found[str(action)] = (peaks, deviations(costs, choice, peaks))
    assert found[str(FULL)][0][1] < found[str(KEEP)][0][1]
    assert_near({name: away for name, (_, away) in found.items()})


CASES = [(4, "all-linear", True), (4, ("q_proj", "v_proj"), False), (8, "all-linear", True)]


@pytest.mark.long
@sparing(("bits", "targets", "double"), CASES, CASES[0])
def test_adapters_on_a_quantised_base(folder, bits, targets, double):
    """Weights match bitsandbytes and PEFT's preparation to the byte, and peaks are near."""
    bases = {4: "load_in_4bit", 8: "load_in_8bit"}
    named = {"lora": 8, "lora_targets": targets, "lora_dropout": 0.1, bases[bits]: True, "double_quant": double}
    costs, step = costs_of(Workload(folder, **SIZES, **named, optimizer="sgd", accumulation=2))
    model = quantised(folder, bits, targets if isinstance(targets, str) else list(targets), double)
    scales = list(scales_of(model))
    tensors = [*model.parameters(), *model.buffers(), *scales]
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    assert costs.static.parameters + costs.static.buffers == sum(storages.values())
    batch = {name: torch.ones(value.shape, dtype=value.dtype) for name, value in step.batch.items()}
    counted(model, costs, batch, plain_loss, {"scales": scales})


@pytest.mark.slow
@sparing("reference", ["adapters-off", "model", "precomputed"], "adapters-off")
def test_preferences_with_a_reference(folder, reference):
    """Pairs run through TRL's head, and the reference after the policy's forward, as in its DPO trainer."""
    from trl.trainer.utils import add_fused_lm_head

    named = {"lora": 8, "trainer": "dpo", "reference": reference, "optimizer": "sgd", "accumulation": 2}
    costs, step = costs_of(Workload(folder, **SIZES, **named))
    outputs = ("log_probs", "entropy", "mean_logits", "is_top1")

    def load():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=HALF)
        add_fused_lm_head(model, outputs=outputs)
        return model

    model = add_lora(load(), rank=8).train()
    second = load().requires_grad_(False) if reference == "model" else None

    def loss_of(model, batch):
        with torch.autocast("cpu", HALF):
            given = {**batch, "use_cache": False, "fused_lm_head": True}
            policy = model(**given).log_probs.sum(1)
            if reference != "precomputed":
                with torch.no_grad(), model.disable_adapter() if second is None else contextlib.nullcontext():
                    others = (second or model)(**given).log_probs.sum(1)
            chosen_scores, rejected = (policy if reference == "precomputed" else policy - others).chunk(2)
            return -torch.nn.functional.logsigmoid(chosen_scores - rejected).mean()

    shape = (2 * SIZES["batch"], SIZES["tokens"])
    assert step.batch["input_ids"].shape == shape
    batch = {name: torch.ones(shape, dtype=torch.long) for name in ("input_ids", "attention_mask", "labels")}
    counted(model, costs, batch, loss_of, *([{"second": list(second.parameters())}] if second else []))


@pytest.mark.slow
def test_packed_sequences(folder):
    """One row, in which position ids restart for every sequence, and a mask separates sequences."""
    costs, step = costs_of(Workload(folder, **SIZES, packing=True, lora=8, optimizer="sgd", accumulation=2))
    whole = SIZES["batch"] * SIZES["tokens"]
    assert step.batch["position_ids"].shape == (1, whole)
    model = add_lora(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=HALF), rank=8).train()
    places = torch.arange(SIZES["tokens"]).repeat(SIZES["batch"])[None]
    batch = {name: torch.ones((1, whole), dtype=torch.long) for name in ("input_ids", "labels")}

    def loss_of(model, batch):
        return model(**batch, use_cache=False).loss

    counted(model, costs, {**batch, "position_ids": places}, loss_of)


@pytest.mark.slow
def test_ranks_hold_buckets_or_parts():
    alone, ddp, parts = (
        hf_ckpt.predict("mini-llama", tokens=32, device="t4", ranks=ranks, parallel=how).costs.static
        for ranks, how in ((1, "ddp"), (4, "ddp"), (4, "fsdp2"))
    )
    assert ddp.buffers - alone.buffers == alone.gradients
    assert parts.parameters == alone.parameters // 4
    assert parts.optimizer == alone.optimizer // 4


def test_adapters_on_layers_that_are_not_there():
    with pytest.raises(HfCkptError, match="PEFT puts no adapters on"):
        hf_ckpt.predict("mini-llama", tokens=16, device="t4", lora=4, lora_targets=("c_attn",))


def test_weights_that_a_device_map_moves_are_refused():
    model = tiny_model("llama")
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": "cpu"}
    with pytest.raises(HfCkptError, match=r"`device_map` keeps weights of model\.layers\.1"):
        hf_ckpt.predict(model, tokens=16)
