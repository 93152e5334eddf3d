"""A teacher: its log-probabilities of the policy's tokens as advantages, or its distributions.

On-policy distillation, arXiv:2306.13649. With log-probabilities it is the policy gradient of the
reverse KL, in which a token's reward is ``log pi_T - log pi``; any server can be the teacher. Over
the whole vocabulary, the divergence's own gradient is added to the loss, which needs the teacher's
hidden states and head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from accelerate.utils import is_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from grpo_kernels import Head, Metrics, linear_divergence
from grpo_kernels.batch import IGNORE_INDEX
from grpo_kernels.hf import add_fused_head
from grpo_trainer.config import GRPOConfig
from grpo_trainer.data import HeadTerm, LossAndMetrics, MicroBatch, Term
from grpo_trainer.policy.forward import Reference, run, target_logprobs
from grpo_trainer.policy.load import base_policy, load_model
from grpo_trainer.policy.placement import Placement
from grpo_trainer.policy.tiled_mlp import tile_mlps

# token ids of whole sequences -> the log-probability of each token after the first
LogprobsFunction: TypeAlias = Callable[[list[list[int]]], Sequence[Sequence[float]]]
TeacherSource: TypeAlias = PreTrainedModel | str | LogprobsFunction


class Teacher(Term):
    """The policy's teacher: a column (:meth:`add_to_advantages`) for log-probabilities, or a term
    for whole distributions.

    Args:
        source: a model; its name or folder; the name of an adapter of the policy; or a function of
            lists of token ids that returns the log-probability of every token except the first.
        policy: has the adapters.
        args: give the divergence and its weight.
        placement: of the parameters.
        tokens: the size of the policy's tokenizer.

    Raises:
        ValueError: it cannot be loaded, has another vocabulary, or does not support the setting.
    """

    def __init__(
        self,
        source: TeacherSource,
        policy: PreTrainedModel,
        args: GRPOConfig,
        placement: Placement,
        tokens: int,
    ) -> None:
        self._args = args
        self.by_logprobs = args.distillation == "logprobs"  # else by whole distributions
        self._function: LogprobsFunction | None = None
        self._reference: Reference | None = None
        own = policy.config.get_text_config().vocab_size
        self.vocab_size = own  # both models know the ids below it
        if is_peft_model(policy) and isinstance(source, str) and source in policy.peft_config:
            self._reference = Reference(placement, adapter=source)
        elif callable(source) and not isinstance(source, PreTrainedModel):
            if not self.by_logprobs:
                raise ValueError(
                    "distillation: expected 'logprobs' with a teacher that returns only "
                    f"log-probabilities, got {args.distillation!r}"
                )
            for name, expected in {"temperature": 1.0, "use_sampling_mask": False}.items():
                if (got := getattr(args, name)) != expected:
                    raise ValueError(
                        f"{name}: expected {expected}, as in the log-probabilities of this "
                        f"teacher, got {got}"
                    )
            self._function = source
        else:
            model = source
            if isinstance(model, str):
                model = load_model(model, args, what="teacher: model").to(args.device)
            ids = model.config.get_text_config().vocab_size
            if ids != own and ids < tokens:  # else only padding rows differ
                raise ValueError(
                    f"teacher: expected the policy's vocabulary, of {tokens} tokens, got a model "
                    f"of {ids} ids"
                )
            self.vocab_size = min(own, ids)
            add_fused_head(base_policy(model))
            tile_mlps(base_policy(model), args.mlp_tile_tokens)
            self._reference = Reference(placement, model.requires_grad_(False).eval())
        if placement.sharded and not self.by_logprobs:
            raise ValueError(
                "distillation: expected 'logprobs' with sharded parameters, since a teacher's head "
                f"is gathered only for its own forward, got {args.distillation!r}"
            )

    def own_model(self, policy: PreTrainedModel) -> list[Any]:
        """Return the teacher's own model, with a context manager for the module to call; or
        nothing."""
        if (one := self._reference) is None or one.model is None:
            return []
        return [(base_policy(one.model), one.running(policy))]

    def add_to_advantages(self, batch: MicroBatch, policy: nn.Module) -> Metrics:
        """Add ``log pi_T - log pi_old`` to each token's advantage; return the negative mean, the
        estimated KL(policy, teacher)."""
        assert batch.old_logprobs is not None  # computed before
        gain = self._logprobs(batch, policy) - batch.old_logprobs
        gain = gain.where(batch.target != IGNORE_INDEX, 0.0)
        batch.add_to_advantages(self._args.distillation_coef * gain)
        return batch.token_mean("teacher_kl", -gain)

    def _logprobs(self, batch: MicroBatch, policy: nn.Module) -> Tensor:  # (B, L)
        if self._reference is not None:
            with self._reference.running(policy) as model:
                temperature = self._args.temperature
                return target_logprobs(model, batch, temperature, self.vocab_size)
        assert self._function is not None
        lengths = batch.attention_mask.sum(1).tolist()
        rows = [ids[:n] for ids, n in zip(batch.input_ids.tolist(), lengths, strict=True)]
        answers = self._function(rows)
        if [len(each) for each in answers] != [n - 1 for n in lengths]:
            raise ValueError(
                "teacher: expected a log-probability for each token except the first of "
                f"{lengths} tokens, got {[len(each) for each in answers]}"
            )
        found = torch.zeros(batch.target.shape, device=batch.target.device)
        for row, each in zip(found, answers, strict=True):
            row[: len(each)] = torch.as_tensor(each)
        return found

    def on_head(self, batch: MicroBatch, policy: nn.Module) -> HeadTerm:
        """Run the teacher, and return a function of hidden states and head that computes the
        batch's share of the weighted divergence, a mean over the tokens of a micro-step."""
        kept: list[tuple[Tensor, Head]] = []

        def keep(hidden: Tensor, head: Head) -> Tensor:
            frozen = (None if x is None else x.detach() for x in head.tensors)
            kept.append((hidden, head.with_tensors(*frozen)))  # type: ignore[arg-type]
            return hidden[..., :1]

        assert self._reference is not None
        with self._reference.running(policy) as model, torch.no_grad():
            run(model, batch, keep)
        in_loss = batch.target != IGNORE_INDEX
        share = in_loss.sum() / batch.num_items
        args = self._args

        def divergence(hidden: Tensor, head: Head) -> LossAndMetrics:
            teacher_hidden, teacher_head = kept[0]
            output = linear_divergence(
                hidden,
                head,
                teacher_hidden.to(hidden.dtype),
                teacher_head,
                kind=args.distillation,
                beta=args.distillation_beta,
                temperature=args.temperature,
                mask=in_loss,
                weights=(args.distillation_coef * share).expand(in_loss.shape),
                vocab_size=min(head.vocab_size, teacher_head.vocab_size),
            )
            return output.loss, batch.token_mean("teacher_kl", output.divergence)

        return divergence
