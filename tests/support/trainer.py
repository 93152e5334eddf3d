"""Helpers that tests import by name."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from functools import partial

import pytest
import torch
from accelerate import PartialState
from transformers import PreTrainedTokenizerBase

from grpo_trainer import GRPOConfig, GRPOTrainer
from grpo_trainer.common import in_background
from grpo_trainer.engines import (
    Completion,
    Completions,
    EngineContext,
    RolloutEngine,
    Sampling,
    TransformersEngine,
)

CLOCK = ("_time", "_runtime", "_per_second")


class CannedEngine(RolloutEngine):
    """Completions that depend on the prompt and the row only, so that runs can be compared.

    Args:
        tokenizer: for its end-of-sequence token. Default: the one that sampling ends at.
        process: the row that counts is that over all processes. Default: this one.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None = None, process: int | None = None
    ) -> None:
        self._eos = None if tokenizer is None else tokenizer.eos_token_id
        self._process = process

    def generate(
        self, prompt_ids: list[list[int]], sampling: Sampling | None = None, images: object = None
    ) -> Completions:
        process = PartialState().process_index if self._process is None else self._process
        eos = min(sampling.eos_token_ids) if self._eos is None else self._eos
        first = process * len(prompt_ids)
        ids = [self._complete(prompt, first + row, eos) for row, prompt in enumerate(prompt_ids)]
        return Completions(ids)

    def _complete(self, prompt: list[int], row: int, eos: int) -> list[int]:
        length = 1 + (sum(prompt) + row) % 4
        ids = [3 + (prompt[0] + 2 * row + 5 * i) % 10 for i in range(length)]
        return ids if length == 4 else [*ids, eos]


def lengths_reward(completion_ids, **kwargs) -> list[float]:
    return [float(len(ids) + ids[0] % 3) for ids in completion_ids]


class MuteError(Exception):
    """An error that cannot say what it is."""

    def __str__(self) -> str:
        raise SystemExit


def rows_reward(completion_ids, **kwargs) -> list[float]:
    """Reward every second completion, whatever it is: a step moves the policy."""
    return [float(row % 2) for row, _ in enumerate(completion_ids)]


