"""Writes docs/cookbook.md: questions, the commands that answer them, and their answers.

python tests/scripts/cookbook.py  # takes a few minutes, because it runs every command
"""

from __future__ import annotations

import contextlib
import io
import json
import shlex
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "cookbook.md"
TEXTS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
QUESTIONS = TEXTS["questions"]
USUAL = ("compiled blocks are not predicted", "with what torch's allocator may add")
"""Notes of most answers, which only the first one shows."""


def answer_of(command: str) -> dict:
    """The result of a command with `--json`."""
    from hf_ckpt.cli.main import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()) as err:
        code = main([*shlex.split(command)[1:], "--json"])
    if not out.getvalue():
        raise RuntimeError(err.getvalue())
    answer = json.loads(out.getvalue())
    assert code == (0 if answer["fits"] else 2)
    return answer


def section(question: str, command: str, answer: dict) -> str:
    """The page's section for one question."""
    lines = [answer["answer"], answer["assumed"]]
    usual = () if question == next(iter(QUESTIONS)) else USUAL
    lines += [f"note: {note}" for note in answer["notes"] if not note.startswith(usual)]
    for text in answer["write"].values():
        lines += ["", text]
    splits = [row for row in answer["rows"] if row["name"].startswith("micro-batch of ")]
    if splits:
        lines += ["", "tokens per second by micro-batch:"]
    for row in filter(lambda row: row["fits"], splits):
        lines.append(f"  {row['name'].removeprefix('micro-batch of ')}: {row['tokens_per_second']:,.0f}")
    for row in filter(lambda row: row["options"] and row not in splits, answer["rows"]):
        peak = row["peak_bytes"] / 2**30
        speed = row["tokens_per_second"]
        lines += ["", f"{row['name']} ({row['options']}): {peak:.1f} GiB, {speed:,.0f} tokens per second"]
        lines.append(f"gradient_checkpointing_kwargs: {json.dumps(row['spec'])}")
    text = "\n".join(lines)
    remark = f"\n{TEXTS['remarks'][question]}\n" if question in TEXTS["remarks"] else ""
    return f"## {question}\n\n```bash\n{command}\n```\n\n```text\n{text}\n```\n{remark}"


def main() -> None:
    sections = [section(question, command, answer_of(command)) for question, command in QUESTIONS.items()]
    PAGE.write_text("\n".join([TEXTS["introduction"], *sections]))


if __name__ == "__main__":
    main()
