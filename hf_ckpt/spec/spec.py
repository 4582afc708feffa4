"""`Spec`: what the user asked for, parsed and validated. This file does not import torch.

>>> Spec.parse({"policy": "full", "layers": "0-15,-1"}).to_dict()
{'policy': 'full', 'layers': '0-15,-1'}
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hf_ckpt.errors import SpecError, shown
from hf_ckpt.spec.actions import SAVE_CLASSES
from hf_ckpt.spec.files import parse_values, read_values
from hf_ckpt.spec.reading import MOST_PROBLEMS, POLICIES, READERS, SAVING, Layers, Rule, read_keys, similar
from hf_ckpt.units import exact_size

PLANNED_POLICIES = ("budget", "auto")
"""Policies whose plan is made in the first steps of a run."""
SELECTING_KEYS = frozenset(
    {"policy", "save", "every_n_layers", "layers", "segments", "budget", "host_budget", "offload", "rules", "plan"}
    | {"compile", "share", "mlp"}
)
"""Keys that choose blocks or actions. An enable call without any of them keeps the installed plan."""
# Keys that people know from elsewhere -> why they are refused.
_FOREIGN_KEYS = {
    "context_fn": "is a callable, which TrainingArguments cannot save as JSON; ask for `policy: selective` instead.",
    "selective": "is TRL's switch for its own selective checkpointing; ask for `policy: selective` instead.",
    "gradient_checkpointing_kwargs": "must not be nested; give its keys directly.",
    "activation_checkpointing_kwargs": "must not be nested; give its keys directly.",
}


@dataclasses.dataclass(frozen=True)
class Spec:
    """What to do with the activations of a model: a policy with its options, validated.

        >>> Spec.parse("budget=20GiB host_budget=64GiB").budget
        21474836480

    Use `Spec.parse`. The constructor does not validate.
    """

    policy: str = "full"
    """The action of the blocks: `none`, `full`, `selective`, `full+selective` or `offload`. `budget` and `auto` choose
    an action for each block."""
    save: tuple[str, ...] = SAVE_CLASSES
    """For `selective`: operations whose results are saved, out of `linear` and `attention`. For `full+selective`: those
    that are saved while the block is recomputed."""
    every_n_layers: int = 1
    """Apply the policy to blocks 0, n, 2n, ... of each stack."""
    layers: Layers | None = None
    """Apply the policy to these blocks only: "0-15,-1", or one such text for each stack."""
    segments: int | str | None = None
    """Split each stack into this many segments, and recompute each segment as a whole. "sqrt" is the square root of the
    number of blocks."""
    budget: float | None = None
    """For `policy: budget`: the allowed peak. An int is bytes, a float a share of the device. Written as "20GiB", "80%"
    or 0.8."""
    host_budget: int | None = None
    """Bytes of host memory that offloading may use, written as "64GiB". Without it, `budget` and `auto` do not
    offload."""
    offload: bool | str = False
    """True moves the hidden states that `full` saves to host memory, as Hugging Face's flag does. "saved" moves what
    `selective` saves."""
    rules: tuple[Rule, ...] = ()
    """Exceptions to `policy`. If several match a block, the last one counts. Under `budget` and `auto`, each is of a
    whole stack, whose blocks the plan leaves as they are."""
    preserve_rng_state: bool = True
    """Whether a recomputation draws the same random numbers as the forward, for dropout."""
    determinism_check: str = "default"
    """What `torch.utils.checkpoint` compares after a recomputation: `default` for shapes and types, or `none`."""
    use_reentrant: bool = False
    """Always False. True is accepted with a warning: blocks are recomputed non-reentrantly anyway."""
    head: int | str = "full"
    """`full` runs the head as a whole. A number runs it and the loss in chunks of so many tokens; `auto` chooses the
    number."""
    mlp: int | str = "full"
    """A number runs the feed-forward of each block that is recomputed as a whole in tiles of so many tokens. `auto` is
    2048, and `full` runs it as a whole. A plan for a budget takes tiles where they help."""
    check_every: int = 100
    """In every n-th training forward, one block is checked: whether its backward gets what its forward saved. Blocks
    take turns. 0 checks nothing."""
    on_mismatch: str = "warn"
    """What happens if a check finds a difference: `warn`, or `raise` to stop the run before the optimizer steps."""
    plan: str | None = None
    """Path of a saved plan to use."""
    compile: str | None = None
    """`blocks` compiles each block with torch.compile."""
    share: float | None = None
    """With `compile`: how much of its activations a block saves, from 0 (only its inputs) to 1 (what makes the step
    fastest). None takes it from the policy: 1 for `none`, 0.5 for `selective`, 0 for `full`."""

    @classmethod
    def parse(cls, spec: SpecLike) -> Spec:
        """Parse and validate a spec.

        Args:
            spec: a dict; the name of a policy; words such as "policy=full layers=0-3"; a JSON text; or the path of a
                JSON or YAML file. None is the default spec. A `Spec` is returned as it is.

        Raises `SpecError`, which lists all problems with what to write instead.
        """
        if spec is None:
            return cls()
        if isinstance(spec, Spec):
            return spec
        if isinstance(spec, Mapping):
            return _from_mapping(spec, None)
        if isinstance(spec, (str, Path)):
            return _from_text(spec)
        raise SpecError(
            [f"a spec must be a dict, a text or a path, but is {type(spec).__name__} instead: {shown(spec)}"]
        )

    @property
    def is_planned(self) -> bool:
        """Whether the plan is made in the first steps of a run, as with `budget` and `auto`."""
        return self.policy in PLANNED_POLICIES

    def is_fixed(self, stack: str) -> bool:
        """Whether a rule says what the blocks of a stack get, so that `budget` and `auto` do not choose."""
        policies = [rule.policy for rule in self.rules if rule.stack in (None, stack)]
        return self.is_planned and bool(policies) and policies[-1] != self.policy

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able dict without defaults, which `Spec.parse` reads back to an equal spec."""
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
            elif isinstance(value, int) and field.name in ("budget", "host_budget"):
                value = exact_size(value)
            found[field.name] = value
        return found

    def to_json(self) -> str:
        """Return `to_dict` as one line of JSON."""
        return json.dumps(self.to_dict())

    def updated(self, enable_kwargs: Mapping[str, Any]) -> Spec:
        """Return the spec after an enable call with these keyword arguments.

        If they contain one of `SELECTING_KEYS`, they replace this spec. Otherwise they change only the options that
        they name: many callers pass `{"use_reentrant": False}` or nothing when they enable a model again, and must not
        lose its plan. Raises `SpecError` as `parse` does.
        """
        # Hugging Face's Trainer passes these defaults in every call; they choose nothing.
        neutral = (("every_n_layers", 1), ("offload", False))
        # The types are compared too: True == 1 in Python, but True is not a number of layers.
        asked = {
            key: value
            for key, value in enable_kwargs.items()
            if not any(key == name and type(value) is type(default) and value == default for name, default in neutral)
        }
        if SELECTING_KEYS & asked.keys():
            return Spec.parse(asked)
        return Spec.parse({**self.to_dict(), **asked})


