"""One step of a head on real ranks: forward and backward of a loss, in several wrappings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.problem import Problem, Result
from grpo_kernels import FusedHead, VocabShard, linear_policy_loss, policy_loss

Step = Callable[[], Result]  # every rank calls it; with its part of the gradients


@dataclass(frozen=True)
class Arm:
    """A way to run the step."""

    name: str
    note: str
    build: Callable[[Problem], tuple[Step, Callable[[Result], Result]]]  # and how to join results
    ranks: int | None = None  # how many work; None: all
    needs: str | None = None  # a package


def _one(problem: Problem) -> tuple[Step, Callable[[Result], Result]]:
    def step() -> Result:
        loss = linear_policy_loss(
            problem.hidden, problem.weight, problem.batch(), problem.loss
        ).loss
        return _with_gradients(loss, problem.hidden, problem.weight)

    return step, lambda result: result


def _vocabulary(problem: Problem) -> tuple[Step, Callable[[Result], Result]]:
    weight = problem.weight.detach().chunk(dist.get_world_size())[dist.get_rank()].clone()
    weight.requires_grad_()
    shard = VocabShard.of(_world(), weight)

    def step() -> Result:
        out = linear_policy_loss(
            problem.hidden, weight, problem.batch(), problem.loss, vocab_shard=shard
        )
        return _with_gradients(out.loss, problem.hidden, weight)

    def joined(result: Result) -> Result:
        assert result.dweight is not None
        return Result(result.loss, dhidden=result.dhidden, dweight=_gathered(result.dweight))

    return step, joined


class _Model(nn.Module):
    """A model that is nothing but its head."""

    def __init__(self, weight: Tensor, fused: bool) -> None:
        super().__init__()
        self.lm_head = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
        self.lm_head.weight.data = weight.detach().clone()
        if fused:
            self.lm_head = FusedHead(self.lm_head)
        self._fused = fused

    def forward(self, problem: Problem) -> Tensor:
        if self._fused:
            return self.lm_head.policy_loss(problem.hidden, problem.batch(), problem.loss).loss
        logits, target = self.lm_head(problem.hidden), problem.target
        logp = logits.float().log_softmax(-1).gather(-1, target[..., None]).squeeze(-1)
        return policy_loss(logp.flatten(), problem.batch(), problem.loss).loss


def _fsdp(fused: bool) -> Callable[[Problem], tuple[Step, Callable[[Result], Result]]]:
    def build(problem: Problem) -> tuple[Step, Callable[[Result], Result]]:
        from torch.distributed.fsdp import fully_shard

        model, mine = _Model(problem.weight, fused), _share(problem)
        fully_shard(model.lm_head)
        fully_shard(model)
        weight: Any = model.lm_head.weight

        def step() -> Result:
            mine.hidden.grad = weight.grad = None
            loss = model(mine)
            loss.backward()
            return Result(loss.detach(), dhidden=mine.hidden.grad, dweight=weight.grad)

        def joined(result: Result) -> Result:
            whole: Any = result.dweight
            return _mean(Result(result.loss, dhidden=result.dhidden, dweight=whole.full_tensor()))

        return step, joined

    return build


def _zero3(fused: bool) -> Callable[[Problem], tuple[Step, Callable[[Result], Result]]]:
    def build(problem: Problem) -> tuple[Step, Callable[[Result], Result]]:
        import deepspeed
        from deepspeed.utils import safe_get_full_grad

        model, mine = _Model(problem.weight, fused), _share(problem)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 3},
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": problem.weight.dtype == torch.bfloat16},
        }
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]

        def step() -> Result:
            mine.hidden.grad = None
            engine.optimizer.zero_grad()
            loss = engine(mine)
            engine.backward(loss)
            return Result(loss.detach(), dhidden=mine.hidden.grad)

        def joined(result: Result) -> Result:
            dweight = safe_get_full_grad(model.lm_head.weight)
            return _mean(Result(result.loss, dhidden=result.dhidden, dweight=dweight))

        return step, joined

    return build


ARMS = {
    arm.name: arm
    for arm in (
        Arm("one process", "the whole head, a thread for each of the ranks", _one, ranks=1),
        Arm("ours, vocabulary", "a shard of the vocabulary on each rank, all tokens", _vocabulary),
        Arm("ours, FSDP2", "FusedHead in a unit of its own, a share of the tokens", _fsdp(True)),
        Arm("eager, FSDP2", "torch's logits in the same wrapping", _fsdp(False)),
        Arm("ours, ZeRO-3", "the same under DeepSpeed", _zero3(True), needs="deepspeed"),
        Arm("eager, ZeRO-3", "torch's logits under DeepSpeed", _zero3(False), needs="deepspeed"),
    )
}


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _with_gradients(loss: Tensor, hidden: Tensor, weight: Tensor) -> Result:
    dhidden, dweight = torch.autograd.grad(loss, (hidden, weight))
    return Result(loss.detach(), dhidden=dhidden, dweight=dweight)


def _share(problem: Problem) -> Problem:
    """Return this rank's sequences."""
    return problem.share(dist.get_rank(), dist.get_world_size())


def _mean(result: Result) -> Result:
    """Join what ranks have found for sequences of their own."""
    ranks = dist.get_world_size()
    assert result.loss is not None and result.dhidden is not None
    loss = result.loss.clone()
    dist.all_reduce(loss)
    return Result(loss / ranks, dhidden=_gathered(result.dhidden) / ranks, dweight=result.dweight)


def _gathered(part: Tensor) -> Tensor:
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, part)
    return torch.cat(parts)
