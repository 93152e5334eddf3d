"""Run by test_two_ranks.py under torchrun: trains with vLLM and saves what came out.

two_ranks.py MODE FILE [PORT]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from datasets import Dataset
from vllm_helpers import ENGINE, make_model, worst_mismatch

from grpo_trainer import GRPOConfig, GRPOTrainer
from grpo_trainer.demo.policy import make_tokenizer


def reward(completion_ids, **kwargs):
    return [float(len(ids) + ids[0] % 3) for ids in completion_ids]


def main(mode: str, file: str, port: str | None = None) -> None:
    tokenizer = make_tokenizer()
    if port is not None:
        engine = {"vllm_server_port": int(port), "vllm_server_timeout": 180.0}
        engine["overlap_generation"] = mode == "overlap"
    else:
        engine = {"vllm_engine_kwargs": ENGINE, "vllm_gpu_memory_utilization": 0.1}
        engine["vllm_tensor_parallel_size"] = 2 if mode == "parallel" else 1
    args = GRPOConfig(
        output_dir=file + ".out",
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=4,
        max_steps=3,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        ddp_backend="gloo",
        disable_tqdm=True,
        use_vllm=True,
        vllm_mode="colocate" if port is None else "server",
        **engine,
    )
    dataset = Dataset.from_list([{"prompt": f"{i % 10}{i // 2}="} for i in range(12)])
    model = make_model(tokenizer, tied=True)
    trainer = GRPOTrainer(model, reward, args, dataset, processing_class=tokenizer)
    trainer.train()
    rollouts = trainer._collector._rollouts
    seen = rollouts.generate([[3, 4, 5]] * 4).token_ids  # as if a group were split over processes
    rollouts.close()
    rank = trainer.accelerator.process_index
    weight = float(trainer.accelerator.unwrap_model(trainer.model).lm_head.weight.double().sum())
    found = {"mismatch": worst_mismatch(trainer, 3), "weight": weight, "seen": seen}
    rows = [row for row in trainer.state.log_history if "sampling/staleness" in row]
    found["staleness"] = [row["sampling/staleness"] for row in rows]
    Path(f"{file}.{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
