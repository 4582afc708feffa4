"""`hf-ckpt doctor`: files are read as their owners read them, and each rule finds its fault and nothing else."""

import collections
import json
import shlex
from pathlib import Path

import pytest
import yaml
from helpers.tables import keyed, table

from hf_ckpt.cli.main import main, make_parser
from hf_ckpt.doctor.files import fields_of, read_files
from hf_ckpt.doctor.owners import OWNERS
from hf_ckpt.doctor.rules import RULES_BY_SEVERITY, code_of, diagnose
from hf_ckpt.errors import HfCkptError
from hf_ckpt.forecast.question import Question, question

ROOT = Path(__file__).parent.parent.parent
PROGRAMS = table(__file__, "programs.yaml")


@pytest.fixture
def reading(tmp_path):
    """A function (program, its launcher's config, the model's config, changed keys) -> `Training`."""

    def read(program="Trainer", launch=None, config=None, **changed):
        if program == "TRL":
            pytest.importorskip("trl")
        values = {**PROGRAMS["files"][program], **changed}
        train = {key: value for key, value in values.items() if value != "left out"}
        paths = []
        for content in (train, launch) if launch else (train,):
            paths.append(tmp_path / f"{len(paths)}.yaml")
            paths[-1].write_text(yaml.safe_dump(content))
        return read_files(paths, config)

    return read


# --- what a file asks for ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", ["TRL", "axolotl", "LLaMA-Factory", "ms-swift"])
def test_the_same_qlora_is_the_same_training_in_each_program(program, reading):
    training = reading(program)
    assert training.owner.name == program
    fields = fields_of(training, {})
    assert fields.pop("trainer", None) == ("sft" if program == "TRL" else None)
    assert fields.pop("kbit_preparation", True) == (program == "TRL")
    assert Question(**fields) == Question(**PROGRAMS["qlora"])
    assert not diagnose(training)


@pytest.mark.trap(53)
@pytest.mark.parametrize(("program", "changed", "expected"), PROGRAMS["asks"])
def test_keys_and_defaults_are_those_of_the_program(program, changed, expected, reading):
    asked = yaml.safe_load(json.dumps(fields_of(reading(program, **changed), {})))  # tuples become lists
    assert {name: asked.get(name) for name in expected} == expected


@pytest.mark.parametrize(*keyed(PROGRAMS["refused"], "program", "changed", "launch", "reason"))
def test_what_cannot_be_planned_for_is_refused_by_name(program, changed, launch, reason, reading):
    with pytest.raises(HfCkptError, match=reason):
        question(fields_of(reading(program, launch, **changed), {}))


# --- rules ------------------------------------------------------------------------------------------------------------

OF_FILES = table(__file__, "files.yaml")


@pytest.mark.trap(32)
@pytest.mark.parametrize("row", OF_FILES, ids=["+".join(row["files"]) for row in OF_FILES])
def test_what_is_said_of_a_file(row, tmp_path, monkeypatch, capsys):
    if "TRL" in row["files"]:
        pytest.importorskip("trl")
    monkeypatch.chdir(tmp_path)
    names = {f"{owner}.yaml".replace(" ", "-"): owner for owner in row["files"]}
    for name, owner in names.items():
        Path(name).write_text(yaml.safe_dump(row["files"][owner]), encoding="utf-8")
    model = ["--model", row["model"]] if "model" in row else []
    code = main(["doctor", *names, *model, "--json"])
    printed = capsys.readouterr()
    if "refused" in row:
        assert (code, printed.err.splitlines()[-1]) == (2, row["refused"])
        return
    answer = json.loads(printed.out)
    says = ["{severity} {code}: {where}: {what} {fix}".format(**finding) for finding in answer["findings"]]
    assert (answer["files"], says, answer["plan"]) == (names, row["says"], row["plan"])
    assert code == any(line.startswith("error") for line in says)


def test_files_of_every_owner_and_faults_of_every_rule_are_in_the_table():
    counts = collections.Counter(owner for row in OF_FILES for owner in row["files"])
    assert counts.keys() == {owner.name for owner in OWNERS}
    assert all(counts[owner.name] >= (1 if owner.refused else 4) for owner in OWNERS)
    said = {line.split()[1].rstrip(":") for row in OF_FILES for line in row.get("says", ())}
    assert said == {code_of(rule) for rules in RULES_BY_SEVERITY.values() for rule in rules}


@pytest.mark.parametrize(("owner", "keys"), table(__file__, "keys.yaml").items())
def test_no_key_of_an_owner_is_called_misspelt_or_taken_for_one_of_a_spec(owner, keys, reading):
    sections = {}
    for key in keys.split():
        section, _, name = key.rpartition(".")
        (sections.setdefault(section, {}) if section else sections)[name] = False
    training = reading(owner, **sections)
    assert training.owner.name == owner
    assert len(keys.split()) > 200
    assert not {"misspelt", "spec-outside"} & {finding.code for finding in diagnose(training)}


def test_dropout_outside_the_blocks_is_not_redrawn(reading):
    fsdp2 = {"fsdp_version": 2, "fsdp_activation_checkpointing": True}
    sharded = {"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": fsdp2}
    for key, expected in (("classifier_dropout", False), ("resid_pdrop", True)):
        findings = diagnose(reading("Trainer", sharded, {key: 0.1}))
        assert ("redrawn-dropout" in {finding.code for finding in findings}) == expected


# --- the program ------------------------------------------------------------------------------------------------------


def shipped(folder):
    return [str(path.relative_to(ROOT)) for path in sorted((ROOT / "configs" / folder).glob("*.yaml"))]


@pytest.mark.parametrize("launch", shipped("accelerate"))
def test_shipped_configs_have_no_fault_and_the_command_asks_what_they_say(launch, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    for recipe in shipped("recipes"):
        assert main(["doctor", launch, recipe, "--model", "mini-llama", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert {finding["severity"] for finding in found["findings"]} <= {"note"}
        words = shlex.split(found["plan"])
        arguments = vars(make_parser().parse_args([*words[1:-1], "t4"]))
        names = ("model", "ranks", "parallel", "autocast", "dtype")
        given = {name: arguments[name] for name in names if name in arguments}
        alone = fields_of(read_files([recipe]), given)
        assert alone == fields_of(read_files([recipe, launch]), {"model": "mini-llama"})
        assert alone.get("parallel", "ddp") in launch or alone["ranks"] == 1
        assert alone["ranks"] == (1 if "single" in launch else 8)


@pytest.mark.parametrize(*keyed(table(__file__, "printed.yaml"), "command", "text", "code", "printed"))
def test_exit_codes_and_what_is_printed(command, text, code, printed, tmp_path, capsys):
    path = tmp_path / "train.yaml"
    path.write_text(text)
    assert main([*command.split(), str(path)]) == code
    assert printed in "".join(capsys.readouterr())  # keys and values are not read as markup
    assert code == 2 or main(["doctor", str(path), str(path)]) == 2
    assert code == 2 or "second config of its kind" in capsys.readouterr().err
