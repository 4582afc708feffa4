"""The README, docs and CONTRIBUTING: shown code runs, links exist, and claims hold."""

import json
import re
import runpy
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.processes import ROOT, SCRIPTS, run
from helpers.sparing import sparing
from helpers.trainers import Rows
from transformers import TrainingArguments

import hf_ckpt
from hf_ckpt.cli.main import main
from hf_ckpt.forecast.devices import DEVICES
from hf_ckpt.models import families
from hf_ckpt.models.tiny import byte_tokenizer, tiny_batch, tiny_model
from hf_ckpt.spec.reading import POLICIES, READERS
from hf_ckpt.training.callback import METRICS_FILE

PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
}
README, POLICIES_PAGE, VERSIONS_PAGE = (PAGES[name] for name in ("README.md", "docs/policies.md", "docs/versions.md"))


def blocks(text: str, language: str) -> list[tuple[str, str]]:
    """Code blocks, each with CI's mark if it has one. Blocks of `sh` are only shown."""
    return re.findall(rf"(?:^<!-- ci: (\w+) -->\n)?^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def commands(text: str) -> list[str]:
    """Commands in blocks that CI does not run itself."""
    shown = [block for mark, block in blocks(text, "bash") if not mark]
    return [command for block in shown for command in block.replace("\\\n", " ").strip().splitlines()]


# First lines of answers on pages.
ANSWERS = {block.split("\n")[0] for text in PAGES.values() for _, block in blocks(text, "text")}


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```|<!--.*?-->", "", text, flags=re.DOTALL | re.MULTILINE)


def section(text: str, heading: str) -> str:
    found = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    assert found, heading
    return found


# --- shown code runs --------------------------------------------------------------------------------------------------

PYTHON = [
    pytest.param(page, code, id=f"{page}-{number}", marks=[pytest.mark.slow] * (page == "docs/planner.md"))
    for page, text in PAGES.items()
    for number, (_, code) in enumerate(blocks(text, "python"))
]
COMMANDS = list(dict.fromkeys(" ".join(command.split()) for text in PAGES.values() for command in commands(text)))
DOCTOR = [command for command in COMMANDS if command.startswith("hf-ckpt doctor")]


@pytest.mark.long
@pytest.mark.parametrize(("page", "code"), PYTHON)
def test_python_runs_as_it_stands(page, code, tmp_path, monkeypatch, capsys):
    if "activation_checkpointing=" in code and "activation_checkpointing" not in TrainingArguments.__dataclass_fields__:
        code = code.replace("activation_checkpointing", "gradient_checkpointing")
    monkeypatch.chdir(tmp_path)
    names = {"model": tiny_model("llama"), "batch": tiny_batch("llama"), "dataset": Rows(count=8, tokens=8)}
    names["tokenizer"] = byte_tokenizer()
    exec(compile(code, page, "exec"), names)
    captured = capsys.readouterr()
    shown = captured.out  # every block prints the plan
    if page == "README.md":  # the first run: the table that it ends with there, and that the budget holds
        found, printed = hf_ckpt.describe(names["model"]), blocks(README, "text")[0][1]
        assert found.measured_bytes <= 50 * 2**20 < found.without.peak_bytes
        assert found.watched.checks
        assert not found.watched.differences
        labels = [row.split()[0] for row in printed.splitlines()[1:]]
        rows = captured.err.partition("hf_ckpt: 24 steps of training\n")[2].splitlines()[: len(labels)]
        assert [row.split()[0] for row in rows] == labels
        return
    budget = re.search(r'"budget": "(\d+)GiB"', code)
    wanted = "keep 0-3" if "predict" in code else "of 4 blocks checkpointed" if budget else "full 0"
    assert wanted in shown
    if "MemoryTimeCallback" in code:
        rows = (tmp_path / "out" / METRICS_FILE).read_text().splitlines()
        assert json.loads(rows[-1])["event"] == "end"


SHORTLY = ("--use_cpu", "--max_steps", "1", "--report_to", "none")


def small(command: str, folder: Path) -> list[str | Path]:
    """The command with this Python and repository, a tiny model and a short script."""
    paths = {"your_script.py": SCRIPTS / "trainer_script.py"}
    first, *words = (
        str(paths.get(word, ROOT / word if word.startswith(("configs/", "recipes/")) else word))
        for word in shlex.split(command)
    )
    if first == "hf-ckpt":
        return [sys.executable, "-m", "hf_ckpt.cli.main", *words]
    if first == "accelerate":
        launch, option, config, *words = words
        assert (launch, option, Path(config).is_file()) == ("launch", "--config_file", True)
        one = ("--config_file", ROOT / "configs" / "accelerate" / "single.yaml", "--cpu", "--mixed_precision", "no")
        words = ["-m", "accelerate.commands.launch", *one, *words]
    return [sys.executable, *words, "--output_dir", folder, *(SHORTLY if "your_script.py" in command else ())]


@pytest.mark.slow
@sparing("command", COMMANDS, *DOCTOR, ids=[" ".join(command.split()[:2]) for command in COMMANDS])
def test_commands_run(command, tmp_path):
    done = run(small(command, tmp_path), cwd=tmp_path, timeout=300)
    refused = done.stdout.strip().startswith("Does not fit") and done.stdout.strip().splitlines()[0] in ANSWERS
    assert done.returncode == (2 if refused else 0), done.stderr[-3000:]
    if refused:
        return
    if "your_script.py" in command:
        found = json.loads((tmp_path / "found.json").read_text())
        assert found["recomputed"] == {"model.layers.0": 1, "model.layers.2": 1}
    elif "doctor" in command:
        assert "--ranks 8 --parallel fsdp2" in done.stdout
    else:
        assert ("selective" if "selective" in command else "full") in done.stdout


def test_ci_reads_the_two_commands_from_the_readme():
    marks = [(page, mark) for page, text in PAGES.items() for mark, _ in blocks(text, "bash") if mark]
    assert marks == [("README.md", "demo"), ("README.md", "test")]
    assert "for name in demo test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert [len(PYTHON) > 5, len(COMMANDS) > 12] == [True, True]


# --- links ------------------------------------------------------------------------------------------------------------


def anchors(text: str) -> set[str]:
    """Anchors of headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", without_code(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: str) -> list[str]:
    """Links of a page to files in this repository."""
    found = re.findall(r"\]\(([^)]+)\)", (ROOT / page).read_text(encoding="utf-8"))
    return [link for link in found if "://" not in link]


@pytest.mark.parametrize("page", [*PAGES, "recipes/benchmarks/README.md", "tests/README.md"])
def test_links_lead_somewhere(page):
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text(encoding="utf-8")), link
    for included in re.findall(r'^--8<-- "(.+)"$', (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE):
        assert (ROOT / included).is_file()


def test_answers_in_the_readme_are_lines_of_the_cookbook():
    """Another test compares the cookbook with the commands."""
    assert len(without_code(README).split()) <= 900, "the README is for the first minute"
    answers = re.compile(r"```bash\n(.+?)\n```\n\n```text\n(.+?)```", re.DOTALL)
    cookbook = dict(answers.findall(PAGES["docs/cookbook.md"]))
    shown = answers.findall(section(README, "Does it fit, and with which arguments?"))
    assert len(shown) == 3
    for command, answer in shown:
        assert answer.splitlines() == [line for line in cookbook[command].splitlines() if line in answer.splitlines()]


LITERATURE = section(PAGES["docs/comparison.md"], "Figures from the literature")
CLAIMS = [row for row in LITERATURE.splitlines() if "hf-ckpt plan" in row]


@pytest.mark.slow
@pytest.mark.parametrize("claim", CLAIMS, ids=[row.split()[1] for row in CLAIMS])
def test_figures_beside_a_claim_are_those_of_its_command(claim, capsys):
    (command,) = re.findall(r"`hf-ckpt (plan [^`]*)`", claim)
    assert main([*shlex.split(command), "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    none, full = rows["none"], rows["full"]
    less = 1 - full["peak_bytes"] / none["peak_bytes"]
    more = full["step_seconds"] / none["step_seconds"] - 1
    gibs = [row["peak_bytes"] / 2**30 for row in (none, full)]
    said = (
        f"{less:.0%} less at {more:.0%} more".replace("%", " %"),
        "{:.0f} GiB; 39 with `selective`, {:.0f} with `full`".format(*gibs),
        "need {:.1f} GiB".format(*gibs),
    )
    assert any(words in claim for words in said), said


# --- tables -----------------------------------------------------------------------------------------------------------


# The site puts the file of devices where the page has a comment.
HOOKS = runpy.run_path(str(ROOT / "docs" / "hooks.py"))
DEVICES_PAGE = HOOKS["on_page_markdown"](PAGES["docs/devices.md"], SimpleNamespace(repo_url=""))
KEYS = section(POLICIES_PAGE, "What you can ask for")
FAMILIES = [
    (row.name, ", ".join(row.model_types), ", ".join(f"`{stack}`" for stack, _ in row.stacks))
    for row in families.FAMILIES.values()
]


@pytest.mark.parametrize(
    ("text", "row", "names"),
    [
        (PAGES["docs/api.md"], r"^::: hf_ckpt\.(\w+)$", sorted(hf_ckpt.__all__)),
        (KEYS, r"^\| `(\w+)` \|", sorted(READERS)),
        (KEYS.partition("| `policy` | ")[2].partition("|")[0], r"`([\w+]+)`", sorted(POLICIES)),
        (section(POLICIES_PAGE, "Models"), r"^\| (\w+) \| (.+) \| (`.+`) \|$", sorted(FAMILIES)),
        (DEVICES_PAGE, r"^\| ([\w-]+) \| .+ \| (?:yes|no) \|$", sorted(DEVICES)),
    ],
    ids=["public names", "keys", "policies", "families", "devices"],
)
def test_a_page_lists_every(text, row, names):
    assert sorted(re.findall(row, text, re.MULTILINE)) == names


TOOLS = ("mkdocs-material", "mkdocstrings", "mkdocstrings-python", "import-linter", "torch_remat")
"""Packages that no user of hf_ckpt needs."""


def test_versions_are_those_of_ci_and_of_pyproject():
    """The table lists exactly the packages that CI installs, and the two oldest versions in CI's script."""
    project, script, pins = (
        (ROOT / path).read_text(encoding="utf-8") for path in ("pyproject.toml", ".ci/run", ".ci/constraints.txt")
    )
    oldest = re.findall(r"'((?:transformers|torch)==[0-9.]+)'", script)
    shown = re.findall(r"^\| ([a-z-]+) \| ([0-9.]+) \| .+ \|$", VERSIONS_PAGE, re.MULTILINE)
    installed = [pin for pin in pins.split() if pin.partition("==")[0] not in TOOLS]
    assert sorted("==".join(row) for row in shown) == sorted([*installed, *oldest])
    versions = {package: version.removesuffix(".0") for package, version in (pin.split("==") for pin in oldest)}
    assert f'"torch>={versions["torch"]}"' in project
    assert f'"transformers>={versions["transformers"]},<6"' in project
    asked = "torch {torch} or later, transformers {transformers} to 5.x, and accelerate 1.0 or later".format(**versions)
    assert [asked in " ".join(page.split()) for page in (README, VERSIONS_PAGE)] == [True, True]


# --- the diffs of CONTRIBUTING ----------------------------------------------------------------------------------------


DIFFS = dict(re.findall(r"<!-- diff: (\w+) -->\n```diff\n(.*?)^```", PAGES["CONTRIBUTING.md"], re.DOTALL | re.M))


@pytest.mark.parametrize("name", DIFFS)
def test_examples_of_contributing_are_real(name):
    """The lines of each example diff exist in the files, in this order."""
    nothing, *hunks = DIFFS[name].split("--- ")
    assert not nothing
    for hunk in hunks:
        file, *added = hunk.splitlines()
        assert added
        lines = iter((ROOT / file).read_text(encoding="utf-8").splitlines())
        for line in added:
            assert line[1:] in lines, f"{file} has no line {line[1:]!r} here"
