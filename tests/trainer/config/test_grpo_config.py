"""GRPOConfig: its defaults, what it refuses by name, and the names that it still takes."""

from __future__ import annotations

import ast
import copy
import dataclasses
import inspect
import json
import math
import re
from collections.abc import Iterator
from typing import Any, ClassVar, get_args, get_type_hints

import pytest
from accelerate.parallelism_config import ParallelismConfig
from transformers import TrainingArguments

from grpo_kernels import Bounded, LossConfig
from grpo_kernels.losses import LOSSES
from grpo_kernels.testing import make_config
from grpo_trainer import GRPOConfig, GRPOTrainer
from grpo_trainer.cli.train import parse
from grpo_trainer.config import backward_options, loss_config
from grpo_trainer.config.checks import _RELATIONS, NEWER_NAMES, OLD_NAMES
from tests.support.documents import DOCS, section

HINTS = get_type_hints(GRPOConfig)
INHERITED = get_type_hints(TrainingArguments)
OWN = [name for name in HINTS if name not in INHERITED and name not in OLD_NAMES and name[0] != "_"]
DEFAULTS = {item.name: item.default for item in dataclasses.fields(GRPOConfig)}
HUGE = 10**400  # larger than any float
DEFAULT_IS_ONE = ("sapo_temperature_pos", "ce_gppo_high")  # which True is, too
NEEDED = {
    "cispo": ["epsilon_high"],  # it warns of a bound below 1
    "trm": ["trm_threshold"],
    "vaco": ["vaco_threshold"],
}
RUN = ["--model_name_or_path", "m", "--dataset_name", "d", "--reward_funcs", "x", "--use_cpu"]


@pytest.mark.parametrize("loss_type", LOSSES)
def test_every_loss_field_reaches_the_loss(make_args, loss_type):
    needed = make_config(loss_type).surrogate if loss_type in NEEDED else None
    given = {name: getattr(needed, name) for name in NEEDED.get(loss_type, ())}
    args = make_args(loss_type=loss_type, **given)
    assert loss_config(args).loss_type == loss_type
    own = {"max_completion_length", "surrogate", "registry_key", "loss_type", *given}
    for field in (
        *dataclasses.fields(LossConfig),
        *dataclasses.fields(LOSSES[loss_type].surrogate),
    ):
        if field.name.startswith("rollout_correction_"):
            assert not hasattr(args, field.name)
        elif field.name not in own:
            assert getattr(args, field.name) == field.default
    changed = loss_config(make_args(loss_type="grpo", beta=0.1, epsilon_high=0.3, delta=4.0))
    assert (changed.loss_type, changed.beta) == ("grpo", 0.1)
    assert (changed.surrogate.epsilon_high, changed.surrogate.delta) == (0.3, 4.0)
    assert changed.max_completion_length == 4


@pytest.mark.parametrize("loss_type", ["sapo", "vespo", "pg"])
def test_settings_that_trl_has_for_every_loss_are_left_out_with_a_warning(make_args, loss_type):
    changes = {"loss_type": loss_type, "epsilon": 10.0, "delta": 2.0}
    with pytest.warns(UserWarning, match=f"^epsilon, delta: not used by {loss_type}$") as warned:
        args = make_args(**changes)
    assert len(warned) == 1
    assert loss_config(args) == loss_config(make_args(loss_type=loss_type))
    for strict in ({"dual_clip": 3.0}, {"loss_kwargs": {"epsilon": 0.1}}):
        with pytest.raises(ValueError, match=f"(dual_clip|epsilon): .* a setting of {loss_type}"):
            make_args(loss_type=loss_type, **strict)


def test_the_backward_of_the_head(make_args):
    assert backward_options(make_args()) == {"schedule": "auto", "activation_bytes": None}
    words = "--backward sparse --backward_tolerance 2e-3 --no_backward_exact_weight "
    words += "--activation_bytes 4096 --schedule two_pass --seed 7"
    _, args = parse([*RUN, *words.split()])
    bounded = Bounded(tolerance=2e-3, exact_weight=False, seed=7)
    options = {"backward": bounded, "schedule": "two_pass", "activation_bytes": 4096}
    assert backward_options(args) == options
    assert make_args(schedule="one_pass", loss_type="grpo").schedule == "one_pass"


