"""Tiles of the GEMM whose logits stay on the chip, and whether that GEMM is used at all.

As in ``rows.py`` all depends on the device, the dtype and the head, never on the row count: a
row's bits are the same in every batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from grpo_kernels.backends.configs.rows import RowConfig, bits, device_class, vocabulary_class
from grpo_kernels.backends.configs.tuned import LINEAR_CONFIGS, ROW_CONFIGS
from grpo_kernels.head import Head, logits_dtype

LINEAR_KERNELS = ("linear", "linear_softcap")
_NARROW = 3072  # hidden sizes up to it; beyond: "wide"


@dataclass(frozen=True)
class LinearConfig:
    """Tile of the fused GEMM.

    An entry of the table is these fields in this order, or ``()`` where tiles of logits from the
    library's GEMM are faster.
    """

    block_t: int
    block_v: int
    block_d: int
    num_warps: int
    num_stages: int
    subtiles: int  # of a tile, 1 or 2, folded one after the other: fewer live registers
    tiles: int  # of a split, the share of the vocabulary that one program folds
    group: int  # row blocks that run side by side
    descriptors: int  # 1: the copy engine (Hopper and later) brings the operands
    flat: int = 0  # 1: the loads of all tiles are one pipeline
    persistent: int = 0  # 1: a program on each multiprocessor takes one split after the other
    specialized: int = 0  # 1: loads and products on warps of their own, see ``SPECIALIZING``

    @property
    def split_columns(self) -> int:
        """Columns of a split."""
        return self.block_v * self.tiles

    @property
    def options(self) -> dict[str, int | bool]:
        """Launch options. Where the compiler may fuse ``a * b + c`` it does so at other places with
        the extra statistics than without them, which would have other bits."""
        return {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": False,
        }

    @property
    def constants(self) -> dict[str, int | bool]:
        """The kernel's constants."""
        return {
            "DESCRIPTORS": bool(self.descriptors),
            "BLOCK_T": self.block_t,
            "BLOCK_V": self.block_v,
            "BLOCK_D": self.block_d,
            "SUBTILES": self.subtiles,
            "TILES": self.tiles,
            "GROUP": self.group,
            "FLAT": bool(self.flat),
            "PERSISTENT": bool(self.persistent),
            "WARP_SPECIALIZE": bool(self.specialized),
        }

    def of_one_subtile(self) -> LinearConfig:
        """Return tiles as wide as a subtile: same splits and steps, fewer registers.

        Specialized warps leave too few registers to those that fold, so there are none.
        """
        wide, tiles = self.block_v // self.subtiles, self.tiles * self.subtiles
        return replace(self, block_v=wide, subtiles=1, tiles=tiles, specialized=0)


_HOPPER = LinearConfig(128, 256, 64, 8, 3, subtiles=2, tiles=8, group=16, descriptors=1)
_AMPERE = LinearConfig(128, 128, 32, 8, 4, subtiles=2, tiles=16, group=16, descriptors=0)
_BLACKWELL_PC = replace(_AMPERE, num_stages=3)  # with four, values of a loop lie on the stack
_CDNA = LinearConfig(128, 128, 64, 8, 2, subtiles=1, tiles=16, group=16, descriptors=0)
# All are guesses, since none has run: what fits into shared memory (given in KiB of a block) and
# into registers. Hopper's takes 144 KiB, Ampere's and CDNA's 64, that of Blackwell in PCs 48.
_DEVICES = {
    "sm_80": _AMPERE,  # 163, A100
    "sm_86": _AMPERE,  # 99, RTX 30
    "sm_89": _AMPERE,  # 99, RTX 40, L4, L40
    "sm_90": _HOPPER,  # 227, H100, H200
    "sm_100": _HOPPER,  # 227, B200, whose matrix units could take the tiles of two blocks
    "sm_103": _HOPPER,  # 227, B300, as before
    "sm_110": _HOPPER,  # 227, Thor, as before
    "sm_120": _BLACKWELL_PC,  # 99, RTX 50, and the older kind of matrix units
    "sm_121": _BLACKWELL_PC,  # 99, GB10, as before
    "gfx942": _CDNA,  # 64, MI300
}
# Where Triton 3.6 and 3.9 specialize the warps of a loop that is not flat. For sm_90 they refuse
# tiles of 128 rows, do nothing, or compile a kernel that returns at once.
SPECIALIZING = ("sm_100", "sm_103")
# Of devices that are not named; it fits into registers and shared memory everywhere.
_ANY_DEVICE = LinearConfig(128, 128, 32, 8, 2, subtiles=1, tiles=16, group=16, descriptors=0)
# Of rows that do not start at multiples of 16 bytes, whose elements are loaded one by one.
UNALIGNED_CONFIG = LinearConfig(64, 64, 32, 8, 1, subtiles=1, tiles=32, group=16, descriptors=0)


