"""The museum: small copies of public faults that silently made gradients wrong, and whether the watch finds them.

Each row of `EXHIBITS` is a fault that was reported in public, or that hf_ckpt had: the report, the setup, the faulty
blocks, and the cause that the watch must name. `NOT_CAUGHT` lists faults that the watch cannot find, and why.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.utils.checkpoint
from helpers.adapters import with_lora
from helpers.changed import two_adapters
from helpers.experts import experts
from helpers.museum import (
    LAYERS,
    each_address_once,
    exhibit_loss,
    exhibit_model,
    offloading_to,
    own_checkpoint,
    put_on,
    rounding,
    under,
    without_shift,
    work,
)
from helpers.steps import enable, gradients
from torch import nn
from torch.nn import functional

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.attach.record import installation
from hf_ckpt.engines.rebuild import masks
from hf_ckpt.models.blocks import base_model, find_blocks
from hf_ckpt.models.tiny import tiny_batch, tiny_model
from hf_ckpt.training.watch import Watch


@dataclasses.dataclass
class Exhibit:
    """A fault. Functions with a parameter `faulty` also set up the same case without the fault."""

    kind: str
    """Kind of the cause: a key of `KINDS`."""
    reference: str
    """Reports as repository and number, and numbers of traps in tests/TRAPS.md."""
    cause: str
    """Part of the message of the watch."""
    checkpoint: Callable[[Any, bool], None]
    """Enables checkpointing on a model."""
    model: Callable[[bool], nn.Module] = lambda faulty: exhibit_model()
    loss: Callable[[Any, int], torch.Tensor] = exhibit_loss
    """Runs the forward of the step with this number."""
    between: Callable[[Any], Any] = lambda model: contextlib.nullcontext()
    """A context in which the backward runs, for faults between a forward and its backward."""
    around: Callable[[bool | None], Any] = lambda faulty: contextlib.nullcontext()
    """A context in which the forward runs; called with None for the run without checkpointing."""
    patch: Callable[[pytest.MonkeyPatch], None] = lambda patch: None
    """Puts an old fault back into hf_ckpt."""
    blocks: tuple[str, ...] = ("layers.1",)
    """The faulty blocks."""
    wrong: str = "gradients"
    """What is wrong: `gradients`, or only `buffers`, or only `attributes`."""
    mended_in_torch: bool = False
    """Whether newer versions of torch may fix the fault. The watch must then find nothing."""


def ours(**spec):
    """Enable hf_ckpt's checkpointing, watched at every step."""

    def checkpoint(model, faulty):
        hf_ckpt.install(model, {**spec, "check_every": 1})
        enable(model)

    return checkpoint


def theirs(**faulty_options):
    """Enable transformers' own checkpointing, with these options if `faulty`, otherwise with correct ones."""

    def checkpoint(model, faulty):
        enable(model, {"use_reentrant": False, "preserve_rng_state": True, **(faulty_options if faulty else {})})

    return checkpoint


def reentrant(model, faulty):
    enable(model, {"use_reentrant": True})


def with_function(faulty_function, right_function):
    return lambda model, faulty: put_on(model, faulty_function if faulty else right_function)


def in_one_block(fault, right=work, at=1):
    """A model in which one block does something else if `faulty`."""
    return lambda faulty: exhibit_model(at, fault if faulty else right)


# --- faults inside blocks -----------------------------------------------------------------------------------------


def drops(block, hidden, shift):
    return functional.dropout(work(block, hidden, shift), 0.3, block.training)


def draws_from_torch(block, hidden, shift):
    return work(block, hidden * (1 + torch.rand(())), shift)


def draws_from_python(block, hidden, shift):
    return work(block, hidden * (1 + random.random()), shift)


def draws_from_numpy(block, hidden, shift):
    return work(block, hidden * torch.from_numpy(numpy.random.rand(16).astype("float32")), shift)


