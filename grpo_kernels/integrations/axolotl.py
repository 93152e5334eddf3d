"""Runs Axolotl's GRPO on our kernels, also with ``async_prefetch``: a plugin for its config."""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin

from grpo_kernels.common import HOSTS
from grpo_kernels.integrations import liger
from grpo_kernels.integrations.probe import Probe, Use

_PLUGIN = "axolotl.integrations.base:BasePlugin"
# liger.py, which replaces the same module, compares numbers
PROBE = Probe(
    host=HOSTS["axolotl"],
    uses=(
        Use(f"{_PLUGIN}.pre_model_load", ("cfg",), exact=True),
        Use(f"{_PLUGIN}.post_trainer_create", ("cfg", "trainer"), exact=True),
    ),
    override="a subclass of GRPOKernelsPlugin with any_version = True",
)
_OF_GRPO = ("grpo", "gdpo")  # Axolotl uses TRL's GRPO trainer for these


class GRPOKernelsPlugin(BasePlugin):
    """Put our loss into the trainer after it is built, and reject configs that do not use it.

    Changes nothing outside that trainer. A subclass may set ``any_version``.
    """

    any_version = False  # True: also run with versions of Axolotl and Liger that differ

    def pre_model_load(self, cfg: Any) -> None:
        """Raise for a version that differs, or a config without GRPO and Liger's loss."""
        PROBE.check(self.any_version)
        if cfg.rl not in _OF_GRPO:
            got = getattr(cfg.rl, "value", cfg.rl)
            raise ValueError(
                f"rl: expected {' or '.join(_OF_GRPO)} with GRPOKernelsPlugin, got {got}"
            )
        if not (asked := getattr(cfg.trl, "use_liger_loss", None)):
            raise ValueError(
                "trl.use_liger_loss: expected true with GRPOKernelsPlugin, which replaces Liger's "
                f"loss; got {asked}"
            )

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Replace the loss module; raise for settings and heads that Liger's interface lacks."""
        if getattr(trainer, "liger_loss", None) is None:
            raise ValueError(
                "trainer: expected one of TRL's GRPO trainers with use_liger_kernel, got "
                f"{type(trainer).__name__} without"
            )
        off = {"off_policy_mask_threshold": None, "aux_loss_enabled": False}
        why = "with use_liger_loss"
        liger.put_into(trainer, "liger_loss", off, why, any_version=self.any_version)
