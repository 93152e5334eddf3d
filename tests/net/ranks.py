"""Ranks as threads of this process: they share a vocabulary, or the tokens of each sequence."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg

from grpo_kernels import VocabShard
from tests.net.cases import Case
from tests.net.problem import Problem
from tests.net.results import Found, assert_same_bits

T = TypeVar("T")


@contextmanager
def _threads_as_ranks() -> Iterator[None]:
    excepthook = sys.excepthook  # torch puts the rank before every line of it
    multi_threaded_pg._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    try:
        yield
    finally:
        sys.excepthook = excepthook
        multi_threaded_pg.ProcessLocalGroup.reset()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        multi_threaded_pg._uninstall_threaded_pg()


def on_ranks(size: int, work: Callable[[int], T]) -> list[T]:
    """Return what ``work(rank)`` returns on each of ``size`` ranks; the first error is raised."""
    results: dict[int, T] = {}
    errors: list[BaseException] = []
    store = dist.HashStore()

    def rank_of(rank: int) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=size, store=store)
        try:
            results[rank] = work(rank)
        except BaseException as error:  # raised by the caller
            if not isinstance(error, SystemExit):  # another rank has failed
                errors.append(error)
            multi_threaded_pg.ProcessLocalGroup.exception_handle(error)
        finally:
            dist.destroy_process_group()

    with _threads_as_ranks():
        threads = [
            threading.Thread(target=rank_of, args=(rank,), daemon=True) for rank in range(size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
    if errors:
        raise errors[0]
    if len(results) < size:
        raise TimeoutError(f"{len(results)} of {size} ranks have ended")
    return [results[rank] for rank in range(size)]


class VocabRanks:
    """Each rank has some rows of the weight; all have the same tokens and results."""

    parts = ("weight", "bias", "b")

    def __init__(self, case: Case, problem: Problem) -> None:
        self.problem, self.size = problem, case.ranks
        first = 1 + case.seed % (case.vocab - 1)
        self.cuts = (0, first, case.vocab)

    def part(self, rank: int) -> Problem:
        ids = slice(self.cuts[rank], self.cuts[rank + 1])
        leaves = {n: x[ids] if n in self.parts else x for n, x in self.problem.leaves.items()}
        teacher = {n: x[ids] if n in self.parts else x for n, x in self.problem.teacher.items()}
        return replace(self.problem, leaves=leaves, teacher=teacher)

    def options(self, posed: Problem) -> dict[str, Any]:
        return {"vocab_shard": VocabShard.of(dist.group.WORLD, posed.leaves["weight"])}

    def join(self, found: list[Found]) -> Found:
        first, *others = found
        gradients = dict(first.gradients)
        for name in gradients.keys() & set(self.parts):
            gradients[name] = torch.cat([rank.gradients[name] for rank in found])
        alike = {n: x for n, x in first.gradients.items() if n not in self.parts}
        for other in others:
            same = {n: x for n, x in other.gradients.items() if n not in self.parts}
            assert_same_bits(Found(first.values, alike), Found(other.values, same))
        return Found(first.values, gradients)


class SequenceRanks:
    """Each rank has some tokens of every sequence, and the whole head."""

    def __init__(self, case: Case, problem: Problem) -> None:
        self.problem, self.size = problem, case.ranks
        generator = torch.Generator().manual_seed(case.seed)
        self.owner = torch.randint(0, self.size, problem.target.shape, generator=generator)

    def part(self, rank: int) -> Problem:
        x = self.problem.rollout
        count = x.num_items and x.num_items / self.size
        tokens = x.num_tokens and x.num_tokens / self.size
        prompts = x.num_prompts and x.num_prompts / self.size
        sequences = x.num_sequences and x.num_sequences / self.size
        told = {"num_items": count, "num_tokens": tokens, "num_prompts": prompts}
        return replace(
            self.problem,
            mask=self.problem.mask & (self.owner == rank),
            rollout=replace(x, num_sequences=sequences, **told),
        )

    def options(self, posed: Problem) -> dict[str, Any]:
        return {"sequence_group": dist.group.WORLD}

    def join(self, found: list[Found]) -> Found:
        """Return the mean of the ranks' losses, and of their gradients: that of one process."""
        loss = torch.stack([rank.values["loss"] for rank in found]).double().mean()
        gradients = {
            name: torch.stack([rank.gradients[name].double() for rank in found]).mean(0).to(x.dtype)
            for name, x in found[0].gradients.items()
        }
        return Found({"loss": loss.to(found[0].values["loss"].dtype)}, gradients)
