"""Budgets hold in trainings of every kind, in one process and on two ranks, with bit-equal gradients and weights."""

import dataclasses
import functools
import random
import tempfile

import pytest
import torch
import transformers
from helpers.adapters import with_lora
from helpers.budgets import differing, missed, trained
from helpers.processes import each_rank, run_on_ranks
from helpers.quantised import in_8_bits
from helpers.ranks import Case
from helpers.steps import enable, without_cache
from helpers.unusual_models import MODELS, unusual_batch, unusual_model
from torch import nn

import hf_ckpt
from hf_ckpt.models.tiny import byte_tokenizer, tiny_batch, tiny_model

SHARES = (0.25, 0.5, 0.75)
"""Positions of budgets between the peak under `full` and the peak without checkpointing."""
LAYERS, HIDDEN, BATCH, TOKENS, STEPS = 8, 64, 4, 128, 24
FOLDER = tempfile.TemporaryDirectory(prefix="budgets-")


def small(family="llama", layers=LAYERS, hidden=HIDDEN, lora=False, **options):
    """A model of eight blocks whose activations are larger than its parameters."""
    model = tiny_model(family, layers=layers // 2 if family == "t5" else layers, hidden=hidden, attention="sdpa")
    return with_lora(model, family, **options) if lora else model


class Repeated(nn.ModuleList):
    """One block used eight times with the same weights, as in ALBERT."""

    def __getitem__(self, index):
        block = super().__getitem__
        return [block(0)] * LAYERS if isinstance(index, slice) else block(index)


def one_block_eight_times():
    model = small(layers=1)
    model.model.layers = Repeated(model.model.layers)
    return model


def frozen_below():
    """A LLaMA whose embeddings and first four blocks are not trained."""
    model = small()
    for part in (model.get_input_embeddings(), *model.model.layers[: LAYERS // 2]):
        part.requires_grad_(False)
    return model


def loop(
    model,
    family="llama",
    *,
    steps=STEPS,
    batch=BATCH,
    lengths=(TOKENS,),
    autocast=False,
    optimizer=torch.optim.AdamW,
    unfrozen_at=STEPS**2,
    batches=tiny_batch,
):
    """A training in a loop of its own, which may unfreeze the whole model at some step."""

    def make(spec):
        net = model()
        if spec is not None:
            hf_ckpt.install(net)
            enable(net, spec)

        def train(watch):
            torch.manual_seed(5)
            for number in range(steps):
                if number == unfrozen_at:
                    net.requires_grad_(True)
                if number in (0, unfrozen_at):
                    stepper = optimizer([p for p in net.parameters() if p.requires_grad], lr=1e-3)
                tokens = lengths[number % len(lengths)]
                watch.begin(f"{tokens} {number >= unfrozen_at}")
                data = batches(family, seed=number, batch=batch, tokens=tokens)
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    loss = net(**without_cache(net, data)).loss
                loss.backward()
                del loss, data
                stepper.step()
                stepper.zero_grad()

        return net, train

    return make


def trl(kind, columns, *, lora=True, **settings):
    """A training with one of TRL's trainers, whose losses need about as much memory as blocks of the usual size."""

    def make(spec):
        import datasets
        import peft
        import trl as library

        transformers.set_seed(3)
        model = tiny_model("llama", layers=LAYERS, hidden=2 * HIDDEN, attention="sdpa")
        if spec is not None:
            hf_ckpt.install(model)
        flags = {"gradient_checkpointing": spec is not None, "gradient_checkpointing_kwargs": spec}
        quiet = {"report_to": "none", "logging_strategy": "no", "save_strategy": "no", "disable_tqdm": True}
        sizes = {"max_steps": STEPS, "learning_rate": 1e-3, "use_cpu": True, "seed": 3, "bf16": False}
        adapters = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=0.05)
        trainer = getattr(library, f"{kind}Trainer")(
            model=model,
            args=getattr(library, f"{kind}Config")(output_dir=FOLDER.name, **quiet, **sizes, **flags, **settings),
            train_dataset=datasets.Dataset.from_dict(columns),
            processing_class=byte_tokenizer(),
            peft_config=adapters if lora else None,
        )
        original = trainer.training_step

        def train(watch):
            def training_step(*args, **kwargs):
                watch.begin()
                return original(*args, **kwargs)

            trainer.training_step = training_step
            trainer.train()

        return trainer.model, train

    return make


TEXTS = {"text": [f"row {row:3d} " * 16 for row in range(64)]}  # 128 tokens of one byte each
ANSWERS = [f"ans {row:3d} " * 12 for row in range(64)]
PAIRS = {"prompt": [f"say {row:3d}: " for row in range(64)], "chosen": ANSWERS, "rejected": ANSWERS[::-1]}
FOUR = {"per_device_train_batch_size": BATCH}
ABOVE = {"layers_to_transform": [2, 3], "layers_pattern": "block"}
ROWS = {
    "quick": loop(lambda: small(layers=4, lora=True, hidden=32), lengths=(64,), steps=24),
    "gpt2, lora": loop(lambda: small("gpt2", lora=True), "gpt2"),
    "bert, autocast, few tokens": loop(
        lambda: small("bert"), "bert", batch=1, lengths=(96,), autocast=True, optimizer=torch.optim.SGD
    ),
    "t5, lora on half": loop(lambda: small("t5", lora=True, **ABOVE), "t5"),
    "mixed lengths": loop(small, lengths=tuple(random.Random(0).sample(range(24, 193), 40)), steps=40),
    "one block eight times": loop(one_block_eight_times),
    "lora on 8 bits": loop(lambda: with_lora(in_8_bits(small()), "llama", targets="all-linear")),
    "then unfrozen": loop(frozen_below, steps=2 * STEPS, unfrozen_at=STEPS),
    "trl sft, smoothed": trl("SFT", TEXTS, label_smoothing_factor=0.1, **FOUR),
    "trl sft, four micro-steps": trl("SFT", TEXTS, lora=False, gradient_accumulation_steps=4, **FOUR),
    "trl dpo": trl("DPO", PAIRS, per_device_train_batch_size=2),
    **{name: loop(functools.partial(unusual_model, name), name, batches=unusual_batch) for name in MODELS},
}
"""Name -> training, as in `helpers.budgets`."""
RANK_ROWS = {
    "ddp, other lengths": Case("ddp", tokens=(96, 64), steps=24),
    "fsdp1": Case("fsdp1", tokens=(96,), steps=24),
    "fsdp2, bf16, three micro-steps": Case("fsdp2", half=True, accumulate=3, tokens=(96,), steps=8),
}


def cases(names):
    """CI runs the rows at one share, another marker at all shares."""
    for name in names:
        yield pytest.param(name, (0.5,), marks=pytest.mark.slow, id=name)
        yield pytest.param(name, SHARES, marks=[pytest.mark.thorough, pytest.mark.slow], id=f"{name}, all shares")


@pytest.mark.trap(14, 37)
@pytest.mark.parametrize(("name", "shares"), [pytest.param("quick", (0.5,), id="quick"), *cases([*ROWS][1:])])
def test_budgets_hold(name, shares):
    """Real peaks stay within the budget, predictions are not too high, and gradients and weights are bit-equal."""
    keep, full = (trained(ROWS[name], spec) for spec in (None, {"policy": "full"}))
    assert full.peak_bytes < keep.peak_bytes
    found = {}
    for share in shares:
        budget = round(full.peak_bytes + share * (keep.peak_bytes - full.peak_bytes))
        done = trained(ROWS[name], {"policy": "budget", "budget": budget})
        found[share] = [*missed(done.steps, budget, full.peak_bytes)]
        found[share] += differing(keep.tensors, done.tensors, done.recomputed)
    assert found == {share: [] for share in shares}


@pytest.mark.parametrize(("name", "shares"), [*cases(RANK_ROWS)])
def test_budgets_hold_on_ranks(name, shares, tmp_path):
    """Each rank has its own peaks; the budget is the same on all ranks."""
    named = {f"{name} at {share}": dataclasses.replace(RANK_ROWS[name], share=share) for share in shares}
    results = run_on_ranks(named, tmp_path)
    found = {case: [rank["missed"] for rank in each_rank(results, case)] for case in named}
    assert found == {case: [[], []] for case in named}
