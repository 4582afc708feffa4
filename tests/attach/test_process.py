"""`install()` without a model: it applies to every model of the process, and to models inside models."""

import copy
import gc
import types

import pytest
import torch
from accelerate import Accelerator
from helpers.adapters import with_lora
from helpers.installed import ALL, active, flags
from helpers.ranks import one_rank
from helpers.snapshots import snapshot
from helpers.steps import assert_same, enable, input_gradient_hooks, outcome, planned, recomputed, step
from torch.nn.parallel import DistributedDataParallel

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.attach.attach import EnableHook
from hf_ckpt.attach.described import lost_blocks
from hf_ckpt.attach.record import installation
from hf_ckpt.errors import SpecError
from hf_ckpt.models.blocks import base_model, find_blocks
from hf_ckpt.models.tiny import tiny_batch, tiny_model

pytestmark = pytest.mark.compat


def methods():
    """The enable methods of transformers' class now."""
    return {name: vars(compat.transformers.PreTrainedModel)[name] for name in compat.transformers.ENABLE_NAMES}


ORIGINALS = methods()


@pytest.mark.parametrize("name", compat.transformers.ENABLE_NAMES)
def test_install_for_the_process_answers_every_enable_until_uninstalled(everywhere, name):
    early, by_hand = tiny_model("llama"), tiny_model("llama")
    before = snapshot(early)
    everywhere(spec={"layers": "3"})
    everywhere(spec={"layers": "0"})  # the newer one counts
    late = tiny_model("llama")
    assert EnableHook.calls == 0
    getattr(early, name)()
    assert active(early) == [ALL[0]]
    for options in ({"layers": "1"}, None):
        getattr(late, name)(options)
        assert active(late) == [ALL[1]]
    hf_ckpt.install(by_hand, {"layers": "2"})
    getattr(by_hand, name)()
    assert active(by_hand) == [ALL[2]]
    assert EnableHook.calls == 4
    for _ in range(2):
        hf_ckpt.uninstall()
        assert methods() == ORIGINALS
        assert snapshot(early) == before
    assert active(by_hand) == [ALL[2]]
    enable(early, {"use_reentrant": False})  # transformers' own method again
    assert installation(early) is None
    assert set(flags(early)) >= set(ALL)


def test_a_second_install_keeps_models_on_and_uninstall_takes_what_install_put(everywhere):
    """A cell that runs twice; models that were enabled before the first run, a copy (EMA), and an own plan."""
    stock, own, off = (tiny_model("llama").train() for _ in range(3))
    enable(stock, {"use_reentrant": False})
    planned(own, {"layers": "3"})
    before = flags(stock), input_gradient_hooks(stock)
    everywhere(spec={"layers": "0"})
    late, too_short = tiny_model("llama").train(), tiny_model("llama", layers=1).train()
    for model in (late, too_short):
        enable(model)
    average = copy.deepcopy(late)
    for spec, blocks in (({"layers": "1"}, [ALL[1]]), (None, [ALL[1]]), ("full", ALL)):
        everywhere(spec=spec)
        for model in (stock, late, average):
            assert active(model) == blocks
            assert lost_blocks(model) == ()
        assert active(own) == [ALL[3]]
        assert installation(off) is None
        assert len(active(too_short)) == 1  # it has no block 1
    hf_ckpt.install(late, "full")
    hf_ckpt.uninstall()
    assert [installation(model) is None for model in (stock, average, too_short, off)] == [True] * 4
    assert active(own) == [ALL[3]]
    assert active(late) == ALL
    assert (flags(stock), input_gradient_hooks(stock)) == before


@pytest.mark.trap(45)
def test_models_are_found_without_the_objects_of_other_threads(everywhere, monkeypatch):
    """A tuple that a thread is filling cannot grow while a list of all objects refers to it."""
    monkeypatch.delattr(gc, "get_objects")
    model = tiny_model("llama")
    enable(model)
    everywhere(spec="full")
    step(model, tiny_batch("llama"))
    assert recomputed(model) == ALL
    hf_ckpt.uninstall()
    assert installation(model) is None