def adapted(model, **lora):
    """Return ``model`` under an adapter that was trained before."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(model, peft.LoraConfig(**lora))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def mask_ids(logits: torch.Tensor, top_k: int, top_p=1.0, min_p=None, temperature=1.0) -> set[int]:
    """Return the ids that sampling may draw for one token, by the definitions of the filters."""
    p = (logits.double() / temperature).softmax(-1)
    order = p.argsort(descending=True)[:top_k].tolist()
    chosen = p[order] / p[order].sum()
    before = chosen.cumsum(0) - chosen
    likely = [i for i, mass in zip(order, before.tolist(), strict=True) if mass < top_p]
    return {i for i in likely if min_p is None or p[i] >= min_p * p.max()}


def canned(trainer: GRPOTrainer) -> GRPOTrainer:
    """Let CannedEngine complete the prompts of a trainer that was made without it."""
    trainer.rollouts.engine = CannedEngine()
    return trainer


def parameters(model: torch.nn.Module) -> torch.Tensor:
    """Return all parameters, flat, as a copy."""
    return torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()])


def of_steps(trainer: GRPOTrainer, name: str) -> list[float]:
    """Return what the training steps logged under a name."""
    return [row[name] for row in trainer.state.log_history if "loss" in row]


def logged(trainer: GRPOTrainer) -> list[dict[str, float]]:
    """Return everything the run logged that does not depend on the clock or on where it began."""
    rows = [
        {name: value for name, value in row.items() if not differs_between_runs(name)}
        for row in trainer.state.log_history
    ]
    return [row for row in rows if set(row) - {"step", "epoch"}]  # the summary may be empty now


def differs_between_runs(name: str) -> bool:
    return name.endswith(CLOCK) or name.startswith(("profiling/", "train_", "total_flos"))


def generating(policy, processing_class, **changes) -> TransformersEngine:
    """Return the engine that completes by ``policy`` itself, without a trainer."""
    args = GRPOConfig(use_cpu=True, report_to="none", **changes)
    context = EngineContext(
        policy=lambda: policy, processing_class=processing_class, args=args, accelerator=None
    )
    return TransformersEngine(context)


class BackgroundEngine(RolloutEngine):
    """An engine with a copy of the policy, which completes as CannedEngine does on threads.

    Args:
        tokenizer: for its special tokens.
        model: the copy, which gives log-probabilities; None: none are reported.
        process: as in CannedEngine.
        masks: whether it draws from two ids, as far as anybody can tell from what it reports.
        group: completions of a prompt.
    """

    def __init__(
        self, tokenizer, model=None, process: int = 0, masks: bool = False, group: int = 4
    ) -> None:
        self._canned = CannedEngine(tokenizer, process)
        self._eos = tokenizer.eos_token_id
        self._group = group
        self._rows: Counter[tuple[int, ...]] = Counter()  # by prompt: which of its group comes next
        self._model = model
        self._masks = masks
        self.noise = 0.0  # is added to log-probabilities
        self.calls: list[str] = []
        self.may_end = threading.Event()  # of what was started
        self.may_end.set()
        self.work = lambda prompt_ids: None  # done before it completes

    def generate(self, prompt_ids, sampling) -> Completions:
        self.calls.append("generate")
        self.sampling = sampling
        ids = self._canned.generate(prompt_ids).token_ids
        pairs = zip(prompt_ids, ids, strict=True)
        return Completions.of([self._reported(*pair, sampling) for pair in pairs])

    async def complete_one(self, prompt_ids, sampling) -> Completion:
        self.calls.append("start")
        row = self._rows[tuple(prompt_ids)]
        self._rows[tuple(prompt_ids)] = (row + 1) % self._group
        try:
            return await in_background(partial(self._slowly, prompt_ids, row, sampling))
        except asyncio.CancelledError:
            self.calls.append("cancel")
            self.may_end.set()
            raise

    def _slowly(self, prompt_ids, row: int, sampling) -> Completion:
        self.work(prompt_ids)
        assert self.may_end.wait(120)  # loaded machines are slow
        ids = self._canned._complete(prompt_ids, row, self._eos)
        completion = self._reported(prompt_ids, ids, sampling)
        self.calls.append("end")
        return completion

    def _reported(self, prompt, ids, sampling) -> Completion:
        if self._model is None:
            return Completion(ids)
        mask = [[t, t + 1] for t in ids] if self._masks else None
        return Completion(ids, self._logprobs(prompt, ids, sampling), mask)

    def _logprobs(self, prompt, completion, sampling) -> list[float]:
        with torch.no_grad():
            logits = self._model(input_ids=torch.tensor([prompt + completion])).logits[0]
        values = []
        for row, token in zip(logits[len(prompt) - 1 : -1], completion, strict=True):
            row = row.double() / sampling.temperature
            left = row[token : token + 2] if self._masks else row
            values.append((row[token] - left.logsumexp(0)).item() + self.noise)
        return values

    def update_weights(self, weights, adapter: bool = False) -> None:
        self.calls.append("adapter" if adapter else "update")
        if self._model is None:
            return
        sent = {name: value.clone() for name, value in weights()}
        if adapter:
            sent = self._weights | products(sent, self._weights)
        else:
            self._weights = sent
        self._model.load_state_dict(sent)

    def close(self) -> None:
        self.calls.append("close")


class RoutedEngine(BackgroundEngine):
    """Reports which experts it sent tokens through, as far as anybody can tell: as in
    :func:`routed`."""

    def __init__(self, tokenizer, layers: int, experts: int, chosen: int, **options: int) -> None:
        super().__init__(tokenizer, **options)
        self._sizes = (layers, experts, chosen)

    def _reported(self, prompt, ids, sampling) -> Completion:
        completions = Completions([ids], [[-1.5] * len(ids)])
        [completion] = routed([prompt], completions, *self._sizes).rows()
        return completion


def routed(
    prompt_ids: list[list[int]], completions: Completions, layers: int, experts: int, chosen: int
) -> Completions:
    """Add experts that depend on tokens and their places only."""

    def of(ids: list[int]) -> torch.Tensor:
        first = torch.tensor(ids)[:-1] + torch.arange(len(ids) - 1) ** 2
        numbers = first[:, None, None] + torch.arange(layers)[:, None] + torch.arange(chosen)
        return numbers % experts

    pairs = zip(prompt_ids, completions.token_ids, strict=True)
    return completions._replace(routed_experts=[of(prompt + ids) for prompt, ids in pairs])


def products(factors, weights) -> dict[str, torch.Tensor]:
    """Return the weights that an adapter alters, with it."""
    start, end = "base_model.model.", "lora_A.weight"
    return {
        (name := f"{key.removeprefix(start).removesuffix(end)}weight"): weights[name]
        + factors[key.replace("lora_A", "lora_B")] @ value
        for key, value in factors.items()
        if key.endswith(end)
    }
