"""Generated cases: everything that a call may differ in, as plain values that a repro can print."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from hypothesis import strategies as st

from tests.net import oracle

DTYPES = ("float32", "bfloat16", "float16", "float64")
LOGITS = ("plain", "flat", "peaked", "certain", "offset", "minus_inf", "large_hidden")
DRIFTS = ("small", "none", "zero", "huge")
ADVANTAGES = ("sequence", "token", "some_zero", "all_zero")
ROLLOUTS = ("absent", "given", "unknown", "far", "weights")
MEMORIES = ("contiguous", "gaps", "transposed", "sliced")
TRAINED = ("all", "hidden", "head", "weight", "bias", "lora")
ENTRIES = ("function", "module", "fused_head", "composed")
# what a second run changes, which must change nothing
TWISTS = (
    "none",
    "again",
    "second_backward",
    "garbage_in_masked_rows",
    "split",
    "checkpoint",
    "offload",
    "no_grad",
    "compile",  # of cases that are drawn for it: it takes a second
)
CALLS = ("loss", "logprobs", "divergence")
DIVERGENCES = ("forward_kl", "reverse_kl", "jsd")
LOSSES = (
    *oracle.CLIPPED, "cispo", "sapo", "vespo", "gmpo", "pg", "topr", "ce_gppo", "aspo", "fipo",
    *oracle.GATED,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call. Printed, it names what differs from the defaults."""

    seed: int = 0
    outputs: tuple[str, ...] = ()  # of linear_logprobs; (): another call
    divergence: str = ""  # the kind, of linear_divergence; "": another call
    loss_type: str = "dapo"
    settings: dict[str, Any] = field(default_factory=dict)
    entry: str = "function"
    # tokens
    lengths: tuple[int, ...] = (3, 2)
    masked: bool = False  # some tokens, by the mask
    packed: bool = False
    advantages: str = "sequence"
    drift: str = "small"
    rollout: str = "absent"
    counts: bool = False  # the window's tokens are given
    # head
    depth: int = 4
    vocab: int = 7
    dtype: str = "float32"
    logits: str = "plain"
    memory: str = "contiguous"
    bias: bool = False
    softcap: float | None = None
    logit_scale: float = 1.0
    row_temperature: bool = False
    lora: int = 0  # rank
    factors: str = "same"  # dtype of the adapter and the bias, by default the head's
    factor_size: float = 0.5  # of the adapter's; the scaling is as small as it is large
    tied: bool = False  # the hidden states are rows of the weight
    sampling_mask: bool = False
    trained: str = "all"
    autocast: bool = False
    # of a divergence
    beta: float = 0.5
    teacher_depth: int = 4
    top_k: int = 0  # ids of the teacher; 0: its hidden states and head
    # options
    device: str = "cpu"
    backend: str = "auto"
    schedule: str = "auto"
    tile_rows: int | None = None
    precision: str = "fp32"
    batch_invariant: bool = False
    metric_rows: str = "all"
    activation_bytes: int | None = None
    bounded: bool = False
    main_grad: bool = False
    threads: int = 1
    compiled: bool = False
    ranks: int = 1  # as threads
    shared: str = "vocab"  # by the ranks: the vocabulary, or the tokens of each sequence
    twist: str = "none"

    def __repr__(self) -> str:
        changed = (f for f in fields(self) if getattr(self, f.name) != getattr(DEFAULT, f.name))
        return f"Case({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in changed)})"

    @property
    def of_loss(self) -> bool:
        return not self.outputs and not self.divergence

    @property
    def needs_entropy(self) -> bool:
        settings = self.settings
        return bool(settings.get("entropy_coef")) or settings.get("top_entropy_quantile", 1) < 1

    @property
    def scaling(self) -> float:
        """That of the adapter."""
        return 0.75 * min(1.0, 0.5 / self.factor_size)


DEFAULT = Case()


@functools.lru_cache(maxsize=None, typed=True)  # to make one takes longer than to draw
def _mostly(usual: Any, *others: Any) -> st.SearchStrategy:
    """Return a strategy that draws the usual value half of the time, and shrinks to it."""
    return st.sampled_from((usual, *others)) | st.just(usual)