def test_a_refused_process_spec_hooks_nothing(everywhere):
    with pytest.raises(SpecError):
        everywhere(spec={"layrs": "0"})
    assert methods() == ORIGINALS
    model = tiny_model("llama")
    before = snapshot(model)
    for spec, options, said in (({"layers": "7"}, None, "names 7"), (None, {"layrs": "0"}, "layrs")):
        everywhere(spec=spec)  # the first one is valid, but the model is too short
        with pytest.raises(SpecError, match=said):
            enable(model, options)
        assert snapshot(model) == before


@pytest.mark.parametrize("family", ["bert", "t5"])
def test_enabling_submodels_keeps_the_plan_of_the_model(family, caplog):
    """Enabling all inner models, from the outside in as sentence-transformers does, keeps the plan."""
    options = {"rules": [{"layers": "0", "policy": "full"}]}
    model, plain = tiny_model(family), tiny_model(family)
    before = snapshot(model)
    hf_ckpt.install(model)
    parts = [part for part in model.modules() if isinstance(part, compat.transformers.PreTrainedModel)]
    assert len(parts) == {"bert": 2, "t5": 3}[family]
    with caplog.at_level("INFO"):
        for part in parts:
            enable(part, options)
    assert caplog.text.count("() does nothing while a plan of hf_ckpt is enabled") == len(parts) - 1
    assert lost_blocks(model) == ()
    batch = tiny_batch(family)
    assert_same(step(plain, batch), step(model, batch))
    assert recomputed(model) == [block.name for block in find_blocks(model).blocks if block.index == 0]
    enable(model, {"policy": "none"})
    enable(parts[-1], {"policy": "none"})  # transformers would pass it to torch
    assert_same(step(plain, batch), step(model, batch))
    model.zero_grad()
    hf_ckpt.uninstall(model)
    assert snapshot(model) == before


def test_a_submodel_gets_its_own_plan_once_that_of_the_model_is_off():
    model = planned(tiny_model("bert"), {"layers": "0"})
    again = copy.deepcopy(model)
    getattr(model, compat.transformers.DISABLE_NAMES[-1])()
    enable(model.bert, {"use_reentrant": False})
    assert {layer.gradient_checkpointing for layer in model.bert.encoder.layer} == {True}
    assert not [name for name in vars(model.bert) if name in compat.transformers.ENABLE_NAMES]
    enable(again.bert, {"policy": "full"})  # a copy of the whole has its own parts
    assert lost_blocks(again) == ()
    assert [*hf_ckpt.describe(again).forwards] == ["bert.encoder.layer.0"]


# --- scripts without an enable call -----------------------------------------------------------------------------------


def through_parts(model):
    """Calls the stack and the head separately, like scripts that compute their own loss."""

    def forward(**batch):
        hidden = model.model(input_ids=batch["input_ids"], use_cache=False).last_hidden_state
        return types.SimpleNamespace(loss=model.lm_head(hidden).square().mean())

    return forward


LOOPS = {
    "plain": lambda model: model,
    "prepared": lambda model: Accelerator(cpu=True).prepare(model),
    "copied": copy.deepcopy,
    "forward method": lambda model: model.forward,
    "parts": through_parts,
    "peft": lambda model: with_lora(model, "llama", lora_dropout=0.0),
    "compiled": lambda model: torch.compile(model, backend="aot_eager"),
    "compiled in place": lambda model: model.compile(backend="aot_eager") or model,
    "DDP": DistributedDataParallel,
}


