"""What the layers before a head keep of each token, with gradient checkpointing: an estimate."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_kernels.tools.model import Layer, Model

# more hidden states as wide as a layer's: before and after the last norm, gathered from packed
# rows, and without masked tokens
_LAST_STATES = 4
_IN_FLIGHT = 2  # layers whose hidden states are on the GPU while the others are offloaded
TILE = 1024  # tokens of an MLP's tile


@dataclass(frozen=True, kw_only=True)
class Inside:
    """Bytes of a token in a layer, which is computed again in 16 bits.

    Each field is for a number of the hidden states, of the queries of all heads, or of the MLP's
    width.
    """

    hidden: int
    queries: int
    inner: int
    norm: int = 10  # more of the hidden states, for each norm beyond two
    routed: int = 4  # likewise, for each expert of a token
    experts: int = 12  # for each number of the experts' width; they have no adapters
    clamped: int = 24  # likewise, where gates are clamped

    def outside_mlp(self, layer: Layer) -> int:
        """Return the bytes of a token outside the MLP's width."""
        extra = self.norm * max(0, layer.norms - 2) + self.routed * layer.routed
        return layer.hidden * (self.hidden + extra) + layer.queries * self.queries

    def mlp(self, layer: Layer) -> int:
        """Return the bytes of a token in the MLP's width."""
        if not layer.routed:
            return layer.inner * self.inner
        return layer.inner * (self.clamped if layer.biased else self.experts)


TRAINED = Inside(hidden=32, queries=16, inner=12)
ADAPTED = Inside(hidden=48, queries=20, inner=24)  # frozen, with adapters


def activations(
    model: Model,
    tokens: int,
    *,
    state: int,
    inside: Inside,
    offload: bool = False,
    tile: int | None = None,
    width: int = 2,
) -> int:
    """Return the bytes of all layers for ``tokens``.

    Args:
        state: bytes of a number of the hidden states between layers.
        inside: of the layer that is computed again.
        width: bytes of a number in that layer.
        offload: whether these hidden states are kept in main memory.
        tile: tokens of an MLP's tile, where layers have one; None: all at once.
    """
    kept = _IN_FLIGHT if offload else len(model.layers)
    states = tokens * (kept + _LAST_STATES) * model.hidden * state
    return states + max(
        _of_layer(layer, tokens, inside=inside, tile=tile, width=width, state=state)
        for layer in model.layers
    )


def masks(model: Model, tokens: int, longest: int) -> int:
    """Return the bytes of ``sdpa``'s masks for rows as wide as the longest sequence.

    Masks are bool, one for layers with a window and one for others, and the layer that runs has a
    copy in 16 bits. One row needs none, but for a window.
    """
    kinds = model.windows + (longest < tokens)
    if not kinds or model.attention is not None:
        return 0
    return tokens * min(tokens, longest) * (kinds + 2)


def _of_layer(
    layer: Layer,
    tokens: int,
    *,
    inside: Inside,
    tile: int | None,
    width: int,
    state: int,
) -> int:
    mlp_tokens = min(tokens, tile) if tile and layer.tiled else tokens
    # experts compute in the dtype of their weights: autocast does not reach them
    mlp_width = max(width, state) if layer.routed else width
    mlp = mlp_tokens * inside.mlp(layer) * mlp_width // 2
    return tokens * inside.outside_mlp(layer) * width // 2 + mlp
