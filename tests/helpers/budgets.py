"""Trainings under `policy: budget`: the rows of one table, and what their steps needed.

    keep, full = references(ROWS["quick"])         # the same training without hf_ckpt, and under `full`
    misses(ROWS["quick"], keep, full, share=0.5)   # [] if everything holds under a budget half-way between their peaks

A row makes a `Training` with a spec; None enables nothing. One `LiveBytes` counts all live tensors meanwhile. The
plans are read from hf_ckpt's record on the model, so that this does not depend on how they are made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn

import hf_ckpt
from helpers.adapters import add_inside
from helpers.others import other_model
from helpers.steps import enable, without_cache
from helpers.unusual_models import MODELS, unusual_batch, unusual_model
from hf_ckpt.attach.record import installation
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.models.tiny import byte_tokenizer, tiny_batch, tiny_model

SHARES = (0.25, 0.5, 0.75)
"""Positions of budgets between the peak under `full` and the peak without checkpointing."""
MOST, MOST_FIRST, MOST_PREDICTED = 1.06, 1.08, 1.08
"""Largest ratios: real peak to budget from the second planned step on, in the first planned step, and predicted to real
peak. Plans depend on measured times, which vary on a busy machine."""
LAYERS, HIDDEN, BATCH, TOKENS, STEPS = 8, 64, 4, 128, 18


@dataclasses.dataclass
class Step:
    """One micro-step, with the optimizer's step after it, if there is one."""

    shape: str
    """The batch's shape if steps differ in it."""
    phase: int
    """How often the model had changed before."""
    peak_bytes: int = 0
    predicted_bytes: int | None = None
    """Predicted peak of its plan; None while the session measures, and without a plan."""
    keeps_all: bool = False


class Watch:
    """Records what happens in each micro-step; the training reports where micro-steps begin and end."""

    def __init__(self, model: nn.Module, live: LiveBytes) -> None:
        self.model, self.live = model, live
        self.steps: list[Step] = []
        self.phase = self.recomputed = 0
        self._step: Step | None = None

    @contextlib.contextmanager
    def step(self, shape: str = "") -> Iterator[None]:
        """A micro-step, which counts if no error ends it."""
        self.begin(shape)
        yield
        self.end()

    def begin(self, shape: str = "") -> None:
        self.end()
        self._step = Step(shape, self.phase)
        self.live.peak_bytes = self.live.current_bytes

    def end(self) -> None:
        """End the micro-step, including the optimizer's step; a second call does nothing."""
        step, self._step = self._step, None
        if step is None:
            return
        step.peak_bytes = self.live.peak_bytes
        record = installation(self.model)
        if record is not None:
            if record.planned is not None and not record.planned.measures:
                step.predicted_bytes = record.planned.plan.prediction.peak_bytes
                step.keeps_all = not record.planned.plan.active()
            self.recomputed = max(self.recomputed, sum(hf_ckpt.describe(self.model).recomputed.values()))
        self.steps.append(step)


@dataclasses.dataclass
class Training:
    """A model and its training."""

    model: nn.Module
    """The model; its parameters are compared at the end."""
    train: Callable[[Watch], None]


Row = Callable[[dict | None], Training]


@dataclasses.dataclass
class Trained:
    """The results of a training."""

    steps: list[Step]
    recomputed: int
    tensors: dict[str, torch.Tensor]
    """Final parameters, and gradients as `NAME.grad`."""

    @property
    def peak_bytes(self) -> int:
        return max(step.peak_bytes for step in self.steps)


def trained(row: Row, spec: dict | None) -> Trained:
    """Train under a spec, or without hf_ckpt for None."""
    gc.collect()
    training = row(spec)
    with LiveBytes(training.model) as live:
        watch = Watch(training.model, live)
        training.train(watch)
        watch.end()
    tensors = {}
    for name, parameter in training.model.named_parameters():
        tensors[name] = parameter.detach().clone()
        if parameter.grad is not None:
            tensors[f"{name}.grad"] = parameter.grad.clone()
    hf_ckpt.uninstall(training.model)
    return Trained(watch.steps, watch.recomputed, tensors)


def references(row: Row) -> tuple[Trained, int]:
    """The training without hf_ckpt, and its peak under `full`, which must be lower."""
    keep, full = trained(row, None), trained(row, {"policy": "full"})
    assert full.peak_bytes < keep.peak_bytes
    return keep, full.peak_bytes


def misses(row: Row, keep: Trained, full_bytes: int, share: float) -> list[str]:
    """Failed expectations of a training under a budget at this position between the two peaks."""
    budget = round(full_bytes + share * (keep.peak_bytes - full_bytes))
    done = trained(row, {"policy": "budget", "budget": budget})
    return [*missed(done.steps, budget, full_bytes), *differing(keep.tensors, done.tensors, done.recomputed)]


