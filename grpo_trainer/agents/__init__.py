"""Completions in several turns: tools, environments, and the loop between them and the policy."""

from grpo_trainer.agents.loop import ToolLoop
from grpo_trainer.agents.parse import TurnParser
from grpo_trainer.agents.tools import (
    EnvironmentFactory,
    Environments,
    Toolbox,
    make_toolbox,
    prompts_by_reset,
)
