"""What the user asked for: parsed and validated here, free of torch and of callables.

    >>> Spec.parse({"policy": "full", "layers": "0-15,-1"}).to_dict()
    {'policy': 'full', 'layers': '0-15,-1'}

A spec can be a dict, a JSON text, words like "policy=full layers=0-3", a bare policy name, or the path of a YAML or
JSON file. `Spec.parse` reports every problem at once.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_ckpt.errors import SpecError
from hf_ckpt.plan import SAVE_CLASSES as SAVE_CLASSES
from hf_ckpt.plan import load_yaml
from hf_ckpt.units import UnitError, parse_bytes, parse_fraction

POLICIES = ("none", "full", "selective", "offload", "budget", "auto")
DEFAULT_SAVE = ("linear", "attention")
ENGINES = ("auto", "rebuild", "sac")
HEADS = ("full", "auto")
# Keys that say which blocks get what. An enable call without any of them keeps the plan that is installed.
SELECTING_KEYS = frozenset(
    {"policy", "save", "every_n_layers", "layers", "segments", "budget", "host_budget", "offload", "rules", "plan"}
)

LayerRange = tuple[int, int]
Layers = str | tuple[tuple[str, str], ...]  # one text for every stack, or (stack, text) pairs

_RANGE = re.compile(r"(-?\d+)(?:-(-?\d+))?")


@dataclasses.dataclass(frozen=True)
class Rule:
    """One exception to the base policy; of several rules that match a block, the last wins."""

    layers: str
    """Which blocks of the stack, as in `Spec.layers`."""
    policy: str
    """`none`, `full`, `selective` or `offload`."""
    stack: str | None = None
    """Name of the stack; None is every stack."""
    save: tuple[str, ...] | None = None
    """Op classes whose results stay, for `selective`."""

    def to_dict(self) -> dict[str, Any]:
        full = {
            "stack": self.stack,
            "layers": self.layers,
            "policy": self.policy,
            "save": self.save and list(self.save),
        }
        return {key: value for key, value in full.items() if value is not None}


@dataclasses.dataclass(frozen=True)
class Spec:
    """A validated request. Build it with `Spec.parse`; the constructor itself checks nothing."""

    policy: str = "full"
    """`none`, `full`, `selective`, `offload`, `budget` or `auto`."""
    save: tuple[str, ...] = DEFAULT_SAVE
    """Op classes whose results `selective` keeps."""
    every_n_layers: int = 1
    """Apply the policy to blocks 0, n, 2n, ... of each stack."""
    layers: Layers | None = None
    """Apply the policy to these blocks only: "0-15,-1", or one such text for each stack."""
    segments: int | str | None = None
    """Recompute this many runs of blocks as one region each, or "sqrt"."""
    budget: int | float | str | None = None
    """The peak allowed: bytes, "20GiB", or a fraction of the device ("80%", 0.8)."""
    host_budget: int | str | None = None
    """Host memory that offloading may use, in bytes or as "64GiB". Without it a planned policy does not offload."""
    offload: bool | str = False
    """Hugging Face's flag (`True`: hidden states to host memory), or "saved"."""
    rules: tuple[Rule, ...] = ()
    """Exceptions, applied in order."""
    engine: str = "auto"
    """`auto`, `rebuild` or `sac`, for `selective`."""
    preserve_rng_state: bool | str = "auto"
    """`auto`, `True` or `False`."""
    determinism_check: str = "default"
    """`default` or `none`, as in `torch.utils.checkpoint`."""
    use_reentrant: bool = False
    """Only `False` is accepted."""
    head: int | str = "full"
    """`full`, or the head and its loss in chunks of so many tokens; `auto` chooses how many."""
    plan: str | None = None
    """Path of a saved plan to install instead of planning."""

    @classmethod
    def parse(cls, given: SpecLike) -> Spec:
        """Read a spec from any of its forms.

        Raises `SpecError` with every problem found, each saying what was given and what is needed.
        """
        if given is None:
            return cls()
        if isinstance(given, Spec):
            return given
        if isinstance(given, Mapping):
            return _from_mapping(given, None)
        if isinstance(given, (str, Path)):
            return _from_text(given)
        raise SpecError([f"a spec must be a dict, a text or a path, but is {type(given).__name__} instead: {given!r}"])

    def to_dict(self) -> dict[str, Any]:
        """The shortest JSON-able dict that parses back to an equal spec."""
        found: dict[str, Any] = {} if self.plan else {"policy": self.policy}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "policy" or value == field.default:
                continue
            if field.name == "rules":
                value = [rule.to_dict() for rule in self.rules]
            elif field.name == "layers" and isinstance(value, tuple):
                value = dict(value)
            elif isinstance(value, tuple):
                value = list(value)
            found[field.name] = value
        return found

    def to_json(self) -> str:
        """`to_dict` as one line of JSON."""
        return json.dumps(self.to_dict())

    def updated(self, given: Mapping[str, Any]) -> Spec:
        """This spec after an enable call with `given`: a new request if it selects blocks, else only other options.

        Callers everywhere pass `{"use_reentrant": False}` or nothing on re-enabling; neither may lose the plan.
        """
        # Hugging Face's Trainer spells out its defaults on every call; they select nothing.
        neutral = (("every_n_layers", 1), ("offload", False))
        # By type too: True == 1 in Python, but it is no number of layers.
        asked = {
            key: value
            for key, value in given.items()
            if not any(key == name and type(value) is type(default) and value == default for name, default in neutral)
        }
        if SELECTING_KEYS & asked.keys():
            return Spec.parse(asked)
        return Spec.parse({**self.to_dict(), **asked})


