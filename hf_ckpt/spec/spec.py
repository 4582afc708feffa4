"""`Spec`: what the user asked for, parsed and validated. This file does not import torch.

>>> Spec.parse({"policy": "full", "layers": "0-15,-1"}).to_dict()
{'policy': 'full', 'layers': '0-15,-1'}
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hf_ckpt.errors import SpecError, shown
from hf_ckpt.logs import warn_once
from hf_ckpt.spec.actions import SAVE_CLASSES
from hf_ckpt.spec.files import parse_values, read_values, without_repeats
from hf_ckpt.spec.reading import POLICIES, READERS, SAVING, SEGMENTED, Layers, Rule, Segments, goes_with, read_keys
from hf_ckpt.units import exact_size

log = logging.getLogger(__name__)

PLANNED_POLICIES = ("budget", "auto")
"""Policies whose plan is made in the first steps of a run."""
# They say how blocks are recomputed and checked, or how the head runs.
_NOT_SELECTING = {"preserve_rng_state", "determinism_check", "use_reentrant", "head", "check_every", "on_mismatch"}
SELECTING_KEYS = READERS.keys() - _NOT_SELECTING
"""Keys that choose blocks or actions. An enable call without any of them keeps the installed plan."""
# Keys that people know from elsewhere -> why they are refused.
_FOREIGN_KEYS = {
    # TrainingArguments.to_json_string, which the TensorBoard callback calls, raises for a callable.
    "context_fn": "is a callable, which TrainingArguments cannot save as JSON; ask for `policy: selective` instead.",
    # `SFTTrainer` (trl/trainer/sft_trainer.py) wraps the blocks itself if it finds this key: two owners.
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
    head: int | str = "whole"
    """`whole` runs the head in one piece. A number runs it and the loss in chunks of so many tokens; `auto` chooses the
    number."""
    mlp: int | str = "whole"
    """A number runs the feed-forward of each block that is recomputed as a whole in tiles of so many tokens. `auto` is
    2048, and `whole` runs it in one piece. A plan for a budget takes tiles where they help."""
    segments: Segments | None = None
    """Divide the blocks that are recomputed into so many segments, in every stack or in each stack that is named. Only
    the first block of a segment holds its hidden states; backward makes those of the others again. `sqrt` is the number
    for which a step holds least."""
    check_every: int = 100
    """In every n-th training forward, one block is checked: whether its backward gets what its forward saved. Blocks
    take turns. 0 checks nothing."""
    on_mismatch: str = "warn"
    """What happens if a check finds a difference: `warn`; `raise` stops the run before the optimizer steps; `avoid`
    runs that block under `selective` from then on, or under `keep` if it was under `selective`."""
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
        if isinstance(spec, (str, Path)):
            return _from_text(spec)
        return _from_mapping(spec, None)

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
        # The default policy is written out, for people who read it; beside `plan` it would be a conflict.
        written: dict[str, Any] = {} if self.plan else {"policy": self.policy}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "policy" or value == field.default:
                continue
            if field.name == "rules":
                value = [rule.to_dict() for rule in self.rules]
            elif field.name in ("layers", "segments") and isinstance(value, tuple):
                value = dict(value)
            elif isinstance(value, tuple):
                value = list(value)
            elif isinstance(value, int) and field.name in ("budget", "host_budget"):
                value = exact_size(value)  # a plain number below 1 MiB is refused, because its unit may be missing
            written[field.name] = value
        return written

    def to_json(self) -> str:
        """Return `to_dict` as one line of JSON."""
        return json.dumps(self.to_dict())

    def updated(self, enable_kwargs: Mapping[str, Any]) -> Spec:
        """Return the spec after an enable call with these keyword arguments.

        If they contain one of `SELECTING_KEYS`, they replace this spec. Otherwise they change only the options that
        they name: many callers pass `{"use_reentrant": False}` or nothing when they enable a model again, and must not
        lose its plan. Raises `SpecError` as `parse` does.
        """
        # Trainer passes these two in every call, with these values if the user did not set them
        # (transformers/trainer.py); taken for a choice, they would replace the plan by `full` on all blocks.
        options = dict(enable_kwargs)
        for key, default in {"every_n_layers": 1, "offload": False}.items():
            # The types are compared too: True == 1 in Python, but True is not a number of layers.
            value = options.get(key)
            if type(value) is type(default) and value == default:
                del options[key]
        if SELECTING_KEYS & options.keys():
            return Spec.parse(options)
        return Spec.parse({**self.to_dict(), **options})


SpecLike = Spec | Mapping[str, Any] | str | Path | None
"""Every form that `Spec.parse` accepts."""


def _from_text(text_or_path: str | Path) -> Spec:
    """Read the name of a policy, a JSON text, words such as "policy=full layers=0-3", or a file. Raises `SpecError`."""
    text = str(text_or_path).strip()
    if text in POLICIES:
        return Spec.parse({"policy": text})
    is_file = os.path.isfile(text)
    problems: list[str] = []
    try:
        if text.startswith("{"):
            values = parse_values(text, only_json=True)
        elif "=" in text and not is_file:  # a file may be called so, too
            wrong = [shown(word) for word in text.split() if "=" not in word]
            problems = [f"words must look like key=value, but {word} does not." for word in wrong]
            pairs = (word.partition("=") for word in text.split() if "=" in word)
            values = without_repeats([(key, parse_values(value)) for key, _, value in pairs])
        else:
            values = read_values(text)
    except ValueError as error:
        hint = f"; a text must be JSON, key=value words, a file, or one of {', '.join(POLICIES)}"
        raise SpecError([f"cannot read {shown(text)}: {error}{'' if is_file else hint}"]) from error
    return _from_mapping(values, text, problems)


def _from_mapping(written: Any, source: str | None, before: Iterable[str] = ()) -> Spec:
    """Read a mapping of keys. Errors name its `source`. Raises `SpecError` with all problems and those `before`."""
    if not isinstance(written, Mapping):
        problem = f"a spec must be a mapping of keys, but is {type(written).__name__} instead: {shown(written)}"
        raise SpecError([problem], source)
    values, problems = read_keys(written, READERS, _FOREIGN_KEYS)
    problems = [*before, *problems]
    if isinstance(values.get("policy"), tuple):
        values |= _of_stacks(values["policy"], values.get("rules", ()))
    if "policy" not in written:
        chosen = {"layers", "every_n_layers"} & values.keys()
        values["policy"] = "none" if values.get("rules") and not chosen else "full"
        if values.get("budget") is not None:
            values["policy"] = "budget"
    spec = Spec(**{key: value for key, value in values.items() if value is not None})
    # A conflict that names what is listed already, such as a misspelt key, only follows from that.
    named = _quoted(problems)
    conflicts = [*_wrong_policies(spec, written), *_conflicts(spec, written), *_conflicts_of_compiled(spec, written)]
    problems += [conflict for conflict in conflicts if named.isdisjoint(_quoted([conflict]))]
    if problems:
        raise SpecError(problems, source, spec)
    if spec.check_every == 0 and spec.on_mismatch != Spec.on_mismatch:
        warn_once(log, "hf_ckpt: `on_mismatch: %s` has no effect: `check_every: 0` checks nothing.", spec.on_mismatch)
    return spec


def _quoted(sentences: Iterable[str]) -> set[str]:
    """The words in backquotes."""
    return {
        word for sentence in sentences for quoted in re.findall("`([^`]*)`", sentence) for word in quoted.split(": ")
    }


def _of_stacks(policies: tuple[tuple[str, str], ...], rules: tuple[Rule, ...]) -> dict[str, Any]:
    """Return the values for a policy of each stack: one policy, and rules, which come before those that are given.

    Stacks without a policy are planned, too, if a stack has `budget` or `auto`; otherwise they are left as they are.
    """
    planned = [policy for _, policy in policies if policy in PLANNED_POLICIES]
    of_stacks = tuple(Rule(policy, stack=stack) for stack, policy in policies)
    return {"policy": planned[0] if planned else "none", "rules": of_stacks + rules}


# --- keys that do not go together -------------------------------------------------------------------------------------


def _policies_of(spec: Spec) -> set[str]:
    return {spec.policy, *(rule.policy for rule in spec.rules)}


def _wrong_policies(spec: Spec, written: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for every option that no policy of the spec has, so that it would do nothing."""
    fixed = not spec.is_planned  # `budget` and `auto` may choose any action, and so those that have the options
    host = spec.host_budget is not None and not spec.offload and spec.plan is None
    saved_hint = "; to move what `selective` saves, write 'saved'"
    true_hint = "; to move what `full` saves, write true"
    stays = fixed or spec.host_budget is None
    if spec.is_planned:
        saved_hint = true_hint = "; plans that offload need `host_budget`, such as '64GiB'"
    options = (  # as a user writes it, whether it is set, the policies that have it, what else may be meant
        ("budget", spec.budget is not None, ("budget",), ""),
        ("save", "save" in written and fixed, SAVING, ""),
        ("host_budget", host, ("offload", *PLANNED_POLICIES), ""),
        ("offload: true", spec.offload is True and stays, ("full", "offload"), saved_hint),
        ("offload: saved", spec.offload == "saved" and stays, ("selective",), true_hint),
        ("mlp", spec.mlp != "whole", ("full", *PLANNED_POLICIES), ""),
        ("segments", spec.segments is not None, (*SEGMENTED, *PLANNED_POLICIES), ""),
    )
    if spec.policy == "budget" and spec.budget is None:
        yield "`policy: budget` needs `budget`, for example '20GiB'."
    for option, is_set, policies, hint in options:
        if is_set and _policies_of(spec).isdisjoint(policies):
            yield f"{goes_with(option, policies, spec.policy)}{hint}."


