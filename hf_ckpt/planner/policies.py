"""Makes the plans of fixed policies from a spec and a model's blocks, and tighter ones.

Pure functions that do not import torch.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

from hf_ckpt.errors import PlanMismatchError, SpecError, shown
from hf_ckpt.spec.actions import ACTIONS, COMPILED, FULL, KEEP, OFFLOAD, Action, lighter
from hf_ckpt.spec.plan import Block, Plan
from hf_ckpt.spec.reading import SAVING, did_you_mean, parse_layers
from hf_ckpt.spec.spec import PLANNED_POLICIES, Spec


def make_plan(spec: Spec, blocks: Sequence[Block], family: str, model: str) -> Plan:
    """Apply a spec to the blocks of a model: one action for every block.

    For `budget` and `auto` every block gets `full`, until the run is measured (`training.session`).

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
        return plan if spec.head == "full" else dataclasses.replace(plan, head=spec.head)
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
    for number, rule in enumerate(spec.rules):
        # A rule of a whole stack may come from a policy for each stack, where nobody counted rules.
        where = "`policy` or `rules`" if rule.layers is None else f"`rules`[{number}]"
        chosen = _select(rule.layers or "0-", rule.stack, stacks, where, problems)
        actions |= dict.fromkeys(chosen, _action(spec, rule.policy, rule.save or spec.save, rule.share))
    if problems:
        raise SpecError(problems)
    return Plan(family=family, model=model, actions=tuple(actions.items()), head=spec.head)


def parse_for(parse: Callable[[], Spec], plan_of: Callable[[Spec], object]) -> Spec:
    """Parse a spec for a model. `plan_of` makes its plan there.

    Raises `SpecError` with all problems, also those that only `plan_of` finds.
    """
    try:
        return parse()
    except SpecError as error:
        if error.rest is not None and error.rest.plan is None:
            try:
                plan_of(error.rest)
            except SpecError as missing:
                raise SpecError([*error.problems, *missing.problems], error.source) from None
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
        raise PlanMismatchError(
            f"{source} is for another model: it was made for {shown(plan.model, quoted=False)} with "
            f"{len(planned_kinds)} blocks, this is {model} with {len(kinds)}; first difference at "
            f"{shown(min(differing))}."
        )
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
    chunks = chunks and plan.head == "full"
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


def _action(spec: Spec, policy: str, save: tuple[str, ...], share: float | None) -> Action:
    """The action that a policy gives a block. Until a run is measured, a planned policy keeps least."""
    if spec.compile is not None:
        if share is None:
            share = {"none": 1.0, "selective": 0.5}.get(policy, 0.0)
        return Action(COMPILED.kind, share=share)
    if policy == "none":
        return KEEP
    if policy == "full" and spec.mlp != "full":
        return Action("full+tiles", tile=spec.mlp)
    if policy in SAVING:
        return Action(policy, save, moved=spec.offload == "saved" and "moved" in ACTIONS[policy].options)
    if policy in PLANNED_POLICIES:
        return FULL
    return OFFLOAD if spec.offload is True else Action(policy)


def _select(
    text: str, stack: str | None, stacks: Mapping[str, list[Block]], where: str, problems: list[str]
) -> list[Block]:
    """The blocks that `text`, such as "0-15,-1", names in one stack, or in every stack if `stack` is None.

    Errors are added to `problems`, with `where` as the place in the spec, so that a user sees all of them at once.
    """
    if stack is not None and stack not in stacks:
        hint = did_you_mean(stack, stacks) or "."
        problems.append(f"{where} names the stack {stack!r}, but this model has {', '.join(map(repr, stacks))}{hint}")
        return []
    chosen: list[Block] = []
    for name in stacks if stack is None else [stack]:
        blocks = stacks[name]
        for first, last in parse_layers(text):
            low, high = (index + len(blocks) if index < 0 else index for index in (first, last))
            end = "" if last == -1 else last
            layers = str(first) if first == last else f"{first}-{end}"
            if not (0 <= low < len(blocks) and 0 <= high < len(blocks)):
                problems.append(
                    f"{where} names {layers}, but stack {name!r} has blocks 0 to {len(blocks) - 1} "
                    f"(or -{len(blocks)} to -1)."
                )
            elif low > high:
                problems.append(f"{where} names {layers}, which matches no block of stack {name!r}.")
            else:
                chosen += blocks[low : high + 1]
    return chosen
