"""Invalid arguments end with exit code 2 and a message, without a traceback, before any work."""

from __future__ import annotations

import json
import os

import pytest
from helpers.disks import full_disk
from helpers.processes import python

from hf_ckpt.cli.main import main
from hf_ckpt.cli.pictures import import_pyplot, save_figure
from hf_ckpt.errors import FileError
from hf_ckpt.forecast.devices import device_named
from hf_ckpt.forecast.record import bytes_allowed
from hf_ckpt.prediction.workload import Workload, load_config, presets, real_model
from hf_ckpt.units import parse_budget

# Command-line words -> error message. All are refused before torch is imported.
WRONG_WORDS = (
    ("plan gpt2 --device abacus", "--device: 'abacus' is not a known device; known are h200, h100"),
    ("plan gpt2 --device a100", "did you mean a100-80 or a100-40? Or give its memory by --budget"),
    ("plan gpt2 --device 24GiB", "'24GiB' is a size and no device: give --budget 24GiB, or a card with about as much"),
    ("plan gpt2 --optimizer adamv", "'adamv' is not known; did you mean adam or adamw? See"),
    ("plan gpt2 --optimizer magic", "'magic' is not known; known are adamw"),
    ("plan gpt2 --dtype int3", "'int3' is not known"),
    ("plan gpt2 --autocast int3", "'int3' is not known"),
    ("plan gpt2 --attention magic", "must be sdpa, eager"),
    ("plan gpt2 --budget lots", "a size must look like"),
    ("plan gpt2 --budget 20", "a size needs a unit, but is '20' instead; did you mean '20GiB'? See"),
    ("plan gpt2 --budget 20 GB", "did you mean '20GiB'? See"),
    ("plan gpt2 --budget 120%", "a share must be above 0%"),
    ("plan gpt2 --budget 1.5", "a share must be above 0 and at most 1"),
    ("plan gpt2 --host-budget 80%", "a size must look like"),
    ("plan gpt2 --host-budget 8000", "did you mean '8000MiB'?"),
    ("plan gpt2 --seq 8q", "must be a whole number of at least 1, such as 4096 or 4k"),
    ("plan gpt2 --devise 4090", "'--devise' is not understood here; did you mean --device?"),
    ("plan lama-3.1-8b", "Did you mean llama-3.1-8b"),
    ("plan gpt2 --head -1", "must be a whole number"),
    ("plan gpt2 --mlp 0", "must be a whole number"),
    ("plan gpt2 --out x.txt", "'x.txt' must end in .json or .yaml or .yml"),
    ("plan gpt2 --out no/x.json", "there is no folder 'no'"),
    ("plan gpt2 --html x.txt", "'x.txt' must end in .html"),
    ("plan gpt2 --html no/x.html", "there is no folder 'no'"),
    ("plan nobody/nothing", "cannot read a model's config from 'nobody/nothing'"),
    ("plan no-such-model", "cannot read a model's config from 'no-such-model'"),
    ("check --spec policy=nonsense", "did you mean 'none'"),
    ("check --spec no-such-file.yaml", "cannot read 'no-such-file.yaml'"),
    ("doctor --device abacus", "'abacus' is not a known device"),
    ("app ./gpt2 --host 0.0.0.0", "files of this machine are not read here"),
    ("hf_ckpt --spec policy=nonsense script.py", "did you mean 'none'"),
)

ALL_IN_ONE = """
import json, sys
from hf_ckpt import __main__
from hf_ckpt.cli.main import main
codes = []
for words in json.loads(sys.argv[1]):
    print("-----", file=sys.stderr)
    try:
        codes.append(__main__.main(words[1:]) if words[0] == "hf_ckpt" else main(words))
    except SystemExit as ended:
        codes.append(ended.code)
print(json.dumps([codes, sorted({"torch", "transformers", "numpy"} & set(sys.modules))]))
"""


