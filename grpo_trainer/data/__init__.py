"""Training data: prompts and their order, completions, micro-batches."""

from grpo_trainer.data.batch import (
    Advantages,
    Divisors,
    MicroBatch,
    RolloutBuffer,
    Sample,
    Scored,
    collate,
    padded_length,
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
    check_prompt,
    decode_completions,
    encode_prompts,
    encode_text,
    tokenizer_of,
)
from grpo_trainer.data.protocols import (
    Column,
    HeadTerm,
    LossAndMetrics,
    Prompts,
    Term,
)
from grpo_trainer.data.rows import (
    DatasetRow,
    Numbered,
    PromptDataset,
    PromptStream,
    RepeatedStream,
    Row,
    check_datasets,
    check_images,
    check_plain,
    load_prompts,
    looks_local,
    own_copy,
    prompt_columns,
    repeated,
    unopened,
)