def _conflicts(spec: Spec, written: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for every pair of keys that choose the same thing twice, or that no engine combines."""
    compiled = spec.compile is not None
    choosing = [key for key in ("layers", "every_n_layers") if getattr(spec, key) != getattr(Spec, key)]
    if spec.mlp != "whole" and (spec.offload or compiled):
        yield "`mlp` goes with `full`; it cannot be combined with `offload` or `compile`."
    if compiled and (spec.segments is not None or any(rule.segments is not None for rule in spec.rules)):
        yield "`segments` cannot be combined with `compile`."
    if len(choosing) > 1:
        yield "`layers` and `every_n_layers` both choose blocks; give one of them."
    # A session plans stack by stack, from what all blocks of a kind cost. It has no place for a single block.
    parts = spec.rules and (compiled or any(rule.layers is not None for rule in spec.rules))
    if spec.is_planned and (choosing or parts):
        allowed = "Only rules of whole stacks that are not compiled are allowed."
        yield f"`policy: {spec.policy}` chooses the blocks itself; remove {', '.join(choosing) or 'rules'}. {allowed}"
    if not {rule.policy for rule in spec.rules}.isdisjoint({*PLANNED_POLICIES} - {spec.policy}):
        yield f"a rule may have `budget` or `auto` only if that is the policy, which is {spec.policy!r}."
    if spec.policy == "none" and choosing:
        yield f"`policy: none` leaves every block as it is; remove {', '.join(choosing)}."
    # Trainer's calls have `every_n_layers` and `offload` (see `Spec.updated`). `host_budget` is no choice of blocks
    # here: it bounds the memory that the plan's offloaded blocks may take.
    beside_plan = SELECTING_KEYS - {"plan", "host_budget", "every_n_layers", "offload"}
    if spec.plan is not None and beside_plan & written.keys():
        yield "`plan` already says what every block gets; remove the other selecting keys."


def _conflicts_of_compiled(spec: Spec, written: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for every key that needs compiled blocks, or that decides what the compiler decides for them."""
    compiled = spec.compile is not None
    shares = spec.share is not None or any(rule.share is not None for rule in spec.rules)
    if shares and not compiled:
        yield '`share` is how much compiled blocks save; it needs `compile: "blocks"`.'
    if not compiled:
        return
    if shares and (spec.is_planned or (spec.policy == "none" and spec.share is not None)):
        yield f"`share` is how much the blocks of a policy keep, but policy is {spec.policy!r}; leave one of them out."
    # A compiled block saves inside its graph, where no hook of ours sees a tensor that could be moved or rebuilt.
    if not _policies_of(spec).isdisjoint(("offload", "full+selective")):
        advice = "use `none`, `selective` or `full`, or a `share`"
        yield f"compiled blocks cannot be offloaded, and the compiler decides what is rebuilt; {advice}."
    left_to_compiler = [key for key in ("save", "offload", "host_budget") if written.get(key)]
    if left_to_compiler:
        yield f'`compile: "blocks"` lets the compiler decide what a block saves; remove {", ".join(left_to_compiler)}.'
