"""The fused head inside a transformers model equals the model's own logits, whatever the family."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from grpo_kernels import LossConfig, TokenBatch, linear_logprobs, linear_policy_loss
from grpo_kernels.modeling import LMHead, add_fused_head

SMALL = dict(
    vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
    pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip

# family -> what its config needs besides; each has its own way to form logits
FAMILIES: dict[str, dict[str, object]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "mistral": {},
    "gemma2": {"final_logit_softcapping": 5.0},
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 4.0},
    "phi": {"partial_rotary_factor": 0.5},  # a head with a bias
    "qwen3_moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    },
    "gpt_neox": {},
}  # fmt: skip


def tiny_model(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**{**SMALL, **FAMILIES[family]})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    with torch.no_grad():  # spread the logits, so that a scale or a cap shows
        model.get_output_embeddings().weight.mul_(20)
        if model.get_output_embeddings().bias is not None:
            model.get_output_embeddings().bias.normal_()
    return model.eval()


def tokens() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 99, (2, 7), generator=g)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    return ids, mask


@pytest.mark.parametrize("family", FAMILIES)
def test_head_equals_the_models_own_logits(family: str) -> None:
    model = tiny_model(family)
    ids, mask = tokens()
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
    expected = logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)

    def logprobs(hidden: Tensor, head: LMHead) -> Tensor:
        out = linear_logprobs(
            hidden[:, :-1], head.weight, ids[:, 1:], bias=head.bias,
            logit_scale=head.logit_scale, softcap=head.softcap,
        )  # fmt: skip
        assert out.logprobs is not None
        return out.logprobs

    add_fused_head(model)
    with torch.no_grad():
        got = model(input_ids=ids, attention_mask=mask, head_fn=logprobs).head
    torch.testing.assert_close(got[:, 2:], expected[:, 2:], rtol=1e-4, atol=1e-4)


def test_without_head_fn_nothing_changes() -> None:
    model = tiny_model("qwen2")
    ids, mask = tokens()
    before = model(input_ids=ids, attention_mask=mask).logits
    add_fused_head(model)
    add_fused_head(model)  # twice is harmless
    assert torch.equal(model(input_ids=ids, attention_mask=mask).logits, before)
    out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=3, do_sample=False)
    assert out.shape[0] == 2


def test_loss_inside_the_forward_trains_every_parameter_and_fires_hooks() -> None:
    model = tiny_model("qwen2").train()
    add_fused_head(model)
    fired: list[str] = []
    model.register_forward_hook(lambda module, args, output: fired.append("model"))
    ids, mask = tokens()
    batch = TokenBatch.from_padded(ids[:, 4:], torch.tensor([1.0, -1.0]))

    def loss_of(hidden: Tensor, head: LMHead):
        return linear_policy_loss(hidden[:, 3:-1], head.weight, batch, LossConfig())

    loss, metrics = model(input_ids=ids, attention_mask=mask, head_fn=loss_of).head
    loss.backward()
    assert fired == ["model"] and "entropy" in metrics
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    fused = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    logits = model(input_ids=ids, attention_mask=mask).logits[:, 3:-1]
    logp = logits.log_softmax(-1).gather(-1, ids[:, 4:, None]).squeeze(-1)
    ratio = (logp - logp.detach()).exp()
    (-(ratio * torch.tensor([[1.0], [-1.0]])).sum() / ratio.numel()).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(fused[name], parameter.grad, rtol=1e-4, atol=1e-6)


def test_models_that_cannot_carry_it_are_refused() -> None:
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="model: expected a"):
        add_fused_head(model.model)


def test_adapter_on_the_head_is_refused() -> None:
    peft = pytest.importorskip("peft")
    model = tiny_model("llama")
    add_fused_head(model)
    wrapped = peft.get_peft_model(
        model, peft.LoraConfig(target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")
    )
    ids, mask = tokens()
    with pytest.raises(ValueError, match="plain linear LM head.*exclude the head"):
        wrapped(input_ids=ids, attention_mask=mask, head_fn=lambda hidden, head: hidden)
