"""From spec and blocks to a plan: chosen blocks, what does not fit, plans of other models, and plans in print."""

import itertools
import math

import pytest
from helpers.tables import table
from hypothesis import given
from hypothesis import strategies as st

from hf_ckpt.errors import PlanMismatchError, SpecError
from hf_ckpt.planner.policies import fit_plan, in_segments, make_plan, parse_for
from hf_ckpt.spec.actions import FULL, KEEP
from hf_ckpt.spec.description import Description
from hf_ckpt.spec.plan import Block, Plan
from hf_ckpt.spec.spec import Spec


def blocks(**stacks):
    """`blocks(encoder=3, decoder=2)`: the given number of blocks per stack."""
    return [Block(f"{stack}.block.{i}", stack, i, "T5Block") for stack, count in stacks.items() for i in range(count)]


def chosen(plan):
    """Stack -> indices of the blocks that are not kept."""
    return {stack: [block.index for block, action in pairs if action != KEEP] for stack, pairs in plan.stacks().items()}


def plan_for(spec, **stacks):
    return make_plan(Spec.parse(spec), blocks(**stacks), "t5", "T5ForConditionalGeneration")


# --- choosing blocks ------------------------------------------------------------------------------------------------


PLANS = table(__file__, "plans.yaml")


@pytest.mark.trap(15)
@pytest.mark.parametrize(("spec", "encoder", "decoder"), PLANS["blocks"])
def test_blocks_chosen(spec, encoder, decoder):
    """Stack by stack."""
    _, *printed = str(plan_for(spec, encoder=3, decoder=4)).splitlines()
    assert printed == [f"  encoder (3 x T5Block): {encoder}", f"  decoder (4 x T5Block): {decoder}"]


@pytest.mark.parametrize(("spec", "shares"), PLANS["shares"])
def test_shares_of_compiled_blocks(spec, shares):
    """`compile` compiles all blocks of a model, those that keep everything with share 1."""
    plan = plan_for({"compile": "blocks", **spec}, encoder=3)
    assert [(action.kind, action.share) for _, action in plan.actions] == [("compiled", share) for share in shares]
    assert Plan.from_dict(plan.to_dict()) == plan


@pytest.mark.parametrize(("count", "spec", "sizes"), PLANS["segments"])
def test_segments(count, spec, sizes):
    """The first block of each holds its input."""
    plan = plan_for(spec, decoder=count)
    first = [index for index, (_, action) in enumerate(plan.actions) if not action.made]
    assert [end - start for start, end in itertools.pairwise([*first, count])] == sizes
    assert Plan.from_dict(plan.to_dict()) == plan


@given(count=st.integers(1, 40), number=st.integers(1, 40))
def test_segments_hold_as_little_as_any_of_so_many(count, number):
    """While backward is in one, those before it hold an input each, and it holds as many as it has blocks."""

    def held(number):
        """Inputs held under a number of segments."""
        actions = in_segments(dict.fromkeys(blocks(decoder=count), FULL), number)
        first = [index for index, action in enumerate(actions.values()) if not action.made]
        return max(place + end - start for place, (start, end) in enumerate(itertools.pairwise([*first, count])))

    few = min(number, count)
    triangle = count + few * (few - 1) // 2  # what sizes that fall by one fill up
    assert held(number) == max(few, math.ceil(triangle / few))
    assert held("sqrt") == min(map(held, range(1, count + 1)))


def test_segments_that_nothing_is_in_are_refused():
    """With what is needed, and with all other problems."""
    for number, advice in {
        4: "Ask for fewer segments, or",
        1: "Recompute blocks without gaps between them, or",
    }.items():
        spec = {"segments": number, "layers": "0-1,4,6" if number == 4 else "0,2,4"}
        with pytest.raises(SpecError, match=f"needs at least two consecutive recomputed blocks. {advice}"):
            plan_for(spec, decoder=8)
    with pytest.raises(SpecError, match=r"`segments` names the stack 'decodr', but .*did you mean 'decoder'"):
        plan_for({"segments": {"decodr": 2}}, decoder=8)


def slow_twin(parts, count):
    """The indices in a stack of `count` blocks that (first, last) pairs name; None if a pair is invalid."""
    if not all(-count <= end < count for part in parts for end in part):
        return None
    spans = [{n for n in range(count) if first % count <= n <= last % count} for first, last in parts]
    return set.union(*spans) if all(spans) else None


def as_text(parts):
    ends = {-1: ""}  # "2-" means to the end
    return ",".join(str(first) if first == last else f"{first}-{ends.get(last, last)}" for first, last in parts)


PARTS = st.lists(st.tuples(st.integers(-7, 7), st.integers(-7, 7)), min_size=1, max_size=2)
RULES = st.lists(st.tuples(PARTS, st.sampled_from(["none", "full"])), min_size=1, max_size=3)


@given(rules=RULES, base=st.sampled_from(["none", "full"]), count=st.integers(4, 7))
def test_rules_equal_a_reference_implementation(rules, base, count):
    """For every block, the last matching rule wins; rules that name no block are refused."""
    spec = {"policy": base, "rules": [{"layers": as_text(parts), "policy": policy} for parts, policy in rules]}
    named = [(slow_twin(parts, count), policy) for parts, policy in rules]
    if any(indices is None for indices, _ in named):
        with pytest.raises(SpecError):
            plan_for(spec, decoder=count)
        return
    actions = [next((policy for indices, policy in reversed(named) if n in indices), base) for n in range(count)]
    expected = [n for n, policy in enumerate(actions) if policy == "full"]
    assert chosen(plan_for(spec, decoder=count)) == {"decoder": expected}


