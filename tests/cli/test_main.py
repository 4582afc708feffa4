"""`python -m hf_ckpt`: the script runs as by itself, except that its models are checkpointed."""

import contextlib
import json
import sys
from pathlib import Path

import pytest
import torch
from helpers.processes import python
from helpers.tables import keyed, table
from transformers import PreTrainedModel

from hf_ckpt.__main__ import main
from hf_ckpt.training.out_of_memory import REPORT_FILE

# All of these look like options of hf_ckpt, Python or an argument parser, but belong to the script.
HOSTILE = ["--spec", "nonsense", "-m", "--help", "-h", "--", "-1", "--spec=x", "policy=full", "", "a b", "@file"]
PROBE = """
import json, os, sys
from WHERE import NAME
facts = {"argv": sys.argv, "name": __name__, "main": sys.modules["__main__"].__dict__ is globals(), "beside": NAME}
facts |= {"package": __package__ or "", "file": __file__, "spec": str(__spec__ and __spec__.name)}
facts |= {"loader": type(__loader__).__name__, "first": sys.path[0], "here": os.getcwd() in sys.path}
json.dump(facts, open(sys.argv[2], "w"))
sys.exit(7)
"""


def told(caplog):
    return [record.getMessage() for record in caplog.records if record.name.startswith("hf_ckpt")]


