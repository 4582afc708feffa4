"""Traces the memory in which a model writes completions: the `generate` of transformers, before a step of GRPO."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.errors import HfCkptError, reason_of
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.models.blocks import plain_modules
from hf_ckpt.prediction.skeleton import Skeleton
from hf_ckpt.prediction.tracer import Answers
from hf_ckpt.prediction.workload import DTYPES, Workload


def generation_bytes(workload: Workload, skeleton: Skeleton, *, on_cpu: bool = False) -> int:
    """Most bytes alive, beside those of the model, while the last token of each completion of a step is written.

    These are keys and values of all tokens before it, those of one block a second time while the token's own are put
    behind them, and what the forward of one token makes. What `generate` computes from the scores of a token, and the
    forward of the prompts, take less unless prompts are much longer than completions.

    Prompts are taken to be of different lengths, so that there is a mask.

    Args:
        workload: what is trained; `tokens` are those of a prompt and its completion.
        skeleton: of the model.
        on_cpu: whether it runs on a CPU.

    Returns 0 where the model itself writes nothing.

    Raises `HfCkptError` for a model that does not write tokens one by one with transformers' caches.
    """
    rows, tokens, autocast = workload.written, workload.tokens, workload.autocast_name
    if not rows:
        return 0
    with skeleton.assembled([stack.row for stack in skeleton.stacks]) as model, contextlib.ExitStack() as stack:
        _number(model, skeleton)
        stack.enter_context(torch.no_grad())
        if not on_cpu:
            stack.enter_context(compat.accelerator_kernels())
        for context in (skeleton.fake, compat.fake_values_count(), compat.any_type_in_grouped_products()):
            stack.enter_context(context)
        counted = _Counted(Answers(padded=True, casts=False), model)
        stack.enter_context(counted)
        if autocast is not None:
            stack.enter_context(torch.autocast("cpu", dtype=DTYPES[autocast]))
        try:
            cache = compat.new_cache(model)
            _write(model, cache, rows, tokens - 1, tokens - 1)
            counted.peak_bytes = counted.current_bytes
            _write(model, cache, rows, 1, tokens)
            if compat.cached_tokens(cache) < min(tokens, 2):
                raise ValueError("it put nothing into its cache")
        except Exception as error:  # models may raise anything
            raise HfCkptError(
                f"the memory in which {skeleton.model} writes completions cannot be told: {reason_of(error)}. Where "
                "vLLM writes them, ask for `--generation vllm`."
            ) from error
        return counted.peak_bytes - counted.start_bytes


class _Counted(LiveBytes):  # type: ignore[no-untyped-call]
    """Counts live bytes, and answers what operations ask about values."""

    def __init__(self, answers: Answers, model: nn.Module) -> None:
        super().__init__(model)
        self._answers = answers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = self._answers.answer(func, args)
        return super().__torch_dispatch__(func, types, args, kwargs) if answer is NotImplemented else answer


def _number(model: nn.Module, skeleton: Skeleton) -> None:
    """Give each block a place of its own in a cache; they are copies of a few."""
    modules = dict(plain_modules(model))
    for stack in skeleton.stacks:
        for index, block in enumerate(modules[stack.container].children()):
            for module in block.modules():
                if "layer_idx" in vars(module):
                    vars(module)["layer_idx"] = index


def _write(model: nn.Module, cache: Any, rows: int, new: int, tokens: int) -> None:
    """Run the forward of some new tokens of each sequence, which has so many with them."""
    if new:
        ids, mask = (torch.zeros(rows, count, dtype=torch.long) for count in (new, tokens))
        model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True)
