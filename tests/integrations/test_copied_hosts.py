"""The adapters of docs/examples/hosts, which users copy, on stand-ins that score full logits.

prime-rl 0.8, NeMo-RL 0.6 and SkyRL 0.3 are on no package index. A stand-in has the places, names
and parameters that an adapter replaces.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from grpo_kernels import LossConfig, TokenBatch, policy_loss
from tests.integrations.contract import Adapter, assert_passed, cases, contract_of
from tests.sharded.ranks import run_on_ranks

sys.path.append(str(Path(__file__).parents[2] / "docs" / "examples" / "hosts"))
prime_rl, nemo_rl, skyrl = map(import_module, ("grpo_prime_rl", "grpo_nemo_rl", "grpo_skyrl"))

B, S, D, V = 3, 8, 16, 54
FP32, BF16 = torch.float32, torch.bfloat16


def scores(
    hidden: Tensor, weight: Tensor, ids: Tensor, temperature: Any = 1.0, softcap: Any = None
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of ids (...) and entropies (...) by full logits."""
    logits = (hidden @ weight.t()).float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logp = (logits / temperature).log_softmax(-1)
    return logp.gather(-1, ids[..., None]).squeeze(-1), -(logp.exp() * logp).sum(-1)


class PrimeLmOutput(dict[str, Tensor]):
    pass


class LossOutputs(SimpleNamespace):
    pass


class FusedOutputLinear(nn.Linear):
    softcap: float | None = None

    def forward(self, hidden_states, labels=None, temperature=None):
        logprobs, entropy = scores(
            hidden_states, self.weight, labels, temperature[..., None], self.softcap
        )
        return PrimeLmOutput(logprobs=logprobs, entropy=entropy)


class GemmaFusedOutputLinear(FusedOutputLinear):
    softcap = 1.5
    forward = FusedOutputLinear.forward  # it is replaced as well


def from_parallel_hidden_states_to_logprobs(
    tensor_parallel_hidden_states, output_weight_layer, runtime_gather_output, target,
    vocab_start_index, vocab_end_index, tp_group, inference_only=False, cp_group=None,
    chunk_size=None,
): ...  # fmt: skip


def _fused_lm_head_logprob_apply(
    backend, hidden, weight, target, vocab_start_index, vocab_end_index, chunk_size, tp_group,
    inference_only,
): ...  # fmt: skip


def _fused_vocab_parallel_entropy_from_hidden(
    hidden, lm_head_weight, tp_group, chunk_size=None, temperature=1.0
): ...


class PolicyLossRegistry:
    functions: dict[str, Callable[..., Any]]

    @classmethod
    def register(cls, name, func):
        if name in cls.functions:
            raise ValueError(f"policy loss '{name}' already registered")
        cls.functions[name] = func


_LAYERS = "prime_rl.trainer.models.layers"
_SKYRL = "skyrl.backends.skyrl_train"
SKYRL_HEADS = f"{_SKYRL}.distributed.megatron.model_utils"
MODULES: dict[str, tuple[Any, ...]] = {
    f"{_LAYERS}.lm_head": (FusedOutputLinear, PrimeLmOutput),
    f"{_LAYERS}.lm_head_gemma": (GemmaFusedOutputLinear,),
    "prime_rl.trainer.rl.loss": (LossOutputs,),
    "nemo_rl.distributed.model_utils": (from_parallel_hidden_states_to_logprobs,),
    SKYRL_HEADS: (
        _fused_lm_head_logprob_apply, _fused_vocab_parallel_entropy_from_hidden,
    ),
    f"{_SKYRL}.utils.ppo_utils": (PolicyLossRegistry,),
}  # fmt: skip
VERSIONS = {"prime-rl": "0.8.0", "nemo-rl": "0.6.0+7ea279a", "skyrl": "0.3.0"}


