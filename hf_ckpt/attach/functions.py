"""The functions that plans put on blocks. All plans of a spec that treat a block alike share one function.

Under `budget` and `auto` a model has a plan for each bucket of batch shapes. Switching plans changes only the functions
of blocks that the two plans treat differently.
"""

from __future__ import annotations

from collections.abc import Collection

from hf_ckpt.engines.offload import Mover
from hf_ckpt.engines.region import Region, Request, make
from hf_ckpt.spec.actions import Action
from hf_ckpt.spec.plan import Plan
from hf_ckpt.spec.spec import Spec

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
        self.made: dict[tuple[str, Action, tuple[str, ...]], Region] = {}
        """(name of a block, its action, names of the blocks in its segment) -> its function, for all plans so far."""
        self._mover = Mover(spec.host_budget)

    def of(self, plan: Plan) -> Regions:
        """Return the function of every block whose action is not `keep`, and make those that do not exist yet."""
        segments = {name: tuple(names) for _, names in plan.segments() for name in names}
        # Backward begins with the last block of a stack, so moving what that block keeps would gain nothing.
        last = {pairs[-1][0].name for pairs in plan.stacks().values()}
        regions: Regions = {}
        for name, action in plan.active().items():
            segment = segments.get(name, ())
            if (name, action, segment) not in self.made:
                self.made[name, action, segment] = make(
                    Request(
                        name,
                        action,
                        preserve_rng_state=self.spec.preserve_rng_state,
                        determinism_check=self.spec.determinism_check,
                        segment=segment,
                        mover=None if name in last else self._mover,
                        known=name in self.known,
                    )
                )
            regions[name] = self.made[name, action, segment]
        return regions

    def counts(self, what: str, regions: Regions) -> dict[str, int]:
        """Return a count (`forwards` or `recomputed`) of every block over all functions that it has had.

        Blocks without a function in `regions` are left out if their count is 0.
        """
        found = dict.fromkeys(regions, 0)
        for (name, *_), region in self.made.items():
            if getattr(region, what):
                found[name] = found.get(name, 0) + getattr(region, what)
        return found
