"""One self-contained HTML file about a run, or about several beside one another."""

from grpo_trainer.report.page import render
from grpo_trainer.report.record import RunRecord, load_run

__all__ = ["RunRecord", "load_run", "render"]