def draws_from_a_generator_of_its_own(faulty):
    generator = torch.Generator().manual_seed(0) if faulty else None
    return exhibit_model(
        fault=lambda block, hidden, shift: work(block, hidden * torch.rand(16, generator=generator), shift)
    )


def breaks_ties_by_rounding(faulty):
    """Scores of two experts differ only by rounding, and the rounding changes in every other run."""
    rounding = itertools.cycle((1e-7, -1e-7) if faulty else (1e-7,))

    def sends_to_experts(block, hidden, shift):
        chosen = hidden.new_tensor([0.0, next(rounding)]).expand(2, 8, 2).topk(1, -1).indices
        return torch.where(chosen == 0, functional.silu(block.one(hidden)), block.two(hidden).square())

    return exhibit_model(fault=sends_to_experts)


def changes_its_shift(block, hidden, shift):
    result = work(block, hidden, shift)
    shift.add_(0.5)
    return result


def adds_a_shift(block, hidden, shift):
    return work(block, hidden, shift + 0.5)


def leaks_at_random(block, hidden, shift):
    return functional.rrelu(work(block, hidden, shift), 0.1, 0.9, training=True)


def leaks(block, hidden, shift):
    return functional.leaky_relu(work(block, hidden, shift), 0.1)


def attends_to_itself(block, hidden, shift):
    query = functional.silu(block.one(block.norm(hidden) + shift)[..., :8])
    return block.two(torch.cat([query @ query.transpose(1, 2)] * 2, -1))


def multiplies_a_softmax_by_noise(block, hidden, shift):
    query = functional.silu(block.one(block.norm(hidden) + shift)).view(2, 8, 4, 4).transpose(1, 2)
    noise = torch.empty(2, 4, 8, 8).uniform_(0.5, 1.0).mul_(2.0)
    weights = functional.silu(torch._safe_softmax(query @ query.transpose(-1, -2), -1) * noise)
    return block.two((weights @ query).transpose(1, 2).reshape(2, 8, 16))


class Router(nn.Module):
    """Sends tokens to one of two experts, and balances the load with a bias that each forward updates."""

    def __init__(self, balances):
        super().__init__()
        self.gate, self.balances = nn.Linear(16, 2), balances
        self.register_buffer("bias", torch.zeros(2))

    def forward(self, hidden):
        chosen = (self.gate(hidden).softmax(-1) + self.bias).topk(1, -1).indices
        if self.balances:
            with torch.no_grad():
                load = functional.one_hot(chosen, 2).float().mean((0, 1, 2))
                self.bias.add_(torch.sign(load.mean() - load), alpha=0.3)
        return chosen


def balances_its_load(faulty):
    def sends_to_experts(block, hidden, shift):
        chosen = block.router(hidden)
        return torch.where(chosen == 0, functional.silu(block.one(hidden)), block.two(hidden) * 2)

    model = exhibit_model(fault=sends_to_experts)
    model.layers[1].router = Router(balances=faulty)
    return model


def normalises_batches(faulty):
    model = exhibit_model(fault=lambda block, hidden, shift: work(block, block.extra(hidden), shift))
    model.layers[1].extra = nn.BatchNorm1d(8)
    model.layers[1].extra.train(faulty)
    return model


def counts_its_calls(faulty):
    def counts(block, hidden, shift):
        if faulty or torch._C._current_graph_task_id() < 0:  # not in a backward
            block.calls["forward"] += 1
        return work(block, hidden, shift)

    model = exhibit_model(fault=counts)
    model.layers[1].calls = {"forward": 0}
    return model


# --- faults between forward and backward ---------------------------------------------------------------------------


@contextlib.contextmanager
def in_eval_mode(model):
    model.eval()
    yield
    model.train()


@contextlib.contextmanager
def in_memory_of_others(model):
    """Fill freed memory, so that new memory does not hold the old numbers by chance."""
    del [torch.full((2, 8, 16), 7.0) for _ in range(200)][:]
    yield


@contextlib.contextmanager
def with_the_other_adapter(model):
    model.set_adapter("critic")
    yield
    model.set_adapter("default")


