"""Predicted and counted peaks of a training step: one row for each kind of training, one column for each plan.

A peak is predicted from a config file, as `hf-ckpt plan` does, and counted in the second step of a real training with
the same plan. (In the first step, `selective` also checks that rebuilding is exact, which takes memory of its own.)
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

if __name__ == "__main__":  # one rank, see `counted_on_ranks`
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from helpers.processes import torchrun
from helpers.quantised import scales_of
from helpers.tables import table

import hf_ckpt
from hf_ckpt.costs.costs import Costs, step_nanoseconds, timeline, with_segments
from hf_ckpt.forecast.forecast import Forecaster
from hf_ckpt.forecast.question import question
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.spec.actions import KEEP
from hf_ckpt.spec.plan import Plan

TOO_HIGH, TOO_LOW = 0.01, 0.005
"""Largest relative errors of a predicted peak."""
TABLES = table(__file__, "trainings.yaml")
PLANS = TABLES["plans"]
"""Name of a plan -> the rules of its spec. The last two differ in the last block of every stack."""

# --- the rows ---------------------------------------------------------------------------------------------------------

USUAL = TABLES["usual"]
"""Fields of a training that does not say them."""


@dataclasses.dataclass(frozen=True)
class Training:
    """A row: a model's class and config, and the fields of the question about it."""

    model: str
    config: Mapping[str, Any]
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    quick: bool = False
    """Whether it runs by default."""

    def __getitem__(self, name: str) -> Any:
        """A field; None if neither the row nor `USUAL` says it."""
        return self.fields.get(name, USUAL.get(name))

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights."""
        return getattr(torch, self["dtype"])

    @property
    def autocast(self) -> torch.dtype | None:
        """The type that autocast computes in; TRL's trainers and quantised bases have it by default."""
        by_default = {"trainer", "load_in_4bit", "load_in_8bit"} & self.fields.keys()
        name = self["autocast"] or ("bfloat16" if by_default else "none")
        return None if name == "none" else getattr(torch, name)

    def made_config(self) -> transformers.PretrainedConfig:
        """The model's config."""
        return getattr(transformers, self.model).config_class(architectures=[self.model], **self.config)


ROWS = {name: Training(**row) for name, row in TABLES["rows"].items()}
IMAGE_SIZE, IMAGE_TOKEN, IMAGE_TOKENS = 128, 300, 256


# --- predicted --------------------------------------------------------------------------------------------------------


@functools.cache
def costs_of(name: str, folder: Path) -> Costs:
    """What a row's training costs under every plan, from a config file, which is written into `folder`."""
    path = folder / f"{name}.json"
    ROWS[name].made_config().to_json_file(path, use_diff=False)
    asked = {"model": str(path), "batch": 4, "tokens": 256, "device": "cpu", **ROWS[name].fields}
    forecaster = Forecaster(question(asked))
    return forecaster.costs_of(forecaster.training)


# --- counted ----------------------------------------------------------------------------------------------------------


def batch_of(training: Training) -> dict[str, torch.Tensor]:
    """A random batch as the fields of the question describe it; images have the size of the config."""
    model, tokens, rows = training.model, training["tokens"], training["batch"]
    rows *= 2 if training["trainer"] == "dpo" else 1
    ids = torch.randint(8, 280, (rows, tokens))
    labels = torch.randint(8, 280, (rows, training["target_tokens"]))
    noise = functools.partial(torch.randn, rows, dtype=training.dtype)
    pixels = noise(3, IMAGE_SIZE, IMAGE_SIZE)
    if model.startswith("ViT"):
        return {"pixel_values": pixels, "labels": labels[:, 0] % 2}
    if training["packing"]:  # position ids mark where a sequence begins
        places = torch.arange(tokens).repeat(rows)
        batch = {"input_ids": ids, "labels": ids.clone(), "position_ids": places}
        return {name: value.reshape(1, -1) for name, value in batch.items()}
    mask = torch.ones_like(ids)
    if training["padded"]:
        mask[torch.arange(tokens) >= tokens - 32 * torch.arange(rows)[:, None]] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels if model.startswith("T5") else ids.clone()}
    if model.startswith("Llava"):
        ids[:, 4 : 4 + IMAGE_TOKENS] = IMAGE_TOKEN
        batch["pixel_values"] = pixels
    return batch


