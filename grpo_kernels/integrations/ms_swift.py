"""ms-swift's GRPO trainer on our kernels, where it would call Liger's loss module.

A file for its ``--external_plugins`` calls ``enable()``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from grpo_kernels.integrations import liger
from grpo_kernels.integrations.switch import HOSTS, Replacement, Switch

if __name__.startswith("_swift_external_"):
    # the folder of a plugin goes to the front of sys.path, and here lie files named after hosts
    raise ImportError(
        "external_plugins: expected a file of your own that calls ms_swift.enable(), got "
        f"{__file__}"
    )
_WHY = (
    "with use_liger_kernel, whose loss is not told of it (without use_liger_kernel "
    "lazy_scorers.enable(model, 'trl') works with it)"
)


def _replacements() -> Iterator[Replacement]:
    trainer = import_module("swift.rlhf_trainers.grpo_trainer").GRPOTrainer
    theirs = trainer._prepare_liger_loss

    @functools.wraps(theirs)
    def prepare(self: Any) -> None:
        theirs(self)
        if self.use_liger_loss:
            penalised = {"kl_in_reward": False} if self.beta != 0 else {}
            liger.put_into(self, "liger_grpo_loss", {"overlong_filter": False, **penalised}, _WHY)

    yield Replacement(trainer, theirs.__name__, prepare)


SWITCH = Switch(HOSTS["ms_swift"], _replacements)
enable, disable, enabled = SWITCH.enable, SWITCH.disable, SWITCH.enabled
