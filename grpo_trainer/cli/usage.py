"""What ``grpo-train --help`` prints; ``--help-all`` prints all arguments after it."""

USAGE = """\
grpo-train --model_name_or_path MODEL --dataset_name DATA --reward_funcs NAME ...
                  [--name value ...] [--config RUN.yaml]
       grpo-train serve --model MODEL   a vLLM server to sample from
       grpo-train report RUN [RUN ...]  the report of a run, or of several side by side

Trains a model by GRPO. A boolean without a value is true; --no_NAME is short for
--NAME false. A dash may stand for each underscore. --help-all lists all arguments.

The dozen to know:
  --model_name_or_path TEXT           model folder or hub id
  --dataset_name TEXT                 prompts: a .jsonl, .json, .csv or .parquet file,
                                      a folder or a hub id
  --reward_funcs TEXT [TEXT ...]      built-in rewards, import paths module.function or
                                      reward models; settings in parentheses:
                                      name(key=value, ...)
  --output_dir TEXT                   folder for checkpoints, model and report
  --max_steps INT                     optimizer steps; -1: num_train_epochs decides
  --num_generations INT               completions per prompt: the group size
  --max_completion_length INT         longest completion, in tokens
  --per_device_train_batch_size INT   completions, not prompts, of a micro-batch
  --gradient_accumulation_steps INT   micro-batches of an optimizer step
  --learning_rate FLOAT               initial learning rate
  --logging_steps FLOAT               log every this many steps
  --save_steps FLOAT                  save a checkpoint every this many steps

The command:
  --config FILE                       YAML file with arguments; the command line
                                      overrides it
  --accelerate_config FILE            start processes by `accelerate launch`, with its
                                      file or one of ours: fsdp2, multi_gpu, single_gpu,
                                      zero1, zero2, zero3; options of `accelerate
                                      launch`, such as --num_processes, work too
  --version                           print the version
  --help                              print this
  --help-all                          print this and all arguments
"""
