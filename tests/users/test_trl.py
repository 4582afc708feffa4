"""Unmodified trainers of TRL give the same logs, gradients and final weights."""

import importlib

import datasets
import pytest
import torch
import transformers
from helpers.clients import COMMON, MIXED, OF_TRAINER, PLANS, STEPS, TASKS, assert_trained_alike, trained
from helpers.failing import run_out
from helpers.sparing import sparing
from helpers.steps import assert_near, assert_same, input_gradient_hooks
from helpers.tables import table
from peft import LoraConfig, get_peft_model

import hf_ckpt
from hf_ckpt.attach.described import lost_blocks
from hf_ckpt.models.tiny import tiny_model

pytestmark = pytest.mark.usefixtures("quiet_and_alone")


def letters(completions, **_):
    """A reward for GRPO."""
    return [float(sum(map(ord, text)) % 7) for text in completions]


@pytest.fixture
def trl_run(base, tmp_path):
    """Train with one of TRL's trainers; with a spec, install hf_ckpt and pass the spec to the trainer."""

    def run(kind, spec=None, *, lora=False, wrapped=False, installed=None, mixins=(), **settings):
        name = kind.upper() if len(kind) < 5 else kind.title()
        library = importlib.import_module("trl.experimental.orpo" if kind == "orpo" else "trl")
        more = {"reward_funcs": letters} if kind in ("grpo", "rloo") else {}
        auto, head = transformers.AutoModelForCausalLM, {}
        if kind == "reward":
            auto, head = transformers.AutoModelForSequenceClassification, {"num_labels": 1}
        on = spec is not None or installed is not None
        flags = {"gradient_checkpointing": on, "gradient_checkpointing_kwargs": spec}
        adapters = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=0.1)

        def make(callback):
            model = auto.from_pretrained(base, **head)
            if wrapped:
                model = get_peft_model(model, adapters)
            if on:
                hf_ckpt.install(model, installed)
            if kind == "distillation":
                more["teacher_model"] = tiny_model("llama", seed=1)
            trainer = getattr(library, f"{name}Trainer")
            return type(trainer.__name__, (*mixins, trainer), {})(
                model=model,
                args=getattr(library, f"{name}Config")(
                    output_dir=str(tmp_path), **{**COMMON, **flags, **OF_TRAINER.get(kind, {}), **settings}
                ),
                train_dataset=datasets.Dataset.from_dict(TASKS[kind]),
                processing_class=transformers.AutoTokenizer.from_pretrained(base),
                peft_config=adapters if lora else None,
                callbacks=[callback],
                **more,
            )

        return trained(make)

    return run


@sparing(("kind", "lora"), [(kind, lora) for kind in ("sft", "dpo", "grpo") for lora in (False, True)], ("sft", True))
def test_trl_trains_the_same_under_every_plan(trl_run, kind, lora):
    """TRL trains the same under every plan, with generation in GRPO and with reference models in DPO."""
    reference = trl_run(kind, lora=lora)
    for plan, spec in PLANS.items():
        run = trl_run(kind, spec, lora=lora)
        assert_trained_alike(reference, run, plan)
        assert run.model.config.use_cache == reference.model.config.use_cache
        assert input_gradient_hooks(run.model) == 0  # TRL asks PEFT models for one


TRAININGS = table(__file__, "trl.yaml")
OPTIONS = TRAININGS["same"]


@sparing("options", OPTIONS, "packing", "label smoothing", "distillation")
def test_trl_trains_the_same_with(trl_run, options):
    kind, settings = OPTIONS[options]
    reference, run = trl_run(kind, **settings), trl_run(kind, MIXED, **settings)
    assert_trained_alike(reference, run, "mixed")


def test_trl_enables_an_installed_spec_by_default(trl_run):
    """TRL enables an installed spec by default: its configs set `gradient_checkpointing=True`."""
    reference, run = trl_run("sft"), trl_run("sft", installed=MIXED)
    assert_trained_alike(reference, run, "mixed")


# --- the guard --------------------------------------------------------------------------------------------------------


class RunsOut:
    """A mixin for a trainer: the backward of its fourth loss runs out of memory after some gradients."""

    losses = 0

    def compute_loss(self, model, *args, **kwargs):
        self.losses += 1
        if self.losses == 4:
            handle = model.get_input_embeddings().weight.register_hook(lambda _: run_out(handle.remove()))
        return super().compute_loss(model, *args, **kwargs)


