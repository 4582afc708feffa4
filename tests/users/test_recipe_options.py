"""Options of the recipes, from their YAML and the command line, and the rows of text that they make of files."""

from __future__ import annotations

import dataclasses
import re
import warnings
from pathlib import Path

import pytest
import yaml
from helpers.scripts import RECIPES, ROOT
from transformers import TrainingArguments

from hf_ckpt.models.tiny import byte_tokenizer
from hf_ckpt.spec.reading import POLICIES
from hf_ckpt.spec.spec import Spec


def kinds_of(recipe: str, recipes, monkeypatch) -> tuple[type, ...]:
    """The dataclasses of options that a recipe asks for."""
    asked: list[type] = []

    class Stop(Exception):
        pass

    def record(*kinds: type) -> None:
        asked.extend(kinds)
        raise Stop

    module = recipes(recipe)
    monkeypatch.setattr(module, "parse", record)
    with pytest.raises(Stop):
        module.main()
    return tuple(asked)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_key_of_the_yaml_is_an_option(recipe, recipes, monkeypatch):
    known = {field.name for kind in kinds_of(recipe, recipes, monkeypatch) for field in dataclasses.fields(kind)}
    settings = yaml.safe_load((ROOT / "configs" / "recipes" / f"{recipe}.yaml").read_text())
    named = {re.sub("^activation_checkpointing", recipes("common").FLAG, key) for key in settings}
    assert named <= known
    assert settings["activation_checkpointing"] is True
    assert Spec.parse(settings["activation_checkpointing_kwargs"]).policy in POLICIES


@pytest.fixture
def common(recipes):
    return recipes("common")


def parse(common, tmp_path: Path, text: str, *words: str):
    config = tmp_path / "options.yaml"
    config.write_text(text)
    kinds = (common.ModelArguments, common.DataArguments, TrainingArguments)
    return common.parse(*kinds, argv=[str(config), *words])


def test_unknown_yaml_key_ends_the_program(common, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse(common, tmp_path, "learning_rat: 1.0e-4\nmax_length: 8\n", "--tiny")
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert "learning_rat" in message
    assert "max_length" not in message.splitlines()[-1]


@pytest.mark.parametrize("text", ["", "just words", "- a list"])
def test_yaml_without_options_ends_the_program(common, tmp_path, capsys, text):
    with pytest.raises(SystemExit):
        parse(common, tmp_path, text, "--tiny")
    assert "must hold `option: value` lines" in capsys.readouterr().err


def test_missing_yaml_ends_the_program(common, tmp_path, capsys):
    with pytest.raises(SystemExit):
        common.parse(common.ModelArguments, argv=[str(tmp_path / "nowhere.yaml")])
    assert "nowhere.yaml" in capsys.readouterr().err


def test_unknown_flag_is_an_error(common, tmp_path):
    with pytest.raises(ValueError, match="--max_lenght"):
        parse(common, tmp_path, "max_length: 8", "--tiny", "--max_lenght", "9")


def test_command_line_beats_tiny_beats_yaml(common, tmp_path):
    text = "max_length: 100\nmax_steps: 200\nlearning_rate: 3e-4\nbf16: true\ndataset_name: some/data\n"
    options, data, args = parse(common, tmp_path, text, "--tiny", "--max_length", "7", "--output_dir", str(tmp_path))
    assert options.tiny
    assert (data.max_length, args.max_steps, args.learning_rate, args.bf16) == (7, 4, 3e-4, False)
    assert data.dataset_name is None
    assert all(Path(file).is_file() for file in data.train_file)


@pytest.mark.compat
@pytest.mark.parametrize("prefix", ["activation", "gradient"])
@pytest.mark.parametrize("place", ["yaml", "flag"])
def test_either_name_of_the_flag_works_without_a_warning(common, tmp_path, prefix, place):
    name = f"{prefix}_checkpointing"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if place == "yaml":
            text = f"{name}: true\n{name}_kwargs: {{policy: full, layers: 0-1}}\n"
            _, _, args = parse(common, tmp_path, text, "--tiny", "--output_dir", str(tmp_path))
        else:
            words = [f"--{name}", f"--{name}_kwargs", '{"policy": "full", "layers": "0-1"}']
            _, _, args = parse(common, tmp_path, "seed: 1", "--tiny", "--output_dir", str(tmp_path), *words)
    assert args.gradient_checkpointing is True
    assert args.gradient_checkpointing_kwargs == {"policy": "full", "layers": "0-1"}


# --- text -----------------------------------------------------------------------------------------------------------


def write(folder: Path, **files: str) -> list[str]:
    """Files of these contents; `a_txt` is a.txt."""
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)
    return [str(folder / name.replace("_", ".")) for name in files]


