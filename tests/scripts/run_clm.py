"""Fine-tunes a causal language model like transformers' example run_clm.py, shortened.

It does not use hf_ckpt. All options come from the command line; it trains, evaluates, saves and resumes.
"""

from __future__ import annotations

import dataclasses
from itertools import chain

import transformers
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


@dataclasses.dataclass
class ModelArguments:
    """The model."""

    model_name_or_path: str = dataclasses.field(metadata={"help": "Folder of the model and its tokenizer."})


@dataclasses.dataclass
class DataArguments:
    """The texts."""

    train_file: str = dataclasses.field(metadata={"help": "A text file."})
    validation_file: str = dataclasses.field(metadata={"help": "Another."})
    block_size: int = dataclasses.field(default=32, metadata={"help": "Tokens of a row."})


def main() -> None:
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    transformers.set_seed(training_args.seed)
    files = {"train": data_args.train_file, "validation": data_args.validation_file}
    raw = load_dataset("text", data_files=files)
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path)

    def group_texts(examples: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        tokens = list(chain.from_iterable(tokenizer(examples["text"])["input_ids"]))
        size = data_args.block_size
        rows = [tokens[start : start + size] for start in range(0, len(tokens) - size + 1, size)]
        return {"input_ids": rows, "labels": [list(row) for row in rows]}

    with training_args.main_process_first(desc="grouping texts together"):
        data = raw.map(group_texts, batched=True, remove_columns=["text"])

    def preprocess_logits_for_metrics(logits, labels):
        return logits[0].argmax(-1) if isinstance(logits, tuple) else logits.argmax(-1)

    def compute_metrics(found):
        predictions, labels = found
        return {"accuracy": float((predictions[:, :-1] == labels[:, 1:]).mean())}

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=data["train"],
        eval_dataset=data["validation"],
        processing_class=tokenizer,
        data_collator=transformers.default_data_collator,
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=preprocess_logits_for_metrics,
    )
    if training_args.do_train:
        last = training_args.resume_from_checkpoint
        if last == "last":
            last = get_last_checkpoint(training_args.output_dir)
        result = trainer.train(resume_from_checkpoint=last)
        trainer.save_model()
        trainer.save_metrics("train", result.metrics)
        trainer.save_state()
    if training_args.do_eval:
        trainer.save_metrics("eval", trainer.evaluate())


if __name__ == "__main__":
    main()
