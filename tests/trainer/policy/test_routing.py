"""Routing replay: the policy sends tokens through the experts that the engine chose.

And the load-balancing loss of such models.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedModel, Qwen2MoeConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from grpo_kernels import LossConfig
from grpo_kernels.hf import add_fused_head, has_moe_aux_loss
from grpo_trainer.data import Divisors, MicroBatch, Sample, collate
from grpo_trainer.policy import (
    Packing,
    RouterLoss,
    add_routing_replay,
    check_routing_replay,
    evaluating,
    policy_loss_of,
    replayed_experts,
    target_logprobs,
)
from grpo_trainer.policy.routing import NO_EXPERT, replay_of
from tests.support.batches import BatchTrainer
from tests.support.tiny_models import SMALL
from tests.support.trainer import CannedEngine

EXPERTS, CHOSEN = 5, 3
QWEN = {
    "num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "moe_intermediate_size": 12,
    "num_hidden_layers": 3, "mlp_only_layers": [1],
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": QWEN,
    "qwen2_moe": QWEN | {"shared_expert_intermediate_size": 8},
    "mixtral": {"num_local_experts": EXPERTS},
    "olmoe": {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN},
    "gpt_oss": {"num_local_experts": EXPERTS, "num_experts_per_tok": CHOSEN},
    "granitemoe": {"num_local_experts": EXPERTS, "num_experts_per_tok": CHOSEN},
    "glm4_moe": {  # chooses among the experts of a few groups
        "n_routed_experts": 8, "num_local_experts": 8, "n_group": 4, "topk_group": 2,
        "num_experts_per_tok": CHOSEN, "moe_intermediate_size": 12, "first_k_dense_replace": 1,
    },
}  # fmt: skip


def tiny(family: str = "qwen3_moe", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**SMALL | FAMILIES[family] | {"initializer_range": 0.3})
    ways = {"attn_implementation": "eager" if family == "gpt_oss" else "sdpa"}
    if dtype == torch.float64:  # which grouped products do not take
        ways["experts_implementation"] = "eager"
    model = AutoModelForCausalLM.from_config(config, **ways).to(dtype)
    for name, parameter in model.named_parameters():
        if "layers" in name and parameter.dim() > 1:  # some families leave experts at zero
            torch.nn.init.normal_(parameter, std=0.3)
    return taught(model)


def taught(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model that can replay, which is tried."""
    add_fused_head(model)
    add_routing_replay(model)
    with evaluating(model):
        check_routing_replay(model, model)
    return model.eval()


def random_experts(*shape: int, seed: int = 2) -> Tensor:
    """Return different experts for each token and layer."""
    draw = torch.Generator().manual_seed(seed)
    return torch.rand(*shape, EXPERTS, generator=draw).topk(CHOSEN).indices