@pytest.fixture(autouse=True)
def own_data_cache(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")


def test_rows_are_lines_or_documents(common, tmp_path):
    files = write(tmp_path, a_txt="one\n\n  \ntwo\n", b_txt="three\n")
    data = common.DataArguments(train_file=files, text_column="words")
    assert list(common.load_rows(data)["words"]) == ["one", "two", "three"]
    assert [text.split() for text in common.load_rows(data, sample_by="document")["words"]] == [
        ["one", "two"],
        ["three"],
    ]


def test_local_files_replace_the_named_dataset(common, tmp_path):
    (file,) = write(tmp_path, a_csv="text,other\nhello,1\n")
    data = common.DataArguments(dataset_name="nobody/nothing", train_file=[file])
    assert list(common.load_rows(data)["text"]) == ["hello"]


@pytest.mark.parametrize(
    ("files", "settings", "message"),
    [
        ({}, {}, "no data"),
        ({"a_csv": "words\nhello\n"}, {}, "no column 'text', only words"),
        ({"a_csv": "text\nhello\n", "b_txt": "hello\n"}, {}, "one kind, but is csv and text"),
    ],
)
def test_data_that_cannot_be_used_is_refused(common, tmp_path, files, settings, message):
    data = common.DataArguments(train_file=write(tmp_path, **files) or None, **settings)
    with pytest.raises(SystemExit, match=message):
        common.load_rows(data)


def test_packing_keeps_every_token_in_order(common, tmp_path):
    tokenizer = byte_tokenizer()
    files = write(tmp_path, a_txt="a long enough text " * 40, b_txt="and another one")
    data = common.DataArguments(train_file=files, max_length=16)
    rows = common.load_rows(data, sample_by="document")
    packed = common.pack(rows, tokenizer, data)
    tokens = []
    for text in rows["text"]:
        tokens += [*tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], tokenizer.eos_token_id]
    assert set(packed.column_names) == {"input_ids", "labels"}
    assert list(packed["input_ids"]) == list(packed["labels"])
    assert [token for block in packed["input_ids"] for token in block] == tokens[: len(tokens) // 16 * 16]


def test_text_shorter_than_a_block_is_refused(common, tmp_path):
    data = common.DataArguments(train_file=write(tmp_path, a_txt="short"), max_length=64)
    with pytest.raises(SystemExit, match="shorter than one block of --max_length 64"):
        common.pack(common.load_rows(data), byte_tokenizer(), data)


def test_lines_of_text_files_are_labelled_with_their_file(recipes, tmp_path):
    recipe = recipes("classify_bert")
    data = recipe.LabelledDataArguments(train_file=write(tmp_path, b_txt="one\ntwo\n", a_txt="three\n"))
    rows = recipe.load_labelled(data)
    assert rows.features["label"].names == ["a.txt", "b.txt"]
    assert sorted(zip(rows["text"], rows["label"], strict=True)) == [("one", 1), ("three", 0), ("two", 1)]


def test_names_become_labels(recipes, tmp_path):
    recipe = recipes("classify_bert")
    (file,) = write(tmp_path, a_csv="text,mood\ngood,glad\nbad,sad\nfine,glad\n")
    rows = recipe.load_labelled(recipe.LabelledDataArguments(train_file=[file], label_column="mood"))
    assert rows.features["mood"].names == ["glad", "sad"]
    assert list(rows["mood"]) == [0, 1, 0]
    with pytest.raises(SystemExit, match="no column 'label'"):
        recipe.load_labelled(recipe.LabelledDataArguments(train_file=[file]))


def test_the_target_of_a_line_is_the_next_line(recipes, tmp_path):
    recipe = recipes("seq2seq_t5")
    rows = recipe.load_pairs(recipe.PairArguments(train_file=write(tmp_path, a_txt="one\ntwo\nthree\n")))
    assert list(zip(rows["text"], rows["target"], strict=True)) == [("one", "two"), ("two", "three")]


def test_a_missing_target_column_is_not_replaced_by_the_next_row(recipes, tmp_path):
    recipe = recipes("seq2seq_t5")
    (file,) = write(tmp_path, a_csv="text,summary\nlong,short\n")
    with pytest.raises(SystemExit, match="no column 'target', only text, summary"):
        recipe.load_pairs(recipe.PairArguments(train_file=[file]))


def test_word_overlap(recipes):
    import numpy as np
    from transformers import EvalPrediction

    tokenizer = byte_tokenizer()
    made, wanted = tokenizer(["a b c d", "x y"])["input_ids"], tokenizer(["a b e f", "x y"])["input_ids"]
    made, wanted = (
        np.array([ids + [fill] * (9 - len(ids)) for ids in rows]) for rows, fill in ((made, 0), (wanted, -100))
    )
    score = recipes("seq2seq_t5").word_overlap(tokenizer)(EvalPrediction(predictions=made, label_ids=wanted))
    assert score == {"word_overlap": pytest.approx((0.5 + 1.0) / 2)}
