"""From spec and blocks to a plan: chosen blocks, what does not fit, and plans saved and loaded."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_ckpt.errors import PlanMismatchError, SpecError
from hf_ckpt.planner.policies import fit_plan, make_plan
from hf_ckpt.spec.actions import KEEP
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


# --- compiled blocks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "shares"),
    [
        ({}, [0, 0, 0]),
        ({"policy": "none"}, [1, 1, 1]),
        ({"policy": "selective"}, [0.5, 0.5, 0.5]),
        ({"share": 0.3}, [0.3, 0.3, 0.3]),
        ({"share": 0.3, "layers": "1"}, [1, 0.3, 1]),
        ({"policy": "selective", "every_n_layers": 2}, [0.5, 1, 0.5]),
        ({"rules": [{"layers": "0", "policy": "full"}, {"layers": "2", "policy": "full", "share": 0.2}]}, [0, 1, 0.2]),
        ({"policy": "full", "share": 0.3, "rules": [{"layers": "0", "policy": "none"}]}, [1, 0.3, 0.3]),
    ],
)
def test_shares_of_compiled_blocks(spec, shares):
    """`compile` compiles all blocks of a model, those that keep everything with share 1."""
    plan = plan_for({"compile": "blocks", **spec}, encoder=3)
    assert [action.share for _, action in plan.actions] == shares
    assert {action.kind for _, action in plan.actions} == {"compiled"}
    assert Plan.from_dict(plan.to_dict()) == plan
    again = Spec.parse({"compile": "blocks", **spec})
    assert Spec.parse(again.to_dict()) == again


# --- choosing blocks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "encoder", "decoder"),
    [
        ("none", [], []),
        ("full", [0, 1, 2], [0, 1, 2, 3]),
        ({"every_n_layers": 2}, [0, 2], [0, 2]),
        ({"every_n_layers": 3}, [0], [0, 3]),
        ({"every_n_layers": 99}, [0], [0]),
        ({"layers": "0,-1"}, [0, 2], [0, 3]),
        ({"layers": "1--1"}, [1, 2], [1, 2, 3]),
        ({"layers": "0-1,1-2,0"}, [0, 1, 2], [0, 1, 2]),
        ({"layers": {"decoder": "-2--1"}}, [], [2, 3]),
        ({"layers": {"encoder": "0", "decoder": "0-3"}}, [0], [0, 1, 2, 3]),
        ({"rules": [{"layers": "0", "policy": "full"}]}, [0], [0]),
        ({"rules": [{"stack": "encoder", "layers": "0-2", "policy": "full"}]}, [0, 1, 2], []),
        ({"policy": "full", "rules": [{"stack": "decoder", "layers": "1-3", "policy": "none"}]}, [0, 1, 2], [0]),
        # If several rules match a block, the last one wins.
        ({"rules": [{"layers": "0-2", "policy": "full"}, {"layers": "1", "policy": "none"}]}, [0, 2], [0, 2]),
        ({"rules": [{"layers": "1", "policy": "none"}, {"layers": "0-2", "policy": "full"}]}, [0, 1, 2], [0, 1, 2]),
        (
            {"policy": "full", "layers": "1", "rules": [{"stack": "encoder", "layers": "0", "policy": "full"}]},
            [0, 1],
            [1],
        ),
        ({"policy": "none", "rules": [{"stack": "encoder", "layers": "0", "policy": "none"}]}, [], []),
        ({"policy": "full", "rules": [{"stack": "encoder", "policy": "none"}]}, [], [0, 1, 2, 3]),
    ],
)
def test_blocks_chosen(spec, encoder, decoder):
    assert chosen(plan_for(spec, encoder=3, decoder=4)) == {"encoder": encoder, "decoder": decoder}


def slow_twin(parts, count):
    """The selected indices in a stack of `count` blocks, found by testing every index; None if `parts` are invalid.

    `parts` are (first, last) pairs, so no text is parsed.
    """
    wanted = set()
    for first, last in parts:
        if not all(-count <= end < count for end in (first, last)):
            return None
        span = [index for index in range(count) if first % count <= index <= last % count]
        if not span:
            return None
        wanted |= set(span)
    return sorted(wanted)


def as_text(parts):
    ends = {-1: ""}  # "2-" means to the end
    return ",".join(str(first) if first == last else f"{first}-{ends.get(last, last)}" for first, last in parts)


PLACES = st.integers(-7, 7)
PARTS = st.lists(st.tuples(PLACES, PLACES), min_size=1, max_size=2)
RULES = st.lists(st.tuples(PARTS, st.sampled_from(["none", "full"])), min_size=1, max_size=3)


@given(rules=RULES, base=st.sampled_from(["none", "full"]), count=st.integers(4, 7))
def test_rules_equal_a_slow_twin(rules, base, count):
    """For every block, the last matching rule wins; rules that name no block are refused."""
    spec = {"policy": base, "rules": [{"layers": as_text(parts), "policy": policy} for parts, policy in rules]}
    named = [(slow_twin(parts, count), policy) for parts, policy in rules]
    if any(indices is None for indices, _ in named):
        with pytest.raises(SpecError):
            plan_for(spec, decoder=count)
        return
    actions = [next((policy for indices, policy in reversed(named) if n in indices), base) for n in range(count)]
    assert chosen(plan_for(spec, decoder=count)) == {
        "decoder": [n for n, policy in enumerate(actions) if policy == "full"]
    }


# --- what does not fit ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"layers": "4"}, "`layers` names 4, but stack 'decoder' has blocks 0 to 3 (or -4 to -1)."),
        ({"layers": "-5"}, "`layers` names -5, but stack 'decoder' has blocks 0 to 3"),
        ({"layers": "3-1"}, "`layers` names 3-1, which matches no block of stack 'decoder'."),
        (
            {"layers": {"decodr": "0"}},
            "names the stack 'decodr', but this model has 'decoder'; did you mean 'decoder'?",
        ),
        ({"rules": [{"stack": "encoder", "layers": "0", "policy": "full"}]}, "`rules`[0] names the stack 'encoder'"),
    ],
)
def test_a_choice_that_does_not_fit_the_model(spec, expected):
    with pytest.raises(SpecError) as caught:
        plan_for(spec, decoder=4)
    assert len(caught.value.problems) == 1
    assert expected in str(caught.value)


def test_every_misfit_is_named_at_once():
    spec = {
        "policy": "full",
        "layers": {"encoder": "9", "vision": "0"},
        "rules": [{"layers": "2-1", "policy": "full"}, {"stack": "text", "layers": "0", "policy": "none"}],
    }
    with pytest.raises(SpecError) as caught:
        plan_for(spec, encoder=3, decoder=3)
    text = str(caught.value)
    for part in ("`layers` names 9", "'vision'", "`rules`[0] names 2-1", "'text'"):
        assert part in text
    assert len(caught.value.problems) == 5  # the rule without a stack fails in both


# --- plans as files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plan.json", "plan.yaml", "plan.yml"])
def test_plans_are_saved_and_loaded(tmp_path, name):
    plan = plan_for({"layers": {"encoder": "0", "decoder": "1-2"}}, encoder=2, decoder=3)
    plan.save(tmp_path / name)
    assert Plan.load(tmp_path / name) == plan
    text = (tmp_path / name).read_text(encoding="utf-8")
    assert text.startswith("{") == name.endswith(".json")
    # A spec can name the file, and then leads to the file's plan.
    assert plan_for({"plan": str(tmp_path / name)}, encoder=2, decoder=3) == plan


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        (blocks(encoder=2), "it was made for T5ForConditionalGeneration with 3 blocks, this is BertModel with 2"),
        (blocks(encoder=4), "first difference at 'encoder.block.3'"),
        ([Block(f"encoder.block.{i}", "encoder", i, "BertLayer") for i in range(3)], "at 'encoder.block.0'"),
        ([Block(f"layer.{i}", "encoder", i, "T5Block") for i in range(3)], "first difference at 'encoder.block.0'"),
    ],
)
def test_a_plan_for_another_model_is_refused(others, expected):
    with pytest.raises(PlanMismatchError, match="is for another model") as caught:
        fit_plan(plan_for("full", encoder=3), others, "bert", "BertModel", "plan.json")
    assert expected in str(caught.value)
    assert str(caught.value).startswith("plan.json ")


def test_a_plan_fits_blocks_in_any_order():
    """A plan matches blocks by name, and keeps the order of the model's blocks."""
    plan = plan_for({"layers": {"encoder": "1"}}, encoder=2, decoder=1)
    fitted = fit_plan(plan, list(reversed(blocks(encoder=2, decoder=1))), "t5", "T5ForConditionalGeneration")
    assert list(fitted.active()) == ["encoder.block.1"]
    assert [block.name for block, _ in fitted.actions] == ["decoder.block.0", "encoder.block.1", "encoder.block.0"]


