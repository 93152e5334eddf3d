"""The same inside transformers models: the head of a model, its forward, and a check of both."""

from grpo_kernels.hf.check import check_fused_head
from grpo_kernels.hf.lm_head import keep_head_in_fp32, logit_scale, softcap
from grpo_kernels.hf.patch import HeadFn, add_fused_head, backbone, drop_wrappers, is_patched
from grpo_kernels.hf.router import has_router_loss

__all__ = [
    "HeadFn",
    "add_fused_head",
    "backbone",
    "check_fused_head",
    "drop_wrappers",
    "has_router_loss",
    "is_patched",
    "keep_head_in_fp32",
    "logit_scale",
    "softcap",
]
