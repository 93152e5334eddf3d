"""The text of ``grpo-train --help``; ``--help-all`` prints all arguments after it."""

USAGE = """\
grpo-train --model_name_or_path MODEL --dataset_name DATA --reward_funcs NAME ...
                  [--name value ...] [--config RUN.yaml]
       grpo-train serve --model MODEL   start a vLLM server to sample from
       grpo-train report RUN [RUN ...]  write a run's report, or a comparison of several

Trains a model with GRPO. A boolean without a value is true; --no_NAME is short for
--NAME false. Underscores can be written as dashes. --help-all lists all arguments.

The dozen to know:
  --model_name_or_path TEXT           model folder or hub id
  --dataset_name TEXT                 prompts: a .jsonl, .json, .csv or .parquet file,
                                      a folder or a hub id
  --reward_funcs TEXT [TEXT ...]      built-in rewards, import paths module.function or
                                      reward models; settings in parentheses:
                                      name(key=value, ...)
  --output_dir TEXT                   folder for checkpoints, the model and the report
  --max_steps INT                     optimizer steps; -1: num_train_epochs decides
  --num_generations INT               completions per prompt: the group size
  --max_completion_length INT         longest completion, in tokens
  --per_device_train_batch_size INT   completions (not prompts) per micro-batch
  --gradient_accumulation_steps INT   micro-batches per optimizer step
  --learning_rate FLOAT               initial learning rate
  --logging_steps FLOAT               log every this many steps
  --save_steps FLOAT                  save a checkpoint every this many steps

The command:
  --config FILE                       YAML file with arguments; the command line
                                      overrides it
  --accelerate_config FILE            start processes with `accelerate launch`; a file for
                                      it, or one of fsdp2, multi_gpu, single_gpu, zero1,
                                      zero2, zero3; options of `accelerate launch`, such
                                      as --num_processes, work too
  --version                           print the version
  --help                              print this help
  --help-all                          print this help and all arguments
"""
