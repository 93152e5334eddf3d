"""Losses for torchtitan's RL trainer that are formed at the head, in place of its chunked loss.

In a config, ``ChunkedLossWrapper.Config(loss_fn=GRPOLoss.Config(...))`` becomes

    from grpo_kernels.integrations import torchtitan

    loss = torchtitan.GRPOLoss.Config(clip_eps=0.2)
    loss = torchtitan.DAPOLoss.Config(ratio_clip_low=0.2, ratio_clip_high=0.28)

There is nothing to switch on or off: the trainer calls what its config names. Both have the
settings, inputs and metrics of torchtitan's.
"""

from __future__ import annotations

from typing import Any

from grpo_kernels.integrations.switch import Host, module_of

HOST = Host("torchtitan", ("0.3",))


def __getattr__(name: str) -> Any:
    # they inherit from a class of the host, which is imported by those who use them
    if name not in ("GRPOLoss", "DAPOLoss"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    HOST.check(any_version=False)
    return getattr(module_of("grpo_kernels.integrations.torchtitan_losses"), name)
