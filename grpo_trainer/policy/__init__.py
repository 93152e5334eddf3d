"""The policy: loading, adapters, the reference model, forward passes, placement."""

from grpo_trainer.policy.ends import check_shards, stay_tied, ties_ends
from grpo_trainer.policy.forward import (
    Reference,
    RouterLoss,
    evaluating,
    make_reference,
    policy_loss_of,
    target_logprobs,
)
from grpo_trainer.policy.load import (
    base_policy,
    check_images_run,
    check_processor,
    is_quantized,
    load_policy,
    load_pretrained,
    load_processing_class,
    load_saved,
    router_coef,
    takes_images,
)
from grpo_trainer.policy.optimizers import (
    AlikeRounding,
    OptimizerClass,
    check_optimizer,
    with_learning_rate,
)
from grpo_trainer.policy.packing import Packing, make_pack
from grpo_trainer.policy.placement import (
    WHOLE,
    Placement,
    check_placement,
    loading_whole,
    placement_of,
)
from grpo_trainer.policy.prefixes import Prefixes
from grpo_trainer.policy.routing import (
    add_routing_replay,
    check_experts,
    check_routing_replay,
    replayed_experts,
)
from grpo_trainer.policy.teacher import Teacher, TeacherSource
