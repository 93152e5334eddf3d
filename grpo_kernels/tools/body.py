"""What the layers before a head keep of each token, with gradient checkpointing: an estimate."""

from __future__ import annotations

from typing import Any, NamedTuple

from grpo_kernels.tools.call import Call

# bytes of a layer's inside, which is computed again, in 16 bits: for each number of the hidden
# states, of the queries of all heads and of the MLP's width
TRAINED = (32, 16, 12)
ADAPTED = (48, 20, 24)  # frozen, with adapters
# more hidden states as wide as a layer's: before and after the last norm, gathered from packed
# rows, and without masked tokens
_LAST_STATES = 4
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}


class Body(NamedTuple):
    """The sizes of a dense transformer."""

    layers: int
    hidden: int
    queries: int  # of all heads together
    inner: int  # of the MLP

    def per_token(self, state: int, inside: tuple[int, int, int]) -> int:
        """Return the bytes of a token's activations; ``state`` are those of a number between
        layers, ``inside`` as :data:`TRAINED`."""
        of_hidden, of_queries, of_inner = inside
        of_layer = self.hidden * of_hidden + self.queries * of_queries + self.inner * of_inner
        return (self.layers + _LAST_STATES) * self.hidden * state + of_layer


def body_of(text: Any) -> Body | None:
    """Return the body that a text config of transformers describes; None if not a dense one."""
    heads = getattr(text, "num_attention_heads", None)
    sizes = [
        getattr(text, "num_hidden_layers", None),
        text.hidden_size,
        heads and heads * (getattr(text, "head_dim", None) or text.hidden_size // heads),
        getattr(text, "intermediate_size", None),
    ]
    known = all(isinstance(size, int) and size > 0 for size in sizes)
    experts = any("experts" in name and value for name, value in vars(text).items())
    layer_types = getattr(text, "layer_types", None) or ()
    return Body(*sizes) if known and not experts and _ATTENTION.issuperset(layer_types) else None


def activations(body: Body, call: Call) -> int:
    """Return the bytes of a token in the body whose last hidden states a call is given."""
    factor = call.dtype.itemsize // 2
    of_hidden, of_queries, of_inner = ADAPTED if call.frozen else TRAINED
    inside = (factor * of_hidden, factor * of_queries, factor * of_inner)
    return body.per_token((call.weight_dtype or call.dtype).itemsize, inside)
