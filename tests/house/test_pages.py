"""The README, docs and CONTRIBUTING: shown code runs, links exist, and claims hold."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from helpers.processes import ROOT, SCRIPTS, run
from helpers.sparing import sparing
from helpers.trainers import Rows
from transformers import TrainingArguments

import hf_ckpt
from hf_ckpt.forecast.devices import DEVICES
from hf_ckpt.models.families import families
from hf_ckpt.models.tiny import tiny_batch, tiny_model
from hf_ckpt.spec.reading import POLICIES, READERS
from hf_ckpt.training.callback import METRICS_FILE

PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
}
README, POLICIES_PAGE, COMPARISON, VERSIONS_PAGE = (
    PAGES[name] for name in ("README.md", "docs/policies.md", "docs/comparison.md", "docs/versions.md")
)
BOOK = PAGES["docs/cookbook.md"]


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


def between(text: str, mark: str) -> str:
    found = text.partition(f"<!-- {mark} -->\n")[2].partition(f"\n<!-- end of {mark} -->")[0]
    assert found, mark
    return found.strip()


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
    exec(compile(code, page, "exec"), names)
    shown = capsys.readouterr().out  # every block prints the plan
    budget = re.search(r'"budget": "(\d+)GiB"', code)
    wanted = "keep 0-3" if "predict" in code else "of 4 blocks planned" if budget else "full 0"
    assert wanted in shown
    if "MemoryTimeCallback" in code:
        rows = (tmp_path / "out" / METRICS_FILE).read_text().splitlines()
        assert json.loads(rows[-1])["event"] == "end"


SHORTLY = ("--use_cpu", "--max_steps", "1", "--report_to", "none")


def small(command: str, folder: Path) -> list[str | Path]:
    """The command with this Python and repository, a tiny model and a short script."""
    words = shlex.split(command)
    ours = [str(ROOT / word) if word.startswith(("configs/", "recipes/")) else word for word in words]
    if words[0] == "hf-ckpt":
        return [sys.executable, "-m", "hf_ckpt.cli.main", *ours[1:]]
    script = [str(SCRIPTS / "trainer_script.py") if word == "your_script.py" else word for word in ours]
    if words[:2] == ["python", "-m"]:
        return [sys.executable, *script[1:], "--output_dir", folder, *SHORTLY]
    if words[0] == "python":
        return [sys.executable, *ours[1:], "--output_dir", folder]
    assert words[:3] == ["accelerate", "launch", "--config_file"]
    assert Path(ours[3]).is_file()
    return [
        *(sys.executable, "-m", "accelerate.commands.launch"),
        *("--config_file", ROOT / "configs" / "accelerate" / "single.yaml", "--cpu", "--mixed_precision", "no"),
        *script[4:],
        *("--output_dir", folder, *SHORTLY),
    ]


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
    assert len(PYTHON) > 5
    assert len(COMMANDS) > 12
    languages = {language for text in PAGES.values() for language in re.findall(r"^```(\w+)$", text, re.MULTILINE)}
    assert languages == {"bash", "diff", "python", "sh", "text"}


# --- links ------------------------------------------------------------------------------------------------------------


def anchors(text: str) -> set[str]:
    """Anchors of headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", without_code(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: str) -> list[str]:
    """Links of a page to files in this repository."""
    found = re.findall(r"\]\(([^)]+)\)", (ROOT / page).read_text(encoding="utf-8"))
    return [link for link in found if "://" not in link]


