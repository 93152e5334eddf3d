"""What is trained on: prompts and their order, completions, micro-batches."""

from grpo_trainer.data.batch import MicroBatch, Rollout, RolloutBuffer, collate, pad_rows
from grpo_trainer.data.datasets import (
    Prompts,
    as_they_are,
    check_datasets,
    check_images,
    check_parts,
    load_prompts,
    looks_local,
    prompt_columns,
)
from grpo_trainer.data.images import (
    PROMPT_COLUMNS,
    ImageError,
    ImageInputs,
    Media,
    content_blocks,
    data_url,
    distrust_rows,
    has_images,
    images_of,
    model_inputs,
    open_images,
)
from grpo_trainer.data.prompts import (
    Encoded,
    ProcessingClass,
    Prompt,
    check_context,
    check_prompts,
    decode_completions,
    encode_prompts,
    encode_text,
    tokenizer_of,
)
from grpo_trainer.data.rows import (
    Numbered,
    NumberedRow,
    PromptStream,
    RepeatedStream,
    RepeatSampler,
    Row,
    completions_per_epoch,
    optimizer_steps,
    own_copy,
    repeated,
    unopened,
)
