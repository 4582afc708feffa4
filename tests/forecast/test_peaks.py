"""Predicted and counted peaks of a training step: one row for each kind of training, one column for each plan.

A peak is predicted from a config file, as `hf-ckpt plan` does, and counted in the second step of a real training with
the same plan. (In the first step, `selective` also checks that rebuilding is exact, which takes memory of its own.)
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

if __name__ == "__main__":  # one rank, see `counted_on_ranks`
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from helpers.processes import read_ranks, torchrun

import hf_ckpt
from hf_ckpt.costs.costs import timeline
from hf_ckpt.forecast.forecast import Forecaster
from hf_ckpt.forecast.question import question
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.spec.plan import Plan

TOO_HIGH, TOO_LOW = 0.01, 0.005
"""Largest relative errors of a predicted peak."""
STEPS = 2
PLANS = {
    "keep": [{"layers": "0-", "policy": "none"}],
    "selective": [{"layers": "0-", "policy": "selective"}],
    "full": [{"layers": "0-", "policy": "full"}],
    "full, then keep": [{"layers": "0-", "policy": "full"}, {"layers": "-1", "policy": "none"}],
    "keep, then full": [{"layers": "-1", "policy": "full"}],
}
"""Name of a plan -> the rules of its spec. The last two differ in the last block of every stack."""


# --- models and batches -----------------------------------------------------------------------------------------------

BATCH, TOKENS, VOCABULARY, IMAGE_TOKEN = 4, 256, 320, 300
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
TOWER = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "image_size": 128,
    "patch_size": 8,
}
IMAGE_TOKENS = (TOWER["image_size"] // TOWER["patch_size"]) ** 2
PACKED = ("input_ids", "labels", "position_ids")
EXPERTS = {**TEXT, "num_experts_per_tok": 2, "output_router_logits": True, "moe_intermediate_size": 64}


@dataclasses.dataclass(frozen=True)
class Training:
    """A row: a model's config and class, and the fields of the question about it."""

    model_type: str
    architecture: str
    config: Mapping[str, Any] = dataclasses.field(default_factory=lambda: TEXT)
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    marks: tuple[pytest.MarkDecorator, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights."""
        return getattr(torch, self.fields.get("dtype", "bfloat16"))

    @property
    def autocast(self) -> torch.dtype | None:
        """The type that autocast computes in; TRL's trainers and quantised bases have it by default."""
        by_default = {"trainer", "load_in_4bit"} & self.fields.keys()
        name = self.fields.get("autocast", "bfloat16" if by_default else None)
        return None if name in (None, "none") else getattr(torch, name)

    @property
    def micro_steps(self) -> int:
        """Micro-steps of a step."""
        return self.fields.get("accumulation", 1)

    @property
    def spec(self) -> dict[str, Any]:
        """The keys of a spec that are no actions. Checks of a block keep what they compare."""
        return {"check_every": 0, **{name: self.fields[name] for name in ("head", "mlp") if name in self.fields}}

    def made_config(self) -> transformers.PretrainedConfig:
        """The model's config."""
        return CONFIG_MAPPING[self.model_type](architectures=[self.architecture], **self.config)


def batch_of(training: Training) -> dict[str, torch.Tensor]:
    """A random batch as the fields of the question describe it; images and speech have the sizes of the config."""
    fields, kind = training.fields, training.model_type
    rows, tokens = fields.get("batch", BATCH) * (1 + (fields.get("trainer") == "dpo")), fields.get("tokens", TOKENS)
    ids = torch.randint(8, 280, (rows, tokens))
    labels = torch.randint(8, 280, (rows, fields.get("target_tokens", 8)))
    noise = functools.partial(torch.randn, rows, dtype=training.dtype)
    pixels = noise(3, TOWER["image_size"], TOWER["image_size"])
    if kind == "vit":
        return {"pixel_values": pixels, "labels": labels[:, 0] % 2}
    if kind == "whisper":
        return {"input_features": noise(80, 2 * TOKENS), "labels": labels}
    if kind == "wav2vec2":
        return {"input_values": noise(16000 * fields["seconds"]), "labels": labels}
    if fields.get("packing"):  # position ids mark where a sequence begins
        places = torch.arange(tokens).repeat(rows)
        return {name: value.reshape(1, -1) for name, value in zip(PACKED, (ids, ids.clone(), places), strict=True)}
    mask = torch.ones_like(ids)
    if fields.get("padded"):
        mask[torch.arange(tokens) >= tokens - 32 * torch.arange(rows)[:, None]] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels if kind == "t5" else ids.clone()}
    if kind == "llava":
        ids[:, 4 : 4 + IMAGE_TOKENS] = IMAGE_TOKEN
        batch["pixel_values"] = pixels
    return batch


