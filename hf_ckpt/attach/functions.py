"""The functions that plans put on blocks. All plans of a spec that treat a block alike share one function.

Under `budget` and `auto` a model has a plan for each bucket of batch shapes. Switching plans changes only the functions
of blocks that the two plans treat differently.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterable

from hf_ckpt.engines.offload import Mover
from hf_ckpt.engines.region import Region, Request, Segment, make
from hf_ckpt.spec.actions import Action
from hf_ckpt.spec.plan import Plan
from hf_ckpt.spec.spec import Spec

COUNTS = ("forwards", "recomputed")
"""What functions count."""
_Key = tuple[str, Action, tuple[str, ...]]
"""(name of a block, its action, names of the blocks in its segment)."""
Regions = dict[str, Region]
"""Block name -> its checkpointing function."""


class Functions:
    """The checkpointing functions of the plans of one spec. Their counts start at 0.

    Args:
        spec: the user's spec.
        known: names of the blocks whose in-place changes are known.
    """

    def __init__(self, spec: Spec, known: Collection[str] = ()) -> None:
        self.spec, self.known = spec, known
        self.made: dict[_Key, Region] = {}
        """The functions of all plans, until `keep_only`."""
        self._before: dict[str, collections.Counter[str]] = {what: collections.Counter() for what in COUNTS}
        """Count -> block -> its sum over functions that were dropped."""
        self._segments: dict[tuple[str, ...], Segment] = {}
        self._mover = Mover(spec.host_budget)

    def of(self, plan: Plan) -> Regions:
        """Return the function of every block whose action is not `keep`, and make those that do not exist yet."""
        runs = {name: tuple(names) for _, names in plan.segments() for name in names}
        # Backward begins with the last block of a stack, so moving what that block keeps would gain nothing.
        last = {pairs[-1][0].name for pairs in plan.stacks().values()}
        regions: Regions = {}
        for name, action in plan.active().items():
            key = name, action, runs.get(name, ())
            if key not in self.made:
                request = Request(
                    name,
                    action,
                    preserve_rng_state=self.spec.preserve_rng_state,
                    determinism_check=self.spec.determinism_check,
                    segment=self._segments.setdefault(key[2], Segment(key[2])) if key[2] else None,
                    mover=None if name in last else self._mover,
                    known=name in self.known,
                )
                self.made[key] = make(request)
            regions[name] = self.made[key]
        return regions

    def keep_only(self, plans: Iterable[Plan]) -> None:
        """Drop the functions that none of these plans needs. Their counts remain."""
        used = {id(region) for plan in plans for region in self.of(plan).values()}
        for key, region in list(self.made.items()):
            if id(region) not in used:
                for what, counts in self._before.items():
                    counts[key[0]] += getattr(region, what)
                del self.made[key]
        runs = {run for _, _, run in self.made}
        self._segments = {run: segment for run, segment in self._segments.items() if run in runs}

    def counts(self, what: str, regions: Regions) -> dict[str, int]:
        """Return a count (`forwards` or `recomputed`) of every block over all functions that it has had.

        Blocks without a function in `regions` are left out if their count is 0.
        """
        found = dict.fromkeys(regions, 0) | {name: count for name, count in self._before[what].items() if count}
        for (name, *_), region in self.made.items():
            if getattr(region, what):
                found[name] = found.get(name, 0) + getattr(region, what)
        return found
