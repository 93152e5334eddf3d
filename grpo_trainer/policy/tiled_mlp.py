"""MLPs that run in tiles of tokens, so that the tile size bounds their memory.

Tiled MLPs come from Arctic Long Sequence Training, arXiv:2506.13996. Each tile is a torch
checkpoint, so random numbers, autocast and parameter hooks work as without tiles. The inputs of all
tiles are saved before the first tile runs: if the layer itself is checkpointed, it then has all
that its backward needs, and does not run its MLP a second time for nothing.

Processes have different numbers of tiles, but must gather sharded parameters the same number of
times. So an MLP's parameters are gathered once for all tiles: FSDP2 gathers a whole layer, and for
ZeRO-3 a tiled MLP is a leaf module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from grpo_kernels.common import ForwardOverlay, apply_overlay, remove_overlay
from grpo_kernels.hf import TOKEN_WISE_MLPS


def tile_mlps(model: PreTrainedModel, tokens: int | None) -> None:
    """Run the MLP of each layer in tiles of ``tokens`` tokens; None removes the tiles.

    The backward recomputes each tile. Outputs and gradients are the same up to rounding, and names
    of weights do not change. Image parts of the model are unchanged.

    Raises:
        ValueError: a layer has no MLP, or an MLP that is not known to be token-wise.
    """
    for module in model.modules():
        if isinstance(module, _Tiled):
            remove_overlay(_Tiled, module)
            _make_leaf(module, False)
    if tokens is None:
        return
    for mlp in [_mlp_of(layer, model) for layer in _layers_of(model)]:
        apply_overlay(_Tiled, mlp)
        mlp.tile_tokens = tokens
        _make_leaf(mlp, True)


def _make_leaf(mlp: Any, leaf: bool) -> None:
    """Let ZeRO-3 gather an MLP as a whole, or each part when it is called."""
    if is_deepspeed_zero3_enabled():
        from deepspeed.utils import set_z3_leaf_module

        set_z3_leaf_module(mlp, leaf)


def _layers_of(model: PreTrainedModel) -> nn.ModuleList:
    layers = getattr(model.get_decoder(), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise _unsupported(model, "no list of layers")
    return layers


def _mlp_of(layer: nn.Module, model: PreTrainedModel) -> Any:
    mlp = getattr(layer, "mlp", None)
    if mlp is None:
        raise _unsupported(model, f"a {type(layer).__name__} without mlp")
    kind = type(mlp)
    if kind.__name__ not in TOKEN_WISE_MLPS or not kind.__module__.startswith("transformers."):
        raise _unsupported(model, f"a {kind.__name__}")
    if "forward" in vars(mlp):  # it would hide the class's forward
        raise _unsupported(model, f"a {kind.__name__} with a patched forward")
    return mlp


def _unsupported(model: PreTrainedModel, got: str) -> ValueError:
    return ValueError(
        "mlp_tile_tokens: expected a model whose layers have an mlp that treats each token by "
        f"itself ({', '.join(TOKEN_WISE_MLPS)}), got {got} in {type(model).__name__}; set it to "
        "None"
    )


class _Tiled(ForwardOverlay):
    """Overlay of :func:`tile_mlps` for an MLP."""

    tile_tokens: int

    def __call__(self: Any, hidden: Tensor) -> Tensor:
        # ZeRO-3 reduces a leaf module's gradients when its input's gradient is complete
        trains = any(parameter.requires_grad for parameter in self.parameters())
        if torch.is_grad_enabled() and trains and not hidden.requires_grad:
            hidden = hidden.detach().requires_grad_()
        return super().__call__(hidden)  # type: ignore[misc]  # that of the module

    def forward(self: Any, hidden: Tensor) -> Tensor:  # (..., D)
        rows = hidden.flatten(0, -2)
        tiles = rows.split(self.tile_tokens)
        own_forward = super().forward
        if torch.is_grad_enabled():
            again = _Tiles(rows, self.tile_tokens, own_forward)
            # a tile is passed in a list, so that autograd does not save it
            done = [
                checkpoint(again.run, index, [tile], use_reentrant=False)
                for index, tile in enumerate(tiles)
            ]
        else:
            done = [own_forward(tile) for tile in tiles]
        return torch.cat(done).unflatten(0, hidden.shape[:-1])


class _Tiles:
    """Runs tiles, and in the backward runs them again from the saved inputs."""

    def __init__(self, rows: Tensor, size: int, forward: Callable[[Tensor], Tensor]) -> None:
        start = torch.empty(0, requires_grad=True)  # else frozen rows would not be saved
        self._saved: Any = _Save.apply(start, rows).grad_fn
        self._size = size
        self._forward = forward
        self._tiles: tuple[Tensor, ...] = ()

    def run(self, index: int, first: list[Tensor]) -> Tensor:
        if first:
            return self._forward(first.pop())
        if not self._tiles:
            [rows] = self._saved.saved_tensors
            self._tiles = rows.split(self._size)
        return self._forward(self._tiles[index])


class _Save(torch.autograd.Function):
    """Saves a tensor for the backward, in order with other saved tensors."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return start.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise AssertionError("the output is unused")