_NUMBERS = {
    "epsilon": (0.2, 0.1, 0.0, 0.5, 1.0, 10.0),
    "epsilon_high": (None, 0.0, 0.28, 2.0, 5.0),
    "delta": (None, 1.1, 2.0),
    "dual_clip": (None, 1.5, 3.0),
    "sapo_temperature_pos": (1.0, 0.3, 20.0),
    "sapo_temperature_neg": (1.05, 0.3, 20.0),
    "vespo_k_pos": (2.0, 0.0, 5.0),
    "vespo_lambda_pos": (3.0, 0.0),
    "vespo_k_neg": (3.0, 0.0),
    "vespo_lambda_neg": (2.0, 0.0),
    "gmpo_clip": (0.4, 0.05, 3.0),
    "ce_gppo_low": (0.75, 0.0, 0.25),
    "ce_gppo_high": (1.0, 0.5),
    "aspo_ratio_max": (3.0, 1.2),
    "fipo_decay_rate": (32.0, 2.0),
    "fipo_clip": (0.2, 0.0),
    "fipo_clip_high_only": (True, False),
    "fipo_safety_threshold": (4.0, 1.1, None),
    "dppo_tv_low": (0.2, 0.01),
    "dppo_tv_high": (0.2, 0.02),
    "dppo_kl_low": (0.05, 0.001),
    "dppo_kl_high": (0.05, 0.002),
    "dppo_ratio_max": (20.0, 1.1),
    "dppo_tau": (0.0, 1e-2),
    "ipo_threshold": (0.1, 0.01),
    "ipo_tau": (1e-3, 0.0),
    "icepop_low": (0.2, 0.95),
    "icepop_high": (5.0, 1.05),
    "kpop_threshold": (0.1, 0.001),
    "trm_threshold": (0.05, 0.001),
    "vaco_threshold": (0.2, 0.02),
    "cppo_delta": (0.2, 0.02),
    "cppo_w_min": (0.8, 1.0, 0.3),
    "cppo_delta_b": (0.02, 0.0, 0.2),
}
_OWN = {
    **dict.fromkeys(oracle.CLIPPED, ("epsilon", "epsilon_high", "delta", "dual_clip")),
    "cispo": ("epsilon", "epsilon_high"),
    "sapo": ("sapo_temperature_pos", "sapo_temperature_neg"),
    "vespo": ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
    "gmpo": ("gmpo_clip",),
    "ce_gppo": ("epsilon", "epsilon_high", "ce_gppo_low", "ce_gppo_high"),
    "aspo": ("epsilon", "epsilon_high", "aspo_ratio_max"),
    **{
        name: tuple(setting for setting in _NUMBERS if setting.startswith(name))
        for name in oracle.GATED
    },
}
_OWN["fipo"] = (*_OWN["dapo"], *(name for name in _NUMBERS if name.startswith("fipo")))
for _name in ("dppo_tv", "dppo_kl"):
    _OWN[_name] += ("dppo_ratio_max", "dppo_tau")
_MODIFIERS: dict[str, st.SearchStrategy] = {
    "beta": _mostly(0.0, 0.04, 1.0),
    "kl_estimator": st.sampled_from(("k3", "k1", "k2", "abs")),
    "use_bias_correction_kl": _mostly(True, False),
    "entropy_coef": _mostly(0.0, 0.01, -0.1),
    "top_entropy_quantile": _mostly(1.0, 1.0, 0.2, 0.7),
    "off_policy_mask_threshold": _mostly(None, -0.1, 0.05, 0.5),
    "temperature": _mostly(1.0, 0.6, 1.7, 50.0),
    "importance_sampling_level": _mostly(None, "token", "sequence", "sequence_token"),
    "loss_aggregation": _mostly(
        None,
        "token_mean",
        "window_token_mean",
        "sequence_mean",
        "sequence_sum",
        "fixed_length",
        "prompt_mean",
    ),
    "exclude_zero_variance": _mostly(False, True),
    "bypass_mode": _mostly(None, False, True),
    "rollout_correction_mode": _mostly(
        None,
        "token_truncate",
        "token_mask",
        "sequence_truncate",
        "sequence_mask",
        "geometric_mask",
        "token_k1",
        "token_k3",
        "sequence_sum_k1",
        "sequence_sum_k2",
        "sequence_mean_k1",
        "sequence_mean_k3",
        "sequence_max_k2",
        "sequence_max_k3",
    ),
    "rollout_correction_max": st.sampled_from((3.0, 1.1, 0.03, None)),
    "rollout_correction_min": _mostly(None, 0.5, 0.95),
}


