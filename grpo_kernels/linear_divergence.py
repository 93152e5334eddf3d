"""linear_divergence: the divergence of a linear head from a teacher's, without storing logits."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from grpo_kernels.backends import KINDS, Divergence, TopK
from grpo_kernels.batch import IGNORE_INDEX, host
from grpo_kernels.common import check_device, check_like, check_name, check_number
from grpo_kernels.engine import (
    DivergencePlan,
    Needs,
    Rows,
    RunOptions,
    check_ranks_agree,
    differentiable_divergence,
    plan_divergence,
    raise_on_all_ranks,
)
from grpo_kernels.head import (
    Head,
    check_floating,
    checked_head,
    head_of,
    row_temperature,
    stats_dtype,
    unshard_head,
)

_MASS = 1e-3  # probabilities whose logarithms were rounded to 16 bits may sum to 1 + this


class LinearDivergence(NamedTuple):
    """Outputs of :func:`linear_divergence`. Only the loss is differentiable."""

    loss: Tensor  # ()
    divergence: Tensor  # (...) nats; 0 for masked tokens
    entropy: Tensor  # (...) nats, of the student; 0 for masked tokens


@_disable_dynamo  # torch.compiler.disable imports Triton
def linear_divergence(
    hidden: Tensor,
    head: Tensor | Head,
    teacher_hidden: Tensor | None = None,
    teacher_head: Tensor | Head | None = None,
    *,
    teacher_topk: tuple[Tensor, Tensor] | None = None,
    kind: str = "forward_kl",
    beta: float = 0.5,
    temperature: float | Tensor = 1.0,
    weights: Tensor | None = None,
    mask: Tensor | None = None,
    vocab_size: int | None = None,
    precision: str = "fp32",
    backend: str = "auto",
    max_workspace_bytes: int | None = None,
    batch_invariant: bool = False,
) -> LinearDivergence:
    """Compute the divergence of a student's head from a teacher's over the whole vocabulary.

    Logits of both models are computed one chunk of rows at a time. One pass computes the loss and
    its gradients: three GEMMs over the vocabulary for the student, one for the teacher. Under
    ``torch.compile`` it causes a graph break.

    Example:
        >>> hidden = torch.randn(2, 8, 64, requires_grad=True)  # the student's (..., D)
        >>> weight = torch.randn(1000, 64, requires_grad=True)  # (V, D)
        >>> teacher_hidden, teacher_weight = torch.randn(2, 8, 128), torch.randn(1000, 128)
        >>> out = linear_divergence(hidden, weight, teacher_hidden, teacher_weight, kind="jsd")
        >>> out.loss.backward()

    Args:
        hidden: (..., D) the student's last hidden states; fp32, bf16, fp16 or fp64.
        head: (V, D) the student's weight, or a :class:`Head`, with LoRA or a shard of the
            vocabulary as in :func:`grpo_kernels.linear_logprobs`.
        teacher_hidden: (..., D_t) the teacher's hidden states for the same tokens; any of these
            dtypes, but fp64 if and only if ``hidden`` is fp64.
        teacher_head: (V, D_t) weight or a :class:`Head`, sharded like the student's.
        teacher_topk: instead of the previous two, the teacher's first k ids: (..., k)
            log-probabilities, descending, and (..., k) int64 ids, as ``linear_logprobs`` returns
            them. For both models, all other ids count as a single one, the tail.
        kind: ``"forward_kl"``: KL(teacher, student); ``"reverse_kl"``: KL(student, teacher);
            ``"jsd"``: beta KL(teacher, m) + (1 - beta) KL(student, m) with
            m = (1 - beta) student + beta teacher (arXiv:2306.13649).
        beta: of ``"jsd"``, in (0, 1).
        temperature: a float > 0, or one value per token; it divides both models' logits.
        weights: (...) weights of the tokens in the loss; None: 1.
        mask: (...) bool, or 0 and 1: which tokens count. The others are never multiplied. None:
            all.
        vocab_size: number of ids in use, if the weights have padding rows after them; None: all.
        precision, backend, batch_invariant: as in :func:`grpo_kernels.linear_logprobs`.
        max_workspace_bytes: maximum size of both logits tiles together; None: the backend's
            default.

    Returns:
        :class:`LinearDivergence`: ``loss`` is the mean of weights times divergence over the tokens
        that count, in fp32 (fp64 for fp64 inputs), and differentiable in the hidden states, weight,
        bias and LoRA factors of the student.

    Raises:
        ValueError: a shape, dtype, device, value or name is wrong, the teacher requires a gradient,
            or the two vocabularies differ; the message names the argument.
    """
    check_floating("hidden", hidden)
    shard = head.shard if isinstance(head, Head) else None
    with raise_on_all_ranks(shard, hidden.device):
        options = RunOptions(
            precision=precision,
            backend=backend,
            max_workspace_bytes=max_workspace_bytes,
            batch_invariant=batch_invariant,
        )
        divergence = _checked(kind, beta)
        rows = _model_rows(
            hidden, head, temperature=temperature, vocab_size=vocab_size, precision=precision
        )
        tokens = hidden.shape[:-1]
        counted = _token_values("mask", mask, hidden)
        if counted is not None:
            if counted.dtype != torch.bool:
                is_mask = ((counted == 0) | (counted == 1)).all()
                host.assert_async(is_mask, "mask: expected bool, or 0 and 1")
            rows = replace(rows, target=torch.where(counted != 0, 0, IGNORE_INDEX))
        teacher = _teacher(
            student=rows,
            tokens=tokens,
            hidden=teacher_hidden,
            head=teacher_head,
            topk=teacher_topk,
            temperature=temperature,
            vocab_size=vocab_size,
            precision=precision,
        )
        factors = _token_values("weights", weights, hidden)
        selection = rows.with_target()
        rows = rows.selected(selection)
        if selection.index is not None:
            teacher = teacher.select(selection.index)
        plan = plan_divergence(rows, teacher, options, divergence)
    check_ranks_agree(
        rows.target,
        rows.head,
        plan.route,
        (divergence, plan.teacher is None, plan.needs.of_inputs, len(plan.chunks)),
    )
    wide = stats_dtype(hidden.dtype)
    if factors is None:
        factors = rows.target.new_ones(tokens.numel(), dtype=wide)
    factors = selection.gather(factors.to(wide) / max(rows.count, 1))
    loss, each, entropy = differentiable_divergence(rows, teacher, factors, plan)
    return LinearDivergence(
        loss, selection.scatter(each).reshape(tokens), selection.scatter(entropy).reshape(tokens)
    )


def explain_divergence(
    hidden: Tensor,
    head: Tensor | Head,
    teacher_hidden: Tensor | None = None,
    teacher_head: Tensor | Head | None = None,
    *,
    kind: str = "forward_kl",
    beta: float = 0.5,
    vocab_size: int | None = None,
    **options: Any,
) -> DivergencePlan:
    """Return the plan of a :func:`linear_divergence` call with these arguments, without running it.

    Args:
        teacher_hidden, teacher_head: None for a call with ``teacher_topk``.
        options: ``precision``, ``backend``, ``max_workspace_bytes``, ``batch_invariant``.

    Returns:
        The :class:`DivergencePlan`. Print it to see what runs and why; its ``fingerprint`` is as in
        :func:`grpo_kernels.explain_logprobs`.

    Raises:
        ValueError: as ``linear_divergence`` would for these arguments.
    """
    chosen = RunOptions(**options)
    rows = _model_rows(
        hidden, head, temperature=1.0, vocab_size=vocab_size, precision=chosen.precision
    )
    teacher: Rows | TopK = TopK(hidden[:0], hidden[:0])
    if teacher_hidden is not None or teacher_head is not None:
        teacher = _teacher(
            student=rows,
            tokens=hidden.shape[:-1],
            hidden=teacher_hidden,
            head=teacher_head,
            topk=None,
            temperature=1.0,
            vocab_size=vocab_size,
            precision=chosen.precision,
        )
    return plan_divergence(rows, teacher, chosen, _checked(kind, beta))


def _checked(kind: str, beta: float) -> Divergence:
    check_name("kind", kind, KINDS)
    check_number("beta", beta, "a number in (0, 1)", lambda x: 0 < x < 1)
    return Divergence(kind=kind, beta=beta)


def _model_rows(
    hidden: Tensor,
    head: Tensor | Head,
    *,
    temperature: float | Tensor,
    vocab_size: int | None,
    precision: str,
    prefix: str = "",  # of argument names in messages
) -> Rows:
    """Check the arguments of one model, and return its rows."""
    try:
        check_floating("hidden", hidden)
        temperature = row_temperature(temperature, hidden.shape[:-1], hidden)
        head = unshard_head(
            head_of(
                weight=head,
                bias=None,
                lora=None,
                logit_scale=1.0,
                softcap=None,
                temperature=temperature,
            )
        )
        hidden, head = checked_head(hidden, head, precision)
    except ValueError as error:  # in this call the argument is named head
        message = re.sub(r"\bweight\b", "head", str(error))
        raise ValueError(f"{prefix}{message}") from None
    if vocab_size is not None:
        held = head.vocab_size
        if not isinstance(vocab_size, int) or not 0 < vocab_size <= held:
            raise ValueError(
                f"vocab_size: expected 1 to {held} (ids of {prefix}head), got {vocab_size!r}"
            )
        if head.shard is None:
            head = head.columns(slice(vocab_size))
        elif vocab_size != held:
            raise ValueError(
                f"vocab_size: expected {held} (of the VocabShard) or None, got {vocab_size}"
            )
    hidden = hidden.reshape(-1, hidden.shape[-1])
    return Rows(hidden=hidden, head=head, target=hidden.new_zeros(len(hidden), dtype=torch.int64))


def _token_values(name: str, values: Tensor | None, hidden: Tensor) -> Tensor | None:
    """Return a value per token, (T,)."""
    if values is None:
        return None
    check_like(name, values, hidden[..., 0], "hidden without its last dimension")
    if values.requires_grad:
        raise ValueError(f"{name}: expected requires_grad=False")
    return values.reshape(-1)


def _teacher(
    *,
    student: Rows,
    tokens: torch.Size,
    hidden: Tensor | None,
    head: Tensor | Head | None,
    topk: tuple[Tensor, Tensor] | None,
    temperature: float | Tensor,
    vocab_size: int | None,
    precision: str,
) -> Rows | TopK:
    """Check the teacher's arguments, and return its rows or first ids."""
    if topk is not None:
        if hidden is not None or head is not None:
            raise ValueError(
                "teacher_topk: expected None when teacher_hidden or teacher_head is given, got both"
            )
        return _checked_topk(topk, tokens, student)
    for name, value in (("teacher_hidden", hidden), ("teacher_head", head)):
        if value is None:
            raise ValueError(f"{name}: expected a tensor if teacher_topk is not given, got None")
    assert hidden is not None and head is not None
    check_floating("teacher_hidden", hidden)
    check_device("teacher_hidden", hidden, student.hidden.device)
    if hidden.shape[:-1] != tokens:
        raise ValueError(
            f"teacher_hidden: expected shape {(*tokens, 'D')} (tokens of hidden), got "
            f"{tuple(hidden.shape)}"
        )
    teacher = _model_rows(
        hidden,
        head,
        temperature=temperature,
        vocab_size=vocab_size,
        precision=precision,
        prefix="teacher_",
    )
    if Needs.of(teacher.inputs).any:
        raise ValueError(
            "teacher_hidden, teacher_head: expected requires_grad=False; run the teacher "
            "under torch.no_grad() and detach its weight"
        )
    dtypes = teacher.hidden.dtype, student.hidden.dtype
    if torch.float64 in dtypes and dtypes[0] != dtypes[1]:
        raise ValueError(
            "teacher_hidden: expected fp64 if and only if hidden is fp64, got "
            f"{dtypes[0]} with hidden {dtypes[1]}"
        )
    ids = teacher.head.vocab_size
    own = student.head.vocab_size
    if ids != own:
        raise ValueError(
            f"teacher_head: expected the student's vocabulary of {own} ids, got {ids}; if the "
            "extra rows are padding, pass the number of ids in use as vocab_size"
        )
    own_rows, rows = (x.head.shard and x.head.shard.rows for x in (student, teacher))
    if rows != own_rows:
        raise ValueError("teacher_head: expected the same shard of the vocabulary as head")
    return teacher


