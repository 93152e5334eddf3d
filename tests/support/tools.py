"""A tokenizer whose chat template knows tools, and an engine that follows a script."""

from __future__ import annotations

import json
import string
from collections.abc import Callable
from types import SimpleNamespace

import torch
from accelerate import Accelerator
from datasets import Dataset
from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from grpo_trainer import GRPOConfig, GRPOTrainer
from grpo_trainer.agents import Environments, ToolLoop, make_toolbox
from grpo_trainer.data import Sample
from grpo_trainer.engines import (
    Completion,
    Completions,
    EngineContext,
    RolloutEngine,
    Sampler,
    Sampling,
    cut_after_eos,
)

SPECIAL = ["<pad>", "<|start|>", "<|end|>"]
PAIRS = ["12", "34"]  # tokens that encoding never makes, but a policy may draw
TEMPLATE = (
    "{% if tools %}<|start|>t{% for tool in tools %}{{ tool.function.name }} {% endfor %}<|end|>\n"
    "{% endif %}"
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}"
    "<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def make_tool_tokenizer(
    template: str | None = TEMPLATE, calls: tuple[str, ...] = ()
) -> PreTrainedTokenizerFast:
    """Return a tokenizer of characters, three special tokens, ``PAIRS``, and one per call."""
    symbols = [*SPECIAL, *sorted(set(string.printable) - set("\r\x0b\x0c\t")), *PAIRS, *calls]
    tokenizer = Tokenizer(WordLevel({symbol: i for i, symbol in enumerate(symbols)}, "<pad>"))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<|end|>",
        additional_special_tokens=["<|start|>"],
        clean_up_tokenization_spaces=False,
    )
    fast.add_tokens([AddedToken(text, normalized=False) for text in calls])
    fast.chat_template = template
    return fast


def make_small_policy(vocabulary: int, positions: int = 512, seed: int = 0) -> Qwen3ForCausalLM:
    """Return one layer of width 16 with random weights."""
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        max_position_embeddings=positions, tie_word_embeddings=False,
        pad_token_id=0, eos_token_id=2, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(config)


def call(name: str, **arguments: object) -> str:
    """Return a call as the model writes it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: one number.
        b: the other.
    """
    return a + b


def question(text: str = "q") -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def results(text: str) -> list[str]:
    """Return the answers of tools in the conversation so far."""
    return [part.split("<|end|>")[0] for part in text.split("<|start|>tool\n")[1:]]


def answers(rollout: Sample) -> list[str]:
    """Return what tools answered in a completion."""
    return [message["content"] for message in rollout.completion if message["role"] == "tool"]


def then(*turns):
    """Return a script: one turn after the other."""
    return lambda text: turns[len(results(text))]


def once(turn: str):
    """Return a script: ``turn``, however often it calls tools, and then no more."""
    return lambda text: "ok" if results(text) else turn


class ScriptedEngine(RolloutEngine):
    """A policy that says what ``script`` says of the text so far; None: it never stops.

    A list of token ids is taken as it is. With ``by_row`` it is also told the row. Turns are cut
    at the length that is asked for.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        script: Callable[..., str | list[int] | None],
        logprobs: bool = False,
        by_row: bool = False,
    ) -> None:
        self._by_row = by_row
        self._tokenizer = tokenizer
        self._script = script
        self._logprobs = logprobs
        self.asked: list[tuple[list[list[int]], int]] = []  # prompts and max_tokens of each call

    def generate(self, prompt_ids: list[list[int]], sampling: Sampling) -> Completions:
        self.asked.append((prompt_ids, sampling.max_tokens))
        turns = [self._turn(prompt, row) for row, prompt in enumerate(prompt_ids)]
        ids = [turn[: sampling.max_tokens] for turn in turns]
        ids = [cut_after_eos(row, sampling.eos_token_ids) for row in ids]
        return Completions(ids, [[-1.5] * len(row) for row in ids] if self._logprobs else None)

    async def complete_one(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        [completion] = self.generate([prompt_ids], sampling).rows()
        return completion

    def _turn(self, prompt: list[int], row: int) -> list[int]:
        text = self._tokenizer.decode(prompt)
        said = self._script(text, row) if self._by_row else self._script(text)
        if said is None:
            return self._tokenizer.encode("z") * 4096
        return said if isinstance(said, list) else self._tokenizer.encode(said + "<|end|>")


def make_trainer(
    args: GRPOConfig, rows: Dataset | None, script=None, reward_funcs=None, **arguments
) -> GRPOTrainer:
    """Return a trainer of a small policy, in whose place ``script`` speaks if there is one."""
    tokenizer = make_tool_tokenizer()
    engine = None if script is None else ScriptedEngine(tokenizer, script)
    return GRPOTrainer(
        make_small_policy(len(tokenizer)), reward_funcs, args, rows, processing_class=tokenizer,
        rollout_engine=engine, **arguments,
    )  # fmt: skip


class Play:
    """Completions by a script, without a trainer.

    Args:
        script: as in :class:`ScriptedEngine`.
        tools, environments: as in the trainer.
        context: positions of the policy.
        changes: fields of GRPOConfig.
    """

    def __init__(
        self,
        script: Callable[[str], str | list[int] | None],
        tools: tuple[Callable, ...] = (add,),
        environments: Callable | dict | None = None,
        context: int | None = None,
        tokenizer: PreTrainedTokenizerFast | None = None,
        **changes: object,
    ) -> None:
        self.tokenizer = tokenizer or make_tool_tokenizer()
        self.engine = ScriptedEngine(self.tokenizer, script, logprobs=True)
        args = GRPOConfig(use_cpu=True, **({"max_completion_length": 500} | changes))
        sampling = Sampling.from_config(args, self.tokenizer)
        policy = torch.nn.Linear(1, 1)
        box = make_toolbox(tools)
        self.environments = None if environments is None else Environments(environments, box)
        made_from = EngineContext(
            policy=lambda: policy,
            processing_class=self.tokenizer,
            args=args,
            accelerator=Accelerator(cpu=True),
            positions=context,
        )
        sampler = Sampler(self.engine, made_from, sampling, lambda: 0, "scripted")
        self.loop = ToolLoop(sampler, sampler.context, box, self.environments)

    def __call__(self, *rows: dict) -> SimpleNamespace:
        rows = rows or ({"prompt": question()},)
        samples = [Sample(row.get("prompt"), inputs=dict(row)) for row in rows]
        return SimpleNamespace(metrics=self.loop(samples), samples=samples)

    def text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids)
