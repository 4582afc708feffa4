"""Sequence-to-sequence training of T5 (summaries, translation), scored by the texts it generates.

Does it run? No download, no GPU, a few seconds:

    python recipes/seq2seq_t5.py configs/recipes/seq2seq_t5.yaml --tiny

For real, on one GPU or many:

    python recipes/seq2seq_t5.py configs/recipes/seq2seq_t5.yaml \
        --model_name_or_path google/flan-t5-large --train_file pairs.csv --text_column question --target_column answer
    accelerate launch --config_file configs/accelerate/deepspeed_zero2.yaml \
        recipes/seq2seq_t5.py configs/recipes/seq2seq_t5.yaml --model_name_or_path google/flan-t5-xl

Rows have an input and a target. Plain text has no targets: each line is an input, and the next line is its target.
`--tiny` does that with this repository's license and README.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable

import numpy as np
import torch
import transformers
from common import DataArguments, ModelArguments, finish, load_rows, need_column, parse, reader_of
from datasets import Dataset
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, EvalPrediction, PreTrainedTokenizerBase

import hf_ckpt
from hf_ckpt.models.tiny import byte_tokenizer, tiny_model


@dataclasses.dataclass
class PairArguments(DataArguments):
    """Which pairs of texts to train on."""

    target_column: str = dataclasses.field(default="target", metadata={"help": "Column with the text to produce."})
    prefix: str = dataclasses.field(default="", metadata={"help": "What every input starts with: 'summarize: '."})
    max_target_length: int = dataclasses.field(default=128, metadata={"help": "Longest target, in tokens."})


def load_pairs(data: PairArguments) -> Dataset:
    """Return rows with an input and a target. In plain text, the target of a line is the next line."""
    rows = load_rows(data)
    if data.train_file and reader_of(data.train_file) == "text":
        lines = list(rows[data.text_column])
        rows = Dataset.from_dict({data.text_column: lines[:-1], data.target_column: lines[1:]})
    need_column(rows, data.target_column)
    return rows


def word_overlap(tokenizer: PreTrainedTokenizerBase) -> Callable[[EvalPrediction], dict[str, float]]:
    """Return a metric: the mean F-score of words that output and target share (ROUGE-1 without stemming)."""

    def decode(ids: np.ndarray) -> list[Counter[str]]:
        texts = tokenizer.batch_decode(np.where(ids < 0, tokenizer.pad_token_id, ids), skip_special_tokens=True)
        return [Counter(text.lower().split()) for text in texts]

    def score(prediction: EvalPrediction) -> dict[str, float]:
        pairs = list(zip(decode(prediction.predictions), decode(prediction.label_ids), strict=True))
        shares = [2 * (made & wanted).total() / max(1, made.total() + wanted.total()) for made, wanted in pairs]
        return {"word_overlap": float(np.mean(shares))}

    return score


def main() -> None:
    """Train every weight, score what the model generates after each epoch, and save the model."""
    options, data, args = parse(ModelArguments, PairArguments, transformers.Seq2SeqTrainingArguments)
    transformers.set_seed(args.seed)
    if options.tiny:
        tokenizer = byte_tokenizer()
        model = tiny_model("t5", dropout=0.1)
    else:
        tokenizer = AutoTokenizer.from_pretrained(options.model_name_or_path)
        model = AutoModelForSeq2SeqLM.from_pretrained(options.model_name_or_path, dtype=torch.float32)
    # T5 averages its loss over the batch, but its signature suggests otherwise. Without this line, Trainer would not
    # divide the loss by the accumulation steps, and would multiply it by the number of processes.
    model.accepts_loss_kwargs = False
    hf_ckpt.install(model)

    def tokenize(batch: dict[str, list[str]]) -> dict[str, list]:
        inputs = [data.prefix + text for text in batch[data.text_column]]
        targets = tokenizer(text_target=batch[data.target_column], truncation=True, max_length=data.max_target_length)
        return {**tokenizer(inputs, truncation=True, max_length=data.max_length), "labels": targets["input_ids"]}

    with args.main_process_first(desc="tokenizing"):
        rows = load_pairs(data)
        if len(rows) < 2:
            raise SystemExit(
                "the data has fewer than two pairs, one to train on and one to score: a text needs 3 lines."
            )
        rows = rows.map(tokenize, batched=True, remove_columns=rows.column_names)
        parts = rows.train_test_split(test_size=min(0.1, 1000 / len(rows)), seed=args.seed)  # generating takes a while
    trainer = transformers.Seq2SeqTrainer(
        model=model,
        args=args,
        train_dataset=parts["train"],
        eval_dataset=parts["test"],
        processing_class=tokenizer,
        data_collator=transformers.DataCollatorForSeq2Seq(tokenizer, model=model),
        compute_metrics=word_overlap(tokenizer),
        callbacks=[hf_ckpt.MemoryTimeCallback()],
    )
    trainer.train()
    trainer.save_model()
    finish(trainer)


if __name__ == "__main__":
    main()
