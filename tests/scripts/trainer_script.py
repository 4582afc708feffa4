"""An ordinary Trainer script with command-line options: it trains, evaluates, saves and resumes.

hf_ckpt is used only in the last lines, to write what was recomputed.
"""

from __future__ import annotations

import json
from pathlib import Path

from transformers import HfArgumentParser, Trainer, TrainingArguments

from hf_ckpt.models.tiny import tiny_batch, tiny_model


def main() -> None:
    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    columns = tiny_batch("llama", batch=8)
    rows = [{name: value[row] for name, value in columns.items()} for row in range(8)]
    model = tiny_model("llama", dropout=0.1)
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows[:4])
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)

    import hf_ckpt
    from hf_ckpt.attach.record import installation

    if installation(model) is not None:
        described = hf_ckpt.describe(model)
        found = {"spec": described.spec, "recomputed": described.recomputed}
        Path(arguments.output_dir, "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
