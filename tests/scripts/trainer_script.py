"""An ordinary Trainer script with command-line options; hf_ckpt is used only in the last lines."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import HfArgumentParser, Trainer, TrainingArguments

from hf_ckpt.models.tiny import tiny_batch, tiny_model


def main() -> None:
    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    columns = tiny_batch("llama", batch=8)
    rows = [{name: value[row] for name, value in columns.items()} for row in range(8)]
    model = tiny_model("llama")
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()

    import hf_ckpt

    described = hf_ckpt.describe(model)
    found = {
        "spec": described.spec,
        "recomputed": described.recomputed,
        "steps": trainer.state.global_step,
        "wrapper": type(trainer.model_wrapped).__name__,
    }
    Path(arguments.output_dir, "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
