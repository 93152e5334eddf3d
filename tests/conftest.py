"""Shared fixtures. Without a GPU, Triton kernels run in its interpreter."""

from __future__ import annotations

import os

import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest  # noqa: E402

# the same bodies run on a GPU, where they carry the marker
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="no GPU")]),
]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def narrow_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a backward cut even a tiny vocabulary into slices."""
    from grpo_kernels.engine import recompute

    for name, columns in (("_MIN_COLUMNS", 16), ("_MAX_COLUMNS", 32), ("_ALIGNMENT", 16)):
        monkeypatch.setattr(recompute, name, columns)
