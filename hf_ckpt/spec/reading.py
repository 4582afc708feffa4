"""Readers of the values in a spec, one for each key; `READERS` lists them.

A reader returns the parsed value, or raises `ValueError`. The message continues a sentence that begins with the key.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from hf_ckpt.errors import shown
from hf_ckpt.logs import warn_once
from hf_ckpt.spec.actions import ACTIONS, SAVE_CLASSES
from hf_ckpt.units import parse_budget, parse_bytes

log = logging.getLogger(__name__)

_OTHERS = (record.name for record in ACTIONS.values() if record.is_policy and record.name != "full")
POLICIES = ("none", "full", *_OTHERS, "budget", "auto")
SAVING = tuple(record.name for record in ACTIONS.values() if record.is_policy and "save" in record.options)
"""Policies with the option `save`."""
SEGMENTED = tuple(record.name for record in ACTIONS.values() if record.is_policy and "made" in record.options)
"""Policies whose blocks can be divided into segments."""

Layers = str | tuple[tuple[str, str], ...]
"""A choice of blocks like "0-15,-1" for every stack, or (stack, such a choice) pairs."""
Segments = int | str | tuple[tuple[str, int | str], ...]
"""A number of segments or `sqrt` for every stack, or (stack, such a number) pairs."""

Reader = Callable[[Any], Any]
MOST = 2**63
"""Whole numbers are below this. JSON has no limit, but Python writes no more than 4,300 digits."""
_RANGE = re.compile(r"(-?\d{1,9})(-(-?\d{1,9})?)?")


@dataclasses.dataclass(frozen=True)
class Rule:
    """One exception to the policy of a spec. If several match a block, the last one counts."""

    policy: str
    """The policy of its blocks: `none`, `full`, `selective`, `full+selective` or `offload`; or the spec's own, `budget`
    or `auto`."""
    layers: str | None = None
    """The blocks, as in `Spec.layers`; None for every block of `stack`."""
    stack: str | None = None
    """Name of the stack; None for every stack."""
    save: tuple[str, ...] | None = None
    """As `Spec.save`; None for the spec's own."""
    share: float | None = None
    """As `Spec.share`; None for the share of the rule's policy."""
    segments: int | str | None = None
    """As `Spec.segments`, counted in the blocks of the rule; None if they belong to the segments of the spec."""

    def to_dict(self) -> dict[str, Any]:
        """Return the rule as a dict, as in a spec."""
        values = {key: value for key, value in vars(self).items() if value is not None}
        return values | ({"save": list(self.save)} if self.save else {})


class PartlyWrong(ValueError):
    """A value with several parts has faults. `rest` is the value of the other parts, which is checked further."""

    def __init__(self, message: str, rest: Any) -> None:
        self.rest = rest
        super().__init__(message)


def _must_be(wanted: str, value: object, hint: str = "") -> ValueError:
    return ValueError(f"must be {wanted}, but is {shown(value)} instead{hint}")


def parse_layers(text: str) -> tuple[tuple[int, int], ...]:
    """Read a choice of blocks: `parse_layers("0-15,-1") == ((0, 15), (-1, -1))`.

    Ranges are pairs of a first and a last position. They include both ends, negative numbers count from the end, and
    "2-" goes to the end. Raises `ValueError` for other texts.
    """
    ranges = []
    for part in text.replace(" ", "").split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise _must_be("a list like '0-15,-1'", text)
        first, until, last = match.groups()
        ranges.append((int(first), int(last or (-1 if until else first))))
    return tuple(ranges)


def similar(key: object, names: Iterable[Any], most: int = 2) -> list[str]:
    """Return the names that a text may be a misspelling of, the most similar first."""
    return difflib.get_close_matches(shown(key, 60, quoted=False), [str(name) for name in names], n=most, cutoff=0.6)


