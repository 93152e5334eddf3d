"""One self-contained HTML file about a run, or about several beside one another."""

from grpo_trainer.monitor.report.command import main
from grpo_trainer.monitor.report.page import render
from grpo_trainer.monitor.report.record import REPORT_NAME, RunRecord, load_run
from grpo_trainer.monitor.report.texts import Sample, prompt_samples
