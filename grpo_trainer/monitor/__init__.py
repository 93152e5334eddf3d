"""What a run logs, shows and leaves to look at.

May know ``common``, ``config`` and ``data``; it is told what it shows.
"""

from grpo_trainer.monitor.completions import OWN_COLUMNS, REWARD_PREFIX, CompletionLog
from grpo_trainer.monitor.logs import LogsRun, watch
from grpo_trainer.monitor.metrics import MetricLog, is_own_metric, step_metric, value_metric
from grpo_trainer.monitor.model_card import CARD_NAME, WritesCard
from grpo_trainer.monitor.phases import phase
from grpo_trainer.monitor.progress import close_progress
