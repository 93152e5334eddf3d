"""Completions in several turns: tools, environments, and the loop between them and the policy."""

from grpo_trainer.agents.environment import EnvironmentFactory, Environments, prompts_by_reset
from grpo_trainer.agents.loop import Agents
from grpo_trainer.agents.parse import TurnParser
from grpo_trainer.agents.toolbox import Toolbox, make_toolbox
