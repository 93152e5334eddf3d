"""Small things that any room may use: texts that may be shown, values that any file can hold.

This room imports no other, and nothing heavy: a server imports it beside the guard.
"""

from grpo_trainer.common.background import in_thread, start, together, unfailing
from grpo_trainer.common.imports import load_function, load_module
from grpo_trainer.common.options import HELP, check_options, describe_fields
from grpo_trainer.common.text import (
    encodable,
    hint,
    is_loopback,
    masked,
    masked_text,
    masked_url,
    masked_urls,
    name_of,
    no_such_option,
    plain,
    printable,
    shortened,
    whole,
)
