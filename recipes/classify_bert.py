"""Text classification with BERT. A tenth of the rows is held out to measure the accuracy.

Does it run? No download, no GPU, a few seconds:

    python recipes/classify_bert.py configs/recipes/classify_bert.yaml --tiny

For real, on one GPU or many:

    python recipes/classify_bert.py configs/recipes/classify_bert.yaml \
        --model_name_or_path google-bert/bert-large-uncased --train_file reviews.csv --label_column stars
    accelerate launch --config_file configs/accelerate/ddp.yaml \
        recipes/classify_bert.py configs/recipes/classify_bert.yaml

Rows have a text and a label (a name or a whole number). Plain text files have no labels: each file is a class, and the
model predicts which file a line is from. `--tiny` does that with this repository's license and README.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
import transformers
from common import DataArguments, ModelArguments, finish, load_rows, need_column, parse, reader_of
from datasets import ClassLabel, Dataset, concatenate_datasets
from transformers import AutoModelForSequenceClassification, AutoTokenizer, EvalPrediction, Trainer, TrainingArguments

import hf_ckpt
from hf_ckpt.models.tiny import byte_tokenizer, tiny_model


@dataclasses.dataclass
class LabelledDataArguments(DataArguments):
    """Which labelled text to train on."""

    label_column: str = dataclasses.field(default="label", metadata={"help": "Column with the label."})


def load_labelled(data: LabelledDataArguments) -> Dataset:
    """Return rows whose label is a `ClassLabel`. Lines of plain text files are labelled with their file's name."""
    if data.train_file and reader_of(data.train_file) == "text":
        files = [load_rows(dataclasses.replace(data, train_file=[file])) for file in data.train_file]
        names = [[Path(file).name] * len(rows) for file, rows in zip(data.train_file, files, strict=True)]
        labelled = zip(files, names, strict=True)
        rows = concatenate_datasets([lines.add_column(data.label_column, column) for lines, column in labelled])
    else:
        rows = load_rows(data)
        need_column(rows, data.label_column)
    if not isinstance(rows.features[data.label_column], ClassLabel):
        rows = rows.class_encode_column(data.label_column)
    return rows


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Return the share of rows whose largest logit [rows, classes] is that of the label."""
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def main() -> None:
    """Train every weight, evaluate after each epoch, and save the model."""
    options, data, args = parse(ModelArguments, LabelledDataArguments, TrainingArguments)
    transformers.set_seed(args.seed)
    with args.main_process_first(desc="reading the rows"):
        rows = load_labelled(data)
    names = rows.features[data.label_column].names
    if options.tiny:
        tokenizer = byte_tokenizer()
        model = tiny_model("bert", dropout=0.1, num_labels=len(names))
    else:
        tokenizer = AutoTokenizer.from_pretrained(options.model_name_or_path)
        model = AutoModelForSequenceClassification.from_pretrained(
            options.model_name_or_path, dtype=torch.float32, id2label=dict(enumerate(names))
        )
    # BERT averages its loss over the batch, but its signature suggests otherwise. Without this line, Trainer would not
    # divide the loss by the accumulation steps, and would multiply it by the number of processes.
    model.accepts_loss_kwargs = False
    hf_ckpt.install(model)

    def tokenize(batch: dict[str, list]) -> dict[str, list]:
        tokens = tokenizer(batch[data.text_column], truncation=True, max_length=data.max_length)
        return {**tokens, "labels": batch[data.label_column]}

    with args.main_process_first(desc="tokenizing"):
        rows = rows.map(tokenize, batched=True, remove_columns=rows.column_names)
        parts = rows.train_test_split(test_size=0.1, seed=args.seed)
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=parts["train"],
        eval_dataset=parts["test"],
        processing_class=tokenizer,
        data_collator=transformers.DataCollatorWithPadding(tokenizer),
        compute_metrics=accuracy,
        callbacks=[hf_ckpt.MemoryTimeCallback()],
    )
    trainer.train()
    trainer.save_model()
    finish(trainer)


if __name__ == "__main__":
    main()
