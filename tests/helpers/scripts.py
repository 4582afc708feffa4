"""Run scripts as users do."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from helpers.processes import python

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.py") if path.stem not in ("common", "demo"))

# Texts allowed on stderr, and the upstream reason for each.
ALLOWED = {
    "`is_gradient_checkpointing` is deprecated": "peft 0.21 reads a property that transformers 5.23 renamed",
    "Could not find a config file in": "peft looks for the base's config.json, which a folder with a GGUF file lacks",
    "default legacy behaviour of the": "transformers 4 says it of every LLaMA tokenizer in a GGUF file",
    "The tokenizer has new PAD/BOS/EOS tokens": "transformers 4 reads other special tokens from GGUF than its config",
    "Failed to load CPU gemm_4bit_forward": "bitsandbytes, which PEFT imports, misses a package of kernels",
    "  warnings.warn(": "the source line that Python prints below a warning",
}
PROGRESS = re.compile(r"[^\r\n]*?\[[^\[\]\r\n]*(/s|/it)\]")
COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
SUMMARY = re.compile(r"^hf_ckpt: (after \d+ steps: |\w+: )")


def launch(*command: str | Path, cache: Path, **environment: str) -> subprocess.CompletedProcess:
    """Run Python with these arguments in the repository root, offline, with a data cache of its own."""
    extra = {"HF_HOME": str(cache), "PYTHONUTF8": "1", **environment}
    return python(*command, cwd=ROOT, timeout=600, extra=extra)


def complaints(stderr: str) -> list[str]:
    """Lines of stderr except progress bars, tables of hf_ckpt and allowed texts. Not all warnings say "warning"."""
    lines = re.split(r"[\r\n]+", PROGRESS.sub("", COLOURS.sub("", stderr)))
    return [line for line in lines if line.strip() and not SUMMARY.search(line) and not any(a in line for a in ALLOWED)]


def metrics(out: Path) -> list[dict]:
    """Rows of the callback's metrics file."""
    return [json.loads(line) for line in (out / "hf_ckpt_metrics.jsonl").read_text().splitlines()]
