"""A vLLM server: its log-probabilities are the policy's, before and after updates."""

from __future__ import annotations

import copy
import json
import random
import time

import httpx
import pytest
import torch
from safetensors.torch import load_file

from grpo_trainer import GRPOTrainer
from grpo_trainer.common import start
from grpo_trainer.demo.task import digits_reversal_reward
from grpo_trainer.engines import Completion, Completions, policy_weights
from grpo_trainer.vllm import NoServerError, ServerError, VLLMClient
from grpo_trainer.vllm.settings import check_reports_experts
from tests.support.server_contract import ServerContract
from tests.vllm.vllm_helpers import (
    CLOSE,
    GROUPS,
    PROMPTS,
    adapted,
    change,
    difference,
    make_model,
    quantized,
    serving,
    worst_mismatch,
)


@pytest.fixture(scope="module")
def server(tmp_path_factory, tokenizer):
    model = make_model(tokenizer, tied=True)
    with serving(tmp_path_factory.mktemp("server"), model, tokenizer) as server:
        yield server


@pytest.fixture
def weights(policy):
    return lambda: policy_weights(policy)


class TestServer(ServerContract): ...


@pytest.fixture
def client(server, tmp_path):
    client = server.connected()
    client.init_communicator("cpu", folder=tmp_path / "weights")
    yield client
    client.close()


def apart(client: VLLMClient, policy, temperature: float = 1.0, **filters) -> float:
    settings = {"temperature": temperature, "logprobs": 8 if filters else 0} | filters
    answer = client.generate(PROMPTS, n=4, max_tokens=8, **settings)
    mask = answer["sampling_mask"] if filters else None
    found = Completions(answer["completion_ids"], answer["logprobs"], mask)
    return difference(policy, GROUPS, found, temperature, **filters)


def test_prompt_logprobs(client, policy):
    """What a teacher is asked for."""
    sequences = [[3, 4, 5, 6], [7, 8], [3, 9, 4]]
    found = client.prompt_logprobs(sequences)
    for ids, logprobs in zip(sequences, found, strict=True):
        expected = logprobs_of(policy, torch.tensor([ids]))
        torch.testing.assert_close(torch.tensor(logprobs), expected, rtol=0, atol=CLOSE)


def test_parity(client, policy):
    assert client.get_server_info()["model_config"]["logprobs_mode"] == "processed_logprobs"
    assert max(apart(client, policy), apart(client, policy, 0.7)) < CLOSE
    change(policy)
    assert apart(client, policy) > 0.1
    client.update_weights(lambda: policy_weights(policy))
    assert max(apart(client, policy), apart(client, policy, 0.7)) < CLOSE


def test_the_key_is_asked_for(client, server):
    stranger = VLLMClient(server_port=server.port, api_key="guessed")
    for ask in (stranger.get_world_size, lambda: stranger.generate(PROMPTS)):
        with pytest.raises(ServerError, match="got 401: "):
            ask()
    stranger.close()


def test_what_a_web_page_sends_is_refused(client, server):
    url, key = f"http://127.0.0.1:{server.port}", {"Authorization": "Bearer secret"}
    body = json.dumps({"method": "get_supported_tasks"})
    as_json = key | {"Content-Type": "application/json"}
    answers = {
        "ours": httpx.post(f"{url}/collective_rpc", content=body, headers=as_json),
        "without a key": httpx.post(f"{url}/collective_rpc", content=body),
        "as text": httpx.post(f"{url}/pause", headers=key | {"Content-Type": "text/plain"}),
        "without a type": httpx.post(f"{url}/pause", headers=key),
        "of another page": httpx.post(
            f"{url}/pause", headers=as_json | {"Origin": "http://example.com"}
        ),
        "by another name": httpx.get(f"{url}/server_info", headers=key | {"Host": "example.com"}),
        "up": httpx.get(f"{url}/health"),
        "documentation": httpx.get(f"{url}/openapi.json"),
    }
    assert {name: answer.status_code for name, answer in answers.items()} == {
        "ours": 200,
        "without a key": 401,
        "as text": 415,
        "without a type": 415,
        "of another page": 403,
        "by another name": 403,
        "up": 200,
        "documentation": 401,
    }


def test_what_is_sampled(client, tokenizer):
    settings = {"n": 8, "max_tokens": 8, "seed": 5}
    first = client.generate(PROMPTS, **settings)
    assert first == client.generate(PROMPTS, **settings)
    assert len({tuple(ids) for ids in first["completion_ids"][:8]}) > 4
    texts = ["123=", "4="]
    assert client.generate(texts)["prompt_ids"] == tokenizer(texts)["input_ids"]
    only_digits = {"structured_outputs": {"regex": "[0-9]{3}"}}
    digits = client.generate(PROMPTS, n=4, **only_digits)["completion_ids"]
    assert all(text.rstrip("<eos>").isdigit() for text in tokenizer.batch_decode(digits))
    for prompt, said in (([99999], "got 400: .*out of vocabulary"), ([3] * 200, "got 400: ")):
        with pytest.raises(ServerError, match=said):
            client.generate([prompt])


