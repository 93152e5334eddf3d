"""cast_lm_head_to_fp32: the head's GEMMs are those of fp32 numbers, whatever the rest is."""

from __future__ import annotations

import pytest
import torch

from grpo_kernels.hf import add_fused_head
from grpo_trainer.policy import load_policy

IDS = torch.tensor([[3, 4, 5, 6]])


def what_the_head_gets(model):
    add_fused_head(model)
    seen = []

    def head_fn(hidden, head):
        seen.extend((hidden.dtype, head.weight.dtype, torch.is_autocast_enabled("cpu")))
        return hidden @ head.weight.T

    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=IDS, head_fn=head_fn).head
    return seen, logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_fp32(policy, make_args, dtype):
    own = what_the_head_gets(load_policy(policy.to(dtype), make_args()))
    assert own[0] != [torch.float32, torch.float32, False]
    kept = load_policy(policy, make_args(cast_lm_head_to_fp32=True))
    seen, logits = what_the_head_gets(kept)
    assert seen == [torch.float32, torch.float32, False]
    assert logits.dtype == torch.float32
    assert kept.model.embed_tokens.weight.dtype == dtype
    assert kept.generate(IDS, max_new_tokens=2, do_sample=False).shape[1] <= 6


def test_tied_heads(policy, make_args):
    args = make_args(cast_lm_head_to_fp32=True)
    policy.lm_head.weight = policy.model.embed_tokens.weight
    load_policy(policy, args)  # fp32 as it is
    with pytest.raises(ValueError, match="shared with the embeddings"):
        load_policy(policy.to(torch.bfloat16), args)
