"""What is trained, before it exists: a model by name, its batch, adapters, types and optimizer -> its costs."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from hf_ckpt import compat
from hf_ckpt.blueprint import Blueprint, at_depth, blueprint_from_config
from hf_ckpt.cost import Step
from hf_ckpt.errors import HfCkptError, MissingDependencyError
from hf_ckpt.families import base_model, find_blocks

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LEARNING_RATE = 1e-5
"""Of real steps, whose weights mean nothing: so small that they stay finite."""
_PRESETS = (Path(__file__).parent / "models", Path(__file__).parent.parent / "configs" / "models")


@dataclasses.dataclass(frozen=True)
class Setup:
    """A training that is to be planned.

    Raises `HfCkptError` when it is made with a value that means nothing.
    """

    model: str
    """A preset, the folder or the id of a model, or the path of a `config.json`."""
    batch: int = 1
    """Sequences a micro-step."""
    tokens: int = 512
    """Of each sequence."""
    target_tokens: int | None = None
    """Of each target sequence, for an encoder with a decoder; as many as `tokens` unless given."""
    lora: int | None = None
    """Rank of adapters on every linear layer; None trains every weight."""
    dtype: str = "bfloat16"
    """Of the weights."""
    autocast: str | None = None
    """Type that autocast computes in."""
    optimizer: str = "adamw"
    accumulation: int = 1
    """Micro-steps a step."""
    attention: str = "sdpa"
    padded: bool = False
    """Whether sequences are padded, so that attention gets a mask."""
    architecture: str | None = None
    """Class of the model, in place of the one its config names: `BertForSequenceClassification`."""

    def __post_init__(self) -> None:
        for name, value in (("dtype", self.dtype), ("autocast", self.autocast)):
            if value is not None and value not in DTYPES:
                raise HfCkptError(f"{name} must be one of {', '.join(DTYPES)}, but is {value!r} instead.")
        for name in ("batch", "tokens", "accumulation", "target_tokens", "lora"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise HfCkptError(f"{name} must be at least 1, but is {number} instead.")


def presets() -> dict[str, Path]:
    """Name -> config of the models that hf_ckpt ships the shapes of."""
    folder = next((folder for folder in _PRESETS if folder.is_dir()), None)
    return {} if folder is None else {path.stem: path for path in sorted(folder.glob("*.json"))}


def load_config(name: str) -> Any:
    """The config of a preset, a folder, a hub id, or a `config.json`. Raises `HfCkptError` when there is none."""
    path = presets().get(name, Path(name))
    try:
        if path.is_file():
            keys = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(keys, dict):
                raise ValueError(f"it is no mapping of keys, but {type(keys).__name__}")
            return transformers.AutoConfig.for_model(keys.pop("model_type"), **keys)
        return transformers.AutoConfig.from_pretrained(name)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise HfCkptError(
            f"cannot read a model's config from {name!r}: {str(error).splitlines()[0]}\nGive a folder, a config.json, "
            f"a hub id, or one of {', '.join(presets())}."
        ) from error


def blueprint_of_setup(setup: Setup) -> Blueprint:
    """The blueprint of the model that `setup` names, adapters injected."""
    config = load_config(setup.model)
    _refuse_too_long(config, setup)
    return blueprint_from_config(config, _maker(config, setup), _adapter(setup))


def real_model(setup: Setup, depth: int | None = None) -> nn.Module:
    """The model that `setup` names with random weights, if asked for with only `depth` blocks in every stack."""
    config = load_config(setup.model)
    _refuse_too_long(config, setup)
    if depth is not None:
        config = at_depth(config, depth)
    model = _maker(config, setup)(config)
    adapt = _adapter(setup)
    return model if adapt is None else adapt(model)


def _adapter(setup: Setup) -> Callable[[nn.Module], nn.Module] | None:
    return None if setup.lora is None else functools.partial(add_lora, rank=setup.lora)


def _maker(config: Any, setup: Setup) -> Callable[[Any], nn.Module]:
    names = [setup.architecture] if setup.architecture else getattr(config, "architectures", None) or []
    model_class = next((found for name in names if (found := getattr(transformers, name, None)) is not None), None)
    if setup.architecture and not hasattr(model_class, "_from_config"):
        raise HfCkptError(f"transformers has no model class {setup.architecture!r}.")
    return functools.partial(_make, model_class or transformers.AutoModelForCausalLM, setup)


def _make(model_class: Any, setup: Setup, config: Any) -> nn.Module:
    dtype = DTYPES[setup.dtype]
    build = model_class.from_config if hasattr(model_class, "from_config") else model_class._from_config
    try:
        try:
            model: nn.Module = build(copy.deepcopy(config), dtype=dtype, attn_implementation=setup.attention)
        except ValueError as error:
            if setup.attention != "sdpa" or "attention" not in str(error):
                raise
            model = build(copy.deepcopy(config), dtype=dtype)  # T5 before transformers 5 has none but its own
    except (ValueError, ImportError, AttributeError) as error:
        made_as = f" as {setup.architecture}" if setup.architecture else ""
        raise HfCkptError(f"{setup.model} cannot be made{made_as}: {error}") from error
    return model


def add_lora(model: nn.Module, *, rank: int, **config: Any) -> nn.Module:
    """Inject adapters into every linear layer; `config` are further keys of PEFT's `LoraConfig`.

    Raises `MissingDependencyError` without PEFT.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise MissingDependencyError("peft", "training LoRA adapters", "pip install 'hf-ckpt[demo]'") from error
    adapted: nn.Module = get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear", **config))
    return adapted


