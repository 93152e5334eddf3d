"""Joins a loss and the loop over rows: plans, schedules, and the op for torch.compile."""

from grpo_kernels.schedule.compiled_loss import compiled_policy_loss
from grpo_kernels.schedule.loss_plan import Plan, keeps_exponentials
from grpo_kernels.schedule.run import make_call, planned_rows, run_plan
