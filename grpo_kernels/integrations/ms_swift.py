"""Runs ms-swift's GRPO trainer on our kernels, instead of Liger's loss module.

A file passed as ``--external_plugins`` calls ``enable()``.
"""

from __future__ import annotations

import functools
from typing import Any

from grpo_kernels.common import HOSTS
from grpo_kernels.integrations import liger
from grpo_kernels.integrations.probe import Probe, Replacement, Use
from grpo_kernels.integrations.switch import Switch

if __name__.startswith("_swift_external_"):
    # ms-swift puts a plugin's folder first in sys.path, and this one has files named after hosts
    raise ImportError(
        f"external_plugins: expected your own file that calls ms_swift.enable(), got {__file__}"
    )
_WHY = (
    "with use_liger_kernel, because its loss does not get it (without use_liger_kernel, "
    "lazy_scorers.enable(model, 'trl') works with it)"
)


_TRAINER = "swift.rlhf_trainers.grpo_trainer:GRPOTrainer"
_READ = ("use_liger_loss", "liger_grpo_loss", "beta", "kl_in_reward", "overlong_filter")


def _with_ours(theirs: Any) -> Any:
    @functools.wraps(theirs)
    def prepare(self: Any) -> None:
        theirs(self)
        if self.use_liger_loss:
            penalty = {"kl_in_reward": False} if self.beta != 0 else {}
            liger.put_into(self, "liger_grpo_loss", {"overlong_filter": False, **penalty}, _WHY)

    return prepare


# liger.py, which replaces the same module, compares numbers
PROBE = Probe(
    host=HOSTS["ms_swift"],
    replacements=lambda: [Replacement(_TRAINER, "_prepare_liger_loss", _with_ours, wraps=True)],
    uses=(Use(_TRAINER, attributes=_READ),),
)
SWITCH = Switch(PROBE)
enable, disable, enabled = SWITCH.enable, SWITCH.disable, SWITCH.enabled
