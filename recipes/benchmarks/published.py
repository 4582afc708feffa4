"""Predict the peaks that others have measured on GPUs and published, and write both.

python recipes/benchmarks/published.py --json published.json  # a minute; no GPU and no weights

Each row of published.csv is one measurement, and the options of `hf-ckpt plan` that ask the same. `way` is the row of
its answer that trained so: no checkpointing, `full`, or the plan. Sources: LitGPT's tutorials/resource-tables.md;
torchtune's README (commits 1814feb17 and of September 2024); benchmarks_03_2024.md of AnswerDotAI/fsdp_qlora; README of
QwenLM/Qwen; transformers' docs/source/en/perf_train_gpu_one.mdx at 0016acf.
"""

from __future__ import annotations

import argparse
import csv
import json
import tempfile
from pathlib import Path

from figures import UNITS

from hf_ckpt.cli.arguments import options_of, quiet_libraries
from hf_ckpt.cli.main import make_parser
from hf_ckpt.forecast.question import question

HERE = Path(__file__).resolve().parent
_QWEN = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": False}
CONFIGS = {
    "qwen-7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "vocab_size": 151936},
    "qwen-14b": {"hidden_size": 5120, "intermediate_size": 13696, "num_hidden_layers": 40, "vocab_size": 152064},
}
"""Models that are no presets."""
HEADS = {"qwen-7b": 32, "qwen-14b": 40}


def predicted(options: str, way: str) -> int:
    """The peak in bytes that the answer to these options gives for a way to train."""
    from hf_ckpt.forecast.forecast import Forecaster

    arguments = make_parser().parse_args(["plan", *options.split(), "--budget", "1000GiB"])
    forecaster = Forecaster(question(options_of(arguments)))
    forecast = forecaster.within(forecaster.budget)
    if way == "plan":  # the least that a plan needs
        return forecast.floor_bytes
    return next(row.peak_bytes for row in forecast.usual if row.name.startswith(way))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=HERE / "published.json")
    parser.add_argument("--only", nargs="*", help="ids of rows")
    arguments = parser.parse_args()
    quiet_libraries(to_plan=True)
    rows = []
    with tempfile.TemporaryDirectory() as folder, (HERE / "published.csv").open(encoding="utf-8") as file:
        paths = {}
        for name, keys in CONFIGS.items():
            paths[name] = Path(folder, f"{name}.json")
            heads = {"num_attention_heads": HEADS[name], "num_key_value_heads": HEADS[name]}
            paths[name].write_text(json.dumps({**_QWEN, **keys, **heads}))
        for row in csv.DictReader(file):
            if arguments.only and row["id"] not in arguments.only:
                continue
            peak_bytes = predicted(row["options"].format(**paths), row["way"])
            ratio = peak_bytes / (float(row["reported"]) * UNITS[row["unit"]])
            rows.append({**row, "predicted_bytes": peak_bytes, "ratio": round(ratio, 3)})
            print(f"{row['id']:20} {row['reported']:>6} {row['unit']:3} {ratio:6.3f}")
            arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
