"""What users may write and what it means; everything else is refused, with all problems at once."""

import difflib

import pytest

from hf_ckpt.errors import SpecError
from hf_ckpt.spec.reading import Rule, parse_layers
from hf_ckpt.spec.spec import Spec


def test_specs_as_text():
    for text, wanted in {
        "  full\n": {"policy": "full"},
        "policy=full layers=0-3,-1": {"policy": "full", "layers": "0-3,-1"},
        "every_n_layers=2 preserve_rng_state=true": {"every_n_layers": 2, "preserve_rng_state": True},
        "budget=20GiB": {"policy": "budget", "budget": "20GiB"},
        '{"policy": "full", "every_n_layers": 3}': {"policy": "full", "every_n_layers": 3},
    }.items():
        assert Spec.parse(text) == Spec.parse(wanted)


def test_what_follows_from_what_is_given():
    """Only keys that a user leaves out are filled in."""
    assert Spec.parse(None) == Spec.parse({}) == Spec()
    assert Spec().to_dict() == {"policy": "full"}
    assert Spec.parse({"budget": 0.8}).policy == "budget"
    assert Spec.parse({"rules": [{"layers": "0", "policy": "full"}]}).policy == "none"
    assert Spec.parse({"plan": "plan.json"}).to_dict() == {"plan": "plan.json"}
    assert Spec.parse({"layers": [0, 2, -1]}).layers == "0,2,-1"
    assert Spec.parse({"layers": " 0 - 3 , 5 "}).layers == "0-3,5"
    assert Spec.parse({"policy": "selective", "save": "linear"}).save == ("linear",)
    assert Spec.parse({"policy": "selective", "save": ["attention", "linear"]}).save == ("linear", "attention")
    assert Spec.parse({"budget": 1.0}).budget == 1.0
    assert type(Spec.parse({"budget": 2e10}).budget) is int
    assert Spec.parse({"rules": [{"layers": 1, "policy": "full"}]}).rules == (Rule(layers="1", policy="full"),)
    rule = {"layers": "0", "policy": "none"}  # beside `layers`, rules are exceptions to `full`
    assert Spec.parse({"layers": "0-3", "rules": [rule]}).policy == "full"
    spec = Spec.parse({"policy": "full"})
    assert Spec.parse(spec) is spec


def test_texts_that_name_no_layers():
    """What the others name is compared with a slow twin, where plans are made."""
    assert parse_layers(" 1 , 2 - 3,-4--1,-3- ") == ((1, 1), (2, 3), (-4, -1), (-3, -1))
    for text in ("", ",", "1,", "a", "-", "1--", "--1", "1-2-3", "1.5", "0x1", "1;2"):
        with pytest.raises(ValueError, match=r"must be a list like '0-15,-1'"):
            parse_layers(text)


def test_an_enable_call_selects_anew_or_only_changes_options():
    """Bare enable calls, or calls with only `use_reentrant`, keep the choice of blocks; others replace it."""
    spec = Spec.parse({"layers": "0-3", "preserve_rng_state": True})
    for bare in ({}, {"use_reentrant": True}, {"every_n_layers": 1, "offload": False, "use_reentrant": False}):
        assert spec.updated(bare) == spec, bare
    assert spec.updated({"determinism_check": "none"}) == Spec.parse({**spec.to_dict(), "determinism_check": "none"})
    assert spec.updated({"every_n_layers": 2}) == Spec(every_n_layers=2)
    assert spec.updated({"policy": "full"}) == Spec()
    assert spec.updated({"rules": [{"layers": "0", "policy": "full"}]}).layers is None
    for equal_to_a_default in ({"every_n_layers": True}, {"every_n_layers": 1.0}, {"offload": 0}):
        with pytest.raises(SpecError):
            spec.updated(equal_to_a_default)