GENERATING = TRAININGS["generating"]


def all_tensors(run):
    """Tensors of all steps in one dict: those of a single step may all be 0, if its completions are equally good."""
    return {(place, name): one[name] for place, one in enumerate(run.tensors) for name in one}


@sparing("kind", GENERATING, "grpo")
def test_a_step_that_runs_again_trains_on_the_same_completions(trl_run, kind):
    """TRL counts micro-steps, and each takes its own part of the completions."""
    settings = {**GENERATING[kind], "gradient_accumulation_steps": 2, "max_steps": 3}
    runs = [trl_run(kind, mixins=mixins, **settings) for mixins in ((), (hf_ckpt.OomGuardMixin, RunsOut))]
    assert_same(*map(all_tensors, runs))
    assert sum(hf_ckpt.describe(runs[1].model).recomputed.values()) > 0


class NeedsFull:
    """A mixin for a trainer: its losses run out of memory unless all blocks recompute."""

    def compute_loss(self, model, *args, **kwargs):
        assert self.oom_guard.attempts < 3, "the same change is made again and again"
        if not is_full(model):
            run_out()
        return super().compute_loss(model, *args, **kwargs)


def is_full(model):
    return lost_blocks(model) == () and {str(one) for _, one in hf_ckpt.describe(model).plan.actions} == {"full"}


@sparing("kind", GENERATING, "grpo")
def test_the_plan_of_the_guard_stays_although_trl_enables_the_model_after_each_generation(trl_run, kind):
    """With the options that the user's plan came from."""
    settings = {**GENERATING[kind], "max_steps": 3}
    reference = trl_run(kind, **settings)
    run = trl_run(kind, {"policy": "selective"}, mixins=(hf_ckpt.OomGuardMixin, NeedsFull), **settings)
    assert_same(all_tensors(reference), all_tensors(run))
    done = hf_ckpt.describe(run.model)
    assert is_full(run.model)
    # GRPO does not generate for each step; the first one is the only one that failed.
    assert set(done.recomputed.values()) == set(done.forwards.values()) == {3}


def test_memory_that_runs_out_in_generation_is_no_reason_for_another_plan(trl_run, caplog):
    class Generates:
        def _prepare_inputs(self, inputs):
            assert self.oom_guard.attempts == 0
            self.model.get_input_embeddings().register_forward_pre_hook(run_out)
            return super()._prepare_inputs(inputs)

    with pytest.raises(torch.OutOfMemoryError, match="GiB"):
        trl_run("grpo", {"policy": "selective"}, mixins=(hf_ckpt.OomGuardMixin, Generates), **GENERATING["grpo"])
    assert "out of memory in the generation of model.embed_tokens" in caplog.text
    assert "retrying the step" not in caplog.text


# --- the head in chunks ---------------------------------------------------------------------------------------------


@sparing("kind", ["sft", "dpo", "grpo"], "sft")
def test_a_warning_says_that_trl_never_calls_the_head(trl_run, kind):
    """TRL's losses use the head's weight in their own tiles, so the head is never called; a warning says so."""
    reference, run = trl_run(kind), trl_run(kind, {"policy": "full", "head": 4})
    assert_trained_alike(reference, run, "full", "not run in chunks, because it is never called")
    assert "head, last call: none, because it is never called; 0 calls" in str(hf_ckpt.describe(run.model))


@pytest.mark.parametrize(("kind", "options"), [("sft", {"label_smoothing_factor": 0.1}), ("orpo", {})])
def test_losses_of_trl_that_read_logits_go_through_the_head_in_chunks(trl_run, kind, options):
    """Nothing that they read, metrics included, needs logits as a whole. Adam amplifies the rounding of chunks."""
    settings = {**options, "bf16": False}
    reference, run = trl_run(kind, **settings), trl_run(kind, {"policy": "full", "head": 8}, **settings)
    assert hf_ckpt.describe(run.model).chunked_heads == STEPS
    assert [text for text in run.messages if "hf_ckpt" in text] == []
    assert_near(reference.tensors[0], run.tensors[0], 1e-5)
    for wanted, got in zip(reference.logs, run.logs, strict=True):
        assert got == {key: pytest.approx(value, rel=1e-4, abs=1e-5) for key, value in wanted.items()}
