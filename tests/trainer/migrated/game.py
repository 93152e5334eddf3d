"""Train a model that plays a game by tools: a script as its author wrote it for TRL."""

from datasets import Dataset

from grpo_trainer import GRPOConfig, GRPOTrainer


class GuessingGame:
    def reset(self, **kwargs) -> str | None:
        self.secret = kwargs["secret"]
        self.guesses = []
        return f" It is below {self.secret + 5}."

    def guess(self, number: int) -> str:
        """
        Guess the secret number.

        Args:
            number: The guess.

        Returns:
            Whether the secret is higher or lower.
        """
        self.guesses.append(number)
        if number == self.secret:
            return "right"
        return "higher" if number < self.secret else "lower"


def reward_func(environments, **kwargs):
    return [float(game.secret in game.guesses) for game in environments]


def reward_short(completions, **kwargs):
    return [-float(len(messages)) for messages in completions]


if __name__ == "__main__":
    prompt = [{"role": "user", "content": "Guess my number."}]
    dataset = Dataset.from_list([{"prompt": prompt, "secret": i % 3} for i in range(8)])
    training_args = GRPOConfig(
        output_dir="game",
        num_generations=4,
        per_device_train_batch_size=16,
        max_completion_length=128,
        max_tool_calling_iterations=3,
        chat_template_kwargs={"enable_thinking": False},
        max_steps=1,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
    )
    trainer = GRPOTrainer(
        model="model",
        reward_funcs=[reward_func, reward_short],
        args=training_args,
        train_dataset=dataset,
        environment_factory=GuessingGame,
    )
    trainer.train()