def put_stand_ins(patch: pytest.MonkeyPatch) -> None:
    for name, contents in MODULES.items():
        module = ModuleType(name)
        for each in contents:
            each.__module__ = name
            setattr(module, each.__name__, each)
        patch.setitem(sys.modules, name, module)
    PolicyLossRegistry.functions = {}
    patch.setattr(
        "grpo_kernels.common.hosts.version", lambda name: VERSIONS.get(name) or version(name)
    )


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    put_stand_ins(monkeypatch)


def problem(dtype: torch.dtype = FP32) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states (B, S, D), a weight and ids (B, S)."""
    g = torch.Generator().manual_seed(6)
    hidden = torch.randn(B, S, D, generator=g).bfloat16().to(dtype).requires_grad_()
    weight = (torch.randn(V, D, generator=g) * 0.4).bfloat16().to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, V, (B, S), generator=g)


def seeded(*shape: int, seed: int = 7) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# prime-rl: its heads


def make_head(module: str, dtype: torch.dtype = FP32, bias: bool = False) -> Any:
    kind = {"lm_head": FusedOutputLinear, "lm_head_gemma": GemmaFusedOutputLinear}[module]
    head = kind(D, V, bias=bias)
    head.weight = nn.Parameter(problem(dtype)[1].detach())
    return head


def prime_rl_step(with_ours: bool, module: str, dtype: torch.dtype = FP32) -> tuple[Tensor, ...]:
    head, (hidden, _, ids) = make_head(module, dtype), problem(dtype)
    with prime_rl.enabled() if with_ours else nullcontext():
        out = head(hidden, ids, temperature=seeded(B, S).abs() + 0.5)
    loss = (out["logprobs"] * seeded(B, S, seed=8)).sum()
    assert out["logprobs"].dtype == FP32
    gradients = torch.autograd.grad(loss, [hidden, head.weight])
    return out["logprobs"].detach(), out["entropy"].detach(), *gradients


def call_head(*inputs: Any) -> None:
    with prime_rl.enabled():
        make_head("lm_head")(*inputs)


def call_prime_rl(**settings: Any) -> None:
    prime_rl.dapo(make_sample(ref_logprobs=None), **settings)


test_prime_rl = contract_of(
    Adapter(
        package="prime_rl",
        step=prime_rl_step,
        settings={name: {"module": name} for name in ("lm_head", "lm_head_gemma")},
        default={"dtype": BF16},
        switch=prime_rl.SWITCH,
        refused={
            r"labels: expected a tensor of shape \(b, s\), got N": partial(call_head, seeded(1, D)),
            "temperature: expected a tensor": partial(call_head, seeded(1, D), torch.tensor([1])),
            "temperature: expected none, since": partial(call_prime_rl, temperature=0.7),
            "entropy_coef: expected none, since": partial(call_prime_rl, entropy_coef=0.1),
            "rollout_correction_mode: expected none, since": partial(
                call_prime_rl, rollout_correction_mode="token_mask"
            ),
            "epsilonn: expected a setting of dapo": partial(call_prime_rl, epsilonn=0.1),
            "ref_logprobs: expected the reference's": partial(call_prime_rl, beta=0.1),
            "loss_type: expected one of": partial(prime_rl.loss_fn, "grpo"),
            "has no attribute 'ppo'": lambda: prime_rl.ppo,
        },
    )
)


def test_bias_and_a_gradient_of_the_entropy() -> None:
    """prime-rl's heads have neither."""
    head, (hidden, _, ids) = make_head("lm_head", bias=True), problem()
    with prime_rl.enabled():
        out = head(hidden, ids, torch.full((B, S), 0.7))
    logp = ((hidden @ head.weight.t() + head.bias) / 0.7).log_softmax(-1)
    torch.testing.assert_close(out["logprobs"], logp.gather(-1, ids[..., None]).squeeze(-1))
    entropies = out["entropy"], -(logp.exp() * logp).sum(-1)
    found, right = (
        torch.autograd.grad(x.square().sum(), [hidden, head.weight, head.bias]) for x in entropies
    )
    torch.testing.assert_close(found, right)


