"""Full fine-tuning of GPT-2 (or any causal language model that hf_ckpt knows) on plain text.

Does it run? No download, no GPU, a few seconds:

    python recipes/full_gpt2.py configs/recipes/full_gpt2.yaml --tiny

For real, on one GPU or many:

    python recipes/full_gpt2.py configs/recipes/full_gpt2.yaml \
        --model_name_or_path openai-community/gpt2-xl --train_file chapter1.txt chapter2.txt
    accelerate launch --config_file configs/accelerate/fsdp2.yaml \
        recipes/full_gpt2.py configs/recipes/full_gpt2.yaml --model_name_or_path openai-community/gpt2-xl

The YAML holds every default; any option of `TrainingArguments` may be in it or on the command line.
"""

from __future__ import annotations

import torch
import transformers
from common import DataArguments, ModelArguments, finish, load_rows, pack, parse
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

import hf_ckpt
from hf_ckpt.models.tiny import byte_tokenizer, tiny_model


def main() -> None:
    """Train every weight and save the model."""
    options, data, args = parse(ModelArguments, DataArguments, TrainingArguments)
    transformers.set_seed(args.seed)
    if options.tiny:
        tokenizer, model = byte_tokenizer(), tiny_model("gpt2", dropout=0.1)
    else:
        tokenizer = AutoTokenizer.from_pretrained(options.model_name_or_path)
        # Trained weights are in float32; `bf16: true` only lowers the precision of the arithmetic.
        model = AutoModelForCausalLM.from_pretrained(options.model_name_or_path, dtype=torch.float32)
    # transformers derives the loss from the class name. GPT-2's has none, so it would warn before it uses this one.
    model.loss_type = "ForCausalLM"
    hf_ckpt.install(model)
    with args.main_process_first(desc="packing the text"):
        train = pack(load_rows(data, sample_by="document"), tokenizer, data)
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=train,
        processing_class=tokenizer,
        data_collator=transformers.default_data_collator,
        callbacks=[hf_ckpt.MemoryTimeCallback()],
    )
    trainer.train()
    trainer.save_model()
    finish(trainer)


if __name__ == "__main__":
    main()
