"""Readers of the values in a spec, one for each key; `READERS` lists them.

A reader returns the parsed value, or raises `ValueError`. The message continues a sentence that begins with the key.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_ckpt.errors import shown
from hf_ckpt.logs import warn_once
from hf_ckpt.spec.actions import ACTIONS, SAVE_CLASSES
from hf_ckpt.units import UnitError, parse_budget, parse_bytes

log = logging.getLogger(__name__)

_OTHERS = (record.name for record in ACTIONS.values() if record.is_policy and record.name != "full")
POLICIES = ("none", "full", *_OTHERS, "budget", "auto")
SAVING = tuple(record.name for record in ACTIONS.values() if record.is_policy and "save" in record.options)
"""Policies with the option `save`."""
ENGINES = ("auto", "rebuild", "sac")
CHUNKS = ("full", "auto")

LayerRange = tuple[int, int]
"""First and last position of a range of blocks; a negative one counts from the end."""
Layers = str | tuple[tuple[str, str], ...]
"""A choice of blocks like "0-15,-1" for every stack, or (stack, such a choice) pairs."""

_MOST_PROBLEMS = 20  # that are listed for one list of rules
_RANGE = re.compile(r"(-?\d+)(-(-?\d+)?)?")


@dataclasses.dataclass(frozen=True)
class Rule:
    """One exception to the policy of a spec. If several match a block, the last one counts."""

    policy: str
    """The policy of its blocks: `none`, `full`, `selective`, `full+selective` or `offload`."""
    layers: str | None = None
    """The blocks, as in `Spec.layers`; None for every block of `stack`."""
    stack: str | None = None
    """Name of the stack; None for every stack."""
    save: tuple[str, ...] | None = None
    """As `Spec.save`; None for the spec's own."""
    share: float | None = None
    """As `Spec.share`; None for the share of the rule's policy."""

    def to_dict(self) -> dict[str, Any]:
        """Return the rule as a dict, as in a spec."""
        full = {
            "stack": self.stack,
            "layers": self.layers,
            "policy": self.policy,
            "save": self.save and list(self.save),
            "share": self.share,
        }
        return {key: value for key, value in full.items() if value is not None}


def saving_policies() -> str:
    """Return the policies in `SAVING` as text for messages."""
    return " or ".join(f"`policy: {name}`" for name in SAVING)


def parse_layers(text: str) -> tuple[LayerRange, ...]:
    """Read a choice of blocks: `parse_layers("0-15,-1") == ((0, 15), (-1, -1))`.

    Ranges include both ends, negative numbers count from the end, and "2-" goes to the end. Raises `ValueError` for
    other texts.
    """
    ranges = []
    for part in text.replace(" ", "").split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(f"must be a list like '0-15,-1', but is {shown(text)} instead")
        first, until, last = match.groups()
        ranges.append((int(first), int(last or (-1 if until else first))))
    return tuple(ranges)


def unknown_key(key: object, known: Sequence[str] | Mapping[str, Any], reasons: Mapping[str, str] | None = None) -> str:
    """Return a sentence about an unknown key: its entry in `reasons`, or the most similar known keys."""
    if reasons and key in reasons:
        return f"`{key}` {reasons[str(key)]}"
    name = shown(key, 60, quoted=False)
    near = similar_keys(key, known)
    hint = f"; did you mean {' or '.join(f'`{name}`' for name in near)}?" if near else f"; known: {', '.join(known)}."
    return f"`{name}` is not a key of the spec{hint}"


def similar_keys(key: object, known: Sequence[str] | Mapping[str, Any]) -> list[str]:
    """Return at most two known keys that a key may be a misspelling of, the most similar first."""
    return difflib.get_close_matches(shown(key, 60, quoted=False), list(known), n=2, cutoff=0.6)


def one_of(*allowed: object) -> Callable[[Any], Any]:
    """Return a reader that accepts these values only. It does not accept 0 and 1 for False and True."""

    def read(value: Any) -> Any:
        for choice in allowed:
            if value == choice and isinstance(value, bool) == isinstance(choice, bool):
                return choice
        given = shown(value, 60, quoted=False)
        near = difflib.get_close_matches(given, [str(choice) for choice in allowed], n=1, cutoff=0.6)
        choices = ", ".join(json.dumps(choice) for choice in allowed)
        raise ValueError(
            f"must be one of {choices}, but is {shown(value)} instead{f'; did you mean {near[0]!r}?' if near else ''}"
        )

    return read


def _read_reentrant(value: Any) -> bool:
    if value is True:
        warn_once(
            log,
            "hf_ckpt recomputes non-reentrantly: same gradients, fewer conditions. `use_reentrant=True` changes "
            "nothing.",
        )
    if value is True or value is False:
        return False
    raise ValueError(f"must be true or false, but is {shown(value)} instead")


def _read_every(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"must be a whole number of at least 1, but is {shown(value)} instead")
    return value


def _read_count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"must be a whole number of at least 0, but is {shown(value)} instead")
    return value


