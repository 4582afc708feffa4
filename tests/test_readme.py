"""What the README and the pages of docs show is run: Python as it stands, commands at small sizes or by CI itself."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hf_ckpt.callback import METRICS_FILE
from hf_ckpt.peerbench import LargestBench, PeerBench
from hf_ckpt.peerreport import budgets_as_markdown, largest_as_markdown, peers_as_markdown
from hf_ckpt.spec import _READERS, POLICIES
from hf_ckpt.tiny import tiny_batch, tiny_model

ROOT = Path(__file__).parent.parent
NAMES = ("README.md", "docs/distributed.md", "docs/engines.md", "docs/planner.md", "docs/policies.md")
PAGES = {page: (ROOT / page).read_text(encoding="utf-8") for page in NAMES}
README = PAGES["README.md"]


def shell(text: str) -> list[tuple[str, str]]:
    """Blocks of commands, each with the mark that CI finds it by, if it has one."""
    return re.findall(r"(?:^<!-- ci: (\w+) -->\n)?^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def commands(text: str) -> list[str]:
    """Commands of the blocks that CI does not run itself."""
    blocks = [block for mark, block in shell(text) if not mark]
    return [command for block in blocks for command in block.replace("\\\n", " ").strip().splitlines()]


PYTHON = [
    pytest.param(page, code, id=f"{page}-{number}")
    for page, text in PAGES.items()
    for number, code in enumerate(re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
]
COMMANDS = [
    pytest.param(command, id=f"{page}-{' '.join(shlex.split(command)[:2])}")
    for page, text in PAGES.items()
    for command in commands(text)
]


class Rows(list):
    """A dataset the README's snippets can train on."""

    def __init__(self) -> None:
        batch = tiny_batch("llama", batch=8, tokens=8)
        super().__init__({name: values[index] for name, values in batch.items()} for index in range(8))


@pytest.mark.parametrize(("page", "code"), PYTHON)
def test_python_runs_as_it_stands(page, code, tmp_path, monkeypatch, capsys):
    from transformers import TrainingArguments

    if "activation_checkpointing=" in code and "activation_checkpointing" not in TrainingArguments.__dataclass_fields__:
        code = code.replace("activation_checkpointing", "gradient_checkpointing")
    monkeypatch.chdir(tmp_path)
    model = tiny_model("llama")
    exec(compile(code, page, "exec"), {"model": model, "batch": tiny_batch("llama"), "dataset": Rows()})
    shown = capsys.readouterr().out  # the plan that `describe` prints
    assert ("within 1.00 GiB" if "budget" in code else "full 0") in shown
    if "MemoryTimeCallback" in code:
        rows = (tmp_path / "out" / METRICS_FILE).read_text().splitlines()
        assert json.loads(rows[-1])["event"] == "end"


VERSIONS = re.findall(r"^\| ([a-z-]+) \| ([0-9.]+) \| (.+) \|$", README, re.MULTILINE)
CONSTRAINTS = (ROOT / ".ci" / "constraints.txt").read_text(encoding="utf-8").split()


def test_versions_are_those_of_ci():
    """Every package of the table, and no other, is what CI installs; the oldest transformers is named by its script."""
    oldest = re.search(r"transformers==([0-9.]+)", (ROOT / ".ci" / "run").read_text(encoding="utf-8")).group(1)
    shown = [f"{package}=={version}" for package, version, _ in VERSIONS]
    assert sorted(shown) == sorted([*CONSTRAINTS, f"transformers=={oldest}"])


@pytest.mark.parametrize(("package", "version", "tests"), VERSIONS, ids=[f"{row[0]} {row[1]}" for row in VERSIONS])
def test_versions_are_tested(package, version, tests):
    files = re.findall(r"\]\((tests/\w+\.py)\)", tests)
    assert files or tests.startswith(("all tests", "the tests marked `compat`"))
    for file in files:
        text = (ROOT / file).read_text(encoding="utf-8")
        assert re.search(rf"\b{package.replace('-', '_')}\b", text), f"{file} has nothing to do with {package}"
    # In CI what is installed is what is shown; the environment of the oldest transformers runs no test of this file.
    if "CI" in os.environ and f"{package}=={version}" in CONSTRAINTS and package != "deepspeed":
        assert importlib.metadata.version(package).partition("+")[0] == version


def test_there_is_something_to_run():
    counts = {
        page: [len(re.findall("^```python", text, re.MULTILINE)), len(commands(text))] for page, text in PAGES.items()
    }
    assert counts == {
        "README.md": [3, 6],
        "docs/distributed.md": [0, 1],
        "docs/engines.md": [0, 0],
        "docs/planner.md": [1, 1],
        "docs/policies.md": [1, 1],
    }
    assert len(PYTHON) == sum(blocks for blocks, _ in counts.values())
    assert len(COMMANDS) == sum(lines for _, lines in counts.values())
    marks = [(page, mark) for page, text in PAGES.items() for mark, _ in shell(text) if mark]
    assert marks == [("README.md", "demo"), ("README.md", "test")]  # run by .ci/run, which reads them there


def test_docs_are_these_pages():
    found = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*"))
    assert found == [page for page in PAGES if page.startswith("docs/")]
    for page in found:
        assert f"]({page})" in README, page


def test_ci_reads_the_two_commands_from_the_readme():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "for name in demo test" in script
    assert "readme_command" in script


def run(words: list[str], tmp_path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)