SpecLike = Spec | Mapping[str, Any] | str | Path | None
"""Every form that `Spec.parse` accepts."""


def _from_text(given: str | Path) -> Spec:
    """Read the name of a policy, a JSON text, key=value words, or a file. Raises `SpecError`."""
    text = str(given).strip()
    if isinstance(given, str) and text in POLICIES:
        return Spec.parse({"policy": text})
    if isinstance(given, str) and text.startswith("{"):
        try:
            loaded = parse_values(text, only_json=True)
        except ValueError as error:
            raise SpecError([f"{error}: {shown(text, quoted=False)}"]) from error
        return _from_mapping(loaded, "the JSON text")
    if isinstance(given, str) and "=" in text and not os.path.isfile(text):
        return _from_words(text)
    path = str(Path(text))
    try:
        loaded = read_values(path)
    except ValueError as error:
        hint = f"; a text must be JSON, key=value words, a file, or one of {', '.join(POLICIES)}"
        raise SpecError([f"cannot read {shown(path)}: {error}{'' if os.path.isfile(path) else hint}"]) from error
    return _from_mapping(loaded, path)


def _from_words(text: str) -> Spec:
    """Read words such as "policy=full layers=0-3"; each value is YAML. Raises `SpecError`."""
    words = [word.partition("=") for word in text.split()]
    counts = collections.Counter(key for key, *_ in words)
    problems = [f"words must look like key=value, but {shown(key)} does not" for key, equals, _ in words if not equals]
    problems += [f"`{shown(key, quoted=False)}` is given twice" for key, count in counts.items() if count > 1]
    if problems:
        raise SpecError(problems, shown(text))
    try:
        values = {key: parse_values(value) for key, _, value in words}
    except ValueError as error:
        raise SpecError([f"not readable as key=value words: {error}"], shown(text)) from error
    return _from_mapping(values, shown(text))


def _from_mapping(given: Any, source: str | None) -> Spec:
    """Read a mapping of keys. Errors name its `source`. Raises `SpecError` with all problems."""
    if not isinstance(given, Mapping):
        raise SpecError(
            [f"a spec must be a mapping of keys, but is {type(given).__name__} instead: {shown(given)}"], source
        )
    values, problems = read_keys(given, READERS, _FOREIGN_KEYS)
    if isinstance(values.get("policy"), tuple):
        values |= _of_stacks(values["policy"], values.get("rules", ()))
    # Keys whose value is unknown, because it is invalid or the key is misspelt.
    broken = {key for key in given if key in READERS and key not in values}
    unknown = [key for key in given if key not in READERS]
    broken.update(near for key in unknown[:MOST_PROBLEMS] for near in similar(key, READERS))
    if "policy" not in given:
        chosen = {"layers", "every_n_layers", "segments"} & values.keys()
        values["policy"] = "none" if values.get("rules") and not chosen else "full"
        if values.get("budget") is not None:
            values["policy"] = "budget"
    spec = Spec(**{key: value for key, value in values.items() if value is not None})
    # A conflict with a broken key would follow from a mistake that is already listed.
    problems += [text for text in _conflicts(spec, given) if broken.isdisjoint(re.findall(r"\w+", text))]
    if problems:
        raise SpecError(problems, source)
    return spec


