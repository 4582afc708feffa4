"""Predicted and counted peaks of a training step: one row for each kind of training, one column for each plan.

A peak is predicted from a config file, as `hf-ckpt plan` does, and counted in the second step of a real training with
the same plan. (In the first step, `selective` also checks that rebuilding is exact, which takes memory of its own.)
"""

import contextlib
import dataclasses
import functools
import gc
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
NOT_PLANNED = {("zero3", "selective")}
"""A way and a plan that is refused there."""
PAIRS = [(name, plan) for name, row in ROWS.items() for plan in PLANS if (row["parallel"], plan) not in NOT_PLANNED]
IMAGE_SIZE, IMAGE_TOKEN, IMAGE_TOKENS = 128, 300, 256


# --- predicted --------------------------------------------------------------------------------------------------------


@functools.cache
def costs_of(name: str, folder: Path) -> Costs:
    """What a row's training costs under every plan, from a config file, which is written into `folder`."""
    path = folder / f"{name}.json"
    ROWS[name].made_config().to_json_file(path, use_diff=False)
    asked = {"model": str(path), "batch": 4, "tokens": 256, "device": "cpu", **ROWS[name].fields}
    forecaster = Forecaster(question(asked))
    return forecaster.estimator.costs_of(forecaster.training)


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
    """The peak of the second real step, in bytes of live tensors; checks that the plan was carried out.

    With several ranks, the lowest of some steps: on a busy machine, threads of gloo let go of tensors later.
    """
    steps = 1 if training["ranks"] is None else 4
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
    peaks = []
    for _ in range(steps):
        with LiveBytes(model, optimizer, batch, others) as live:
            run()
        optimizer.zero_grad()
        peaks.append(live.peak_bytes)
    described = hf_ckpt.describe(model)
    times = {"full": (1 + steps) * training["accumulation"], "keep": 0}
    following = [action for _, action in described.plan.actions[1:]]
    for (block, action), after in zip(described.plan.actions, [*following, KEEP], strict=True):
        recomputed = described.recomputed.get(block.name, 0)
        if action.kind in times:  # once more if it makes the input of the next block
            assert recomputed == times[action.kind] * (1 + after.made)
    assert any(described.recomputed.values()) == bool(described.plan.active())
    return min(peaks)


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
        return max(peaks[name][plan] for peaks in counted_on_ranks(folder, program_of(ROWS[name]))), planned
    return count(ROWS[name], model, reference), planned


def program_of(training: Training) -> str:
    """What shares a row's training between ranks: `fsdp` or `zero`; empty on one rank."""
    return (training["parallel"] or "").rstrip("123")


@functools.cache
def counted_on_ranks(folder: Path, program: str) -> list[dict[str, dict[str, int]]]:
    """For each of two ranks the peak of every row and plan of a program. They share a launch, which takes long."""
    extra = {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(Path(sys.prefix, "torch_extensions"))}
    return torchrun(__file__, folder, program, extra=extra)


SMALL = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_max_live_parameters", "stage3_max_reuse_distance")
"""Sizes of DeepSpeed's that forecasts leave out."""


def count_with_deepspeed(training: Training, model: Any) -> int:
    """The peak of the second step in DeepSpeed's engine, in bytes of all live tensors."""
    import deepspeed

    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, fused=True)
    sizes = {**dict.fromkeys(SMALL, 1), "stage3_param_persistence_threshold": 0}
    config = {"train_micro_batch_size_per_gpu": training["batch"], "zero_allow_untested_optimizer": True}
    config |= {"gradient_accumulation_steps": training["accumulation"], "zero_force_ds_cpu_optimizer": False}
    config |= {"bf16": {"enabled": True}, "zero_optimization": {"stage": int(training["parallel"][-1]), **sizes}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    batch = batch_of(training)
    if hasattr(model.config, "use_cache"):
        batch["use_cache"] = False

    def run() -> None:
        for _ in range(training["accumulation"]):
            engine.backward(loss_of(training, engine, None, batch))
            engine.step()

    run()
    # DeepSpeed holds flat tensors where neither the model nor its optimizer knows them.
    with LiveBytes({"all": all_tensors()}, device="cpu") as live:
        run()
    return live.peak_bytes


def all_tensors() -> list[torch.Tensor]:
    """All tensors that Python knows."""
    gc.collect()
    return [held for held in gc.get_objects() if isinstance(held, torch.Tensor)]


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


def count_on_this_rank(program: str, folder: Path) -> None:
    """Write the peaks of this rank."""
    rows = {name: training for name, training in ROWS.items() if program_of(training) == program}
    peaks = {name: {} for name in rows}
    for name, plan in ((name, plan) for name, plan in PAIRS if name in rows):
        training = rows[name]
        before = LiveBytes({"earlier rows": all_tensors()}, device="cpu").start_bytes if program == "zero" else 0
        model = real_model(training, folder)
        with_plan(model, training, plan)
        alone = dataclasses.replace(training, fields={**training.fields, "autocast": "none"})
        if program == "zero":  # whose engines stay alive
            peaks[name][plan] = count_with_deepspeed(alone, model) - before
        else:
            peaks[name][plan] = count(alone, sharded(model, training))
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(peaks))


def marks_of(training: Training) -> list[pytest.MarkDecorator]:
    """The marks of a row's tests."""
    if program_of(training) == "zero":
        return [pytest.mark.deepspeed]
    return [] if training.quick else [pytest.mark.long]


# --- the table --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """For configs, saved models and what ranks write."""
    return tmp_path_factory.mktemp("counted")


@pytest.mark.parametrize(("name", "plan"), [pytest.param(*pair, marks=marks_of(ROWS[pair[0]])) for pair in PAIRS])
def test_predicted_peaks_are_those_of_real_steps(name, plan, folder):
    peak, planned = counted(name, plan, folder)
    predicted = costs_of(name, folder).peak({block.name: action for block, action in planned.actions})
    error = predicted / peak - 1
    print(f"{name} | {plan} | {peak} | {error:+.2%}")
    assert -TOO_LOW <= error <= TOO_HIGH, f"{error:+.2%}"
    without = counted(name, "keep", folder)[0]
    # With few tokens, the peak is in the optimizer's step. DeepSpeed frees single numbers now or later.
    slack = 1024 if "few tokens" in name else 0
    assert plan.startswith("keep") or peak < without + slack


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
    held = forecaster.estimator.costs_of(forecaster.training)
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
    if sys.argv[1] == "zero":
        import deepspeed

        deepspeed.init_distributed("gloo")
    else:
        dist.init_process_group("gloo")
    torch.set_num_threads(1)
    count_on_this_rank(sys.argv[1], Path(sys.argv[2]))
    dist.barrier()
    dist.destroy_process_group()