@one_rank()
def trained(loop):
    """Results and recomputed blocks of a step in a user-written loop; None instead of blocks without a plan.

    Inside graphs of torch.compile nothing is counted; the blocks in the graphs are returned instead.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = tiny_model("llama", dropout=0.1).train()
    run = LOOPS[loop](model)
    if isinstance(run, torch.nn.Module):
        model = base_model(run)
    batch = tiny_batch("llama") | {"use_cache": False}
    if "compiled" not in loop:  # slow when compiled
        with torch.no_grad():
            run(**batch)
        assert installation(model) is None
    torch.manual_seed(7)
    loss = run(**batch).loss
    loss.backward()
    is_installed = installation(model) is not None
    blocks = [*hf_ckpt.describe(model).in_graphs, *recomputed(model)] if is_installed else None
    return outcome(model, loss), blocks


@pytest.mark.parametrize(
    "loop", [pytest.param(name, marks=[pytest.mark.slow] * ("compiled" in name)) for name in LOOPS]
)
def test_a_model_is_enabled_at_its_first_training_forward(everywhere, loop):
    expected, none = trained(loop)
    assert none is None
    kinds = (compat.transformers.PreTrainedModel, compat.compiler.compiled_module_class())
    classes = {kind: dict(vars(kind)) for kind in kinds}
    everywhere(spec={"layers": "1-2"}, enable_when_trained=True)
    got, blocks = trained(loop)
    assert_same(expected, got)
    assert blocks == ALL[1:3]
    assert EnableHook.calls == 1
    hf_ckpt.uninstall()
    assert {kind: dict(vars(kind)) for kind in kinds} == classes


def test_models_that_are_not_trained_or_enabled_otherwise_keep_what_they_have(everywhere):
    everywhere(spec={"layers": "1-2"}, enable_when_trained=True)
    batch = tiny_batch("llama")
    frozen, evaluated, by_hand, ended = (tiny_model("llama").train() for _ in range(4))
    frozen.requires_grad_(False)(**batch)
    evaluated.eval()(**batch)
    assert [installation(model) for model in (frozen, evaluated)] == [None, None]
    assert EnableHook.calls == 0

    planned(by_hand, {"layers": "3"})
    assert active(by_hand) == [ALL[3]]
    enable(ended, {"layers": "0"})
    assert active(ended) == [ALL[0]]
    getattr(ended, compat.transformers.DISABLE_NAMES[-1])()  # after its first training forward
    assert active(ended) == []
    step(evaluated.train(), batch)
    assert recomputed(evaluated) == [ALL[1], ALL[2]]
    prompts = torch.randn(2, 5, frozen.config.hidden_size, requires_grad=True)
    frozen(inputs_embeds=prompts).logits.sum().backward()  # trains prompts, with all weights frozen
    assert recomputed(frozen) == [ALL[1], ALL[2]]
    assert prompts.grad.any()


class ByItself(compat.transformers.PreTrainedModel):
    """A model without blocks, which checkpoints in its own forward."""

    config_class = type(tiny_model("llama").config)
    supports_gradient_checkpointing = True
    gradient_checkpointing = False

    def __init__(self, config):
        super().__init__(config)
        self.layer = torch.nn.Linear(3, 3)
        self.calls = 0

    def get_input_embeddings(self):
        return self.layer

    def run(self, x):
        self.calls += 1
        return self.layer(x).sin()

    def forward(self, x):
        checkpoints = self.gradient_checkpointing and self.training
        return self._gradient_checkpointing_func(self.run, x) if checkpoints else self.run(x)


@pytest.mark.parametrize("options", [None, {"policy": "selective", "use_reentrant": False}], ids=str)
def test_a_model_without_blocks_is_left_to_its_own_code(everywhere, caplog, options):
    everywhere(spec="full", enable_when_trained=True)
    other = ByItself(tiny_model("llama").config).train()
    gradients = []
    for enables in (False, True):
        if enables:
            enable(other, options)
        other.zero_grad()
        other(torch.ones(1, 3, requires_grad=True)).sum().backward()  # older transformers checkpoints reentrantly
        gradients.append(other.layer.weight.grad.clone())
    assert torch.equal(*gradients)
    assert other.calls == 1 + 2
    assert EnableHook.calls == 1
    model = tiny_model("llama")
    step(model, tiny_batch("llama"))
    assert recomputed(model) == ALL
    trained, enabled = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert "ByItself is trained without checkpointing: ByItself (model_type 'llama') has no blocks" in trained
    assert "hf_ckpt does not checkpoint ByItself, whose own code may do so" in enabled
