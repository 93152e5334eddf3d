"""Where the parameters of a policy are: whole on every process, or in shards (FSDP2, DeepSpeed).

May know nothing but ``common``.
"""

from grpo_trainer.sharding.loading import loading_whole
from grpo_trainer.sharding.placement import WHOLE, Placement
from grpo_trainer.sharding.select import placement_of