def test_settings_of_trust_regions():
    words = "--loss_type dppo_tv --dppo_tv_low 0.1 --dppo_tau 1e-3 --use_vllm"
    loss = loss_config(parse([*RUN, *words.split()])[1])
    assert (loss.surrogate.dppo_tv_low, loss.surrogate.dppo_tau) == (0.1, 1e-3)
    assert loss.bypasses and loss.correction_mode is None
    words = "--loss_type ipo --bypass_mode false --loss_aggregation sequence_mean"
    loss = loss_config(parse([*RUN, *words.split()])[1])
    assert not loss.bypasses and loss.aggregation.by_sequence


FOLLOWING = [
    ({"gradient_accumulation_steps": 3}, {"generation_batch_size": 12, "steps_per_generation": 3}),
    ({"generation_batch_size": 16}, {"generation_batch_size": 16, "steps_per_generation": 4}),
    ({"scale_rewards": True}, {"scale_rewards": "group"}),
    ({"scale_rewards": "False"}, {"scale_rewards": "none"}),
    ({"pad_to_multiple_of": "auto"}, {"pad_to_multiple_of": None}),
    ({"pad_to_multiple_of": "16"}, {"pad_to_multiple_of": 16}),
    (
        {"use_liger_kernel": True},
        {"liger_kernel_config": {"fused_linear_cross_entropy": False, "cross_entropy": False}},
    ),
]


@pytest.mark.parametrize(("changes", "found"), FOLLOWING, ids=str)
def test_values_that_follow(make_args, changes, found):
    args = make_args(**changes)
    assert {name: getattr(args, name) for name in found} == found


POSITIVE = """
num_iterations max_prompt_length max_completion_length max_resampling_rounds steps_per_generation
generation_batch_size ref_model_sync_steps num_generations_eval per_device_train_batch_size
per_device_eval_batch_size gradient_accumulation_steps temperature repetition_penalty tool_timeout
vllm_server_timeout vllm_request_timeout vllm_max_model_length vllm_tensor_parallel_size
vllm_importance_sampling_clip_max max_tokens_per_micro_batch
"""
SHARES = "top_p vllm_gpu_memory_utilization top_entropy_quantile backward_tolerance"
# just below or above the range of a number, by field; values of another kind are generated
OUT_OF_RANGE = {
    **dict.fromkeys(POSITIVE.split(), (0,)),
    **dict.fromkeys(("vllm_server_port", "vllm_group_port"), (0, 65536)),
    **dict.fromkeys(SHARES.split(), (0, 1.5)),
    **dict.fromkeys(("min_p", "ref_model_mixup_alpha"), (1.5,)),
    "num_generations": (1,),
    "max_steps": (0, -5),
    "learning_rate": (-1.0, HUGE),
    "num_train_epochs": (-1.0,),
    "pad_to_multiple_of": (0, -8, "0", "-8", ""),
}
ANY_NUMBER = ("entropy_coef", "off_policy_mask_threshold")  # below 0, too
ANY_TEXT = ("teacher",
    "dynamic_prompts_fn", "rollout_engine", "vllm_server_host", "vllm_weights_folder",
    "vllm_structured_outputs_regex",
)  # fmt: skip
ANY_DICTIONARY = ("model_init_kwargs", "chat_template_kwargs", "vllm_engine_kwargs", "loss_kwargs")


def wrong_values(name: str) -> Iterator[Any]:
    """Make values of another kind than a field has, by its type."""
    kinds = set(get_args(HINTS[name])) or {HINTS[name]}
    numeric = kinds & {int, float} and str not in kinds
    yield from (object(), math.nan)
    if name not in ANY_TEXT:
        yield "no such text"
    if name not in ANY_NUMBER:
        yield -1
    if not any("list" in str(kind) for kind in kinds):
        yield [1]
    if name not in ANY_DICTIONARY:
        yield {"a": 1}
    if numeric and int in kinds:
        yield 1.5
    if numeric and int not in kinds:
        yield from (HUGE, -math.inf)
    if bool not in kinds and name not in ("scale_rewards", *DEFAULT_IS_ONE):
        yield True
    if type(None) not in kinds and name not in ("top_k", "scale_rewards"):
        yield None


@pytest.mark.parametrize("name", sorted({*OWN, *OUT_OF_RANGE}))
def test_wrong_values_of_a_field(make_args, name):
    for value in (*(wrong_values(name) if name in OWN else ()), *OUT_OF_RANGE.get(name, ())):
        with pytest.raises(ValueError, match=rf"\b{name}\b"):
            make_args(**{name: value})