def batch_of(shared: bool = False) -> MicroBatch:
    """Return rows of different lengths with experts of all tokens but each last; without shared
    prompts a row has none."""
    draw = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, 99, (n,), generator=draw).tolist() for n in (9, 4, 12, 2, 7)]
    samples = [Sample("", row[:1], None, row[1:]) for row in rows]
    if shared:  # three completions of a prompt, and two of another
        prompts = [rows[0][:5], rows[2][:3]]
        samples = [
            Sample("", prompts[number // 3], None, row[1:]) for number, row in enumerate(rows)
        ]
    first: dict[tuple[int, ...], Tensor] = {}
    for number, sample in enumerate(samples if shared else samples[:4]):
        prompt, tokens = tuple(sample.prompt_ids), len(sample.prompt_ids + sample.completion_ids)
        experts = random_experts(tokens - 1, 3, seed=number)
        experts[: len(prompt)] = first.setdefault(prompt, experts[: len(prompt)].clone())
        sample.routed_experts = experts.to(torch.uint8)
    count = torch.tensor(23.0)
    advantages = torch.linspace(-1, 2, len(samples))
    batch = collate(samples, advantages, Divisors(count, count), pad_token_id=0)
    return batch


def with_experts(batch: MicroBatch, model: PreTrainedModel) -> MicroBatch:
    replayed_experts(model)(batch, model)
    return batch


def packed(batch: MicroBatch, shared: bool = False) -> MicroBatch:
    batch = replace(batch)
    Packing(always=True, shares=shared, pairs_per_token=192)(batch, torch.nn.Identity())
    assert (batch.owners is not None) == shared
    return batch


def loss_and_gradients(
    model: Any, batch: MicroBatch, routers: bool = False
) -> tuple[Tensor, list[Tensor], dict[str, float]]:
    terms = [RouterLoss(0.1)] if routers else []
    config = LossConfig(beta=0.0, entropy_coef=0.01)
    tokens = batch.token_batch(1)
    loss, metrics = policy_loss_of(model, batch, tokens, config, {}, terms=terms)
    parameters = [x for x in model.parameters() if x.requires_grad]
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    return loss.detach(), list(gradients), {name: float(value) for name, value in metrics.items()}


def own_experts(model: PreTrainedModel, batch: MicroBatch) -> Tensor:
    """Return the model's own choices, by hooks on its routers."""
    chosen: dict[int, Tensor] = {}
    hooks = [
        layer.mlp.gate.register_forward_hook(
            lambda module, args, output, number=number: chosen.update({number: output[2]})
        )
        for number, layer in enumerate(model.model.layers)
        if hasattr(layer.mlp, "gate")
    ]
    target_logprobs(model, replace(batch, packed=None), 1.0)
    for hook in hooks:
        hook.remove()
    shape = batch.input_ids.shape
    dense = torch.zeros_like(next(iter(chosen.values())))
    layers = [chosen.get(number, dense) for number in range(len(model.model.layers))]
    return torch.stack(layers, 1).unflatten(0, shape)


def moe_by_hand(block: Any, hidden: Tensor, experts: Tensor) -> Tensor:
    """Return what a block of Qwen3 makes of (N, D) through ``experts``, (N, K); -1: its choice."""
    probabilities = (hidden @ block.gate.weight.T).softmax(-1)
    rows = []
    for x, p, replayed in zip(hidden, probabilities, experts, strict=True):
        chosen = p.topk(CHOSEN).indices if replayed[0] == NO_EXPERT else replayed
        row = torch.zeros_like(x)
        for expert in chosen:
            gate, up = (block.experts.gate_up_proj[expert] @ x).chunk(2)
            value = block.experts.down_proj[expert] @ (torch.nn.functional.silu(gate) * up)
            row = row + value * p[expert] / p[chosen].sum()
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("normalized", [True, False])
def test_values_and_gradients_are_those_of_a_forward_by_hand(normalized: bool) -> None:
    model = tiny(dtype=torch.float64)
    block = model.model.layers[2].mlp
    block.gate.norm_topk_prob = normalized
    batch = with_experts(batch_of(), model)
    seen: list[Tensor] = []
    hook = block.register_forward_hook(lambda module, args, output: seen.extend((*args, output)))
    ids, mask = batch.input_ids, batch.attention_mask
    model(ids, attention_mask=mask, head_fn=lambda x, head: x, **replay_of(batch))
    hook.remove()
    hidden, output = seen
    assert batch.routed_experts is not None
    experts = batch.routed_experts[:, :, 2].flatten(0, 1).long()
    by_hand = moe_by_hand(block, hidden.flatten(0, 1), experts)
    if not normalized:
        probabilities = (hidden.flatten(0, 1) @ block.gate.weight.T).softmax(-1)
        own = probabilities.topk(CHOSEN).indices
        chosen = torch.where(experts == NO_EXPERT, own, experts)
        by_hand = by_hand * probabilities.gather(1, chosen).sum(-1, keepdim=True)
    by_hand = by_hand.view_as(output)
    torch.testing.assert_close(output, by_hand, rtol=1e-6, atol=1e-6)  # softmax is in fp32
    weights = [hidden, block.gate.weight, *block.experts.parameters()]
    noise = torch.randn(output.shape, dtype=output.dtype)
    found, expected = (
        torch.autograd.grad((x * noise).sum(), weights, retain_graph=True)
        for x in (output, by_hand)
    )
    for one, other in zip(found, expected, strict=True):
        assert other.abs().max() > 0
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str) -> None:
    """Making it compares, by the same and by other experts."""
    model = tiny(family)
    batch = batch_of()
    layers = len(model.model.layers)
    for sample in batch.samples or ():
        if sample.routed_experts is not None:
            chosen = model.config.num_experts_per_tok
            sample.routed_experts = sample.routed_experts[:, :layers, :chosen]
    before = target_logprobs(model, with_experts(batch, model), 1.0)
    after = target_logprobs(model, batch, 1.0, replays_routing=True)
    assert not before.equal(after) and after.isfinite().all()
    # a row without a report, the last, is routed by the model itself
    torch.testing.assert_close(after[-1], before[-1], rtol=0, atol=0)


@pytest.mark.parametrize("routers", [False, True])
@pytest.mark.parametrize("places", ["padded", "packed", "shared"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_models_own_choice_gives_the_same_bits(
    places: str, checkpointing: bool, routers: bool
) -> None:
    model, batch = tiny(), batch_of(shared=True)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    own = own_experts(model, batch)
    if places != "padded":
        batch = packed(batch, shared=places == "shared")
    plain = loss_and_gradients(model, batch, routers)
    replayed = loss_and_gradients(model, replace(batch, routed_experts=own), routers)
    assert plain[0].equal(replayed[0])
    assert all(x.equal(y) for x, y in zip(plain[1], replayed[1], strict=True))
    assert replayed[2].pop("sampling/routing_difference") == 0
    assert plain[2] == replayed[2]


@pytest.mark.parametrize("shared", [False, True])
def test_packed_rows_replay_the_same(shared: bool) -> None:
    model = tiny(dtype=torch.float64)
    batch = with_experts(batch_of(shared), model)
    padded, found = (
        loss_and_gradients(model, one) for one in (batch, packed(batch, shared=shared))
    )
    torch.testing.assert_close(padded[0], found[0])
    for one, other in zip(padded[1], found[1], strict=True):
        torch.testing.assert_close(one, other)
    difference = "sampling/routing_difference"
    assert 0.3 < padded[2][difference] < 1
    assert shared or padded[2][difference] == found[2][difference]


def test_a_row_that_another_begins_with_has_its_experts() -> None:
    """Nothing is reported of a row's last token, which the other row's report knows."""
    ids, model = [5, 7, 9, 11, 6, 8], tiny()
    samples = [Sample("", ids[:2], None, ids[2:end]) for end in (4, 6)]
    for sample in samples:
        sample.routed_experts = random_experts(3, 3, seed=1).to(torch.uint8)
    samples[1].routed_experts = random_experts(5, 3, seed=1).to(torch.uint8)
    count = torch.tensor(6.0)
    batch = collate(samples, torch.tensor([1.0, -1.0]), Divisors(count, count), pad_token_id=0)
    batch = with_experts(packed(batch, shared=True), model)
    [experts] = replay_of(batch)["routed_experts"]
    places = [batch.packed[0].tolist().index(int(batch.owners[1, at]) * 6 + at) for at in range(5)]
    assert experts[places].equal(samples[1].routed_experts.short())


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_replays_the_same_when_it_runs_again(reentrant: bool) -> None:
    model = tiny()
    batch = with_experts(batch_of(), model)
    plain = loss_and_gradients(model, batch)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    model.train()
    config, tokens = LossConfig(beta=0.0, entropy_coef=0.01), batch.token_batch(1)
    loss, _ = policy_loss_of(model, batch, tokens, config, {})
    target_logprobs(model, batch, 1.0)  # another forward in between, which replays nothing
    loss.backward()
    for gradient, parameter in zip(plain[1], model.parameters(), strict=True):
        own = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        torch.testing.assert_close(own, gradient, rtol=0, atol=0)


def test_with_an_adapter() -> None:
    model = tiny()
    lora = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"])
    policy = get_peft_model(model, lora)
    for parameter in policy.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    with evaluating(policy):
        check_routing_replay(model, policy)
    batch = batch_of()
    own = own_experts(model, batch)
    plain = loss_and_gradients(policy, batch)
    same = loss_and_gradients(policy, replace(batch, routed_experts=own))
    other = loss_and_gradients(policy, with_experts(batch, model))
    assert plain[0].equal(same[0]) and not plain[0].equal(other[0])
    assert all(x.equal(y) for x, y in zip(plain[1], same[1], strict=True))
    assert all(x.isfinite().all() and x.any() for x in other[1])


def test_models_that_cannot() -> None:
    for family, message in (
        ("llama", "expected False for a model that is not a mixture of experts, .* 'llama'"),
        ("doge", "no layer with one module of a class named ...Router in DogeForCausalLM"),
        ("phimoe", "got 0 calls of topk in a PhimoeTopKRouter in PhimoeForCausalLM"),
    ):
        more = {"num_local_experts": 4} if family == "phimoe" else {}
        config = CONFIG_MAPPING[family](**SMALL | more)
        model = AutoModelForCausalLM.from_config(config)
        with pytest.raises(ValueError, match=f"use_rollout_routing_replay: .*{message}"):
            taught(model)


@pytest.mark.parametrize(
    ("shape", "largest"), [((5, 3, 2), 4), ((5, 2, 3), 4), ((9, 3, 3), 4), ((5, 3, 3), 5)]
)
def test_experts_of_another_model(shape: tuple[int, ...], largest: int) -> None:
    model, batch = tiny(), batch_of()
    assert batch.samples is not None
    batch.samples[0].routed_experts = torch.full(shape, largest, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"at most 8 tokens, 3 layers, 3 of 5 experts\), got "):
        with_experts(batch, model)


# the load-balancing loss

TINY = {
    "vocab_size": 14,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
}


MIXTRAL = MixtralConfig(num_local_experts=4, **TINY)
QWEN2_MOE = Qwen2MoeConfig(
    num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16, **TINY
)


@pytest.mark.parametrize("config", [MIXTRAL, QWEN2_MOE], ids=["mixtral", "qwen2_moe"])
@pytest.mark.parametrize(("coef", "used"), [(0.5, 0.5), (None, 0.001), (0.0, 0.0)])
def test_the_models_own_loss_is_added(make_trainer, config, coef, used):
    """By the weight of its config where there is no other."""
    trainer = make_trainer(
        lambda prompts, **kwargs: [1.0] * len(prompts),  # equal rewards: the policy loss is 0
        AutoModelForCausalLM.from_config(config), CannedEngine(), BatchTrainer,
        max_steps=1, learning_rate=0.0, router_aux_loss_coef=coef,
    )  # fmt: skip
    trainer.train()
    [log] = [row for row in trainer.state.log_history if "loss" in row]
    assert ("aux_loss" in log) == (log["grad_norm"] > 0) == (used > 0)
    if used:
        [batch] = trainer.batches
        given = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
        with torch.no_grad():
            expected = trainer.model(**given, output_router_logits=True).aux_loss.item()
        assert log["aux_loss"] == pytest.approx(expected, rel=1e-5)
        assert log["loss"] == pytest.approx(used * expected, rel=1e-4)


def test_a_class_that_fsdp2_makes_of_a_model():
    model = AutoModelForCausalLM.from_config(MIXTRAL)
    model.__class__ = type("FSDPMixtral", (type(model),), {"__module__": "torch.nn"})
    assert has_moe_aux_loss(model)
