"""TRL: its chunked log-probabilities under its own trainer's loss."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import torch
from torch import Tensor

from benchmarks.problem import CONFIG, Problem, Result
from benchmarks.providers.base import Provider, with_gradients


def _loss(problem: Problem) -> Result:
    from trl.trainer.grpo_trainer import GRPOTrainer

    sequences, length = problem.target.shape
    inputs = {
        "prompt_ids": problem.target[:, :0],
        "prompt_mask": problem.target[:, :0],
        "completion_ids": problem.target,
        "completion_mask": torch.ones_like(problem.target),
        "advantages": problem.advantages,
        "old_per_token_logps": problem.old_logprobs,
        "num_items_in_batch": torch.tensor(float(sequences * length)),
    }
    return with_gradients(problem, GRPOTrainer._compute_loss(_trainer(problem), None, inputs))


def _logprobs(problem: Problem) -> Tensor:
    with torch.no_grad():
        return _head(problem, ())[0]


def _head(problem: Problem, outputs: tuple[str, ...]) -> tuple[Tensor, Tensor | None]:
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

    logprobs, entropy, *_ = ChunkedLogProbFunction.apply(
        problem.hidden.flatten(0, 1),
        problem.weight,
        None,
        problem.target.flatten(),
        CONFIG.temperature,
        _CHUNKED_LOGPROB_CHUNK_SIZE,
        None,
        1.0,
        outputs,
    )
    shape = problem.target.shape
    return logprobs.view(shape), entropy.view(shape) if entropy is not None else None


def _trainer(problem: Problem) -> SimpleNamespace:
    """As much of a trainer as TRL's loss reads; the model call becomes the head alone."""
    high = CONFIG.epsilon if CONFIG.epsilon_high is None else CONFIG.epsilon_high
    one_process = SimpleNamespace(
        num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x
    )
    return SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (*_head(problem, ("entropy",)), None),
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(delta=CONFIG.delta, steps_per_generation=1),
        accelerator=one_process,
        loss_type=CONFIG.loss_type,
        beta=CONFIG.beta,
        epsilon_low=CONFIG.epsilon,
        epsilon_high=high,
        importance_sampling_level="token",
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        aux_loss_enabled=False,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
    )


TRL = Provider(
    name="trl",
    note="trl.kernels.ChunkedLogProbFunction (with entropy) under GRPOTrainer._compute_loss",
    loss=_loss,
    logprobs=_logprobs,
    package="trl",
)