def missed(steps: list[Step], budget: int, full_bytes: int) -> list[str]:
    """Failed expectations of peaks, in words."""
    groups = []
    for _, phase in itertools.groupby(steps, key=lambda step: step.phase):
        same = itertools.groupby(sorted(phase, key=lambda step: step.shape), key=lambda step: step.shape)
        groups += [list(itertools.dropwhile(lambda step: step.predicted_bytes is None, group)) for _, group in same]
    planned = {id(step) for group in groups for step in group}
    measuring = [step for step in steps if id(step) not in planned]
    ratios = {
        "measuring": (MOST, [step.peak_bytes / max(budget, full_bytes) for step in measuring]),
        "first planned": (MOST_FIRST, [group[0].peak_bytes / budget for group in groups if group]),
        "planned": (MOST, [step.peak_bytes / budget for group in groups for step in group[1:]]),
    }
    last = next((group for group in reversed(groups) if group), None)
    if last is None:
        return ["no plan was made"]
    if len({step.shape for step in steps}) == 1 and not last[-1].keeps_all:  # if all fits, it may be high
        real = max(step.peak_bytes for step in (last[1:] or last))
        ratios["predicted"] = MOST_PREDICTED, [(last[-1].predicted_bytes or 0) / real]
    return [f"{name} {max(found):.3f}" for name, (most, found) in ratios.items() if found and max(found) > most]


def differing(expected: dict, found: dict, recomputed: int) -> list[str]:
    """Tensors that are not bit-equal, and whether nothing was recomputed."""
    same = {name for name in expected.keys() & found.keys() if torch.equal(expected[name], found[name])}
    names = sorted(expected.keys() | found.keys() - same)
    return [f"{name} differs" for name in names if name not in same] + ["nothing was recomputed"] * (not recomputed)


# --- loops ------------------------------------------------------------------------------------------------------------


def loop(
    model: Callable[[], nn.Module],
    family: str = "llama",
    *,
    steps: int = STEPS,
    batch: int = BATCH,
    lengths: tuple[int, ...] = (TOKENS,),
    accumulate: int = 1,
    autocast: bool = False,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    backward: Callable[[torch.Tensor, int], None] = lambda loss, step: loss.backward(),
    change: Callable[[nn.Module], object] | None = None,
    batches: Callable[..., dict] = tiny_batch,
) -> Row:
    """A training in a loop of its own. After half of the steps, `change` may change the model."""

    def make(spec: dict | None) -> Training:
        net = model()
        if spec is not None:
            hf_ckpt.install(net)
            enable(net, spec)

        def train(watch: Watch) -> None:
            torch.manual_seed(5)
            for step in range(steps):
                if step == 0 or (change is not None and 2 * step == steps):
                    if step:
                        change(net)
                        watch.phase += 1
                    stepper = optimizer([p for p in net.parameters() if p.requires_grad], lr=1e-3)
                tokens = lengths[step % len(lengths)]
                for micro in range(accumulate):
                    data = batches(family, seed=100 * step + micro, batch=batch, tokens=tokens)
                    try:
                        with watch.step(f"{tokens:4d}" if len(lengths) > 1 else ""):
                            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                                loss = net(**without_cache(net, data)).loss / accumulate
                            backward(loss, step)
                            del loss
                            if micro == accumulate - 1:
                                stepper.step()
                                stepper.zero_grad()
                    except ArithmeticError:
                        stepper.zero_grad()

        return Training(net, train)

    return make