# prime-rl: its losses


def make_sample(number: int = 0, **more: Any) -> Any:
    """Return the inputs of a loss: the tokens of one sample; of number 1 none counts."""
    length = (5, 1, 9)[number]
    own, old, ref, advantages, drawn = seeded(5, length, seed=number)
    mask = (drawn < 0.5) & torch.tensor(number != 1)
    mask[:3] |= number != 1
    inputs = {
        "trainer_logprobs": (own * 0.3 - 2).requires_grad_(),
        "inference_logprobs": own * 0.3 - 2 + 0.3 * old,
        "ref_logprobs": own * 0.3 - 2 + 0.3 * ref,
        "advantages": advantages,
        "loss_mask": mask,
        "loss_weights": None,
    }
    return SimpleNamespace(**inputs | more)


def with_gradient(loss: Tensor, leaf: Tensor) -> tuple[Tensor, Tensor]:
    return loss.detach(), torch.autograd.grad(loss, leaf, materialize_grads=True)[0]


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("loss_type", ["dapo", "cispo", "vespo", "pg", "ipo", "cppo"])
def test_losses_of_prime_rl(loss_type: str, number: int) -> None:
    settings: dict[str, Any] = {"beta": 0.1}
    if loss_type == "cispo":
        settings["epsilon_high"] = 5.0
    if loss_type == "dapo":
        settings |= {"importance_sampling_level": "sequence", "epsilon": 0.01}
    inputs = make_sample(number)
    outputs = getattr(prime_rl, loss_type)(inputs, **settings)
    batch = TokenBatch.from_padded(
        torch.zeros_like(inputs.loss_mask, dtype=torch.int64)[None], inputs.advantages[None],
        inputs.loss_mask[None], old_logprobs=inputs.inference_logprobs[None],
        ref_logprobs=inputs.ref_logprobs[None], num_items_in_batch=torch.tensor(1.0),
    )  # fmt: skip
    config = LossConfig(
        loss_type=loss_type, rollout_correction_mode=None, bypass_mode=False, **settings
    )
    leaf = inputs.trainer_logprobs
    right = with_gradient(policy_loss(leaf[inputs.loss_mask], batch, config)[0], leaf)
    torch.testing.assert_close(with_gradient(outputs.loss, leaf), right)
    assert all(value.isfinite() for value in outputs.metrics.values())
    assert bool(outputs.metrics) == ("kl" in outputs.metrics) == (number != 1)


def test_weights_of_tokens_of_prime_rl() -> None:
    """Weight the losses of single tokens."""
    weights = torch.linspace(0.5, 2, 9)
    inputs = make_sample(2, loss_weights=weights)
    total = torch.zeros(())
    for token in inputs.loss_mask.nonzero():
        only = {**vars(inputs), "loss_mask": torch.arange(9) == token, "loss_weights": None}
        total = total + weights[token] * prime_rl.dapo(SimpleNamespace(**only), beta=0.1).loss
    found = with_gradient(prime_rl.dapo(inputs, beta=0.1).loss, inputs.trainer_logprobs)
    torch.testing.assert_close(found, with_gradient(total.squeeze(), inputs.trainer_logprobs))


# SkyRL: its losses

T, LONGEST = 6, 9
PROMPTS = [(0, 2), (2, 4)]  # the sequences of each; one of them is empty
REDUCTIONS = {
    **dict.fromkeys(("dapo", "cispo", "vespo", "pg", "dppo_tv", "fipo"), "token_mean"),
    **dict.fromkeys(("grpo", "gspo", "sapo", "gmpo"), "sequence_mean"),
    "bnpo": "token_mean_legacy",
    "dr_grpo": "seq_mean_token_sum_norm",
}
AGGREGATIONS = {
    "window_token_mean": "token_mean",
    "token_mean": "token_mean_legacy",
    "sequence_mean": "sequence_mean",
    "fixed_length": "seq_mean_token_sum_norm",
    "prompt_mean": "prompt_mean",
}


