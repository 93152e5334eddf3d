"""Reads a logit behind the last of a row: AddressSanitizer ends this process, if it is there."""

import torch

from grpo_kernels.backends import BACKENDS, Tile
from grpo_kernels.head import Transform

if __name__ == "__main__":
    beyond = Tile(torch.zeros(1, 33), torch.tensor([33]), Transform())
    BACKENDS["cpu"].stats(beyond, extras=False)