def _checked_topk(topk: tuple[Tensor, Tensor], tokens: torch.Size, student: Rows) -> TopK:
    """Return a teacher's first ids, (T, k); on a GPU their values are checked asynchronously."""
    if not isinstance(topk, tuple | list) or len(topk) != 2:
        raise ValueError(
            "teacher_topk: expected (log-probabilities, ids), each (..., k), got "
            f"{type(topk).__name__}"
        )
    logprobs, indices = topk
    check_floating("teacher_topk log-probabilities", logprobs)
    if not isinstance(indices, Tensor) or indices.dtype != torch.int64:
        got = indices.dtype if isinstance(indices, Tensor) else type(indices).__name__
        raise ValueError(f"teacher_topk ids: expected a torch.int64 tensor, got {got}")
    k, vocab_size = logprobs.shape[-1] if logprobs.dim() else 0, student.head.vocab_size
    for name, x in (("log-probabilities", logprobs), ("ids", indices)):
        if x.shape != (*tokens, k):
            raise ValueError(
                f"teacher_topk {name}: expected shape {(*tokens, 'k')}, got {tuple(x.shape)}"
            )
        check_device(f"teacher_topk {name}", x, student.hidden.device)
    if not 1 <= k < vocab_size:
        raise ValueError(f"teacher_topk: expected 1 to {vocab_size - 1} ids (V - 1), got {k}")
    if logprobs.requires_grad:
        raise ValueError("teacher_topk: expected requires_grad=False")
    wide = torch.promote_types(logprobs.dtype, torch.float32)
    logprobs, indices = logprobs.reshape(-1, k).to(wide), indices.reshape(-1, k)
    counted = (student.target != IGNORE_INDEX)[:, None]
    for expected, holds in {
        f"ids: expected ids in [0, {vocab_size})": (indices >= 0) & (indices < vocab_size),
        "log-probabilities: expected descending values": logprobs[:, 1:] <= logprobs[:, :-1],
        "ids: expected each id once per row": indices.sort(-1).values.diff() != 0,
        "log-probabilities: expected probabilities that sum to at most 1": (
            logprobs.exp().sum(-1, keepdim=True) <= 1 + _MASS
        ),
    }.items():
        host.assert_async((holds | ~counted).all(), f"teacher_topk {expected}")
    return TopK(logprobs, torch.where(counted, indices, 0))