def skyrl_inputs(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    own, old, rollout = seeded(3, 4, T).to(dtype)
    mask = torch.ones(4, T, dtype=dtype)
    mask[0, 4:] = mask[1, 1:3] = mask[3] = 0
    return {
        "log_probs": (own - 2).requires_grad_(),
        "old_log_probs": own - 2 + 0.3 * old,
        "advantages": seeded(4, 1, seed=8).to(dtype).expand(4, T),
        "loss_mask": mask,
        "rollout_logprobs": own - 2 + 0.3 * rollout,
    }


def algorithm(loss_reduction: str, **corrections: Any) -> SimpleNamespace:
    settings = SimpleNamespace(**dict.fromkeys(skyrl._CORRECTIONS) | corrections)
    return SimpleNamespace(loss_reduction=loss_reduction, off_policy_correction=settings)


def check_skyrl_loss(reduction: str, loss_type: str, **settings: Any) -> None:
    inputs = skyrl_inputs()
    mask, leaf = inputs["loss_mask"], inputs["log_probs"]
    tokens_of_prompt = torch.cat([mask[a:b].sum().expand(b - a) for a, b in PROMPTS])
    constant = {"max_completion_length": LONGEST, "rollout_correction_mode": None}
    config = LossConfig(loss_type=loss_type, **constant | settings)
    batch = TokenBatch.from_padded(
        torch.zeros(4, T, dtype=torch.int64), inputs["advantages"], mask,
        old_logprobs=inputs["old_log_probs"], rollout_logprobs=inputs["rollout_logprobs"],
        prompt_tokens=tokens_of_prompt.long(),
    )  # fmt: skip
    right = with_gradient(policy_loss(leaf[mask == 1], batch, config)[0], leaf)
    # as SkyRL's documentation of loss_reduction says
    divisors = {
        "token_mean": mask.sum(),
        "token_mean_legacy": mask.sum(),  # of one micro-batch
        "sequence_mean": 4 * mask.sum(1, keepdim=True).clamp(min=1),
        "seq_mean_token_sum_norm": torch.tensor(4 * LONGEST),
        "prompt_mean": len(PROMPTS) * tokens_of_prompt[:, None],
    }
    inputs["advantages"] = inputs["advantages"] / divisors[reduction]
    PolicyLossRegistry.functions = {}
    function = PolicyLossRegistry.functions[skyrl.register_policy_loss(loss_type, **settings)]
    loss, metrics = function(**inputs, config=algorithm(reduction))
    torch.testing.assert_close(with_gradient(loss, leaf), right)
    assert all(isinstance(value, float) for value in metrics.values()) and "ratio/max" in metrics
    # of dppo_tv the ratio is that weight
    weighs = config.rollout_correction_mode is not None and loss_type != "dppo_tv"
    assert ("sampling/importance_sampling_ratio/max" in metrics) == weighs


@pytest.mark.parametrize("loss_type", REDUCTIONS)
def test_losses_of_skyrl(loss_type: str) -> None:
    settings = {"epsilon_high": 5.0} if loss_type == "cispo" else {}
    for correction in ({}, {"rollout_correction_mode": "token_truncate"}):
        check_skyrl_loss(REDUCTIONS[loss_type], loss_type, **settings, **correction)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_aggregations_of_skyrl(aggregation: str) -> None:
    check_skyrl_loss(AGGREGATIONS[aggregation], "luspo", loss_aggregation=aggregation)


def test_a_loss_of_skyrl_travels_and_is_rejected() -> None:
    """SkyRL sends it to its workers."""
    register = skyrl.register_policy_loss
    function = PolicyLossRegistry.functions[register("dapo", epsilon=0.1)]
    call = partial(function, **skyrl_inputs(FP32))
    again = pickle.loads(pickle.dumps(function))
    config = algorithm("token_mean")
    assert torch.equal(again(**skyrl_inputs(FP32), config=config)[0], call(config=config)[0])
    corrected = algorithm("token_mean", tis_ratio_type="token")
    for message, wrong in {
        "loss_aggregation: expected one of": partial(register, "luspo"),
        "loss_aggregation: expected one of .*prompt_mean": partial(
            register, "dapo", loss_aggregation="sequence_sum"
        ),
        "beta: expected none, since": partial(register, "dapo", beta=0.1),
        "epsilonn: expected a setting of dapo": partial(register, "dapo", epsilonn=0.1),
        "already registered": partial(register, "dapo"),
        "loss_reduction: expected 'token_mean' for dapo": partial(
            call, config=algorithm("sequence_mean")
        ),
        "off_policy_correction.tis_ratio_type: expected None": partial(call, config=corrected),
    }.items():
        with pytest.raises(ValueError, match=message):
            wrong()


# NeMo-RL and SkyRL: heads on Megatron's ranks, each with a share of the vocabulary


def by_logits(dtype: torch.dtype = FP32, temperature: float = 1.0) -> tuple[Tensor, ...]:
    hidden, weight, ids = problem(dtype)
    logprobs = scores(hidden[:, :-1], weight, ids[:, 1:], temperature)[0]
    gradients = torch.autograd.grad((logprobs * seeded(B, S - 1)).sum(), [hidden, weight])
    return logprobs.detach(), *gradients


def share(x: Tensor, group: Any) -> Tensor:
    """Return this rank's rows, as a leaf."""
    rows = x.detach().chunk(dist.get_world_size(group))[dist.get_rank(group)]
    return rows.clone().requires_grad_()


def joined(rows: Tensor, group: Any) -> Tensor:
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, rows.detach(), group)
    return torch.cat(parts)


