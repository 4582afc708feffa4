"""`python -m hf_ckpt`: the script runs as by itself, except that its models are checkpointed."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.processes import SCRIPTS, python

from hf_ckpt.__main__ import main
from hf_ckpt.logs import PLANS

NEVER_ENABLED = "the script never enabled checkpointing"
# All of these look like options of hf_ckpt, Python or an argument parser, but belong to the script.
HOSTILE = ["--spec", "nonsense", "-m", "--help", "-h", "--", "-1", "--spec=x", "policy=full", "", "a b", "@file"]

PROBE = """
import atexit, json, os, sys
import neighbour

RESULT = sys.argv[1]
atexit.register(lambda: open(RESULT + ".atexit", "w").write(neighbour.NAME))
found = {
    "argv": sys.argv, "file": __file__, "name": __name__, "package": __package__, "spec": repr(__spec__),
    "main": sys.modules["__main__"].__dict__ is globals(), "path": sys.path[0], "neighbour": neighbour.NAME,
}
with open(RESULT, "w") as out:
    json.dump(found, out)
if __name__ == "__main__":
    sys.exit(7)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder `scripts` with probe.py, which records how it was started and exits with 7, and a second module."""
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "probe.py").write_text(PROBE)
    (scripts / "neighbour.py").write_text("NAME = 'beside the script'\n")
    return tmp_path


def launched(*arguments: str | Path, cwd: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return python("-m", "hf_ckpt", *arguments, cwd=cwd, **options)


def said_of_models(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Lines that name a model."""
    return [line for line in done.stderr.splitlines() if line.startswith("hf_ckpt: LlamaForCausalLM")]


# --- the script runs as by itself -----------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.compat
def test_a_script_sees_what_it_sees_under_python(folder: Path) -> None:
    script = Path("scripts", "probe.py")
    found = []
    for start in (["-m", "hf_ckpt"], []):
        result = folder / f"result{len(found)}"
        done = python(*start, script, result, *HOSTILE, cwd=folder)
        assert done.returncode == 7, done.stderr
        assert Path(f"{result}.atexit").read_text() == "beside the script"
        seen = json.loads(result.read_text())
        assert seen["argv"].pop(1) == str(result)
        found.append(seen)
    ours, plain = found
    for seen in found:  # as typed or absolute
        assert folder / seen["argv"].pop(0) == folder / script
    assert ours["argv"] == HOSTILE
    assert ours["file"] == str(folder / script)  # absolute, to survive os.chdir
    assert ours["name"] == "__main__"
    assert ours["main"]
    assert ours["neighbour"] == "beside the script"
    # runpy uses "", Python uses None: both mean that the script is not in a package.
    assert (ours.pop("package"), plain.pop("package")) == ("", None)
    assert ours == plain


@pytest.mark.long
@pytest.mark.compat
def test_a_module_runs_with_its_arguments_and_its_package(tmp_path: Path) -> None:
    package = tmp_path / "tools"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "words.py").write_text("WORD = 'relative'\n")
    (package / "work.py").write_text(
        "import json, multiprocessing, sys\n"
        "from .words import WORD\n"
        "def double(number):\n"
        "    return 2 * number\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        doubled = pool.map(double, [1, 2])\n"
        "    json.dump([sys.argv, __package__, __spec__.name, WORD, doubled], open(sys.argv[1], 'w'))\n"
        "    sys.exit(3)\n"
    )
    found = []
    for start in (["-m", "hf_ckpt"], []):
        result = tmp_path / "result"
        done = python(*start, "-m", "tools.work", result, *HOSTILE, cwd=tmp_path)
        assert done.returncode == 3, done.stderr
        found.append(json.loads(result.read_text()))
    assert found[0] == found[1]
    assert found[0][0] == [str(package / "work.py"), str(result), *HOSTILE]
    assert found[0][1:] == ["tools", "tools.work", "relative", [2, 4]]