@pytest.mark.trap(15, 35)
@pytest.mark.parametrize(
    ("given_spec", "expected"),
    [
        ({"polcy": "full"}, "`polcy` is not a key of the spec; did you mean `policy`?"),
        ({"zzz": 1}, "`zzz` is not a key of the spec; known: policy, "),
        ({"policy": "ful"}, "did you mean 'full'?"),
        ({"policy": None}, '`policy` must be one of "none", "full", "selective", "full+selective", "offload", '),
        ({"preserve_rng_state": "False"}, "is 'False' instead; did you mean false, without quotes?"),
        ({"policy": {"encoder": "ful"}}, "`policy` for each stack: `encoder` must be one of "),
        ({"policy": {}}, "`policy` must name at least one stack, but is empty"),
        ({"policy": {"encoder": "budgt"}, "budget": "20GiB"}, "did you mean 'budget'?"),
        ({"every_n_layers": 10**5000}, "is a value of type int instead; the largest number is 1,000,000,000."),
        ({"head": 10**5000}, "the largest number is"),
        ({"layers": [10**5000]}, "`layers` must be a list like '0-15,-1', but is"),
        ({"layers": "1" * 5000}, "`layers` must be a list like '0-15,-1', but is"),
        ({"budget": 10**5000}, "a size must look like '20GiB', '800MB' or 1073741824"),
        ({"budget": 500_000}, "a size needs a unit, but is 500000 instead; did you mean '500000B'?"),
        ({"use_reentrant": 0}, "`use_reentrant` must be one of true, false, but is 0 instead"),
        ({"every_n_layers": 0}, "`every_n_layers` must be a whole number of at least 1, but is 0 instead"),
        ({"every_n_layers": True}, "but is True instead"),
        ({"layers": "1--"}, "`layers` must be a list like '0-15,-1', but is '1--' instead"),
        ({"layers": [True]}, "but is [True] instead"),
        ({"layers": {}}, "must name at least one stack"),
        ({"layers": "0", "every_n_layers": 2}, "`layers` and `every_n_layers` both choose blocks"),
        ({"segments": 2, "layers": "0"}, "`segments` covers whole stacks"),
        ({"segments": 2, "policy": "selective"}, "`segments` goes with `policy: full`"),
        ({"policy": "budget"}, "`policy: budget` needs `budget`"),
        ({"policy": "full", "budget": "1GiB"}, "`budget` goes with `policy: budget`"),
        ({"budget": "0GiB"}, "`budget` is no budget: a size must be positive"),
        ({"policy": "auto", "rules": [{"layers": "0", "policy": "full"}]}, "chooses the blocks itself; remove rules"),
        ({"policy": "none", "layers": "0"}, "`policy: none` leaves every block as it is; remove layers"),
        ({"policy": "selective", "save": ["conv"]}, "must be a list out of ['linear', 'attention'], but is ['conv']"),
        ({"host_budget": "1GiB"}, "`host_budget` goes with `policy: offload` or `policy: budget` or `policy: auto`"),
        ({"policy": "selective", "offload": True}, "; to move what `selective` saves, write 'saved'"),
        ({"policy": "full", "offload": "saved"}, "`offload: saved` goes with `policy: selective`, but policy is"),
        ({"segments": 2, "offload": True}, "it cannot be combined with `segments`"),
        ({"head": 0}, "`head` must be a whole number of at least 1 or 'full' or 'auto', but is 0 instead"),
        ({"head": "atuo"}, "did you mean 'auto'?"),
        ({"mlp": 0}, "`mlp` must be a whole number of at least 1 or 'full' or 'auto', but is 0 instead"),
        (
            {"policy": "selective", "mlp": 64},
            "`mlp` goes with `policy: full` or `policy: budget` or `policy: auto`, but",
        ),
        ({"segments": 2, "mlp": 64}, "it cannot be combined with `segments`, `offload` or `compile`"),
        ({"compile": "blocks", "mlp": 64}, "it cannot be combined with `segments`, `offload` or `compile`"),
        ({"plan": "p.json", "mlp": 64}, "`plan` already says what every block gets"),
        ({"rules": []}, "must be a list of mappings with `policy` and `layers` or `stack`"),
        ({"rules": ["full"]}, "[0] must be a mapping, but is 'full' instead"),
        ({"rules": [{"policy": "full"}]}, "[0] needs `layers` or `stack`"),
        ({"rules": [{"stack": "encoder"}]}, "[0] needs `policy`"),
        ({"rules": [{"layers": "0", "policy": "full", "stak": "encoder"}]}, "did you mean `stack`?"),
        ({"rules": [{"stack": "a", "policy": "full", "save": ["linear"]}]}, "[0] `save` goes with `policy: selective`"),
        ({"compile": "blocks", "share": 2}, "`share` must be a number from 0 to 1, but is 2 instead"),
        ({"compile": "model"}, "`compile` must be one of null, \"blocks\", but is 'model' instead"),
        ({"share": 0.5}, '`share` is how much compiled blocks keep; it needs `compile: "blocks"`'),
        ({"rules": [{"layers": "0", "policy": "full", "share": 0.5}]}, "it needs `compile"),
        ({"compile": "blocks", "policy": "none", "share": 0.5}, "but policy is 'none'"),
        ({"compile": "blocks", "policy": "selective", "save": ["attention"]}, "remove save"),
        ({"compile": "blocks", "policy": "offload"}, "compiled blocks are not offloaded"),
        ({"compile": "blocks", "policy": "full+selective"}, "leave to the compiler what is rebuilt"),
        ({"save": ["linear"]}, "`save` goes with `policy: selective` or `policy: full+selective`, but"),
        ({"context_fn": print}, "`context_fn` is a callable, which TrainingArguments cannot save as JSON"),
        ({"selective": True}, "`selective` is TRL's switch"),
        ({"plan": 3}, "`plan` must be the path of a saved plan, but is 3 instead"),
        ({"plan": "p.json", "policy": "full"}, "`plan` already says what every block gets"),
        # What follows from a mistake is not told, too.
        ({"policy": "budgt", "budget": "20GiB"}, "did you mean 'budget'?"),
        ({"budget": 20, "host_budget": "64GiB"}, "did you mean '20GiB'?"),
        ({"polcy": "selective", "save": ["linear"]}, "did you mean `policy`?"),
        ({"policy": "full", "save": ["linar"]}, "`save` must be a list"),
        (3, "a spec must be a dict, a text or a path, but is int instead: 3"),
        (["full"], "but is list instead"),
        ("{", "not valid JSON"),
        ('{"policy": "full", "policy": "none"}', "not valid JSON: `policy` is given twice"),
        ('{"rules": [{"layers": 0, "layers": 1, "policy": "full"}]}', "`layers` is given twice"),
        (f"{'a' * 10**6}=1 {'a' * 10**6}=1", "is given twice"),
        ("fulll", "cannot read 'fulll'"),
        ("policy=full layers", "words must look like key=value, but 'layers' does not"),
        ("policy=[", "not readable as key=value words"),
    ],
)
def test_one_clear_error(given_spec, expected):
    with pytest.raises(SpecError) as caught:
        Spec.parse(given_spec)
    assert len(caught.value.problems) == 1
    assert expected in str(caught.value)
    assert "?." not in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_an_error_about_many_words_looks_at_few_of_them(monkeypatch):
    """Looking for similar names takes long: 50,000 words took 48 s."""
    looked, real = [], difflib.get_close_matches
    monkeypatch.setattr(difflib, "get_close_matches", lambda *args, **kwargs: looked.append(1) or real(*args, **kwargs))
    with pytest.raises(SpecError, match=r"^11 problems"):
        Spec.parse(" ".join(f"k{number}=1" for number in range(500)))
    assert 0 < len(looked) <= 25


def test_every_problem_is_named_at_once():
    wrong = {"polcy": "full", "every_n_layers": 0, "use_reentrant": "True", "host_budget": "1 parsec"}
    rules = [{"layers": "x"}, {"layers": "0", "policy": "ful"}]
    with pytest.raises(SpecError) as caught:
        Spec.parse({**wrong, "rules": rules, "context_fn": print})
    text = str(caught.value)
    assert text.startswith("6 problems in the activation checkpointing spec:\n")
    of_rules = ("[0] `layers` must be a list", "and needs `policy`", "[1] `policy` must be one of")
    assert [part for part in (*(f"`{key}`" for key in wrong), "`context_fn`", *of_rules) if part not in text] == []
