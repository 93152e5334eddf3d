"""What is trained on: prompts and their order, completions, micro-batches.

May know ``common`` and ``config``; nothing of who makes completions.
"""

from grpo_trainer.data.completion import Rollout
from grpo_trainer.data.curriculum import Curriculum, training_prompts
from grpo_trainer.data.datasets import (
    Prompts,
    as_they_are,
    check_datasets,
    check_images,
    check_parts,
    load_prompts,
    looks_local,
)
from grpo_trainer.data.images import (
    PROMPT_COLUMNS,
    ImageInputs,
    content_blocks,
    data_url,
    has_images,
    images_of,
    model_inputs,
    open_images,
    with_images,
)
from grpo_trainer.data.media import ImageError, Media, distrust_rows
from grpo_trainer.data.microbatch import MicroBatch, RolloutBuffer, collate, pad_rows
from grpo_trainer.data.prompts import (
    Encoded,
    ProcessingClass,
    Prompt,
    check_context,
    check_prompts,
    decode_completions,
    encode_prompts,
    shortened,
    tokenizer_of,
)
from grpo_trainer.data.rows import Numbered, NumberedRow, unopened
from grpo_trainer.data.sampling import (
    PromptStream,
    RepeatedStream,
    RepeatSampler,
    Row,
    completions_per_epoch,
    optimizer_steps,
    own_copy,
    repeated,
)
