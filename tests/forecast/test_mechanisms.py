"""What libraries do to a training's memory, one test each: without it, a forecast would be of another training."""

import subprocess
import sys

import pytest
import torch
import transformers
import yaml

import hf_ckpt
from hf_ckpt.forecast.forecast import Forecaster
from hf_ckpt.forecast.model import shallow_model
from hf_ckpt.forecast.question import Question, question
from hf_ckpt.models.tiny import tiny_model
from hf_ckpt.spec.actions import KEEP

CONFIG = tiny_model("llama", layers=2).config
CONFIG.architectures = ["LlamaForCausalLM"]


def parts_of(**fields):
    """What fills the peak of a training of a small LLaMA."""
    return hf_ckpt.predict(CONFIG, tokens=16, device="a10", budget="1GiB", **fields).parts


def test_ddp_copies_gradients_into_buckets():
    """On several ranks only, one copy of all gradients; FSDP2 has none."""
    name = "copies of gradients in DDP's buckets"
    weights = parts_of()["weights"]
    assert parts_of()[name] == 0
    assert parts_of(ranks=2)[name] == weights
    assert parts_of(ranks=2, parallel="fsdp2")[name] == 0


@pytest.mark.long
def test_the_reference_of_dpo_has_a_copy_in_the_type_of_autocast():
    """The second model has weights of its own; autocast casts them, and these copies are alive during the forward."""
    weights = parts_of(dtype="float32")["weights"]
    assert parts_of(dtype="float32", trainer="dpo", autocast="none")["weights"] == 2 * weights
    assert parts_of(dtype="float32", trainer="dpo")["weights"] == 2 * weights + weights // 2
    assert parts_of(dtype="bfloat16", trainer="dpo")["weights"] == weights  # in 16 bits already


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("trainer", "dtype"), [(None, torch.float32), ("sft", torch.bfloat16)])
def test_trl_casts_the_adapters_of_a_quantised_base(trainer, dtype, bits):
    model = shallow_model(Question("llama", lora=4, trainer=trainer, **{f"load_in_{bits}bit": True}), CONFIG)
    trained = [parameter for parameter in model.base.parameters() if parameter.requires_grad]
    assert {parameter.dtype for parameter in trained} == {dtype}
    assert {tensor.element_bytes for tensor in model.tensors if tensor.trainable} == {dtype.itemsize}


@pytest.mark.long
def test_an_accelerator_multiplies_in_bytes_and_dequantises_for_the_backward():
    """No 16-bit weight in a forward in 8 bits, as on a CPU, but the 32-bit product, and both casts of it."""
    wide = tiny_model("llama", layers=2, hidden=256).config
    wide.architectures = ["LlamaForCausalLM"]
    asked = {"lora": 4, "lora_targets": ("q_proj",), "load_in_8bit": True, "kbit_preparation": False, "budget": "1GiB"}
    largest = 2 * wide.hidden_size * wide.intermediate_size
    peaks = {}
    for device in ("cpu", "a10"):
        forecaster = Forecaster(question({"model": "llama", "tokens": 1, "device": device, **asked}), config=wide)
        call = forecaster.estimator.costs_of(forecaster.training).calls[1]
        peaks[device] = call.costs[KEEP].forward.peak, call.costs[KEEP].backward.peak
    assert peaks["cpu"][0] > largest > peaks["a10"][0]
    assert min(backward for _, backward in peaks.values()) > 0.9 * largest
    found = hf_ckpt.predict(wide, tokens=16, device="a10", **asked)
    assert "8-bit products as in bitsandbytes' source" in found.assumed
    assert any("8-bit layers hold their inputs" in note for note in found.notes)


@pytest.mark.parametrize(("trainer", "shares"), [("sft", {0.5}), ("dpo", set())])
def test_dpo_turns_off_the_dropout_of_adapters(trainer, shares):
    model = shallow_model(Question("llama", lora=4, lora_dropout=0.5, trainer=trainer), CONFIG)
    dropouts = [module for module in model.base.modules() if isinstance(module, torch.nn.Dropout)]
    assert {module.p for module in dropouts if module.p} == shares


