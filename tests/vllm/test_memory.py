"""What training has in memory when a colocated vLLM takes its share back."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import Qwen3ForCausalLM

from grpo_trainer import GRPOTrainer
from grpo_trainer.demo.task import digits_reversal_reward
from grpo_trainer.engines import EngineContext
from grpo_trainer.policy import base_policy
from grpo_trainer.vllm.engines import ColocatedVLLM
from tests.tools.test_plan import LiveBytes
from tests.vllm.vllm_helpers import LORA, change

SLACK = 64 << 10  # bytes of prompts, completions and metrics


@pytest.fixture
def policy(policy) -> Qwen3ForCausalLM:
    """Return a model of many layers, each much larger than the slack."""
    config = policy.config
    config.update({"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 8})
    config.layer_types = ["full_attention"] * 8
    return Qwen3ForCausalLM(config)


class RealBytes(LiveBytes):
    """Without tensors on the meta device, by which vLLM describes its weights."""

    def _add(self, x: Tensor) -> None:
        if x.device.type != "meta":
            super()._add(x)


def states(trainer: GRPOTrainer) -> int:
    """Return the bytes of the optimizer's states."""
    values = trainer.optimizer.state.values()
    tensors = (value for state in values for value in state.values() if torch.is_tensor(value))
    return sum(value.nbytes for value in tensors)


class Watched:
    """What exists when vLLM falls asleep, and when it wakes."""

    def __init__(self, trainer: GRPOTrainer, live: LiveBytes, monkeypatch) -> None:
        self.trainer, self.live = trainer, live
        self.asleep: list[int] = []  # bytes, without the optimizer's states
        self.awake: list[int] = []
        self.peaks: list[int] = []  # of all bytes while training had the memory
        engine = trainer.rollouts.engine
        engine._sleep_level = 2
        monkeypatch.setattr(engine._llm, "sleep", self._sleep)
        monkeypatch.setattr(engine._llm, "wake_up", self._wake)

    def _now(self) -> int:
        return self.live._now - states(self.trainer)

    def _sleep(self, level: int) -> None:
        self.asleep.append(self._now())
        self.live.growth = 0

    def _wake(self, tags: list[str]) -> None:
        if tags == ["weights"]:
            self.awake.append(self._now())
            self.peaks.append(self.live.growth)


@pytest.mark.parametrize("adapter", [False, True])
def test_training_has_given_its_memory_back(
    make_args, policy, tokenizer, dataset, monkeypatch, adapter
):
    """When vLLM wakes there are weights and the optimizer's states, and nothing of the step."""
    args = make_args(bf16=True, max_steps=3, beta=0.1 if adapter else 0.0)
    made, before_vllm = ColocatedVLLM.__init__, []

    def make(engine: ColocatedVLLM, context: EngineContext) -> None:
        before_vllm.append(live._now)
        made(engine, context)

    monkeypatch.setattr(ColocatedVLLM, "__init__", make)
    with RealBytes() as live:
        trainer = GRPOTrainer(
            Qwen3ForCausalLM(policy.config), digits_reversal_reward, args, dataset,
            processing_class=tokenizer, peft_config=LoraConfig(**LORA) if adapter else None,
        )  # fmt: skip
        watched = Watched(trainer, live, monkeypatch)
        trainer.train()
    trainer.rollouts.close()
    weights = sum(value.nbytes for value in trainer.model.parameters())
    assert weights <= before_vllm[0] <= weights + SLACK
    assert len(watched.awake) == 2
    for awake, peak in zip(watched.awake, watched.peaks, strict=True):
        assert awake <= watched.asleep[0] + SLACK
        assert peak > awake + 10 * SLACK  # gradients and activations are seen
    assert all(value.grad is None for value in trainer.model.parameters())


@pytest.mark.parametrize(("merged", "layers"), [(False, 1), (True, 3)])
def test_weights_are_sent_one_after_the_other(make_sampler, policy, merged, layers, monkeypatch):
    """At most one layer of vLLM is in memory again, and what an adapter is merged into for it."""
    monkeypatch.setattr("vllm._custom_ops._supports_onednn", False)  # as a GPU has weights
    if merged:
        policy = get_peft_model(policy, LoraConfig(**LORA))
    sampler = make_sampler(policy, vllm_lora_transfer="merged")
    sampler.send()
    change(policy)
    [vllms] = sampler.engine._llm.apply_model(_tensors)
    mlp = base_policy(policy).model.layers[0].mlp
    largest = mlp.gate_proj.weight.nbytes + mlp.up_proj.weight.nbytes  # one layer in vLLM
    with RealBytes(*policy.state_dict().values(), *vllms) as live:
        sampler.send()
    assert largest <= live.growth <= layers * largest + SLACK
    assert live.growth < sum(value.nbytes for value in vllms) / 4
    assert live._now <= SLACK


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]
