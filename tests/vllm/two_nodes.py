"""Run by test_two_nodes.py under accelerate launch: trains a sharded policy with a vLLM server,
first with weights that are up to date and then with generation that overlaps.

two_nodes.py FILE PORT
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from accelerate.state import AcceleratorState, DistributedType, PartialState
from datasets import Dataset

from grpo_trainer import GRPOTrainer
from grpo_trainer.demo.policy import make_tokenizer
from tests.support.trainer import lengths_reward
from tests.vllm.vllm_helpers import make_config, make_model, worst_mismatch


def main(file: str, port: str) -> None:
    found = [train(file, port, overlaps) for overlaps in (False, True)]
    Path(f"{file}.{os.environ['RANK']}.json").write_text(json.dumps(found))


def train(file: str, port: str, overlaps: bool) -> dict[str, Any]:
    AcceleratorState._reset_state()
    # accelerate takes CPU processes for plain data parallelism; FSDP2 itself runs on them
    PartialState(cpu=True, backend="gloo").distributed_type = DistributedType.MULTI_GPU
    tokenizer = make_tokenizer()
    args = make_config(
        file + ".out",
        per_device_train_batch_size=2,
        max_completion_length=4,
        ddp_backend="gloo",
        beta=0.05,
        vllm_server_port=int(port),
        accelerator_config={"use_configured_state": True},
        overlap_generation=overlaps,
    )
    dataset = Dataset.from_list([{"prompt": f"{i % 10}{i // 2}="} for i in range(12)])
    model = make_model(tokenizer, tied=False)
    trainer = GRPOTrainer(model, lengths_reward, args, dataset, processing_class=tokenizer)
    trainer.train()
    trainer.rollouts.close()
    return {
        "mismatch": worst_mismatch(trainer, 3),
        "processes": trainer.accelerator.num_processes,
        "local": int(os.environ["LOCAL_WORLD_SIZE"]),
        "placement": str(trainer.accelerator.distributed_type),
        "staleness": [
            row["sampling/staleness"]
            for row in trainer.state.log_history
            if "sampling/staleness" in row
        ],
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
    dist.barrier()  # a process that leaves early may abort
    dist.destroy_process_group()
