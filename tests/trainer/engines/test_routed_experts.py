"""use_rollout_routing_replay: the experts that an engine reports, from its answer to the loss."""

from __future__ import annotations

import base64
import copy
import io

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from grpo_trainer.agents.loop import Conversation
from grpo_trainer.data import Sample
from grpo_trainer.engines import Completion
from grpo_trainer.vllm import ServerError
from tests.support import tools
from tests.support.batches import BatchTrainer
from tests.support.trainer import BackgroundEngine, CannedEngine, RoutedEngine, routed
from tests.support.vllm_stub import CONFIG, choices
from tests.trainer.engines.test_rollout_client import COMPLETE

LAYERS, EXPERTS, CHOSEN = 3, 8, 3
SIZES = {"layers": LAYERS, "experts": EXPERTS, "chosen": CHOSEN}
REPLAY = {"use_rollout_routing_replay": True}
ROUTING = "sampling/routing_difference"


def mixture(vocab_size: int) -> Qwen3MoeForCausalLM:
    """Return a model whose routers are often undecided."""
    config = Qwen3MoeConfig(
        vocab_size=vocab_size, hidden_size=32, intermediate_size=32, moe_intermediate_size=16,
        num_hidden_layers=LAYERS, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        num_experts=EXPERTS, num_experts_per_tok=CHOSEN, max_position_embeddings=256,
        initializer_range=0.4, pad_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.mul_(0.05)
            for weight in layer.mlp.experts.parameters():
                weight.normal_(std=0.4)
    return model


class RecordingEngine(BackgroundEngine):
    """Computes in bf16, and reports the experts that its routers chose then."""

    def __init__(self, tokenizer, policy) -> None:
        super().__init__(tokenizer, copy.deepcopy(policy).bfloat16())
        self._chosen: list[torch.Tensor] = []
        for layer in self._model.model.layers:
            layer.mlp.gate.register_forward_hook(lambda *args: self._chosen.append(args[-1][2]))

    def _reported(self, prompt, ids, sampling):
        self._chosen.clear()
        completion = super()._reported(prompt, ids, sampling)
        return completion._replace(routed_experts=torch.stack(self._chosen, 1)[:-1])

    def update_weights(self, weights, adapter: bool = False) -> None: ...


def test_engine_and_policy_differ_less(make_trainer, tokenizer):
    """Rounding sends some tokens through other experts, unless they are replayed."""
    differences = {}
    for replays in (False, True):
        policy = mixture(len(tokenizer))
        trainer = make_trainer(
            model=policy, engine=RecordingEngine(tokenizer, policy), max_steps=1,
            use_rollout_routing_replay=replays, beta=0.1, num_iterations=1,
        )  # fmt: skip
        trainer.train()
        [log] = [row for row in trainer.state.log_history if "loss" in row]
        assert (ROUTING in log) == replays
        assert not replays or 0.01 < log[ROUTING] < 0.3
        # the reference, which is the policy still, routes by itself
        assert (log["kl"] > 1e-4) if replays else (log["kl"] < 1e-6)
        differences[replays] = log["sampling/sampling_logp_difference/mean"]
    assert differences[True] < differences[False] / 2


def test_the_old_policy_replays_too(make_trainer, tokenizer):
    """So the ratio of the first step is 1."""
    policy = mixture(len(tokenizer))
    engine = RecordingEngine(tokenizer, policy)
    trainer = make_trainer(
        model=policy, engine=engine, kind=BatchTrainer, max_steps=2, num_iterations=2, **REPLAY
    )
    trainer.train()
    first = trainer.state.log_history[0]
    assert first["clip_ratio/region_mean"] == 0
    [batch, _] = trainer.batches
    assert batch.routed_experts.shape == (*batch.target.shape, LAYERS, CHOSEN)
    # all tokens have a record but the last one of each row and padding
    known = (batch.routed_experts >= 0).all(-1).all(-1)
    assert known.sum(1).equal(batch.attention_mask.sum(1) - 1)


def test_turns_keep_the_experts_they_were_drawn_by(make_args):
    """Results of tools have those of the turn that read them."""

    class Engine(tools.ScriptedEngine):
        def generate(self, prompt_ids, sampling):
            found = super().generate(prompt_ids, sampling)
            turns = routed(prompt_ids, found, *SIZES.values())
            if len(self.asked) == 1:
                self.first = turns.routed_experts[0]
                return turns
            self.second = [(x + 1) % EXPERTS for x in turns.routed_experts]
            return turns._replace(routed_experts=self.second)

    def script(text: str) -> str:
        return "end" if tools.results(text) else tools.call("add", a=1, b=1)

    tokenizer = tools.make_tool_tokenizer()
    engine = Engine(tokenizer, script)
    rows = Dataset.from_list([{"prompt": tools.question("1")}] * 4)
    trainer = BatchTrainer(
        mixture(len(tokenizer)),
        lambda completions, **kwargs: [float(i % 2) for i, _ in enumerate(completions)],
        make_args(max_steps=1, max_completion_length=200, **REPLAY),
        rows,
        processing_class=tokenizer,
        tools=[tools.add],
        rollout_engine=engine,
    )
    trainer.train()
    [batch] = trainer.batches
    found, count = batch.routed_experts[0], len(engine.first)
    assert found[:count].equal(engine.first.to(found))
    whole = len(engine.second[0])
    assert whole > count + 10 and found[count:whole].equal(engine.second[0][count:].to(found))
    assert (found[whole:] == -1).all()


def test_a_turn_that_is_cut(make_args):
    """Only as many tokens as there is room for keep their experts."""
    sample = Sample("", [3, 4], "", [])
    conversation = Conversation(sample, None, None, budget=3)
    experts = torch.arange(6 * 2).view(6, 2, 1)
    conversation.add(Completion([5, 6, 7, 8, 9], routed_experts=experts), by_policy=1)
    assert sample.completion_ids == [5, 6, 7] and sample.routed_experts.equal(experts[:4])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda experts: None, "expected an engine that reports .*, got none from Wrong"),
        (lambda experts: [x[1:] for x in experts], r"completion 0: .* of 7 tokens, .* got 6"),
        (lambda experts: [x.float() for x in experts], "completion 0: expected routed_experts as"),
        (lambda experts: [x[0] for x in experts], r"as integers >= -1, \(tokens, layers"),
        (lambda experts: [x - 2 for x in experts], "as integers >= -1"),
        (lambda experts: experts[1:], "routed_experts for 4 completions, got 3"),
        (lambda experts: [x + 1 for x in experts], r"3 layers, 3 of 8 experts\), got .* up to 8"),
        (lambda experts: [x[:, 1:] for x in experts], r"got \(7, 2, 3\) with experts up to"),
    ],
)
def test_engines_that_report_something_else(make_trainer, tokenizer, change, message):
    class Wrong(RoutedEngine):
        def generate(self, *args):
            completions = super().generate(*args)
            return completions._replace(routed_experts=change(completions.routed_experts))

    engine = Wrong(tokenizer, **SIZES)
    trainer = make_trainer(model=mixture(len(tokenizer)), engine=engine, **REPLAY)
    with pytest.raises(ValueError, match=message):
        trainer.train()