@pytest.mark.parametrize("page", [*PAGES, "recipes/benchmarks/README.md"])
def test_links_lead_somewhere(page):
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text(encoding="utf-8")), link
    for included in re.findall(r'^--8<-- "(.+)"$', (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE):
        assert (ROOT / included).is_file()


def test_every_page_of_docs_is_in_the_navigation_and_linked():
    pages = {page for page in PAGES if page.startswith("docs/")}
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    assert sorted(f"docs/{page}" for page in re.findall(r"[\w/]+\.md", json.dumps(nav))) == sorted(pages)
    targets = [(page, link.partition("#")[0]) for page in PAGES for link in links(page)]
    leads = {os.path.relpath((ROOT / page).parent / path, ROOT) for page, path in targets if path}
    assert pages <= leads


def test_the_readme_and_the_front_page_show_the_cookbook():
    """The README's answers are lines of the cookbook, which another test compares with the commands."""
    assert len(without_code(README).split()) <= 900, "the README is for the first minute"
    asked, front = section(README, "Does it fit, and what do I write?"), PAGES["docs/index.md"]
    assert "(docs/cookbook.md)" in asked
    assert front.index("(cookbook.md)") < front.index("![")
    cookbook = {
        found[0]: found[1] for found in re.findall(r"```bash\n(.+?)\n```\n\n```text\n(.+?)```", BOOK, re.DOTALL)
    }
    shown = re.findall(r"```bash\n(.+?)\n```\n\n```text\n(.+?)```", asked, re.DOTALL)
    assert len(shown) == 3
    for command, answer in shown:
        assert answer.splitlines() == [line for line in cookbook[command].splitlines() if line in answer.splitlines()]


# --- tables -----------------------------------------------------------------------------------------------------------


def test_every_key_and_policy_is_named():
    table = section(POLICIES_PAGE, "What you can ask for")
    rows = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert sorted(rows) == sorted(READERS)
    available = table.partition("| `policy` | ")[2].partition("|")[0]
    assert [name for name in POLICIES if f"`{name}`" in available] == list(POLICIES)


def test_every_family_row_is_listed():
    table = section(POLICIES_PAGE, "Models")
    listed = re.findall(r"^\| (\w+) \| (.+) \| (`.+`) \|$", table, re.MULTILINE)
    known = {row.name: row for row in families()}  # other tests may register more
    assert [name for name, _, _ in listed] == ["llama", "gpt2", "gpt_neox", "bert", "t5"]
    for name, model_types, stacks in listed:
        assert model_types == ", ".join(known[name].model_types)
        assert stacks == ", ".join(f"`{stack}`" for stack, _ in known[name].stacks)


def test_every_device_is_listed():
    """The site puts the file of devices where the page has a comment."""
    found = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    hooks = importlib.util.module_from_spec(found)
    found.loader.exec_module(hooks)
    page = hooks.on_page_markdown(PAGES["docs/devices.md"], SimpleNamespace(repo_url=""))
    table = page.partition("\n| --device |")[2].partition("\n\n")[0]
    assert [row.split(" | ")[0] for row in table.splitlines()[2:]] == [f"| {name}" for name in DEVICES]


VERSIONS = re.findall(r"^\| ([a-z-]+) \| ([0-9.]+) \| (.+) \|$", VERSIONS_PAGE, re.MULTILINE)
CONSTRAINTS = (ROOT / ".ci" / "constraints.txt").read_text(encoding="utf-8").split()
TOOLS = ("mkdocs-material", "mkdocstrings", "mkdocstrings-python", "import-linter", "torch_remat")
"""Packages that no user of hf_ckpt needs."""


def test_versions_are_those_of_ci_and_of_pyproject():
    """The table lists exactly the packages that CI installs, and the two oldest versions in CI's script."""
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    oldest = dict(re.findall(r"'(transformers|torch)==([0-9.]+)'", script))
    shown = [f"{package}=={version}" for package, version, _ in VERSIONS]
    installed = [pin for pin in CONSTRAINTS if pin.partition("==")[0] not in TOOLS]
    assert sorted(shown) == sorted([*installed, *(f"{package}=={version}" for package, version in oldest.items())])
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'requires-python = ">=3.10"' in project
    torch_version, transformers_version = oldest["torch"].removesuffix(".0"), oldest["transformers"]
    assert f'"torch>={torch_version}"' in project
    assert f'"transformers>={transformers_version},<6"' in project
    asked = f"torch {torch_version} or later, transformers {transformers_version} to 5.x, and accelerate 1.0 or later"
    for page in (README, VERSIONS_PAGE):
        assert asked in " ".join(page.split())


def test_the_api_page_has_every_public_name():
    assert sorted(re.findall(r"^::: hf_ckpt\.(\w+)$", PAGES["docs/api.md"], re.MULTILINE)) == sorted(hf_ckpt.__all__)


# --- the diffs of CONTRIBUTING ----------------------------------------------------------------------------------------


def hunks(name: str) -> list[tuple[str, list[str]]]:
    """(file, lines with their signs) of an example diff."""
    code = re.search(r"^```diff\n(.*?)^```", between(PAGES["CONTRIBUTING.md"], f"diff: {name}"), re.DOTALL | re.M)[1]
    _, *parts = re.split(r"^--- (.+)\n", code, flags=re.MULTILINE)
    return [(file, text.splitlines()) for file, text in zip(parts[::2], parts[1::2], strict=True)]


@pytest.mark.parametrize("name", ["operation", "device", "family", "action"])
def test_examples_of_contributing_are_real(name):
    """The lines of each example diff exist in the files, in this order."""
    for file, hunk in hunks(name):
        lines = iter((ROOT / file).read_text(encoding="utf-8").splitlines())
        for line in hunk:
            assert line[1:] in lines, f"{file} has no line {line[1:]!r} here"