SpecLike = Spec | Mapping[str, Any] | str | Path | None


def parse_layers(text: str) -> tuple[LayerRange, ...]:
    """`parse_layers("0-15,-1") == ((0, 15), (-1, -1))`: inclusive ranges, negative counts from the end.

    Raises `ValueError` when the text is not a list of numbers and ranges.
    """
    ranges = []
    for part in text.replace(" ", "").split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(f"must be a list like '0-15,-1', but is {text!r} instead")
        first = int(match.group(1))
        ranges.append((first, first if match.group(2) is None else int(match.group(2))))
    return tuple(ranges)


def _from_text(given: str | Path) -> Spec:
    text = str(given).strip()
    if isinstance(given, str) and text in POLICIES:
        return Spec.parse({"policy": text})
    if isinstance(given, str) and text.startswith("{"):
        try:
            loaded = json.loads(text)
        except (ValueError, RecursionError) as error:  # no JSON, a number of too many digits, or too deep
            raise SpecError([f"not valid JSON ({error}): {text}"]) from error
        return _from_mapping(loaded, "the JSON text")
    if isinstance(given, str) and "=" in text and not _is_file(text):
        return _from_words(text)
    return _from_file(Path(text))


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # too long for a name, or with a null character in it
        return False


def _from_words(text: str) -> Spec:
    words = [word.partition("=") for word in text.split()]
    broken = [key for key, equals, _ in words if not equals]
    if broken:
        raise SpecError([f"words must look like key=value, but {broken[0]!r} does not"], repr(text))
    try:
        values = {key: load_yaml(value) for key, _, value in words}
    except ValueError as error:
        raise SpecError([f"not readable as key=value words: {error}"], repr(text)) from error
    return _from_mapping(values, repr(text))


def _from_file(path: Path) -> Spec:
    try:
        content = path.read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        hint = f"; a text must be JSON, key=value words, a file, or one of {', '.join(POLICIES)}"
        raise SpecError([f"cannot read {str(path)!r}: {reason}{hint}"]) from error
    try:
        loaded = load_yaml(content.decode("utf-8"))
    except ValueError as error:
        raise SpecError([f"not valid YAML: {error}"], str(path)) from error
    return _from_mapping(loaded, str(path))


def _from_mapping(given: Any, source: str | None) -> Spec:
    if not isinstance(given, Mapping):
        raise SpecError([f"a spec must be a mapping of keys, but is {type(given).__name__} instead: {given!r}"], source)
    problems: list[str] = []
    values: dict[str, Any] = {}
    for key, value in given.items():
        reader = _READERS.get(key)
        if reader is None:
            problems.append(unknown_key(key, _READERS, _FOREIGN_KEYS))
            continue
        try:
            values[key] = reader(value)
        except ValueError as error:
            problems.append(f"`{key}` {error}.")
    if "policy" not in given:
        values["policy"] = _implied_policy(values)
    spec = Spec(**{key: value for key, value in values.items() if value is not None})
    problems += _conflicts(spec, given)
    if problems:
        raise SpecError(problems, source)
    return spec


def _implied_policy(values: Mapping[str, Any]) -> str:
    if values.get("budget") is not None:
        return "budget"
    chosen = {"layers", "every_n_layers", "segments"} & values.keys()
    return "none" if values.get("rules") and not chosen else "full"


