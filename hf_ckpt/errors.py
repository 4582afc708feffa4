"""Every error hf_ckpt raises, as classes that carry what a caller may want to read back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class HfCkptError(Exception):
    """Base of every error raised by hf_ckpt."""


class SpecError(HfCkptError, ValueError):
    """A spec was refused. `problems` holds every reason at once, not only the first."""

    def __init__(self, problems: Sequence[str], source: str | None = None) -> None:
        self.problems = tuple(problems)
        self.source = source
        where = f" in {source}" if source else ""
        count = len(self.problems)
        head = f"{count} problem{'s' if count != 1 else ''} in the activation checkpointing spec{where}:"
        super().__init__("\n".join([head, *(f"  - {problem}" for problem in self.problems)]))


class NoBlocksError(HfCkptError, TypeError):
    """No block that activation checkpointing could be installed on was found."""


class InfeasibleError(HfCkptError):
    """No plan fits into the budget. `floor_bytes` is the least that does, `parts` what fills it, in bytes."""

    def __init__(
        self, budget_bytes: int, floor_bytes: int, parts: Mapping[str, int], hints: Sequence[str], shown: str
    ) -> None:
        self.budget_bytes, self.floor_bytes = budget_bytes, floor_bytes
        self.parts, self.hints = dict(parts), tuple(hints)
        super().__init__("\n".join([shown, *(f"  - {hint}" for hint in self.hints)]))


class PlanMismatchError(HfCkptError, ValueError):
    """A saved plan does not describe the model it was given to."""


class OwnerConflictError(HfCkptError, RuntimeError):
    """Something else already owns activation checkpointing of this model."""


class PlanLostError(HfCkptError, RuntimeError):
    """Planned blocks no longer carry the function hf_ckpt put on them. `blocks` names them."""

    def __init__(self, blocks: Sequence[str]) -> None:
        self.blocks = tuple(blocks)
        shown = ", ".join(self.blocks[:4]) + (" ..." if len(self.blocks) > 4 else "")
        super().__init__(
            f"{len(self.blocks)} planned blocks no longer carry hf_ckpt's function ({shown}): something set "
            "`gradient_checkpointing` on the blocks directly. Call `model.gradient_checkpointing_enable()` again, "
            "after whatever replaced it, or `hf_ckpt.uninstall(model)` if that other owner is wanted."
        )


class GraphCaptureError(HfCkptError, RuntimeError):
    """Random state cannot be read while a CUDA graph is being captured."""


class MissingDependencyError(HfCkptError, ImportError):
    """An optional package is needed for what was asked."""

    def __init__(self, package: str, purpose: str, command: str) -> None:
        super().__init__(f"{purpose} needs `{package}`, which is not installed. Install it with: {command}")


class WorkerError(HfCkptError, RuntimeError):
    """Something failed in another process. `details` is its traceback."""

    def __init__(self, shown: str, details: str = "") -> None:
        self.details = details
        super().__init__(shown)


class InPlaceError(HfCkptError, RuntimeError):
    """A tensor that backward needs was changed in place after it was saved."""

    def __init__(
        self,
        block: str,
        shape: tuple[int, ...] | None = None,
        expected: int | None = None,
        found: int | None = None,
        operation: str | None = None,
    ) -> None:
        self.block, self.operation = block, operation
        what = "" if shape is None else f" of shape {list(shape)}"
        by = "" if operation is None else f" by {operation}"
        versions = "" if expected is None else f" (it is at version {found}, saved at {expected})"
        super().__init__(
            f"block {block!r}: a tensor{what} that backward needs was changed in place{by}{versions}. Some operation "
            "works in place on what this block is recomputed or rebuilt from; give it another action by a rule (`full` "
            "in place of `selective`, or `none`), or clone before changing."
        )


class ReplayError(HfCkptError, RuntimeError):
    """A small module that was run again saved other tensors than before."""

    def __init__(self, block: str, module: str, expected: int, found: int) -> None:
        self.block = block
        super().__init__(
            f"block {block!r}: {module} saved {expected} tensors in the forward and {found} when it was run again in "
            "backward. Its parameters must not be frozen or unfrozen in between, and it must do the same every time."
        )


class NothingSavedError(HfCkptError, RuntimeError):
    """Selective checkpointing found no operation whose result it was to save: it would be `full` under another name."""

    def __init__(self, block: str, save: tuple[str, ...]) -> None:
        self.block = block
        self.save = save
        super().__init__(
            f"block {block!r}: `save` is {list(save)}, but the block ran no such operation, so this would be `full` at "
            'a higher price. Use "policy": "full", another `save`, another attention implementation, or '
            '"engine": "rebuild".'
        )


class OutOfPlansError(HfCkptError, RuntimeError):
    """A step ran out of memory under the tightest plan, too. `parts` is what fills its predicted peak, in bytes.

    Its text has the original error's, so that whoever looks for that (accelerate's `find_executable_batch_size`) finds
    it.
    """

    def __init__(self, message: str, *, parts: Mapping[str, int] | None = None, tried: Sequence[str] = ()) -> None:
        self.parts, self.tried = dict(parts or {}), tuple(tried)
        super().__init__(message)