@contextlib.contextmanager
def with_a_changed_weight(model):
    weight = model.layers[1].one.weight
    before = weight.detach().clone()
    with torch.no_grad():
        weight.mul_(1.5)
    yield
    with torch.no_grad():
        weight.copy_(before)


def by_functional_call(model, number):
    """An inner step of meta-learning: one block runs with fast weights."""
    faster = [*model.named_parameters()] if model.is_faster else []
    fast = {name: value * 1.5 for name, value in faster if name.startswith("layers.1.")}

    class Called(nn.Module):
        def forward(self, *args):
            return torch.func.functional_call(model, fast, args)

    return exhibit_loss(Called(), number)


def with_faster_weights(faulty):
    model = exhibit_model()
    model.is_faster = faulty
    return model


def with_offsets_by_hooks(model, number):
    """An adapter whose offsets come from hooks that stay on the model for one forward only."""
    handle = model.layers[1].one.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
    loss = exhibit_loss(model, number)
    model.handle = handle
    return loss


@contextlib.contextmanager
def without_hooks(model):
    model.handle.remove()
    yield


# --- contexts around forwards --------------------------------------------------------------------------------------


def offloads(faulty):
    """Offloads each block's input and what the loss saves; with the fault, the last tensor overwrites the first."""
    return contextlib.nullcontext() if faulty is None else offloading_to(LAYERS if faulty else LAYERS + 1)


def autocast(dtype):
    return lambda faulty=True: torch.autocast("cpu", dtype=dtype)


bf16, fp16 = autocast(torch.bfloat16), autocast(torch.float16)


def ends_early(faulty):
    """Recomputation stops once it has saved all it needs, or runs to its end."""
    return torch.utils.checkpoint.set_checkpoint_early_stop(faulty is not False)


# --- models of transformers ----------------------------------------------------------------------------------------


def adapters_alone(faulty):
    """LoRA in the blocks, and a trained head after them."""
    model = with_lora(tiny_model("llama", layers=LAYERS), "llama", lora_dropout=0.0)
    base_model(model).lm_head.weight.requires_grad_(True)
    return model


def adapters_without_gradients(model, faulty):
    enable(model, {"use_reentrant": faulty})
    if faulty:  # transformers itself makes the embeddings require gradients
        base_model(model).disable_input_require_grads()


def loss_of_llama(model, number):
    return model(**tiny_batch("llama", seed=number), use_cache=False).loss


def llama(*places):
    return tuple(f"model.layers.{place}" for place in places)


# --- old faults of hf_ckpt -----------------------------------------------------------------------------------------


def masks_by_place(patch):
    """The old rule: any tensor that follows a softmax and has its shape is a mask, whatever its values."""
    patch.setattr(masks, "holds", lambda mask, scale: True)


def host_random_state_left_alone(patch):
    patch.setattr(compat.random_state.RandomState, "restored", lambda state: contextlib.nullcontext())


# --- faults that the watch cannot find -----------------------------------------------------------------------------


def shares_across_blocks(faulty):
    """The first block passes a tensor to the last one in an object, not through their arguments."""
    shared = {}

    def leaves(block, hidden, shift):
        shared["key"] = block.one(hidden)
        return work(block, hidden, shift)

    def takes(block, hidden, shift):
        return work(block, hidden * shared["key"], shift)

    model = exhibit_model(0, leaves)
    model.layers[2].work = takes
    return model


def gap_of(exhibit):
    """Relative error of the first step's gradients, and the watch."""
    expected, _ = run(exhibit, faulty=True, checkpointed=False)
    got, watch = run(exhibit, faulty=True, checkpointed=True)
    assert torch.equal(expected[0][0], got[0][0])
    return distance(expected[0][1], got[0][1]), watch