LONG = (pytest.mark.long,)
WIDE = {**TEXT, "hidden_size": 256, "intermediate_size": 640, "head_dim": 64}
"""TRL's head takes 64 KiB a token for any vocabulary: blocks have to be wide to matter beside it."""


def llama(config: Mapping[str, Any] = TEXT, marks: tuple[pytest.MarkDecorator, ...] = LONG, **fields: Any) -> Training:
    """A LLaMA, trained as these fields of a question say."""
    return Training("llama", "LlamaForCausalLM", config, fields, marks=marks)


LORA = {"lora": 8, "lora_dropout": 0.05}
HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
T5 = {"vocab_size": VOCABULARY, "d_model": 64, "d_ff": 160, "d_kv": 16, "num_layers": 6, "num_decoder_layers": 5}
T5 |= {"num_heads": 4, "decoder_start_token_id": 0, "feed_forward_proj": "gated-gelu"}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 6, "n_head": 4, "n_positions": 512}
SPEECH = {"vocab_size": VOCABULARY, "d_model": 64, "encoder_layers": 6, "decoder_layers": 5, **HEADS}
SPEECH |= {"encoder_ffn_dim": 160, "decoder_ffn_dim": 160, "max_source_positions": TOKENS}
SPEECH |= {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1, "decoder_start_token_id": 2}
SPEECH |= {"suppress_tokens": None, "begin_suppress_tokens": None}
LLAVA = {
    "text_config": {**TEXT, "model_type": "llama"},
    "vision_config": {**TOWER, "model_type": "clip_vision_model", "projection_dim": 64},
    "image_token_index": IMAGE_TOKEN,
    "vision_feature_layer": -1,
}
AUTOCAST = {"dtype": "float32", "autocast": "bfloat16"}
ROWS = {
    "llama": llama(marks=()),
    "gpt2": Training("gpt2", "GPT2LMHeadModel", GPT2, {"dtype": "float32"}),
    "bert": Training("bert", "BertForMaskedLM", TEXT, {"dtype": "float32"}),
    "t5": Training("t5", "T5ForConditionalGeneration", T5, {"target_tokens": 96}),
    "lora": llama(marks=(), **LORA),
    "t5, lora": Training("t5", "T5ForConditionalGeneration", T5, {**LORA, "target_tokens": 96}, LONG),
    "4 bits": llama(load_in_4bit=True, **LORA),
    "autocast": llama(marks=(), **AUTOCAST),
    "bert, autocast": Training("bert", "BertForMaskedLM", TEXT, AUTOCAST, LONG),
    "accumulation": Training("gpt2", "GPT2LMHeadModel", GPT2, {"accumulation": 2}, LONG),
    "packed": llama(packing=True),
    "padded": llama(padded=True),
    "head in chunks": llama({**TEXT, "vocab_size": 4000}, marks=(), head=256),
    "feed-forward in chunks": llama(mlp=128),
    "dpo, adapters off": llama(WIDE, marks=(), lora=8, trainer="dpo", batch=1),
    "dpo, a model": llama(WIDE, trainer="dpo", batch=1),
    "grpo": llama(WIDE, trainer="grpo", batch=2),
    "experts": Training("mixtral", "MixtralForCausalLM", {**EXPERTS, "num_local_experts": 4}),
    "some experts": Training(
        "qwen3_moe", "Qwen3MoeForCausalLM", {**EXPERTS, "num_experts": 4, "mlp_only_layers": [0, 3]}, marks=LONG
    ),
    "two kinds of layers": Training("gemma2", "Gemma2ForCausalLM", {**TEXT, "sliding_window": 64}, marks=LONG),
    "images": Training("vit", "ViTForImageClassification", TOWER),
    "images in text": Training(
        "llava", "LlavaForConditionalGeneration", LLAVA, {"images": 1, "tokens": 2 * IMAGE_TOKENS}, LONG
    ),
    "spectra": Training("whisper", "WhisperForConditionalGeneration", SPEECH, {"target_tokens": 96}, LONG),
    "waves": Training("wav2vec2", "Wav2Vec2ForCTC", {**TEXT, "layerdrop": 0.0}, {"seconds": 1}, LONG),
    "fsdp2": llama(ranks=2, parallel="fsdp2", autocast="none"),
    "fsdp2, mixed precision": llama(ranks=2, parallel="fsdp2", **AUTOCAST),
}


