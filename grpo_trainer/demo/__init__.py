"""A policy that learns to reverse digits purely by reinforcement learning, in minutes on a CPU.

``python -m grpo_trainer.demo``
"""
