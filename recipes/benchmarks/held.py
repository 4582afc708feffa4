"""What blocks hold at the end of the forward under `selective`, with dropout on, over no checkpointing.

Small random models of four families are trained in full and with LoRA on every linear layer. Bytes are those of all
live tensors above what was there before the forward, each storage counted once. The exit code is 1 if a bound is
missed that a row has.

    python recipes/benchmarks/held.py --json held-cpu.json
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import command
import report
import torch
import transformers
from machine import circumstances
from torch import nn

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.cli.arguments import positive
from hf_ckpt.errors import HfCkptError
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.models.blocks import base_model

SAVES = (("linear", "attention"), ("attention",))
"""What `selective` saves: its default, and results of attention alone."""
WAYS = (("full", SAVES[0]), ("LoRA", SAVES[0]), ("LoRA", SAVES[1]))
"""How models are trained, and what `selective` saves."""
_TOKENS = {"vocab_size": 320, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}


@dataclasses.dataclass(frozen=True)
class Model:
    """A small model, and the most that may be held over no checkpointing, for each of `WAYS`."""

    name: str
    make: Callable[[HeldSettings], tuple[str, dict[str, Any]]]
    """Gives the name of the model's class, and the keys of its config."""
    attention: str
    """Where attention has a dropout, `eager` shows its mask; the fused kernels of the CPU have none."""
    bounds: tuple[float, float, float]


@dataclasses.dataclass(frozen=True)
class HeldSettings:
    """Sizes. Raises `HfCkptError` for values that mean nothing."""

    hidden: int = 384
    blocks: int = 4
    """Of each stack."""
    batch: int = 4
    tokens: int = 256
    dropout: float = 0.1
    """Wherever a family has it."""
    lora_dropout: float = 0.05
    lora: int = 8
    dtype: str = "bfloat16"
    attention: str | None = None
    """The attention of all models; None for that of each model's row."""
    models: tuple[str, ...] = ("Mistral", "GPT-2", "RoBERTa", "mT5")

    def __post_init__(self) -> None:
        unknown = [name for name in self.models if name not in MODELS]
        if unknown:
            raise HfCkptError(f"models must be of {', '.join(MODELS)}, but are {', '.join(unknown)} instead.")
        if self.hidden % 64:
            raise HfCkptError(f"hidden must be a multiple of 64, but is {self.hidden} instead.")


def _mistral(settings: HeldSettings) -> tuple[str, dict[str, Any]]:
    heads = settings.hidden // 64
    return "MistralForCausalLM", {
        "hidden_size": settings.hidden,
        "num_hidden_layers": settings.blocks,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 3 or 1,
        "head_dim": 64,
        "intermediate_size": settings.hidden * 8 // 3,
    }


def _gpt2(settings: HeldSettings) -> tuple[str, dict[str, Any]]:
    return "GPT2LMHeadModel", {
        "n_embd": settings.hidden,
        "n_layer": settings.blocks,
        "n_head": settings.hidden // 64,
        "n_positions": settings.tokens,
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), settings.dropout),
    }


def _roberta(settings: HeldSettings) -> tuple[str, dict[str, Any]]:
    return "RobertaForMaskedLM", {
        "hidden_size": settings.hidden,
        "num_hidden_layers": settings.blocks,
        "num_attention_heads": settings.hidden // 64,
        "intermediate_size": 4 * settings.hidden,
        "max_position_embeddings": settings.tokens + 2,
        **dict.fromkeys(("attention_probs_dropout_prob", "hidden_dropout_prob"), settings.dropout),
    }


def _mt5(settings: HeldSettings) -> tuple[str, dict[str, Any]]:
    return "MT5ForConditionalGeneration", {
        "d_model": settings.hidden,
        "d_kv": 64,
        "d_ff": settings.hidden * 8 // 3,
        "num_layers": settings.blocks,
        "num_decoder_layers": settings.blocks,
        "num_heads": settings.hidden // 64,
        "dropout_rate": settings.dropout,
        "decoder_start_token_id": 0,
    }


MODELS = {
    row.name: row
    for row in (
        Model("Mistral", _mistral, "sdpa", (0.52, 0.43, 0.22)),
        Model("GPT-2", _gpt2, "eager", (0.36, 0.32, 0.22)),
        Model("RoBERTa", _roberta, "eager", (0.64, 0.42, 0.24)),
        Model("mT5", _mt5, "eager", (0.50, 0.48, 0.42)),
    )
}


