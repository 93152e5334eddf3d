"""Run under ``accelerate launch``: grpo-train, sharded over CPU processes."""

from __future__ import annotations

import os
import sys

from accelerate.state import PartialState

from grpo_trainer.cli import main
from tests.support.placements import prepare

if __name__ == "__main__":
    prepare("zero3" if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true" else "fsdp2")
    PartialState(cpu=True, backend="gloo")  # the one that is there, of FSDP2
    main([*sys.argv[1:], "--use_cpu", "--accelerator_config", '{"use_configured_state": true}'])
