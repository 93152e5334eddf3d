"""A verifiers environment: the policy looks into a box with a tool, and names its contents.

Needs `pip install verifiers` (0.4). Its taskset has the prompts, a toolset has the tools, and the
tasks' methods marked with `vf.reward` score a rollout.
"""

from __future__ import annotations

import asyncio
import json

import torch
import verifiers.v1 as vf
from datasets import Dataset

from grpo_trainer import GRPOConfig, GRPOTrainer
from grpo_trainer.demo.policy import make_policy, make_tool_tokenizer

DIGITS = "12"
WORDS = ["look", '<tool_call>{"name": "look", "arguments": {}}</tool_call>', "?", *DIGITS]


class BoxData(vf.TaskData):
    digit: str


class BoxTools(vf.Toolset[vf.ToolsetConfig, vf.State]):
    async def setup_task(self, task):
        self.digit = task.digit

    @vf.tool
    def look(self) -> str:
        """Look into the box."""
        return self.digit


class BoxTask(vf.Task[BoxData]):
    @classmethod
    def toolsets(cls, config):
        return [BoxTools(vf.ToolsetConfig())]

    @vf.reward(weight=0.5)
    async def right(self, task, trace) -> float:
        return float(trace.last_reply == task.digit)

    @vf.reward(weight=0.5)
    async def looked_once(self, trace) -> float:
        return float(len(trace.tool_messages) == 1)


class Boxes(vf.Taskset[BoxTask]):
    def load(self):
        return [BoxTask(BoxData(prompt="?", digit=digit)) for digit in DIGITS]


class Rollout:
    """The environment of a completion: its task, and a method for each tool of the task."""

    def __init__(self, tasks: list[vf.Task]) -> None:
        self.tasks = tasks

    def reset(self, index, **row):
        self.task = self.tasks[index]
        [self.toolset] = self.task.toolsets(self.task.config)
        asyncio.run(self.toolset.setup_task(self.task.data))

    def look(self) -> str:
        """Look into the box."""
        return self.toolset.look()


def as_verifiers(message):
    """Return a message in verifiers' format: calls have ids, and arguments in JSON."""
    message = dict(message)
    if message["role"] == "tool":
        message["tool_call_id"] = message["name"]
    if calls := message.pop("tool_calls", None):
        functions = [call["function"] for call in calls]
        message["tool_calls"] = [
            {"id": each["name"], "name": each["name"], "arguments": json.dumps(each["arguments"])}
            for each in functions
        ]
    return message


def trace_of(environment, prompt, completion) -> vf.Trace:
    """Return a rollout in the format that its task's rewards need."""
    data = environment.task.data
    nodes = [
        vf.MessageNode(
            parent=at - 1 if at else None,
            message=as_verifiers(message),
            sampled=at >= len(prompt) and message["role"] == "assistant",
        )
        for at, message in enumerate([*prompt, *completion])
    ]
    return vf.Trace(
        task=vf.TraceTask(type=type(environment.task).__name__, data=data),
        agent=vf.AgentInfo(config=vf.AgentConfig()),
        nodes=nodes,
    )


async def rubric(environments, prompts, completions, **kwargs):
    """Return the weighted sum of each task's rewards."""
    rollouts = list(zip(environments, prompts, completions, strict=True))
    traces = [trace_of(*rollout) for rollout in rollouts]
    tasks = [environment.task for environment in environments]
    await asyncio.gather(*(task.score(one) for task, one in zip(tasks, traces, strict=True)))
    return [trace.reward for trace in traces]


def main() -> None:
    torch.set_num_threads(1)  # more threads would only slow down such a small model
    tasks = list(Boxes(vf.TasksetConfig()))
    rows = [
        {"prompt": [{"role": "user", "content": task.data.prompt}], "index": index}
        for index, task in enumerate(tasks)
    ]
    tokenizer = make_tool_tokenizer(WORDS)
    trainer = GRPOTrainer(
        model=make_policy(tokenizer, seed=0),
        reward_funcs=rubric,
        args=GRPOConfig(
            output_dir="out/verifiers",
            max_tool_calling_iterations=1,
            per_device_train_batch_size=48,
            num_generations=16,
            max_completion_length=9,
            learning_rate=1e-2,
            entropy_coef=0.02,
            max_steps=60,
            logging_steps=10,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=Dataset.from_list(rows * 3),
        processing_class=tokenizer,
        environment_factory=lambda: Rollout(tasks),
    )
    trainer.train()
    logs = [row for row in trainer.state.log_history if "reward" in row]
    print(f"final reward {logs[-1]['reward']:.3f}, at first {logs[0]['reward']:.3f}")


if __name__ == "__main__":
    main()
