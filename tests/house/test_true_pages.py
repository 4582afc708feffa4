"""What pages say exists: each command parses, and each flag, key, error and name is there, and errors are asserted."""

from __future__ import annotations

import argparse
import builtins
import contextlib
import dataclasses
import functools
import io
import json
import re
import shlex
from collections.abc import Iterator

import pytest
import yaml
from helpers.processes import ROOT
from helpers.tables import table
from transformers import TrainingArguments

import hf_ckpt
from hf_ckpt import errors
from hf_ckpt.cli.main import make_parser
from hf_ckpt.errors import HfCkptError
from hf_ckpt.spec.reading import READERS
from hf_ckpt.spec.spec import _FOREIGN_KEYS, Spec
from hf_ckpt.training import callback

NAMES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "tests/README.md", "hf_ckpt/SKILL.md")
FILES = [*(ROOT / name for name in NAMES), *sorted((ROOT / "docs").glob("*.md"))]
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in FILES}
OF_OTHERS = {
    "accelerate": "config_file num_processes",
    "mkdocs": "strict",
    "pip": "no-deps",
    "pytest": "backwards",
    "recipes": "tiny only",
    "torchrun": "nproc-per-node",
    "TRL": "model_name_or_path dataset_name use_peft load_in_4bit",
    "uvx": "from",
}
"""Program -> flags of it that pages show."""
OF_TORCH = {"CheckpointError"}
SHOWN = {"ok", "", "decoder", "encoder"}
"""Keys that pages show in JSON, and that are not those of a spec: of an answer, a device map, and stacks."""
FILES_IN = ("", "hf_ckpt", "tests", "recipes", "recipes/benchmarks")


@functools.cache
def flags() -> set[str]:
    """All flags of hf_ckpt's commands, of TrainingArguments, and of other programs that pages show."""
    known = {"--spec", "--oom-guard", "--help", "--version"}
    for parser in verbs().values():
        known.update(option for action in parser._actions for option in action.option_strings)
    known.update(f"--{field.name}" for field in dataclasses.fields(TrainingArguments))
    known.update(f"--{new}_checkpointing{end}" for new in ("activation", "gradient") for end in ("", "_kwargs"))
    return known | {f"--{name}" for names in OF_OTHERS.values() for name in names.split()}


@functools.cache
def verbs() -> dict[str, argparse.ArgumentParser]:
    (group,) = (action for action in make_parser()._actions if isinstance(action, argparse._SubParsersAction))
    return group.choices


def problems_of(text: str) -> list[str]:
    """What a page shows and does not exist."""
    plain = re.sub(r"\]\([^)]*\)", "]", text)  # not the targets of links
    checks = (_commands, _flags, _specs, _errors, _names, _files, _parts, _figures)
    return [problem for check in checks for problem in check(plain)]


