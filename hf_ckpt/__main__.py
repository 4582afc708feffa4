"""Run an unmodified script with hf_ckpt hooked into every model:

python -m hf_ckpt [--spec SPEC] script.py args...
accelerate launch -m hf_ckpt [--spec SPEC] script.py args...
"""

from __future__ import annotations

import argparse
import logging
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Hook, run the script as `__main__`, and let its exit code and its traceback through."""
    arguments = _parser().parse_args(argv)
    from hf_ckpt.errors import HfCkptError
    from hf_ckpt.install import enable_calls, install, uninstall

    try:
        install(spec=arguments.spec, enable_when_prepared=arguments.spec is not None)
    except HfCkptError as error:
        print(f"hf_ckpt: {error}", file=sys.stderr)
        return 2
    sys.argv = [arguments.script, *arguments.args]
    try:
        if arguments.module:
            sys.path.insert(0, str(Path.cwd()))
            runpy.run_module(arguments.script, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(arguments.script).resolve().parent))
            runpy.run_path(arguments.script, run_name="__main__")
        if not enable_calls():
            log.warning(
                "the script never enabled checkpointing on a model: pass it its own flag "
                "(--activation_checkpointing, formerly --gradient_checkpointing), or give `--spec` before the script."
            )
    finally:
        uninstall()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hf_ckpt",
        description="Run an unmodified training script with hf_ckpt hooked into every Hugging Face model of it.",
        epilog="example: python -m hf_ckpt train.py --gradient_checkpointing "
        '--gradient_checkpointing_kwargs \'{"policy": "full", "layers": "0-15"}\'',
    )
    parser.add_argument(
        "--spec",
        help="what to enable where the script does not say: a YAML or JSON file, JSON text, or words like policy=full",
    )
    parser.add_argument("-m", dest="module", action="store_true", help="run a module instead of a file")
    parser.add_argument("script", help="path of the script, or name of the module with -m")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="arguments of the script")
    return parser


if __name__ == "__main__":
    sys.exit(main())
