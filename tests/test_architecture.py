"""One way through the modules: imports only point upstream, effects and clocks stay where they belong."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "hf_ckpt"
MODULES = {path.relative_to(PACKAGE).with_suffix("").as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}

# Module -> what it may import of hf_ckpt, at module level or inside functions.
ALLOWED = {
    "errors": set(),
    "units": {"errors"},
    "compat": {"errors"},
    "spec": {"errors", "units", "plan"},
    "plan": {"errors", "units"},
    "families": {"errors", "plan", "compat"},
    "planner": {"errors", "spec", "plan"},
    "devices": {"errors"},
    "timeline": {"plan"},
    "solver": {"timeline"},
    "moves": {"plan", "timeline"},
    "shards": {"timeline"},
    "budgets": {"errors", "units", "plan", "timeline", "solver", "moves"},
    "blueprint": {"errors", "plan", "families", "compat"},
    "cost": {"errors", "plan", "families", "compat", "blueprint", "devices", "measure", "timeline"},
    "variants": {"families", "blueprint", "compat", "cost", "devices", "moves", "plan", "timeline"},
    "setups": {"errors", "families", "compat", "blueprint", "cost"},
    "autoplan": {
        "errors",
        "units",
        "spec",
        "plan",
        "compat",
        "families",
        "blueprint",
        "budgets",
        "cost",
        "devices",
        "measure",
        "setups",
        "shards",
        "timeline",
        "variants",
    },
    "engines/full": {"errors", "plan", "compat"},
    "engines/recipes": set(),
    "engines/values": {"errors", "compat"},
    "engines/chunks": {"errors", "compat"},
    "engines/head": {"errors", "compat", "engines.chunks"},
    "engines/offload": {"errors", "units", "compat", "engines.full", "engines.values"},
    "engines/sac": {"errors", "compat", "engines.full"},
    "engines/segments": {"errors", "compat", "engines.full"},
    "engines/rebuild": {
        "errors",
        "compat",
        "engines.full",
        "engines.offload",
        "engines.recipes",
        "engines.values",
        "engines.sac",
    },
    "install": {
        "errors",
        "spec",
        "plan",
        "planner",
        "families",
        "units",
        "engines.full",
        "engines.head",
        "engines.offload",
        "engines.rebuild",
        "engines.sac",
        "engines.segments",
        "autoplan",
        "compat",
    },
    "ranks": {"errors", "compat"},
    "measure": {"errors", "plan", "compat"},
    "verify": {"errors", "spec", "plan", "families", "install", "compat"},
    "report": {"errors", "plan", "units"},
    "peerreport": {"report", "units"},
    "workers": {"errors"},
    "peers": {"errors", "plan", "compat", "families", "install", "engines.sac"},
    "facts": {"errors", "units", "spec", "plan", "devices", "families", "setups"},
    "doctor": {"errors", "units", "spec", "plan", "planner", "facts"},
}
EVERYTHING_ABOVE = {
    "bench",
    "callback",
    "foresight",
    "headbench",
    "oom",
    "peerbench",
    "planbench",
    "timings",
    "cli",
    "__main__",
    "__init__",
    "demo",
    "checks",
    "tiny",
    "engines/__init__",
}
TORCH_FREE = (
    *("errors", "units", "spec", "plan", "planner", "report", "peerreport", "cli", "__main__"),
    *("devices", "timeline", "solver", "moves", "shards", "budgets", "facts", "doctor"),
)


def imports(path: Path) -> list[tuple[str, bool]]:
    """(module, imported for types only) of every import in a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        node
        for guard in ast.walk(tree)
        if isinstance(guard, ast.If) and getattr(guard.test, "id", "") == "TYPE_CHECKING"
        for node in ast.walk(guard)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node in typing_only) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"hf_ckpt.{alias.name}" for alias in node.names] if node.module == "hf_ckpt" else [node.module]
            found += [(name, node in typing_only) for name in names]
    return found


def test_every_module_has_its_place():
    assert set(MODULES) == set(ALLOWED) | EVERYTHING_ABOVE


@pytest.mark.parametrize("name", ALLOWED)
def test_imports_point_upstream(name):
    ours = {
        module.removeprefix("hf_ckpt.")
        for module, typing_only in imports(MODULES[name])
        if module.startswith("hf_ckpt.") and not typing_only
    }
    assert ours <= ALLOWED[name], f"{name} must not import {sorted(ours - ALLOWED[name])}"


def test_no_import_cycles():
    edges = {
        name: {
            module.removeprefix("hf_ckpt.").replace(".", "/")
            for module, typing_only in imports(path)
            if module.startswith("hf_ckpt.") and not typing_only
        }
        & set(MODULES)
        for name, path in MODULES.items()
        if name != "__init__"
    }
    done: set[str] = set()
    while remaining := {name for name in edges if name not in done}:
        free = {name for name in remaining if edges[name] <= done}
        assert free, f"import cycle among {sorted(remaining)}"
        done |= free


@pytest.mark.parametrize("name", ["hf_ckpt", *(f"hf_ckpt.{name}" for name in TORCH_FREE)])
def test_torch_free_modules_do_not_import_torch(name):
    code = f"import sys, {name}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def calls(path: Path) -> set[str]:
    """Dotted text of everything that is called in a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}


@pytest.mark.parametrize("name", [name for name in MODULES if name != "measure"])
def test_clocks_and_allocators_are_read_in_measure_only(name):
    forbidden = ("time.perf_counter", "time.time", "time.monotonic")
    assert not [call for call in calls(MODULES[name]) if call in forbidden]
    assert not [call for call in calls(MODULES[name]) if "memory_allocated" in call or "memory_reserved" in call]


@pytest.mark.parametrize("name", [name for name in MODULES if name not in ("install", "compat")])
def test_models_are_changed_in_install_only(name):
    """No other module writes the flags, the function or the hooks of checkpointing."""
    source = MODULES[name].read_text(encoding="utf-8")
    assert "_gradient_checkpointing_func" not in source
    changed = {call for call in calls(MODULES[name]) if call == "setattr" or ".register_" in call}
    counters = {
        "callback": {"model.register_forward_pre_hook", "head.register_forward_hook"},  # tokens, the head's output
        # where the parts of a traced step begin, on a copy without weights
        "cost": {
            "module.register_forward_pre_hook",
            "module.register_forward_hook",
            "parameter.register_post_accumulate_grad_hook",
            "tensor.register_hook",
        },
        "measure": {"block.register_forward_pre_hook", "block.register_forward_hook"},  # bytes made inside blocks
    }
    assert changed == counters.get(name, set())


@pytest.mark.parametrize("name", [name for name in MODULES if name not in ("compat", "__init__", "cli")])
def test_versions_are_tested_in_compat_only(name):
    source = MODULES[name].read_text(encoding="utf-8")
    assert "__version__" not in source
    assert "packaging" not in source