def test_wrong_words_are_refused_before_torch_is_imported(tmp_path):
    (tmp_path / "script.py").write_text("raise SystemExit('the script ran')\n")
    words = [text.split() for text, _ in WRONG_WORDS]
    done = python("-c", ALL_IN_ONE, json.dumps(words), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    codes, imported = json.loads(done.stdout)
    assert codes == [2] * len(words)
    assert imported == []
    told = done.stderr.split("-----\n")[1:]
    for (text, said), error in zip(WRONG_WORDS, told, strict=True):
        assert said in error, text
        assert "Traceback" not in error, text
        assert "usage:" not in error, text
        if text.startswith("plan gpt2"):
            assert error.count("\n") == 1, text
    assert os.listdir(tmp_path) == ["script.py"]


def config(folder, preset="mini-llama", **changed):
    """Write the config of a preset with changed values, and return its path."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(presets()[preset].read_text()), **changed}))
    return path


@pytest.mark.compat
@pytest.mark.parametrize(
    ("preset", "changed"),
    [
        ("mini-llama", {"num_attention_heads": 0}),
        ("mini-llama", {"num_key_value_heads": 0}),
        ("mini-llama", {"hidden_act": "magic"}),
        ("mini-llama", {"rope_scaling": {"rope_type": "magic", "factor": 2.0}}),
        ("mini-llama", {"vocab_size": -5}),
        pytest.param("mini-llama", {"vocab_size": 10**15}, marks=pytest.mark.slow),
        ("mini-llama", {"hidden_size": "many"}),
        ("mini-llama", {"head_dim": 3}),
        ("mini-llama", {"pad_token_id": 10**9}),
        ("mini-llama", {"model_type": ["llama"]}),
        ("mini-gpt2", {"n_head": 0}),
        ("mini-bert", {"hidden_act": "magic"}),
        ("mini-t5", {"feed_forward_proj": "x-y-z"}),
    ],
)
def test_a_config_that_makes_no_model(preset, changed, tmp_path, capsys):
    path = config(tmp_path, preset, **changed)
    capsys.readouterr()
    assert main(["plan", str(path), "--seq", "16", "--device", "a10"]) == 2
    error = capsys.readouterr().err
    assert "hf-ckpt: " in error
    assert "config" in error or "cannot be planned for" in error
    assert "Traceback" not in error


def test_a_config_that_names_no_class_is_taken_for_a_causal_language_model(tmp_path):
    for architectures in (5, [5], ["LlamaConfig"]):
        path = config(tmp_path, architectures=architectures, num_hidden_layers=1)
        assert type(real_model(Workload(model=str(path)))).__name__ == "LlamaForCausalLM"


def test_a_config_that_is_no_file_to_read(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")  # opening it would block
    (tmp_path / "deep.json").write_text('{"a":' * 5000 + "1" + "}" * 5000)
    for name, said in {"pipe": "it is no regular file", "deep.json": "nested too deep", "x" * 300: "too long"}.items():
        assert main(["plan", str(tmp_path / name)]) == 2
        error = capsys.readouterr().err
        assert "cannot read a model's config" in error
        assert said in error
    assert load_config("mini-gpt2").model_type == "gpt2"


@pytest.mark.parametrize("given", ["0.8", 0.8, "80%", str(round(0.8 * 24e9)), round(0.8 * 24e9)])
def test_a_share_of_the_device_is_written_as_in_a_spec(given):
    device = device_named("a10")
    expected = 19_200_000_000 if "19200000000" in str(given) else round(0.8 * device.memory_bytes)
    assert bytes_allowed(parse_budget(given), device) == expected


def test_a_full_disk_leaves_the_picture_that_was_there(tmp_path):
    path = tmp_path / "p.png"
    path.write_bytes(b"a picture")
    figure = import_pyplot().figure()
    with full_disk(1000), pytest.raises(FileError, match="cannot be written: "):
        save_figure(figure, path)
    assert path.read_bytes() == b"a picture"
    assert os.listdir(tmp_path) == ["p.png"]
    save_figure(figure, path)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["check", "--batch", "99999999999"], "memory ran out for 99999999999 x 32 tokens"),
        (
            ["demo", "--text", __file__, "--model", "/nope"],
            "cannot load a causal language model and its tokenizer from",
        ),
        (["demo", "--text", "/dev/zero"], "it is no regular file"),
    ],
)
def test_check_and_demo(words, said, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert said in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


def test_check_leaves_out_what_has_no_such_positions(capsys, caplog, tmp_path):
    from hf_ckpt.models.tiny import tiny_model

    tiny_model("gpt2", layers=2).save_pretrained(tmp_path)
    assert main(["check", str(tmp_path), "--batch", "1", "--tokens", "4096"]) == 2
    assert "has positions for" in capsys.readouterr().err
