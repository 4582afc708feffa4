"""`Finding`: what a check of `hf-ckpt doctor` reports."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from hf_ckpt.doctor.facts import Facts


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that will go wrong, or that is worth knowing."""

    severity: str
    """`error`, `warning` or `note`."""
    code: str
    """Short name of what was found, which stays the same from release to release."""
    where: str
    """Where it was written, as `file: key`, or the name of a package."""
    what: str
    """What will go wrong, in a sentence or two."""
    fix: str
    """What to do about it."""

    def to_dict(self) -> dict[str, str]:
        """Return the fields as a JSON-able dict."""
        return dataclasses.asdict(self)


Check = Callable[[Facts], Iterator[Finding]]
"""A function that looks at the facts and yields what it finds."""
