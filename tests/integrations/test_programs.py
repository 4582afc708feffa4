"""The commands of axolotl, with the plug-in, and of LLaMA-Factory, under `python -m hf_ckpt`, where they are installed:
they train with the plan, and with the same losses as without."""

import json

import pytest
import yaml
from helpers.processes import python

from hf_ckpt.models.tiny import byte_tokenizer, tiny_model

AXOLOTL = """
{base_model: model, tokenizer_type: AutoTokenizer, special_tokens: {pad_token: <pad>}, dataset_prepared_path: prepared,
datasets: [{path: rows.json, type: alpaca}], val_set_size: 0, sequence_len: 256, micro_batch_size: 2, num_epochs: 1,
gradient_accumulation_steps: 1, max_steps: 3, learning_rate: 0.001, optimizer: adamw_torch, lr_scheduler: constant,
logging_steps: 1, seed: 3, bf16: false, tf32: false, attn_implementation: sdpa}
"""
PLUGIN = """
{plugins: [hf_ckpt.integrations.axolotl.HfCkptPlugin], gradient_checkpointing: true,
gradient_checkpointing_kwargs: {policy: full, layers: '0,-1'}}
"""
LLAMA_FACTORY = """
{model_name_or_path: model, stage: sft, finetuning_type: lora, lora_rank: 4, do_train: true, template: default,
cutoff_len: 64, dataset: own, dataset_dir: ., per_device_train_batch_size: 2, max_steps: 3, logging_steps: 1,
report_to: none, use_cpu: true, seed: 3, disable_gradient_checkpointing: true}
"""
UNDER_HF_CKPT = ("-m", "hf_ckpt", "--spec", "policy=selective")
SELECTIVE = "hf_ckpt: LlamaForCausalLM: selective (save linear, attention) on all 4 blocks"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "module", "training", "more", "start", "said"),
    [
        ("axolotl", "axolotl.cli.train", AXOLOTL, PLUGIN, (), "2 of 4 blocks"),
        ("llamafactory", "llamafactory.launcher", LLAMA_FACTORY, "{}", UNDER_HF_CKPT, SELECTIVE),
    ],
)
def test_a_command_trains_with_the_plan(package, module, training, more, start, said, tmp_path):
    pytest.importorskip(package)
    tiny_model("llama", layers=4).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    rows = [{"instruction": f"say {number}", "input": "", "output": "word " * 8} for number in range(16)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    (tmp_path / "dataset_info.json").write_text(json.dumps({"own": {"file_name": "rows.json"}}))
    losses = {}
    for name, further, words in (("with", more, start), ("without", "{}", ())):
        keys = {**yaml.safe_load(training), **yaml.safe_load(further), "output_dir": name}
        (tmp_path / "train.yaml").write_text(yaml.safe_dump(keys))
        untracked = {"AXOLOTL_DO_NOT_TRACK": "1", "DO_NOT_TRACK": "1"}
        done = python(*words, "-m", module, "train.yaml", cwd=tmp_path, extra=untracked)
        assert done.returncode == 0, done.stderr[-3000:]
        assert (said in done.stdout + done.stderr) == (name == "with")
        *_, state = sorted((tmp_path / name).rglob("trainer_state.json"))
        logged = json.loads(state.read_text())["log_history"]
        losses[name] = [(row["loss"], row["grad_norm"]) for row in logged if "loss" in row]
    assert len(losses["with"]) == 3
    assert losses["with"] == losses["without"]