def test_a_server_that_was_started_without(client, server, make_sampler, rounded):
    with pytest.raises(ValueError, match="started without --enable-return-routed-experts"):
        check_reports_experts(client.get_server_info())
    with pytest.raises(ValueError, match="use_vllm: .*started without --enable-lora"):
        make_sampler(adapted(quantized(rounded)), vllm_server_port=server.port)


def test_sampling_mask(client, policy):
    client.update_weights(lambda: policy_weights(policy))
    for filters in ({"top_k": 4}, {"top_k": 6, "top_p": 0.7}):
        assert apart(client, policy, **filters) < CLOSE


def test_weights_in_flight(client, policy):
    """A completion goes on by newer weights: its versions say which drew each token, and the
    log-probabilities are those of these weights, which have read all tokens before."""
    later = copy.deepcopy(policy)
    change(later)
    fields = {"n": 1, "max_tokens": 120, "logprobs": 0, "ignore_eos": True, "temperature": 1.0}
    mixed: list[Completion] = []
    while len(mixed) < 4:  # how fast the server is nobody knows
        client.update_weights(lambda: policy_weights(policy))
        first = client.sent.updates
        asked = [client.complete([[3, 4, 5]], [[]], fields, in_flight=True) for _ in range(8)]
        running = start(asked)
        time.sleep(random.expovariate(3))
        client.update_weights(lambda: policy_weights(later))
        rows = [row for _, answer in running.result() for row in answer.rows()]
        assert all(len(row.token_ids) == 120 for row in rows)
        mixed = [row for row in rows if len(set(row.versions)) == 2]
    for row in mixed:
        assert sorted(row.versions) == row.versions
        assert set(row.versions) == {first, first + 1}
        sampled = torch.tensor([[3, 4, 5, *row.token_ids]])
        of_old, of_new = (logprobs_of(model, sampled)[2:] for model in (policy, later))
        expected = torch.where(torch.tensor(row.versions) == first, of_old, of_new)
        torch.testing.assert_close(torch.tensor(row.logprobs), expected, rtol=0, atol=CLOSE)
        assert (of_old - of_new).abs().max() > 0.1


def logprobs_of(model, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scores = model(ids).logits[0, :-1].log_softmax(-1)
    return scores.gather(-1, ids[0, 1:, None])[:, 0]


def test_sampled_ahead(server, make_args, policy, tokenizer, dataset):
    """A run that samples ahead, with weights in flight."""
    args = make_args(
        vllm_server_port=server.port, max_steps=5, generation_batches_ahead=2, max_staleness=3
    )
    ages = []

    def note(batch, model) -> None:
        step = trainer.state.global_step
        ages.append([step - v for sample in batch.samples for v in sample.rollout_versions])

    trainer = GRPOTrainer(
        policy, digits_reversal_reward, args, dataset, processing_class=tokenizer, columns=[note]
    )
    trainer.train()
    logged = [row["sampling/staleness"] for row in trainer.state.log_history if "loss" in row]
    assert logged == pytest.approx([sum(each) / len(each) for each in ages])
    assert logged[0] == 0 and 1 <= max(max(each) for each in ages) <= 3
    first = trainer.state.log_history[0]
    assert first["sampling/sampling_logp_difference/max"] < CLOSE
    trainer.rollouts.close()


def test_a_run_whose_server_was_restarted_resumes(
    server, make_args, policy, tokenizer, dataset, tmp_path
):
    """It dies after the second generation, and returns with the weights on its disk."""
    rewarded = 0

    def reward(**columns) -> list[float]:
        nonlocal rewarded
        rewarded += 1
        if rewarded == 2:
            server.kill()
        return digits_reversal_reward(**columns)

    changes = {"temperature": 0.7, "max_steps": 4, "save_strategy": "steps", "save_steps": 1}
    args = make_args(vllm_server_port=server.port, **changes)

    def make() -> GRPOTrainer:
        start = copy.deepcopy(policy)
        return GRPOTrainer(start, reward, args, dataset, processing_class=tokenizer)

    trainer = make()
    with pytest.raises(NoServerError, match=f"{server.port}.*`grpo-train serve --model"):
        trainer.train()
    trainer.rollouts.close()
    server.start()
    trainer = make()
    trainer.train(resume_from_checkpoint=True)
    assert worst_mismatch(trainer, steps=4) < CLOSE
    prompts = [tokenizer("123=")["input_ids"]] * 4
    found = trainer.rollouts.generate(prompts)
    assert difference(trainer.model.eval(), prompts, found, 0.7) < CLOSE
    # what the server was sent last are the trainer's weights
    [file] = (tmp_path / "out" / "vllm_weights").rglob("*.safetensors")
    sent, own = load_file(file), trainer.model.state_dict()
    assert sent.keys() == own.keys() and all(sent[name].equal(own[name].cpu()) for name in own)
    trainer.rollouts.close()
    assert not list((tmp_path / "out" / "vllm_weights").iterdir())
