"""Activations per token in the layers below the head, with gradient checkpointing: an estimate."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_kernels.tools.model import Layer, Model

# further hidden states of the full width: before and after the last norm, gathered from packed
# rows, and without masked tokens
_LAST_STATES = 4
_IN_FLIGHT = 2  # layers with hidden states on the GPU while the others are offloaded
TILE = 1024  # tokens of an MLP's tile


@dataclass(frozen=True, kw_only=True)
class Inside:
    """Bytes per token in a layer that is recomputed in 16 bits.

    Each field is per element of the hidden states, of the queries of all heads, or of the MLP's
    width.
    """

    hidden: int
    queries: int
    inner: int
    norm: int = 10  # added to ``hidden`` for each norm beyond two
    routed: int = 4  # added to ``hidden`` for each expert of a token
    experts: int = 12  # instead of ``inner``, for experts; they have no adapters
    clamped: int = 24  # instead of ``inner``, for experts with clamped gates

    def outside_mlp(self, layer: Layer) -> int:
        """Return the bytes per token outside the MLP."""
        extra = self.norm * max(0, layer.norms - 2) + self.routed * layer.routed
        return layer.hidden * (self.hidden + extra) + layer.queries * self.queries

    def mlp(self, layer: Layer) -> int:
        """Return the bytes per token inside the MLP."""
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
        state: bytes per element of the hidden states between layers.
        inside: the layer that is recomputed.
        width: bytes per element in that layer.
        offload: whether the hidden states between layers are kept in main memory.
        tile: tokens per MLP tile, in layers that support it; None: all at once.
    """
    kept = _IN_FLIGHT if offload else len(model.layers)
    states = tokens * (kept + _LAST_STATES) * model.hidden * state
    return states + max(
        _of_layer(layer, tokens, inside=inside, tile=tile, width=width, state=state)
        for layer in model.layers
    )


def masks(model: Model, tokens: int, longest: int) -> int:
    """Return the bytes of ``sdpa``'s masks for rows as wide as the longest sequence.

    Masks are bool, one for layers with a window and one for the others, and the running layer has
    a 16-bit copy. A single row needs no mask unless layers have a window.
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