def _settings(draw: Callable[[st.SearchStrategy], Any], loss_type: str, rollout: str) -> dict:
    """Draw the settings of a loss, without those that it refuses."""
    own = {name: st.sampled_from(_NUMBERS[name]) for name in _OWN.get(loss_type, ())}
    drawn = {name: draw(values) for name, values in (own | _MODIFIERS).items()}
    if loss_type == "dr_grpo" or drawn["loss_aggregation"] == "fixed_length":
        drawn["max_completion_length"] = 9
    if loss_type in oracle.OWN_RATIOS:
        del drawn["importance_sampling_level"]
    if rollout in ("weights", "absent"):  # without what the engine says there is no such ratio
        drawn["bypass_mode"] = False
    if rollout == "weights" or rollout == "absent":
        drawn["rollout_correction_mode"] = None
    elif loss_type == "vespo" and (drawn["rollout_correction_mode"] or "")[:1] in ("s", "g"):
        drawn["rollout_correction_mode"] = "token_truncate"
    if drawn["rollout_correction_mode"] is None:
        del drawn["rollout_correction_min"], drawn["rollout_correction_max"]
    elif drawn["rollout_correction_max"] == 0.03:
        del drawn["rollout_correction_min"]
    # what is as it is by default does not have to be said, or read in a repro
    usual = oracle.DEFAULTS | dict(importance_sampling_level=None)
    return {n: v for n, v in drawn.items() if v != usual[n]}


OUTPUTS = (
    "entropy",
    "lse",
    "is_top1",
    "sum_sq_probs",
    "max_logit",
    "min_logit",
    "mean_logit",
    "topk_logprobs",
    "topk_indices",
)


@st.composite
def cases(
    draw: Callable[[st.SearchStrategy], Any],
    backends: tuple[str, ...],
    ranks: int = 1,
    compiled: bool = False,
    device: str = "cpu",
    kinds: tuple[str, ...] = CALLS,
) -> Case:
    """Draw a case, hardly ever one that a documented rule refuses."""
    # a divergence breaks the compiler's graph
    kind = draw(_mostly(*(x for x in kinds if not (compiled and x == "divergence"))))
    loss = kind == "loss"
    dtype = draw(_mostly(*DTYPES))
    backend = draw(st.sampled_from(backends))
    if dtype == "float64" and backend not in ("reference", "chunked"):
        backend = "auto"
    has_tiles = backend != "reference"
    lengths = st.lists(st.sampled_from((3, 1, 0, 2, 5, 9, 17)), min_size=1, max_size=5)
    values: dict[str, Any] = dict(
        seed=draw(st.integers(0, 999)),
        dtype=dtype,
        backend=backend,
        lengths=tuple(draw(lengths)),
        depth=draw(st.sampled_from((4, 1, 3, 8, 16, 33))),
        # the last is more than the narrowest slice of a backward
        vocab=draw(st.sampled_from((7, 1, 2, 3, 16, 31, 53, 64, 129, 300, 4100))),
        logits=draw(_mostly(*LOGITS)),
        memory=draw(_mostly(*MEMORIES)),
        bias=draw(st.booleans()),
        softcap=draw(_mostly(None, 2.0, 30.0)),
        logit_scale=draw(_mostly(1.0, 0.25, 1.5)),
        lora=draw(_mostly(0, 1, 3)),
        factors=draw(_mostly("same", "float32", "bfloat16", "float64")),
        factor_size=draw(_mostly(0.5, 0.5, 1e-8, 1e4)),
        sampling_mask=draw(_mostly(False, True)),
        precision=draw(_mostly("fp32", "input")),
        batch_invariant=draw(_mostly(False, True)),
        activation_bytes=draw(st.sampled_from((None, 0, 1 << 20))),
        threads=draw(_mostly(1, 2, 3)),
        tile_rows=draw(st.sampled_from((None, 1, 3, 16, 17))),
        autocast=draw(_mostly(False, False, False, True)) and dtype != "float64",
        twist=draw(_mostly(*TWISTS[:-1])),
    )
    trained = [name for name in TRAINED if values.get(name, True)]
    values["trained"] = draw(_mostly(*trained))
    values["tied"] = values["trained"] == "all" and draw(_mostly(False, False, True))
    if values["logits"] == "minus_inf":
        values["bias"] = True
    if device != "cpu":
        values |= dict(device=device, threads=1)
    if kind == "loss":
        values |= _of_loss(draw, values, has_tiles)
    elif kind == "logprobs":
        values |= _of_logprobs(draw, values, has_tiles)
    else:
        values |= _of_divergence(draw, values)
    if compiled:
        values |= dict(entry="function", twist="compile", main_grad=False)
    if ranks > 1:
        values |= dict(ranks=2, shared="vocab" if not loss else draw(_mostly("vocab", "sequences")))
        values |= dict(tied=False, entry="function", twist="none")
        values["vocab"] = max(2, values["vocab"])
        values["threads"] = 1
        if values.get("loss_type") in oracle.ORDERED:  # whose sequences stay whole
            values["shared"] = "vocab"
        values["bounded"] = values.get("bounded", False) and values["shared"] == "vocab"
        if values["shared"] == "sequences":
            values["packed"] = False
            values["main_grad"] = False
    if values["batch_invariant"] and values["tile_rows"] is not None:
        values["tile_rows"] = max(16, values["tile_rows"])
    return Case(**values)