SPARSE = {"backward": "sparse"}
BONUS = {"entropy_coef": 0.1}
MASKED = {"use_sampling_mask": True, "use_vllm": True, "top_k": 8}
PADDED = {"max_prompt_length": 7, "pad_to_multiple_of": 8}
UNROUTED = {
    "use_rollout_routing_replay": True,
    "use_vllm": True,
    "vllm_engine_kwargs": {"enable_return_routed_experts": False},
}
TWO_FUSED_LOSSES = {
    "use_liger_kernel": True,
    "liger_kernel_config": {"fused_linear_cross_entropy": True},
}
DISPATCH = {"accelerator_config": {"dispatch_batches": True}}
TWO_DTYPES = {"model_init_kwargs": {"dtype": "float32", "torch_dtype": "bfloat16"}}
# what does not go together, or has no meaning here -> the field that is named, what is said of it
RELATIONS = [
    ({"generation_batch_size": 8, "steps_per_generation": 2}, "generation_batch_size", "at most"),
    ({"generation_batch_size": 6}, "generation_batch_size", "multiple of 4"),
    ({"num_generations": 3}, "num_generations", r"divisor of .* 4 completions \(2, 4\)"),
    ({"per_device_train_batch_size": 1}, "num_generations", r"\(none: increase the batch size\)"),
    ({"eval_strategy": "steps", "num_generations_eval": 3}, "per_device_eval_batch_size", "3, 6"),
    ({"auto_find_batch_size": True}, "auto_find_batch_size", ""),
    ({"label_smoothing_factor": 0.1}, "label_smoothing_factor", ""),
    ({"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy", ""),
    ({"parallelism_config": ParallelismConfig(cp_size=2)}, "parallelism_config", "expected None"),
    ({"accelerator_config": {"batches": 1}}, "accelerator_config", "one of .*split_batches"),
    (DISPATCH, "accelerator_config", "dispatch_batches=False"),
    ({"bf16": "false"}, "bf16", "expected True or False or None, got 'false'"),
    ({"loss_type": "ppo"}, "loss_type", "dapo"),
    ({"scale_rewards": "max"}, "scale_rewards", "batch, group, none"),
    ({"loss_kwargs": {"beta": 0.1}}, "loss_kwargs", "the loss's own .*, got 'beta'"),
    ({"loss_kwargs": {"rollout_correction_max": 2.0}}, "loss_kwargs", "'rollout_correction_max'"),
    ({"loss_kwargs": {"epsilon": 0.1}, "epsilon": 0.3}, "loss_kwargs", "no 'epsilon', since"),
    ({"loss_kwargs": '{"a": ' + "[" * 9999}, "loss_kwargs", "expected JSON"),
    ({"model_init_kwargs": {"dtype": "float33"}}, "model_init_kwargs", "floating-point dtype"),
    (TWO_DTYPES, "model_init_kwargs", "one of dtype and torch_dtype .* got 'float32' and 'bf"),
    ({"schedule": "one_pass", "loss_type": "gspo"}, "schedule", "auto or two_pass.*with gspo"),
    (SPARSE | BONUS | {"schedule": "two_pass"}, "backward", "with schedule=two_pass"),
    (SPARSE | BONUS | {"top_entropy_quantile": 0.5}, "backward", "with top_entropy_quantile=0.5"),
    (SPARSE | BONUS | MASKED, "backward", "'exact' .* with use_sampling_mask=True, got 'sparse'"),
    (SPARSE | {"seed": 1 << 32}, "seed", "an int in"),
    ({"max_tokens_per_micro_batch": 4}, "max_tokens_per_micro_batch", "at least 5, .*, got 4"),
    (PADDED | {"max_tokens_per_micro_batch": 15}, "max_tokens_per_micro_batch", "16, .*, got 15"),
    ({"use_vllm": True, "vllm_max_model_length": 4}, "vllm_max_model_length", "at least 5, .* 4"),
    ({"use_adaptive_entropy": True, "entropy_coef": 2.0}, "entropy_coef", ">= 0 and <= 1, got 2"),
    ({"use_vllm": True, "generation_batches_ahead": 1}, "generation_batches_ahead", "'colocate'"),
    (UNROUTED, "vllm_engine_kwargs", "expected none with use_rollout_routing_replay"),
    ({"entropy_coef_min": 1.5}, "entropy_coef_max", ">= 1.5"),
    ({"generation_kwargs": {"temperature": 0.5}}, "generation_kwargs", "field temperature instead"),
    ({"generation_kwargs": {"num_beamz": 5}}, "generation_kwargs", "has no 'num_beamz'"),
    ({"generation_kwargs": {"stop_strings": ["."]}}, "generation_kwargs", "'stop_token_ids'"),
    ({"report_to": "wandbb"}, "report_to", "expected one of .*wandb"),
    ({"report_to": ["swanlab"]}, "report_to", "installed .*, got swanlab; pip install swanlab"),
    (TWO_FUSED_LOSSES, "liger_kernel_config", "expected False"),
]


@pytest.mark.parametrize(
    ("changes", "field", "message"), RELATIONS, ids=[f"{row[1]}: {row[2]}" for row in RELATIONS]
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_does_not_go_together(make_args, changes, field, message):
    with pytest.raises(ValueError, match=rf"(?s)\b{field}\b.*{message}"):
        make_args(**changes)


# settings that are not their defaults, for either side of a relation
CHANGED = {
    "backward_exact_weight": False,
    "backward_tolerance": 0.01,
    "beta": 0.1,
    "cache_implementation": "static",
    "dynamic_prompts_fn": "module.function",
    "generation_batches_ahead": 1,
    "max_staleness": 3,
    "max_tokens_per_micro_batch": 64,
    "on_bad_image": "skip",
    "rollout_engine": "own",
    "sync_ref_model": True,
    "top_entropy_quantile": 0.5,
    "use_vllm": True,
    "vllm_importance_sampling_correction": False,
}


KEPT = """
backward_exact_weight without backward=sparse
backward_tolerance without backward=sparse
cache_implementation with use_vllm
dynamic_prompts_fn with generation_batches_ahead
generation_batches_ahead without vllm_importance_sampling_correction
max_staleness without generation_batches_ahead
on_bad_image with generation_batches_ahead
sync_ref_model without beta
top_entropy_quantile with max_tokens_per_micro_batch
use_vllm with rollout_engine
"""


@pytest.mark.parametrize("relation", KEPT.strip().splitlines())
def test_a_field_that_keeps_its_default(make_args, relation):
    assert KEPT.split() == [word for each in sorted(_RELATIONS) for word in each]
    name, word, condition = relation.split()
    changes = {name: CHANGED[name]}
    if (word == "with") == (DEFAULTS.get(condition) in (None, 0, False)):
        changes |= {condition: CHANGED[condition]}
    with pytest.raises(ValueError, match=f"{name}: expected {DEFAULTS[name]!r} {word} {condition}"):
        make_args(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_type": "dapo", "importance_sampling_level": "sequence"}, "dapo sums over tokens"),
        ({"loss_type": "luspo", "importance_sampling_level": "token"}, "defined with 'sequence'"),
        ({"dataloader_num_workers": 2}, "dataloader_num_workers: no effect on training"),
    ],
)
def test_warnings(make_args, recwarn, changes, message):
    make_args(loss_type="luspo", importance_sampling_level="sequence")
    assert not recwarn
    with pytest.warns(UserWarning, match=message):
        make_args(**changes)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"wandb_log_unique_prompts": True}, {"log_unique_prompts": True}),
        ({"use_liger_loss": True}, {}),
        ({"top_k": None}, {"top_k": 0}),
        (
            {"model_init_kwargs": {"torch_dtype": "bfloat16"}},
            {"model_init_kwargs": {"dtype": "bfloat16"}},
        ),
    ],
)
def test_old_names(make_args, old, new):
    [(name, value)] = copy.deepcopy(old).items()
    with pytest.warns(FutureWarning, match=rf"{name}.*: Deprecated: "):
        assert make_args(**old) == make_args(**new)
    assert old == {name: value}  # whose dictionary is not changed
    if value is True:
        with pytest.warns(FutureWarning, match="Deprecated"):
            args = parse([*RUN, f"--{name}"])[1]
        assert {name: getattr(args, name) for name in new} == new


