"""Logging, live views, and files about a run."""

from grpo_trainer.monitor.charts import (
    CHARTS,
    EVERY_CHART,
    REWARD_PREFIX,
    WITHOUT_SIGNAL,
    Chart,
    is_own_metric,
    nothing_to_learn,
)
from grpo_trainer.monitor.completions import (
    EVAL_PREFIX,
    IMAGES,
    OWN_COLUMNS,
    CompletionLog,
)
from grpo_trainer.monitor.metrics import (
    LogprobDoubt,
    MetricLog,
    log_metrics,
    log_value,
    phase,
    token_rate,
    value_metric,
)
from grpo_trainer.monitor.run_file import (
    CARD_NAME,
    History,
    Recipe,
    RunRecord,
    load_run,
    may_write,
    write_card,
)
from grpo_trainer.monitor.view import RichProgressCallback, close_progress, show_progress