# --- predicted --------------------------------------------------------------------------------------------------------


def fields_of(name: str, folder: Path) -> dict[str, Any]:
    """The question about a row, whose config file is written into `folder`."""
    path = folder / f"{name}.json"
    ROWS[name].made_config().to_json_file(path, use_diff=False)
    return {"model": str(path), "batch": BATCH, "tokens": TOKENS, "device": "cpu", **ROWS[name].fields}


@functools.cache
def forecaster_of(fields: tuple[tuple[str, Any], ...]) -> Forecaster:
    """Answers a question, and keeps what it measured."""
    return Forecaster(question(dict(fields)))


def predicted(fields: Mapping[str, Any], plan: Plan) -> int:
    """The peak of a training under a plan. Nothing else here uses what predicts."""
    forecaster = forecaster_of(tuple(fields.items()))
    question, actions = forecaster.asked, {block.name: action for block, action in plan.actions}
    costs = forecaster.costs_of(question, question.head, question.mlp)
    choice = tuple(actions[call.blocks[0].name] for call in costs.calls)
    return timeline(costs, choice).peak_bytes


# --- counted ----------------------------------------------------------------------------------------------------------


def real_model(training: Training, folder: Path) -> Any:
    """The model with weights, adapters and, if so asked, a quantised base, as a script makes it."""
    torch.manual_seed(0)
    fields, model_class = training.fields, getattr(transformers, training.architecture)
    config = training.made_config()
    attention = "sdpa" if model_class._supports_sdpa else "eager"
    model = model_class._from_config(config, dtype=training.dtype, attn_implementation=attention)
    if "load_in_4bit" in fields:
        model.save_pretrained(folder)
        four = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": training.dtype}
        bits = transformers.BitsAndBytesConfig(load_in_4bit=True, **four, bnb_4bit_use_double_quant=True)
        model = model_class.from_pretrained(folder, dtype=training.dtype, quantization_config=bits)
        peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    if "trainer" in fields:
        from trl.trainer.utils import add_fused_lm_head

        further = {"dpo": ("mean_logits", "is_top1"), "grpo": ()}
        add_fused_lm_head(model, outputs=("log_probs", "entropy", *further[fields["trainer"]]))
    if "lora" in fields:
        dropout = fields.get("lora_dropout", 0.0)
        adapters = peft.LoraConfig(r=fields["lora"], target_modules="all-linear", lora_dropout=dropout)
        model = peft.get_peft_model(model, adapters)
    return model.train()


