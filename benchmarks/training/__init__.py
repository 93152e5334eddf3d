"""A GRPO training step of a small real-shaped model: our trainer beside TRL's."""