GOOD = plan_for("full", decoder=2).to_dict()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "cannot read a plan from"),
        ("", "is no plan of hf_ckpt"),
        ("[1, 2]", "is no plan of hf_ckpt"),
        (json.dumps({**GOOD, "hf_ckpt_plan": 99}), "is no plan of hf_ckpt (format 1)"),
        (json.dumps({**GOOD, "stacks": {"decoder": [{"block": "x", "kind": "y"}]}}), "is damaged"),
        (json.dumps({key: value for key, value in GOOD.items() if key != "family"}), "is damaged: KeyError('family')"),
        ("{'a': ", "cannot read a plan from"),
        ("a: 2001-99-99", "cannot read a plan from"),  # YAML reads a date and then fails
    ],
)
def test_a_file_that_is_no_plan(tmp_path, content, expected):
    path = tmp_path / "plan.yaml"  # it may contain JSON
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(PlanMismatchError) as caught:
        plan_for({"plan": str(path)}, decoder=2)
    assert expected in str(caught.value)
    assert str(path) in str(caught.value)


# --- plans in print --------------------------------------------------------------------------------------------------


def test_a_printed_description_says_what_has_happened(tmp_path):
    plan = plan_for({"layers": {"encoder": "0"}}, encoder=2, decoder=2)
    counts = {"encoder.block.0": 3}
    shown = Description(plan, {"policy": "full"}, True, ("encoder.block.0",), counts, counts)
    text = str(shown)
    assert 'hf_ckpt: enabled; spec {"policy": "full"}' in text
    assert "1 of 4 blocks planned" in text
    assert "1 blocks below the first trainable parameter save nothing" in text
    assert "3 checkpointed block calls, 3 recomputations" in text
    assert "not enabled" in str(Description(plan, {}, False, (), {}, {}))
    shown.save(tmp_path / "plan.yaml")
    assert Plan.load(tmp_path / "plan.yaml") == plan


