"""Distance of an engine's log-probabilities from the policy's, with a mixture of experts.

The engine is transformers in bf16, and the policy has the same weights in fp32. The policy routes
tokens by itself, or replays the experts that the engine chose (R3, arXiv:2510.11370).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks import text
from benchmarks.conftest import Session, check_row
from benchmarks.measure import attempt
from benchmarks.results import Row
from benchmarks.shapes import Shape
from grpo_kernels.hf import add_fused_head
from grpo_kernels.losses.terms import KL_ESTIMATORS
from grpo_trainer.policy import add_routing_replay, check_routing_replay, evaluating
from grpo_trainer.policy.routing import routing_metrics

_VOCABULARY = 512
_PROMPT = 8  # random tokens
NOTES = {"own": "the policy routes by itself", "replayed": "use_rollout_routing_replay: true"}


def _case(
    name: str, layers: int, experts: int, chosen: int, width: int, completions: int, length: int
) -> Shape:
    """Return a random model with ``chosen`` experts per token, and its samples."""
    facts = {"model": name, "dtype": "bf16", "layers": layers, "experts": f"{chosen} of {experts}"}
    facts["tokens"] = completions * length
    more = {"chosen": chosen, "every": experts, "width": width}
    return Shape(name, facts, more | {"completions": completions, "length": length})


def _model(case: Shape) -> Any:
    torch.manual_seed(0)
    width = case["width"]
    config = Qwen3MoeConfig(
        num_hidden_layers=case["layers"], num_experts=case["every"],
        num_experts_per_tok=case["chosen"], hidden_size=width, head_dim=16,
        num_attention_heads=width // 16, num_key_value_heads=width // 32,
        moe_intermediate_size=width // 2, vocab_size=_VOCABULARY, initializer_range=0.1,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config).to(torch.bfloat16).eval()


_SMALL = _case("small-moe", 8, 32, 4, width=128, completions=32, length=64)
CASES = {
    "tiny": [_case("tiny-moe", 2, 8, 2, width=32, completions=2, length=8)],
    "quick": [_SMALL],
    "cpu": [_SMALL],
    "gpu": [_SMALL],
    "gpu-full": [_SMALL],
}


def about(case: Shape, device: str) -> str:
    return "|log p of the engine - log p of the policy| of sampled tokens, temperature 1"


@torch.no_grad()
def measure(case: Shape, rows: Sequence[Row], session: Session) -> None:
    with attempt(*rows):
        model = _model(case).to(session.device)
        ids = _sampled(model, case)
        output = model(input_ids=ids, output_router_logits=True, use_cache=False)
        engine = _logprobs(output.logits, ids)
        layers = [scores.topk(case["chosen"]).indices for scores in output.router_logits]
        experts = torch.stack(layers, 1).unflatten(0, ids.shape)  # (B, L, layers, chosen)
        model.float()
        add_fused_head(model)
        add_routing_replay(model)
        with evaluating(model):
            check_routing_replay(model, model)
        for row in rows:
            replayed = {"routed_experts": experts} if row.provider == "replayed" else {}
            policy = _logprobs(model(input_ids=ids, use_cache=False, **replayed).logits, ids)
            _fill(row, policy - engine)
            if replayed:
                share = routing_metrics(model)["sampling/routing_difference"].item()
                row.info["choices_that_differ"] = share
                row.cells["choices that differ"] = f"{share:.1%}"


def _sampled(model: Any, case: Shape) -> Tensor:  # (B, L) prompts and completions
    prompts = torch.randint(_VOCABULARY, (case["completions"], _PROMPT), device=model.device)
    sampling = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=case["length"],
        pad_token_id=0,
    )  # fmt: skip
    return model.generate(prompts, generation_config=sampling)


def _logprobs(logits: Tensor, ids: Tensor) -> Tensor:  # (B, L - prompt) fp64
    scores = logits[:, _PROMPT - 1 : -1].double().log_softmax(-1)
    return scores.gather(-1, ids[:, _PROMPT:, None])[..., 0]


def _fill(row: Row, difference: Tensor) -> None:
    """Fill in a row from log p of the policy - log p of the engine."""
    errors = difference.abs().flatten()
    k3 = KL_ESTIMATORS["k3"](difference).mean().item()
    row.info |= {
        "mean": errors.mean().item(),
        "p99": errors.quantile(0.99).item(),
        "largest": errors.max().item(),
        "k3": k3,
    }
    titles = {"mean": "mean", "p99": "99th percentile", "largest": "largest", "k3": "k3"}
    row.cells = {title: text.error(row.info[name]) for name, title in titles.items()}
    row.leave_out("wrong", None if math.isfinite(k3) else "a log-probability is not finite")


test_routing = check_row
