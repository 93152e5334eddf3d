"""What a policy takes of memory while it is trained, beside its head: an estimate by formulas."""

from __future__ import annotations

from typing import NamedTuple

from benchmarks import text
from grpo_kernels.tools.body import ADAPTED, TRAINED, Body

RANK = 16  # of LoRA on all linear layers of the body


class Policy(NamedTuple):
    """A model's sizes: of a layer, of queries and keys over all heads, of the vocabulary."""

    name: str
    layers: int
    hidden: int
    inner: int  # of the MLP
    queries: int
    keys: int
    small: int  # of a layer: biases, norms of queries and keys
    tied: bool  # embedding and head are one
    vocabulary: int = 151936

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        d, q, k, i = self.hidden, self.queries, self.keys, self.inner
        return (d, q), (d, k), (d, k), (q, d), (d, i), (d, i), (i, d)

    @property
    def body(self) -> int:
        layer = sum(a * b for a, b in self.linears) + 2 * self.hidden + self.small
        return self.layers * layer + self.hidden

    @property
    def head(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def embedding(self) -> int:
        return 0 if self.tied else self.head

    @property
    def parameters(self) -> int:
        return self.body + self.head + self.embedding

    @property
    def adapter(self) -> int:
        return self.layers * RANK * sum(a + b for a, b in self.linears)


class Way(NamedTuple):
    """A way to train, by the bytes of a parameter, of a hidden state and of a layer's inside."""

    body: float  # a weight
    head: int  # a weight of embedding and head
    gradient: int  # which has the dtype of what is trained
    optimizer: int  # both moments
    cast: int  # the copy of a weight that autocast keeps while the loss is computed
    state: int  # a number of the hidden states between layers
    layer: tuple[int, int, int]  # per token for each of D, of the queries and of the MLP's width
    adapted: bool  # LoRA: the rest is frozen
    settings: str  # of ``grpo-train``

    def states(self, policy: Policy) -> int:
        """Return the bytes of weights, gradients and optimizer, but for the head's first two."""
        if self.adapted:
            trained = policy.adapter * (2 * self.gradient + self.optimizer)
            return int(policy.body * self.body + policy.embedding * self.head + trained)
        each = int(self.body) + self.gradient + self.optimizer
        own = policy.body * self.cast + policy.head * self.optimizer
        return (policy.body + policy.embedding) * each + own

    def per_token(self, policy: Policy) -> int:
        """Return the bytes of a token's activations, with gradient checkpointing."""
        body = Body(policy.layers, policy.hidden, policy.queries, policy.inner)
        return body.per_token(self.state, self.layer)


_IN_BF16, _LORA = "--dtype bfloat16", "--use_peft --lora_target_modules all-linear"
WAYS = {
    "full": Way(4, 4, 4, 8, 2, 4, TRAINED, False, ""),
    "full, bf16": Way(2, 2, 2, 4, 0, 2, TRAINED, False, _IN_BF16),
    "LoRA": Way(2, 2, 4, 8, 0, 2, ADAPTED, True, f"{_IN_BF16} {_LORA}"),
    "QLoRA": Way(0.5 + 4 / 64, 2, 2, 4, 0, 2, ADAPTED, True, f"{_IN_BF16} {_LORA} --load_in_4bit"),
}
POLICIES = {
    policy.name: policy
    for policy in (
        Policy("Qwen2.5-0.5B", 24, 896, 4864, 896, 128, 896 + 2 * 128, True),
        Policy("Qwen3-1.7B", 28, 2048, 6144, 2048, 1024, 2 * 128, True),
        Policy("Qwen3-8B", 36, 4096, 12288, 4096, 1024, 2 * 128, False),
        Policy("Qwen3-32B", 64, 5120, 25600, 8192, 1024, 2 * 128, False),
    )
}


def vram_rules() -> str:
    """Write the bytes that the tables count, by way to train."""
    rows = [
        ["training", "body's weight", "embedding, head", "gradient", "optimizer", "autocast's copy"]
    ]
    rows[0] += ["hidden state", "of a layer: D", "queries", "MLP", "settings"]
    for title, way in WAYS.items():
        *numbers, layer, _, settings = way
        cells = [f"{number:g}" for number in (*numbers, *layer)]
        rows.append([title, *cells, f"`{settings}`" if settings else "the defaults"])
    return text.markdown(rows)