def gap_of_a_penalty():
    """A penalty on the input's gradient needs second derivatives."""
    found = []
    for function in (None, own_checkpoint()):
        model, watch = exhibit_model(), Watch(1)
        if function is not None:
            put_on(model, function)
            watch.on_forward(model, None)
        shift = torch.zeros(16, requires_grad=True)
        hidden = torch.linspace(-1, 1, 256).view(2, 8, 16).requires_grad_()
        loss = model(hidden, shift.detach()).square().mean()
        (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
        (loss + gradient.square().sum()).backward()
        found.append(gradients(model))
    return distance(*found), watch


def gap_of_generation():
    """Error of the logits of generate() in train mode, in which checkpointing drops the cache."""
    found = []
    for on in (False, True):
        model, watch = tiny_model("gpt2"), Watch(1)
        if on:
            enable(model, {"use_reentrant": False})
            watch.on_forward(model, None)
        prompt = tiny_batch("gpt2")["input_ids"][:, :5]
        keys = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}
        done = model.generate(prompt, max_new_tokens=8, min_new_tokens=8, **keys)
        found.append({"logits": torch.stack(done.logits)})
    return distance(*found), watch


def gap_of_a_loud_one():
    """torch raises an error if a recomputation saves tensors of other shapes."""
    lengths = itertools.cycle((8, 4))

    def cuts(block, hidden, shift):
        return work(block, hidden[:, : next(lengths)], shift).mean(1, keepdim=True)

    model, watch = exhibit_model(0, cuts), Watch(1)
    enable(model, {"use_reentrant": False})
    watch.on_forward(model, None)
    with pytest.raises(torch.utils.checkpoint.CheckpointError):
        exhibit_loss(model).backward()
    return float("inf"), watch


NOT_CAUGHT = {
    "wrong tokens of generate() in train mode": (
        "trl#3683, trap 7, trap 43",
        "no backward follows",
        gap_of_generation,
    ),
    "second derivatives through a custom Function": (
        "trap 46",
        "the first backward is right, but leaves no graph for the second",
        gap_of_a_penalty,
    ),
    "an engine that leaves weights out": (
        "AiDotNet.Tensors#643",
        "what it recomputes is right",
        lambda: gap_of(Exhibit("", "", "", with_function(own_checkpoint(parameters=False), None))),
    ),
    "an engine that counts weights twice": (
        "unsloth-zoo#892",
        "what it recomputes is right",
        lambda: gap_of(Exhibit("", "", "", with_function(own_checkpoint(times=2), None))),
    ),
    "tensors that blocks share in an object (reentrant)": (
        "Megatron-LM#4593",
        "its values are right, only its graph is missing",
        lambda: gap_of(Exhibit("", "", "", reentrant, shares_across_blocks)),
    ),
    "other shapes in the recomputation": (
        "DeepSpeed#8148, torchtitan#1117, trap 6, trap 49",
        "torch raises a CheckpointError first",
        gap_of_a_loud_one,
    ),
}
"""Name -> (reference, why the watch finds nothing, function that shows the fault and returns the watch)."""