def _of_stacks(policies: tuple[tuple[str, str], ...], rules: tuple[Rule, ...]) -> dict[str, Any]:
    """Return the values for a policy of each stack: one policy, and rules, which come before those that are given.

    Stacks without a policy are planned, too, if a stack has `budget` or `auto`; otherwise they are left as they are.
    """
    planned = [policy for _, policy in policies if policy in PLANNED_POLICIES]
    own = tuple(Rule(policy, stack=stack) for stack, policy in policies)
    return {"policy": planned[0] if planned else "none", "rules": own + rules}


def _conflicts(spec: Spec, given: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for every combination of keys that is in conflict."""
    policies = {spec.policy, *(rule.policy for rule in spec.rules)}
    planned = spec.is_planned
    compiled = spec.compile is not None
    shares = spec.share is not None or any(rule.share is not None for rule in spec.rules)
    every = spec.every_n_layers != 1
    choosing = [key for key in ("layers", "segments") if getattr(spec, key) is not None]
    choosing += ["every_n_layers"] if every else []
    left_to_compiler = [key for key in ("save", "offload", "segments", "host_budget") if given.get(key)]
    beside_plan = SELECTING_KEYS & given.keys() - {"plan", "host_budget", "every_n_layers", "offload"}

    def goes_with(key: str, is_given: bool, *allowed: str, hint: str = "") -> Iterator[str]:
        if is_given and policies.isdisjoint(allowed):
            listed = " or ".join(f"`policy: {name}`" for name in allowed)
            yield f"`{key}` goes with {listed}, but policy is {spec.policy!r}{hint}."

    if spec.policy == "budget" and spec.budget is None:
        yield "`policy: budget` needs `budget`, for example '20GiB'."
    yield from goes_with("budget", spec.budget is not None, "budget")
    yield from goes_with("save", "save" in given and not planned, *SAVING)
    needs_host = spec.host_budget is not None and not spec.offload and spec.plan is None
    yield from goes_with("host_budget", needs_host, "offload", *PLANNED_POLICIES)
    hint = "; to move what `selective` saves, write 'saved'"
    yield from goes_with("offload: true", spec.offload is True and not planned, "full", "offload", hint=hint)
    hint = "; to move what `full` saves, write true"
    yield from goes_with("offload: saved", spec.offload == "saved" and not planned, "selective", hint=hint)
    yield from goes_with("segments", spec.segments is not None, "full")
    yield from goes_with("mlp", spec.mlp != "full", "full", *PLANNED_POLICIES)
    if spec.mlp != "full" and (spec.segments is not None or spec.offload or compiled):
        yield "`mlp` goes with `full` for single blocks; it cannot be combined with `segments`, `offload` or `compile`."
    if spec.segments is not None and (spec.layers is not None or every or spec.rules):
        yield "`segments` covers whole stacks; it cannot be combined with `layers`, `every_n_layers` or `rules`."
    if spec.segments is not None and spec.offload is True:
        yield "`offload` moves the hidden states of single blocks; it cannot be combined with `segments`."
    if spec.layers is not None and every:
        yield "`layers` and `every_n_layers` both choose blocks; give one of them."
    parts = spec.rules and (compiled or any(rule.layers is not None for rule in spec.rules))
    if planned and (choosing or parts):
        yield (
            f"`policy: {spec.policy}` chooses the blocks itself; remove {', '.join(choosing) or 'rules'}. "
            "Only rules of whole stacks that are not compiled go with it."
        )
    if not {rule.policy for rule in spec.rules}.isdisjoint({*PLANNED_POLICIES} - {spec.policy}):
        yield f"a rule may have `budget` or `auto` only if that is the policy, which is {spec.policy!r}."
    if spec.policy == "none" and choosing and spec.segments is None:
        yield f"`policy: none` leaves every block as it is; remove {', '.join(choosing)}."
    if shares and not compiled:
        yield '`share` is how much compiled blocks keep; it needs `compile: "blocks"`.'
    if compiled and shares and (planned or (spec.policy == "none" and spec.share is not None)):
        yield f"`share` is how much the blocks of a policy keep, but policy is {spec.policy!r}; leave one of them out."
    if compiled and not policies.isdisjoint(("offload", "full+selective")):
        yield (
            "compiled blocks are not offloaded, and leave to the compiler what is rebuilt; take `none`, `selective` or "
            "`full`, or a `share`."
        )
    if compiled and left_to_compiler:
        yield f'`compile: "blocks"` leaves to the compiler what a block keeps; remove {", ".join(left_to_compiler)}.'
    if spec.plan is not None and beside_plan:
        yield "`plan` already says what every block gets; remove the other selecting keys."
