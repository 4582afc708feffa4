"""LoRA fine-tuning of a LLaMA-family model on plain text.

Does it run? No download, no GPU, a few seconds:

    python recipes/lora_llama.py configs/recipes/lora_llama.yaml --tiny

For real, on one GPU or many:

    python recipes/lora_llama.py configs/recipes/lora_llama.yaml \
        --model_name_or_path meta-llama/Llama-3.1-8B --train_file notes.txt
    accelerate launch --config_file configs/accelerate/ddp.yaml \
        recipes/lora_llama.py configs/recipes/lora_llama.yaml --per_device_train_batch_size 4

For a folder with a GGUF file, name the file, too (`--model_name_or_path FOLDER --gguf_file FILE.gguf`).
`--load_in_4bit` quantises the base (QLoRA; needs bitsandbytes, and works with `--tiny`). The YAML holds every default;
any option of `TrainingArguments` may be in it or on the command line.
"""

from __future__ import annotations

import dataclasses
import tempfile
from typing import Any

import torch
import transformers
from common import DataArguments, ModelArguments, finish, load_rows, pack, parse
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Trainer, TrainingArguments

import hf_ckpt
from hf_ckpt.models.tiny import byte_tokenizer, tiny_model


@dataclasses.dataclass
class LoraArguments(ModelArguments):
    """The base model and its adapters."""

    gguf_file: str | None = dataclasses.field(
        default=None, metadata={"help": "Name of the GGUF file in the folder; its weights are unpacked."}
    )
    load_in_4bit: bool = dataclasses.field(default=False, metadata={"help": "Quantise the base to 4 bits (QLoRA)."})
    lora_r: int = dataclasses.field(default=16, metadata={"help": "Rank of the adapters."})
    lora_alpha: int = dataclasses.field(default=32, metadata={"help": "Their scale, times the rank."})
    lora_dropout: float = dataclasses.field(default=0.0, metadata={"help": "Dropout in front of the adapters."})
    lora_target_modules: str = dataclasses.field(default="all-linear", metadata={"help": "Layers that get adapters."})


def load_base(options: LoraArguments, dtype: torch.dtype) -> PreTrainedModel:
    """Return the frozen base, in `dtype` or in 4 bits."""
    if options.gguf_file and options.load_in_4bit:
        raise SystemExit("--gguf_file and --load_in_4bit exclude each other: give one of them.")
    how: dict[str, Any] = {"dtype": dtype}
    if options.gguf_file:
        how["gguf_file"] = options.gguf_file
        if hasattr(transformers, "GgufConfig"):  # by default, transformers 5 keeps GGUF weights packed
            how["quantization_config"] = transformers.GgufConfig(dequantize=True)
    if options.load_in_4bit:
        how["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
        )
    if not options.tiny:
        model = AutoModelForCausalLM.from_pretrained(options.model_name_or_path, **how)
    elif options.load_in_4bit:  # weights are quantised while they are loaded
        with tempfile.TemporaryDirectory() as folder:
            tiny_model("llama", hidden=64).save_pretrained(folder)
            model = AutoModelForCausalLM.from_pretrained(folder, **how)
    else:
        model = tiny_model("llama", dtype=dtype)
    if options.load_in_4bit:
        # hf_ckpt does the checkpointing. By default, this call would enable it, too, with its own settings.
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    return model


def main() -> None:
    """Train adapters and save them."""
    options, data, args = parse(LoraArguments, DataArguments, TrainingArguments)
    transformers.set_seed(args.seed)
    if options.tiny:
        tokenizer = byte_tokenizer()
    else:
        tokenizer = AutoTokenizer.from_pretrained(options.model_name_or_path, gguf_file=options.gguf_file)
    base = load_base(options, torch.bfloat16 if args.bf16 else torch.float32)
    lora = LoraConfig(
        r=options.lora_r,
        lora_alpha=options.lora_alpha,
        lora_dropout=options.lora_dropout,
        target_modules=options.lora_target_modules,
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(base, lora)
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
