"""Our ops in other trainers: a module per host."""

from grpo_kernels.integrations.switch import HOSTS