def read_keys(
    written: Mapping[Any, Any],
    readers: Mapping[str, Reader],
    reasons: Mapping[str, str] | None = None,
    of: str = "the spec",
) -> tuple[dict[str, Any], list[str]]:
    """Read each value of a mapping by the reader of its key.

    Returns key -> value, and a sentence for each key that is unknown or whose value is invalid. `reasons` continue the
    sentence about keys that people know from elsewhere; `of` is what has the keys.
    """
    values: dict[str, Any] = {}
    problems: list[str] = []
    for key, value in written.items():
        if key in readers:
            try:
                values[key] = readers[key](value)
            except ValueError as error:
                if isinstance(error, PartlyWrong):
                    values[key] = error.rest
                problems.append(f"`{key}` {error}.".replace("?.", "?").replace("?,", "?"))
        else:
            near = " or ".join(f"`{name}`" for name in similar(key, readers))
            hint = f"did you mean {near}?" if near else f"known: {', '.join(readers)}."
            usual = f"is not a key of {of}; {hint}"
            problems.append(f"`{shown(key, 60, quoted=False)}` {(reasons or {}).get(key, usual)}")
    return values, problems


def did_you_mean(value: object, allowed: Iterable[object]) -> str:
    """Return the end of an error: the choice that a value may be a misspelling of; empty without one."""
    near = similar(value, [choice for choice in allowed if isinstance(choice, str)], 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def goes_with(option: str, policies: Iterable[str], policy: object) -> str:
    """Return the sentence for an option that only some policies have."""
    listed = " or ".join(f"`policy: {name}`" for name in policies)
    return f"`{option}` goes with {listed}, but policy is {policy!r}"


def one_of(*allowed: object) -> Reader:
    """Return a reader that accepts these values only. It does not accept 0 and 1 for False and True."""

    def read(value: Any) -> Any:
        for choice in allowed:
            # `0 == False` in Python. A number is refused, because it may be meant for another key.
            if isinstance(value, type(choice)) and value == choice:
                return choice
        choices = ", ".join(json.dumps(choice) for choice in allowed)
        raise _must_be(f"one of {choices}", value, did_you_mean(value, allowed))

    return read


def whole(least: int, *others: str) -> Reader:
    """Return a reader of whole numbers of at least `least`, and of these texts."""
    wanted = " or ".join([f"a whole number of at least {least}", *map(repr, others)])

    def read(value: Any) -> int | str:
        if type(value) is int and value >= MOST:
            raise _must_be("below 2**63", value)
        if (type(value) is int and value >= least) or (isinstance(value, str) and value in others):
            return value
        # `full` is a policy, under which everything is recomputed. It once meant the opposite here, too.
        is_old = value == "full" and "whole" in others
        raise _must_be(wanted, value, "; write 'whole'" if is_old else did_you_mean(value, others))

    return read


def _optional(read: Reader) -> Reader:
    """Return a reader for which None is allowed, too."""
    return lambda value: None if value is None else read(value)


def _read_reentrant(value: Any) -> bool:
    # True was the default of transformers before 5, so that scripts and saved arguments have it. To refuse them would
    # stop trainings over a value that changes no gradient.
    if one_of(True, False)(value):
        text = "hf_ckpt recomputes non-reentrantly: same gradients, fewer conditions."
        warn_once(log, f"{text} `use_reentrant=True` has no effect.")
    return False


def _read_layer_text(value: Any) -> str:
    """Read a choice of blocks in one stack: a number, a list of numbers, or a text like "0-15,-1"."""
    numbers = [value] if type(value) is int else value
    if isinstance(numbers, (list, tuple)) and numbers and all(type(index) is int for index in numbers):
        value = ",".join(map(shown, numbers))  # `str` raises an error of its own for numbers with thousands of digits
    if not isinstance(value, str):
        raise _must_be("a list like '0-15,-1'", value)
    parse_layers(value)
    return value.replace(" ", "")


def _for_stacks(read: Reader) -> Reader:
    """Return a reader that also accepts a mapping with a value for each stack, and returns (stack, value) pairs."""

    def read_all(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return read(value)
        if not value:
            raise ValueError("must name at least one stack, but is empty")
        values, problems = read_keys(value, dict.fromkeys(value, read))
        right = tuple((str(stack), each) for stack, each in values.items())
        if problems:
            message = f"for each stack: {' '.join(problems)}".rstrip(".")
            raise PartlyWrong(message, right) if right else ValueError(message)
        return right

    return read_all


def _read_save(value: Any) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or not names or not all(name in SAVE_CLASSES for name in names):
        raise _must_be(f"a list out of {list(SAVE_CLASSES)}", value)
    return tuple(name for name in SAVE_CLASSES if name in names)  # in one order, so that equal actions compare equal


def _read_share(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise _must_be("a number from 0 to 1", value)
    return float(value)


def _read_plan(value: Any) -> str:
    if not isinstance(value, (str, Path)) or not str(value):
        raise _must_be("the path of a saved plan", value)
    return str(value)


def _read_rules(value: Any) -> tuple[Rule, ...]:
    if not isinstance(value, (list, tuple)) or not value:
        raise _must_be("a list of mappings with `policy` and `layers` or `stack`", value)
    numbered = {f"[{number}]": rule for number, rule in enumerate(value)}
    rules, problems = read_keys(numbered, dict.fromkeys(numbered, _read_rule))
    if problems:
        raise PartlyWrong(" ".join(problems).rstrip("."), tuple(rules.values()))
    return tuple(rules.values())


def _read_rule(written: Any) -> Rule:
    if not isinstance(written, Mapping):
        raise PartlyWrong(str(_must_be("a mapping", written)), Rule("none"))
    values, problems = read_keys(written, RULE_READERS, of="a rule")
    policy = values.get("policy")
    if "policy" not in written and not any("`policy`" in problem for problem in problems):  # not misspelt, either
        problems.append("needs `policy`")
    if written.get("layers") is None and written.get("stack") is None:  # else it would be the policy of the spec
        problems.append("needs `layers` or `stack`")
    if values.get("share") is not None and policy == "none":
        problems.append("`share` is how much planned blocks keep, but policy is 'none'")
    for option, policies in (("save", SAVING), ("segments", SEGMENTED)):
        if values.get(option) is not None and policy not in (None, *policies):
            problems.append(goes_with(option, policies, policy))
    if problems:
        # The places of other rules in the list stay, and the blocks of this one are looked for.
        rest = Rule(**{"policy": "none", **values})
        raise PartlyWrong(", and ".join(problem.rstrip(".") for problem in problems), rest)
    return Rule(**values)


# Key of a rule -> its reader.
RULE_READERS: dict[str, Reader] = {
    "stack": _optional(str),
    "layers": _optional(_read_layer_text),
    "policy": one_of(*POLICIES),
    "save": _read_save,
    "share": _optional(_read_share),
    "segments": _optional(whole(1, "sqrt")),
}
# Key of a spec -> its reader.
READERS: dict[str, Reader] = {
    "policy": _for_stacks(one_of(*POLICIES)),
    "save": _read_save,
    "every_n_layers": whole(1),
    "layers": _optional(_for_stacks(_read_layer_text)),
    "budget": _optional(parse_budget),
    "host_budget": _optional(parse_bytes),
    "offload": one_of(False, True, "saved"),
    "rules": _read_rules,
    "preserve_rng_state": one_of(True, False),
    "determinism_check": one_of("default", "none"),
    "use_reentrant": _read_reentrant,
    "head": whole(1, "whole", "auto"),
    "mlp": whole(1, "whole", "auto"),
    "segments": _optional(_for_stacks(whole(1, "sqrt"))),
    "check_every": whole(0),
    "on_mismatch": one_of("warn", "raise", "avoid"),
    "plan": _optional(_read_plan),
    "compile": one_of(None, "blocks"),
    "share": _optional(_read_share),
}
# Option of an action in a saved plan -> its reader.
OPTIONS: dict[str, Reader] = {
    "save": _read_save,
    "moved": one_of(True, False),
    "made": one_of(True, False),
    "share": _optional(_read_share),
    "tile": _optional(whole(1, "auto")),
}
