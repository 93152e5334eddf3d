"""A policy that learns to reverse digits by reinforcement learning alone, in a few minutes on CPU.

``python -m grpo_trainer.demo``
"""
