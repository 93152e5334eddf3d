"""Other libraries: TRL, Liger Kernel, Apple's Cut Cross-Entropy and QuACK."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.problem import DIVERGENCES, Problem, Result, softcapped
from benchmarks.providers.base import (
    NO_ENTROPY,
    NO_SOFTCAP,
    Provider,
    Scores,
    behind_queue,
    run_cross_entropy,
    run_with,
    with_gradients,
)
from benchmarks.shapes import Case
from grpo_kernels import LossConfig

# their loss types by our aggregations: gspo is their "grpo" with sequence ratios
_LOSS_TYPES = {"window_token_mean": "dapo", "sequence_mean": "grpo"}
_IGNORED = -100  # as a target
_ALIGNMENT = 8  # of QuACK's vocabulary, for its bulk copies; the hidden sizes have it


def loss_arguments(config: LossConfig) -> dict[str, Any]:
    """Return the arguments that TRL's and Liger's GRPO losses share, for one of our works."""
    return dict(
        loss_type=_LOSS_TYPES[config.loss.aggregation],
        importance_sampling_level=config.loss.importance_sampling_level,
        beta=config.beta,
        epsilon_low=config.surrogate.epsilon,
        epsilon_high=config.surrogate.epsilon,
        delta=None,
        use_bias_correction_kl=config.use_bias_correction_kl,
        temperature=config.temperature,
    )


def _as_scores(problem: Problem, logprobs: Tensor, entropy: Tensor | None) -> Scores:
    shape = problem.target.shape
    return logprobs.view(shape), None if entropy is None else entropy.view(shape)


def _rows(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states (T, D), the head, and targets (T,)."""
    return problem.hidden.flatten(0, 1), problem.weight, problem.target.flatten()


def _trl_head(problem: Problem, with_entropy: bool) -> Scores:
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

    hidden, weight, target = _rows(problem)
    rest = 1.0, _CHUNKED_LOGPROB_CHUNK_SIZE, problem.softcap, 1.0  # temperature, ..., scale
    statistics = ("entropy",) if with_entropy else ()
    out = ChunkedLogProbFunction.apply(hidden, weight, None, target, *rest, statistics)
    return _as_scores(problem, out[0], out[1])


def _trl_loss(problem: Problem) -> Tensor:
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
    return GRPOTrainer._compute_loss(_trl_trainer(problem), None, inputs)


def _trl_trainer(problem: Problem) -> SimpleNamespace:
    """Return the parts of a trainer that TRL's loss reads; the head replaces the model."""
    settings = loss_arguments(problem.loss)
    return SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: _trl_logprobs(problem),
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(steps_per_generation=1, **settings),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, **_: x),
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        aux_loss_enabled=False,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
        **settings,
    )


class _Model(SimpleNamespace):
    def forward(self) -> None:
        """Do nothing: TRL replaces this method."""


def _trl_logprobs(problem: Problem) -> tuple[Tensor, Tensor, None]:
    """Call the fused head as TRL's trainer does, which leaves out the masked tokens on a GPU."""
    from trl.trainer.utils import add_fused_lm_head

    text = SimpleNamespace(final_logit_softcapping=problem.softcap)
    # the parts of a causal LM that the head reads
    model: Any = _Model(
        config=SimpleNamespace(get_text_config=lambda: text),
        base_model=lambda **_: SimpleNamespace(last_hidden_state=problem.hidden),
        get_output_embeddings=lambda: SimpleNamespace(weight=problem.weight, bias=None),
    )
    add_fused_lm_head(model, problem.loss.temperature, outputs=("log_probs", "entropy"))
    labels = problem.target.masked_fill(~problem.mask, _IGNORED)
    output = model.forward(fused_lm_head=True, shift_labels=labels)
    return output.log_probs, output.entropy, None


