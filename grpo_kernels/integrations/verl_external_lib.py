"""For verl's ``actor_rollout_ref.model.external_lib``: importing it enables our adapter."""

from grpo_kernels.integrations import verl

verl.enable()