KINDS = {
    "random numbers": "random numbers drawn again",
    "experts": "other experts chosen",
    "no gradients": "adapters without gradients (reentrant)",
    "inputs": "inputs changed, lost or stored wrongly",
    "settings": "mode, adapter or hooks changed before backward",
    "parameters": "parameters changed before backward",
    "buffers": "buffers updated twice",
    "attributes": "Python counters moved twice",
    "other generators": "numbers drawn from Python, numpy or an own generator",
    "kernels": "kernels that do not repeat themselves",
    "autocast": "another autocast",
    "storage": "saved tensors stored wrongly, such as by offloading",
}
"""Kind of a cause -> its name on the page."""
RANDOM = "Random numbers are drawn anew: set preserve_rng_state to True"
HOST = "draws from Python's `random` or numpy"
EXHIBITS = {
    "dropout drawn again": Exhibit(
        "random numbers",
        "OLMo-core#828, torchtitan#1323, trap 5",
        RANDOM,
        theirs(preserve_rng_state=False),
        in_one_block(drops, drops),
    ),
    "dropout drawn again, reentrant": Exhibit(
        "random numbers",
        "lucidrains/enformer-pytorch#33, PIDM#66, trap 5",
        RANDOM,
        lambda model, faulty: enable(model, {"use_reentrant": True, "preserve_rng_state": not faulty}),
        in_one_block(drops, drops),
    ),
    "adapters below frozen embeddings": Exhibit(
        "no gradients",
        "Megatron-Bridge#5586, peft#137, trap 1",
        "set use_reentrant to False",
        adapters_without_gradients,
        adapters_alone,
        loss_of_llama,
        blocks=llama(0, 1, 2),
    ),
    "noise in a router": Exhibit(
        "experts",
        "transformers#47467, torchtitan#1117, trap 33",
        "tokens may go to other experts",
        theirs(preserve_rng_state=False),
        lambda faulty: experts("mixtral", implementation="batched_mm"),
        loss_of_llama,
        blocks=llama(0, 1),
    ),
    "a router that balances its load": Exhibit(
        "experts",
        "Automodel#3247, torchtitan#1114",
        "reads `router.bias`, a buffer that it updates itself in every run. So tokens may go to other experts",
        theirs(),
        balances_its_load,
    ),
    "an argument changed in place": Exhibit(
        "inputs",
        "trap 20",
        "recomputed from other inputs than it had: `shift`",
        theirs(),
        in_one_block(changes_its_shift, adds_a_shift, at=0),
        blocks=("layers.0",),
    ),
    "eval() before backward": Exhibit(
        "settings",
        "trap 36",
        "train or eval mode of the block, train or eval mode of `norm`",
        reentrant,
        in_one_block(drops, drops),
        between=in_eval_mode,
    ),
    "another adapter before backward": Exhibit(
        "settings",
        "trap 36",
        "the active adapter of `self_attn.q_proj`",
        theirs(),
        lambda faulty: two_adapters(),
        loss_of_llama,
        with_the_other_adapter,
        blocks=llama(0, 1, 2, 3),
    ),
    "faster weights by functional_call": Exhibit(
        "parameters",
        "trap 36",
        "as `functional_call` does",
        theirs(),
        with_faster_weights,
        by_functional_call,
    ),
    "a weight changed before backward": Exhibit(
        "parameters", "trap 36", "Change parameters after the backward only", theirs(), between=with_a_changed_weight
    ),
    "running statistics moved twice": Exhibit(
        "buffers",
        "pytorch#96136, fairscale#1035, trap 40",
        "The block updates it in every run",
        theirs(),
        normalises_batches,
        wrong="buffers",
    ),
    "a counter moved twice": Exhibit(
        "attributes", "tests of hf_ckpt", "`full` runs it twice", theirs(), counts_its_calls, wrong="attributes"
    ),
    "Python's random numbers": Exhibit(
        "other generators", "trap 48", HOST, theirs(), in_one_block(draws_from_python, draws_from_torch)
    ),
    "numpy's random numbers": Exhibit(
        "other generators", "trap 48", HOST, theirs(), in_one_block(draws_from_numpy, draws_from_torch)
    ),
    "a generator of one's own": Exhibit(
        "other generators", "trap 48", "random generator of its own", theirs(), draws_from_a_generator_of_its_own
    ),
    "a kernel that does not repeat itself": Exhibit(
        "kernels",
        "Liger-Kernel#1255, torchtitan#3146",
        "a nondeterministic kernel",
        theirs(),
        breaks_ties_by_rounding,
    ),
    "noise that is not drawn yet": Exhibit(
        "kernels",
        "pytorch#193671",
        "Unknown: the inputs, settings, random state and autocast of the recomputation were those of the forward",
        theirs(),
        in_one_block(leaks_at_random, leaks),
        between=in_memory_of_others,
        around=ends_early,
        mended_in_torch=True,
    ),
    "hooks that lie on the model for a forward": Exhibit(
        "settings", "peft#2826", "hooks of `one` changed", theirs(), loss=with_offsets_by_hooks, between=without_hooks
    ),
    "autocast that is not entered again": Exhibit(
        "autocast",
        "pytorch#71124, TransformerEngine#787",
        "under another autocast",
        with_function(own_checkpoint(), own_checkpoint(under(bf16))),
        around=bf16,
        blocks=("layers.0", "layers.1", "layers.2"),
    ),
    "autocast that is entered with the default type": Exhibit(
        "autocast",
        "fairscale#1199",
        "under another autocast",
        with_function(own_checkpoint(under(bf16)), own_checkpoint(under(fp16))),
        around=fp16,
        blocks=("layers.0", "layers.1", "layers.2"),
    ),
    "an argument left out of the recomputation": Exhibit(
        "inputs",
        "Megatron-LLM#86, LlamaFactory#7699, trap 3",
        "recomputed from other inputs than it had: `shift`",
        with_function(own_checkpoint(without_shift), own_checkpoint()),
        blocks=("layers.0", "layers.1", "layers.2"),
    ),
    "an offloading buffer used again too early": Exhibit(
        "inputs",
        "torchtune#1867, trap 17",
        "recomputed from other inputs than it had: `hidden_states`",
        theirs(),
        around=offloads,
        blocks=("layers.0",),
    ),
    "offloading that takes a view for its base": Exhibit(
        "storage",
        "ms-swift#10157",
        "The block did not run again",
        with_function(each_address_once(False), each_address_once(True)),
        in_one_block(attends_to_itself, attends_to_itself),
    ),
    "offloading that rounds": Exhibit(
        "storage",
        "trl#7195, axolotl#3833, trap 17",
        "or a smaller type",
        with_function(rounding(torch.bfloat16), rounding(torch.float32)),
        blocks=("layers.0", "layers.1", "layers.2"),
    ),
    "hf_ckpt: noise taken for a mask": Exhibit(
        "storage",
        "trap 50",
        "Please report it",
        ours(policy="selective"),
        in_one_block(multiplies_a_softmax_by_noise, multiplies_a_softmax_by_noise, at=0),
        patch=masks_by_place,
        blocks=("layers.0",),
    ),
    "hf_ckpt: host random state": Exhibit(
        "other generators",
        "trap 48",
        HOST,
        ours(policy="full"),
        in_one_block(draws_from_python, draws_from_python),
        patch=host_random_state_left_alone,
    ),
}