def small(family: str, layers: int = LAYERS, **more) -> nn.Module:
    """A model of eight blocks whose activations are larger than its parameters."""
    return tiny_model(family, layers=layers // 2 if family == "t5" else layers, hidden=HIDDEN, attention="sdpa", **more)


def adapted(model: nn.Module, **more) -> nn.Module:
    """The model in PEFT's wrapper, with adapters on all linear layers, and dropout before them."""
    torch.manual_seed(1)
    options = {"target_modules": "all-linear", "lora_dropout": 0.05, "init_lora_weights": False, **more}
    return get_peft_model(model, LoraConfig(r=4, **options)).train()


class Repeated(nn.ModuleList):
    """One block used eight times with the same weights, as in ALBERT."""

    def __getitem__(self, index):
        block = super().__getitem__
        return [block(0)] * LAYERS if isinstance(index, slice) else block(index)


def one_block_eight_times() -> nn.Module:
    model = small("llama", layers=1)
    model.model.layers = Repeated(model.model.layers)
    return model


def frozen_below() -> nn.Module:
    """A LLaMA whose embeddings and first four blocks are not trained."""
    model = small("llama")
    for part in (model.get_input_embeddings(), *model.model.layers[: LAYERS // 2]):
        part.requires_grad_(False)
    return model


def add_adapter(model: nn.Module) -> None:
    torch.manual_seed(1)
    add_inside(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, lora_dropout=0.05))


def again_in_every_third(loss: torch.Tensor, step: int) -> None:
    loss.backward(retain_graph=step % 3 == 2)
    if step % 3 == 2:
        loss.backward()


def fails_in_the_third(loss: torch.Tensor, step: int) -> None:
    def fail(gradient: torch.Tensor) -> None:
        raise ArithmeticError("on purpose")

    if step == 2:
        loss.register_hook(fail)
    loss.backward()


# --- Trainers ---------------------------------------------------------------------------------------------------------


class Ends(transformers.TrainerCallback):
    """Ends the watch's micro-step before anything else happens, such as an evaluation."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.watch.end()

    on_substep_end = on_step_end


@functools.cache
def folder() -> tempfile.TemporaryDirectory:
    """The folder for output of Trainers, with a tokenizer."""
    kept = tempfile.TemporaryDirectory(prefix="budgets-")
    byte_tokenizer().save_pretrained(Path(kept.name))
    return kept


def trl(kind: str, columns: dict[str, list[str]], *, lora: bool = True, evaluate: bool = False, **settings) -> Row:
    """A training with one of TRL's trainers, whose losses need about as much memory as blocks of the usual size."""

    def make(spec: dict | None) -> Training:
        import datasets
        import trl as library

        datasets.disable_progress_bars()
        transformers.set_seed(3)
        model = tiny_model("llama", layers=LAYERS, hidden=2 * HIDDEN, attention="sdpa")
        if spec is not None:
            hf_ckpt.install(model)
        flags = {"gradient_checkpointing": spec is not None, "gradient_checkpointing_kwargs": spec}
        quiet = {"report_to": "none", "logging_strategy": "no", "save_strategy": "no", "disable_tqdm": True}
        sizes = {"max_steps": STEPS, "learning_rate": 1e-3, "use_cpu": True, "seed": 3, "bf16": False}
        rows = datasets.Dataset.from_dict(columns)
        adapters = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=0.05)
        trainer = getattr(library, f"{kind}Trainer")(
            model=model,
            args=getattr(library, f"{kind}Config")(output_dir=folder().name, **quiet, **sizes, **flags, **settings),
            train_dataset=rows,
            eval_dataset=rows.select(range(4)) if evaluate else None,
            processing_class=transformers.AutoTokenizer.from_pretrained(folder().name),
            peft_config=adapters if lora else None,
        )
        trainer.remove_callback(transformers.PrinterCallback)
        original = trainer.training_step

        def train(watch: Watch) -> None:
            def training_step(*args, **kwargs):
                watch.begin()
                return original(*args, **kwargs)

            trainer.training_step = training_step
            trainer.callback_handler.callbacks.insert(0, Ends(watch))
            trainer.train()

        return Training(trainer.model, train)

    return make


TEXTS = {"text": [f"row {row:3d} " * 16 for row in range(64)]}  # 128 tokens of one byte each
ANSWERS = [f"ans {row:3d} " * 12 for row in range(64)]
PAIRS = {"prompt": [f"say {row:3d}: " for row in range(64)], "chosen": ANSWERS, "rejected": ANSWERS[::-1]}


def _lengths(count: int) -> tuple[int, ...]:
    return tuple(random.Random(0).sample(range(24, 193), count))


def _opt() -> nn.Module:
    sizes = {"hidden_size": HIDDEN, "ffn_dim": 2 * HIDDEN, "word_embed_proj_dim": HIDDEN}
    return other_model(
        "OPTForCausalLM", layers=LAYERS, layerdrop=0.3, max_position_embeddings=256, attention="sdpa", **sizes
    )


def _t5_above() -> nn.Module:
    """A T5 with adapters on the upper half of each stack."""
    targets = ["q", "k", "v", "o", "wi_0", "wi_1", "wo"]
    return adapted(small("t5"), target_modules=targets, layers_to_transform=[2, 3], layers_pattern="block")


_quick = functools.partial(tiny_model, "llama", layers=4, hidden=32, attention="sdpa")
_llama = functools.partial(small, "llama")
_four = {"per_device_train_batch_size": BATCH}
ROWS: dict[str, Row] = {
    "quick": loop(lambda: adapted(_quick()), lengths=(64,), steps=14),
    "gpt2, lora": loop(lambda: adapted(small("gpt2")), "gpt2"),
    "bert, autocast, few tokens": loop(
        functools.partial(small, "bert"), "bert", batch=1, lengths=(96,), autocast=True, optimizer=torch.optim.SGD
    ),
    "t5, lora on half": loop(_t5_above, "t5"),
    "llama, four micro-steps": loop(_llama, accumulate=4, steps=8, batch=2),
    "mixed lengths": loop(_llama, lengths=_lengths(40), steps=40),
    "layerdrop": loop(_opt, steps=24),
    "one block eight times": loop(one_block_eight_times),
    "two backwards in every third step": loop(_llama, backward=again_in_every_third),
    "an error in the third backward": loop(_llama, backward=fails_in_the_third),
    "then unfrozen": loop(frozen_below, steps=2 * STEPS, change=lambda model: model.requires_grad_(True)),
    "then with an adapter": loop(_llama, steps=2 * STEPS, change=add_adapter),
    "trl sft, smoothed, evaluated": trl(
        "SFT", TEXTS, label_smoothing_factor=0.1, evaluate=True, eval_strategy="steps", eval_steps=4, **_four
    ),
    "trl sft, four micro-steps": trl("SFT", TEXTS, lora=False, gradient_accumulation_steps=4, **_four),
    "trl dpo": trl("DPO", PAIRS, per_device_train_batch_size=2),
    **{name: loop(functools.partial(unusual_model, name), name, batches=unusual_batch) for name in MODELS},
}
"""Name -> training."""