# --- what does not fit ----------------------------------------------------------------------------------------------


def test_every_problem_of_a_spec_with_a_model_is_named_at_once():
    rules = [{"layers": "2-1", "policy": "full"}, {"stack": "text", "layers": "0", "policy": "none"}]
    with pytest.raises(SpecError) as caught:
        plan_for({"layers": {"encoder": "9", "decodr": "0"}, "rules": rules}, encoder=3, decoder=3)
    others = "but this model has 'encoder', 'decoder'"
    assert list(caught.value.problems) == [
        "`layers` names 9, but stack 'encoder' has blocks 0 to 2 (or -3 to -1).",
        f"`layers` names the stack 'decodr', {others}; did you mean 'decoder'?",
        "`rules`[0] names 2-1, which matches no block of stack 'encoder'.",
        "`rules`[0] names 2-1, which matches no block of stack 'decoder'.",
        f"`rules`[1] names the stack 'text', {others}.",
    ]
    with pytest.raises(SpecError, match=r"`policy` or `rules` names the stack 'decodr'.* did you mean 'decoder'\?"):
        plan_for({"policy": {"decodr": "full"}}, encoder=3, decoder=3)


def test_what_is_right_in_a_faulty_value_is_checked_with_the_model():
    rules = [{"layers": "8", "polcy": "full"}, {"layers": "9", "policy": "full"}, "full"]
    spec = {"rules": rules, "layers": {"encoder": "7", "decoder": "x"}, "head": -1}
    with pytest.raises(SpecError) as caught:
        parse_for(lambda: Spec.parse(spec), lambda rest: make_plan(rest, blocks(encoder=3, decoder=3), "t5", "T5"))
    text = str(caught.value)
    assert text.startswith("8 problems")
    for words in ("`[0]` `polcy` is not a key of a rule", "`[2]` must be", "`decoder` must be", "`head` must be"):
        assert words in text
    for words in ("`layers` names 7", "`rules`[0] names 8", "`rules`[1] names 9"):
        assert f"{words}, but stack 'encoder' has blocks 0 to 2" in text
    with pytest.raises(SpecError, match=r"(?s)2 problems.*`head` must be.*`plan`: cannot read a plan from 'none.json'"):
        parse_for(lambda: Spec.parse({"plan": "none.json", "head": -1}), lambda rest: make_plan(rest, [], "t5", "T5"))


def test_a_plan_for_another_model_is_refused():
    for others, told in (
        (blocks(encoder=2), "it was made for T5ForConditionalGeneration with 3 blocks, this is BertModel with 2"),
        (blocks(encoder=4), "first difference at 'encoder.block.3'"),
        ([Block(f"encoder.block.{i}", "encoder", i, "BertLayer") for i in range(3)], "at 'encoder.block.0'"),
    ):
        with pytest.raises(PlanMismatchError, match=rf"^plan\.json is for another model.*{told}"):
            fit_plan(plan_for("full", encoder=3), others, "bert", "BertModel", "plan.json")


def test_a_plan_fits_blocks_in_any_order():
    """A plan matches blocks by name, and keeps the order of the model's blocks."""
    plan = plan_for({"layers": {"encoder": "1"}}, encoder=2, decoder=1)
    fitted = fit_plan(plan, list(reversed(blocks(encoder=2, decoder=1))), "t5", "T5ForConditionalGeneration")
    assert list(fitted.active()) == ["encoder.block.1"]
    assert [block.name for block, _ in fitted.actions] == ["decoder.block.0", "encoder.block.1", "encoder.block.0"]


# --- plans in print --------------------------------------------------------------------------------------------------


def test_a_printed_description_says_what_has_happened():
    plan, counts = plan_for({"layers": {"encoder": "0"}}, encoder=2, decoder=2), {"encoder.block.0": 3}
    text = str(Description(plan, {"policy": "full"}, True, ("encoder.block.0",), counts, counts))
    assert text.startswith('hf_ckpt: enabled; spec {"policy": "full"}')
    assert "1 of 4 blocks checkpointed" in text
    assert "1 block before the first trainable parameter saves nothing" in text
    assert "3 forwards of planned blocks; 3 recomputations" in text
    assert "not enabled" in str(Description(plan, {}, False, (), {}, {}))


@pytest.mark.parametrize(("spec", "said"), PLANS["summaries"])
def test_a_plan_in_one_line(spec, said):
    plan = plan_for(spec, decoder=8)
    assert (plan.summary(), Plan.from_dict(plan.to_dict())) == (said, plan)
    assert plan_for(spec, encoder=8, decoder=8).summary() == f"encoder: {said}; decoder: {said}"


def test_a_plan_of_one_block_in_one_line():
    one = plan_for("full", decoder=1)
    assert (one.summary(), str(one).splitlines()[0].split(", ")[-1]) == ("full on 1 block", "1 of 1 block checkpointed")
    assert plan_for("none", decoder=1).summary() == "keep on 1 block"


def test_a_plan_in_one_line_names_the_head_once():
    assert plan_for({"head": 512}, decoder=8).summary() == "full on all 8 blocks; head in chunks"