def test_what_nobody_replays_is_not_kept(make_trainer, tokenizer):
    engine = RoutedEngine(tokenizer, **SIZES)
    trainer = make_trainer(engine=engine, kind=BatchTrainer, max_steps=1)
    trainer.train()
    assert trainer.batches[0].routed_experts is None
    assert trainer.rollouts.generate([[3, 4]]).routed_experts is None


def test_a_model_by_name_is_refused_before_it_is_loaded(make_trainer, policy, tmp_path):
    policy.config.save_pretrained(tmp_path / "described")  # without weights
    with pytest.raises(ValueError, match="use_rollout_routing_replay: expected False for a model"):
        make_trainer(model=str(tmp_path / "described"), engine=CannedEngine(), **REPLAY)


def test_what_a_server_answers(make_client, stub):
    experts = np.arange(3 * 2 * 2, dtype=np.uint16).reshape(3, 2, 2)

    def answer(array):
        made = choices([[1, 2]], 1)
        with io.BytesIO() as file:
            np.save(file, array)
            made[0]["routed_experts"] = base64.b64encode(file.getvalue()).decode()
        return 200, {"choices": made}

    stub.script[COMPLETE] = [answer(experts), answer(experts[0])]
    client = make_client()
    [found] = client.generate([[1, 2]])["routed_experts"]
    assert found.dtype == torch.uint8 and found.tolist() == experts.tolist()
    with pytest.raises(ServerError, match="expected routed_experts as integers"):
        client.generate([[1, 2]])
    assert "routed_experts" not in client.generate([[1, 2]])


def test_a_server_that_does_not_report(make_trainer, tokenizer, stub, monkeypatch):
    settings = {
        "use_vllm": True, "vllm_mode": "server", "vllm_server_port": stub.port, **REPLAY,
    }  # fmt: skip
    with pytest.raises(ValueError, match="started without --enable-return-routed-experts"):
        make_trainer(model=mixture(len(tokenizer)), **settings)
    monkeypatch.setitem(CONFIG, "aux_output_config", {"enable_return_routed_experts": True})
    trainer = make_trainer(model=mixture(len(tokenizer)), **settings)
    trainer.rollouts.close()
