"""Check an installed grpo-kernels: its location, ``grpo-kernels info``, and a loss on the CPU.

python .ci/check_installed.py native | torch: what has to serve on the CPU
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

import grpo_kernels
from grpo_kernels import FusedLinearGRPOLoss

_BACKEND = {"native": "cpu", "torch": "chunked"}
_SAID = {"native": "native kernels", "torch": "not built"}


def info(*arguments: str) -> str:
    command = Path(sysconfig.get_path("scripts")) / "grpo-kernels"
    return subprocess.run([command, "info", *arguments], check=True, text=True, stdout=-1).stdout


def loss_and_gradients(backend: str) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 5, 24, generator=made).requires_grad_()
    weight = torch.randn(61, 24, generator=made).requires_grad_()
    target = torch.randint(61, (2, 5), generator=made)
    loss, _ = FusedLinearGRPOLoss(loss_type="dapo", backend=backend)(
        hidden, weight, target, torch.tensor([1.0, -0.5])
    )
    loss.backward()
    return [loss.detach(), hidden.grad, weight.grad]  # type: ignore[list-item]


def main(served: str) -> None:
    """Raise an error for the first problem."""
    installed = Path(grpo_kernels.__file__)
    assert installed.is_relative_to(sysconfig.get_path("purelib")) or installed.is_relative_to(
        sysconfig.get_path("platlib")
    ), f"grpo_kernels is {installed}, which is not installed"
    assert grpo_kernels.__version__ == importlib.metadata.version("grpo-kernels")

    facts = json.loads(info("--json"))
    assert facts["versions"]["grpo-kernels"] == grpo_kernels.__version__
    assert {row["backend"] for row in facts["defaults"]} == {_BACKEND[served]}, facts["defaults"]
    assert bool(facts["native_isas"]) == (served == "native"), facts["backends"]
    assert _SAID[served] in info()

    right = loss_and_gradients("reference")
    for name in ("auto", _BACKEND[served]):
        torch.testing.assert_close(loss_and_gradients(name), right)
    isas = ", ".join(facts["native_isas"]) or "no native kernels"
    print(f"grpo-kernels {grpo_kernels.__version__}: {_BACKEND[served]} serves ({isas})")


if __name__ == "__main__":
    main(*sys.argv[1:])
