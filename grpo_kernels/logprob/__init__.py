"""Log-probabilities of a linear head. No reinforcement learning in here."""
