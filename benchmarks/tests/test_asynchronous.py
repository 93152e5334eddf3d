"""Runs with batches sampled ahead: tokens match their weights, and errors are found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from benchmarks import simulated
from benchmarks.asynchronous import (
    MAX_STALENESS,
    SIZE,
    WAYS,
    Trained,
    Watch,
    find_error,
    logp_error,
)
from grpo_trainer import GRPOConfig
from grpo_trainer.common import start
from grpo_trainer.demo.policy import make_policy, make_tokenizer
from grpo_trainer.engines import Sampling
from tests.support.documents import ROOT, blocks

IN_TURN, AHEAD, IN_FLIGHT = WAYS["0-ahead"], WAYS["1-ahead"], WAYS["1-ahead-in-flight"]
PROMPTS = {"12=": [3, 4, 13], "7=": [9, 13]}


def test_log_probabilities_are_those_of_the_weights_that_drew_a_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(simulated, "LONGEST", 0.0)
    tokenizer = make_tokenizer()
    policies = [make_policy(tokenizer, seed) for seed in (0, 1)]
    server = simulated.SimulatedServer(make_policy(tokenizer, 2), seed=0)
    server.update_weights(lambda: iter(policies[0].state_dict().items()))
    draw = server._draw

    def draw_and_update(rows: list[list[int]]) -> list[simulated.Token]:
        tokens = draw(rows)
        if server._updates == 1:
            server.update_weights(lambda: iter(policies[1].state_dict().items()))
        return tokens

    monkeypatch.setattr(server, "_draw", draw_and_update)
    sampling = Sampling(eos_token_ids=frozenset([tokenizer.eos_token_id]), max_tokens=4)
    rows = [*PROMPTS.values()] * 4
    completions = start([server.complete_one(ids, sampling) for ids in rows]).result()

    watch = Watch()
    watch.weights = [policy.state_dict() for policy in policies]
    for ids, completion in zip(rows, completions, strict=True):
        versions = [update - 1 for update in completion.versions]
        watch.trained.append(_trained(ids, completion.token_ids, completion.logprobs, versions))
    assert any(len(set(one.versions)) == 2 for one in watch.trained)
    policy = make_policy(tokenizer, 2)
    assert logp_error(watch, policy) < 1e-5
    first = watch.trained[0]
    watch.trained[0] = replace(first, versions=[1 - version for version in first.versions])
    assert logp_error(watch, policy) > 1e-3


def _trained(
    prompt_ids: list[int], ids: list[int], logprobs: list[float], versions: list[int]
) -> Trained:
    ages = [0] * len(ids)
    return Trained("", prompt_ids, ids, logprobs, versions, ages, in_loss=[1] * len(ids))


def _run(age: int, kept: int = 1) -> Watch:
    """Return a run of one step with tokens that are ``age`` steps old."""
    watch = Watch()
    for prompt, ids in PROMPTS.items():
        one = replace(_trained(ids, [5], [-1.0], [0]), prompt=prompt, ages=[age], in_loss=[kept])
        watch.trained += [one] * SIZE
    watch.weights = [{}, {}]
    return watch


@pytest.mark.parametrize(
    ("way", "age", "kept", "changes", "message"),
    [
        (IN_TURN, 0, 1, {}, None),
        (AHEAD, 1, 1, {}, None),
        (IN_FLIGHT, 4, 1, {}, None),
        (IN_FLIGHT, 5, 0, {}, None),
        (IN_TURN, 1, 1, {}, "expected ages of 0 to 0 in the loss"),
        (AHEAD, 2, 1, {}, "expected ages of 0 to 1 in the loss"),
        (AHEAD, 2, 0, {}, "a token was left out"),
        (IN_FLIGHT, 5, 1, {}, "expected ages of 0 to 4 in the loss"),
        (IN_FLIGHT, 4, 0, {}, "expected ages of 0 to 4 in the loss"),
        (IN_FLIGHT, -1, 1, {}, "expected ages of 0 to 4 in the loss"),
        (AHEAD, 1, 1, {"logp_error": 0.01}, "log-probabilities are off by 1.0e-02"),
        (AHEAD, 1, 1, {"logp_error": float("nan")}, "log-probabilities are off by nan"),
        (AHEAD, 1, 1, {"rewards": []}, "a step is missing"),
        (AHEAD, 1, 1, {"rewards": [float("nan")]}, "its reward not finite"),
    ],
)
def test_what_is_wrong_with_a_run(way, age, kept, changes, message) -> None:
    outcome = {"logp_error": 1e-6, "rewards": [0.1], "left_out": 1.0 - kept} | changes
    error = find_error(way, _run(age, kept), [*PROMPTS], outcome)
    assert error is None if message is None else message in error


def test_each_prompt_is_trained_on_once() -> None:
    outcome = {"logp_error": 1e-6, "rewards": [0.1], "left_out": 0.0}
    watch = _run(age=0)
    for prompts in (["12="], [*PROMPTS, "3="], ["12=", "3="]):
        assert "exactly once" in find_error(IN_TURN, watch, prompts, outcome)
    watch.trained += watch.trained[:1]
    assert "exactly once" in find_error(IN_TURN, watch, [*PROMPTS], outcome)


def test_the_settings_of_the_guide_are_valid(tmp_path: Path) -> None:
    [settings] = blocks((ROOT / "docs/guides/asynchronous.md").read_text(), "yaml")
    args = GRPOConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, **yaml.safe_load(settings)
    )
    assert args.generation_batches_ahead == 1 and args.max_staleness == MAX_STALENESS
