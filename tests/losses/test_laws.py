"""Laws that every registered loss obeys; registering a loss is what puts it under test."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from grpo_kernels import LossConfig, TokenBatch, policy_loss
from grpo_kernels.losses import LOSSES, Weights, run_stage, static_weights, token_inputs
from grpo_kernels.losses.ratios import RATIO_LEVELS
from grpo_kernels.losses.surrogates import Cispo, Clip, Pg, Sapo, Topr
from grpo_kernels.testing import make_config

# at ratio 1 the gradient is -w A: these surrogates start out as plain policy gradient
UNIT_SLOPE = (Clip, Cispo, Pg, Sapo, Topr)


def variants() -> list[tuple[str, dict[str, object]]]:
    options: list[dict[str, object]] = [
        {},
        {"beta": 0.1},
        {"beta": 0.1, "use_bias_correction_kl": False, "kl_estimator": "k2"},
        {"off_policy_mask_threshold": 0.05, "entropy_coef": 0.02},
        {"top_entropy_quantile": 0.5, "entropy_coef": 0.02},
        {"delta": 1.5, "dual_clip": 3.0},
        {"rollout_correction_mode": "token_mask", "rollout_correction_max": 1.1},
    ]
    return [
        (name, option)
        for name in LOSSES
        for option in options
        if "delta" not in option or LOSSES[name].surrogate is Clip
    ]


LENGTHS = (5, 0, 7, 1)
LOGPROBS = ("old_logprobs", "ref_logprobs", "rollout_logprobs")


def make_batch(
    delta: float = 0.3, seed: int = 0, lengths: tuple[int, ...] = LENGTHS
) -> tuple[Tensor, Tensor, TokenBatch]:
    """Return fp64 log-probabilities and entropies (T,), and a batch drifted by about ``delta``."""
    g = torch.Generator().manual_seed(seed)
    total = sum(lengths)

    def normal(scale: float) -> Tensor:
        return torch.randn(total, generator=g, dtype=torch.float64) * scale

    logprobs = -torch.rand(total, generator=g, dtype=torch.float64) * 3 - 0.01
    cu = torch.tensor([0, *lengths]).cumsum(0)
    batch = TokenBatch.from_packed(
        torch.randint(0, 9, (total,), generator=g),
        torch.randn(len(lengths), generator=g, dtype=torch.float64),
        cu,
        old_logprobs=logprobs + normal(delta),
        ref_logprobs=logprobs + normal(delta),
        rollout_logprobs=logprobs + normal(delta),
        num_items_in_batch=23.0,
    )
    entropy = torch.rand(total, generator=g, dtype=torch.float64)
    return logprobs.requires_grad_(), entropy.requires_grad_(), batch


class FrozenDetach:
    """Calls a function with every ``detach()`` in it answered as in the first call.

    Detached factors (gates, clipped weights) are constants of the gradient; held fixed, the loss
    is a function whose numerical derivative must equal autograd's.
    """

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function
        self.answers: list[Tensor] = []
        self.recorded = False

    def __call__(self, *args: Tensor) -> Tensor:
        original, replay = Tensor.detach, iter(self.answers)

        def detach(tensor: Tensor) -> Tensor:
            if self.recorded:
                return next(replay)
            self.answers.append(original(tensor).clone())
            return self.answers[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tensor, "detach", detach)
            result = self.function(*args)
        self.recorded = True
        return result


@pytest.mark.parametrize("name,option", variants())
def test_gradcheck(name: str, option: dict[str, object]) -> None:
    logprobs, entropy, batch = make_batch()
    config = make_config(name, **option)
    loss = FrozenDetach(lambda lp, h: policy_loss(lp, batch, config, h).loss)
    loss(logprobs, entropy)
    assert torch.autograd.gradcheck(loss, (logprobs, entropy), eps=1e-7)


@pytest.mark.parametrize("name", [n for n in LOSSES if LOSSES[n].surrogate in UNIT_SLOPE])
def test_gradient_at_ratio_one_is_minus_weighted_advantage(name: str) -> None:
    logprobs, _, batch = make_batch()
    on_policy = replace(batch, **dict.fromkeys(LOGPROBS))
    config = make_config(name)
    (gradient,) = torch.autograd.grad(policy_loss(logprobs, on_policy, config).loss, logprobs)
    expected = -static_weights(on_policy, config).policy * batch.advantages
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("level", [None, *RATIO_LEVELS])
@pytest.mark.parametrize("drift", (-100.0, 100.0))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_finite_at_huge_log_ratios(
    name: str, level: str | None, drift: float, dtype: torch.dtype
) -> None:
    logprobs, entropy, batch = make_batch()
    logprobs = (logprobs.detach().to(dtype) - 101).requires_grad_()
    near = logprobs.detach()
    far = replace(
        batch, old_logprobs=near - drift, ref_logprobs=near + drift, rollout_logprobs=near - drift
    )
    try:
        config = make_config(name, beta=0.1, importance_sampling_level=level)
    except ValueError as error:
        assert "importance_sampling_level" in str(error)  # noqa: PT017
        return
    loss = policy_loss(logprobs, far, config, entropy.detach().to(dtype)).loss
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert loss.isfinite()
    assert gradient.isfinite().all()


def permuted(
    batch: TokenBatch, order: list[int], *vectors: Tensor
) -> tuple[TokenBatch, list[Tensor], Tensor]:
    """Return the batch with its sequences in another order, and the token index that did it."""
    offsets = batch.cu_seqlens.tolist()
    pieces = [torch.arange(offsets[i], offsets[i + 1]) for i in order]
    index = torch.cat(pieces)
    logprobs = {name: getattr(batch, name)[index] for name in LOGPROBS}
    lengths = [batch.lengths[i] for i in order]
    again = TokenBatch.from_packed(
        batch.target[index],
        batch.advantages[index],
        torch.tensor([0, *lengths]).cumsum(0),
        num_items_in_batch=batch.num_items_in_batch,
        **logprobs,
    )
    return again, [vector.detach()[index] for vector in vectors], index


@pytest.mark.parametrize("name,option", variants())
def test_order_of_sequences_changes_nothing(name: str, option: dict[str, object]) -> None:
    logprobs, entropy, batch = make_batch()
    config = make_config(name, **option)
    loss = policy_loss(logprobs, batch, config, entropy).loss
    (gradient,) = torch.autograd.grad(loss, logprobs)
    other, (lp, h), index = permuted(batch, [2, 3, 1, 0], logprobs, entropy)
    lp.requires_grad_()
    loss_other = policy_loss(lp, other, config, h).loss
    torch.testing.assert_close(loss_other, loss)
    (gradient_other,) = torch.autograd.grad(loss_other, lp)
    torch.testing.assert_close(gradient_other, gradient[index])


@pytest.mark.parametrize("name,option", variants())
def test_chunks_at_sequence_ends_add_up(name: str, option: dict[str, object]) -> None:
    logprobs, entropy, batch = make_batch()
    config = make_config(name, **option)
    scope = config.scope(has_rollout=True)
    loss = policy_loss(logprobs, batch, config, entropy).loss
    (expected,) = torch.autograd.grad(loss, logprobs)
    cuts = {"token": [0, 3, 4, 9, 13], "sequence": [0, 5, 12, 13], "batch": [0, 13]}[scope]
    weights = static_weights(batch, config)
    got = []
    for start, stop in itertools.pairwise(cuts):
        part = batch.narrow(start, stop)
        part_weights = Weights(*(w if w is None else w[start:stop] for w in weights))
        x = token_inputs(logprobs[start:stop], entropy[start:stop], part, part_weights)
        got.append(run_stage(x, part.segments, config).dlogp)
    torch.testing.assert_close(torch.cat(got), expected)


@pytest.mark.parametrize("name,option", variants())
def test_masked_tokens_do_not_matter(name: str, option: dict[str, object]) -> None:
    config = make_config(name, **option)
    g = torch.Generator().manual_seed(3)
    shape = (3, 6)
    mask = torch.rand(shape, generator=g) > 0.4
    values = {
        key: -torch.rand(shape, generator=g, dtype=torch.float64) for key in ("lp", *LOGPROBS, "h")
    }
    advantages = torch.randn(3, generator=g)
    results = []
    for junk in (0.0, float("nan")):
        padded = {key: torch.where(mask, value, junk) for key, value in values.items()}
        target = torch.where(mask, 3, -5 if junk else 0)
        batch = TokenBatch.from_padded(
            target, advantages, mask, **{key: padded[key] for key in LOGPROBS}
        )
        lp = padded["lp"][mask].requires_grad_()
        out = policy_loss(lp, batch, config, padded["h"][mask])
        results.append((out.loss, torch.autograd.grad(out.loss, lp)[0]))
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize("name,option", variants())
def test_all_masked_batch_is_zero_with_a_live_graph(name: str, option: dict[str, object]) -> None:
    logprobs = torch.zeros(0, dtype=torch.float64, requires_grad=True)
    empty = torch.zeros(2, 4)
    batch = TokenBatch.from_padded(
        empty.long(), torch.ones(2), empty, **dict.fromkeys(LOGPROBS, empty)
    )
    out = policy_loss(logprobs, batch, make_config(name, **option), logprobs.detach())
    assert out.loss.item() == 0
    out.loss.backward()
    assert logprobs.grad is not None
    for value in out.metrics.values():  # nothing to report is NaN, never an error
        assert value.isnan() or value.isfinite()


@pytest.mark.parametrize("name", LOSSES)
def test_gradient_accumulation_adds_up_to_one_batch(name: str) -> None:
    # two micro-batches of one sequence each are the batch of both
    logprobs, entropy, batch = make_batch(lengths=(4, 4))
    config = make_config(name, entropy_coef=0.01)
    whole = policy_loss(logprobs, batch, config, entropy).loss
    parts = []
    for start, stop in ((0, 4), (4, 8)):
        piece = batch.narrow(start, stop)
        micro = TokenBatch.from_packed(
            piece.target, piece.advantages, torch.tensor([0, 4]),
            num_items_in_batch=23.0, gradient_accumulation_steps=2,
            **{name: getattr(piece, name) for name in LOGPROBS},
        )  # fmt: skip
        parts.append(policy_loss(logprobs[start:stop], micro, config, entropy[start:stop]).loss)
    torch.testing.assert_close(sum(parts), whole)


def test_every_loss_names_its_source() -> None:
    for name, loss in LOSSES.items():
        assert loss.source, name


def test_cispo_warns_below_one() -> None:
    with pytest.warns(UserWarning, match="raw upper bound"):
        LossConfig(loss_type="cispo")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LossConfig(loss_type="cispo", epsilon_high=5.0)
