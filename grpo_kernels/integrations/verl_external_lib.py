"""What ``actor_rollout_ref.model.external_lib`` of verl names: importing it enables our adapter."""

from grpo_kernels.integrations import verl

verl.enable()
