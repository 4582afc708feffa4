"""The engines carry out actions. An engine makes the function that a block calls instead of its own forward."""

from __future__ import annotations
