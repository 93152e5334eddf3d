"""Completions in several turns: tools, environments, and the loop between them and the policy.

May know ``common``, ``config``, ``data``, ``monitor``, ``rewards`` and ``rollout``.
"""

from grpo_trainer.tools.environment import EnvironmentFactory, Environments, prompts_by_reset
from grpo_trainer.tools.loop import Agents
from grpo_trainer.tools.parse import TurnParser
from grpo_trainer.tools.schema import make_toolbox
