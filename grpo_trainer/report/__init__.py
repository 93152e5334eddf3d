"""One self-contained HTML file about a run, or comparing several."""

from grpo_trainer.report.charts import curves_of
from grpo_trainer.report.page import REPORT_NAME, ReportWriter, main, render