def run(exhibit, faulty, checkpointed):
    """Run as many steps as there are blocks; returns loss, gradients and buffers after each, and the watch."""
    torch.manual_seed(0)
    model = exhibit.model(faulty)
    if checkpointed:
        exhibit.checkpoint(model, faulty)
    base = base_model(model)
    count = len(find_blocks(base).modules)
    watch = Watch(1)
    found = []
    for number in range(count):
        model.zero_grad(set_to_none=True)
        for seed in (torch.manual_seed, random.seed, numpy.random.seed):
            seed(number)
        if checkpointed and installation(base) is None:
            watch.on_forward(base, None)
        with exhibit.around(faulty if checkpointed else None):
            loss = exhibit.loss(model, number)
        with exhibit.between(model) if faulty and checkpointed else contextlib.nullcontext():
            loss.backward()
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        found.append((loss.detach(), gradients(model), buffers))
    return found, watch if installation(base) is None else installation(base).watch


def distance(expected, got):
    """Relative norm of the difference over all tensors; a missing tensor counts as 0."""
    assert expected.keys() == got.keys()
    pairs = [
        (value, torch.zeros_like(value) if got[name] is None else got[name])
        for name, value in expected.items()
        if value is not None
    ]
    gap = sum(float((one.double() - other.double()).norm()) ** 2 for one, other in pairs)
    norm = sum(float(one.double().norm()) ** 2 for one, _ in pairs)
    assert norm > 0
    return float("inf") if gap != gap else (gap / norm) ** 0.5


