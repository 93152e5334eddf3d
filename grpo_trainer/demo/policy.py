"""Small tokenizers and a tiny Qwen3 policy with random weights, in the usual folder format."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

UNKNOWN = "?"  # a normal character, so it is visible if the policy writes it
END = "<eos>"  # also the padding token: no other token is left out of texts
CHARACTERS = ".0123456789="
# the extra tokens of the tokenizer for tools, and its chat template
_MARKS = ("<pad>", "<unk>", "<end>", "<tools>", "<user>", "<assistant>", "<tool>")
_TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool.function.name }}{% endfor %}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}"
    "<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token per character of ``CHARACTERS``, UNKNOWN and END."""
    symbols = [UNKNOWN, END, *CHARACTERS]
    vocabulary = {symbol: index for index, symbol in enumerate(symbols)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = Split(Regex("."), behavior="isolated")
    tokenizer.decoder = Fuse()  # joins tokens without spaces
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)


def make_tool_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per word and a chat template for tools.

    Args:
        words: enough to write the tools, their calls and their answers. A call is written as
            ``<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>``; it may be one word.
    """
    words = [*_MARKS, *words]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, "<unk>"))
    longest_first = "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))
    tokenizer.pre_tokenizer = Split(Regex(longest_first + r"|[\s\S]"), behavior="isolated")
    tokenizer.decoder = Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", eos_token="<end>"
    )
    fast.chat_template = _TEMPLATE
    return fast


def make_policy(tokenizer: PreTrainedTokenizerFast, seed: int, heads: int = 4) -> Qwen3ForCausalLM:
    """Return a model with two layers of width 64 and random weights."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=64 // heads,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(config)


def write_policy(folder: Path, seed: int, heads: int = 4) -> Qwen3ForCausalLM:
    """Save tokenizer and policy to ``folder``, for ``from_pretrained``."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    policy = make_policy(tokenizer, seed, heads)
    policy.save_pretrained(folder)
    return policy
