"""Every way to train in less memory that a user could pick, as rows of data: what transformers, torch, torch_remat and
torch.compile offer, and what hf_ckpt does.

A context manager turns a way on. It takes the model, and yields the function to call in the model's place, and one that
returns how often blocks were recomputed so far (None if that is not known).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers.modeling_layers import GradientCheckpointingLayer

import hf_ckpt
from hf_ckpt.errors import HfCkptError

TRANSFORMERS, SAC, REMAT, COMPILED = "transformers", "torch SAC", "torch_remat", "torch.compile"
OURS, OURS_COMPILED, CHECKED = "hf_ckpt", "hf_ckpt compiled", "hf_ckpt checked"
MATMULS = ("mm", "addmm")
"""torchtitan counts and saves `mm`; `addmm` is the same with a bias, as transformers' GPT-2 and BERT have it."""
KERNELS = ("efficient_attention", "flash_attention", "cudnn_attention", "attention_math", "flash_attention_for_cpu")
ATTENTION = tuple(f"_scaled_dot_product_{kernel}" for kernel in (*KERNELS, "fused_attention_overrideable"))
"""torchtitan's, and the CPU's."""
Running = tuple[Callable[..., Any], Callable[[], int | None]]


def base_of(model: nn.Module) -> Any:
    """The transformers model without PEFT's wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


@contextlib.contextmanager
def plain(model: nn.Module) -> Iterator[Running]:
    """The model as it is."""
    yield model, lambda: None


@contextlib.contextmanager
def checkpointing(model: nn.Module, context_fn: Callable[[], Any] | None = None, **options: Any) -> Iterator[Running]:
    """Checkpoint a model by transformers alone, with torch's `context_fn` and `options` of the enable call."""
    base, count = base_of(model), 0

    @contextlib.contextmanager
    def recomputing(context: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
        nonlocal count
        count += 1
        with context:
            yield

    def contexts() -> tuple[Any, Any]:
        first, again = (contextlib.nullcontext(), contextlib.nullcontext()) if context_fn is None else context_fn()
        return first, recomputing(again)

    name = "activation" if hasattr(base, "activation_checkpointing_enable") else "gradient"
    getattr(base, f"{name}_checkpointing_enable")({"use_reentrant": False, "context_fn": contexts}, **options)
    try:
        yield model, lambda: count
    finally:
        getattr(base, f"{name}_checkpointing_disable")()
        base.disable_input_require_grads()


def sac_contexts(save: Sequence[str], every: int = 1) -> tuple[Any, Any]:
    """Contexts of torch's SAC, which save the results of some operations.

    Every `every`-th product of matrices in a block is recomputed; 1 saves them all. Products are counted in forward and
    recomputation apart, as torchtitan does with its list of operations.
    """
    saved = {name: getattr(torch.ops.aten, name).default for name in save if hasattr(torch.ops.aten, name)}
    products = [saved.get(name) for name in MATMULS]
    counts = {False: itertools.count(1), True: itertools.count(1)}

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operation in products and every > 1 and next(counts[context.is_recompute]) % every == 0:
            return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if operation in saved.values() else CheckpointPolicy.PREFER_RECOMPUTE

    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(policy)
    return contexts


@contextlib.contextmanager
def remat(model: nn.Module, keep: tuple[str, ...] = ()) -> Iterator[Running]:
    """torch_remat marks regions in the code of a model: here around the innermost modules whose classes' names end with
    `keep`, whose results are saved as well."""
    import torch_remat

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

        tensors = iter(torch_remat.checkpoint(region_name=name)(only_tensors)(*args))
        return tuple(next(tensors) if there else None for there in is_tensor) if is_tensor else next(tensors)

    def saved(name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = torch_remat.region(forward, name, recompute=False)(*args, **kwargs)
        for value in output if isinstance(output, tuple) else (output,):
            if isinstance(value, torch.Tensor):
                torch_remat.recompute_needs_tensor(value)
        return output

    blocks = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    parts = [part for block in blocks for part in block.modules() if type(part).__name__.endswith(keep)]
    marked = [part for part in parts if not any(inner in parts for inner in list(part.modules())[1:])]
    with checkpointing(model):
        for number, block in enumerate(blocks):
            block._gradient_checkpointing_func = functools.partial(checkpointed, f"block {number}")
        for number, part in enumerate(marked):
            vars(part)["forward"] = functools.partial(saved, f"part {number}", part.forward)
        try:
            yield model, lambda: count
        finally:
            for part in marked:
                del vars(part)["forward"]


@contextlib.contextmanager
def compiled(model: nn.Module, share: float) -> Iterator[Running]:
    """Compile the whole model. At most this share of activations is saved for backward; the rest is recomputed."""
    # A private name: torch.compile has no public option for this. https://pytorch.org/blog/activation-checkpointing-techniques/
    from torch._functorch import config

    with config.patch(activation_memory_budget=share):
        yield torch.compile(model), lambda: None


@contextlib.contextmanager
def ours(model: nn.Module, spec: Mapping[str, Any]) -> Iterator[Running]:
    """Install a spec. Recomputation inside compiled graphs cannot be counted."""
    base, chunks = base_of(model), "head" in spec
    if chunks and base.get_output_embeddings() is None:
        raise HfCkptError(f"{type(base).__name__} has no head over a vocabulary")
    hf_ckpt.install(model, {"check_every": 0, **spec})
    base.gradient_checkpointing_enable()

    def recomputed() -> int | None:
        """Blocks below the first trainable parameter are left out: they have nothing to recompute."""
        described = hf_ckpt.describe(model)
        if any(action.kind == "compiled" for _, action in described.plan.actions):
            return None
        blocks = sum(count for name, count in described.recomputed.items() if name not in described.frozen)
        return blocks + (described.chunked_heads if chunks else 0)

    try:
        yield model, recomputed
    finally:
        hf_ckpt.uninstall(model)


class Way(NamedTuple):
    """One way to run a step: its name, who offers it, and what turns it on."""

    name: str
    group: str
    turn_on: Callable[[nn.Module], contextlib.AbstractContextManager[Running]]


def our_way(name: str, group: str = OURS, **spec: Any) -> Way:
    """A way of hf_ckpt."""
    return Way(name, group, functools.partial(ours, spec=spec))


def sac_way(name: str, *save: str, every: int = 1) -> Way:
    """A way of torch's SAC, by the `context_fn` that transformers passes to it."""
    contexts = functools.partial(sac_contexts, save, every)
    return Way(f"SAC, {name}", SAC, functools.partial(checkpointing, context_fn=contexts))


NONE = Way("none", "none", plain)
WAYS = (
    NONE,
    Way("full (HF)", TRANSFORMERS, checkpointing),
    *(
        Way(f"every_n_layers: {every} (HF)", TRANSFORMERS, functools.partial(checkpointing, every_n_layers=every))
        for every in (2, 3, 4)
    ),
    Way("offload (HF)", TRANSFORMERS, functools.partial(checkpointing, offload=True)),
    sac_way("all matmuls + attention", *MATMULS, *ATTENTION),
    sac_way("every 2nd matmul + attention", *MATMULS, *ATTENTION, every=2),
    sac_way("attention", *ATTENTION),
    Way("torch_remat", REMAT, remat),
    Way("torch_remat, keep attention", REMAT, functools.partial(remat, keep=("Attention",))),
    Way("torch_remat, keep linear", REMAT, functools.partial(remat, keep=("Linear", "Conv1D"))),
    *(
        Way(f"compiled, budget {share:g}", COMPILED, functools.partial(compiled, share=share))
        for share in (0.3, 0.5, 0.7, 1.0)
    ),
    our_way("selective", policy="selective"),
    our_way("selective, save attention", policy="selective", save=["attention"]),
    our_way("selective, save linear", policy="selective", save=["linear"]),
    our_way("full", policy="full"),
    our_way("offload", policy="offload"),
    our_way("selective, offload saved", policy="selective", offload="saved"),
    our_way("head in chunks", policy="none", head="auto"),
    our_way("full, head in chunks", policy="full", head="auto"),
    *(our_way(f"compiled blocks, share {share}", OURS_COMPILED, compile="blocks", share=share) for share in (1, 0)),
    our_way("selective, checked", CHECKED, policy="selective", check_every=1),
    our_way("full, checked", CHECKED, policy="full", check_every=1),
)
"""The first is what everything is compared with. Plans for budgets come on top."""
