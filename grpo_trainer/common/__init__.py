"""Small things that any room may use: texts that may be shown, values that any file can hold.

This room imports no other, and nothing heavy: a server imports it beside the guard.
"""

from grpo_trainer.common.background import in_thread, start
from grpo_trainer.common.failures import unfailing
from grpo_trainer.common.files import whole
from grpo_trainer.common.hosts import is_loopback
from grpo_trainer.common.masking import masked, masked_text, masked_url, masked_urls
from grpo_trainer.common.names import hint, name_of, no_such_option
from grpo_trainer.common.text import encodable, plain, printable, shortened
