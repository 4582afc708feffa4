"""The errors that hf_ckpt raises. Their attributes hold what a caller may want to read."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

_MOST_BITS = 2**11
"""Whole numbers with more bits are not written out: they have more than 600 digits."""


class _Repr(reprlib.Repr):
    """Also writes whole numbers for which Python refuses to write all digits, as it does above 4,300 of them."""

    def repr_int(self, x: int, level: int) -> str:
        """Return the digits of a number, or how many bits it has."""
        if x.bit_length() > _MOST_BITS:
            return f"a whole number of {x.bit_length()} bits"
        return super().repr_int(x, level)


def shown(value: Any, most: int = 200, *, quoted: bool = True) -> str:
    """Return a value as a text of at most `most` characters for an error message.

    A spec may hold anything, such as a thousand block numbers or a model, and its errors are sent to trackers. Large
    and deep values are cut before their text is built. With `quoted`, a text is in quotation marks.
    """
    cut = _Repr()
    # Not `repr(value)[:most]`: the text of a large dict takes seconds, and that of a dict in itself never ends.
    vars(cut).update(maxlevel=4, maxdict=8, maxlist=12, maxtuple=12, maxstring=most, maxother=most, maxlong=most)
    text = value[: most + 1] if isinstance(value, str) and not quoted else cut.repr(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def reason_of(error: BaseException, most: int = 400) -> str:
    """Return the message of another library's error as one line, with its type if the message alone says little.

    It has at most `most` characters, and no full stop at its end.
    """
    text = " ".join(str(error)[: 4 * most].split()).rstrip(".")  # pydantic's and YAML's have many lines
    if not text or not isinstance(error, (OSError, ValueError)):
        text = f"{type(error).__name__}: {text}".rstrip(": ")
    return shown(text, most, quoted=False)


class HfCkptError(Exception):
    """Base of every error raised by hf_ckpt."""


class FileError(HfCkptError, OSError):
    """A file cannot be written."""


class SpecError(HfCkptError, ValueError):
    """A spec is invalid. `problems` holds all reasons; `source` says where the spec came from.

    `rest` is the `Spec` of all that could be read, which may have further problems with a model; None without one.
    """

    def __init__(self, problems: Sequence[str], source: str | None = None, rest: Any = None) -> None:
        self.problems = tuple(problems)
        self.source = source
        self.rest = rest
        where = f" ({shown(source, quoted=False)})" if source else ""
        count = len(self.problems)
        head = f"{count} problem{'s' if count != 1 else ''} in the activation checkpointing spec{where}:"
        super().__init__("\n".join([head, *(f"  - {problem}" for problem in self.problems)]))


class NoBlocksError(HfCkptError, TypeError):
    """The model has no block that can be checkpointed."""


class InfeasibleError(HfCkptError):
    """No plan fits into the budget.

    `budget_bytes` is that budget, `floor_bytes` the lowest peak of any plan, `parts` what fills it (name -> bytes), and
    `hints` say what would lower it. The message is `shown`, followed by the hints. `notes` are remarks about the bytes.
    """

    def __init__(
        self, budget_bytes: int, floor_bytes: int, parts: Mapping[str, int], hints: Sequence[str], shown: str
    ) -> None:
        self.budget_bytes = budget_bytes
        self.floor_bytes = floor_bytes
        self.parts = dict(parts)
        self.hints = tuple(hints)
        self.notes: tuple[str, ...] = ()
        super().__init__("\n".join([shown, *(f"  - {hint}" for hint in self.hints)]))


class PlanMismatchError(HfCkptError, ValueError):
    """A saved plan cannot be read, or does not fit the model."""


class OwnerConflictError(HfCkptError, RuntimeError):
    """Something else (another plan, torch's or accelerate's own wrapper) already checkpoints this model."""


class PlanLostError(HfCkptError, RuntimeError):
    """Planned blocks have lost the checkpointing function of hf_ckpt. `blocks` holds their names."""

    def __init__(self, blocks: Sequence[str]) -> None:
        self.blocks = tuple(blocks)
        shown = ", ".join(self.blocks[:4]) + (" ..." if len(self.blocks) > 4 else "")
        super().__init__(
            f"{len(self.blocks)} planned blocks no longer carry hf_ckpt's function ({shown}): something set "
            "`gradient_checkpointing` on the blocks directly. Call `model.gradient_checkpointing_enable()` again, "
            "after whatever replaced it, or `hf_ckpt.uninstall(model)` if that other owner is wanted."
        )


class BlockError(HfCkptError, RuntimeError):
    """A block could not be run, or its backward was given something wrong. `block` names the block.

    The message is `problem`, followed by the `advice` of the class.
    """

    advice = ""

    def __init__(self, block: str, problem: str) -> None:
        self.block = block
        super().__init__(f"block {block!r}: {problem} {self.advice}".rstrip())


class TransformError(BlockError):
    """A block was called under a transform of torch.func, or in forward-mode AD, or calls one that allows no hooks."""

    advice = "`with hf_ckpt.paused(model)` turns the plan off for a while, and the policy `none` leaves a block out."


class GraphCaptureError(BlockError):
    """A block preserves random state, which cannot be read while a CUDA graph is captured."""

    advice = 'Set "preserve_rng_state": false if no dropout is active, or capture without checkpointing.'


class ChangedBlockError(BlockError):
    """A block cannot be recomputed, because it was changed between forward and backward."""

    advice = (
        "Backward runs the block, or a part of it, again and needs it as it was; a head in chunks runs wherever its "
        "logits are used. Run backward first, or leave this block out by a rule "
        '(`{"layers": ..., "policy": "none"}`), the head by `"head": "whole"`.'
    )

    def __init__(self, block: str, change: str) -> None:
        super().__init__(block, f"{change} between the forward and the backward.")


class RebuildError(BlockError):
    """What `selective` ran again in backward returned or saved other tensors than in the forward."""

    advice = 'Use "policy": "full" for this model, and please report it: `selective` must not recompute this.'


class InPlaceError(BlockError):
    """A tensor that backward needs was changed in place after it was saved.

    `tensor` is that tensor, `version` its in-place version when it was saved, and `operation` what changed it, if that
    is known.
    """

    advice = (
        "Some operation works in place on what this block is recomputed or rebuilt from; give it another action by a "
        "rule (`full` in place of `selective`, or `none`), or clone before changing."
    )

    def __init__(self, block: str, tensor: Any, version: int, operation: str | None = None) -> None:
        by = "" if operation is None else f" by {operation}"
        problem = f"a tensor of shape {list(tensor.shape)} that backward needs was changed in place{by}"
        super().__init__(block, f"{problem} (it is at version {tensor._version}, saved at {version}).")


class MismatchError(HfCkptError, RuntimeError):
    """The backward of a block got other tensors than its forward saved, so its gradients are wrong.

    `block` names the block. The message says which tensor is different, by how much, and the likely cause.
    """

    def __init__(self, block: str, difference: str) -> None:
        self.block = block
        super().__init__(f"the gradients of this step are wrong, and no optimizer has used them yet: {difference}")


class DoubleBackwardError(HfCkptError, RuntimeError):
    """A backward with `create_graph=True` reached a head that runs in chunks, whose gradients have no graph."""

    def __init__(self) -> None:
        super().__init__(
            "`create_graph=True`, which gradient penalties need, does not work with a head in chunks: its "
            "gradients cannot be differentiated again. Leave `head` out."
        )


class MissingDependencyError(HfCkptError, ImportError):
    """An optional package is needed, but not installed. The message contains the command that installs it."""

    def __init__(self, package: str, purpose: str, command: str) -> None:
        super().__init__(f"{purpose} needs `{package}`, which is not installed. Install it with: {command}")


class OutOfPlansError(HfCkptError, RuntimeError):
    """A step ran out of memory, and no tighter plan is left to try.

    The message says which plans were tried, and contains the text of the original error, for code that looks for it
    (accelerate's `find_executable_batch_size`).
    """