def unknown_key(key: object, known: Sequence[str] | Mapping[str, Any], reasons: Mapping[str, str] | None = None) -> str:
    """One sentence about a key nobody knows, with the nearest known ones."""
    if reasons and key in reasons:
        return f"`{key}` {reasons[str(key)]}"
    near = difflib.get_close_matches(str(key), list(known), n=2, cutoff=0.6)
    hint = f"; did you mean {' or '.join(f'`{name}`' for name in near)}?" if near else f"; known: {', '.join(known)}."
    return f"`{key}` is not a key of the spec{hint}"


_FOREIGN_KEYS = {
    "context_fn": "is a callable, which TrainingArguments cannot save as JSON; ask for `policy: selective` instead.",
    "selective": "is TRL's switch for its own selective checkpointing; ask for `policy: selective` instead.",
    "gradient_checkpointing_kwargs": "must not be nested; give its keys directly.",
    "activation_checkpointing_kwargs": "must not be nested; give its keys directly.",
}


def _conflicts(spec: Spec, given: Mapping[str, Any]) -> list[str]:
    """Combinations that could not all be honoured."""
    policies = {spec.policy, *(rule.policy for rule in spec.rules)}
    planned = {"budget", "auto"} & policies
    selecting = [key for key in ("layers", "segments") if getattr(spec, key) is not None]
    selecting += ["every_n_layers"] if spec.every_n_layers != 1 else []
    checks = [
        (spec.policy == "budget" and spec.budget is None, "`policy: budget` needs `budget`, for example '20GiB'."),
        (
            spec.budget is not None and spec.policy != "budget",
            f"`budget` goes with `policy: budget`, but policy is {spec.policy!r}.",
        ),
        (
            "save" in given and not ({"selective"} | planned) & policies,
            f"`save` goes with `policy: selective`, but policy is {spec.policy!r}.",
        ),
        (
            spec.engine != "auto" and not ({"selective"} | planned) & policies,
            f"`engine` goes with `policy: selective`, but policy is {spec.policy!r}.",
        ),
        (
            spec.host_budget is not None
            and not ({"offload"} | planned) & policies
            and not spec.offload
            and spec.plan is None,
            f"`host_budget` goes with offload, budget or auto, but policy is {spec.policy!r}.",
        ),
        (
            spec.offload is True and not ({"full", "offload"} | planned) & policies,
            f"`offload: true` moves what `full` keeps, but policy is {spec.policy!r}; for `selective` it is 'saved'.",
        ),
        (
            spec.offload == "saved" and not ({"selective"} | planned) & policies,
            f"`offload: saved` moves what `selective` saves, but policy is {spec.policy!r}; for `full` it is true.",
        ),
        (
            spec.offload == "saved" and spec.engine == "sac",
            "`offload: saved` needs the rebuild engine: SAC does not let what it saves be moved.",
        ),
        (
            spec.offload is True and spec.segments is not None,
            "`offload` moves the hidden states of single blocks; it cannot be combined with `segments`.",
        ),
        (
            spec.layers is not None and spec.every_n_layers != 1,
            "`layers` and `every_n_layers` both choose blocks; give one of them.",
        ),
        (
            spec.segments is not None and spec.policy != "full",
            f"`segments` goes with `policy: full`, but policy is {spec.policy!r}.",
        ),
        (
            spec.segments is not None and (spec.layers is not None or spec.every_n_layers != 1 or bool(spec.rules)),
            "`segments` covers whole stacks; it cannot be combined with `layers`, `every_n_layers` or `rules`.",
        ),
        (
            bool(selecting or spec.rules) and bool(planned),
            f"`policy: {spec.policy}` chooses the blocks itself; remove {', '.join(selecting) or 'rules'}.",
        ),
        (
            spec.policy == "none" and bool(selecting) and spec.segments is None,
            f"`policy: none` leaves every block as it is; remove {', '.join(selecting)}.",
        ),
        (
            spec.plan is not None
            and bool(SELECTING_KEYS & given.keys() - {"plan", "host_budget", "every_n_layers", "offload"}),
            "`plan` already says what every block gets; remove the other selecting keys.",
        ),
    ]
    return [problem for wrong, problem in checks if wrong]


