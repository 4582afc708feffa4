"""What linters cannot check: modules that need no torch do not import it, and models are changed in one place.

`lint-imports` checks that imports point down, without cycles. ruff checks where clocks, versions and names of one
vendor stand, and that everything public has a docstring.
"""

import importlib
import re
from pathlib import Path

import pytest
from helpers.processes import python

import hf_ckpt

PACKAGE = Path(hf_ckpt.__file__).parent
TEXTS = {
    path.relative_to(PACKAGE).with_suffix("").as_posix(): path.read_text(encoding="utf-8")
    for path in sorted(PACKAGE.rglob("*.py"))
}
TORCH_FREE = (
    *("__main__", "console", "errors", "logs", "units"),
    *("cli/.*", "costs/.*", "doctor/.*", "models/families", "planner/.*", "spec/.*", "training/summary"),
    "forecast/(devices|optimizers|question|result|sizes|ways)",
)


def test_what_needs_no_torch_does_not_import_it():
    """`import hf_ckpt` and all modules that only read, decide or print do not import torch; checked in one process."""
    found = [[name for name in TEXTS if re.fullmatch(pattern, name)] for pattern in TORCH_FREE]
    assert all(found), "a pattern of modules that are gone"
    names = [name.removesuffix("/__init__").replace("/", ".") for names in found for name in names]
    code = (
        "import importlib, sys\n"
        f"for name in {['hf_ckpt', *(f'hf_ckpt.{name}' for name in names)]}:\n"
        "    importlib.import_module(name)\n"
        "    heavy = {'torch', 'transformers', 'accelerate'} & set(sys.modules)\n"
        "    assert not heavy, f'{name} imports {heavy}'\n"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


def test_public_names_are_loaded_on_first_use():
    """`hf_ckpt.install` stays the function after the module of that name is imported."""
    importlib.import_module("hf_ckpt.training.install")
    for name in hf_ckpt.__all__:
        assert name in dir(hf_ckpt)
        assert getattr(hf_ckpt, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'instal'"):
        hf_ckpt.instal  # noqa: B018


def test_models_are_changed_in_attach_only():
    """Only `attach` writes checkpointing flags, functions and hooks of a user's model; `compat` has their names.

    Outside of it: keys of a config, the inputs of a model without weights, and counts of tokens and bytes.
    """
    for code, files in (
        (r"_gradient_checkpointing_func", ["compat/transformers"]),
        (r"\bsetattr\(", ["attach/switches", "forecast/model"]),
        (r"\.register_\w*hook\(", ["attach/boundaries", "attach/puts"]),
    ):
        assert [name for name, text in TEXTS.items() if re.search(code, text)] == files


def test_every_known_trap_has_a_test():
    tests = Path(__file__).parent.parent
    rows = re.findall(r"^\| (\d+) \|", (tests / "TRAPS.md").read_text(encoding="utf-8"), re.MULTILINE)
    marks = [re.findall(r"^@pytest\.mark\.trap\((.+)\)$", path.read_text(), re.M) for path in tests.rglob("test_*.py")]
    assert {number for mark in marks for found in mark for number in found.split(", ")} == set(rows)
