"""Run by test_sharded.py under ``accelerate launch``: grpo-train, sharded over CPU processes.

accelerate shards over GPUs alone: on CPUs it has to be told that these are as good.
"""

from __future__ import annotations

import os
import sys

from accelerate.state import DistributedType, PartialState

from grpo_trainer.cli import main

if __name__ == "__main__":
    state = PartialState(cpu=True, backend="gloo")
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        import deepspeed

        deepspeed.init_distributed("gloo")
    else:
        state.distributed_type = DistributedType.MULTI_GPU
    main([*sys.argv[1:], "--use_cpu", "--accelerator_config", '{"use_configured_state": true}'])