def options(group: Any) -> dict[str, Any]:
    rank, rows = dist.get_rank(group), V // dist.get_world_size(group)
    bounds = {"vocab_start_index": rank * rows, "vocab_end_index": (rank + 1) * rows}
    return {**bounds, "tp_group": group, "chunk_size": 3}


def call_nemo_rl(hidden: Tensor, weight: Tensor, ids: Tensor, group: Any, **more: Any) -> Tensor:
    module = sys.modules["nemo_rl.distributed.model_utils"]
    with nemo_rl.enabled():
        function = module.from_parallel_hidden_states_to_logprobs
        return function(hidden, weight, False, ids, **options(group) | more)


def nemo_rl_step(with_ours: bool, group: Any, split: bool, dtype: torch.dtype = FP32) -> Any:
    if not with_ours:
        return by_logits(dtype)
    hidden, weight, ids = problem(dtype)
    hidden = hidden.detach().transpose(0, 1).contiguous()  # (S, B, D)
    hidden = share(hidden, group) if split else hidden.requires_grad_()
    weight = share(weight, group)
    logprobs = call_nemo_rl(hidden, weight, ids, group)
    dhidden, dweight = torch.autograd.grad((logprobs * seeded(B, S - 1)).sum(), [hidden, weight])
    dhidden = joined(dhidden, group) if split else dhidden
    return logprobs.detach(), dhidden.transpose(0, 1), joined(dweight, group)


def check_nemo_rl_in_place(group: Any) -> None:
    """Divide the result in place, as NeMo-RL does, also that of one sequence."""
    hidden, weight, ids = problem()
    hidden = hidden[:1].detach().transpose(0, 1).requires_grad_()
    once, out = (call_nemo_rl(hidden, share(weight, group), ids[:1], group) for _ in range(2))
    halved = torch.autograd.grad(out.div_(2).sum(), hidden)[0]
    torch.testing.assert_close(halved, torch.autograd.grad(once.sum(), hidden)[0] / 2)


