"""Shared helpers: argument checks, ranks, overlays, supported trainers, the version."""

from grpo_kernels.common.arguments import (
    NOT_NEGATIVE,
    POSITIVE,
    check_device,
    check_fields,
    check_integers,
    check_like,
    check_name,
    check_number,
    choice,
    hint,
    kind_of,
    number,
)
from grpo_kernels.common.hosts import HOSTS, Host
from grpo_kernels.common.overlay import ForwardOverlay, apply_overlay, remove_overlay
from grpo_kernels.common.ranks import gather, process_group
from grpo_kernels.common.version import VERSION
