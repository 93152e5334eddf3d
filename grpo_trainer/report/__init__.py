"""One self-contained HTML file about a run, or about several beside one another."""

from grpo_trainer.report.command import REPORT_NAME, ReportWriter, main
from grpo_trainer.report.page import render
from grpo_trainer.report.texts import Sample, prompt_samples
