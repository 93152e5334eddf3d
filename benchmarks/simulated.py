"""A server of conversations with tools of simulated duration, which keep no core busy."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo_trainer.common import start
from grpo_trainer.engines import Completion, Completions, RolloutEngine, Sampling, WeightSource

# A token represents a turn. Before each token a tool answers, after a time with this Pareto
# distribution, which has infinite variance.
SHORTEST = 0.006  # seconds
TAIL = 1.5  # a time is longer than t with probability (SHORTEST / t) ** TAIL
LONGEST = 0.7  # seconds; longer times are cut to it
_TICK = 0.02  # seconds between forwards; each samples a token for all that wait

Token = tuple[int, float, int]  # its id, its log-probability, and the number of updates before it


class SimulatedServer(RolloutEngine):
    """Has its own policy, and serves any number of conversations at the same time.

    Args:
        policy: gets the weights.
        seed: of times and tokens.
    """

    updates_in_flight = True

    def __init__(self, policy: PreTrainedModel, seed: int) -> None:
        self._policy = policy.eval()
        self._times = random.Random(seed)
        self._tokens = torch.Generator().manual_seed(seed)
        self._lock = threading.Lock()  # of the weights
        self._updates = 0
        self._waiting: list[list[int]] = []  # conversations that get a token at the next tick
        self._tick: asyncio.Task[list[Token]] | None = None

    def generate(self, prompt_ids: list[list[int]], sampling: Sampling) -> Completions:
        rows = start([self.complete_one(ids, sampling) for ids in prompt_ids]).result()
        return Completions.of(rows)

    async def complete_one(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        ids: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        while len(ids) < sampling.max_tokens and sampling.eos_token_ids.isdisjoint(ids):
            await asyncio.sleep(min(SHORTEST * self._times.paretovariate(TAIL), LONGEST))
            token, logprob, version = await self._next([*prompt_ids, *ids])
            ids.append(token)
            logprobs.append(logprob)
            versions.append(version)
        return Completion(ids, logprobs, versions=versions)

    def update_weights(self, weights: WeightSource, adapter: bool = False) -> None:
        with self._lock:
            self._policy.load_state_dict(dict(weights()))
            self._updates += 1

    async def _next(self, ids: list[int]) -> Token:
        """Return the next token of a conversation, sampled together with all that wait."""
        if self._tick is None:
            self._tick = asyncio.create_task(self._draw_soon())
        tick, place = self._tick, len(self._waiting)
        self._waiting.append(ids)
        tokens = await asyncio.shield(tick)
        return tokens[place]

    async def _draw_soon(self) -> list[Token]:
        await asyncio.sleep(_TICK)
        rows = self._waiting
        self._waiting, self._tick = [], None  # later conversations join the next tick
        return self._draw(rows)

    def _draw(self, rows: Sequence[list[int]]) -> list[Token]:
        with self._lock, torch.no_grad():
            logps = token_logprobs(self._policy, rows)
            version = self._updates
        last = torch.stack([row[len(ids) - 1] for row, ids in zip(logps, rows, strict=True)])
        tokens = last.exp().multinomial(1, generator=self._tokens)
        pairs = zip(tokens[:, 0].tolist(), last.gather(1, tokens)[:, 0].tolist(), strict=True)
        return [(token, logprob, version) for token, logprob in pairs]


def token_logprobs(policy: PreTrainedModel, rows: Sequence[list[int]]) -> Tensor:
    """Return the log-probabilities (N, L, V) after each token of N rows, right-padded to L."""
    longest = max(map(len, rows))
    padded = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    return policy(input_ids=padded).logits.log_softmax(-1)