@pytest.fixture
def in_process(tmp_path, monkeypatch):
    """Restore what `main()` leaves in `sys`, so that tests can call it here; returns the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


@pytest.mark.long
@pytest.mark.compat
@pytest.mark.parametrize("script", ["scripts/probe.py", "link.py", "-- scripts/probe.py", "scripts", "-m tools.probe"])
def test_a_script_sees_what_it_sees_under_python(tmp_path, script):
    """A script, a link to it, a folder, or a module of a package records how it was started and exits with 7."""
    is_module = script.startswith("-m")
    folder = tmp_path / ("tools" if is_module else "scripts")
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    for name in ("probe.py", "__main__.py"):
        (folder / name).write_text(PROBE.replace("WHERE", ".neighbour" if is_module else "neighbour"))
    (tmp_path / "link.py").symlink_to(folder / "probe.py")
    (tmp_path / "datasets").mkdir()  # hides the package of this name from whoever has the current folder in its path
    (tmp_path / "datasets" / "__init__.py").write_text("raise ImportError")
    (folder / "neighbour.py").write_text("NAME = 'beside the script'\n")
    found = []
    for start in (["-m", "hf_ckpt"], []):
        done = python(*start, *script.split(), "--", "result", *HOSTILE, cwd=tmp_path)
        assert done.returncode == 7, done.stderr
        found.append(json.loads((tmp_path / "result").read_text()))
    if script == "scripts":
        assert found[0]["argv"].pop(0) == str(tmp_path / found[1]["argv"].pop(0))  # `runpy` makes it absolute
    assert found[0] == found[1]
    assert found[0]["argv"][-2 - len(HOSTILE) :] == ["--", "result", *HOSTILE]
    assert found[0]["main"]


LOOP = """
import json
from transformers import AutoModelForCausalLM
import hf_ckpt
from hf_ckpt.models.tiny import tiny_batch, tiny_model
tiny_model("gpt2", dropout=0.1).save_pretrained("m")
model = AutoModelForCausalLM.from_pretrained("m").MODE()
model(**tiny_batch("gpt2"), use_cache=False).loss.backward()
json.dump(hf_ckpt.describe(model).recomputed if model.training else {}, open("found.json", "w"))
"""


@pytest.mark.compat
def test_a_script_that_never_enables_checkpointing_is_checkpointed_by_spec(in_process, caplog):
    (in_process / "loop.py").write_text(LOOP.replace("MODE", "train"))
    assert main(["--spec", "policy=full", "loop.py"]) == 0
    assert json.loads(Path("found.json").read_text()) == {f"transformer.h.{block}": 1 for block in range(4)}
    assert told(caplog) == []


@pytest.mark.parametrize("script", [LOOP.replace("MODE", "eval"), "raise SystemExit"], ids=["eval", "no model"])
def test_a_spec_that_no_model_got_is_told_with_advice(in_process, caplog, script):
    (in_process / "loop.py").write_text(script)
    with contextlib.suppress(SystemExit):
        main(["--spec", "policy=full", "loop.py"])
    (line,) = told(caplog)
    assert line.startswith(
        "hf_ckpt: checkpointing was enabled on no model: no Hugging Face model with trainable parameters"
    )


@pytest.mark.parametrize("ending", ["", "sys.exit()", "sys.exit(0)", "sys.exit(7)", "raise ValueError"])
def test_a_script_that_enables_nothing_is_told_so_and_the_hooks_come_off(in_process, caplog, ending):
    before = dict(vars(PreTrainedModel))
    (in_process / "ends.py").write_text(
        "import sys\nfrom transformers import PreTrainedModel\nhooked = PreTrainedModel.gradient_checkpointing_enable\n"
        "assert hooked.__code__.co_filename.endswith('attach/process.py'), hooked\n" + ending + "\n"
    )
    with contextlib.suppress(SystemExit, ValueError):
        main(["ends.py"])
    assert dict(vars(PreTrainedModel)) == before
    times = sum("the script has not enabled checkpointing" in message for message in told(caplog))
    assert times == (ending not in ("sys.exit(7)", "raise ValueError"))


@pytest.mark.parametrize("fails", ["model.model.layers[1].mlp.up_proj", "torch.nn.Identity()"])
def test_memory_that_runs_out_without_a_trainer_is_reported(in_process, caplog, fails):
    """With the module of the model that ran, if one did."""
    script = LOOP.partition("tiny_model(")[0] + (
        "from helpers.failing import run_out\nimport torch\n"
        f"model = tiny_model('llama').train()\nfailing = {fails}\nfailing.register_forward_pre_hook(run_out)\n"
        "model(**tiny_batch('llama'), use_cache=False)\nfailing(torch.ones(3))\n"
    )
    (in_process / "loop.py").write_text(script)
    with pytest.raises(torch.OutOfMemoryError):
        main(["loop.py"])
    (report,) = [text for text in told(caplog) if "out of memory" in text]
    place = " in the forward of model.layers.1.mlp.up_proj" if "mlp" in fails else ""
    assert report.startswith(f"hf_ckpt: out of memory{place}: OutOfMemoryError: ")
    assert "no plan of hf_ckpt is enabled" in report


TRAINS = """
from pathlib import Path
import transformers
from helpers.failing import Failing
from helpers.trainers import FLAG, trainer
from hf_ckpt.models.tiny import tiny_model
kind = type("Failing", (Failing,), {"at": [2]})
flags = {FLAG: OPTIONS is not None, f"{FLAG}_kwargs": OPTIONS}
trainer(Path("out"), tiny_model("llama"), kind=kind, callbacks=[transformers.PrinterCallback()], **flags).train()
"""
REPLACED = "hf_ckpt: options of the script change --spec: {'policy': 'selective'}, not {'policy': 'full'}."


@pytest.mark.parametrize(*keyed(table(__file__, "trainer.yaml"), "options", "spec", "unused", "replaced"))
def test_a_trainer_is_told_in_its_first_step(in_process, caplog, capsys, options, spec, unused, replaced):
    """That nothing was enabled, and which spec wins. The third step runs out of memory, which is reported."""
    (in_process / "trains.py").write_text(TRAINS.replace("OPTIONS", repr(options)))
    with pytest.raises(torch.OutOfMemoryError):
        main([*(() if spec is None else ("--spec", spec)), "trains.py"])
    assert sum("the script has not enabled checkpointing" in message for message in told(caplog)) == unused
    assert capsys.readouterr().err.count(REPLACED) == replaced
    assert "out of memory in the forward" in Path("out", REPORT_FILE).read_text()
