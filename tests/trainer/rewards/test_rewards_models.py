"""Reward models: one logit per text, whatever else is in the batch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForSequenceClassification

from grpo_trainer.demo.policy import make_tokenizer, write_policy
from grpo_trainer.demo.task import digits_reversal_reward
from grpo_trainer.rewards import resolve_rewards, score

PROMPTS = ["12=", "3=", "456="]
COMPLETIONS = ["21", "3", "6545"]


def classifier(tokenizer, labels: int = 1) -> Qwen3ForSequenceClassification:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_labels=labels,
    )
    return Qwen3ForSequenceClassification(config).train()


@pytest.fixture
def folder(tmp_path, tokenizer) -> str:
    path = tmp_path / "judge"
    classifier(tokenizer).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def one_by_one(model, tokenizer, texts: list[str]) -> list[list[float]]:
    rows = [tokenizer(text, add_special_tokens=False, return_tensors="pt") for text in texts]
    model.eval()
    with torch.no_grad():
        return [[model(input_ids=row["input_ids"]).logits.item()] for row in rows]


def rewards_of(source, args, tokenizers=None, prompts=PROMPTS, completions=COMPLETIONS):
    [reward] = resolve_rewards(source, tokenizers, args)
    return score([reward], len(prompts), {"prompts": prompts, "completions": completions})


def test_folder_and_module(folder, tokenizer, make_args):
    args = make_args(per_device_train_batch_size=2, num_generations=2)  # batches of 2 and 1
    model = classifier(tokenizer)
    texts = [p + c for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    expected = torch.tensor(one_by_one(model, tokenizer, texts))
    assert expected.std() > 0
    torch.testing.assert_close(rewards_of(folder, args), expected)
    model.config.pad_token_id = None
    torch.testing.assert_close(rewards_of(model.train(), args, tokenizer), expected)
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    assert resolve_rewards(folder, args=args)[0].name == "judge"
    assert resolve_rewards(model, tokenizer, args)[0].name == "Qwen3ForSequenceClassification"


@pytest.mark.filterwarnings("error")  # its head is trained
def test_loaded_as_the_policy_is(folder, make_args):
    def loaded(**kwargs):
        [reward] = resolve_rewards(folder, args=make_args(model_init_kwargs=kwargs))
        return reward.function.model

    assert loaded().dtype == torch.float32
    model = loaded(dtype="bfloat16", attn_implementation="eager")
    assert model.dtype == torch.bfloat16 and model.config._attn_implementation == "eager"
    with pytest.raises(ValueError, match="model_init_kwargs: .*'nothing'.* .reward_funcs: model"):
        loaded(nothing=1)


def test_own_tokenizer_and_chat_template(tokenizer, make_args):
    own = make_tokenizer()
    own.chat_template = "{% for message in messages %}{{ message['content'] }}={% endfor %}"
    own.pad_token = None  # the end-of-sequence token takes its place
    model = classifier(tokenizer)
    prompts = [[{"role": "user", "content": text}] for text in ("12", "3")]
    completions = [[{"role": "assistant", "content": text}] for text in ("21", "3456")]
    given = rewards_of(model, make_args(), [own], prompts, completions)
    parts = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "12"}]
    prompts[0][0]["content"] = parts  # it sees no images
    torch.testing.assert_close(rewards_of(model, make_args(), [own], prompts, completions), given)
    expected = torch.tensor(one_by_one(model, own, ["12=21=", "3=3456="]))
    torch.testing.assert_close(given, expected)


def test_what_is_no_reward_model_or_does_not_fit(tmp_path, tokenizer, make_args):
    write_policy(tmp_path / "policy", seed=0)
    with pytest.warns(UserWarning, match="expected a trained reward model, .*score.weight"):
        rewards = rewards_of(str(tmp_path / "policy"), make_args())
    assert rewards.shape == (3, 1) and rewards.isfinite().all()

    class TwoLogits(nn.Module):
        def forward(self, input_ids, attention_mask):
            return SimpleNamespace(logits=torch.zeros(len(input_ids), 2))

    with pytest.raises(RuntimeError, match=r"'TwoLogits' .* shape \(3, 1\), got \(3, 2\)"):
        rewards_of(TwoLogits(), make_args(), tokenizer)
    model, bare = classifier(tokenizer), make_tokenizer()
    bare.pad_token = bare.eos_token = None
    for source, tokenizers, message in (
        (classifier(tokenizer, labels=2), tokenizer, "model with 1 label, got '.*' with 2"),
        (model, None, "reward_processing_classes: expected a tokenizer for"),
        ([model, digits_reversal_reward], tokenizer, "_classes: expected 2, .* got 1"),
        (model, bare, "expected a pad_token or an eos_token"),
    ):
        with pytest.raises(ValueError, match=message):
            resolve_rewards(source, tokenizers, make_args())