@pytest.mark.parametrize("name", NEWER_NAMES)
def test_names_that_mean_the_same(tmp_path, name):
    newer, settings = NEWER_NAMES[name], name.endswith("kwargs")
    both = {name, newer}
    values = ({"use_reentrant": False}, {"use_reentrant": True}) if settings else (True, False)
    default = GRPOConfig(str(tmp_path), use_cpu=True)
    assert {getattr(default, each) for each in both} == {None if settings else True}
    for said in ({name}, {newer}, both):
        for value in values:
            args = GRPOConfig(str(tmp_path), use_cpu=True, **dict.fromkeys(said, value))
            written = json.dumps(value)
            words = [word for each in said for word in (f"--{each}", written)]
            for each in (args, parse([*RUN, *words])[1]):
                assert getattr(each, name) == getattr(each, newer) == value
    for one, other in (values, values[::-1]):
        with pytest.raises(ValueError, match=rf"{name}, {newer}: .* got {one!r} and {other!r}"):
            GRPOConfig(str(tmp_path), use_cpu=True, **{name: one, newer: other})


@pytest.mark.parametrize("name", ["gradient_checkpointing", "activation_checkpointing"])
def test_one_of_two_names_set_after_construction(make_args, policy, name):
    args = make_args(gradient_checkpointing=True)
    setattr(args, name, False)
    with pytest.raises(ValueError, match="gradient_checkpointing, activation_checkpointing: .*one"):
        GRPOTrainer(policy, "think_format_reward", args)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("old", "one", "other"),
    [("wandb_log_unique_prompts", False, True), ("vllm_guided_decoding_regex", "a", "b")],
)
def test_an_old_name_beside_the_new_one(make_args, old, one, other):
    new = OLD_NAMES[old]
    with pytest.raises(ValueError, match=f"{old}, {new}: .* got {one!r} and {other!r}"):
        make_args(**{old: one, new: other})
    args = make_args(**{old: other, new: other})  # say the same
    assert getattr(args, new) == other and getattr(args, old) is None


