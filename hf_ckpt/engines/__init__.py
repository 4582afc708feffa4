"""The engines, which carry out actions. An engine makes the function that a block calls in place of its own forward."""

from __future__ import annotations