@pytest.mark.long
@pytest.mark.compat
def test_a_traceback_of_the_script_comes_through(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("def deeper():\n    raise ValueError('of the script')\n\ndeeper()\n")
    done = launched(script, cwd=tmp_path)
    assert done.returncode == 1
    assert f'File "{script}", line 4, in <module>' in done.stderr
    assert f'File "{script}", line 2, in deeper' in done.stderr
    assert done.stderr.rstrip().endswith("ValueError: of the script")
    assert NEVER_ENABLED not in done.stderr  # it would hide the error


# --- checkpointing --------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.compat
def test_a_trainer_script_is_hooked_by_its_own_command_line(tmp_path: Path) -> None:
    options = [
        "--output_dir",
        tmp_path,
        "--max_steps",
        "2",
        "--use_cpu",
        "--save_strategy",
        "no",
        "--report_to",
        "none",
    ]
    asked = ["--gradient_checkpointing", "--gradient_checkpointing_kwargs", '{"policy": "full", "layers": "0,-1"}']
    done = launched(SCRIPTS / "trainer_script.py", *options, *asked, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["spec"] == {"policy": "full", "layers": "0,-1"}
    assert found["steps"] == 2
    assert found["recomputed"] == {"model.layers.0": 2, "model.layers.3": 2}
    assert NEVER_ENABLED not in done.stderr
    assert said_of_models(done) == ["hf_ckpt: LlamaForCausalLM: full on blocks 0, 3 of 4"]


LOOP = """
import json, sys
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import hf_ckpt
from hf_ckpt.attach.record import installation

config = GPT2Config(n_layer=3, n_embd=16, n_head=2, vocab_size=50, n_positions=20)
torch.manual_seed(0)
model = BUILD
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
losses = []
for _ in range(4):
    ids = torch.randint(50, (2, 20))
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
recomputed = {} if installation(model) is None else hf_ckpt.describe(model).recomputed
json.dump([losses, recomputed], open("found.json", "w"))
"""


@pytest.mark.parametrize(
    "build",
    [
        "GPT2LMHeadModel(config)",
        "AutoModelForCausalLM.from_config(config)",
        "(GPT2LMHeadModel(config).save_pretrained('m'), AutoModelForCausalLM.from_pretrained('m').train())[1]",
    ],
)
def test_a_hand_written_loop_is_checkpointed_by_spec(
    in_process: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, build: str
) -> None:
    """A user-written loop that never enables checkpointing is checkpointed by `--spec`; dropout is GPT-2's default."""
    (in_process / "loop.py").write_text(LOOP.replace("BUILD", build))
    found = []
    for spec in ("none", "full"):
        assert main(["--spec", f"policy={spec}", "loop.py"]) == 0
        found.append(json.loads(Path("found.json").read_text()))
    assert found[0][0] == found[1][0]
    assert (found[0][1], found[1][1]) == ({}, {f"transformer.h.{block}": 4 for block in range(3)})
    assert "hf_ckpt: GPT2LMHeadModel: full on all 3 blocks" in capsys.readouterr().err
    assert [record for record in caplog.records if record.name.startswith("hf_ckpt")] == []


@pytest.mark.parametrize(
    ("build", "said"),
    [
        ("GPT2LMHeadModel(config).eval()", "GPT2LMHeadModel ran with gradients in eval mode"),
        ("__import__('sys').exit()", "no Hugging Face model with trainable parameters ran forward in train mode"),
    ],
)
def test_a_spec_that_no_model_got_is_told_with_advice_that_fits(
    in_process: Path, caplog: pytest.LogCaptureFixture, build: str, said: str
) -> None:
    (in_process / "loop.py").write_text(LOOP.replace("BUILD", build))
    with contextlib.suppress(SystemExit):
        main(["--spec", "policy=full", "loop.py"])
    (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("hf_ckpt")]
    assert line.startswith(f"checkpointing was enabled on no model: {said}")
    assert "--activation_checkpointing" not in line


# --- messages of hf_ckpt --------------------------------------------------------------------------------------------


@pytest.mark.compat
def test_a_bad_spec_ends_with_2_and_one_message_before_the_script_runs(folder: Path) -> None:
    spec = folder / "spec.yaml"
    spec.write_text("policy: ful\nlayerz: '0'\nuse_reentrant: 'true'\n")
    done = launched("--spec", spec, Path("scripts", "probe.py"), folder / "result", cwd=folder)
    assert done.returncode == 2
    assert not (folder / "result").exists()
    assert done.stdout == ""
    head, *problems = done.stderr.splitlines()
    assert head == f"hf_ckpt: 3 problems in the activation checkpointing spec in {spec}:"
    assert len(problems) == 3
    assert all(line.startswith("  - ") for line in problems)
    assert all(word in done.stderr for word in ("did you mean 'full'", "layers", "use_reentrant"))


@pytest.fixture
def in_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Restore what `main()` leaves in `sys`, so that tests can call it here; returns the probe's folder."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    return folder


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("no/such/file.yaml", "cannot read 'no/such/file.yaml'"),
        ("{broken", "not valid JSON"),
        ("policy=ful", "did you mean 'full'"),
        ("policy=full layers=banana", "must be a list like '0-15,-1'"),
        ("[1, 2]", ""),
        ("", ""),
    ],
)
def test_no_form_of_bad_spec_runs_the_script(
    in_process: Path, capsys: pytest.CaptureFixture[str], spec: str, said: str
) -> None:
    assert main(["--spec", spec, "scripts/probe.py", "result"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("hf_ckpt: ")
    assert said in message
    assert "Traceback" not in message
    assert not (in_process / "result").exists()


@pytest.mark.parametrize("ending", ["", "sys.exit()", "sys.exit(0)", "sys.exit(None)"])
def test_it_is_told_so_however_it_ends_well(in_process: Path, caplog: pytest.LogCaptureFixture, ending: str) -> None:
    """The hint also appears if the script ends with `sys.exit(main())`, as is common."""
    (in_process / "idle.py").write_text(f"import sys\n{ending}\n")
    try:
        code = main(["idle.py"])
    except SystemExit as ended:
        code = ended.code or 0
    assert code == 0
    assert sum(NEVER_ENABLED in record.getMessage() for record in caplog.records) == 1


ENABLING = """
import logging
from hf_ckpt.models.tiny import tiny_batch, tiny_model

logging.basicConfig(level=logging.INFO)  # prints every line that a package logs, and no line twice
model = tiny_model("llama")
for _ in range(2):
    model.gradient_checkpointing_enable(ASKED)
model(**tiny_batch("llama")).loss.backward()
model.gradient_checkpointing_enable({"policy": "none"})
"""


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"policy": "selective", "layers": "1-"}, ["selective (save linear, attention) on blocks 1-3 of 4"]),
        (
            {"policy": "budget", "budget": "1GiB"},
            ["budget 1GiB, planned in the first steps", "measuring: up to 7 steps run under `full`"],
        ),
    ],
)
def test_every_plan_of_a_model_is_told_of_in_one_line(
    in_process: Path, capsys: pytest.CaptureFixture[str], asked: dict[str, Any], said: list[str]
) -> None:
    (in_process / "enabling.py").write_text(ENABLING.replace("ASKED", json.dumps(asked)))
    assert main(["enabling.py"]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "hf_ckpt: Llama" in line]
    wanted = [*said, "everything is kept, in 4 blocks"]
    assert len(lines) == len(wanted), lines
    for line, text in zip(lines, wanted, strict=True):
        assert line.startswith(f"hf_ckpt: LlamaForCausalLM: {text}")
    assert PLANS.handlers == []


