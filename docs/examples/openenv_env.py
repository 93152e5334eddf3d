"""An OpenEnv environment: the policy guesses a number, and a server on this machine answers.

Needs `pip install openenv`. The server could also be a container or a Space: the policy's client
only needs its URL.
"""

from __future__ import annotations

import threading
import time

import torch
import uvicorn
from datasets import Dataset
from openenv.core import GenericEnvClient
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

from grpo_trainer import GRPOConfig, GRPOTrainer
from grpo_trainer.demo.policy import make_policy, make_tool_tokenizer

NUMBERS = (1, 2, 3)
CALLS = [
    f'<tool_call>{{"name": "guess", "arguments": {{"number": {n}}}}}</tool_call>' for n in NUMBERS
]
WORDS = ["guess", "less", "more", "right", "?", *CALLS]
BATCH = 48  # completions, each in its own session of the server


class GuessAction(Action):
    number: int


class GuessObservation(Observation):
    hint: str = ""


class GuessEnvironment(Environment):
    """Has a secret number, and says whether it is less or more than a guess. The second guess
    counts."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, *, number, **kwargs):
        self.number, self.guesses = number, 0
        return GuessObservation()

    def step(self, action, timeout_s=None, **kwargs):
        self.guesses += 1
        if action.number == self.number:
            hint = "right"
        else:
            hint = "less" if self.number < action.number else "more"
        return GuessObservation(
            hint=hint,
            reward=float(hint == "right" and self.guesses == 2),
            done=self.guesses == 2,
        )

    @property
    def state(self):
        return State(step_count=self.guesses)


def serve() -> str:
    """Start the server on a thread of this process, and return its URL."""
    app = create_fastapi_app(
        GuessEnvironment, GuessAction, GuessObservation, max_concurrent_envs=BATCH
    )
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    return f"http://127.0.0.1:{port}"


class Guess:
    """The environment of a completion: a client of the server, with a method for each tool."""

    def __init__(self, url: str) -> None:
        self.client = GenericEnvClient(base_url=url).sync()
        self.client.connect()

    def reset(self, number, **row):
        self.client.reset(number=number)
        self.reward = 0.0

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: the guess.
        """
        result = self.client.step({"number": number})
        self.reward += result.reward
        return result.observation["hint"]

    def get_reward(self):
        return self.reward


def main() -> None:
    torch.set_num_threads(1)  # more threads would only slow down such a small model
    url = serve()
    tokenizer = make_tool_tokenizer(WORDS)
    question = [{"role": "user", "content": "?"}]
    trainer = GRPOTrainer(
        model=make_policy(tokenizer, seed=0),
        args=GRPOConfig(
            output_dir="out/openenv",
            max_tool_calling_iterations=2,
            per_device_train_batch_size=BATCH,
            num_generations=16,
            max_completion_length=9,
            learning_rate=1e-2,
            max_steps=40,
            logging_steps=8,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=Dataset.from_list([{"prompt": question, "number": n} for n in NUMBERS]),
        processing_class=tokenizer,
        environment_factory=lambda: Guess(url),
    )
    trainer.train()
    rows = [row for row in trainer.state.log_history if "reward" in row]
    print(f"calls per completion {rows[-1]['tools/call_frequency']:.2f}")
    print(f"final reward {rows[-1]['reward']:.3f}, at first {rows[0]['reward']:.3f}")


if __name__ == "__main__":
    main()