PAGE = (Path(__file__).parents[2] / "docs" / "watch.md").read_text(encoding="utf-8")


def shown(mark):
    """Cells of the page's table between two marks."""
    table = PAGE.partition(f"<!-- {mark} -->\n")[2].partition(f"\n<!-- end of {mark} -->")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def reported(kind):
    """The page's row for this kind: its name, the number of faults, and the public reports."""
    references = [each.reference.split(", ") for each in EXHIBITS.values() if each.kind == kind]
    public = [part for parts in references for part in parts if not part.startswith("trap")]
    return [KINDS[kind], str(len(references)), ", ".join(dict.fromkeys(public)) or "tests of hf_ckpt"]


def test_the_page_shows_the_museum():
    assert shown("museum") == [reported(kind) for kind in KINDS]
    assert shown("not caught") == [[name, reason] for name, (_, reason, _) in NOT_CAUGHT.items()]
    assert {each.kind for each in EXHIBITS.values()} == set(KINDS)
    assert len(EXHIBITS) >= 15


each_exhibit = pytest.mark.parametrize("exhibit", EXHIBITS.values(), ids=EXHIBITS)


@each_exhibit
def test_the_watch_finds_the_fault(exhibit, monkeypatch):
    expected, _ = run(exhibit, faulty=True, checkpointed=False)
    exhibit.patch(monkeypatch)
    got, watch = run(exhibit, faulty=True, checkpointed=True)
    (loss, plain, plain_buffers), (their_loss, theirs, buffers) = expected[0], got[0]
    assert torch.equal(loss, their_loss)
    gap = distance(plain, theirs)
    assert watch.report().checks == len(got)
    if exhibit.mended_in_torch and gap == 0:
        assert not watch.differences
        return
    if exhibit.wrong == "attributes":
        assert gap == 0
        assert "`calls` was updated once more" in watch.differences[0].what
    else:
        assert gap > 1e-4 if exhibit.wrong == "gradients" else gap == 0 < distance(plain_buffers, buffers)
    assert [found.block for found in watch.differences] == [*exhibit.blocks]
    for found in watch.differences:
        assert exhibit.cause in found.cause


@each_exhibit
def test_without_the_fault_nothing_is_found(exhibit):
    expected, _ = run(exhibit, faulty=False, checkpointed=False)
    got, watch = run(exhibit, faulty=False, checkpointed=True)
    assert watch.report().checks == len(got)
    for one, other in zip(expected, got, strict=True):
        assert torch.equal(one[0], other[0])
        assert distance(one[1], other[1]) == 0
    assert watch.report().compared > 0
    assert not watch.differences


class _Attention(torch.autograd.Function):
    """An attention kernel that saves random state, which it writes only if it drops something."""

    memory = itertools.count()

    @staticmethod
    def forward(ctx, hidden, dropout):
        ctx.dropout_p = dropout
        ctx.save_for_backward(torch.tensor(next(_Attention.memory)))
        return hidden.clone()

    @staticmethod
    def backward(ctx, gradient):
        (_,) = ctx.saved_tensors
        return gradient, None


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_random_state_of_an_attention_without_dropout_may_be_unwritten(dropout):
    """As the kernels on CUDA do, and the package flash-attn."""

    def attends(block, hidden, shift):
        return work(block, _Attention.apply(hidden, dropout), shift)

    model = exhibit_model(fault=attends)
    enable(model, {"use_reentrant": False})
    watch = Watch(1)
    for number in range(len(model.layers)):
        watch.on_forward(model, None)
        exhibit_loss(model, number).backward()
    assert watch.report().checks == len(model.layers)
    assert [found.block for found in watch.differences] == (["layers.1"] if dropout else [])


@pytest.mark.parametrize("name", NOT_CAUGHT)
def test_what_the_watch_cannot_find(name):
    _, reason, show = NOT_CAUGHT[name]
    gap, watch = show()
    assert gap > 1e-4
    assert not watch.differences, f"It is found: {reason!r} is not so."
