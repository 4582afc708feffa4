"""`python -m hf_ckpt.cli` runs the program `hf-ckpt`."""

from __future__ import annotations

import sys

from hf_ckpt.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
