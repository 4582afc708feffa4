"""The commands of axolotl, with the plug-in, and of LLaMA-Factory, under `python -m hf_ckpt`: they train with the plan,
and with the same losses as without.

Each needs an environment of its own, with other releases than CI has. So they run by hand: `pytest -m programs -n0`.
"""

import json

import pytest
import yaml
from helpers.processes import python
from helpers.tables import table

from hf_ckpt.models.tiny import byte_tokenizer, tiny_model

PROGRAMS = table(__file__, "programs.yaml")


@pytest.mark.programs
@pytest.mark.parametrize("package", PROGRAMS)
def test_a_command_trains_with_the_plan(package, tmp_path):
    program = PROGRAMS[package]
    tiny_model("llama", layers=4).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    rows = [{"instruction": f"say {number}", "input": "", "output": "word " * 8} for number in range(16)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    (tmp_path / "dataset_info.json").write_text(json.dumps({"own": {"file_name": "rows.json"}}))
    losses = {}
    for name, keys, start in (("with", program["with"], program["start"]), ("without", {}, "")):
        training = {**program["training"], **keys, "output_dir": name}
        (tmp_path / "train.yaml").write_text(yaml.safe_dump(training))
        untracked = {"AXOLOTL_DO_NOT_TRACK": "1", "DO_NOT_TRACK": "1"}
        done = python(*start.split(), "-m", program["module"], "train.yaml", cwd=tmp_path, extra=untracked)
        assert done.returncode == 0, done.stderr[-3000:]
        assert (program["says"] in done.stdout + done.stderr) == (name == "with")
        *_, state = sorted((tmp_path / name).rglob("trainer_state.json"))
        logged = json.loads(state.read_text())["log_history"]
        losses[name] = [(row["loss"], row["grad_norm"]) for row in logged if "loss" in row]
    assert len(losses["with"]) == 3
    assert losses["with"] == losses["without"]
