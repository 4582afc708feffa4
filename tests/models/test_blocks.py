"""Every model type of every row is found, through every wrapper, and trains with equal gradients."""

import collections
import copy

import pytest
import torch
import transformers
from helpers.adapters import with_lora
from helpers.installed import flags
from helpers.others import other_model
from helpers.snapshots import snapshot
from helpers.steps import assert_same, planned, recomputed, step
from helpers.tables import table
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import hf_ckpt
from hf_ckpt import Family
from hf_ckpt.errors import NoBlocksError, OwnerConflictError
from hf_ckpt.models import families
from hf_ckpt.models.blocks import base_model, find_blocks
from hf_ckpt.models.families import register_family
from hf_ckpt.models.tiny import tiny_batch, tiny_model

SIZES = table(__file__, "sizes.yaml")
DEPTHS = {"bert": {"encoder": 3}, "t5": {"encoder": 3, "decoder": 2}}
AUTO = {"bert": transformers.AutoModelForMaskedLM, "t5": transformers.AutoModelForSeq2SeqLM}


BATCH = tiny_batch("llama")


def depths(blocks):
    """Stack -> number of blocks."""
    return collections.Counter(block.stack for block in blocks.blocks)


@pytest.fixture
def rows():
    """Remove rows that a test registers."""
    before = dict(families.FAMILIES)
    yield
    families.FAMILIES.clear()
    families.FAMILIES.update(before)