@dataclasses.dataclass
class HeldRow:
    """One model, trained in one way, with one choice of what is saved."""

    model: str
    attention: str
    tuning: str
    """`full` or `LoRA`."""
    save: tuple[str, ...]
    none_bytes: int
    """Held at the end of the forward without checkpointing."""
    held_bytes: int
    """Held under `selective`."""
    ratio: float
    bound: float | None
    """The most that `ratio` may be; None at other sizes than the default's."""


@dataclasses.dataclass
class HeldBench:
    """What was counted, and where."""

    settings: HeldSettings
    circumstances: dict[str, Any]
    rows: list[HeldRow]

    @property
    def ok(self) -> bool:
        """Whether no row is above its bound."""
        return all(row.bound is None or row.ratio <= row.bound for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        rows = [dataclasses.asdict(row) for row in self.rows]
        settings = dataclasses.asdict(self.settings)
        return {"circumstances": self.circumstances, "settings": settings, "ok": self.ok, "rows": rows}


def bench_held(settings: HeldSettings, *, on_progress: Callable[[str], None] = lambda text: None) -> HeldBench:
    """Count what every model holds in every way."""
    rows: list[HeldRow] = []
    for name in settings.models:
        for tuning in dict.fromkeys(tuning for tuning, _ in WAYS):
            on_progress(f"{name}, {tuning}")
            rows += _rows(MODELS[name], tuning, settings)
    return HeldBench(settings, circumstances("cpu"), rows)


def _rows(row: Model, tuning: str, settings: HeldSettings) -> Iterator[HeldRow]:
    model = model_of(row, tuning, settings)
    none = _held(model, settings)
    sizes = {**dataclasses.asdict(settings), "models": None} == {**dataclasses.asdict(HeldSettings()), "models": None}
    for place, (way, save) in enumerate(WAYS):
        if way != tuning:
            continue
        hf_ckpt.install(model, {"policy": "selective", "save": list(save)})
        getattr(base_model(model), compat.ENABLE_NAMES[-1])()
        held = _held(model, settings)
        hf_ckpt.uninstall(model)
        bound = row.bounds[place] if sizes else None
        yield HeldRow(row.name, settings.attention or row.attention, tuning, save, none, held, held / none, bound)


def model_of(row: Model, tuning: str, settings: HeldSettings) -> nn.Module:
    """The model of a row, with adapters where they are what is trained."""
    kind, keys = row.make(settings)
    model_class = getattr(transformers, kind)
    config = model_class.config_class(**_TOKENS, **keys)
    config._attn_implementation = settings.attention or row.attention
    torch.manual_seed(0)
    model = model_class(config).to(getattr(torch, settings.dtype))
    if tuning == "LoRA":
        model = compat.add_lora(model, rank=settings.lora, lora_dropout=settings.lora_dropout)
    trained: nn.Module = model.train()
    return trained


def _held(model: nn.Module, settings: HeldSettings) -> int:
    """Bytes that a forward leaves alive."""
    batch = batch_of(settings)
    options = {"use_cache": False} if compat.wants_use_cache(base_model(model)) else {}
    torch.manual_seed(0)
    with LiveBytes(model, batch) as live:
        loss = model(**batch, **options).loss
        held = live.current_bytes - live.start_bytes
    del loss
    return held


def batch_of(settings: HeldSettings) -> dict[str, torch.Tensor]:
    """Random tokens, the same ones every time."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, _TOKENS["vocab_size"], (settings.batch, settings.tokens), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


# --- the command ------------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = command.make_parser(__doc__)
    parser.add_argument("--attention", choices=("eager", "sdpa"), help="of all models (default: the row's)")
    parser.add_argument("--model", action="append", help="repeatable (default Mistral, GPT-2, RoBERTa and mT5)")
    for name, words in (
        ("hidden", "hidden size, a multiple of 64 (default 384)"),
        ("blocks", "blocks of each stack (default 4)"),
        ("batch", "sequences (default 4)"),
        ("tokens", "tokens of each (default 256)"),
    ):
        parser.add_argument(f"--{name}", type=positive, help=words)
    return parser


def _run(arguments: argparse.Namespace) -> int:
    asked = {name: getattr(arguments, name) for name in ("hidden", "blocks", "batch", "tokens", "attention")}
    asked["models"] = arguments.model and tuple(arguments.model)
    settings = HeldSettings(**{name: value for name, value in asked.items() if value is not None})
    return command.carry_out(bench_held, settings, len(settings.models) * 2, report.print_held, arguments)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script with these words, or with those of the command line."""
    return command.call(_run, _parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