@dataclass(frozen=True, kw_only=True)
class LinearCase:
    """Everything that decides how the log-probabilities of a head are formed."""

    device: torch.device
    dtype: torch.dtype  # of the hidden states
    logits: torch.dtype  # to which they are rounded, if at all
    columns: int  # V
    depth: int  # D
    softcap: bool

    @staticmethod
    def of(dtype: torch.dtype, head: Head, precision: str) -> LinearCase:
        """Return the key of hidden states of ``dtype`` before ``head``."""
        columns, depth = head.weight.shape
        return LinearCase(
            device=head.weight.device,
            dtype=dtype,
            logits=logits_dtype(dtype, precision),
            columns=columns,
            depth=depth,
            softcap=head.transform.softcap is not None,
        )

    @property
    def key(self) -> tuple[str, str, int, str, str]:
        """The key of the table's entry."""
        kernel = LINEAR_KERNELS[self.softcap]
        classes = width_class(self.depth), vocabulary_class(self.columns)
        return device_class(self.device), kernel, bits(self.logits), *classes

    @property
    def config(self) -> LinearConfig:
        """The tile for rows on 16-byte boundaries."""
        values = LINEAR_CONFIGS.get(self.key)
        return LinearConfig(*values) if values else default_config(device_class(self.device))

    @property
    def pays(self) -> bool:
        """Whether the fused GEMM is used, rather than tiles of logits from the library's.

        The library is faster for fp32 inputs, and where the table says so.
        """
        return self.dtype.itemsize == 2 and LINEAR_CONFIGS.get(self.key) != ()


def default_config(device: str) -> LinearConfig:
    """Return the untuned tile of a class of devices."""
    return _DEVICES.get(device, _ANY_DEVICE)


def origin(config: LinearConfig | RowConfig, device: torch.device) -> str:
    """Say where a tile comes from, and what to do where it does not fit the device."""
    name = device_class(device)
    tuned: dict[tuple[object, ...], LinearConfig | RowConfig]
    if isinstance(config, RowConfig):
        tuned = {key: RowConfig(*values).on(name) for key, values in ROW_CONFIGS.items()}
    else:
        tuned = {key: LinearConfig(*values) for key, values in LINEAR_CONFIGS.items() if values}
    keys = [str(key) for key, found in tuned.items() if key[0] == name and found == config]
    if not keys:
        return f"{config} is no tuned tile of {name}; `make gpu-tune` measures some that fit"
    return (
        f"{config} is tuned in grpo_kernels/backends/configs/tuned.py under {', '.join(keys)}; "
        "without this entry the default runs, and `make gpu-tune` measures others"
    )


def width_class(depth: int) -> str:
    """Return the class of a hidden size, ``"narrow"`` or ``"wide"``."""
    return "narrow" if depth <= _NARROW else "wide"


def linear_config(dtype: torch.dtype, head: Head, precision: str) -> LinearConfig:
    """Return the tile for hidden states of ``dtype`` before ``head``, however many."""
    weight = head.weight
    # what is converted or transposed is a fresh copy
    copied = weight.dtype != dtype or weight.stride(1) != 1
    whole = weight.shape[1] * dtype.itemsize % 16 == 0
    if whole and (copied or _on_16_bytes(weight)):
        return LinearCase.of(dtype, head, precision).config
    return UNALIGNED_CONFIG


def _on_16_bytes(x: Tensor) -> bool:
    """Return whether every row starts at a multiple of 16 bytes."""
    return row_stride(x) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0


def row_stride(x: Tensor) -> int:
    """Return the elements from one row to the next; of a single row, its length."""
    return x.stride(0) if x.shape[0] > 1 else x.shape[1]  # that of a single row may be anything