@pytest.mark.compat
def test_no_block_is_skipped_at_random():
    """Each block is measured in a single step, so all of them must run. Older transformers draw a number even then."""
    small = {"hidden_size": 32, "ffn_dim": 64, "num_attention_heads": 4, "vocab_size": 64, "word_embed_proj_dim": 32}
    config = transformers.OPTConfig(**small, num_hidden_layers=4, layerdrop=0.9, architectures=["OPTForCausalLM"])
    model = shallow_model(Question("opt"), config)
    shares = {module.layerdrop for module in model.base.modules() if hasattr(module, "layerdrop")}
    assert shares == {0.0}
    assert config.layerdrop == 0.9
    live = transformers.OPTForCausalLM(config)
    kept = []
    for source, fields in ((config, {"dtype": "float32", "attention": "sdpa"}), (live, {})):
        forecast = hf_ckpt.predict(source, tokens=16, device="cpu", budget="1GiB", **fields)
        ((_, kept_bytes),) = forecast.plan.prediction.stacks
        kept.append(kept_bytes)
    assert kept[0] == kept[1] > 4 * 16 * 32 * 4  # more than an input of each block
    assert live.model.decoder.layerdrop == live.config.layerdrop == 0.9


def test_flash_attention_takes_packed_rows_without_a_mask():
    """Others get a mask of tokens x tokens, one byte each."""
    asked = {"batch": 4, "packing": True, "tokens": 128, "device": "a10", "budget": "1GiB"}
    flash, plain = (
        hf_ckpt.predict(CONFIG, **asked, attention=attention).usual[0].peak_bytes
        for attention in ("flash_attention_2", "sdpa")
    )
    assert plain - flash >= (4 * 128) ** 2


@pytest.mark.parametrize(
    ("fields", "written"),
    [({"trainer": "sft", "autocast": "none"}, False), ({"trainer": "sft"}, True), ({"autocast": "none"}, None)],
)
def test_a_trainer_of_trl_is_told_not_to_autocast(fields, written):
    """Its configs turn `bf16` on by default."""
    found = hf_ckpt.predict(CONFIG, tokens=16, device="a10", budget="1GiB", **fields)
    assert yaml.safe_load(found.write["Training arguments (YAML)"]).get("bf16") is written


def test_compiled_blocks_are_mentioned_where_blocks_are_recomputed():
    """Not where nothing is to be gained, and not on a CPU, where they were not measured."""
    asked = {"model": "mini-llama", "batch": 4, "tokens": 256}
    for device, budget, said in (("a10", "320MiB", True), ("a10", "1GiB", False), ("cpu", "320MiB", False)):
        forecast = hf_ckpt.predict(**asked, device=device, budget=budget)
        assert any('"share": 0' in note for note in forecast.notes) is said


@pytest.mark.parametrize(
    ("config", "fields", "names"),
    [
        (CONFIG, {"batch": 4, "tokens": 128}, "plan with the head in chunks, smaller batch, shorter sequences"),
        (None, {"batch": 2, "tokens": 256}, "shorter sequences, 8-bit optimizer, LoRA, 8 ranks under FSDP2"),
        (None, {"tokens": 1024, "lora": 4, "load_in_4bit": True}, "without PEFT's preparation, shorter sequences"),
        (None, {"tokens": 64, "ranks": 2}, "more shared by ranks, LoRA"),
    ],
)
@pytest.mark.long
def test_what_lowers_the_peak_is_suggested(config, fields, names):
    """With a budget a little below the lowest peak, each change that helps has a row, which fits."""
    asked = {"model": "mini-llama", "device": "a10", **fields}
    floor = Forecaster(question(asked), config=config).lowest().floor_bytes
    rows = Forecaster(question({**asked, "budget": f"{floor - 2**12}B"}), config=config).answer().rows
    assert {row.name for row in rows} >= set(names.split(", "))
    assert all(row.fits for row in rows)


@pytest.mark.long
def test_libraries_are_quiet():
    """PEFT warns of names that it corrects itself, transformers of what is deprecated, bitsandbytes of kernels."""
    words = [sys.executable, "-W", "default", "-m", "hf_ckpt.cli.main", "plan", "gpt2", "--lora", "4", "--load-in-4bit"]
    done = subprocess.run([*words, "--device", "a10"], capture_output=True, text=True)
    assert done.returncode == 0
    loud = [line for line in done.stderr.splitlines() if "peft" in line or "transformers" in line.partition(": ")[0]]
    assert not loud
    assert "hf-ckpt: reading the model" in done.stderr