def _of_loss(draw: Callable, values: dict[str, Any], has_tiles: bool) -> dict[str, Any]:
    loss_type = draw(st.sampled_from(LOSSES))
    rollout = draw(_mostly(*ROLLOUTS))
    settings = _settings(draw, loss_type, rollout)
    whole = settings.get("top_entropy_quantile", 1) < 1
    # of an entropy bonus entries are chosen in one pass only
    two_passes = whole or values["batch_invariant"] or values["tile_rows"] is not None
    exact = settings.get("entropy_coef") and (two_passes or values["sampling_mask"])
    entry = draw(_mostly(*ENTRIES))
    found: dict[str, Any] = dict(
        loss_type=loss_type,
        settings=settings,
        rollout=rollout,
        entry=entry,
        masked=draw(st.booleans()),
        packed=draw(st.booleans()),
        advantages=draw(st.sampled_from((*ADVANTAGES, "some_zero"))),
        drift=draw(st.sampled_from(DRIFTS)),
        counts=draw(st.booleans()),
    )
    if entry == "composed":
        return found
    schedule = draw(st.sampled_from(("auto", "two_pass", "one_pass")))
    exact = exact or (settings.get("entropy_coef") and schedule == "two_pass")
    found |= dict(
        schedule=schedule,
        metric_rows="all" if whole else draw(_mostly("all", "active")),
        bounded=not exact and has_tiles and draw(_mostly(False, False, True)),
        main_grad=has_tiles
        and not values["tied"]
        and values["trained"] in ("all", "head", "weight")
        and draw(_mostly(False, True)),
    )
    return found


def _of_logprobs(draw: Callable, values: dict[str, Any], has_tiles: bool) -> dict[str, Any]:
    chosen = draw(st.sets(st.sampled_from(OUTPUTS)))
    masked = ["masked_logprobs"] if values["sampling_mask"] else []
    return dict(
        outputs=("logprobs", *masked, *(name for name in OUTPUTS if name in chosen)),
        lengths=(sum(values["lengths"]),),
        packed=True,
        masked=draw(st.booleans()),
        row_temperature=draw(_mostly(False, True)),
        entry=draw(_mostly("function", "fused_head")),
        bounded=not masked and has_tiles and draw(_mostly(False, False, True)),
    )


def _of_divergence(draw: Callable, values: dict[str, Any]) -> dict[str, Any]:
    top_k = draw(_mostly(0, 1, 5))
    return dict(
        divergence=draw(st.sampled_from(DIVERGENCES)),
        beta=draw(_mostly(0.5, 0.1, 0.9)),
        teacher_depth=draw(_mostly(4, 1, 40)),
        top_k=top_k if top_k < values["vocab"] else 0,
        lengths=(sum(values["lengths"]),),
        packed=True,
        masked=draw(st.booleans()),
        advantages=draw(st.sampled_from(ADVANTAGES)),
        settings=draw(st.sampled_from(({}, {"temperature": 0.6}, {"temperature": 1.7}))),
        row_temperature=draw(_mostly(False, True)),
        sampling_mask=False,
        activation_bytes=None,
    )