def loss_of(training: Training, model: Any, reference: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss of a micro-step. Outputs are freed when this returns, as in a Trainer."""
    trainer = training.fields.get("trainer")
    with torch.autocast("cpu", training.autocast) if training.autocast else contextlib.nullcontext():
        if trainer is None:
            return model(**batch).loss
        batch = {**batch, "fused_lm_head": True}
        scores = model(**batch).log_probs
        if trainer == "grpo":
            ratio = torch.exp(scores - scores.detach())
            return -torch.min(ratio, ratio.clamp(0.8, 1.2)).mean()
        with torch.no_grad(), contextlib.nullcontext() if reference else model.disable_adapter():
            others = (reference or model)(**batch).log_probs.sum(1)
        preferred, rejected = (scores.sum(1) - others).chunk(2)
        return -torch.nn.functional.logsigmoid(preferred - rejected).mean()


def scales_of(model: Any) -> Iterator[torch.Tensor]:
    """What bitsandbytes keeps beside quantised weights."""
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if (state := getattr(weight, "quant_state", None)) is not None:
            yield from (state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code)
        elif getattr(weight, "SCB", None) is not None:
            yield weight.SCB


def count(training: Training, model: Any, reference: Any = None) -> int:
    """The peak of the last of a few real steps, in bytes of live tensors; checks that the plan was carried out."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, fused=True)
    batch = batch_of(training)
    if hasattr(model.config, "use_cache"):
        batch["use_cache"] = False
    others = {"scales": list(scales_of(model)), "reference": list(reference.parameters()) if reference else []}
    for _ in range(STEPS):
        with LiveBytes(model, optimizer, batch, others) as live:
            for _ in range(training.micro_steps):
                loss_of(training, model, reference, batch).backward()
            optimizer.step()
        optimizer.zero_grad()
    described = hf_ckpt.describe(model)
    times = {action.kind: set() for _, action in described.plan.actions}
    for block, action in described.plan.actions:
        times[action.kind].add(described.recomputed.get(block.name, 0))
    assert times.get("full", {STEPS * training.micro_steps}) == {STEPS * training.micro_steps}
    assert any(times.get("selective", {1}))
    assert not any(times.get("keep", ()))
    return live.peak_bytes


def with_plan(model: Any, training: Training, plan: str) -> Plan:
    """Give a model one of `PLANS`, and return it."""
    hf_ckpt.install(model, {"policy": "none", "rules": PLANS[plan], **training.spec})
    model.gradient_checkpointing_enable()
    return hf_ckpt.describe(model).plan


@functools.cache
def counted(name: str, folder: Path) -> dict[str, tuple[int, Plan]]:
    """Name of a plan -> the peak of a real step under it, and the plan."""
    training = ROWS[name]
    model = real_model(training, folder)
    if "ranks" in training.fields:
        ranks = [peaks[name] for peaks in counted_on_ranks(folder)]
        return {plan: (max(peaks[plan] for peaks in ranks), with_plan(model, training, plan)) for plan in PLANS}
    reference = None
    if training.fields.get("trainer") == "dpo" and "lora" not in training.fields:
        reference = real_model(dataclasses.replace(training, fields={"trainer": "dpo"}), folder).requires_grad_(False)
    peaks = {}
    for plan in PLANS:
        actions = with_plan(model, training, plan)
        peaks[plan] = count(training, model, reference), actions
    return peaks


@functools.cache
def counted_on_ranks(folder: Path) -> list[dict[str, dict[str, int]]]:
    """For each of two ranks under FSDP2, the peak of every row and plan. They share a launch, which takes long."""
    torchrun(__file__, folder)
    return read_ranks(folder)


def count_on_this_rank(folder: Path) -> None:
    """Write the peaks of this rank."""
    rows = {name: training for name, training in ROWS.items() if "ranks" in training.fields}
    peaks = {name: {} for name in rows}
    for (name, training), plan in itertools.product(rows.items(), PLANS):
        model, policy = real_model(training, folder), MixedPrecisionPolicy(param_dtype=training.autocast)
        with_plan(model, training, plan)
        for module in (*hf_ckpt.find_blocks(model).modules.values(), model):
            fully_shard(module, reshard_after_forward=True, mp_policy=policy)
        alone = dataclasses.replace(training, fields={**training.fields, "autocast": None})
        peaks[name][plan] = count(alone, model)
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(peaks))


# --- the table --------------------------------------------------------------------------------------------------------

CELLS = [
    pytest.param(name, plan, marks=training.marks, id=f"{name}-{plan}")
    for name, training in ROWS.items()
    for plan in PLANS
]
"""Every row under every plan."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """For configs, saved models and what ranks write."""
    return tmp_path_factory.mktemp("counted")


@pytest.mark.parametrize(("name", "plan"), CELLS)
def test_predicted_peaks_are_those_of_real_steps(name, plan, folder):
    peak, actions = counted(name, folder)[plan]
    error = predicted(fields_of(name, folder), actions) / peak - 1
    print(f"{name} | {plan} | {peak} | {error:+.2%}")
    assert -TOO_LOW <= error <= TOO_HIGH, f"{error:+.2%}"
    assert plan.startswith("keep") or peak < counted(name, folder)["keep"][0]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    count_on_this_rank(Path(sys.argv[1]))
    dist.barrier()
    dist.destroy_process_group()
