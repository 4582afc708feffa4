"""Every way to train in less memory that a user could pick, as rows of data: what transformers, torch, torch_remat, TRL
and torch.compile offer, and what hf_ckpt does."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import accelerate
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.attach.attach import describe
from hf_ckpt.engines.sac import looked_up
from hf_ckpt.errors import HfCkptError, MissingDependencyError
from hf_ckpt.models.blocks import base_model, find_blocks, vocabulary_head
from hf_ckpt.spec.plan import Plan
from hf_ckpt.training.install import trial

TRANSFORMERS, TORCH_SAC, TRL, COMPILED, OURS = "transformers", "torch SAC", "TRL", "torch.compile", "hf_ckpt"
OURS_COMPILED, WATCHED, REMAT = "hf_ckpt compiled", "hf_ckpt watched", "torch_remat"
MATMULS = ("aten.mm.default", "aten.addmm.default")
"""torchtitan counts and saves `mm`; `addmm` is the same with a bias, as Transformers' GPT-2 and BERT have it."""
ATTENTION = (
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    "aten._scaled_dot_product_attention_math.default",
    "aten._scaled_dot_product_fused_attention_overrideable.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
)
"""torchtitan's, and the CPU's."""


@dataclasses.dataclass(frozen=True)
class Running:
    """A model with one of the ways turned on."""

    forward: Callable[..., Any]
    """In the place of the model's own call."""
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    """Entered for forward and backward."""
    counts: Callable[[], dict[str, int] | None] = lambda: None
    """How often each block was recomputed so far, as a whole or in part, and how often a head ran in chunks; None if
    that is not known."""


@dataclasses.dataclass(frozen=True, eq=False)
class Way:
    """One way to run a step."""

    name: str
    group: str
    """Who offers it: a key of `TURN_ON`."""
    options: Mapping[str, Any] | Plan | None = None
    to_host: bool = False
    """Whether it moves tensors to host memory, so that it means nothing without an accelerator."""

    @contextlib.contextmanager
    def turned_on(self, model: nn.Module) -> Iterator[Running]:
        """The model with this way on. Raises `HfCkptError` if this machine or this model cannot have it."""
        if self.to_host and compat.accelerator_type() is None:
            raise HfCkptError("needs an accelerator: a CPU has no host memory beside its own")
        with TURN_ON[self.group](model, self.options) as running:
            yield running


@contextlib.contextmanager
def _plain(model: nn.Module, options: None) -> Iterator[Running]:
    yield Running(model)


