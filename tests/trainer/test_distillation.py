"""A teacher: by its log-probabilities as advantages, or over the whole vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels.batch import IGNORE_INDEX
from grpo_kernels.hf import add_fused_head
from grpo_trainer import GRPOTrainer
from grpo_trainer.demo.policy import make_policy, make_tokenizer
from grpo_trainer.engines import Completions
from grpo_trainer.policy import target_logprobs
from tests.support.trainer import CannedEngine, adapted, lengths_reward, parameters
from tests.trainer.features import resumable

KINDS = ("forward_kl", "reverse_kl", "jsd")


def policy(seed: int) -> Any:
    model = make_policy(make_tokenizer(), seed=seed)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    return model


def made(folder: Path, **changes: Any) -> GRPOTrainer:
    usual: dict[str, Any] = {"model": policy(0), "teacher": policy(1), "max_steps": 2}
    usual |= {"rollout_engine": CannedEngine(), "reward_funcs": lengths_reward, "temperature": 0.8}
    built = resumable(usual | changes, folder)
    built.current_gradient_accumulation_steps = 1  # which train() sets
    return built


def logp_of(model: Any, batch: Any, temperature: float) -> Tensor:
    """Return (B, L, V) log-probabilities in fp64."""
    output = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask)
    return (output.logits.double() / temperature).log_softmax(-1)


def batch_of(trained: GRPOTrainer) -> Any:
    return trained._generation_batch()[0]


@pytest.mark.parametrize("kind", KINDS)
def test_divergence_is_added_to_the_loss(tmp_path: Path, kind: str) -> None:
    settings = {"distillation": kind, "distillation_coef": 0.7, "distillation_beta": 0.3}
    trained = made(tmp_path / "a", **settings)
    plain = made(tmp_path / "b", teacher=None)
    batch, losses, gradients = batch_of(trained), [], []
    for each in (trained, plain):
        each.model.zero_grad()
        loss = each.compute_loss(each.model, batch)
        loss.backward()
        losses.append(loss.detach().double())
        gradients.append(torch.cat([p.grad.reshape(-1) for p in each.model.parameters()]))
    expected = policy(0).double()
    log_s, in_loss = logp_of(expected, batch, 0.8), batch.target != IGNORE_INDEX
    log_t = logp_of(policy(1), batch, 0.8).detach()
    if kind == "forward_kl":
        each = log_t.exp() * (log_t - log_s)
    elif kind == "reverse_kl":
        each = log_s.exp() * (log_s - log_t)
    else:
        middle = (0.7 * log_s.exp() + 0.3 * log_t.exp()).log()
        each = 0.3 * log_t.exp() * (log_t - middle) + 0.7 * log_s.exp() * (log_s - middle)
    divergence = 0.7 * each.sum(-1)[in_loss].sum() / batch.num_items
    divergence.backward()
    torch.testing.assert_close(losses[0] - losses[1], divergence.detach(), rtol=1e-4, atol=1e-5)
    exact = torch.cat([p.grad.reshape(-1) for p in expected.parameters()])
    difference = (gradients[0] - gradients[1]).double()
    assert (difference - exact).norm() < 1e-3 * exact.norm()


def test_log_probabilities_are_added_to_advantages(tmp_path: Path) -> None:
    trained = made(tmp_path / "a", distillation_coef=0.5)
    plain = batch_of(made(tmp_path / "b", teacher=None))
    batch = batch_of(trained)
    assert torch.equal(batch.input_ids, plain.input_ids)
    gain = [
        logp_of(model, batch, 0.8).gather(-1, batch.target.clamp(min=0)[..., None])[..., 0]
        for model in (policy(1), policy(0))
    ]
    in_loss = batch.target != IGNORE_INDEX
    expected = plain.advantages[:, None] + 0.5 * (gain[0] - gain[1]).where(in_loss, 0.0)
    torch.testing.assert_close(batch.advantages.double(), expected, rtol=1e-4, atol=1e-4)
    assert batch.old_logprobs is not None


def test_padding_of_the_teachers_head_has_no_probability(tmp_path: Path) -> None:
    padded = policy(1)
    padded.resize_token_embeddings(32, mean_resizing=False)
    with torch.no_grad():
        padded.lm_head.weight[14:] = padded.lm_head.weight[3]
    batches = [
        batch_of(made(tmp_path / name, teacher=teacher))
        for name, teacher in {"plain": policy(1), "padded": padded}.items()
    ]
    plain, found = (batch.advantages for batch in batches)
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ("logprobs", "reverse_kl"))
def test_a_step_without_rewards_follows_the_teacher(tmp_path: Path, kind: str) -> None:
    """A step of gradient descent is the formula's, and leaves the teacher as it is."""
    trained = made(
        tmp_path, reward_funcs=None, distillation=kind, max_steps=1, optim="sgd",
        learning_rate=0.1, max_grad_norm=0.0, save_strategy="no",
    )  # fmt: skip
    trained.train()
    [batch] = trained._buffer.batches
    start = policy(0).double()
    log_s, log_t = (logp_of(model, batch, 0.8) for model in (start, policy(1)))
    if kind == "logprobs":
        chosen = batch.target.clamp(min=0)[..., None]
        log_s, log_t = log_s.gather(-1, chosen), log_t.gather(-1, chosen)
        kl = log_s - log_t
        each = log_s * kl.detach()
    else:
        each = kl = log_s.exp() * (log_s - log_t)
    in_loss = batch.target != IGNORE_INDEX
    (each.sum(-1)[in_loss].sum() / batch.num_items).backward()
    exact = -0.1 * torch.cat([p.grad.reshape(-1) for p in start.parameters()])
    moved = parameters(trained.model) - parameters(policy(0))
    assert (moved - exact).norm() < 1e-3 * exact.norm()
    logged = trained.state.log_history[0]["teacher_kl"]
    assert logged == pytest.approx(kl.sum(-1)[in_loss].mean().item(), rel=1e-4)
    teacher = trained._models.teacher
    assert teacher is not None
    assert torch.equal(parameters(teacher._reference.model), parameters(policy(1)))


