"""How a loss and the loop over rows are joined: plans, schedules, and the op for a compiler."""

from grpo_kernels.schedule.compile_op import compiled_policy_loss
from grpo_kernels.schedule.plan import Plan
from grpo_kernels.schedule.run import planned, run_plan

__all__ = ["Plan", "compiled_policy_loss", "planned", "run_plan"]
