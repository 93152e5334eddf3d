"""Plans that need less memory, for a call that ran out of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from grpo_kernels.engine.retry import FEWER_ROWS
from grpo_kernels.schedule.plan import HeadSettings, Plan


class Way(NamedTuple):
    """A plan, and the settings that lead to it."""

    settings: HeadSettings
    plan: Plan

    @property
    def advice(self) -> str:
        forced = ["schedule='two_pass'"] if self.settings.schedule == "two_pass" else []
        size = self.settings.max_workspace_bytes
        bound = [f"max_workspace_bytes={size}"] if size is not None else []
        return ", ".join([*forced, *bound])


def ways(settings: HeadSettings, make: Callable[[HeadSettings], Plan]) -> Iterator[Way]:
    """The plan of ``settings``; then one_pass in smaller chunks, then two_pass.

    ``make`` gives the plan of settings. A plan of two_pass has only itself: the operators below
    cut their tiles on their own.
    """
    plan = make(settings)
    yield Way(settings, plan)
    if plan.schedule == "two_pass":
        return
    rows = plan.tile_rows // FEWER_ROWS
    if rows and plan.path.fixed_rows is None:  # a fixed tile decides a row's bits
        size = rows * (plan.workspace_bytes // plan.tile_rows)
        settings = replace(settings, max_workspace_bytes=size)
        try:
            plan = make(settings)
        except ValueError:  # forced to one_pass, and no sequence fits any more
            return
        yield Way(settings, plan)
    if settings.schedule == "auto" and plan.schedule == "one_pass":
        settings = replace(settings, schedule="two_pass")
        yield Way(settings, make(settings))
