"""A table of the bytes per parameter in full training, by optimizer and dtype.

``tests/trainer/policy/test_optimizers.py`` compares the states' bytes with real optimizers.
"""

from __future__ import annotations

from benchmarks import text
from grpo_kernels.tools.training import moment_bytes

_ADAFACTOR = 0.0  # a row and a column instead of a matrix
_ROUNDED = "`optim_args: bf16_stochastic_round=True`"

# settings, package, bytes of a weight and of the states
_WAYS = (
    ("the defaults", "", 4, 8.0),
    ("`optim: adamw_8bit`", "bitsandbytes", 4, moment_bytes(8)),
    ("`optim: adamw_torch_8bit`", "torchao", 4, moment_bytes(8)),
    ("`optim: adafactor`", "", 4, _ADAFACTOR),
    ("`dtype: bfloat16`", "", 2, 4.0),
    ("`dtype: bfloat16`, `optim: adamw_8bit`", "bitsandbytes", 2, moment_bytes(8)),
    (f"`dtype: bfloat16`, `optim: adamw_torch_8bit`, {_ROUNDED}", "torchao", 2, moment_bytes(8)),
    (f"`dtype: bfloat16`, `optim: adamw_torch_4bit`, {_ROUNDED}", "torchao", 2, moment_bytes(4)),
)


def state_bytes() -> str:
    """Write the table. Gradients have the dtype of their weights."""
    return text.markdown([
        {
            "settings": settings,
            "package": package,
            "weight": str(weight),
            "gradient": str(weight),
            "states": f"{states:.3g}",
            "in all": f"{2 * weight + states:.3g}",
        }
        for settings, package, weight, states in _WAYS
    ])  # fmt: skip
