"""Makes the plans of fixed policies from a spec and a model's blocks, and tighter ones.

Pure functions that do not import torch.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from hf_ckpt.errors import HfCkptError, PlanMismatchError, SpecError, shown
from hf_ckpt.spec.actions import ACTIONS, COMPILED, FULL, KEEP, OFFLOAD, Action, lighter
from hf_ckpt.spec.plan import Block, Plan
from hf_ckpt.spec.reading import SAVING, Segments, did_you_mean, parse_layers
from hf_ckpt.spec.spec import PLANNED_POLICIES, Spec


def make_plan(spec: Spec, blocks: Sequence[Block], family: str, model: str) -> Plan:
    """Apply a spec to the blocks of a model: one action for every block.

    For `budget` and `auto` every block gets what keeps `least`, until the run is measured (`training.session`).

    Args:
        spec: what was asked for.
        blocks: of the model, stack by stack.
        family: the family row by which the blocks were found.
        model: class name of the model.

    Raises `SpecError` with every reason why the spec does not fit these blocks (an unknown stack, a layer out of range,
    a choice that matches no block), and `PlanMismatchError` if it names a saved plan of another model.
    """
    if spec.plan is not None:
        plan = fit_plan(Plan.load(spec.plan), blocks, family, model, spec.plan)
        return plan if spec.head == "whole" else dataclasses.replace(plan, head=spec.head)
    stacks = {stack: list(group) for stack, group in itertools.groupby(blocks, lambda block: block.stack)}
    problems: list[str] = []
    # What nothing chooses keeps everything; with `compile` such blocks are compiled, too.
    actions = dict.fromkeys(blocks, _action(spec, "none", (), None))
    chosen: list[Block] = []
    if spec.policy != "none":
        layers = spec.layers or "0-"
        for stack, text in [(None, layers)] if isinstance(layers, str) else layers:
            chosen += _select(text, stack, stacks, "`layers`", problems)
        # Each stack is counted by itself: transformers' own `every_n_layers` runs one counter through all of them.
        chosen = [block for block in chosen if block.index % spec.every_n_layers == 0]
    actions |= dict.fromkeys(chosen, _action(spec, spec.policy, spec.save, spec.share))
    owners: dict[Block, int] = {}
    for number, rule in enumerate(spec.rules):
        # A rule of a whole stack may come from a policy for each stack, where nobody counted rules.
        where = "`policy` or `rules`" if rule.layers is None else f"`rules`[{number}]"
        chosen = _select(rule.layers or "0-", rule.stack, stacks, where, problems)
        actions |= dict.fromkeys(chosen, _action(spec, rule.policy, rule.save or spec.save, rule.share))
        owners |= dict.fromkeys(chosen, number)
    actions |= _in_segments_of(spec, actions, owners, problems)
    if problems:
        raise SpecError(problems)
    return Plan(family=family, model=model, actions=tuple(actions.items()), head=spec.head)


def in_segments(actions: Mapping[Block, Action], segments: Segments) -> dict[Block, Action]:
    """Return the same actions, with the recomputed blocks of each stack in segments.

    While backward is in a segment, those before it hold one input each, and it holds as many as it has blocks. So sizes
    fall by one from segment to segment (8, 7, ... 1 for 36 blocks), and each segment needs the same: n blocks hold
    about sqrt(2 n) inputs. Inputs in host memory need no room on the device, so that segments are equal then.

    Args:
        actions: block -> action, stack by stack.
        segments: as `Spec.segments`: how many segments there are; `sqrt` is the number for which a step holds least.
    """
    divided = dict(actions)
    for stack, group in itertools.groupby(actions, key=lambda block: block.stack):
        number = _segments_in(segments, stack)
        if number is not None:
            divided |= _divided({block: actions[block] for block in group}, number)
    return divided


def parse_for(parse: Callable[[], Spec], plan_of: Callable[[Spec], object]) -> Spec:
    """Parse a spec for a model. `plan_of` makes its plan there.

    Raises `SpecError` with all problems, also those that only `plan_of` finds.
    """
    try:
        return parse()
    except SpecError as error:
        if error.rest is not None:
            try:
                plan_of(error.rest)
            except SpecError as missing:
                raise SpecError([*error.problems, *missing.problems], error.source) from None
            except HfCkptError as missing:  # the saved plan cannot be read, or is for another model
                raise SpecError([*error.problems, f"`plan`: {missing}"], error.source) from None
        raise


def fit_plan(plan: Plan, blocks: Sequence[Block], family: str, model: str, source: str = "the plan") -> Plan:
    """Apply an existing plan to the blocks of this model.

    Args:
        plan: loaded or passed by the user.
        blocks: of this model, stack by stack.
        family: the family row by which the blocks were found.
        model: class name of the model.
        source: the plan's name in errors.

    Raises `PlanMismatchError` unless the plan names exactly these blocks.
    """
    planned_kinds = {block.name: block.kind for block, _ in plan.actions}
    kinds = {block.name: block.kind for block in blocks}
    if planned_kinds != kinds:
        names = planned_kinds.keys() | kinds.keys()
        differing = [name for name in names if planned_kinds.get(name) != kinds.get(name)]
        planned_model = f"{shown(plan.model, quoted=False)} with {len(planned_kinds)} blocks"
        difference = f"this is {model} with {len(kinds)}; first difference at {shown(min(differing))}"
        raise PlanMismatchError(f"{source} is for another model: it was made for {planned_model}, {difference}.")
    planned = {block.name: action for block, action in plan.actions}
    actions = tuple((block, planned[block.name]) for block in blocks)
    return dataclasses.replace(plan, family=family, model=model, actions=actions)


def tighter_plan(plan: Plan, *, chunks: bool, offload: bool = True) -> tuple[Plan, str] | None:
    """The next plan that needs less memory, and its change in words; None if there is none.

    Each call replaces one kind of action by what follows it on its ladder, see `spec.actions.lighter`. The head runs in
    chunks before blocks offload: logits need more than hidden states in nearly every model.

    Args:
        plan: any plan.
        chunks: whether the head can run in chunks.
        offload: whether there is host memory apart from the device's.
    """
    chunks = chunks and plan.head == "whole"
    # From the action that keeps most to the one that keeps least, in the order of the table.
    for row in ACTIONS.values():
        steps = [(block, lighter(action)) for block, action in plan.actions if action.kind == row.name]
        replaced = {block: action for block, action in steps if action is not None}
        if not replaced or (row.next == OFFLOAD and (chunks or not offload)):
            continue
        actions = tuple((block, replaced.get(block, action)) for block, action in plan.actions)
        words = " and ".join(dict.fromkeys(map(str, replaced.values())))
        return dataclasses.replace(plan, actions=actions, prediction=None), words
    return (dataclasses.replace(plan, head="auto", prediction=None), "the head in chunks") if chunks else None


def least(spec: Spec) -> Action:
    """The action that keeps least of those that a plan for a budget may choose. The run measures its steps under it."""
    if spec.compile is not None:
        return COMPILED
    return FULL if spec.mlp == "whole" else Action("full+tiles", tile=spec.mlp)


def _action(spec: Spec, policy: str, save: tuple[str, ...], share: float | None) -> Action:
    """The action that a policy gives a block. Until a run is measured, a planned policy keeps least."""
    if spec.compile is not None:
        if share is None:
            share = {"none": 1.0, "selective": 0.5}.get(policy, 0.0)
        return Action(COMPILED.kind, share=share)
    if policy == "none":
        return KEEP
    if policy in PLANNED_POLICIES or (policy == "full" and spec.mlp != "whole"):
        return least(spec)
    if policy in SAVING:
        return Action(policy, save, moved=spec.offload == "saved" and "moved" in ACTIONS[policy].options)
    return OFFLOAD if spec.offload is True else Action(policy)


def _in_segments_of(
    spec: Spec, actions: Mapping[Block, Action], owners: Mapping[Block, int], problems: list[str]
) -> dict[Block, Action]:
    """Return the actions of the blocks that a spec puts into segments. `owners` is the rule of each block that has one.

    What a session plans is left to it. Errors are added to `problems`.
    """
    stacks = list(dict.fromkeys(block.stack for block in actions))
    named = dict(spec.segments) if isinstance(spec.segments, tuple) else {}
    problems += [_no_stack("`segments`", stack, stacks) for stack in named.keys() - stacks]
    groups: dict[tuple[str, int | None, int | str], dict[Block, Action]] = {}
    for block, action in actions.items():
        rule = None if block not in owners else spec.rules[owners[block]]
        owner = None if rule is None or rule.segments is None else owners[block]
        number = _segments_in(spec.segments, block.stack) if rule is None or owner is None else rule.segments
        if number is not None and (not spec.is_planned or spec.is_fixed(block.stack)):
            groups.setdefault((block.stack, owner, number), {})[block] = action
    divided: dict[Block, Action] = {}
    for (_, _, number), group in groups.items():
        divided |= _divided(group, number)
    if groups and not spec.is_planned and not _is_divided(divided):
        could_be = any(_is_divided(_divided(group, 1)) for group in groups.values())
        advice = "Ask for fewer segments" if could_be else "Recompute blocks without gaps between them"
        needed = "a segment needs at least two consecutive recomputed blocks"
        problems.append(f"`segments` has no effect: {needed}. {advice}, or leave `segments` out.")
    return divided


def _segments_in(segments: Segments | None, stack: str) -> int | str | None:
    """Return the number of segments in one stack; None without segments."""
    return dict(segments).get(stack) if isinstance(segments, tuple) else segments


def _is_divided(actions: Mapping[Block, Action]) -> bool:
    """Whether some block is in a segment and does not hold its input."""
    return any(action.made for action in actions.values())


def _divided(actions: Mapping[Block, Action], number: int | str) -> dict[Block, Action]:
    """Return the actions of one stack, with its recomputed blocks in so many segments."""
    divided = dict(actions)
    blocks = [block for block, action in actions.items() if "made" in ACTIONS[action.kind].options]
    falling = OFFLOAD not in actions.values()
    for size in _segment_sizes(len(blocks), number, falling=falling):
        segment = blocks[:size]
        blocks = blocks[size:]
        # A block that something else runs before holds its own input.
        inner = [block for before, block in itertools.pairwise(segment) if block.index == before.index + 1]
        divided |= {block: dataclasses.replace(actions[block], made=True) for block in inner}
    return divided


def _segment_sizes(blocks: int, number: int | str, *, falling: bool) -> list[int]:
    """Return the number of blocks of each segment. They fall by one, as far as the blocks reach, or are equal."""
    if isinstance(number, str):
        number = math.ceil((math.sqrt(8 * blocks + 1) - 1) / 2)  # sizes of so many segments fall to 1
    number = min(number, blocks)
    if not falling:
        return [(blocks + number - 1 - place) // number for place in range(number)]
    sizes = []
    for left in range(number, 0, -1):
        # The smallest first size from which sizes that fall by one reach the end; later ones are at least 1.
        largest = math.ceil((blocks + left * (left - 1) / 2) / left)
        size = min(largest, blocks - (left - 1))
        sizes.append(size)
        blocks -= size
    return sizes


def _no_stack(where: str, stack: str, stacks: Iterable[str]) -> str:
    """The sentence for a place in the spec that names a stack which the model does not have."""
    hint = did_you_mean(stack, stacks) or "."
    return f"{where} names the stack {stack!r}, but this model has {', '.join(map(repr, stacks))}{hint}"


def _select(
    text: str, stack: str | None, stacks: Mapping[str, list[Block]], where: str, problems: list[str]
) -> list[Block]:
    """The blocks that `text`, such as "0-15,-1", names in one stack, or in every stack if `stack` is None.

    Errors are added to `problems`, with `where` as the place in the spec, so that a user sees all of them at once.
    """
    if stack is not None and stack not in stacks:
        problems.append(_no_stack(where, stack, stacks))
        return []
    chosen: list[Block] = []
    for name in stacks if stack is None else [stack]:
        blocks = stacks[name]
        for first, last in parse_layers(text):
            low, high = (index + len(blocks) if index < 0 else index for index in (first, last))
            end = "" if last == -1 else last
            layers = str(first) if first == last else f"{first}-{end}"
            if not (0 <= low < len(blocks) and 0 <= high < len(blocks)):
                allowed = f"0 to {len(blocks) - 1} (or -{len(blocks)} to -1)"
                problems.append(f"{where} names {layers}, but stack {name!r} has blocks {allowed}.")
            elif low > high:
                problems.append(f"{where} names {layers}, which matches no block of stack {name!r}.")
            else:
                chosen += blocks[low : high + 1]
    return chosen