def _read_layer_text(value: Any) -> str:
    """Read a choice of blocks in one stack: a number, a list of numbers, or a text like "0-15,-1"."""
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if isinstance(value, (list, tuple)) and value and all(type(index) is int for index in value):
        value = ",".join(str(index) for index in value)
    if not isinstance(value, str):
        raise ValueError(f"must be a list like '0-15,-1', but is {shown(value)} instead")
    parse_layers(value)
    return value.replace(" ", "")


def _read_layers(value: Any) -> Layers | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        return _read_layer_text(value)
    if not value:
        raise ValueError("must name at least one stack, but is empty")
    return tuple((str(stack), _read_layer_text(text)) for stack, text in value.items())


def _read_segments(value: Any) -> int | str | None:
    if value is None or value == "sqrt":
        return value  # type: ignore[no-any-return]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"must be a whole number of at least 1 or 'sqrt', but is {shown(value)} instead")
    return value


def _parsed(parse: Callable[[Any], float], what: str) -> Callable[[Any], float | None]:
    """Return a reader of bytes or a share by `parse`; None stays None."""

    def read(value: Any) -> float | None:
        try:
            return None if value is None else parse(value)
        except UnitError as error:
            raise ValueError(f"is no {what}: {error}".rstrip(".")) from None

    return read


def _read_tokens(value: Any) -> int | str:
    """Read the tokens of a chunk: a number, or one of `CHUNKS`."""
    if type(value) is int and value >= 1:
        return value
    return one_of(*CHUNKS, "a number of tokens of at least 1")(value)  # type: ignore[no-any-return]


def _read_save(value: Any) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or not names or not all(name in SAVE_CLASSES for name in names):
        raise ValueError(f"must be a list out of {list(SAVE_CLASSES)}, but is {shown(value)} instead")
    return tuple(name for name in SAVE_CLASSES if name in names)


def _read_share(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ValueError(f"must be a number from 0 to 1, but is {shown(value)} instead")
    return float(value)


def _read_rules(value: Any) -> tuple[Rule, ...]:
    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError(
            f"must be a list of mappings with `policy` and `layers` or `stack`, but is {shown(value)} instead"
        )
    problems: list[str] = []
    rules = []
    for number, rule in enumerate(value):
        rules.append(_read_rule(number, rule, problems))
        if len(problems) >= _MOST_PROBLEMS:
            problems.append("what follows was not read")
            break
    if problems:
        raise ValueError("; ".join(problem.rstrip(".") for problem in problems))
    return tuple(rule for rule in rules if rule is not None)


def _read_rule(number: int, given: Any, problems: list[str]) -> Rule | None:
    """Read the rule at this position of the list. On failure, add to `problems` and return None."""
    if not isinstance(given, Mapping):
        problems.append(f"[{number}] must be a mapping, but is {shown(given)} instead")
        return None
    readers: dict[str, Callable[[Any], Any]] = {
        "stack": lambda value: None if value is None else str(value),
        "layers": lambda value: None if value is None else _read_layer_text(value),
        "policy": one_of(*(policy for policy in POLICIES if policy not in ("budget", "auto"))),
        "save": _read_save,
        "share": _read_share,
    }
    values: dict[str, Any] = {}
    before = len(problems)
    for key, value in given.items():
        try:
            if key not in readers:
                problems.append(f"[{number}] {unknown_key(key, readers)}")
            else:
                values[key] = readers[key](value)
        except ValueError as error:
            problems.append(f"[{number}].{key} {error}")
    if "policy" not in given:
        problems.append(f"[{number}] needs `policy`")
    if given.get("layers") is None and given.get("stack") is None:
        problems.append(f"[{number}] needs `layers` or `stack`")
    if values.get("save") and values.get("policy") not in (None, *SAVING):
        problems.append(f"[{number}].save goes with {saving_policies()}, but policy is {values['policy']!r}")
    if values.get("share") is not None and values.get("policy") == "none":
        problems.append(f"[{number}].share is how much planned blocks keep, but policy is 'none'")
    return Rule(**values) if len(problems) == before else None


def _read_plan(value: Any) -> str | None:
    if value is not None and (not isinstance(value, (str, Path)) or not str(value)):
        raise ValueError(f"must be the path of a saved plan, but is {shown(value)} instead")
    return None if value is None else str(value)


# Key of a spec -> its reader.
READERS: dict[str, Callable[[Any], Any]] = {
    "policy": one_of(*POLICIES),
    "save": _read_save,
    "every_n_layers": _read_every,
    "layers": _read_layers,
    "segments": _read_segments,
    "budget": _parsed(parse_budget, "budget"),
    "host_budget": _parsed(parse_bytes, "size"),
    "offload": one_of(False, True, "saved"),
    "rules": _read_rules,
    "engine": one_of(*ENGINES),
    "preserve_rng_state": one_of(True, False),
    "determinism_check": one_of("default", "none"),
    "use_reentrant": _read_reentrant,
    "head": _read_tokens,
    "mlp": _read_tokens,
    "check_every": _read_count,
    "on_mismatch": one_of("warn", "raise"),
    "plan": _read_plan,
    "compile": one_of(None, "blocks"),
    "share": _read_share,
}
