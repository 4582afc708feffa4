"""The trainings that test budgets, by name in `ROWS`; see `budget_runs`."""

from __future__ import annotations

import contextlib
import functools
import random
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import transformers
from peft import LoraConfig
from torch import nn

import hf_ckpt
from helpers.adapters import add_inside
from helpers.budget_runs import Make, Scenario, Watch
from helpers.others import other_model
from helpers.steps import enable, without_cache
from hf_ckpt.compat.peft import add_lora
from hf_ckpt.models.tiny import VOCABULARY, byte_tokenizer, tiny_batch, tiny_model

LAYERS, HIDDEN, BATCH, TOKENS, STEPS = 8, 64, 4, 128, 18
FAMILIES = ("llama", "gpt2", "bert", "t5")


# --- models -----------------------------------------------------------------------------------------------------------


def small(family: str, **more) -> nn.Module:
    """A model of eight blocks whose activations are larger than its parameters."""
    layers = LAYERS // 2 if family == "t5" else LAYERS
    return tiny_model(family, layers=layers, hidden=HIDDEN, attention="sdpa", **more)


def with_adapters(model: nn.Module, **more) -> nn.Module:
    """The model in PEFT's wrapper, with adapters on all linear layers, and dropout before them."""
    torch.manual_seed(1)
    return add_lora(model, rank=4, lora_dropout=0.05, init_lora_weights=False, **more).train()


def adapted(family: str, **more) -> nn.Module:
    """A small model with adapters."""
    return with_adapters(small(family), **more)


LINEAR = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "bert": ["query", "key", "value", "dense"],
    "t5": ["q", "k", "v", "o", "wi_0", "wi_1", "wo"],
}
"""All linear layers by name: PEFT accepts "all-linear" only if every block may be adapted."""


def adapted_on(family: str, blocks: slice) -> nn.Module:
    """A small model with adapters on some blocks of each stack. Blocks before the first adapter are frozen."""
    depth = LAYERS // 2 if family == "t5" else LAYERS
    pattern = "block" if family == "t5" else None  # T5's blocks contain lists of layers, too
    chosen = list(range(depth))[blocks]
    return adapted(family, targets=LINEAR[family], layers_to_transform=chosen, layers_pattern=pattern)


class Repeated(nn.ModuleList):
    """One block used eight times with the same weights, as in ALBERT."""

    def __getitem__(self, index):
        block = super().__getitem__
        return [block(0)] * LAYERS if isinstance(index, slice) else block(index)


def one_block_eight_times() -> nn.Module:
    """A LLaMA that calls one block eight times."""
    model = tiny_model("llama", layers=1, hidden=HIDDEN, attention="sdpa")
    model.model.layers = Repeated(model.model.layers)
    return model


# --- optimizers -------------------------------------------------------------------------------------------------------


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


