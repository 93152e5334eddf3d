"""Which methods of TRL's trainer a subclass may define, and what to do instead of the others."""

from __future__ import annotations

import inspect

# method -> its arguments; these are called
CALLED = {
    "_calculate_rewards": ("inputs", "prompts", "completions", "completion_ids_list"),
    "_compute_loss": ("model", "inputs"),
}
_LOSS = "define _compute_loss, or register a loss of your own"
_ORDER = "pass a train_dataset in the order that is wanted, and shuffle_dataset=False"
_INSTEAD = {
    "_generate": "pass rollout_func, which makes completions of prompts",
    "_generate_single_turn": "pass rollout_engine, whose generate samples completions",
    "_generate_and_score_completions": (
        "define _calculate_rewards, pass rollout_func, or look at what was made in _compute_loss"
    ),
    "_tokenize_prompts": "pass a processing_class with another chat template, or rollout_func",
    "_tool_call_loop": "pass tools, environment_factory or rollout_func",
    "_get_tool_suffix_ids": "pass a processing_class with another chat template",
    "_get_per_token_logps_and_entropies": _LOSS,
    "get_high_entropy_mask": _LOSS,
    "get_off_policy_mask": _LOSS,
    "get_gamma_weights": _LOSS,
    "get_train_dataloader": _ORDER,
    "_get_train_sampler": _ORDER,
}


def check_overrides(kind: type, base: type) -> None:
    """Raise ValueError if ``kind``, a subclass of ``base``, defines what nobody would call."""
    for name, advice in _INSTEAD.items():
        if getattr(kind, name, None) is not getattr(base, name, None):
            raise ValueError(f"{kind.__name__}.{name}: expected no such method; {advice}")
    for name, arguments in CALLED.items():
        method = getattr(kind, name)
        if method is getattr(base, name):
            continue
        signature = inspect.signature(method)
        try:
            signature.bind(None, *arguments)
        except TypeError as error:
            raise ValueError(
                f"{kind.__name__}.{name}: expected a method that takes ({', '.join(arguments)}), "
                f"got {signature}"
            ) from error