def learned_positions(config: Any) -> int | None:
    """How many positions a model has learned embeddings for; None where it computes them."""
    most = getattr(config, "max_position_embeddings", None)
    learned = getattr(config, "model_type", "") in ("gpt2", "gpt_neo", "bert", "roberta", "electra", "camembert")
    return most if learned and isinstance(most, int) else None


def _refuse_too_long(config: Any, setup: Setup) -> None:
    most = learned_positions(config)
    if most is not None and setup.tokens > most:
        raise HfCkptError(f"{setup.model} has positions for {most} tokens, but {setup.tokens} are asked for.")


def batch_for(model: nn.Module, sizes: Mapping[str, tuple[int, int]]) -> dict[str, torch.Tensor]:
    """Inputs, attention mask and labels of the shapes that `model` trains on. Their values mean nothing.

    Args:
        model: decides the task: labels are one a sequence for classifiers, one a token else.
        sizes: stack -> (sequences, tokens) that go into it.
    """
    base = base_model(model)
    first = next(iter(sizes.values()))
    found = {name: torch.zeros(first, dtype=torch.long) for name in ("input_ids", "attention_mask")}
    last = sizes["decoder"] if len(sizes) > 1 and "decoder" in sizes else first
    name = type(base).__name__
    per_sequence = name.endswith(("ForSequenceClassification", "ForMultipleChoice", "ForNextSentencePrediction"))
    if name.endswith("ForMultipleChoice"):  # one choice each
        found = {key: value[:, None] for key, value in found.items()}
    if _takes_labels(base):
        found["labels"] = torch.zeros(last[0] if per_sequence else last, dtype=torch.long)
    elif len(sizes) > 1:
        found["decoder_input_ids"] = torch.zeros(last, dtype=torch.long)
    return found


def real_inputs(setup: Setup, model: nn.Module, device: str, seed: int = 0) -> dict[str, Any]:
    """Random inputs of one micro-step for a model that exists, with nothing masked unless `setup` is padded.

    Padding is a quarter of the last sequence, which has no labels there.
    """
    base = base_model(model)
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, Any] = {}
    for name, shaped in step_of_model(setup, model).batch.items():
        most = _labels(base) if name == "labels" else base.config.vocab_size
        found[name] = torch.randint(most, shaped.shape, generator=generator)
    found["attention_mask"] = torch.ones_like(found["attention_mask"])
    if setup.padded:
        padding = -(-setup.tokens // 4)
        found["attention_mask"][-1, ..., -padding:] = 0
        if found.get("labels", found["input_ids"]).shape == found["input_ids"].shape and "labels" in found:
            found["labels"][-1, ..., -padding:] = -100
    if compat.wants_use_cache(base):
        found["use_cache"] = False
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in found.items()}


def _labels(base: nn.Module) -> int:
    """How many values a label may have."""
    name = type(base).__name__
    if name.endswith("ForMultipleChoice"):
        return 1  # one choice each
    config: Any = base.config
    return int(config.num_labels if name.endswith("Classification") else config.vocab_size)


def optimizer_for(setup: Setup, model: nn.Module) -> torch.optim.Optimizer | None:
    """The optimizer that `setup` names, for all that `model` trains; None where PyTorch has none of that name."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if setup.optimizer == "adamw":  # fused, as the Trainer has it: it needs no memory of its own
        return torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=True)
    if setup.optimizer in ("sgd", "momentum"):
        return torch.optim.SGD(
            trained, lr=LEARNING_RATE, momentum=0.9 if setup.optimizer == "momentum" else 0.0, fused=True
        )
    return None


def _takes_labels(base: nn.Module) -> bool:
    return "labels" in compat.forward_parameters(base)


def loss_for(model: nn.Module) -> Callable[[Any], torch.Tensor] | None:
    """How to get a loss from the outputs of a model that takes no labels; None where it computes its own."""
    return None if _takes_labels(base_model(model)) else _mean_square


def _mean_square(outputs: Any) -> torch.Tensor:
    scores: torch.Tensor = outputs.logits if "logits" in outputs else outputs[0]
    return scores.float().square().mean()


def step_of_setup(setup: Setup, blueprint: Blueprint) -> Step:
    """One micro-step of `setup`."""
    return _step(setup, blueprint.base, [stack.name for stack in blueprint.stacks])


def step_of_model(setup: Setup, model: nn.Module) -> Step:
    """One micro-step of `setup` on a model that exists."""
    return _step(setup, model, list(dict.fromkeys(block.stack for block in find_blocks(model).blocks)))


def _step(setup: Setup, model: nn.Module, stacks: Sequence[str]) -> Step:
    sizes = dict.fromkeys(stacks, (setup.batch, setup.tokens))
    if len(sizes) > 1 and "decoder" in sizes and setup.target_tokens is not None:
        sizes["decoder"] = setup.batch, setup.target_tokens
    return Step(
        batch=batch_for(model, sizes),
        padded=setup.padded,
        autocast=DTYPES[setup.autocast] if setup.autocast else None,
        accumulation=setup.accumulation,
        optimizer=setup.optimizer,
        loss=loss_for(model),
    )
