"""Axolotl's GRPO on our kernels, as a plugin that its config names.

    plugins:
      - grpo_kernels.integrations.axolotl.GRPOKernelsPlugin
    rl: grpo
    trl:
      use_liger_loss: true

With ``async_prefetch`` and without.
"""

from __future__ import annotations

from typing import Any

from grpo_kernels.integrations.switch import Host, module_of

HOST = Host("axolotl", ("0.19",))


def __getattr__(name: str) -> Any:
    # Axolotl is imported by those who use it
    if name != "GRPOKernelsPlugin":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return module_of("grpo_kernels.integrations.axolotl_plugin").GRPOKernelsPlugin
