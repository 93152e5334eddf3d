"""One engine on one model: ``python -m benchmarks.rollouts.run ENGINE SIZE DEVICE STEPS``.

In a process of its own, since an engine changes threads and random numbers of the process it is in.
The numbers are those that the trainer logs of itself.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.rollouts.engines import ENGINES, Engine
from benchmarks.rollouts.server import served
from benchmarks.rollouts.sizes import sizes
from benchmarks.training.task import (
    SEED,
    TrainingConfig,
    make_dataset,
    make_model,
    make_tokenizer,
    reward,
)

_PROFILE = "profiling/"
WARM_UP = 2  # steps: in the first one weights are sent that are no update


def run(engine: Engine, config: TrainingConfig, device: str, steps: int) -> dict[str, Any]:
    """Return the seconds of ``steps`` steps by phase, the tokens, and the bytes of an update."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = engine.settings(config, device)
        if not engine.server:
            return _train(config, device, steps, folder, settings)
        with served(config, device, folder) as port:
            return _train(config, device, steps, folder, settings | {"vllm_server_port": port})


def _train(
    config: TrainingConfig, device: str, steps: int, folder: Path, settings: dict[str, Any]
) -> dict[str, Any]:
    from transformers import PrinterCallback

    from grpo_trainer import GRPOConfig, GRPOTrainer
    from grpo_trainer.rollout import policy_weights

    args = GRPOConfig(**_settings(config, device, steps, folder), **settings)
    trainer = GRPOTrainer(
        make_model(config),
        reward,
        args,
        make_dataset(config, args.max_steps),
        processing_class=make_tokenizer(config),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row][-steps:]
    names = dict.fromkeys(name for row in rows for name in row if name.startswith(_PROFILE))
    weights = list(policy_weights(trainer.model))
    trainer.rollouts.close()
    return {
        "parameters": sum(x.numel() for x in trainer.model.parameters()),
        "weight_bytes": sum(x.numel() * x.element_size() for _, x in weights),
        "tokens": [config.sequences * row["completions/mean_length"] for row in rows],
        "seconds": [row["step_time"] for row in rows],
        "phases": {
            name.removeprefix(_PROFILE): [row.get(name, 0.0) for row in rows] for name in names
        },
    }


def _settings(config: TrainingConfig, device: str, steps: int, folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder / "out"),
        "use_cpu": device == "cpu",
        "gradient_checkpointing": False,
        "learning_rate": 1e-6,
        "max_steps": WARM_UP + steps,
        "per_device_train_batch_size": config.micro_batch,
        "gradient_accumulation_steps": config.micro_batches,
        "num_generations": config.group,
        "max_completion_length": config.completion_tokens,
        "loss_type": "dapo",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "write_report": False,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "seed": SEED,
    }


def _main(name: str, size: str, device: str, steps: str) -> None:
    [engine] = [engine for engine in ENGINES if engine.name == name]
    found = run(engine, sizes(device)[size], device, int(steps))
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
