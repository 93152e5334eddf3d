"""The model and the task that every trainer is given: made on the spot, the same for all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

PAD, EOS, FIRST_WORD = 0, 1, 2
SEED = 0
_POSITIONS = 32768  # of the real model


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Shapes of the model and of one optimisation step, as a case of a benchmark."""

    name: str
    dtype: str = "fp32"
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int
    prompts: int  # different prompts of a step
    group: int  # completions of a prompt
    prompt_tokens: int
    completion_tokens: int  # of every completion, so that all trainers have the same work
    micro_batches: int  # of a step

    def __post_init__(self) -> None:
        if self.sequences % self.micro_batches:
            raise ValueError(
                f"micro_batches: expected a divisor of the {self.sequences} completions of a step, "
                f"got {self.micro_batches}"
            )

    @property
    def sequences(self) -> int:
        """Completions of a step."""
        return self.prompts * self.group

    @property
    def micro_batch(self) -> int:
        """Completions of a micro-batch."""
        return self.sequences // self.micro_batches

    @property
    def tokens(self) -> int:
        """Completion tokens of a step: those in the loss."""
        return self.sequences * self.completion_tokens

    @property
    def model(self) -> str:
        return (
            f"qwen2-shaped, {self.layers} layers, hidden {self.hidden}, "
            f"vocabulary {self.vocabulary}"
        )

    def facts(self) -> dict[str, Any]:
        """Return the facts as a result file holds them."""
        names = ("model", "dtype", "sequences", "prompt_tokens", "completion_tokens")
        return {name: getattr(self, name) for name in (*names, "micro_batches", "tokens")}

    def __str__(self) -> str:
        return self.name


QUICK = TrainingConfig(
    name="quick", layers=2, hidden=128, intermediate=512, heads=4, kv_heads=2, vocabulary=8192,
    prompts=2, group=4, prompt_tokens=16, completion_tokens=32, micro_batches=2,
)  # fmt: skip
# the width, the head and the tied embeddings of Qwen2.5-0.5B, which has 24 layers
_FULL = TrainingConfig(
    name="full", layers=2, hidden=896, intermediate=4864, heads=14, kv_heads=2, vocabulary=151936,
    prompts=2, group=4, prompt_tokens=32, completion_tokens=64, micro_batches=2,
)  # fmt: skip
_FULL_GPU = replace(
    _FULL, name="full-gpu", layers=4,
    prompts=8, group=8, prompt_tokens=64, completion_tokens=256,
)  # fmt: skip
SIZES = {
    config.name: config
    for config in (
        replace(
            QUICK, name="tiny", layers=1, hidden=32, intermediate=64, heads=2, kv_heads=1,
            vocabulary=512, prompt_tokens=4, completion_tokens=6,
        ),
        QUICK,
        _FULL,
        _FULL_GPU,
        # what an update of an engine's weights costs depends on the size
        replace(
            _FULL, name="middle", layers=4, hidden=512, intermediate=2048, heads=8,
            vocabulary=32000, completion_tokens=32,
        ),
        replace(_FULL, name="large", completion_tokens=32),
        replace(_FULL_GPU, name="middle-gpu", layers=12),
        # the width of Qwen2.5-1.5B
        replace(
            _FULL_GPU, name="large-gpu", layers=14, hidden=1536, intermediate=8960, heads=12
        ),
    )
}  # fmt: skip


def make_model(config: TrainingConfig) -> PreTrainedModel:
    """Return the initial policy: fp32, the same random weights at every call."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        return Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=config.vocabulary,
                hidden_size=config.hidden,
                intermediate_size=config.intermediate,
                num_hidden_layers=config.layers,
                num_attention_heads=config.heads,
                num_key_value_heads=config.kv_heads,
                max_position_embeddings=_POSITIONS,
                tie_word_embeddings=True,
                pad_token_id=PAD,
                eos_token_id=EOS,
                bos_token_id=None,
            )
        )


def make_tokenizer(config: TrainingConfig) -> PreTrainedTokenizerFast:
    """Return one word per entry of the vocabulary: ``w0 w1 w2 ...``."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    unknown = f"w{FIRST_WORD}"
    words = {f"w{index}": index for index in range(config.vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=f"w{PAD}", eos_token=f"w{EOS}", unk_token=unknown
    )


def make_dataset(config: TrainingConfig, steps: int) -> Dataset:
    """Return prompts of one length, enough for so many steps."""
    from datasets import Dataset

    prompts = make_texts(config, config.prompts * steps, config.prompt_tokens, SEED)
    return Dataset.from_dict({"prompt": prompts})


def make_texts(config: TrainingConfig, count: int, length: int, seed: int) -> list[str]:
    """Return so many random texts of one length."""
    generator = torch.Generator().manual_seed(seed)
    shape = count, length
    ids = torch.randint(FIRST_WORD, config.vocabulary, shape, generator=generator)
    return [" ".join(f"w{i}" for i in row) for row in ids.tolist()]


def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Reward differently within a group, so that hardly any advantage is 0."""
    return [sum(ids) % 1009 / 1009 for ids in completion_ids]