def _liger_loss(problem: Problem) -> Tensor:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    # compiling concerns the (B, L) loss formula only, and takes longer than a small run
    function = LigerFusedLinearGRPOLoss(
        compiled=False,
        use_ref_model=problem.ref_logprobs is not None,
        **loss_arguments(problem.loss),
    )
    before = torch.get_float32_matmul_precision()
    if problem.hidden.is_cuda and problem.case.dtype != "fp32":
        torch.set_float32_matmul_precision("high")  # Liger multiplies 16-bit gradients in fp32
    try:
        loss, _ = function(
            problem.hidden,
            problem.weight,
            problem.target,
            problem.mask.int(),
            problem.advantages,
            ref_per_token_logps=problem.ref_logprobs,
            old_per_token_logps=problem.old_logprobs,
        )
    finally:
        torch.set_float32_matmul_precision(before)
    return loss


def _liger_head(problem: Problem, with_entropy: bool) -> Scores:
    from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOFunction

    inputs = problem.hidden, problem.weight, problem.target
    return LigerFusedLinearGRPOFunction.chunk_forward(*inputs), None


def _liger_triton_loss(problem: Problem) -> Tensor:
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    # it expects the logits of L + 1 positions, as a model returns them, and ignores the last
    hidden = torch.nn.functional.pad(problem.hidden, (0, 0, 0, 1))
    logits = torch.nn.functional.linear(hidden, problem.weight)  # (B, L + 1, V)
    settings = loss_arguments(problem.loss)
    loss, _ = triton_grpo_loss(
        softcapped(logits, problem.softcap),
        problem.old_logprobs,
        problem.ref_logprobs,
        problem.target,
        problem.advantages,
        problem.mask.int(),
        eps_low=settings.pop("epsilon_low"),
        eps_high=settings.pop("epsilon_high"),
        reduce=True,
        **settings,
    )
    return loss


def _liger_cross_entropy(problem: Problem, reduction: str) -> Tensor:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    function = LigerFusedLinearCrossEntropyLoss(reduction=reduction, softcap=problem.softcap)
    return function(problem.weight, problem.hidden.flatten(0, 1), problem.target.flatten())


def _liger_sm90(problem: Problem, with_entropy: bool) -> Scores:
    from liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90 import (
        LigerFusedScaledCrossEntropySM90Function,
    )

    rest = 1.0, _IGNORED, 1, with_entropy  # the temperature; the 1 no longer has an effect
    out = LigerFusedScaledCrossEntropySM90Function.apply(*_rows(problem), *rest)
    nll, entropy = out if with_entropy else (out, None)
    return _as_scores(problem, -nll, entropy)


def _cce(problem: Problem, reduction: str, **settings: Any) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy

    hidden, weight, target = _rows(problem)
    if problem.work.rows == "masked":  # it computes nothing for an ignored target
        target = target.masked_fill(~problem.mask.flatten(), _IGNORED)
    settings |= {"ignore_index": _IGNORED, "softcap": problem.softcap, "reduction": reduction}
    return linear_cross_entropy(hidden, weight, target, **settings)


def _quack(problem: Problem) -> Result:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    loss = chunked_linear_cross_entropy(*_rows(problem))
    return with_gradients(problem, loss, loss=loss)


def _trl_divergence(problem: Problem) -> Tensor:
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    hidden, weight, _ = _rows(problem)
    rest = *(problem.teacher or ()), None, DIVERGENCES[problem.work.name]
    return ChunkedDivergenceFunction.apply(hidden, weight, None, *rest)[0].mean()


def _liger_divergence(problem: Problem) -> Tensor:
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    loss = LigerFusedLinearJSDLoss(
        weight_hard_loss=0.0,
        weight_soft_loss=1.0,
        beta=DIVERGENCES[problem.work.name],
        compiled=False,
    )
    hidden, weight, target = _rows(problem)
    return loss(hidden, weight, *(problem.teacher or ()), torch.zeros_like(target))


def _in_fp32(case: Case) -> bool:
    return case.dtype == "fp32"


def _no_whole_loss(case: Case) -> bool:
    return case.work.kind not in ("loss", "divergence")


