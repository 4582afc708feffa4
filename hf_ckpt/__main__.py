"""Run an unmodified training script with hf_ckpt hooked into every Hugging Face model of the process.

python -m hf_ckpt [--spec SPEC] [--oom-guard] script.py args...
accelerate launch -m hf_ckpt [--spec SPEC] [--oom-guard] script.py args...
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.machinery
import logging
import os
import pkgutil
import runpy
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

_SAFE_PATH = getattr(sys.flags, "safe_path", False)
"""Whether Python puts no folder in front of `sys.path` (`python -P`, from 3.11 on)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Hook hf_ckpt into the process, run the script as `__main__`, and remove the hooks.

    Returns 0 when the script has ended, and 2 if there is no such script or the spec is invalid. Exceptions of the
    script pass through, including a `SystemExit` with a code.
    """
    arguments = _parse(argv)
    script = Path(arguments.script)
    if not (arguments.module or script.is_file() or (script / "__main__.py").is_file()):
        print(f"hf_ckpt: there is no script {arguments.script!r}", file=sys.stderr)
        return 2
    from hf_ckpt.errors import HfCkptError
    from hf_ckpt.spec.spec import Spec

    try:
        spec = None if arguments.spec is None else Spec.parse(arguments.spec)  # before the slow import of torch
        from hf_ckpt import compat
        from hf_ckpt.attach.attach import EnableHook
        from hf_ckpt.training.guard import guard_trainers
        from hf_ckpt.training.install import install, uninstall
        from hf_ckpt.training.out_of_memory import report

        install(spec=spec, enable_when_trained=arguments.spec is not None)
    except HfCkptError as error:
        print(f"hf_ckpt: {error}", file=sys.stderr)
        return 2

    def before_step(optimizer: Any) -> None:
        """Say in the first step, not only at the end, if nothing is enabled."""
        # With `--spec`, models are enabled when they are trained, so that only the end shows whether one was.
        if arguments.spec is None:
            _say_if_unused(EnableHook.calls, arguments)

    with contextlib.ExitStack() as cleanup:
        cleanup.callback(uninstall)
        cleanup.callback(compat.optimizers.call_before(before_step).remove)
        if arguments.oom_guard:
            guarded = cleanup.enter_context(guard_trainers())
        try:
            _run_script(arguments)
        except SystemExit as ended:
            if ended.code:  # without one, it is the end of most scripts: `sys.exit(main())`
                raise
        except Exception as error:  # if memory ran out, the guard's report says which step needed how much
            report(error)
            raise
        _say_if_unused(EnableHook.calls, arguments)
        if arguments.oom_guard and not guarded:
            text = "no Trainer of transformers has run a step in `train()`. In your own loop, use `hf_ckpt.OomGuard`."
            log.warning("hf_ckpt: --oom-guard had no effect, because %s", text)
    return 0


def _run_script(arguments: argparse.Namespace) -> None:
    """Run the script or module as Python would, with its own `sys.argv` and `sys.path`."""
    sys.argv = [arguments.script, *arguments.args]
    if arguments.module:  # as `python -m`, which looks for the module in the current folder
        if not _SAFE_PATH:
            sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(arguments.script, run_name="__main__", alter_sys=True)
        return
    path = os.path.abspath(arguments.script)  # a script that changes folder still finds itself
    if pkgutil.get_importer(path) is not None or path.endswith(".pyc"):  # a folder or zip file with a `__main__.py`
        runpy.run_path(path, run_name="__main__")
        return
    # Not by `runpy`, which puts the absolute path into `sys.argv`.
    if not _SAFE_PATH:
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    module = types.ModuleType("__main__")
    vars(module).update(__file__=path, __cached__=None, __loader__=loader)
    before = sys.modules["__main__"]
    sys.modules["__main__"] = module
    try:
        exec(loader.source_to_code(loader.get_data(path), path), vars(module))
    finally:
        sys.modules["__main__"] = before


def _say_if_unused(enable_calls: int, arguments: argparse.Namespace) -> None:
    """Warn if the script never enabled checkpointing on a model, with the reason and what to do."""
    from hf_ckpt.logs import warn_once

    if enable_calls or arguments.oom_guard:  # a guard needs no plan before memory runs out
        return
    if arguments.spec is None:
        warn_once(
            log,
            "hf_ckpt: the script has not enabled checkpointing on a model: pass the script its own flag "
            "(--activation_checkpointing, formerly --gradient_checkpointing), or give `--spec` before the script for "
            "one that has no flag.",
        )
        return
    log.warning(
        "hf_ckpt: checkpointing was enabled on no model: no Hugging Face model with trainable parameters ran in "
        "train mode (`from_pretrained` returns models in eval mode: call `model.train()`) with gradients on, or only "
        "under nn.DataParallel (use DistributedDataParallel), or inside a function that torch.compile had compiled. In "
        "the script, call `hf_ckpt.install(model, spec)` and `model.gradient_checkpointing_enable()`."
    )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, the script or module, and its arguments exactly as they were given."""
    parser = argparse.ArgumentParser(
        prog="python -m hf_ckpt",
        description=(
            "Run a training script unchanged, with hf_ckpt installed on every Hugging Face model that it trains."
        ),
        epilog="example: python -m hf_ckpt train.py --gradient_checkpointing "
        '--gradient_checkpointing_kwargs \'{"policy": "full", "layers": "0-15"}\'',
    )
    parser.add_argument(
        "--spec",
        help="spec for scripts that give none: a YAML or JSON file, JSON text, or words like policy=full",
    )
    parser.add_argument(
        "--oom-guard",
        action="store_true",
        help="if a Trainer's step runs out of memory, retry it under a plan that needs less (see hf_ckpt.OomGuard)",
    )
    parser.add_argument("-m", dest="module", action="store_true", help="run a module instead of a file")
    # In one list, because argparse takes a `--` away that follows a positional argument by itself.
    text = "path of the script, or name of the module with -m, and its arguments"
    parser.add_argument("words", nargs=argparse.PARSER, metavar="script", help=text)
    arguments = parser.parse_args(argv)
    if arguments.words[0] == "--":
        del arguments.words[0]
    arguments.script, *arguments.args = arguments.words
    return arguments


if __name__ == "__main__":
    if not _SAFE_PATH:
        del sys.path[0]  # `python -m` puts the current folder there, whose folders would hide packages from the script
    sys.exit(main())
