"""Train an adapter by a command line and a YAML file: a script as its author wrote it for TRL."""

from dataclasses import dataclass, field

from datasets import load_dataset

from grpo_trainer import (
    GRPOConfig,
    GRPOTrainer,
    ModelConfig,
    ScriptArguments,
    TrlParser,
    get_peft_config,
    get_quantization_config,
)
from grpo_trainer.rewards import get_soft_overlong_punishment, think_format_reward


@dataclass
class MyScriptArguments(ScriptArguments):
    reward_funcs: list[str] | None = field(default=None, metadata={"help": "Rewards, by name."})


REWARDS = {
    "format": think_format_reward,
    "length": get_soft_overlong_punishment(max_completion_len=8, soft_punish_cache=4),
}


def main(script_args, training_args, model_args):
    training_args.model_init_kwargs = dict(
        revision=model_args.model_revision,
        attn_implementation=model_args.attn_implementation,
        dtype=model_args.dtype,
    )
    quantization_config = get_quantization_config(model_args)
    if quantization_config is not None:
        training_args.model_init_kwargs["quantization_config"] = quantization_config
    dataset = load_dataset(
        script_args.dataset_name,
        name=script_args.dataset_config,
        streaming=script_args.dataset_streaming,
    )
    evaluates = training_args.eval_strategy != "no"
    trainer = GRPOTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=[REWARDS[name] for name in script_args.reward_funcs],
        args=training_args,
        train_dataset=dataset[script_args.dataset_train_split],
        eval_dataset=dataset[script_args.dataset_test_split] if evaluates else None,
        peft_config=get_peft_config(model_args),
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.accelerator.print("Training completed.")
    trainer.save_model(training_args.output_dir)
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
    return trainer


if __name__ == "__main__":
    parser = TrlParser((MyScriptArguments, GRPOConfig, ModelConfig))
    trainer = main(*parser.parse_args_and_config())
