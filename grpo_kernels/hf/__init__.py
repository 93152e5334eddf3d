"""The same inside transformers models: the head of a model, its forward, and a check of both."""

from grpo_kernels.hf.check import check_fused_head
from grpo_kernels.hf.lm_head import keep_head_in_fp32, logit_scale, softcap
from grpo_kernels.hf.patch import HeadFn, add_fused_head, backbone, restore_forward
from grpo_kernels.hf.router import has_router_loss

__all__ = [
    "HeadFn",
    "add_fused_head",
    "backbone",
    "check_fused_head",
    "has_router_loss",
    "keep_head_in_fp32",
    "logit_scale",
    "restore_forward",
    "softcap",
]
