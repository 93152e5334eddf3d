"""Importing this enables :mod:`grpo_kernels.integrations.verl`.

For ``actor_rollout_ref.model.external_lib``, which verl imports in each worker.
"""

from grpo_kernels.integrations import verl

verl.enable()
