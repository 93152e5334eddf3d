"""verl's own engine, model forwards and losses score and train alike on its heads and on ours."""

from __future__ import annotations

import copy
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from grpo_kernels import LossConfig, TokenBatch, policy_loss
from grpo_kernels.integrations import verl as ours
from tests.integrations.contract import Adapter, Run, assert_passed, contract_of
from tests.integrations.hosts import need
from tests.parity.canned import tiny_model
from tests.sharded.ranks import run_on_ranks

need("verl")

from tensordict import TensorDict
from transformers import Qwen2ForCausalLM
from verl.models.transformers import monkey_patch
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, get_policy_loss_fn
from verl.trainer.ppo.rollout_corr_helper import (
    SUPPORTED_ROLLOUT_RS_OPTIONS,
    compute_rollout_rejection_mask,
)
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.dataset_utils import DatasetPadMode
from verl.utils.experimental.torch_functional import FusedLinearForPPO
from verl.utils.kernel import linear_cross_entropy as kernel
from verl.workers.config import FSDPActorConfig
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.utils.losses import ppo_loss

pytestmark = pytest.mark.filterwarnings("ignore:.*engine is not available")
STEPS = 5
FORWARD = Qwen2ForCausalLM.forward  # verl's functions change the class
PROMPTS, RESPONSES = (3, 1, 4, 2), (5, 7, 2, 6)


@pytest.fixture(autouse=True)
def _left_as_it_was() -> Iterator[None]:
    losses = dict(POLICY_LOSS_REGISTRY)
    yield
    ours.disable()
    Qwen2ForCausalLM.forward = FORWARD
    POLICY_LOSS_REGISTRY.clear()
    POLICY_LOSS_REGISTRY.update(losses)


def nested(rows: Any) -> Tensor:
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def micro_batch(seed: int, temperature: Any, packed: bool, fused: bool) -> TensorDict:
    g = torch.Generator().manual_seed(seed)
    lengths = [p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    ids = [torch.randint(2, 197, (n,), generator=g) for n in lengths]
    responses = [torch.randn(n, generator=g) for n in RESPONSES]
    tensors = {
        "input_ids": nested(ids),
        "position_ids": nested(torch.arange(n) for n in lengths),
        "prompts": nested(x[:p] for x, p in zip(ids, PROMPTS, strict=True)),
        "responses": nested(x[p:] for x, p in zip(ids, PROMPTS, strict=True)),
        "response_mask": nested((x > -1.5).long() for x in responses),
        "old_log_probs": nested(x - 4 for x in responses),
        "ref_log_prob": nested(0.5 * x - 4 for x in responses),
        "advantages": nested(x.new_full(x.shape, x[0].item()) for x in responses),
    }
    data = TensorDict(tensors, batch_size=[len(lengths)])
    if isinstance(temperature, Tensor):
        data["temperature"] = temperature
    else:
        tu.assign_non_tensor(data, temperature=temperature)
    tokens = int(data["response_mask"].values().sum())
    tu.assign_non_tensor(
        data, use_remove_padding=packed, use_fused_kernels=fused, calculate_entropy=True,
        pad_mode=DatasetPadMode.NO_PADDING, dp_size=1, batch_num_tokens=tokens,
        global_batch_size=len(lengths),
    )  # fmt: skip
    return data


def engine() -> Any:
    made = FSDPEngineWithLMHead.__new__(FSDPEngineWithLMHead)
    vars(made).update(pad_to_length=False, use_ulysses_sp=False)
    config: Any = type("Config", (), {})()
    config.entropy_checkpointing = config.entropy_from_logits_with_chunking = False
    made.engine_config = config
    from verl.utils.torch_functional import entropy_from_logits

    made.compute_entropy_from_logits = entropy_from_logits
    return made


def actor(**more: Any) -> FSDPActorConfig:
    return FSDPActorConfig(
        strategy="fsdp", rollout_n=2, ppo_micro_batch_size_per_gpu=4, use_dynamic_bsz=False,
        entropy_coeff=0.1, use_kl_loss=True, kl_loss_coef=0.1, **more,
    )  # fmt: skip


def step(
    with_ours: bool,
    *,
    temperature: Any = 0.8,
    packed: bool = True,
    backend: str = "torch",
    theirs: str | None = "torch",  # None: full logits
    bf16: bool = False,
) -> Run:
    """Train as verl's FSDP engine does on one process."""
    with ours.enabled() if with_ours else nullcontext():
        return train(temperature, packed, backend if with_ours else theirs, bf16)


def train(temperature: Any, packed: bool, backend: str | None, bf16: bool) -> Run:
    Qwen2ForCausalLM.forward = FORWARD
    model, host, config = tiny_model(), engine(), actor()
    model.config._attn_implementation = "eager"
    if backend is not None:
        monkey_patch.patch_forward_with_backends(model, True, backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    log = []
    for number in range(STEPS):
        data = micro_batch(number, temperature, packed, backend is not None)
        inputs, kept = host.prepare_model_inputs(data)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            output = model(**inputs, use_cache=False)
            found = host.prepare_model_outputs(output, kept, data, None)
            loss, metrics = ppo_loss(config, found, data)
        loss.backward()
        log.append({"loss": loss.item(), **{n: _number(x) for n, x in metrics.items()}})
        log[-1]["grad_norm"] = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9))
        optimizer.step()
        optimizer.zero_grad()
    return Run(log, copy.deepcopy(model.state_dict()))