def _one_of(*allowed: object) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        for choice in allowed:
            if value == choice and isinstance(value, bool) == isinstance(choice, bool):
                return choice
        near = difflib.get_close_matches(str(value), [str(choice) for choice in allowed], n=1, cutoff=0.6)
        shown = ", ".join(json.dumps(choice) for choice in allowed)
        raise ValueError(
            f"must be one of {shown}, but is {value!r} instead{f'; did you mean {near[0]!r}?' if near else ''}"
        )

    return read


def _read_reentrant(value: Any) -> bool:
    if value is False:
        return False
    if value is True:
        raise ValueError(
            "must be false, but is True instead: reentrant checkpointing drops gradients of adapters whose input needs "
            "none, ignores keyword inputs and cannot stop a recomputation early"
        )
    raise ValueError(f"must be false, but is {value!r} instead")


def _read_every(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"must be a whole number of at least 1, but is {value!r} instead")
    return value


def _read_layer_text(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if isinstance(value, (list, tuple)) and value and all(type(index) is int for index in value):
        value = ",".join(str(index) for index in value)
    if not isinstance(value, str):
        raise ValueError(f"must be a list like '0-15,-1', but is {value!r} instead")
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
        raise ValueError(f"must be a whole number of at least 1 or 'sqrt', but is {value!r} instead")
    return value


def _read_size(value: Any) -> int | str | None:
    if value is not None:
        try:
            parse_bytes(value)
        except UnitError as error:
            raise ValueError(f"is no size: {error}".rstrip(".")) from None
    return value  # type: ignore[no-any-return]


def _read_budget(value: Any) -> int | float | str | None:
    if isinstance(value, float) and not 0 < value <= 1:
        raise ValueError(f"as a fraction must be above 0 and at most 1, but is {value!r} instead")
    if isinstance(value, float):
        return value
    if isinstance(value, str) and value.strip().endswith("%"):
        try:
            parse_fraction(value)
        except UnitError as error:
            raise ValueError(f"is no share: {error}".rstrip(".")) from None
        return value
    return _read_size(value)


def _read_head(value: Any) -> int | str:
    if type(value) is int and value >= 1:
        return value
    return _one_of(*HEADS, "a number of tokens of at least 1")(value)  # type: ignore[no-any-return]


def _read_save(value: Any) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or not names or not set(map(str, names)) <= set(SAVE_CLASSES):
        raise ValueError(f"must be a list out of {list(SAVE_CLASSES)}, but is {value!r} instead")
    return tuple(name for name in SAVE_CLASSES if name in names)


def _read_rules(value: Any) -> tuple[Rule, ...]:
    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError(f"must be a list of mappings with `layers` and `policy`, but is {value!r} instead")
    problems: list[str] = []
    rules = [_read_rule(number, rule, problems) for number, rule in enumerate(value)]
    if problems:
        raise ValueError("; ".join(problem.rstrip(".") for problem in problems))
    return tuple(rule for rule in rules if rule is not None)


def _read_rule(number: int, given: Any, problems: list[str]) -> Rule | None:
    if not isinstance(given, Mapping):
        problems.append(f"[{number}] must be a mapping, but is {given!r} instead")
        return None
    readers: dict[str, Callable[[Any], Any]] = {
        "stack": lambda value: None if value is None else str(value),
        "layers": _read_layer_text,
        "policy": _one_of("none", "full", "selective", "offload"),
        "save": _read_save,
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
    problems += [f"[{number}] needs `{key}`" for key in ("layers", "policy") if key not in given]
    if values.get("save") and values.get("policy") not in (None, "selective"):
        problems.append(f"[{number}].save goes with `policy: selective`, but policy is {values['policy']!r}")
    return Rule(**values) if len(problems) == before else None


def _read_plan(value: Any) -> str | None:
    if value is not None and (not isinstance(value, (str, Path)) or not str(value)):
        raise ValueError(f"must be the path of a saved plan, but is {value!r} instead")
    return None if value is None else str(value)


_READERS: dict[str, Callable[[Any], Any]] = {
    "policy": _one_of(*POLICIES),
    "save": _read_save,
    "every_n_layers": _read_every,
    "layers": _read_layers,
    "segments": _read_segments,
    "budget": _read_budget,
    "host_budget": _read_size,
    "offload": _one_of(False, True, "saved"),
    "rules": _read_rules,
    "engine": _one_of(*ENGINES),
    "preserve_rng_state": _one_of("auto", True, False),
    "determinism_check": _one_of("default", "none"),
    "use_reentrant": _read_reentrant,
    "head": _read_head,
    "plan": _read_plan,
}