def adafactor(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return transformers.Adafactor(parameters, lr=1e-3, relative_step=False, scale_parameter=False)


class LargeState(torch.optim.Optimizer):
    """An optimizer that hf_ckpt does not know: it keeps five averages, and its step needs two more tensors."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if not self.state[parameter]:
                    self.state[parameter] = {str(place): torch.zeros_like(parameter) for place in range(5)}
                for place, average in enumerate(self.state[parameter].values()):
                    average.lerp_(parameter.grad, 0.5 ** (place + 1))
                mean = sum(self.state[parameter].values())
                parameter.add_(mean.sign() * parameter.grad.abs(), alpha=-group["lr"])


class ByHand:
    """An update with momentum that is not a torch optimizer."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.momentum: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def step(self) -> None:
        for place, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                momentum = self.momentum.setdefault(place, torch.zeros_like(parameter))
                parameter.sub_(momentum.mul_(0.9).add_(parameter.grad), alpha=1e-3)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


# --- user-written loops -----------------------------------------------------------------------------------------------

Change = Callable[[nn.Module], "nn.Module | None"]
"""Changes a model between two steps; returns the new model if it replaces it."""


class Loop:
    """An ordinary training loop.

    Args:
        spec: the spec to enable on the model; None enables nothing.
        model: a new model.
        family: the family of its batches.
        steps: optimizer steps.
        batch, tokens: the shape of a batch.
        lengths: the length of each step, instead of `tokens`.
        accumulate: micro-steps per optimizer step.
        autocast: whether forwards run under bf16 autocast.
        optimizer: makes an optimizer for parameters.
        backward: takes the loss and the number of its step, and runs backward.
        changes: step -> change made to the model before it.
        interrupt: step -> (where, error): raised in the `forward` or `backward` of that step; the loop then continues.
        forward: computes the loss; by default the model's own.
        settled: as in `Scenario`; by default three optimizer steps if all steps are alike.
    """

    def __init__(
        self,
        spec: dict | None,
        model: nn.Module,
        family: str,
        *,
        steps: int = STEPS,
        batch: int = BATCH,
        tokens: int = TOKENS,
        lengths: list[int] | None = None,
        accumulate: int = 1,
        autocast: bool = False,
        optimizer: Callable = adamw,
        backward: Callable[[torch.Tensor, int], None] = lambda loss, step: loss.backward(),
        changes: dict[int, Change] | None = None,
        interrupt: dict[int, tuple[str, type[BaseException]]] | None = None,
        forward: Callable[[nn.Module, dict], torch.Tensor] = lambda model, batch: model(**batch).loss,
        settled: int | None = None,
    ) -> None:
        if settled is None:
            settled = 3 * accumulate if lengths is None and not changes and not interrupt else 0
        self.scenario = Scenario(model, self.train, settled=settled)
        self.spec, self.family, self.steps, self.batch = spec, family, steps, batch
        self.lengths = lengths
        self.tokens = [tokens] * steps if lengths is None else lengths
        self.accumulate, self.autocast, self.make_optimizer = accumulate, autocast, optimizer
        self.backward, self.changes, self.interrupt, self.forward = backward, changes or {}, interrupt or {}, forward
        self.enable()

    def enable(self) -> None:
        if self.spec is not None:
            hf_ckpt.install(self.scenario.model)
            enable(self.scenario.model, self.spec)

    def train(self, watch: Watch) -> None:
        torch.manual_seed(5)
        optimizer = self.optimizer()
        for step in range(self.steps):
            if step in self.changes:
                replaced = self.changes[step](self.scenario.model)
                if replaced is not None:
                    self.scenario.model = replaced
                    self.enable()
                watch.changed()
                optimizer = self.optimizer()
            for micro in range(self.accumulate):
                try:
                    with watch.step("" if self.lengths is None else f"{self.tokens[step]:4d}"):
                        self.micro_step(step, micro, optimizer)
                except (KeyboardInterrupt, ArithmeticError):
                    optimizer.zero_grad()

    def optimizer(self) -> torch.optim.Optimizer | ByHand:
        return self.make_optimizer([p for p in self.scenario.model.parameters() if p.requires_grad])

    def micro_step(self, step: int, micro: int, optimizer: torch.optim.Optimizer | ByHand) -> None:
        model = self.scenario.model
        batch = tiny_batch(self.family, batch=self.batch, tokens=self.tokens[step], seed=100 * step + micro)
        if micro == 0:
            optimizer.zero_grad()
        where, error = self.interrupt.get(step, ("", None))
        with (
            torch.autocast("cpu", torch.bfloat16) if self.autocast else contextlib.nullcontext(),
            raising_in_forward(model, error) if where == "forward" else contextlib.nullcontext(),
        ):
            loss = self.forward(model, without_cache(model, batch)) / self.accumulate
        if where == "backward":
            loss.register_hook(functools.partial(_raise, error))
        self.backward(loss, step)
        del loss
        if micro == self.accumulate - 1:
            optimizer.step()


def _raise(error: type[BaseException], *_) -> None:
    raise error("on purpose")


@contextlib.contextmanager
def raising_in_forward(model: nn.Module, error: type[BaseException]):
    """In this context the model's sixth attention raises, after five blocks have run."""
    names = ("self_attn", "attn", "attention", "SelfAttention")
    found = [module for name, module in model.named_modules() if name.rpartition(".")[2] in names]
    handle = found[5].register_forward_pre_hook(functools.partial(_raise, error))
    try:
        yield
    finally:
        handle.remove()


def loop(model: Callable[[], nn.Module], family: str = "llama", **more) -> Make:
    """A row that trains a new `model()` in a `Loop`."""
    return lambda spec: Loop(spec, model(), family, **more).scenario


def twice(loss: torch.Tensor, step: int, *, every: int) -> None:
    """Backward, and a second backward in every `every`-th step, beginning with the third."""
    again = step % every == 2 % every
    loss.backward(retain_graph=again)
    if again:
        loss.backward()


# --- changes between steps --------------------------------------------------------------------------------------------


def blocks_of(model: nn.Module) -> nn.ModuleList:
    return model.get_submodule("model.layers")


def unfreeze(model: nn.Module) -> None:
    model.requires_grad_(True)


def freeze(model: nn.Module) -> None:
    blocks_of(model)[: LAYERS // 2].requires_grad_(False)
    model.get_input_embeddings().requires_grad_(False)


def frozen_below(model: nn.Module) -> nn.Module:
    freeze(model)
    return model


def to_float32(model: nn.Module) -> None:
    model.float()


def to_bfloat16(model: nn.Module) -> None:
    model.bfloat16()


def add_adapter(model: nn.Module) -> None:
    torch.manual_seed(1)
    add_inside(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, lora_dropout=0.05))


def resize_embeddings(model: nn.Module) -> None:
    torch.manual_seed(1)
    model.resize_token_embeddings(4 * VOCABULARY, mean_resizing=False)


CHANGES = {
    "unfreeze": (lambda: frozen_below(small("llama")), unfreeze),
    "freeze": (lambda: small("llama"), freeze),
    "cast up": (lambda: small("llama", dtype=torch.bfloat16), to_float32),
    "cast down": (lambda: small("llama"), to_bfloat16),
    "add adapter": (lambda: small("llama"), add_adapter),
    "resize embeddings": (lambda: small("llama"), resize_embeddings),
}


# --- Trainers ---------------------------------------------------------------------------------------------------------


class Ends(transformers.TrainerCallback):
    """Ends the watch's micro-step before anything else happens, such as an evaluation."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.watch.end()

    on_substep_end = on_step_end


def watched(trainer: transformers.Trainer, spec: dict | None) -> Scenario:
    """A Trainer that reports its micro-steps to a watch."""

    def train(watch: Watch) -> None:
        original = trainer.training_step

        def training_step(model, inputs, *args, **kwargs):
            watch.begin()
            return original(model, inputs, *args, **kwargs)

        trainer.training_step = training_step
        trainer.callback_handler.callbacks.insert(0, Ends(watch))
        trainer.train()

    trainer.remove_callback(transformers.PrinterCallback)
    trainer.remove_callback(transformers.ProgressCallback)
    return Scenario(trainer.model, train, settled=3 * trainer.args.gradient_accumulation_steps)


SETTINGS = {
    "max_steps": STEPS,
    "per_device_train_batch_size": BATCH,
    "learning_rate": 1e-3,
    "use_cpu": True,
    "report_to": "none",
    "logging_strategy": "no",
    "save_strategy": "no",
    "disable_tqdm": True,
    "seed": 3,
    "bf16": False,
}


@functools.cache
def folder() -> Path:
    """The folder for output of Trainers, with a tokenizer."""
    kept = tempfile.TemporaryDirectory(prefix="budgets-")
    folder.kept = kept
    path = Path(kept.name)
    byte_tokenizer().save_pretrained(path)
    return path


def flags(spec: dict | None) -> dict:
    return {"gradient_checkpointing": spec is not None, "gradient_checkpointing_kwargs": spec}


def installed(model: nn.Module, spec: dict | None) -> nn.Module:
    if spec is not None:
        hf_ckpt.install(model)
    return model


def trainer_row(model: Callable[[], nn.Module], family: str = "llama", *, trainer=None, loss=None, **settings) -> Make:
    """A row that trains with transformers' Trainer, or a subclass, on rows of one length."""

    def make(spec: dict | None) -> Scenario:
        from helpers.trainers import Rows

        transformers.set_seed(3)
        steps = settings.get("max_steps", STEPS) * settings.get("gradient_accumulation_steps", 1)
        made = (trainer or transformers.Trainer)(
            model=installed(model(), spec),
            args=transformers.TrainingArguments(output_dir=str(folder()), **{**SETTINGS, **flags(spec), **settings}),
            train_dataset=Rows(family, count=steps * BATCH, tokens=TOKENS),
            eval_dataset=Rows(family, count=2 * BATCH, tokens=TOKENS),
            **({"compute_loss_func": loss} if loss else {}),
        )
        return watched(made, spec)

    return make


def smooth_and_short(outputs, labels, num_items_in_batch=None) -> torch.Tensor:
    """A loss from outside the model: every other token, with a term for large logits."""
    logits = outputs["logits"][:, :-1:2].float()
    wanted = labels[:, 1::2]
    entropy = nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())
    return entropy + 1e-3 * logits.logsumexp(-1).square().mean()


