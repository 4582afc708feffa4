"""Small mixture-of-experts models."""

from __future__ import annotations

import torch
import transformers

from hf_ckpt import compat

EXPERTS = {
    "mixtral": {"num_local_experts": 4, "router_jitter_noise": 0.1},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "olmoe": {"num_experts": 4},
}
"""Model type -> its own config keys."""
MORE_EXPERTS = {
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8},
    "deepseek_v3": {
        "q_lora_rank": None,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 0,
        "num_key_value_heads": 4,
    },
    "gpt_oss": {"num_local_experts": 4, "head_dim": 8},
}
"""More of them, some without auxiliary losses."""
ONE_BY_ONE = "eager" if len(compat.transformers.ENABLE_NAMES) > 1 else None
"""The implementation that calls experts one by one; in transformers 4 it is the only one and has no name."""
IMPLEMENTATIONS = (ONE_BY_ONE, "batched_mm", "grouped_mm") if ONE_BY_ONE else (None,)


def experts(name, implementation=None):
    """A mixture of experts, with its auxiliary loss, that runs its experts with these kernels."""
    sizes = {
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts_per_tok": 2,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
        **({} if name == "deepseek_v3" else {"output_router_logits": True, "router_aux_loss_coef": 0.5}),
    }
    config = transformers.AutoConfig.for_model(name, **sizes | {**EXPERTS, **MORE_EXPERTS}[name])
    config._attn_implementation = "eager" if name == "gpt_oss" else "sdpa"
    if implementation is not None:
        config._experts_implementation = implementation
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    for key, parameter in model.named_parameters():
        if key.endswith((".gate.weight", ".router.weight")) and not parameter.any():  # some are zero until loaded
            torch.nn.init.normal_(parameter, std=0.02)
    return model
