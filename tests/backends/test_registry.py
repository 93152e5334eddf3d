"""Which backend is chosen, and that the choice is said."""

from __future__ import annotations

import pytest
import torch

from grpo_kernels import available_backends, linear_logprobs
from grpo_kernels.backends import (
    BACKEND_VARIABLE,
    BACKENDS,
    choose_backend,
    chunk_rows,
    why_backend,
)

CPU = torch.device("cpu")


def test_available_backends_end_with_the_ones_that_run_everywhere() -> None:
    assert available_backends()[-2:] == ("chunked", "reference")


def test_the_interpreter_is_never_chosen_by_itself() -> None:
    assert choose_backend("auto", CPU, torch.float32).name in ("cpu", "chunked")


def test_fp64_takes_the_torch_path_and_says_why() -> None:
    chosen = choose_backend("auto", CPU, torch.float64)
    assert chosen.name == "chunked"
    reasons = why_backend(chosen, "auto", CPU, torch.float64)
    assert any("fp64" in reason for reason in reasons)


def test_argument_beats_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BACKEND_VARIABLE, "reference")
    assert choose_backend("auto", CPU, torch.float32).name == "reference"
    assert choose_backend("chunked", CPU, torch.float32).name == "chunked"
    monkeypatch.setenv(BACKEND_VARIABLE, "gpu")
    with pytest.raises(ValueError, match=f"{BACKEND_VARIABLE}: expected one of auto, triton"):
        choose_backend("auto", CPU, torch.float32)


def test_a_backend_that_cannot_run_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"backend: expected one of auto.*got 'cuda'"):
        choose_backend("cuda", CPU, torch.float32)
    for name in ("cpu", "triton"):
        if name in available_backends():
            with pytest.raises(ValueError, match=f"backend: '{name}' cannot run: .*fp64"):
                choose_backend(name, CPU, torch.float64)


def test_missing_native_library_is_announced_once(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    from grpo_kernels.backends.cpu import rows as cpu

    monkeypatch.setattr(cpu, "_load", lambda: "it was not built")
    cpu.announce_absence.cache_clear()
    for _ in range(3):
        chosen = choose_backend("auto", CPU, torch.float32)
    assert chosen.name == "chunked"
    (message,) = [str(w.message) for w in recwarn if "pure-torch" in str(w.message)]
    assert "it was not built" in message and "C++17" in message
    cpu.announce_absence.cache_clear()


def test_tile_fits_the_workspace() -> None:
    assert chunk_rows(1000, torch.float32, "fp32", CPU, 1000 * 4 * 200) == 192
    assert chunk_rows(1000, torch.bfloat16, "fp32", CPU, 1000 * 4 * 7) == 7
    assert chunk_rows(1000, torch.bfloat16, "input", CPU, 1000 * 2 * 7) == 7
    with pytest.raises(ValueError, match="max_workspace_bytes: expected at least 4000"):
        chunk_rows(1000, torch.float32, "fp32", CPU, 3999)


def test_backends_are_loaded_lazily() -> None:
    assert set(BACKENDS) == {"triton", "cpu", "chunked", "reference"}
    logprobs = linear_logprobs(torch.randn(2, 3), torch.randn(4, 3), torch.tensor([0, 1])).logprobs
    assert logprobs.shape == (2,)
