"""`diagnose`: run all checks on the facts, and sort what they find.

>>> facts = Facts((ConfigFile("args.json", TRAINING, {"gradient_checkpointing_kwargs": {"polcy": "full"}}),))
>>> [finding.code for finding in diagnose(facts)]
['spec', 'kwargs-without-flag']
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_ckpt.doctor.checks import CHECKS
from hf_ckpt.doctor.facts import SEVERITIES, Facts
from hf_ckpt.doctor.findings import Finding


def diagnose(facts: Facts) -> tuple[Finding, ...]:
    """Return everything that the checks find, errors first."""
    found = [finding for check in CHECKS for finding in check(facts)]
    return tuple(sorted(found, key=lambda finding: SEVERITIES.index(finding.severity)))


def to_dict(facts: Facts, findings: Sequence[Finding]) -> dict[str, Any]:
    """Return what was looked at and what was found, as a JSON-able dict."""
    return {
        "files": {file.path: file.kind for file in facts.files},
        "model": facts.model.name if facts.model else None,
        "versions": dict(facts.versions),
        "findings": [finding.to_dict() for finding in findings],
    }
