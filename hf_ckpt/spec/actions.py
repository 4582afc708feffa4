"""The actions on the activations of a block, one record each.

A new action is a record here and a file in `engines/` that the record names. Specs, plans and the planner read
these records.
"""

from __future__ import annotations

import dataclasses

SAVE_CLASSES = ("linear", "attention")
"""Classes of operations whose results `selective` can save. It saves both by default."""


AUTO_TOKENS = 2048
"""Tokens of a tile under `auto`: enough to keep a device busy, and few beside a long sequence."""


@dataclasses.dataclass(frozen=True)
class Action:
    """What happens to the activations of one block: the name of an action, and its options."""

    kind: str = "keep"
    """`keep`, `selective`, `full`, `full+selective`, `full+tiles`, `offload` or `compiled`: the name of a record in
    `ACTIONS`."""
    save: tuple[str, ...] = ()
    """For `selective`: the classes of operations whose results are saved. For `full+selective`: those that are saved
    while the block is recomputed."""
    moved: bool = False
    """For `selective`: whether saved tensors are in host memory until backward."""
    made: bool = False
    """For blocks that are recomputed: whether backward makes their hidden states again, by running the block before."""
    share: float | None = None
    """For `compiled`: how much the compiler saves, from 0 (the inputs) to 1 (what makes the step fastest)."""
    tile: int | str | None = None
    """For `full+tiles`: the tokens of a tile. None is as `auto`."""

    def __str__(self) -> str:
        if self.made:
            return f"{dataclasses.replace(self, made=False)}, its input recomputed"
        if self.share is not None:
            return f"{self.kind} (share {self.share:g})"
        if isinstance(self.tile, int):
            return f"{self.kind} ({self.tile} tokens)"
        where = " in host memory" if self.moved else ""
        return f"{self.kind} (save {', '.join(self.save)}{where})" if self.save else self.kind


KEEP = Action("keep")
SELECTIVE = Action("selective", SAVE_CLASSES)
FULL = Action("full")
FULL_SELECTIVE = Action("full+selective", SAVE_CLASSES)
OFFLOAD = Action("offload")
COMPILED = Action("compiled", share=0.0)
OFFLOADED = {FULL: OFFLOAD, SELECTIVE: dataclasses.replace(SELECTIVE, moved=True)}
"""Action -> the action that holds the same tensors in host memory. The action that keeps least comes first, because the
planner takes the first of equally fast plans."""


@dataclasses.dataclass(frozen=True)
class ActionKind:
    """The properties of one action."""

    name: str
    """Name of the action in specs and plans."""
    engine: str = ""
    """`module:function` that makes a block's checkpointing function from an `engines.region.Request`; empty if the
    block runs as it is."""
    hooks: str = ""
    """`module:function` that lists the forward hooks which the engine needs beside the blocks' functions; empty if
    it needs none."""
    is_policy: bool = True
    """Whether it can be the `policy` of a spec."""
    options: tuple[str, ...] = ()
    """Fields of `Action`, beside `kind`, that it uses."""
    forms: tuple[Action, ...] = ()
    """Its forms that a plan for a budget chooses from."""
    is_exact: bool = True
    """Whether gradients are bit-equal to those without checkpointing. Others are equal up to rounding, so that a plan
    has the action only where the spec asks for it."""
    compiles: bool = False
    """Whether the block is compiled. Either all blocks of a plan for a budget are, or none."""
    next: Action | None = None
    """The action that follows on the guard's ladder, see `lighter`; None if its options decide, or if none does."""


# Name -> record. Actions that keep most come first.
ACTIONS: dict[str, ActionKind] = {
    record.name: record
    for record in (
        ActionKind("keep", is_policy=False, forms=(KEEP,), next=SELECTIVE),
        ActionKind(
            "selective",
            engine="hf_ckpt.engines.rebuild.region:make",
            hooks="hf_ckpt.engines.rebuild.region:hooks",
            options=("save", "moved"),
            forms=(SELECTIVE, Action("selective", ("attention",))),
            next=FULL,
        ),
        ActionKind(
            "full",
            engine="hf_ckpt.engines.full:make",
            hooks="hf_ckpt.engines.routers:hooks",
            options=("made",),
            forms=(FULL,),
            next=OFFLOAD,
        ),
        ActionKind(
            "full+selective",
            engine="hf_ckpt.engines.rebuild.full_selective:make",
            options=("save", "made"),
            forms=(FULL_SELECTIVE,),
            next=OFFLOAD,
        ),
        ActionKind(
            "full+tiles",
            engine="hf_ckpt.engines.tiles:make",
            hooks="hf_ckpt.engines.tiles:hooks",
            is_policy=False,
            options=("tile", "made"),
            forms=(Action("full+tiles", tile="auto"),),
            is_exact=False,
            # Not `offload`, which runs feed-forwards as a whole: smaller tiles, see `lighter`.
        ),
        ActionKind("offload", engine="hf_ckpt.engines.offload:make", options=("made",)),
        ActionKind(
            "compiled",
            engine="hf_ckpt.engines.compiled:make",
            is_policy=False,
            options=("share",),
            compiles=True,
            is_exact=False,
            forms=(Action("compiled", share=1.0), Action("compiled", share=0.8), COMPILED),
            next=COMPILED,
        ),
    )
}


def lighter(action: Action) -> Action | None:
    """Return the action that replaces another one if a step runs out of memory. It needs less; None if none does.

    The ladders: `keep`, `selective`, `full`, `offload`; `full+selective`, `offload`; `selective` in host memory,
    `offload`; `full+tiles` with 2048 tokens (`auto`), 512, 128; `compiled` with any share, share 0.
    """
    if action.moved:
        return OFFLOAD
    if action.kind == "full+tiles":
        tokens = action.tile if isinstance(action.tile, int) else AUTO_TOKENS
        return dataclasses.replace(action, tile=tokens // 4) if tokens >= 512 else None
    following = ACTIONS[action.kind].next
    return None if following == action else following


def planned_actions(*, compiled: bool = False, tile: int | str | None = None) -> tuple[Action, ...]:
    """Return the actions that every plan for a budget chooses from; those that keep most come first.

    Args:
        compiled: whether blocks are compiled.
        tile: the tokens of a tile, if feed-forwards may run in tiles.
    """
    chosen: list[Action] = []
    for record in ACTIONS.values():
        if record.compiles != compiled:  # a stack is compiled as a whole or not at all
            continue
        if "tile" not in record.options:
            chosen += record.forms
        elif tile is not None:
            chosen += [dataclasses.replace(form, tile=tile) for form in record.forms]
    return tuple(chosen)
