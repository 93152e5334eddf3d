"""TRL: its chunked log-probabilities, and its fused head under its own trainer's loss."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from benchmarks.problem import Problem
from benchmarks.providers.base import Provider
from benchmarks.providers.baselines import loss_arguments
from benchmarks.providers.eager import Scores, run_with


def _head(problem: Problem, with_entropy: bool) -> Scores:
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

    logprobs, entropy, *_ = ChunkedLogProbFunction.apply(
        problem.hidden.flatten(0, 1),
        problem.weight,
        None,
        problem.target.flatten(),
        1.0,  # temperature
        _CHUNKED_LOGPROB_CHUNK_SIZE,
        problem.softcap,
        1.0,  # scale of the logits
        ("entropy",) if with_entropy else (),
    )
    shape = problem.target.shape
    return logprobs.view(shape), None if entropy is None else entropy.view(shape)


def _loss(problem: Problem) -> Tensor:
    from trl.trainer.grpo_trainer import GRPOTrainer

    inputs = {
        "prompt_ids": problem.target[:, :0],
        "prompt_mask": problem.target[:, :0],
        "completion_ids": problem.target,
        "completion_mask": problem.mask.to(problem.target.dtype),
        "advantages": problem.advantages,
        "old_per_token_logps": problem.old_logprobs,
        "ref_per_token_logps": problem.ref_logprobs,
        "num_items_in_batch": problem.mask.sum(),
    }
    return GRPOTrainer._compute_loss(_trainer(problem), None, inputs)


class _Model:
    """As much of a causal LM as TRL's fused head reads: the problem's hidden states and head."""

    def __init__(self, problem: Problem) -> None:
        text = SimpleNamespace(final_logit_softcapping=problem.softcap)
        self.config = SimpleNamespace(get_text_config=lambda: text)
        self._output = SimpleNamespace(last_hidden_state=problem.hidden)
        self._embeddings = SimpleNamespace(weight=problem.weight, bias=None)

    def base_model(self, **_: Any) -> SimpleNamespace:
        return self._output

    def get_output_embeddings(self) -> SimpleNamespace:
        return self._embeddings

    def forward(self) -> None:
        """Do nothing: TRL replaces this method."""


def _logprobs(problem: Problem) -> tuple[Tensor, Tensor, None]:
    """Call the fused head as TRL's trainer does, which leaves out the masked tokens on a GPU."""
    from trl.trainer.utils import add_fused_lm_head

    model: Any = _Model(problem)
    add_fused_lm_head(model, problem.loss.temperature, outputs=("log_probs", "entropy"))
    labels = problem.target.masked_fill(~problem.mask, -100)
    output = model.forward(fused_lm_head=True, shift_labels=labels)
    return output.log_probs, output.entropy, None


def _trainer(problem: Problem) -> SimpleNamespace:
    """Return as much of a trainer as TRL's loss reads; the head alone stands in for the model."""
    settings = loss_arguments(problem.loss)
    one_process = SimpleNamespace(
        num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x
    )
    return SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: _logprobs(problem),
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(steps_per_generation=1, **settings),
        accelerator=one_process,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        aux_loss_enabled=False,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
        **settings,
    )


TRL = Provider(
    name="trl",
    note="trl.kernels.ChunkedLogProbFunction; in a loss its fused head with entropies, under "
    "GRPOTrainer._compute_loss with its metrics",
    run=run_with(_head, loss=_loss),
    packages=("trl", "accelerate", "datasets", "jinja2", "pandas", "pyarrow"),  # that it imports
)