def _cce_provider(name: str, note: str, **settings: Any) -> Provider:
    return Provider(
        name=name,
        note=f"cut_cross_entropy.linear_cross_entropy, with masked tokens ignored; {note}",
        run=run_cross_entropy(lambda *call: _cce(*call, **settings)),
        default=not settings,
        limits=(
            (
                "only gradients of 16-bit inputs",
                lambda case: _in_fp32(case) and case.work.kind != "forward",
            ),
            NO_ENTROPY,
        ),
        packages=("cut-cross-entropy",),
        gpu=True,
        timeout=90.0,  # its kernels wait for each other on locks, possibly forever
    )


_LIGER_TRITON = Provider(
    name="liger-triton",
    note="for a loss, torch's full logits and triton_grpo_loss in place; otherwise "
    "LigerFusedLinearCrossEntropyLoss with defaults",
    run=run_cross_entropy(_liger_cross_entropy, loss=_liger_triton_loss),
    default=False,
    limits=(NO_ENTROPY,),
    packages=("liger-kernel",),
    gpu=True,
)
LIBRARIES = (
    Provider(
        name="trl",
        note="trl.kernels.ChunkedLogProbFunction; for a loss, TRL's fused head with entropies in "
        "GRPOTrainer._compute_loss, with its metrics",
        run=run_with(_trl_head, loss=_trl_loss, divergence=_trl_divergence),
        # the packages that it imports
        packages=("trl", "accelerate", "datasets", "jinja2", "pandas", "pyarrow"),
    ),
    Provider(
        name="liger",
        note="LigerFusedLinearGRPOLoss, one sequence per chunk, loss formula not compiled; on a "
        "GPU its fp32 products of bf16 inputs may use TF32",
        run=run_with(_liger_head, loss=_liger_loss, divergence=_liger_divergence),
        limits=(("only a GRPO loss", _no_whole_loss), NO_SOFTCAP),
        packages=("liger-kernel",),
    ),
    _LIGER_TRITON,
    behind_queue(_LIGER_TRITON),
    Provider(
        name="liger-sm90",
        note="LigerFusedScaledCrossEntropySM90Function (CuTe DSL), with the rest in eager; a loss "
        "has no entropy, and dweight is computed even for a frozen head",
        run=run_with(_liger_sm90),
        default=False,
        limits=(("only bf16", _in_fp32), NO_SOFTCAP),
        packages=("liger-kernel", "nvidia-cutlass-dsl", "cuda-bindings"),
        capability=(9, 0),
        slow_start=True,
    ),
    _cce_provider("cce", "by default it skips blocks with small gradients"),
    _cce_provider("cce-exact", "filter_eps=None, which skips no gradient", filter_eps=None),
    Provider(
        name="quack",
        note="quack.linear_cross_entropy.chunked_linear_cross_entropy with defaults: chunks of "
        "4096 rows, tuned, and scaled-exp kernels on compute capability 9.0 in bf16",
        run=_quack,
        limits=(
            ("only a mean, no values of tokens", lambda case: case.work.kind != "mean"),
            ("only 16-bit inputs", _in_fp32),
            (
                f"the vocabulary must be a multiple of {_ALIGNMENT}",
                lambda case: case.model.vocabulary % _ALIGNMENT,
            ),
            NO_SOFTCAP,
        ),
        packages=(
            *("quack-kernels", "nvidia-cutlass-dsl", "cuda-bindings", "apache-tvm-ffi"),
            *("torch-c-dlpack-ext", "einops"),
        ),
        capability=(9, 0),
        or_newer=True,
        slow_start=True,
    ),
)
# only its numerics are compared
LIGER_HEAD = Provider(
    name="liger-head",
    note="LigerFusedLinearGRPOFunction.chunk_forward, the log-probabilities in Liger's loss",
    run=run_with(_liger_head),
    limits=(
        NO_ENTROPY,
        NO_SOFTCAP,
        ("its gradients are the same as liger's", lambda case: case.work.kind != "forward"),
    ),
    packages=("liger-kernel",),
)
