"""The package's architecture: imports point down, and models are changed in one place.

ruff checks where clocks, versions and names of one vendor stand, and that everything public has a docstring.
"""

from __future__ import annotations

import ast
import functools
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import hf_ckpt

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "hf_ckpt"
MODULES = {path.relative_to(PACKAGE).with_suffix("").as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def calls(path: Path) -> frozenset[str]:
    """Dotted names of all calls in a file."""
    return frozenset(ast.unparse(node.func) for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call))


def those_with(found) -> dict[str, set[str]]:
    """Module -> result of `found(path)`, if it is not empty."""
    return {name: set(what) for name, path in MODULES.items() if (what := found(path))}


# --- imports --------------------------------------------------------------------------------------------------------


def imported(path: Path) -> set[str]:
    """Modules of the package that a file imports anywhere, including for types."""
    found = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.ImportFrom)]
    names = {node.module for node in found} | {f"{node.module}.{alias.name}" for node in found for alias in node.names}
    return {name.removeprefix("hf_ckpt.").replace(".", "/") for name in names} & set(MODULES)


def test_no_import_cycles_inside_rooms():
    edges = {name: imported(path) for name, path in MODULES.items()}
    assert sum(map(len, edges.values())) > 200
    done: set[str] = set()
    while remaining := edges.keys() - done:
        free = {name for name in remaining if edges[name] <= done}
        assert free, f"import cycle among {sorted(remaining)}"
        done |= free


_PURE = ("answer", "devices", "optimizers", "presets", "question", "report")
TORCH_FREE = sorted(
    name.removesuffix("/__init__")
    for name in MODULES
    if name.split("/")[0] in ("spec", "costs", "doctor")
    or name in ("__main__", "errors", "units", "logs", "console", "models/families", "training/summary")
    or name in [f"planner/{file}" for file in ("policies", "choose", "budgets", "segments")]
    or name in [f"forecast/{file}" for file in _PURE]
    or name.startswith("cli/")
)


def test_what_needs_no_torch_does_not_import_it():
    """`import hf_ckpt` and all modules that only read, decide or print do not import torch; checked in one process."""
    assert len(TORCH_FREE) > 35
    names = ["hf_ckpt", *(f"hf_ckpt.{name.replace('/', '.')}" for name in TORCH_FREE)]
    code = (
        "import importlib, sys\n"
        f"for name in {names}:\n"
        "    importlib.import_module(name)\n"
        "    heavy = {'torch', 'transformers', 'accelerate'} & set(sys.modules)\n"
        "    assert not heavy, f'{name} imports {heavy}'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_public_names_are_loaded_on_first_use():
    """`hf_ckpt.install` stays the function after the module of that name is imported, and type checkers agree."""
    names = sorted(hf_ckpt.__all__)
    assert names == sorted(hf_ckpt._HOME)
    for name in names:
        assert getattr(hf_ckpt, name) is getattr(importlib.import_module(f"hf_ckpt.{hf_ckpt._HOME[name]}"), name)
    guard = next(node for node in tree_of(PACKAGE / "__init__.py").body if isinstance(node, ast.If))
    assert sorted(alias.name for node in guard.body for alias in node.names) == names
    assert set(names) <= set(dir(hf_ckpt))
    with pytest.raises(AttributeError, match="has no attribute 'instal'"):
        hf_ckpt.instal  # noqa: B018


# --- effects --------------------------------------------------------------------------------------------------------


def test_models_are_changed_in_attach_only():
    """Only `attach` writes checkpointing flags, functions and hooks; other writers count, or undo what they do."""
    changing = those_with(lambda path: {call for call in calls(path) if call == "setattr" or ".register_" in call})
    assert {name: found for name, found in changing.items() if not name.startswith("attach/")} == {
        # of a model without weights: keys of its config, and marks at inputs of stacks and of sharded blocks
        "forecast/model": {"setattr"},
        "forecast/run": {"module.register_forward_pre_hook"},
        "training/callback": {
            "model.register_forward_pre_hook",
            "head.register_forward_hook",
        },  # count tokens and bytes
    }
    assert {name for name in changing if name.startswith("attach/")} == {
        "attach/attach",
        "attach/boundaries",
        "attach/process",
        "attach/record",
    }
    touching = those_with(lambda path: "_gradient_checkpointing_func" in path.read_text(encoding="utf-8") and {"it"})
    assert touching.keys() == {"attach/record"}