def _number(metric: Any) -> float:
    return float(metric.aggregate() if hasattr(metric, "aggregate") else metric)


PER_SAMPLE = torch.tensor([0.7, 1.0, 1.3, 0.9])  # verl's fused heads refuse it, not full logits


def call_own(loss_type: str, mode: str = "token-mean", scale: Any = None, **settings: Any) -> Any:
    """Call a loss of ours by verl's registry."""
    ours.register_policy_loss("own", LossConfig(loss_type=loss_type, **settings))
    config, ones = actor(), torch.ones(1, 1)
    config.global_batch_info["loss_scale_factor"] = scale
    return get_policy_loss_fn("own")(ones, ones, ones, ones, mode, config)


@ours.enabled()
def patch_for_another_backend() -> None:
    monkey_patch.patch_forward_with_backends(tiny_model(), True, "cce")


@ours.enabled()
def reduce() -> None:
    kernel.linear_cross_entropy(*[torch.ones(1, 1)] * 3, 1.0, "mean")


ADAPTER = Adapter(
    package="verl",
    step=step,
    settings={
        f"{name}, {'packed' if packed else 'padded'}": {"packed": packed, **more}
        for packed in (True, False)
        for name, more in {
            "torch": {},
            "liger": {"backend": "liger"},
            "a temperature per sample": {"temperature": PER_SAMPLE, "theirs": None},
        }.items()
    },
    default={"bf16": True},
    switch=ours.SWITCH,
    refused={
        "impl_backend: expected one of torch, liger, triton": patch_for_another_backend,
        "reduction: expected 'none', got 'mean'": reduce,
        "name: expected a name that verl does not use yet": partial(
            ours.register_policy_loss, "vanilla", LossConfig()
        ),
        "beta: expected 0": partial(call_own, "dapo", beta=0.1),
        "entropy_coef: expected 0": partial(call_own, "dapo", entropy_coef=0.1),
        "top_entropy_quantile: expected 1": partial(call_own, "dapo", top_entropy_quantile=0.5),
        "loss_agg_mode: expected 'seq-mean-token-mean'": partial(call_own, "grpo"),
        "loss_scale_factor: expected None or max_completion_length": partial(
            call_own, "dr_grpo", "seq-mean-token-sum-norm", scale=9, max_completion_length=8
        ),
    },
)
test_contract = contract_of(ADAPTER)


def test_softcap_and_bias() -> None:
    """verl's fused heads pass by both."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=61, hidden_size=16, intermediate_size=16, num_hidden_layers=1, head_dim=8,
        num_attention_heads=2, num_key_value_heads=1, final_logit_softcapping=2.0,
    )  # fmt: skip
    model = Gemma2ForCausalLM(config)
    model.lm_head = torch.nn.Linear(16, 61, bias=True)
    ids = torch.randint(2, 61, (2, 5))
    exact = (model(ids).logits / 0.7).log_softmax(-1)
    exact = exact.gather(-1, ids.roll(-1, 1)[..., None]).squeeze(-1)
    forward = Gemma2ForCausalLM.forward
    with ours.enabled():
        monkey_patch.patch_forward_with_backends(model, True, "triton")
        found = model(ids, temperature=0.7, labels=ids, return_dict=True).log_probs
    assert Gemma2ForCausalLM.forward is forward
    torch.testing.assert_close(found, exact)
    weights = [model.lm_head.weight, model.lm_head.bias]
    gradients = (torch.autograd.grad(x.sum(), weights) for x in (found, exact))
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)


def _outputs(function: Any, hidden: Tensor, weight: Tensor, ids: Tensor, *more: Any) -> Any:
    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    logp, entropy = function(*leaves, ids, *more)
    loss = (logp * torch.linspace(-1, 1, logp.numel()).view_as(logp)).sum() + 0.3 * entropy.sum()
    return logp.detach(), entropy.detach(), torch.autograd.grad(loss, leaves)


def test_linear_cross_entropy_of_a_group() -> None:
    assert_passed(run_on_ranks(_group_cases, 2))


def _group_cases() -> dict[str, Any]:
    return {"vocabulary shards": check_group}


def check_group() -> None:
    """Add up the ranks' gradients of the hidden states, as leaving sequence parallelism does."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(7, 1, 8), torch.randn(62, 8)
    ids = torch.randint(0, 62, (1, 7))
    expected = _outputs(FusedLinearForPPO().forward, hidden[:, 0], weight, ids[0], 0.7)
    rank = dist.get_rank()
    with ours.enabled():
        logp, entropy, (dhidden, dweight) = _outputs(
            kernel.linear_cross_entropy, hidden, weight.chunk(2)[rank], ids, 0.7, "none",
            dist.group.WORLD,
        )  # fmt: skip
    dist.all_reduce(dhidden)
    found = logp, entropy, (dhidden[:, 0], dweight)
    mine = (expected[2][0], expected[2][1].chunk(2)[rank])
    torch.testing.assert_close(found, (*expected[:2], mine))


CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio": 0.2, "clip_ratio_c": 1e9}


@pytest.mark.parametrize(
    ("loss_type", "mode"),
    [
        ("dapo", "token-mean"),
        ("bnpo", "token-mean"),
        ("grpo", "seq-mean-token-mean"),
        ("dr_grpo", "seq-mean-token-sum-norm"),
    ],
)
@pytest.mark.parametrize("known", [True, False], ids=["of all processes", "of the batch"])
def test_policy_losses(loss_type: str, mode: str, known: bool) -> None:
    g = torch.Generator().manual_seed(0)
    old, logp, ratio = (torch.randn(4, 6, generator=g) * scale for scale in (1, 1, 0.3))
    logp = (old + 0.3 * logp).requires_grad_()
    mask = torch.arange(6) < torch.tensor([[6], [2], [4], [0]])
    advantages = torch.randn(4, 1, generator=g).expand(4, 6)
    config = actor(**CLIP)
    if known:
        config.global_batch_info.update(dp_size=2, batch_num_tokens=31, global_batch_size=9)
    values: Any = (old, logp, advantages, mask, mode, config, ratio.exp() if known else None)
    expected, theirs = get_policy_loss_fn("vanilla")(*values)
    ours.register_policy_loss(
        "ours", LossConfig(loss_type=loss_type, epsilon_high=0.28, max_completion_length=6)
    )
    found, metrics = get_policy_loss_fn("ours")(*values)
    torch.testing.assert_close(found, expected)
    gradients = (torch.autograd.grad(loss, logp)[0] for loss in (found, expected))
    torch.testing.assert_close(*gradients)
    assert metrics["actor/clip_ratio/region_mean"] == pytest.approx(theirs["actor/pg_clipfrac"])


@pytest.mark.parametrize("option", sorted(SUPPORTED_ROLLOUT_RS_OPTIONS))
def test_modes_of_the_correction_reject_what_theirs_do(option: str) -> None:
    g = torch.Generator().manual_seed(3)
    old, drift = torch.randn(60, 5, generator=g) - 4, 0.45 * torch.randn(60, 5, generator=g)
    mask = (torch.arange(5) < torch.arange(60)[:, None] % 6).float()
    low, high = (0.9, 1.5) if option.endswith("k1") else (None, 0.1)
    threshold = high if low is None else f"{low}_{high}"
    kept, _ = compute_rollout_rejection_mask(drift, mask, option, threshold)
    assert 0 < kept.sum() < mask.sum()
    mode = option.replace("seq_", "sequence_")
    config = LossConfig(
        loss_type="pg", rollout_correction_mode=mode, rollout_correction_min=low,
        rollout_correction_max=high,
    )  # fmt: skip
    batch = TokenBatch.from_padded(
        mask.long(), torch.ones(60), mask, old_logprobs=old, rollout_logprobs=old - drift
    )
    logprobs = old.clone().requires_grad_()
    policy_loss(logprobs, batch, config).loss.backward()
    assert torch.equal(logprobs.grad != 0, kept.bool())


def test_their_own_tests() -> None:
    """Run those of its package that are about losses, with ours switched on."""
    spec = importlib.util.find_spec("verl")
    assert spec is not None
    assert spec.origin is not None
    site = Path(spec.origin).parents[1]
    files = [f"tests/trainer/ppo/test_{name}_on_cpu.py" for name in
             ("core_algos", "dynamic_policy_losses", "loss_aggregation")]  # fmt: skip
    command = ["-m", "pytest", "-q", "-c", os.devnull, "-p", "no:cacheprovider", "--rootdir", "."]
    command += ["-p", "grpo_kernels.integrations.verl_external_lib", *files]
    run = subprocess.run([sys.executable, *command], cwd=site, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout
