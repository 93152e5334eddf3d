"""Our ops in other trainers: a module per host, which is not imported before it is enabled."""

from grpo_kernels.integrations.switch import HOSTS
