"""Tiny models of transformers' families, with random weights, for heads and for hosts."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

SMALL = dict(
    vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
    pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip

# family -> what its config needs besides; each has its own way to form logits, or its own names
FAMILIES: dict[str, dict[str, object]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "mistral": {},
    "gemma2": {"final_logit_softcapping": 5.0},
    "gemma3_text": {"final_logit_softcapping": 5.0, "tie_word_embeddings": True},
    "recurrent_gemma": {"logits_soft_cap": 5.0, "lru_width": 32, "num_hidden_layers": 3},
    "nanochat": {"final_logit_softcapping": 5.0},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {"logit_scale": 4.0},
    "granite": {"logits_scaling": 4.0},
    "granitemoe": {"logits_scaling": 4.0, "num_local_experts": 4, "num_experts_per_tok": 2},
    "minicpm3": {  # divides before the head, by hidden_size / dim_model_base
        "dim_model_base": 8, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 8, "v_head_dim": 8, "head_dim": 8, "num_key_value_heads": 4,
    },
    "hyperclovax": {"logits_scaling": 0.25},
    "falcon_h1": {
        "lm_head_multiplier": 0.5, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8,
        "mamba_d_state": 8, "mamba_chunk_size": 8,
    },
    "phi": {"partial_rotary_factor": 0.5},  # a head with a bias
    "gptj": {"rotary_dim": 4},  # the same
    "gpt2": {},
    "opt": {},
    "mpt": {"logit_scale": 0.25},  # which transformers does not apply
    "gpt_neox": {},
    "qwen3_moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    },
    "llama4_text": {"num_local_experts": 2, "intermediate_size_mlp": 48},
    "glm4": {},
    "nemotron": {},
    "olmo2": {},
    "stablelm": {},
}  # fmt: skip
# names by which some families call the sizes of SMALL
OTHER_NAMES = dict(
    n_embd=32, n_layer=2, n_head=4, n_positions=64, n_inner=48, d_model=32, n_heads=4, n_layers=2,
    max_seq_len=64, ffn_dim=48, word_embed_proj_dim=32, is_decoder=True,
)  # fmt: skip


def tiny_model(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    known = CONFIG_MAPPING[family]()
    sizes = {name: size for name, size in (SMALL | OTHER_NAMES).items() if hasattr(known, name)}
    config = CONFIG_MAPPING[family](**{**sizes, **FAMILIES.get(family, {})})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    with torch.no_grad():  # spread the logits, so that a scale or a cap shows
        model.get_output_embeddings().weight.mul_(20)
        if getattr(model.get_output_embeddings(), "bias", None) is not None:
            model.get_output_embeddings().bias.normal_()
    return model.eval()


def rounded_model(family: str, dtype: torch.dtype) -> PreTrainedModel:
    """Return one whose weights are the same in every dtype."""
    return tiny_model(family).bfloat16().to(dtype)


def tokens() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 99, (2, 7), generator=g)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    return ids, mask
