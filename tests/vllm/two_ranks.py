"""Run by test_two_ranks.py under torchrun: trains with vLLM and saves what came out.

two_ranks.py MODE FILE [PORT]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from accelerate.state import DistributedType, PartialState
from datasets import Dataset

from grpo_trainer import GRPOTrainer
from grpo_trainer.demo.policy import make_tokenizer
from grpo_trainer.rollout import policy_weights
from tests.support.trainer import lengths_reward
from tests.vllm.vllm_helpers import make_config, make_model, worst_mismatch


def main(mode: str, file: str, port: str | None = None) -> None:
    tokenizer = make_tokenizer()
    sharded: dict[str, Any] = {}
    if mode == "sharded":
        # accelerate takes CPU processes for plain data parallelism; FSDP2 itself runs on them
        PartialState(cpu=True, backend="gloo").distributed_type = DistributedType.MULTI_GPU
        wrapped = {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
        sharded = {"fsdp": True, "fsdp_config": wrapped}
        sharded["accelerator_config"] = {"use_configured_state": True}
    if port is not None:
        engine = {"vllm_server_port": int(port), "overlap_generation": mode == "overlap"}
    else:
        engine = {"vllm_tensor_parallel_size": 2 if mode == "parallel" else 1}
    args = make_config(
        file + ".out",
        per_device_train_batch_size=4,
        max_completion_length=4,
        ddp_backend="gloo",
        **engine,
        **sharded,
    )
    dataset = Dataset.from_list([{"prompt": f"{i % 10}{i // 2}="} for i in range(12)])
    model = make_model(tokenizer, tied=True)
    trainer = GRPOTrainer(model, lengths_reward, args, dataset, processing_class=tokenizer)
    trainer.train()
    # as if a group were split over processes
    seen = trainer.rollouts.generate([[3, 4, 5]] * 4).token_ids
    weights = dict(policy_weights(trainer.model, trainer._placement))
    weight = float(weights["lm_head.weight"].double().sum())
    trainer.rollouts.close()
    rank = trainer.accelerator.process_index
    found = {"mismatch": worst_mismatch(trainer, 3), "weight": weight, "seen": seen}
    rows = [row for row in trainer.state.log_history if "sampling/staleness" in row]
    found["staleness"] = [row["sampling/staleness"] for row in rows]
    Path(f"{file}.{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