def small(command: str, tmp_path: Path) -> list[str]:
    """The command with this Python, this repository, a tiny model and a script that takes a moment."""
    words = shlex.split(command)
    if words[0] == "hf-ckpt":
        tiny_model("llama", layers=16).save_pretrained(tmp_path / "my-model")
        ours = [str(ROOT / word) if word.startswith("configs/") else word for word in words[1:]]
        return [sys.executable, "-m", "hf_ckpt.cli", *ours]
    if words[0] == "python":
        return [sys.executable, str(ROOT / words[1]), str(ROOT / words[2]), *words[3:], "--output_dir", str(tmp_path)]
    assert words[:2] == ["accelerate", "launch"]
    script = ROOT / "tests" / "scripts" / "trainer_script.py"
    return [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        *("--config_file", str(ROOT / "configs" / "accelerate" / "single.yaml"), "--cpu", "--mixed_precision", "no"),
        *[str(script) if word == "your_script.py" else word for word in words[4:]],
        *("--output_dir", str(tmp_path), "--use_cpu", "--max_steps", "1", "--report_to", "none"),
    ]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(command, tmp_path):
    done = run(small(command, tmp_path), tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    if command.startswith("accelerate"):
        found = json.loads((tmp_path / "found.json").read_text())
        assert found["recomputed"] == {"model.layers.0": 1, "model.layers.2": 1}
    elif "doctor" in command:
        assert "hf_ckpt.install(model)" in done.stdout
        assert "llama-3.1-8b: vocab_size" in done.stdout
    else:
        assert ("selective" if "selective" in command else "full") in done.stdout


def test_every_key_and_policy_is_named():
    table = README.partition("## What you can ask for")[2].partition("## ")[0]
    for key in _READERS:
        assert f"`{key}`" in table, key
    available = table.partition("| `policy` | ")[2].partition("|")[0]
    assert [name for name in POLICIES if f"`{name}`" in available] == list(POLICIES)


def test_every_family_row_is_listed():
    from hf_ckpt.families import families

    table = README.partition("## Models")[2].partition("## ")[0]
    for family in families():
        if family.name in ("llama", "gpt2", "bert", "t5"):  # other tests may register more
            row = next(line for line in table.splitlines() if line.startswith(f"| {family.name} |"))
            assert f"| {', '.join(family.model_types)} |" in row
            assert all(f"`{stack}`" in row for stack, _ in family.stacks)


def anchors(text: str) -> set[str]:
    """Of the headings, as GitHub makes them."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


BENCHMARKS = ROOT / "recipes" / "benchmarks"


@pytest.mark.parametrize("page", [*PAGES, "recipes/benchmarks/README.md"])
def test_links_lead_somewhere(page):
    found = re.findall(r"\]\(([^)]+)\)", (ROOT / page).read_text(encoding="utf-8"))
    links = [link for link in found if "://" not in link]
    assert links
    for link in links:
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text(encoding="utf-8")), link


def test_pictures_are_shown():
    """None that is made lies about unused."""
    shown = {
        link.removeprefix("../") for text in PAGES.values() for link in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)
    }
    assert shown == {path.relative_to(ROOT).as_posix() for path in (ROOT / "recipes" / "benchmarks").glob("*.png")}


def between(text: str, mark: str) -> str:
    return text.partition(f"<!-- {mark} -->\n")[2].partition(f"\n<!-- end of {mark} -->")[0]


def test_tables_of_peers_are_those_of_their_figures():
    """`hf-ckpt bench peers --show peers-cpu.json --markdown ...` made them."""
    result = PeerBench.from_dict(json.loads((BENCHMARKS / "peers-cpu.json").read_text(encoding="utf-8")))
    page = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    assert between(page, "peers").strip() == peers_as_markdown(result).strip()
    assert between(README, "peers: figures").strip() == budgets_as_markdown(result, (0.3, 0.5, 0.7)).strip()
    assert result.ok
    assert len(result.cases) == 4
    lines = [line for case in result.cases for line in case.at_budgets()]
    assert all(line.fits for line in lines)
    assert f"was a plan in {sum(line.ahead for line in lines)} of {len(lines)} cases" in README
    rows = [row for case in result.cases for row in case.rows]
    peaks = max(abs(row.peak_error) for row in rows if row.peak_error is not None)
    times = max(abs(row.seconds_error) for row in rows if row.seconds_error is not None)
    assert f"Peaks were predicted within {peaks:.1%}, step times within 15 %".replace("%, step", " %, step") in README
    assert times <= 0.15


def test_table_of_the_largest_is_that_of_its_figures():
    names = "max-batch", "max-seq"
    results = [
        LargestBench.from_dict(json.loads((BENCHMARKS / f"{name}-cpu.json").read_text(encoding="utf-8")))
        for name in names
    ]
    page = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    assert between(page, "largest").strip() == largest_as_markdown(results)
    for name, found in zip(names, results, strict=True):
        assert f"hf-ckpt bench {name} {found.setup.model} " in page
        assert sum(row.largest is not None for row in found.rows) >= 14
        for row in found.rows:  # each is the largest: the next was tried, and is too much
            beyond = None if row.largest is None else row.tried[row.largest + 1]
            assert row.error or beyond is None or beyond > found.budget_bytes


def test_versions_are_those_of_pyproject():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'requires-python = ">=3.10"' in project
    assert '"transformers>=4.57.1,<6"' in project
    assert "Python 3.10 or later, torch 2.4 or later, transformers 4.57.1 to 5.x" in README
    assert "'transformers==4.57.1'" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
