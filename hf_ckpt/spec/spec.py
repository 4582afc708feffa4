"""`Spec`: what the user asked for, parsed and validated. It holds plain values only, and needs no torch.

    >>> Spec.parse({"policy": "full", "layers": "0-15,-1"}).to_dict()
    {'policy': 'full', 'layers': '0-15,-1'}

A spec can be a dict, a JSON text, words like "policy=full layers=0-3", a bare policy name, or the path of a YAML or
JSON file. `Spec.parse` reports every problem at once.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_ckpt.errors import SpecError, shown
from hf_ckpt.spec.actions import SAVE_CLASSES
from hf_ckpt.spec.files import load_yaml, parse_values, read_bytes
from hf_ckpt.spec.reading import (
    POLICIES,
    READERS,
    SAVING,
    Layers,
    Rule,
    saving_policies,
    similar_keys,
    unknown_key,
)

PLANNED_POLICIES = ("budget", "auto")
"""Policies whose plan is made in the first steps of the training."""
SELECTING_KEYS = frozenset(
    {"policy", "save", "every_n_layers", "layers", "segments", "budget", "host_budget", "offload", "rules", "plan"}
    | {"compile", "share"}
)
"""Keys that say which blocks get which action. An enable call without any of them keeps the plan that is installed."""
_MOST_UNKNOWN = 10  # unknown keys that an error has a line for
# Keys that people know from elsewhere -> why they are refused.
_FOREIGN_KEYS = {
    "context_fn": "is a callable, which TrainingArguments cannot save as JSON; ask for `policy: selective` instead.",
    "selective": "is TRL's switch for its own selective checkpointing; ask for `policy: selective` instead.",
    "gradient_checkpointing_kwargs": "must not be nested; give its keys directly.",
    "activation_checkpointing_kwargs": "must not be nested; give its keys directly.",
}


@dataclasses.dataclass(frozen=True)
class Spec:
    """A validated request. Build it with `Spec.parse`; the constructor itself checks nothing."""

    policy: str = "full"
    """What blocks get: `none`, `full`, `selective`, `full+selective` or `offload`; `budget` and `auto` choose for each
    block."""
    save: tuple[str, ...] = SAVE_CLASSES
    """For `selective`: the classes of operations whose results are kept, out of `SAVE_CLASSES`; for `full+selective`,
    those that a recomputation keeps."""
    every_n_layers: int = 1
    """Apply the policy to blocks 0, n, 2n, ... of each stack."""
    layers: Layers | None = None
    """Apply the policy to these blocks only: "0-15,-1", or one such text for each stack."""
    segments: int | str | None = None
    """Cut each stack into this many runs of blocks and recompute each run as one region; "sqrt" is the root of the
    number of blocks."""
    budget: int | float | str | None = None
    """For `policy: budget`: the peak that is allowed, in bytes, as "20GiB", or as a share of the device, as "80%"."""
    host_budget: int | str | None = None
    """Host memory that offloading may use, in bytes or as "64GiB". Without it, `budget` and `auto` do not offload."""
    offload: bool | str = False
    """True moves the hidden states that `full` keeps to host memory (the flag of Hugging Face); "saved" moves what
    `selective` saves."""
    rules: tuple[Rule, ...] = ()
    """Exceptions to `policy`; of several that match a block, the last wins."""
    engine: str = "auto"
    """For `selective`: `rebuild`, `sac`, or `auto`, which is `rebuild` in eager mode and `sac` under torch.compile."""
    preserve_rng_state: bool = True
    """Whether a recomputation draws the random numbers of the forward."""
    determinism_check: str = "default"
    """What `torch.utils.checkpoint` compares after a recomputation: `default` for shapes and types, or `none`."""
    use_reentrant: bool = False
    """Always `False`: blocks are recomputed non-reentrantly, also where `True` is asked for, which gives a warning."""
    head: int | str = "full"
    """`full` to run the head as a whole; a number to run it and its loss in chunks of so many tokens; `auto` to let
    hf_ckpt choose the number."""
    mlp: int | str = "full"
    """`full` to run the feed-forward of each block as a whole; a number to run it in chunks of so many tokens; `auto`
    to let hf_ckpt choose the number."""
    plan: str | None = None
    """Path of a saved plan to install instead of planning."""
    compile: str | None = None
    """`blocks` to compile each block by itself, by torch.compile; None leaves compiling to others."""
    share: float | None = None
    """With `compile`: how much the blocks keep, from 0 (their inputs) to 1 (what makes the step fastest). None means
    what the policy stands for: 1 for `none`, 0.5 for `selective`, 0 for `full`."""

    @classmethod
    def parse(cls, given: SpecLike) -> Spec:
        """Read a spec from a dict, a JSON text, `key=value` words, the name of a policy, or the path of a file.

        None is the default spec, and a `Spec` is returned as it is. Raises `SpecError` with every problem found, each
        saying what was given and what is needed.
        """
        if given is None:
            return cls()
        if isinstance(given, Spec):
            return given
        if isinstance(given, Mapping):
            return _from_mapping(given, None)
        if isinstance(given, (str, Path)):
            return _from_text(given)
        raise SpecError(
            [f"a spec must be a dict, a text or a path, but is {type(given).__name__} instead: {shown(given)}"]
        )

    @property
    def is_planned(self) -> bool:
        """Whether the plan is made in the first steps of the training, as with `budget` and `auto`."""
        return self.policy in PLANNED_POLICIES

    def to_dict(self) -> dict[str, Any]:
        """Return the shortest JSON-able dict that `Spec.parse` reads back to an equal spec."""
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
        """Return `to_dict` as one line of JSON."""
        return json.dumps(self.to_dict())

    def updated(self, given: Mapping[str, Any]) -> Spec:
        """Return what is asked for after an enable call with the keyword arguments `given`.

        If they choose blocks or actions, they are a new request, and nothing of this spec stays. Otherwise they change
        only other options of this spec: many callers pass `{"use_reentrant": False}` or nothing when they enable a
        model again, and neither may lose the plan. Raises `SpecError` as `parse` does.
        """
        # Hugging Face's Trainer spells out these defaults in every call; they choose nothing.
        neutral = (("every_n_layers", 1), ("offload", False))
        # The types are compared too: True == 1 in Python, but True is no number of layers.
        asked = {
            key: value
            for key, value in given.items()
            if not any(key == name and type(value) is type(default) and value == default for name, default in neutral)
        }
        if SELECTING_KEYS & asked.keys():
            return Spec.parse(asked)
        return Spec.parse({**self.to_dict(), **asked})


SpecLike = Spec | Mapping[str, Any] | str | Path | None
"""Every form that `Spec.parse` reads."""


def _from_text(given: str | Path) -> Spec:
    text = str(given).strip()
    if isinstance(given, str) and text in POLICIES:
        return Spec.parse({"policy": text})
    if isinstance(given, str) and text.startswith("{"):
        try:
            loaded = json.loads(text)
        except (ValueError, RecursionError) as error:  # no JSON, a number of too many digits, or nested too deep
            raise SpecError([f"not valid JSON ({error}): {shown(text, quoted=False)}"]) from error
        return _from_mapping(loaded, "the JSON text")
    if isinstance(given, str) and "=" in text and not _is_file(text):
        return _from_words(text)
    return _from_file(Path(text))


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # the text is too long for a file name, or holds a null character
        return False


def _from_words(text: str) -> Spec:
    words = [word.partition("=") for word in text.split()]
    broken = [key for key, equals, _ in words if not equals]
    if broken:
        raise SpecError([f"words must look like key=value, but {shown(broken[0])} does not"], shown(text))
    try:
        values = {key: load_yaml(value) for key, _, value in words}
    except ValueError as error:
        raise SpecError([f"not readable as key=value words: {error}"], shown(text)) from error
    return _from_mapping(values, shown(text))


def _from_file(path: Path) -> Spec:
    try:
        content = read_bytes(path)
    except ValueError as error:
        hint = f"; a text must be JSON, key=value words, a file, or one of {', '.join(POLICIES)}"
        raise SpecError([f"cannot read {shown(str(path))}: {error}{hint}"]) from error
    try:
        loaded = parse_values(content, path.suffix)
    except ValueError as error:
        raise SpecError([str(error)], str(path)) from error
    return _from_mapping(loaded, str(path))


def _from_mapping(given: Any, source: str | None) -> Spec:
    """Read a mapping of keys; `source` says in the error where it came from. Raises `SpecError` with every problem."""
    if not isinstance(given, Mapping):
        raise SpecError(
            [f"a spec must be a mapping of keys, but is {type(given).__name__} instead: {shown(given)}"], source
        )
    problems: list[str] = []
    values: dict[str, Any] = {}
    broken: set[str] = set()
    """Keys whose value is not known, because it was refused or because the key is misspelt."""
    unknown = 0
    for key, value in given.items():
        reader = READERS.get(key)
        if reader is None:
            unknown += 1
            broken.update(similar_keys(key, READERS))
            if unknown <= _MOST_UNKNOWN:
                problems.append(unknown_key(key, READERS, _FOREIGN_KEYS))
            continue
        try:
            values[key] = reader(value)
            continue
        except ValueError as error:
            problems.append(f"`{key}` {error}.".replace("?.", "?"))
        except RecursionError:
            problems.append(f"`{key}` is nested too deep.")
        broken.add(key)
    if unknown > _MOST_UNKNOWN:
        problems.append(f"{unknown - _MOST_UNKNOWN} further keys are not keys of the spec.")
    if "policy" not in given:
        values["policy"] = _implied_policy(values)
    spec = Spec(**{key: value for key, value in values.items() if value is not None})
    # A conflict with a key whose value is not known would follow from a mistake that is told already.
    problems += [text for text in _conflicts(spec, given) if broken.isdisjoint(re.findall(r"\w+", text))]
    if problems:
        raise SpecError(problems, source)
    return spec


def _implied_policy(values: Mapping[str, Any]) -> str:
    """Return the policy of a spec that names none, from its other keys."""
    if values.get("budget") is not None:
        return "budget"
    chosen = {"layers", "every_n_layers", "segments"} & values.keys()
    return "none" if values.get("rules") and not chosen else "full"


_Checks = list[tuple[bool, str]]
"""(whether the keys are in conflict, the sentence that says so) for each combination that is looked at."""


def _conflicts(spec: Spec, given: Mapping[str, Any]) -> list[str]:
    """Return a sentence for every combination of keys that cannot be honoured as a whole."""
    policies = {spec.policy, *(rule.policy for rule in spec.rules)}
    planned = set(PLANNED_POLICIES) & policies
    checks = [
        *_budget_checks(spec),
        *_selective_checks(spec, given, policies, planned),
        *_offload_checks(spec, policies, planned),
        *_choice_checks(spec, planned),
        *_compile_checks(spec, given, policies, planned),
        (
            spec.plan is not None
            and bool(SELECTING_KEYS & given.keys() - {"plan", "host_budget", "every_n_layers", "offload"}),
            "`plan` already says what every block gets; remove the other selecting keys.",
        ),
    ]
    return [problem for wrong, problem in checks if wrong]


def _budget_checks(spec: Spec) -> _Checks:
    """Check `budget` against the policy."""
    return [
        (spec.policy == "budget" and spec.budget is None, "`policy: budget` needs `budget`, for example '20GiB'."),
        (
            spec.budget is not None and spec.policy != "budget",
            f"`budget` goes with `policy: budget`, but policy is {spec.policy!r}.",
        ),
    ]


def _selective_checks(spec: Spec, given: Mapping[str, Any], policies: set[str], planned: set[str]) -> _Checks:
    """Check the keys of `selective`: `save` and `engine`."""
    return [
        (
            "save" in given and not ({*SAVING} | planned) & policies,
            f"`save` goes with {saving_policies()}, but policy is {spec.policy!r}.",
        ),
        (
            spec.engine != "auto" and not ({"selective"} | planned) & policies,
            f"`engine` goes with `policy: selective`, but policy is {spec.policy!r}.",
        ),
        (
            spec.engine == "sac" and spec.mlp != "full",
            "`mlp` in chunks needs the rebuild engine: SAC would keep the results of every chunk.",
        ),
    ]


def _offload_checks(spec: Spec, policies: set[str], planned: set[str]) -> _Checks:
    """Check the keys about host memory: `host_budget` and `offload`."""
    return [
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
    ]


def _compile_checks(spec: Spec, given: Mapping[str, Any], policies: set[str], planned: set[str]) -> _Checks:
    """Check the keys of compiled blocks: `compile` and `share`."""
    compiled = spec.compile is not None
    shares = spec.share is not None or any(rule.share is not None for rule in spec.rules)
    others = [key for key in ("save", "engine", "offload", "segments", "host_budget") if given.get(key)]
    others = [key for key in others if given[key] != "auto"]
    return [
        (shares and not compiled, '`share` is how much compiled blocks keep; it needs `compile: "blocks"`.'),
        (
            compiled and spec.share is not None and spec.policy == "none",
            "`share` is for the blocks that the policy is about, but policy is 'none'; leave one of them out.",
        ),
        (
            compiled and shares and bool(planned),
            f"`share` is what the plan chooses, but policy is {spec.policy!r}; leave one of them out.",
        ),
        (
            compiled and "offload" in policies,
            "compiled blocks are not offloaded; take `none`, `selective` or `full`, or a `share`.",
        ),
        (
            compiled and "full+selective" in policies,
            "compiled blocks leave to the compiler what is rebuilt; take `none`, `selective` or `full`, or a `share`.",
        ),
        (
            compiled and bool(others),
            f'`compile: "blocks"` leaves to the compiler what a block keeps; remove {", ".join(others)}.',
        ),
        (
            compiled and spec.mlp != "full",
            "`mlp` in chunks would be a loop in the graph of a compiled block, which the compiler takes apart again; "
            "leave `mlp` or `compile` out.",
        ),
    ]


def _choice_checks(spec: Spec, planned: set[str]) -> _Checks:
    """Check the keys that choose blocks: `layers`, `every_n_layers`, `segments` and `rules`."""
    selecting = [key for key in ("layers", "segments") if getattr(spec, key) is not None]
    selecting += ["every_n_layers"] if spec.every_n_layers != 1 else []
    return [
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
    ]