def reject_nemo_rl(rows: int = S, **more: Any) -> None:
    hidden, weight, ids = problem()
    group = dist.group.WORLD
    call_nemo_rl(hidden.transpose(0, 1)[:rows], share(weight, group), ids, group, **more)


def call_skyrl(hidden: Tensor, weight: Tensor, ids: Tensor, group: Any) -> Tensor:
    with skyrl.enabled():
        function = sys.modules[SKYRL_HEADS]._fused_lm_head_logprob_apply
        return function("torch", hidden, weight, ids, inference_only=False, **options(group))


def skyrl_step(
    with_ours: bool, group: Any, temperature: float = 1.0, dtype: torch.dtype = FP32
) -> Any:
    if not with_ours:
        return by_logits(dtype, temperature)
    hidden, weight, ids = problem(dtype)
    weight = share(weight, group)
    logprobs = call_skyrl(hidden, weight / temperature, ids.roll(-1, 1), group)[:, :-1]
    dhidden, dweight = torch.autograd.grad((logprobs * seeded(B, S - 1)).sum(), [hidden, weight])
    dhidden = dhidden.float()
    dist.all_reduce(dhidden, group=group)  # as SkyRL does, where the sequence is split
    return logprobs.detach(), dhidden.to(dtype), joined(dweight, group)


def check_skyrl_scores(group: Any) -> None:
    """Score bf16 hidden states at an fp32 weight, and the entropies."""
    hidden, weight, ids = problem()
    half, own = problem(BF16)[0], share(weight, group)
    with skyrl.enabled():
        function = sys.modules[SKYRL_HEADS]._fused_vocab_parallel_entropy_from_hidden
        entropy = function(hidden, own, group, 3, 0.5)
    mixed = call_skyrl(half, own, ids, group)
    torch.testing.assert_close(entropy, scores(hidden, weight, ids, 0.5)[1])
    torch.testing.assert_close(mixed, scores(hidden, weight, ids)[0])
    mixed.sum().backward()
    assert half.grad is not None and half.grad.dtype == BF16


def megatron_cases() -> dict[str, Callable[[], None]]:
    put_stand_ins(pytest.MonkeyPatch())  # for the life of this process
    groups = {"one rank": dist.new_subgroups(1)[0], "two ranks": dist.group.WORLD}
    start = options(dist.group.WORLD)["vocab_start_index"]
    adapters = {
        "NeMo-RL": Adapter(
            package="nemo_rl",
            step=nemo_rl_step,
            settings={
                f"{name}, split {split}": {"group": group, "split": split}
                for name, group in groups.items()
                for split in (True, False)
            },
            default={"dtype": BF16},
            switch=nemo_rl.SWITCH,
            refused={
                "vocab_start_index: expected": partial(reject_nemo_rl, vocab_start_index=start + 1),
                "vocab_end_index: expected": partial(reject_nemo_rl, vocab_end_index=start),
                "tp_group: expected a process group": partial(reject_nemo_rl, tp_group=None),
                "tensor_parallel_hidden_states: expected 8 rows": partial(reject_nemo_rl, 3),
            },
        ),
        "SkyRL": Adapter(
            package="skyrl",
            step=skyrl_step,
            settings={
                f"{name}, temperature {temperature}": {"group": group, "temperature": temperature}
                for name, group in groups.items()
                for temperature in (1.0, 0.5)
            },
            default={"dtype": BF16},
            switch=skyrl.SWITCH,
        ),
    }
    checks: dict[str, Callable[[], None]] = {}
    for host, adapter in adapters.items():
        checks |= {f"{host}, {name}": case for name, case in cases(adapter).items()}
    for name, group in groups.items():
        checks[f"NeMo-RL, in place, {name}"] = partial(check_nemo_rl_in_place, group)
        checks[f"SkyRL, scores, {name}"] = partial(check_skyrl_scores, group)
    return checks


@pytest.mark.slow
def test_heads_on_megatron_ranks() -> None:
    assert_passed(run_on_ranks(megatron_cases, 2))
