"""The structs of ``csrc/*.h``, which these mirror."""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int32, c_int64, c_void_p

from torch import Tensor

ABI_VERSION = 5  # kAbiVersion of csrc/rows.h


class NativeTile(ctypes.Structure):
    _fields_ = [
        ("logits", c_void_p),
        ("rows", c_int64),
        ("columns", c_int64),
        ("row_stride", c_int64),
        ("target", c_void_p),
        ("row_temperature", c_void_p),
        ("temperature", c_double),
        ("logit_scale", c_double),
        ("softcap", c_double),
        ("dtype", c_int32),
    ]
    alive: tuple[Tensor, Tensor | None]  # keeps alive what two of the pointers point to


class Stats(ctypes.Structure):
    _fields_ = [
        ("logp", c_void_p),
        ("entropy", c_void_p),
        ("lse", c_void_p),
        ("is_top1", c_void_p),
        ("sum_sq_probs", c_void_p),
        ("max_logit", c_void_p),
        ("min_logit", c_void_p),
    ]


class Update(ctypes.Structure):
    _fields_ = [
        ("inner", c_void_p),
        ("outer", c_void_p),
        ("inner_stride", c_int64),
        ("rank", c_int64),
    ]


class Linear(ctypes.Structure):
    _fields_ = [
        ("hidden", c_void_p),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("depth", c_int64),
        ("hidden_stride", c_int64),
        ("weight_stride", c_int64),
        ("dtype", c_int32),
        ("rounded", c_int32),
        ("update", Update),
        ("tile", NativeTile),
    ]


class EntriesView(ctypes.Structure):
    _fields_ = [
        ("ids", c_void_p),
        ("values", c_void_p),
        ("used", c_void_p),
        ("rows", c_int64),
        ("slots", c_int64),
    ]


class Extraction(ctypes.Structure):
    _fields_ = [
        ("logp", c_void_p),
        ("lse", c_void_p),
        ("keys", c_void_p),
        ("allowed", c_void_p),
        ("out", EntriesView),
        ("error", c_void_p),
        ("error_l1", c_void_p),
        ("norm", c_void_p),
    ]


class Product(ctypes.Structure):
    _fields_ = [
        ("factor", c_void_p),
        ("source", c_void_p),
        ("out", c_void_p),
        ("source_stride", c_int64),
        ("out_rows", c_int64),
        ("out_stride", c_int64),
        ("width", c_int64),
        ("source_dtype", c_int32),
        ("out_dtype", c_int32),
        ("add", c_int32),
    ]


class Gradient(ctypes.Structure):
    _fields_ = [
        ("logp", c_void_p),
        ("entropy", c_void_p),
        ("lse", c_void_p),
        ("dlogp", c_void_p),
        ("dentropy", c_void_p),
        ("out_dtype", c_int32),
    ]