@pytest.mark.compat
@pytest.mark.parametrize(
    ("row", "model_type"),
    [(row, model_type) for row in families.FAMILIES.values() for model_type in row.model_types],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_every_model_type_of_every_row(row, model_type):
    """Blocks are found as the row says; `full` recomputes each once, with equal gradients."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **SIZES)
    model = AUTO.get(row.name, transformers.AutoModelForCausalLM).from_config(config).train()
    blocks = find_blocks(model)
    assert (blocks.family, depths(blocks)) == (row.name, DEPTHS.get(row.name, {"decoder": 3}))
    expected = step(model, BATCH)
    planned(model)
    assert_same(expected, step(model, BATCH))
    # Attention modules inside T5's blocks carry the flag, too.
    assert recomputed(model) == flags(model) == [block.name for block in blocks.blocks]


def test_other_heads_on_the_same_blocks():
    for model_class, family, first, stacks in (
        ("LlamaModel", "llama", "layers.0", {"decoder": 4}),
        ("BertModel", "bert", "encoder.layer.0", {"encoder": 4}),
        ("T5EncoderModel", "t5", "encoder.block.0", {"encoder": 4}),
    ):
        blocks = find_blocks(getattr(transformers, model_class)(tiny_model(family).config))
        assert (blocks.family, blocks.blocks[0].name, depths(blocks)) == (family, first, stacks)


# --- families without a row -----------------------------------------------------------------------------------------


def test_an_unknown_family_works_and_can_be_registered(rows, caplog):
    model = other_model("OPTForCausalLM")
    expected = step(model, BATCH)
    for _ in range(2):
        planned(model)
    assert_same(expected, step(model, BATCH))
    assert len(recomputed(model)) == 2
    register_family(Family("opt", ("opt",), (("text", "decoder.layers"),)))
    assert (find_blocks(model).family, depths(find_blocks(model))) == ("opt", {"text": 2})
    hf_ckpt.install(model, {"layers": {"text": "1"}})
    assert list(hf_ckpt.describe(model).plan.active()) == ["model.decoder.layers.1"]
    assert not caplog.records
    # Registering the same name again replaces the row.
    register_family(Family("opt", ("opt",), (("decoder", "decoder.layers"),)))
    assert depths(find_blocks(model)) == {"decoder": 2}
    with pytest.raises(ValueError, match=r"\['gpt2'\] already belong to the family 'gpt2'"):
        register_family(Family("mine", ("gpt2", "new"), (("decoder", "h"),)))


def test_generic_stacks_are_named_after_their_paths():
    """Generic stacks are called `encoder` and `decoder` if that is clear, else by their path; names are unique."""
    bart = other_model("BartForConditionalGeneration", encoder_layers=2, decoder_layers=3)
    assert depths(find_blocks(bart)) == {"encoder": 2, "decoder": 3}
    image = {**SIZES, "num_hidden_layers": 4, "image_size": 8, "patch_size": 4}
    config = transformers.CLIPConfig(text_config=SIZES, vision_config=image)
    stacks = {"text_model.encoder.layers": 3, "vision_model.encoder.layers": 4}
    assert depths(find_blocks(transformers.CLIPModel(config))) == stacks


class WithDraft(transformers.LlamaForCausalLM):
    """A model that holds another one of its family."""

    def __init__(self, config):
        super().__init__(config)
        self.draft = transformers.LlamaModel(config)

    def forward(self, input_ids=None, **kwargs):
        outputs = super().forward(input_ids=input_ids, **kwargs)
        outputs.loss = outputs.loss + self.draft(input_ids=input_ids, use_cache=False).last_hidden_state.square().mean()
        return outputs


def test_two_stacks_of_a_family_are_named_after_their_paths():
    torch.manual_seed(0)
    model = WithDraft(tiny_model("llama", layers=2).config).train()
    expected = step(model, BATCH)
    planned(model)
    assert_same(expected, step(model, BATCH))
    assert depths(find_blocks(model)) == {"model.layers": 2, "draft.layers": 2}
    assert recomputed(model) == [block.name for block in find_blocks(model).blocks]
    hf_ckpt.install(model, {"layers": {"draft.layers": "1"}})
    assert list(hf_ckpt.describe(model).plan.active()) == ["draft.layers.1"]
    hf_ckpt.uninstall(planned(model))
    model.draft = copy.deepcopy(planned(model).model)  # with hooks and functions of the plan
    plain = copy.deepcopy(model)
    hf_ckpt.uninstall(plain)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in plain.modules())
    assert_same(step(plain, BATCH), step(model, BATCH))
    assert recomputed(model) == [block.name for block in find_blocks(model).blocks]
    t5 = tiny_model("t5", layers=2)
    t5.draft = transformers.T5EncoderModel(t5.config)
    assert list(depths(find_blocks(t5))) == ["encoder.block", "draft.encoder.block", "decoder"]  # as they run


# --- wrappers -------------------------------------------------------------------------------------------------------


class Holder(nn.Module):
    """A wrapper as in training scripts."""

    def __init__(self, *models):
        super().__init__()
        self.models = nn.ModuleList(models)


WRAPPERS = {
    "data parallel": nn.DataParallel,
    "peft in a holder": lambda model: Holder(with_lora(model, "llama")),
    "compiled peft": lambda model: torch.compile(with_lora(model, "llama")),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_wrappers_are_looked_through(wrap):
    """hf_ckpt installs on the innermost PreTrainedModel, and wrappers do not change block names."""
    model = tiny_model("llama")
    names = [block.name for block in find_blocks(model).blocks]
    wrapped = wrap(model)
    assert base_model(wrapped) is model
    before = snapshot(model)
    planned(wrapped)
    assert [block.name for block, _ in hf_ckpt.describe(wrapped).plan.actions] == names
    assert hf_ckpt.describe(model).enabled
    hf_ckpt.uninstall(wrapped)
    assert snapshot(model) == before


def test_sharded_and_compiled_blocks_keep_name_and_kind():
    """`fully_shard` changes the class of blocks to FSDP<Layer>; a plan from before sharding still fits."""
    model = tiny_model("llama")
    plan = hf_ckpt.install(model).plan
    for layer in model.model.layers:
        kind = type(layer)
        layer.__class__ = type(f"FSDP{kind.__name__}", (kind,), {})
    model.model.layers[1] = torch.compile(model.model.layers[1])
    assert find_blocks(model).blocks == tuple(block for block, _ in plan.actions)
    hf_ckpt.uninstall(model)
    hf_ckpt.install(model, plan)


# --- unsupported models ---------------------------------------------------------------------------------------------


def test_something_that_is_no_model():
    no_model = "is not a Hugging Face PreTrainedModel"
    no_module = r"must be a torch\.nn\.Module, but is"
    for thing, said in ((nn.Linear(2, 2), no_model), (Holder(), no_model), ("llama", no_module), (Holder, no_module)):
        with pytest.raises(NoBlocksError, match=said):
            hf_ckpt.install(thing)
    pair = Holder(tiny_model("llama"), tiny_model("bert"))
    for act in (hf_ckpt.install, hf_ckpt.uninstall, hf_ckpt.describe):
        with pytest.raises(NoBlocksError, match=r"Holder holds 2 models \(LlamaForCausalLM, BertForSequenceClassifi"):
            act(pair)


class RemoteModel(transformers.PreTrainedModel):
    """Custom model code, whose blocks are plain modules."""

    config_class = type("RemoteConfig", (transformers.PretrainedConfig,), {"model_type": "from_the_hub"})

    def __init__(self):
        super().__init__(self.config_class())
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))


@pytest.mark.trap(26)
def test_a_model_without_blocks_names_the_known_families():
    model = RemoteModel()
    before = snapshot(model)
    with pytest.raises(NoBlocksError, match=r"has no blocks built on GradientCheckpointingLayer") as caught:
        hf_ckpt.install(model)
    text = str(caught.value)
    assert "RemoteModel (model_type 'from_the_hub')" in text
    assert all(row.name in text and row.model_types[-1] in text for row in families.FAMILIES.values())
    assert snapshot(model) == before


def test_a_block_in_torchs_own_wrapper_has_an_owner_already():
    model = tiny_model("llama")
    model.model.layers[2] = checkpoint_wrapper(model.model.layers[2])
    before = snapshot(model)
    with pytest.raises(OwnerConflictError, match=r"block 'model.layers.2.* is already wrapped"):
        hf_ckpt.install(model)
    assert snapshot(model) == before


# --- the frozen prefix ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "trainable", "frozen"),
    [
        ("llama", "model.layers.2.", 2),
        ("llama", "model.layers.0.mlp.down_proj", 0),
        ("llama", "no such parameter", 4),
        ("gpt2", "h.3.", 3),
        ("bert", "classifier", 4),
        ("bert", "layer.1.output", 1),
        ("t5", "decoder.block.1.", 5),  # all of the encoder, too
        ("t5", "shared", 0),
    ],
)
def test_blocks_below_the_first_trainable_parameter(family, trainable, frozen):
    """Exactly the blocks reported as frozen are not recomputed."""
    model = planned(tiny_model(family))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trainable in name)
    names = [block.name for block in find_blocks(model).blocks]
    assert list(hf_ckpt.describe(model).frozen) == names[:frozen]
    if trainable != "no such parameter":
        step(model, tiny_batch(family))
        assert recomputed(model) == names[frozen:]