@pytest.mark.parametrize("ending", ["", "sys.exit(7)", "raise ValueError"])
def test_the_hooks_on_the_process_come_off_however_the_script_ends(in_process: Path, ending: str) -> None:
    from accelerate import Accelerator
    from transformers import PreTrainedModel

    before = {owner: dict(vars(owner)) for owner in (PreTrainedModel, Accelerator)}
    (in_process / "ends.py").write_text(
        "import sys\nfrom accelerate import Accelerator\nfrom transformers import PreTrainedModel\n"
        "for hooked in (PreTrainedModel.gradient_checkpointing_enable, Accelerator.prepare):\n"
        "    assert hooked.__code__.co_filename.endswith('attach/process.py'), hooked\n" + ending + "\n"
    )
    with contextlib.suppress(SystemExit, ValueError):
        main(["--spec", "policy=full", "ends.py"])
    assert {owner: dict(vars(owner)) for owner in before} == before


def test_help_and_import_need_no_torch(tmp_path: Path) -> None:
    done = python("-X", "importtime", "-m", "hf_ckpt", "--help", cwd=tmp_path)
    assert done.returncode == 0
    assert "usage: python -m hf_ckpt" in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "hf_ckpt" in imported
    assert {name for name in imported if name.split(".")[0] in ("torch", "transformers", "accelerate")} == set()

    code = (
        "import sys, hf_ckpt; hf_ckpt.Spec.parse('full'); hf_ckpt.Plan; dir(hf_ckpt);"
        "print(sorted({'torch', 'transformers', 'accelerate', 'numpy'} & set(sys.modules)))"
    )
    assert python("-c", code, cwd=tmp_path).stdout.strip() == "[]"


def test_arguments_are_refused_without_a_script(tmp_path: Path) -> None:
    for arguments in ([], ["--spec", "full"], ["--unknown", "script.py"]):
        done = launched(*arguments, cwd=tmp_path)
        assert done.returncode == 2
        assert "usage: python -m hf_ckpt" in done.stderr