def letters(completions, **_) -> list[float]:
    """A reward for GRPO."""
    return [float(sum(map(ord, text)) % 7) for text in completions]


TEXTS = [f"row {row:3d} " * 16 for row in range(64)]  # 128 tokens of one byte each
PROMPTS = [f"say {row:3d}: " for row in range(64)]
LONG_PROMPTS = [f"say {row:3d}: " * 12 for row in range(64)]
ANSWERS = [f"ans {row:3d} " * 12 for row in range(64)]
TRL = {
    "sft": ("SFT", {"text": TEXTS}, {}),
    "sft, smoothed": ("SFT", {"text": TEXTS}, {"label_smoothing_factor": 0.1}),
    "sft, four micro-steps": (
        "SFT",
        {"text": TEXTS * 3},
        {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 2},
    ),
    "dpo": (
        "DPO",
        {"prompt": PROMPTS, "chosen": ANSWERS, "rejected": ANSWERS[::-1]},
        {"per_device_train_batch_size": 2},
    ),
    "grpo": ("GRPO", {"prompt": LONG_PROMPTS}, {"num_generations": 2, "max_completion_length": 24}),
    "kto": (
        "KTO",
        {"prompt": PROMPTS, "completion": ANSWERS, "label": [row % 2 == 0 for row in range(64)]},
        {},
    ),
    "reward": ("Reward", {"chosen": TEXTS, "rejected": TEXTS[::-1]}, {"per_device_train_batch_size": 2}),
}


