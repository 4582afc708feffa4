"""Small mixtures of experts."""

from __future__ import annotations

import torch
import transformers

from hf_ckpt import compat

EXPERTS = {
    "mixtral": (
        transformers.MixtralConfig,
        transformers.MixtralForCausalLM,
        {"num_local_experts": 4, "router_jitter_noise": 0.1},
    ),
    "qwen2_moe": (
        transformers.Qwen2MoeConfig,
        transformers.Qwen2MoeForCausalLM,
        {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    ),
    "olmoe": (transformers.OlmoeConfig, transformers.OlmoeForCausalLM, {"num_experts": 4}),
}
ONE_BY_ONE = "eager" if len(compat.ENABLE_NAMES) > 1 else None
"""The implementation that calls experts one by one; transformers 4 has no other, and no name for it."""
IMPLEMENTATIONS = (ONE_BY_ONE, "batched_mm", "grouped_mm") if ONE_BY_ONE else (None,)


def experts(name, dtype=torch.float32, implementation=None):
    """A mixture of experts with its auxiliary loss, and the kernels it calls its experts by."""
    config_class, model_class, keys = EXPERTS[name]
    config = config_class(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts_per_tok=2,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
        output_router_logits=True,
        router_aux_loss_coef=0.5,
        **keys,
    )
    config._attn_implementation = "sdpa"
    if implementation is not None:
        config._experts_implementation = implementation
    torch.manual_seed(0)
    return model_class(config).to(dtype).train()
