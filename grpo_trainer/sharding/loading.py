"""Models that are loaded whole while the policy is loaded in shards."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.integrations import deepspeed

_EFFICIENT = "FSDP_CPU_RAM_EFFICIENT_LOADING"


@contextmanager
def loading_whole() -> Iterator[None]:
    """Let ``from_pretrained`` load every weight on every process.

    ZeRO-3 shards what is loaded, and with ``fsdp_cpu_ram_efficient_loading`` only the first process
    has weights: both are right for the policy alone.
    """
    config, efficient = deepspeed._hf_deepspeed_config_weak_ref, os.environ.pop(_EFFICIENT, None)
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = config
        if efficient is not None:
            os.environ[_EFFICIENT] = efficient