@pytest.mark.parametrize(
    ("spec", "stacks", "said"),
    [
        ({"policy": "none"}, {"decoder": 4}, "everything is kept, in 4 blocks"),
        ({"policy": "full"}, {"decoder": 4}, "full on all 4 blocks"),
        ({"every_n_layers": 2}, {"decoder": 4}, "full on blocks 0, 2 of 4"),
        ({"layers": "1"}, {"decoder": 4}, "full on block 1 of 4"),
        ({"segments": 2}, {"decoder": 4}, "full in 2 segments on all 4 blocks"),
        (
            {"policy": "full", "rules": [{"layers": "0-1", "policy": "selective"}, {"layers": "3", "policy": "none"}]},
            {"decoder": 4},
            "selective (save linear, attention) on blocks 0-1 and full on block 2 of 4",
        ),
        (
            {"policy": "selective", "save": ["attention"], "layers": {"encoder": "0"}},
            {"encoder": 2, "decoder": 3},
            "encoder: selective (save attention) on block 0 of 2; decoder: everything is kept, in 3 blocks",
        ),
        ({"policy": "full", "head": 512}, {"decoder": 2}, "full on all 2 blocks; head in chunks"),
    ],
)
def test_a_plan_in_one_line(spec, stacks, said):
    assert plan_for(spec, **stacks).summary() == said


@pytest.mark.parametrize(
    ("spec", "expected"),
    [({"layers": "0-2,5"}, "full 0-2, 5; keep 3-4, 6-7"), ({"every_n_layers": 4}, "full 0, 4; keep 1-3, 5-7")],
)
def test_a_printed_plan_names_layers(spec, expected):
    assert str(plan_for(spec, decoder=8)).splitlines()[1].strip() == f"decoder (8 x T5Block): {expected}"