def trl_row(kind: str, *, lora: bool = True, hidden: int = 2 * HIDDEN, **more) -> Make:
    """A row that trains with one of TRL's trainers, whose losses need about as much memory as blocks of the usual
    size."""
    name, columns, settings = TRL[kind]

    def make(spec: dict | None) -> Scenario:
        import datasets
        import trl

        datasets.disable_progress_bars()
        transformers.set_seed(3)
        model = tiny_model("llama", layers=LAYERS, hidden=hidden, attention="sdpa")
        if name == "Reward":
            torch.manual_seed(0)
            model = transformers.LlamaForSequenceClassification(
                transformers.LlamaConfig.from_dict({**model.config.to_dict(), "num_labels": 1})
            ).train()
        task = "SEQ_CLS" if name == "Reward" else "CAUSAL_LM"
        adapters = LoraConfig(r=4, target_modules="all-linear", task_type=task, lora_dropout=0.05)
        made = getattr(trl, f"{name}Trainer")(
            model=installed(model, spec),
            args=getattr(trl, f"{name}Config")(
                output_dir=str(folder()), **{**SETTINGS, **flags(spec), **settings, **more}
            ),
            train_dataset=datasets.Dataset.from_dict(columns),
            processing_class=transformers.AutoTokenizer.from_pretrained(folder()),
            **({"peft_config": adapters} if lora else {}),
            **({"reward_funcs": letters} if name == "GRPO" else {}),
        )
        return watched(made, spec)

    return make


