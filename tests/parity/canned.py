"""Canned rollouts, and the tiny model and tokenizer they are for. Nothing here needs a network."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

VOCABULARY, PAD, EOS = 197, 0, 1
SEQUENCES = 16  # of a generation batch


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """What the rollout engine is said to have produced, and how it was scored."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    env_mask: list[list[int]] | None  # 0 for tool results
    rewards: list[float]
    noise: list[list[float]]  # engine's minus trainer's log-probability; NaN: not reported


def make_rollouts(seed: int = 0, *, env_mask: bool = True, unknown: bool = True) -> Rollouts:
    """Return ragged rollouts; sequence 7 is cut off, so TRL masks all of it."""
    g = torch.Generator().manual_seed(seed)

    def tokens(length: int) -> list[int]:
        return torch.randint(2, VOCABULARY, (length,), generator=g).tolist()

    lengths = [5, 9, 1, 7, 6, 3, 8, 9, 4, 9, 2, 6, 7, 1, 5, 8]
    completions = [[*tokens(length - 1), EOS] for length in lengths]
    completions[7] = tokens(lengths[7])  # no end of sequence
    masks = [[int(not (n > 4 and 1 <= t < 3)) for t in range(n)] for n in lengths]
    masks[11] = [0] * lengths[11]  # nothing of it is the policy's
    # close to the trainer in some sequences, far from it in others
    scales = [0.05, 0.3, 0.1, 0.4, 0.05, 0.3, 0.2, 0.1] * 2
    noise = [
        (torch.randn(n, generator=g) * scale).tolist()
        for n, scale in zip(lengths, scales, strict=True)
    ]
    if unknown:
        noise[1][4] = noise[9][0] = float("nan")
    rewards = [1.0, 0.1, 0.0, 0.7, 0.5, 0.5, 1.4, 0.2, 0.3, 0.9, 1.0, 0.0, 0.2, 1.2, 0.6, 0.6]
    return Rollouts(
        prompt_ids=[tokens(1 + i // 2 % 4) for i in range(SEQUENCES)],
        completion_ids=completions,
        env_mask=masks if env_mask else None,
        rewards=rewards,
        noise=noise,
    )


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=f"w{PAD}", eos_token=f"w{EOS}", unk_token="w2"
    )


def tiny_model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.2,
        tie_word_embeddings=False,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
    )
    return Qwen2ForCausalLM(config)