def test_defaults_in_the_documents():
    table = section(DOCS, "Defaults in older documents")
    rows = re.findall(r"^\| `(\w+)` \| `(.+?)` \| `(.+?)`", table, re.M)
    assert len(rows) > 5
    assert {name: ast.literal_eval(here) for name, _, here in rows} == {
        name: DEFAULTS[name] for name, _, _ in rows
    }
    assert not [name for name, before, here in rows if before == here]


def test_values_of_trl():
    trl = pytest.importorskip("trl")
    theirs = {item.name: item.default for item in dataclasses.fields(trl.GRPOConfig)}
    on_purpose = {
        "importance_sampling_level",  # None: that of the named loss
        "gradient_checkpointing",  # None: on, unless its newer name says otherwise
        "logging_nan_inf_filter",  # True would wait for the device in every step
        "vllm_server_host",  # theirs is an address to bind to, not one to connect to
    }
    both = DEFAULTS.keys() & theirs.keys()
    assert {name for name in both if DEFAULTS[name] != theirs[name]} - on_purpose == set()


def test_dictionaries_as_json(tmp_path):
    """A subclass adds its own to the list, as one of TRL's does."""

    @dataclasses.dataclass
    class Own(GRPOConfig):
        _VALID_DICT_FIELDS: ClassVar = [*GRPOConfig._VALID_DICT_FIELDS, "mine"]
        mine: dict[str, Any] | str | None = None

    found = {name for name, hint in HINTS.items() if "dict[str" in str(hint)} & set(OWN)
    assert "loss_kwargs" in found and found <= set(GRPOConfig._VALID_DICT_FIELDS)
    assert len(GRPOConfig._VALID_DICT_FIELDS) == len(set(GRPOConfig._VALID_DICT_FIELDS))
    text = '{"temperature": 2}'
    args = Own(output_dir=str(tmp_path), use_cpu=True, mine=text, chat_template_kwargs=text)
    assert args.mine == args.chat_template_kwargs == {"temperature": 2}
    trl = pytest.importorskip("trl")
    theirs = set(trl.GRPOConfig._VALID_DICT_FIELDS) - {"transformers_continuous_batching_config"}
    assert theirs <= set(GRPOConfig._VALID_DICT_FIELDS)


def test_a_name_that_is_misspelled_in_python(tmp_path):
    said = r"GRPOConfig.__init__\(\) got an unexpected keyword argument 'epsilon_hgih' \(is it epsi"
    with pytest.raises(TypeError, match=said):
        GRPOConfig(output_dir=str(tmp_path), epsilon_hgih=0.3)
    assert "learning_rate" in inspect.signature(GRPOConfig).parameters

    class Own(GRPOConfig):
        def __init__(self, folder: str) -> None: ...

    with pytest.raises(TypeError, match=r"'foldr' \(is it folder\?\)"):
        Own(foldr="out")