# --- rows -------------------------------------------------------------------------------------------------------------


def _lengths(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).sample(range(24, 193), count)


def quick() -> nn.Module:
    """A smaller model, for a row that takes a second or two."""
    return with_adapters(tiny_model("llama", layers=4, hidden=32, attention="sdpa"))


def _rows() -> dict[str, Make]:
    found: dict[str, Make] = {"quick": loop(quick, tokens=64, steps=12)}
    for family in FAMILIES:
        upper = slice(LAYERS // (4 if family == "t5" else 2), None)
        few = {"batch": 1, "tokens": 96, "autocast": True, "optimizer": sgd}
        found |= {
            f"{family}, full": loop(functools.partial(small, family), family),
            f"{family}, lora": loop(functools.partial(adapted, family), family),
            f"{family}, lora on half": loop(functools.partial(adapted_on, family, upper), family),
            f"{family}, autocast, few tokens": loop(functools.partial(small, family), family, **few),
            f"{family}, four micro-steps": loop(
                functools.partial(small, family), family, accumulate=4, steps=8, batch=2
            ),
        }
    llama = functools.partial(small, "llama")
    alternate = functools.partial(adapted_on, "llama", slice(1, None, 2))
    opt = functools.partial(
        other_model, "OPTForCausalLM", layers=LAYERS, layerdrop=0.3, hidden_size=HIDDEN, ffn_dim=2 * HIDDEN,
        word_embed_proj_dim=HIDDEN, max_position_embeddings=256, attention="sdpa",
    )  # fmt: skip
    found |= {
        "llama, lora on every second": loop(alternate),
        "llama, lora, four micro-steps": loop(functools.partial(adapted, "llama"), accumulate=4, steps=8, batch=2),
        **{f"trl {kind}": trl_row(kind) for kind in TRL},
        "trl sft, all parameters": trl_row("sft", lora=False),
        "trainer": trainer_row(llama),
        "trainer, label smoothing": trainer_row(llama, label_smoothing_factor=0.1),
        "trainer, compute_loss_func": trainer_row(llama, loss=smooth_and_short),
        "trainer, evaluation": trainer_row(llama, eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=2),
        "trainer, four micro-steps": trainer_row(llama, max_steps=8, gradient_accumulation_steps=4),
        "mixed lengths": loop(llama, lengths=_lengths(40), steps=40),
        "mixed lengths, lora": loop(functools.partial(adapted, "llama"), lengths=_lengths(40), steps=40),
        "mixed lengths that grow": loop(llama, lengths=sorted(_lengths(30)), steps=30),
        "mixed lengths, few": loop(llama, lengths=[(48, 96, 128, 160)[i * 7 % 4] for i in range(40)], steps=40),
        "adafactor": loop(llama, optimizer=adafactor),
        "optimizer of the test's own": loop(llama, optimizer=LargeState),
        "update by hand": loop(llama, optimizer=ByHand),
        "layerdrop": loop(opt, steps=24, settled=24),
        "one block eight times": loop(one_block_eight_times),
        "retain_graph once": loop(llama, backward=functools.partial(twice, every=99), settled=4),
        "retain_graph in every third step": loop(llama, backward=functools.partial(twice, every=3), settled=4),
        "retain_graph in every step": loop(llama, backward=functools.partial(twice, every=1)),
    }
    for error in (ArithmeticError, KeyboardInterrupt):
        for where in ("forward", "backward"):
            for step in (1, 2):
                name = f"{error.__name__} in {where} of step {step + 1}"
                found[name] = loop(llama, interrupt={step: (where, error)})
    for name, (model, change) in CHANGES.items():
        found[f"then {name}"] = loop(model, steps=2 * STEPS, changes={STEPS: change})
    return found


ROWS = _rows()
"""Name -> `make` for every training of this file."""