@contextlib.contextmanager
def own_checkpointing(
    model: compat.PreTrainedModel,
    *,
    context_fn: Callable[[], compat.Contexts] | None = None,
    **options: Any,
) -> Iterator[Callable[[], int]]:
    """Checkpoint a model by transformers alone, inside this context; its hooks on the embedding are removed, too.

    Args:
        context_fn: as `torch.utils.checkpoint.checkpoint` takes it.
        options: further arguments of the enable call.

    Yields a function that returns how often a block has been recomputed so far.
    """
    count = 0

    @contextlib.contextmanager
    def recomputing(context: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
        nonlocal count
        count += 1
        with context:
            yield

    def contexts() -> compat.Contexts:
        first, again = (contextlib.nullcontext(), contextlib.nullcontext()) if context_fn is None else context_fn()
        return first, recomputing(again)

    arguments = {"use_reentrant": False, "context_fn": contexts}
    getattr(model, compat.ENABLE_NAMES[-1])(arguments, **options)
    try:
        yield lambda: count
    finally:
        getattr(model, compat.DISABLE_NAMES[-1])()
        model.disable_input_require_grads()


@contextlib.contextmanager
def _transformers(model: nn.Module, options: Mapping[str, Any]) -> Iterator[Running]:
    if "every_n_layers" in options and not compat.HAS_EVERY_N_LAYERS:
        raise HfCkptError("this version of transformers has no every_n_layers")
    if "offload" in options and not compat.HAS_OWN_OFFLOAD:
        raise HfCkptError("this version of transformers has no offload")
    with own_checkpointing(base_model(model), **options) as count:
        yield Running(model, counts=lambda: {"all blocks": count()})


@contextlib.contextmanager
def _sac(model: nn.Module, options: Mapping[str, Any]) -> Iterator[Running]:
    """torch's own, by the `context_fn` that transformers hands on to it."""
    with own_checkpointing(base_model(model), context_fn=functools.partial(_contexts, **options)) as count:
        yield Running(model, counts=lambda: {"all blocks": count()})


def _contexts(save: tuple[str, ...], every: int = 1) -> compat.Contexts:
    """The results of the operations `save` stay, but those of every `every`-th product of matrices in a block; 1 keeps
    them all. Products are counted in forward and recomputation apart, as torchtitan does with its op list."""
    stay, products = looked_up(save), looked_up(MATMULS)
    counts = {False: itertools.count(1), True: itertools.count(1)}

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operation not in stay:
            return CheckpointPolicy.PREFER_RECOMPUTE
        if operation in products and every > 1 and next(counts[context.is_recompute]) % every == 0:
            return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE

    made: compat.Contexts = create_selective_checkpoint_contexts(policy)
    return made


@contextlib.contextmanager
def _remat(model: nn.Module, options: Mapping[str, Any]) -> Iterator[Running]:
    """Regions are marked in the code of a model: here around whole modules, whose results are kept as well."""
    try:
        import torch_remat
    except ImportError as error:
        raise MissingDependencyError("torch_remat", "its regions", "pip install torch_remat") from error
    count = 0

    def checkpointed(name: str, fn: Callable[..., Any], *args: Any) -> Any:
        runs = itertools.count()
        is_tensor: list[bool] = []  # of what the block returns; empty if that is one tensor

        def only_tensors(*args: Any) -> tuple[torch.Tensor, ...]:
            """torch_remat takes nothing else from a block."""
            nonlocal count
            count += next(runs) > 0
            output = fn(*args)
            if not isinstance(output, tuple):
                return (output,)
            is_tensor[:] = [isinstance(value, torch.Tensor) for value in output]
            return tuple(value for value in output if isinstance(value, torch.Tensor))

        tensors = torch_remat.checkpoint(region_name=name)(only_tensors)(*args)
        if not is_tensor:
            return tensors[0]
        following = iter(tensors)
        return tuple(next(following) if there else None for there in is_tensor)

    def kept(name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = torch_remat.region(forward, name, recompute=False)(*args, **kwargs)
        for value in output if isinstance(output, tuple) else (output,):
            if isinstance(value, torch.Tensor):
                torch_remat.recompute_needs_tensor(value)
        return output

    found = find_blocks(model)
    modules = [found.modules[block.name] for block in found.blocks]
    marked = [part for block in modules for part in block.modules() if options["keep"](part)]
    with own_checkpointing(base_model(model)):
        for number, module in enumerate(modules):
            module._gradient_checkpointing_func = functools.partial(checkpointed, f"block {number}")
        for number, part in enumerate(marked):
            vars(part)["forward"] = functools.partial(kept, f"part {number}", part.forward)
        try:
            yield Running(model, counts=lambda: {"all blocks": count})
        finally:
            for part in marked:
                del vars(part)["forward"]


def _is_attention(module: nn.Module) -> bool:
    """Whether a module is an attention that holds no other."""
    named = [type(part).__name__.endswith("Attention") for part in module.modules()]
    return named[0] and sum(named) == 1


def _is_linear(module: nn.Module) -> bool:
    """Whether a module is a product with a weight that holds no other, as the layer of an adapter does."""
    return type(module).__name__ in ("Linear", "Conv1D") and not list(module.children())


def _is_nothing(module: nn.Module) -> bool:
    return False


@contextlib.contextmanager
def _trl(model: nn.Module, options: Mapping[str, Any]) -> Iterator[Running]:
    try:
        from trl.models.activation_offloading import get_act_offloading_ctx_manager
    except ImportError as error:
        raise MissingDependencyError("trl", "TRL's activation offloading", "pip install trl") from error
    accelerate.PartialState()  # a Trainer has made it; TRL's logger needs it
    manager = get_act_offloading_ctx_manager(model)  # one for all steps, as TRL's trainers have it
    with contextlib.ExitStack() as checkpointing:
        if options["full"]:
            checkpointing.enter_context(own_checkpointing(base_model(model)))
        yield Running(model, around=lambda: manager)


@contextlib.contextmanager
def _compiled(model: nn.Module, options: Mapping[str, Any]) -> Iterator[Running]:
    """At most this share of a graph's activations is kept for backward, and the others are recomputed."""
    # A private name: torch.compile has no public option for this. https://pytorch.org/blog/activation-checkpointing-techniques/
    from torch._functorch import config

    with config.patch(activation_memory_budget=options["share"]):
        yield Running(torch.compile(model))


@contextlib.contextmanager
def _ours(model: nn.Module, options: Mapping[str, Any] | Plan, counted: bool = True) -> Iterator[Running]:
    """Without `counted`, for compiled blocks: what is recomputed inside graphs cannot be counted."""
    head = options.head if isinstance(options, Plan) else options.get("head", "full")
    if head != "full" and vocabulary_head(base_model(model)) is None:
        raise HfCkptError(f"{type(base_model(model)).__name__} has no head over a vocabulary")
    with trial(model, options):
        yield Running(model, counts=lambda: _ours_so_far(model, head != "full") if counted else None)


@contextlib.contextmanager
def _watched(model: nn.Module, options: Mapping[str, Any]) -> Iterator[Running]:
    """Every forward checks one block: a trial checks nothing, so the spec is installed."""
    hf_ckpt.install(model, {**options, "check_every": 1})
    base_model(model).gradient_checkpointing_enable()
    try:
        yield Running(model, counts=lambda: _ours_so_far(model, False))
    finally:
        hf_ckpt.uninstall(model)


def _ours_so_far(model: nn.Module, in_chunks: bool) -> dict[str, int]:
    """Blocks below the first trainable parameter are left out: they have nothing to recompute."""
    found = describe(model)
    blocks = {name: count for name, count in found.recomputed.items() if name not in found.frozen}
    return {**blocks, "head": found.chunked_heads} if in_chunks else blocks


TURN_ON: Mapping[str, Callable[[nn.Module, Any], contextlib.AbstractContextManager[Running]]] = {
    "none": _plain,
    TRANSFORMERS: _transformers,
    TORCH_SAC: _sac,
    REMAT: _remat,
    TRL: _trl,
    COMPILED: _compiled,
    OURS: _ours,
    WATCHED: _watched,
    OURS_COMPILED: functools.partial(_ours, counted=False),
}

NONE = Way("none", "none")
EVERY = (2, 3, 4)
SHARES = (0.3, 0.5, 0.7, 1.0)
SELECTIVE: Mapping[str, tuple[str, ...]] = {
    "selective": ("linear", "attention"),
    "selective, save attention": ("attention",),
    "selective, save linear": ("linear",),
}
PEERS = (
    NONE,
    Way("full (HF)", TRANSFORMERS, {}),
    *(Way(f"every_n_layers: {every} (HF)", TRANSFORMERS, {"every_n_layers": every}) for every in EVERY),
    Way("offload (HF)", TRANSFORMERS, {"offload": True}, to_host=True),
    Way("SAC, all matmuls + attention", TORCH_SAC, {"save": (*MATMULS, *ATTENTION)}),
    Way("SAC, every 2nd matmul + attention", TORCH_SAC, {"save": (*MATMULS, *ATTENTION), "every": 2}),
    Way("SAC, attention", TORCH_SAC, {"save": ATTENTION}),
    Way("torch_remat", REMAT, {"keep": _is_nothing}),
    Way("torch_remat, keep attention", REMAT, {"keep": _is_attention}),
    Way("torch_remat, keep linear", REMAT, {"keep": _is_linear}),
    Way("activation offloading (TRL)", TRL, {"full": False}, to_host=True),
    Way("full, activation offloading (TRL)", TRL, {"full": True}, to_host=True),
    *(Way(f"compiled, budget {share:g}", COMPILED, {"share": share}) for share in SHARES),
)
"""What others offer; the first is what everything is compared with."""
OUR_WAYS = (
    *(Way(name, OURS, {"policy": "selective", "save": list(save)}) for name, save in SELECTIVE.items()),
    Way("full", OURS, {"policy": "full"}),
    Way("offload", OURS, {"policy": "offload"}, to_host=True),
    Way("head in chunks", OURS, {"policy": "none", "head": "auto"}),
    Way("full, head in chunks", OURS, {"policy": "full", "head": "auto"}),
    *(
        Way(f"compiled blocks, share {share:g}", OURS_COMPILED, {"compile": "blocks", "share": share})
        for share in (1, 0)
    ),
)
"""What hf_ckpt does by a fixed spec. Plans come on top."""
PLANNED_WAYS = (
    Way("planned", OURS, {"policy": "budget"}),
    Way("planned, head in chunks", OURS, {"policy": "budget", "head": "auto"}),
    Way("planned, compiled", OURS_COMPILED, {"policy": "budget", "compile": "blocks"}),
)
"""Ways that get a plan for the budget of each number that `largest.py` tries."""


def chosen(only: Sequence[str], ways: Sequence[Way]) -> list[Way]:
    """`none`, and the ways that `only` names by their name or group; all of them if it names nothing.

    Raises `HfCkptError` for a name that there is not.
    """
    known = dict.fromkeys([*(way.group for way in ways), *(way.name for way in ways)])
    for name in only:
        if name not in known:
            raise HfCkptError(f"a way must be one of {', '.join(known)}, but is {name!r} instead.")
    return [way for way in ways if way is NONE or not only or way.name in only or way.group in only]
