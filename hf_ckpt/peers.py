"""Every way to run a training step with less memory that a user could pick, as rows of data: what transformers, torch,
TRL and torch.compile offer, and what hf_ckpt does."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import accelerate
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from hf_ckpt import compat
from hf_ckpt.engines.sac import looked_up
from hf_ckpt.errors import HfCkptError, MissingDependencyError
from hf_ckpt.families import base_model, vocabulary_head
from hf_ckpt.install import describe, trial
from hf_ckpt.plan import Plan

OURS, COMPILED = "hf_ckpt", "torch.compile"
GROUPS = ("none", "transformers", "torch SAC", "TRL", COMPILED, OURS)
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
    count: Callable[[], int | None] = lambda: None
    """How often blocks, operations or heads have been run again, or in chunks, so far; None where nobody knows."""


@dataclasses.dataclass(frozen=True, eq=False)
class Peer:
    """One way."""

    name: str
    group: str
    """One of `GROUPS`."""
    options: Mapping[str, Any] | Plan | None = None
    """What it is given."""
    to_host: bool = False
    """Whether it moves tensors to host memory, so that it means nothing without an accelerator."""

    @contextlib.contextmanager
    def turned_on(self, model: nn.Module) -> Iterator[Running]:
        """Raises `HfCkptError` where this machine or this model has nothing for it, and what it raises itself."""
        if self.to_host and compat.accelerator_type() is None:
            raise HfCkptError("needs an accelerator: a CPU has no host memory beside its own")
        with _WAYS[self.group](model, self.options) as running:
            yield running


@contextlib.contextmanager
def _plain(model: nn.Module, options: None) -> Iterator[Running]:
    yield Running(model)


@contextlib.contextmanager
def _transformers(model: nn.Module, options: Mapping[str, Any]) -> Iterator[Running]:
    if "every_n_layers" in options and not compat.HAS_EVERY_N_LAYERS:
        raise HfCkptError("this version of transformers has no every_n_layers")
    if "offload" in options and not compat.HAS_OWN_OFFLOAD:
        raise HfCkptError("this version of transformers has no offload")
    with compat.own_checkpointing(base_model(model), **options) as count:
        yield Running(model, count=count)


@contextlib.contextmanager
def _sac(model: nn.Module, options: Mapping[str, Any]) -> Iterator[Running]:
    """torch's own, by the `context_fn` that transformers hands on to it."""
    with compat.own_checkpointing(base_model(model), context_fn=functools.partial(_contexts, **options)) as count:
        yield Running(model, count=count)


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

    made: compat.Contexts = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
    return made


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
            checkpointing.enter_context(compat.own_checkpointing(base_model(model)))
        yield Running(model, around=lambda: manager)


@contextlib.contextmanager
def _compiled(model: nn.Module, options: Mapping[str, Any]) -> Iterator[Running]:
    with compat.compiled_within(options["share"]):
        yield Running(torch.compile(model))


@contextlib.contextmanager
def _ours(model: nn.Module, options: Mapping[str, Any] | Plan) -> Iterator[Running]:
    head = options.head if isinstance(options, Plan) else options.get("head", "full")
    if head != "full" and vocabulary_head(base_model(model)) is None:
        raise HfCkptError(f"{type(base_model(model)).__name__} has no head over a vocabulary")
    with trial(model, options):
        yield Running(model, count=functools.partial(_ours_so_far, model))


def _ours_so_far(model: nn.Module) -> int:
    found = describe(model)
    return sum(found.recomputed.values()) + found.chunked_heads


_WAYS: Mapping[str, Callable[[nn.Module, Any], contextlib.AbstractContextManager[Running]]] = {
    "none": _plain,
    "transformers": _transformers,
    "torch SAC": _sac,
    "TRL": _trl,
    COMPILED: _compiled,
    OURS: _ours,
}

NONE = Peer("none", "none")
EVERY = (2, 3, 4)
SHARES = (0.3, 0.5, 0.7, 1.0)
SELECTIVE: Mapping[str, tuple[str, ...]] = {
    "selective": ("linear", "attention"),
    "selective, save attention": ("attention",),
    "selective, save linear": ("linear",),
}
PEERS = (
    NONE,
    Peer("full (HF)", "transformers", {}),
    *(Peer(f"every_n_layers: {every} (HF)", "transformers", {"every_n_layers": every}) for every in EVERY),
    Peer("offload (HF)", "transformers", {"offload": True}, to_host=True),
    Peer("SAC, all matmuls + attention", "torch SAC", {"save": (*MATMULS, *ATTENTION)}),
    Peer("SAC, every 2nd matmul + attention", "torch SAC", {"save": (*MATMULS, *ATTENTION), "every": 2}),
    Peer("SAC, attention", "torch SAC", {"save": ATTENTION}),
    Peer("activation offloading (TRL)", "TRL", {"full": False}, to_host=True),
    Peer("full, activation offloading (TRL)", "TRL", {"full": True}, to_host=True),
    *(Peer(f"compiled, budget {share:g}", COMPILED, {"share": share}) for share in SHARES),
)
"""What others offer; the first is what everything is compared with."""
OUR_PEERS = (
    *(Peer(name, OURS, {"policy": "selective", "save": list(save)}) for name, save in SELECTIVE.items()),
    Peer("full", OURS, {"policy": "full"}),
    Peer("offload", OURS, {"policy": "offload"}, to_host=True),
    Peer("head in chunks", OURS, {"policy": "none", "head": "auto"}),
    Peer("full, head in chunks", OURS, {"policy": "full", "head": "auto"}),
)
"""What hf_ckpt does by a fixed spec. Plans come on top."""
