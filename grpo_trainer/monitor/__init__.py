"""What a run logs, shows and leaves to look at."""

from grpo_trainer.monitor.card import CARD_NAME, WritesCard, environment
from grpo_trainer.monitor.completions import (
    EVAL_PREFIX,
    IMAGES,
    OWN_COLUMNS,
    REWARD_PREFIX,
    CompletionLog,
)
from grpo_trainer.monitor.log import LogsRun, watch
from grpo_trainer.monitor.metrics import (
    PHASES,
    MetricLog,
    is_own_metric,
    phase,
    step_metric,
    token_rate,
    value_metric,
)
from grpo_trainer.monitor.progress import close_progress