def real_model(training: Training, folder: Path) -> Any:
    """The model with weights, adapters and, if so asked, a quantised base, as a script makes it."""
    torch.manual_seed(0)
    model_class = getattr(transformers, training.model)
    attention = "sdpa" if model_class._supports_sdpa else "eager"
    model = model_class._from_config(training.made_config(), dtype=training.dtype, attn_implementation=attention)
    if training["load_in_4bit"] or training["load_in_8bit"]:
        model.save_pretrained(folder)
        four = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": training.dtype}
        four |= {"load_in_4bit": True, "bnb_4bit_use_double_quant": bool(training["double_quant"])}
        bits = transformers.BitsAndBytesConfig(**{"load_in_8bit": True} if training["load_in_8bit"] else four)
        model = model_class.from_pretrained(folder, dtype=training.dtype, quantization_config=bits)
        if training["kbit_preparation"] is not False:
            peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    if training["trainer"] is not None:
        from trl.trainer.utils import add_fused_lm_head

        further = {"dpo": ("mean_logits", "is_top1"), "grpo": ()}
        add_fused_lm_head(model, outputs=("log_probs", "entropy", *further[training["trainer"]]))
    if training["lora"] is not None:
        dropout = training["lora_dropout"]
        adapters = peft.LoraConfig(r=training["lora"], target_modules="all-linear", lora_dropout=dropout)
        model = peft.get_peft_model(model, adapters)
    return model.train()


def loss_of(training: Training, model: Any, reference: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss of a micro-step. Outputs are freed when this returns, as in a Trainer."""
    with torch.autocast("cpu", training.autocast) if training.autocast else contextlib.nullcontext():
        if training["trainer"] is None:
            return model(**batch).loss
        batch = {**batch, "fused_lm_head": True}
        scores = model(**batch).log_probs
        if training["trainer"] == "grpo":
            ratio = torch.exp(scores - scores.detach())
            return -torch.min(ratio, ratio.clamp(0.8, 1.2)).mean()
        with torch.no_grad(), contextlib.nullcontext() if reference else model.disable_adapter():
            others = (reference or model)(**batch).log_probs.sum(1)
        preferred, rejected = (scores.sum(1) - others).chunk(2)
        return -torch.nn.functional.logsigmoid(preferred - rejected).mean()


def count(training: Training, model: Any, reference: Any = None) -> int:
    """The peak of the second real step, in bytes of live tensors; checks that the plan was carried out."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, fused=True)
    batch = batch_of(training)
    if hasattr(model.config, "use_cache"):
        batch["use_cache"] = False
    others = {"scales": scales_of(model), "reference": list(reference.parameters()) if reference else []}

    def run() -> None:
        for _ in range(training["accumulation"]):
            loss_of(training, model, reference, batch).backward()
        optimizer.step()

    run()
    optimizer.zero_grad()
    with LiveBytes(model, optimizer, batch, others) as live:
        run()
    optimizer.zero_grad()
    described = hf_ckpt.describe(model)
    times = {"full": 2 * training["accumulation"], "keep": 0}
    following = [action for _, action in described.plan.actions[1:]]
    for (block, action), after in zip(described.plan.actions, [*following, KEEP], strict=True):
        recomputed = described.recomputed.get(block.name, 0)
        if action.kind in times:  # once more if it makes the input of the next block
            assert recomputed == times[action.kind] * (1 + after.made)
    assert any(described.recomputed.values()) == bool(described.plan.active())
    return live.peak_bytes


def with_plan(model: Any, training: Training, plan: str) -> Plan:
    """Give a model one of `PLANS`, and return it. Checks of a block are off: they keep what they compare."""
    parts = {"head": training["head"]} if "head" in training.fields else {}
    if "mlp" in training.fields and "full" in plan:  # tiles go with `full`
        parts["mlp"] = training["mlp"]
    hf_ckpt.install(model, {"policy": "none", "rules": PLANS[plan], "check_every": 0, **parts})
    model.gradient_checkpointing_enable()
    return hf_ckpt.describe(model).plan


@functools.cache
def models_of(name: str, folder: Path) -> tuple[Any, Any]:
    """The model of a row, and the reference of DPO if that is a model of its own."""
    training = ROWS[name]
    has_reference = training["trainer"] == "dpo" and training["lora"] is None
    reference = real_model(training, folder).requires_grad_(False) if has_reference else None
    return real_model(training, folder), reference


@functools.cache
def counted(name: str, plan: str, folder: Path) -> tuple[int, Plan]:
    """The peak of a real step under a plan, and the plan."""
    model, reference = models_of(name, folder)
    planned = with_plan(model, ROWS[name], plan)
    if ROWS[name]["ranks"] is not None:
        return max(peaks[name][plan] for peaks in counted_on_ranks(folder)), planned
    return count(ROWS[name], model, reference), planned


@functools.cache
def counted_on_ranks(folder: Path) -> list[dict[str, dict[str, int]]]:
    """For each of two ranks the peak of every row and plan. They share a launch, which takes long."""
    return torchrun(__file__, folder)


def sharded(model: Any, training: Training) -> Any:
    """The model as ranks share it, block by block, as accelerate wraps it."""
    blocks = hf_ckpt.find_blocks(model).modules.values()
    if training["parallel"] == "fsdp2":
        policy = MixedPrecisionPolicy(param_dtype=training.autocast)
        for module in (*blocks, model):
            fully_shard(module, reshard_after_forward=True, mp_policy=policy)
        return model
    wrap = ModuleWrapPolicy({type(block) for block in blocks})
    policy = MixedPrecision(param_dtype=training.autocast)
    options = {"use_orig_params": True, "device_id": torch.device("cpu"), "backward_prefetch": None}
    return FullyShardedDataParallel(model, auto_wrap_policy=wrap, mixed_precision=policy, **options)


def count_on_this_rank(folder: Path) -> None:
    """Write the peaks of this rank."""
    rows = {name: training for name, training in ROWS.items() if training["ranks"] is not None}
    peaks = {name: {} for name in rows}
    for (name, training), plan in itertools.product(rows.items(), PLANS):
        model = real_model(training, folder)
        with_plan(model, training, plan)
        model = sharded(model, training)
        alone = dataclasses.replace(training, fields={**training.fields, "autocast": "none"})
        peaks[name][plan] = count(alone, model)
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(peaks))