def test_an_adapter_of_the_policy_teaches(tmp_path: Path) -> None:
    """As the same weights in a model of their own do."""
    lora = {"r": 2, "target_modules": ["q_proj", "lm_head"], "task_type": "CAUSAL_LM"}
    torch.manual_seed(0)
    model = adapted(policy(0), **lora)
    model.add_adapter("teacher", model.peft_config["default"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".teacher." in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    for kind in ("logprobs", "jsd"):
        trained = made(tmp_path / kind, model=model, teacher="teacher", distillation=kind)
        batch = batch_of(trained)
        loss = trained.compute_loss(trained.model, batch)
        assert trained.model.active_adapters == ["default"]
        model.set_adapter("teacher")
        add_fused_head(model.get_base_model())
        alone = target_logprobs(model, batch, 0.8)
        model.set_adapter("default")
        found = trained._models.teacher._logprobs(batch, trained.model)
        assert torch.equal(found, alone) and loss.isfinite()


def test_a_function_teaches(tmp_path: Path) -> None:
    """Such as a server's client."""
    asked: list[list[int]] = []

    def logprobs(sequences: list[list[int]]) -> list[list[float]]:
        asked.extend(sequences)
        return [[-0.5 * i for i in range(1, len(ids))] for ids in sequences]

    trained = made(tmp_path, teacher=logprobs, temperature=1.0)
    batch = batch_of(trained)
    found = trained._models.teacher._logprobs(batch, trained.model)
    length = int(batch.attention_mask[0].sum())
    assert batch.input_ids[0, :length].tolist() in asked
    assert found[0, : length - 1].tolist() == [-0.5 * i for i in range(1, length)]
    trained._models.teacher._function = lambda sequences: [[0.0]] * len(sequences)
    with pytest.raises(ValueError, match="teacher: expected a log-probability for each token"):
        trained._models.teacher._logprobs(batch, trained.model)


def test_a_teacher_by_its_folder_and_in_evaluation(tmp_path: Path) -> None:
    folder = tmp_path / "teacher"
    policy(1).save_pretrained(folder)
    for kind in ("logprobs", "forward_kl"):
        trained = made(tmp_path / kind, teacher=None, distillation=kind)
        loss = trained.evaluate()["eval_loss"]
        trained = made(tmp_path / f"{kind}2", teacher=str(folder), distillation=kind)
        found = trained.evaluate()
        assert found["eval_teacher_kl"] != 0 and found["eval_loss"] != loss


@pytest.mark.parametrize("kind", ["logprobs", "jsd"])
def test_ids_that_only_the_policy_has_are_not_drawn(tmp_path: Path, kind: str) -> None:
    """Its embedding is padded further than the teacher's; these ids are its likeliest here."""
    wider = policy(0)
    wider.resize_token_embeddings(32, mean_resizing=False)
    with torch.no_grad():
        wider.lm_head.weight[14:] = 5 * wider.lm_head.weight[3]
    trained = made(tmp_path / "a", model=wider, rollout_engine=None, distillation=kind)
    trained.train()
    assert trained.rollouts.sampling.suppressed == set(range(14, 32))

    class Padding(CannedEngine):
        def generate(self, prompt_ids: list[list[int]], sampling: Any) -> Completions:
            return Completions([[31]] * len(prompt_ids))

    with pytest.raises(ValueError, match="engine Padding: .* token ids 0 <= id < 14, got 31"):
        made(tmp_path / "b", model=wider, rollout_engine=Padding(), distillation=kind).train()


def without_model(sequences: list[list[int]]) -> list[list[float]]:
    return [[0.0] * (len(ids) - 1) for ids in sequences]


def of_nine_ids() -> Any:
    model = policy(1)
    model.resize_token_embeddings(9, mean_resizing=False)
    return model


SMALLER = {"teacher": of_nine_ids(), "distillation": "jsd"}


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("teacher: model 'nowhere' cannot be loaded", {"teacher": "nowhere"}),
        ("distillation: expected one of forward_kl, jsd, logprobs", {"distillation": "kl"}),
        ("distillation_coef: expected a number > 0", {"distillation_coef": 0}),
        ("distillation_beta: expected a number in ", {"distillation_beta": 1.0}),
        (
            "distillation: expected 'logprobs' with a teacher that returns only log-probabilities",
            {"teacher": without_model, "distillation": "jsd"},
        ),
        (
            "temperature: expected 1.0, as in the log-probabilities of this teacher",
            {"teacher": without_model},
        ),
        (
            "use_sampling_mask: expected False, as in the log-probabilities of this",
            {"teacher": without_model, "temperature": 1.0, "top_k": 3, "use_sampling_mask": True},
        ),
        ("teacher: expected the policy's vocabulary, of 14 tokens, got a model of 9", SMALLER),
    ],
)
def test_wrong_teachers(tmp_path: Path, message: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=message):
        made(tmp_path, **changes)
