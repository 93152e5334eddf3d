"""Which backend is chosen, and that the choice is said."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from grpo_kernels import available_backends
from grpo_kernels.backends import (
    BACKEND_VARIABLE,
    choice,
    choose_backend,
    cpu,
    gpu_tiles,
    triton_backend,
    why_backend,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


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
    monkeypatch.setattr(cpu, "load_library", lambda: "it was not built")
    choice.warn_once.cache_clear()
    for _ in range(3):
        chosen = choose_backend("auto", CPU, torch.float32)
    assert chosen.name == "chunked"
    (message,) = [str(w.message) for w in recwarn if "pure torch" in str(w.message)]
    assert "it was not built" in message and "C++17" in message
    choice.warn_once.cache_clear()


Patch = pytest.MonkeyPatch


@pytest.fixture
def hopper(monkeypatch: Patch) -> Iterator[None]:
    """Fake a GPU with Triton's driver for it."""
    pytest.importorskip("triton")
    cached = (
        choice.warn_once,
        triton_backend._why_not_usable,
        triton_backend._why_no_driver,
    )
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_tiles, "_known_class", gpu_tiles._class_of)
    set_driver(monkeypatch, object())
    set_capability(monkeypatch, 9, 0)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


def set_capability(monkeypatch: Patch, major: int, minor: int) -> None:
    properties = SimpleNamespace(major=major, minor=minor)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


def set_driver(monkeypatch: Patch, active: object) -> None:
    from triton.runtime import driver

    monkeypatch.setattr(type(driver), "active", active)


def not_installed(monkeypatch: Patch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)


def broken(monkeypatch: Patch) -> None:
    class Finder:
        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            if name == "triton":
                raise ImportError("libtriton.so: GLIBC_2.38 not found")

    monkeypatch.delitem(sys.modules, "triton")
    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])


def old(monkeypatch: Patch) -> None:
    monkeypatch.setattr("triton.__version__", "3.5.1+git")


def without_driver(monkeypatch: Patch) -> None:
    def active(_: object) -> None:
        raise RuntimeError("0 active drivers ([]). There should only be one.")

    set_driver(monkeypatch, property(active))


ABSENT = [
    (not_installed, "triton is not installed"),
    (broken, "triton cannot be imported: libtriton.so: GLIBC_2.38 not found"),
    (old, "expected triton 3.6 or newer, got 3.5.1+git"),
    (without_driver, "triton has no driver for this device: 0 active drivers"),
]


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("spoil", "reason"), ABSENT)
def test_a_gpu_without_triton(
    monkeypatch: Patch, spoil: Callable[[Patch], None], reason: str
) -> None:
    """Whoever names it gets an error; else torch serves, and a warning says why, once."""
    spoil(monkeypatch)
    with pytest.raises(ValueError, match=re.escape(f"backend: 'triton' cannot run: {reason}")):
        choose_backend("triton", GPU, torch.bfloat16)
    with pytest.warns(
        RuntimeWarning, match=re.escape(f"on the GPU, which is slower, because {reason}")
    ):
        chosen = choose_backend("auto", GPU, torch.bfloat16)
    assert chosen.name == "chunked"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose_backend("auto", GPU, torch.float32) is chosen
    assert why_backend(chosen, "auto", GPU, torch.bfloat16)[0].startswith(f"not triton: {reason}")


@pytest.mark.usefixtures("hopper")
def test_bf16_on_a_gpu_without_it(monkeypatch: Patch) -> None:
    assert choose_backend("auto", GPU, torch.bfloat16).name == "triton"
    set_capability(monkeypatch, 7, 5)
    reason = "bf16 needs a device of compute capability 8.0, and this is sm_75"
    with pytest.raises(ValueError, match=f"backend: 'triton' cannot run: {reason}"):
        choose_backend("triton", GPU, torch.bfloat16)
    chosen = choose_backend("auto", GPU, torch.bfloat16)
    assert chosen.name == "chunked"
    assert why_backend(chosen, "auto", GPU, torch.bfloat16)[0] == f"not triton: {reason}"
    assert choose_backend("auto", GPU, torch.float16).name == "triton"


def test_the_oldest_triton_is_the_declared_one() -> None:
    oldest = ".".join(map(str, triton_backend._OLDEST))
    project = Path(__file__).parents[2] / "pyproject.toml"
    assert f'"triton>={oldest}.0;' in project.read_text()