# --- the table --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """For configs, saved models and what ranks write."""
    return tmp_path_factory.mktemp("counted")


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if row.quick else pytest.mark.long) for name, row in ROWS.items()]
)
def test_predicted_peaks_are_those_of_real_steps(name, plan, folder):
    peak, planned = counted(name, plan, folder)
    predicted = costs_of(name, folder).peak({block.name: action for block, action in planned.actions})
    error = predicted / peak - 1
    print(f"{name} | {plan} | {peak} | {error:+.2%}")
    assert -TOO_LOW <= error <= TOO_HIGH, f"{error:+.2%}"
    assert plan.startswith("keep") or peak < counted(name, "keep", folder)[0]


IN_SEGMENTS = ["llama", "autocast", "gpt2", "bert", "t5", "lora"]
"""Rows that are deep enough for segments, once they have `DEEP` blocks."""
DEEP = 12


@pytest.mark.parametrize("policy", ["full", "full+selective"])
@pytest.mark.parametrize("segments", ["sqrt", 2])
@pytest.mark.parametrize(
    "name", [IN_SEGMENTS[0], *(pytest.param(name, marks=pytest.mark.long) for name in IN_SEGMENTS[1:])]
)
def test_peaks_of_plans_in_segments_are_those_of_real_steps(name, segments, policy, folder):
    """`count` compares how often blocks run, which decides the predicted time."""
    fields = {field for field in ROWS[name].made_config().to_dict() if field in ("n_layer", "num_decoder_layers")}
    depth = dict.fromkeys(fields or {"num_hidden_layers"}, DEEP) | ({"num_layers": DEEP} if name == "t5" else {})
    row = dataclasses.replace(ROWS[name], config={**ROWS[name].config, **depth})
    path = folder / f"{name} in segments.json"
    row.made_config().to_json_file(path, use_diff=False)
    forecaster = Forecaster(question({"model": str(path), "batch": 4, "tokens": 256, "device": "cpu", **row.fields}))
    held = forecaster.costs_of(forecaster.training)
    model = real_model(row, folder)
    hf_ckpt.install(model, {"policy": policy, "segments": segments, "check_every": 0})
    model.gradient_checkpointing_enable()
    actions = dict(hf_ckpt.describe(model).plan.actions)
    costs = with_segments(held, actions)
    choice = tuple(actions[call.block] for call in costs.calls)
    error = timeline(costs, choice).peak_bytes / count(row, model) - 1
    print(f"{name} | {policy} in {segments} segments | {error:+.2%}")
    assert -TOO_LOW <= error <= TOO_HIGH, f"{error:+.2%}"
    plain = tuple(dataclasses.replace(action, made=False) for action in choice)
    made = [place for place, action in enumerate(choice) if action.made]
    assert len(made) > DEEP / 2
    more = sum(held.calls[place - 1].costs[plain[place - 1]].forward.nanoseconds for place in made)
    assert step_nanoseconds(costs, choice) == step_nanoseconds(held, plain) + more


@pytest.mark.parametrize(
    ("name", "helps"),
    [("llama", True), ("head in chunks", False), pytest.param("dpo, adapters off", False, marks=pytest.mark.long)],
)
def test_the_head_in_chunks_is_advised_where_the_loss_calls_the_whole_head(name, helps, folder):
    """The trainers of TRL use its weight."""
    assert costs_of(name, folder).chunks_help == helps


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    count_on_this_rank(Path(sys.argv[1]))
    dist.barrier()
    dist.destroy_process_group()