def _commands(text: str) -> Iterator[str]:
    for block in re.findall(r"^```(?:bash|sh)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["hf-ckpt"] and not _parses(words[1:]):
                yield f"command: {line}"
    for code in re.findall(r"`hf-ckpt (\w+)", text):
        if code not in verbs():
            yield f"verb: {code}"


def _parses(words: list[str]) -> bool:
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        try:
            make_parser().parse_args(words)
        except SystemExit as ended:
            return not ended.code  # 0 for --help
    return True


def _flags(text: str) -> Iterator[str]:
    for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", text):
        if flag not in flags():
            yield f"flag: {flag}"


def _specs(text: str) -> Iterator[str]:
    """Dicts in code that are JSON, and single keys with their values: those of a spec must be accepted."""
    whole = re.findall(r"`(\{[^`]*\})`", text)
    single = [f"{{{code}}}" for code in re.findall(r'`("\w+": [^`]*)`', text)]
    for code in [*whole, *single]:
        try:
            found = json.loads(" ".join(code.split()))
        except ValueError:  # it has a placeholder
            continue
        unknown = found.keys() - READERS.keys() - _FOREIGN_KEYS.keys() - SHOWN
        if unknown:
            yield f"key: {', '.join(sorted(unknown))}"
        elif found.keys() <= READERS.keys() - {"plan"}:
            try:
                Spec.parse(found)
            except HfCkptError as error:
                yield f"spec: {code}: {error}"


def _errors(text: str) -> Iterator[str]:
    for name in re.findall(r"\b[A-Z]\w*Error\b", text):
        if not (hasattr(errors, name) or hasattr(builtins, name) or name in OF_TORCH):
            yield f"error: {name}"


def _names(text: str) -> Iterator[str]:
    for name in re.findall(r"(?<![\w/.])hf_ckpt\.(\w+)(?!\w*\.\w)", text):
        is_module = (ROOT / "hf_ckpt" / name).exists() or (ROOT / "hf_ckpt" / f"{name}.py").exists()
        if not (is_module or name in hf_ckpt.__all__ or name in ("json", "yaml")):
            yield f"name: hf_ckpt.{name}"


def _files(text: str) -> Iterator[str]:
    for path in re.findall(r"`((?:\w[\w-]*/)+[\w-]+\.(?:py|csv|yaml|md))`", text):
        if not any((ROOT / folder / path).exists() for folder in FILES_IN):
            yield f"file: {path}"


def _parts(text: str) -> Iterator[str]:
    """Modules in drawings, and what is said to be in them: `costs/steps.py  Step: ...`, or `costs/steps.Step`."""
    rooms = "|".join(path.name for path in (ROOT / "hf_ckpt").iterdir() if path.is_dir())
    module = rf"(?<![\w/])((?:{rooms})(?:/[a-z]\w*)+)"
    for block in re.findall(r"^```text\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        for path, in_file, attribute in re.findall(rf"{module}(?:\.py\s+([\w.]+):|\.(?!py\b)(\w+))?", block):
            file = ROOT / "hf_ckpt" / f"{path}.py"
            names = (in_file or attribute).split(".")
            code = file.read_text(encoding="utf-8") if file.exists() else ""
            if not code or any(name and not re.search(rf"\b(?:class|def) {name}\b", code) for name in names):
                yield f"part: {path} {in_file or attribute}".rstrip()


def _figures(text: str) -> Iterator[str]:
    for key in re.findall(r"`((?:memory|time)/\w+)`", text):
        if f"`{key}`" not in (callback.__doc__ or ""):
            yield f"figure: {key}"


def test_coding_agents_can_read_the_head_of_their_page():
    head = yaml.safe_load(PAGES["hf_ckpt/SKILL.md"].split("---\n")[1])
    assert (sorted(head), head["name"]) == (["description", "name"], "hf-ckpt")


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_shows_exists(page):
    assert not problems_of(PAGES[page])


PLANTED = {
    "a false flag": ("Use `--chunk-head` for this.", "flag: --chunk-head"),
    "a false command": ("```bash\nhf-ckpt plan gpt2 --batch many\n```\n", "command: hf-ckpt plan gpt2 --batch many"),
    "a false verb": ("`hf-ckpt fit` says it.", "verb: fit"),
    "a false key": ('`{"policy": "full", "chunks": 4}` does it.', "key: chunks"),
    "a false value": ('Set `"on_mismatch": "ignore"`.', "spec: "),
    "a false error": ("It raises a `MemoryShortageError`.", "error: MemoryShortageError"),
    "a false name": ("Call `hf_ckpt.estimate(model)`.", "name: hf_ckpt.estimate"),
    "a false file": ("See `engines/tilings.py`.", "file: engines/tilings.py"),
    "a false module": ("```text\n--> costs/ladder: a plan\n```\n", "part: costs/ladder"),
    "a false class": ("```text\ncosts/steps.py  Rung: a call\n```\n", "part: costs/steps Rung"),
    "a false function": ("```text\nattach/enable.climb ---> engines/\n```\n", "part: attach/enable climb"),
    "a false figure": ("The log has `memory/mean_gib`.", "figure: memory/mean_gib"),
}


@pytest.mark.parametrize("kind", PLANTED)
def test_what_does_not_exist_is_found(kind):
    planted, problem = PLANTED[kind]
    (found,) = problems_of(f"{PAGES['README.md']}\n{planted}\n")
    assert found.startswith(problem)


# --- promises about errors --------------------------------------------------------------------------------------------

PROMISES = table(__file__, "promises.yaml")
SAYS = re.compile(r"\brefuse[sd]?\b|\braises\b|\bends the run\b|(?<!without )\ban error\b|`\w+Error`")


def promises(text: str) -> list[str]:
    """The sentences of a page that say what is refused, or raises an error."""
    text = re.sub(r"^```.*?^```|<!--.*?-->|^:::.*?$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"\s*\n(?![\n|#-])\s*", " ", text)
    return [sentence for sentence in re.split(r"(?<=[.;])\s|\n", text) if SAYS.search(sentence)]


@pytest.mark.parametrize("page", [page for page in PAGES if page not in ("tests/README.md", "docs/api.md")])
def test_each_promise_about_errors_has_a_test(page):
    without = [text for text in promises(PAGES[page]) if not any(words in text for words, _, _ in PROMISES)]
    assert not without


@pytest.mark.parametrize(("words", "file", "asserted"), PROMISES)
def test_the_test_of_a_promise_asserts_it(words, file, asserted):
    assert any(words in text for page in PAGES.values() for text in promises(page)), "no page promises it any more"
    assert asserted in (ROOT / "tests" / file).read_text(encoding="utf-8")
