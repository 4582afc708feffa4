"""Shared by the four recipes: options from a YAML file and the command line, and rows of text."""

from __future__ import annotations

import dataclasses
import re
import sys
import time
from itertools import chain
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset
from transformers import HfArgumentParser, PreTrainedTokenizerBase, Trainer, TrainingArguments

import hf_ckpt
from hf_ckpt.spec.files import read_values

REPOSITORY = Path(__file__).resolve().parent.parent

# What --tiny sets; the command line still overrides it.
TINY = {
    "dataset_name": None,
    "dataset_config": None,
    "train_file": [str(REPOSITORY / "LICENSE"), str(REPOSITORY / "README.md")],
    "max_length": 64,
    "use_cpu": True,
    "bf16": False,
    "max_steps": 4,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 1,
    "warmup_steps": 0,
    "logging_steps": 1,
}

# transformers 5.23 renamed the flag and warns about the old name; 4.57 knows only the old one. The recipes accept both.
_known = {field.name for field in dataclasses.fields(TrainingArguments)}
FLAG = "activation_checkpointing" if "activation_checkpointing" in _known else "gradient_checkpointing"

_READERS = {".csv": "csv", ".json": "json", ".jsonl": "json"}


@dataclasses.dataclass
class ModelArguments:
    """Which weights to start from."""

    model_name_or_path: str | None = dataclasses.field(
        default=None, metadata={"help": "Hub id or local folder of the model and its tokenizer."}
    )
    tiny: bool = dataclasses.field(
        default=False,
        metadata={"help": "Try it: a small random model, a few CPU steps, this repository's text if no train_file."},
    )


@dataclasses.dataclass
class DataArguments:
    """Which text to train on."""

    dataset_name: str | None = dataclasses.field(default=None, metadata={"help": "Hub id of a dataset."})
    dataset_config: str | None = dataclasses.field(default=None, metadata={"help": "Its configuration, if any."})
    dataset_split: str = dataclasses.field(default="train", metadata={"help": "Its split to train on."})
    train_file: list[str] | None = dataclasses.field(
        default=None, metadata={"help": "Local .csv, .json(l) or plain text files, used instead of dataset_name."}
    )
    text_column: str = dataclasses.field(default="text", metadata={"help": "Column with the (input) text."})
    max_length: int = dataclasses.field(default=512, metadata={"help": "Longest input, in tokens."})


def parse(*kinds: type, argv: list[str] | None = None) -> tuple[Any, ...]:
    """Return a filled dataclass for each of `kinds`: from the YAML file named first, then from the command line.

    Ends the program with a usage message if the YAML has an unknown key. Raises `ValueError` for an unknown flag on the
    command line.
    """
    parser = HfArgumentParser(kinds)
    parser.add_argument("config", type=Path, help="YAML file of options; the command line overrides it.")
    argv = [_installed_name(word) for word in (sys.argv[1:] if argv is None else argv)]
    options, _ = parser.parse_known_args(argv)
    try:
        loaded = read_values(options.config)
    except ValueError as error:
        parser.error(f"cannot read {options.config}: {error}")
    if not isinstance(loaded, dict):
        parser.error(f"{options.config} must hold `option: value` lines, but holds {loaded!r} instead")
    settings = {_installed_name(str(key)): value for key, value in loaded.items()}
    if isinstance(settings.get("train_file"), str):  # one file, without brackets
        settings["train_file"] = [settings["train_file"]]
    unknown = sorted(settings.keys() - (vars(options).keys() - {"config"}))
    if unknown:
        parser.error(f"{options.config} has keys that are no options: {', '.join(unknown)}")
    parser.set_defaults(**settings)
    if parser.parse_known_args(argv)[0].tiny:
        parser.set_defaults(**TINY)
    *filled, _ = parser.parse_args_into_dataclasses(argv, look_for_args_file=False)
    return tuple(filled)


def load_rows(data: DataArguments, *, sample_by: str = "line") -> Dataset:
    """Return the rows of `train_file` or `dataset_name`. A row of plain text is a line, or a file (`document`)."""
    if data.train_file:
        reader = reader_of(data.train_file)
        how = {"sample_by": sample_by} if reader == "text" else {}
        rows = load_dataset(reader, data_files=data.train_file, split="train", **how)
        if reader == "text" and data.text_column != "text":
            rows = rows.rename_column("text", data.text_column)
    elif data.dataset_name:
        rows = load_dataset(data.dataset_name, data.dataset_config, split=data.dataset_split)
    else:
        raise SystemExit("no data: give --dataset_name or --train_file.")
    need_column(rows, data.text_column)
    return rows.filter(lambda row: bool((row[data.text_column] or "").strip()))


def need_column(rows: Dataset, name: str) -> None:
    """End the program if the rows have no such column."""
    if name not in rows.column_names:
        raise SystemExit(f"the data has no column {name!r}, only {', '.join(rows.column_names)}.")


def reader_of(files: list[str]) -> str:
    """Return the reader of `datasets` for these files: `csv` or `json` by suffix, or `text` for all others."""
    readers = {_READERS.get(Path(file).suffix, "text") for file in files}
    if len(readers) > 1:
        raise SystemExit(f"--train_file must be of one kind, but is {' and '.join(sorted(readers))} instead.")
    return readers.pop()


def pack(rows: Dataset, tokenizer: PreTrainedTokenizerBase, data: DataArguments) -> Dataset:
    """Return blocks of exactly `max_length` tokens, which are their own labels, for a causal language model.

    Texts are joined by the end-of-text token. After every thousand texts, the remainder is dropped.
    """

    def blocks(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        # `verbose=False`: a text may be longer than the model's context, because it is split below.
        texts = tokenizer(batch[data.text_column], add_special_tokens=False, verbose=False)["input_ids"]
        tokens = list(chain.from_iterable([*text, tokenizer.eos_token_id] for text in texts))
        ends = range(data.max_length, len(tokens) + 1, data.max_length)
        packed = [tokens[end - data.max_length : end] for end in ends]
        return {"input_ids": packed, "labels": [list(block) for block in packed]}

    packed = rows.map(blocks, batched=True, remove_columns=rows.column_names)
    if not len(packed):
        raise SystemExit(f"the text is shorter than one block of --max_length {data.max_length} tokens.")
    return packed


def finish(trainer: Trainer) -> None:
    """Print what the plan did, and end all processes together."""
    if trainer.is_world_process_zero():
        print(hf_ckpt.describe(trainer.model))
    # A process that exits right after a collective can hang or abort, and PyTorch's gloo can deadlock if a process
    # group ends moments after one. https://github.com/pytorch/pytorch/issues/56297
    trainer.accelerator.wait_for_everyone()
    time.sleep(0.2)
    trainer.accelerator.end_training()


def _installed_name(word: str) -> str:
    """`--gradient_checkpointing_kwargs` -> `--activation_checkpointing_kwargs`, or back, as in transformers here."""
    return re.sub(r"^(--|)(activation|gradient)[-_]checkpointing", rf"\g<1>{FLAG}", word)
