"""`grpo-kernels plan | check | doctor | info`, and helpers for other packages.

No kernel imports this package.
"""

from grpo_kernels.tools.hub import hub_or_cache
from grpo_kernels.tools.machine import (
    cpu_name,
    device_memory,
    install_command,
    installed_version,
)
from grpo_kernels.tools.text import OneLineParser, count, read_in_part
