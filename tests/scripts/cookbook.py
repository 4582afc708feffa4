"""Writes docs/cookbook.md: questions, the commands that answer them, and their answers.

python tests/scripts/cookbook.py  # takes a few minutes, because it runs every command
"""

from __future__ import annotations

import contextlib
import io
import json
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "cookbook.md"
QUESTIONS = {
    "QLoRA of an 8B model with 8,192 tokens on 24 GB": (
        "hf-ckpt plan llama-3.1-8b --seq 8192 --lora 16 --load-in-4bit --head auto --device 4090"
    ),
    "Full fine-tuning of a 1B model on 16 GB": "hf-ckpt plan llama-3.2-1b --batch 4 --seq 1024 --device 4080",
    "BERT-large with 512 tokens, a classifier, on 8 GB": (
        "hf-ckpt plan bert-large --batch 16 --seq 512 --architecture BertForSequenceClassification "
        "--dtype float32 --autocast bfloat16 --device 3060 --budget 7GiB"
    ),
    "LoRA of LLaVA 1.5 7B, a vision-language model, on 24 GB": (
        "hf-ckpt plan llava-1.5-7b --images 1 --batch 2 --seq 1024 --lora 16 --device 4090"
    ),
    "QLoRA of a 70B model on 80 GB": (
        "hf-ckpt plan llama-3.1-70b --seq 4096 --lora 16 --load-in-4bit --head auto --device h100"
    ),
    "DPO of a 7B model on 48 GB": (
        "hf-ckpt plan llama-2-7b --batch 2 --seq 1024 --lora 16 --trainer dpo --device a6000"
    ),
    "LoRA of an 8B model with 131,072 tokens on 80 GB": (
        "hf-ckpt plan llama-3.1-8b --seq 131072 --lora 16 --head auto --mlp auto --device h100"
    ),
    "64 sequences a step on this card: how?": "hf-ckpt plan llama-3.2-1b --global-batch 64 --seq 1024 --device 4090",
    "QLoRA of a mixture of experts, 8x7B, on 80 GB": (
        "hf-ckpt plan mixtral-8x7b --seq 2048 --lora 16 --load-in-4bit --device h100"
    ),
}
REMARKS = {
    "LoRA of LLaVA 1.5 7B, a vision-language model, on 24 GB": (
        "The plan covers both stacks. To leave the tower as it is, give [each stack a\n"
        "policy](policies.md#a-policy-for-each-stack)."
    ),
}
INTRODUCTION = """# Cookbook

Does my training fit, and what do I write? These are common questions, each with a command that answers it. The commands
need no weights and no GPU.

The answer says whether the training fits and what was assumed. Copy its training arguments into your config or
`TrainingArguments`, and the lines below them into the script that builds the model. Without `--budget`, the budget is
90 % of the card. The names `gradient_checkpointing*` work with all versions of transformers. All figures are
[predicted](planner.md); speeds are good for comparing only. To ask about another training, change the
[options](planner.md#before-training-hf-ckpt-plan).
"""


def answer_of(command: str) -> dict:
    """The result of a command with `--json`."""
    from hf_ckpt.cli.main import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()) as err:
        code = main([*shlex.split(command)[1:], "--json"])
    if not out.getvalue():
        raise RuntimeError(err.getvalue())
    found = json.loads(out.getvalue())
    assert code == (0 if found["fits"] else 2)
    return found


def section(question: str, command: str, found: dict) -> str:
    """The page's section for one question."""
    lines = [found["answer"], found["assumed"]]
    lines += [f"note: {note}" for note in found["notes"]]
    for text in found["write"].values():
        lines += ["", text]
    splits = [row for row in found["rows"] if row["name"].startswith("micro-batch of ")]
    if splits:
        lines += ["", "tokens a second by micro-batch:"]
    for row in filter(lambda row: row["fits"], splits):
        lines.append(f"  {row['name'].removeprefix('micro-batch of ')}: {row['tokens_per_second']:,.0f}")
    for row in filter(lambda row: row["options"] and row not in splits, found["rows"]):
        peak, speed = row["peak_bytes"] / 2**30, row["tokens_per_second"]
        lines += ["", f"{row['name']} ({row['options']}): {peak:.1f} GiB, {speed:,.0f} tokens a second"]
        lines.append(f"gradient_checkpointing_kwargs: {json.dumps(row['spec'])}")
    remark = f"\n{REMARKS[question]}\n" if question in REMARKS else ""
    told = "\n".join(lines)
    return f"## {question}\n\n```bash\n{command}\n```\n\n```text\n{told}\n```\n{remark}"


def main() -> None:
    sections = [section(question, command, answer_of(command)) for question, command in QUESTIONS.items()]
    PAGE.write_text("\n".join([INTRODUCTION, *sections]))


if __name__ == "__main__":
    main()
