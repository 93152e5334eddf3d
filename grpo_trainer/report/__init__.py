"""One self-contained HTML file about a run, or about several beside one another."""

from grpo_trainer.report.command import ReportWriter, main
from grpo_trainer.report.page import render
from grpo_trainer.report.record import REPORT_NAME, RunRecord, load_run
from grpo_trainer.report.texts import Sample, prompt_samples
