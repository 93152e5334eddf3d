"""Speculative decoding: a drafter proposes tokens, and vLLM accepts those the policy would sample.

The accepted tokens have the policy's distribution (Leviathan et al. 2023, arXiv:2211.17192), so
only the speed depends on the drafter.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from grpo_trainer.engines import EngineContext, Sampling, vllm_params
from grpo_trainer.monitor import log_value

logger = logging.getLogger(__name__)

SETTING = "vllm_engine_kwargs['speculative_config']"
_METRIC = "vllm:spec_decode_num_"
# drafts come from the text so far, or from earlier completions
_WITHOUT_WEIGHTS = ("ngram", "ngram_gpu", "suffix")


@dataclass(frozen=True)
class Counts:
    """vLLM's counts since it was started."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0

    def since(self, before: Counts) -> Counts:
        """Return the counts after ``before``, or all counts if vLLM was restarted since."""
        if self.drafts < before.drafts:
            return self
        differences = {
            each.name: getattr(self, each.name) - getattr(before, each.name)
            for each in fields(self)
        }
        return Counts(**differences)


class Speculation:
    """Logs how many drafted tokens vLLM accepts, for each generation.

    Args:
        counts: returns vLLM's counts; None: there are none, and nothing is logged.
    """

    def __init__(self, counts: Callable[[], Counts] | None) -> None:
        self._counts = counts
        # from an earlier engine here, or another run with the same server
        self._before = Counts() if counts is None else counts()

    def log(self) -> None:
        """Log the drafts since the last call. All processes call it."""
        if self._counts is None:
            return
        now = self._counts()
        new = now.since(self._before)
        self._before = now
        log_value("sampling/draft_acceptance_rate", new.accepted_tokens, count=new.draft_tokens)
        log_value("sampling/draft_accepted_length", new.accepted_tokens, count=new.drafts)


def counts_of_engine(llm: Any) -> Counts:
    """Return the counts of ``llm``, a ``vllm.LLM`` with ``disable_log_stats=False``."""
    totals = dict.fromkeys((each.name for each in fields(Counts)), 0)
    for metric in llm.get_metrics():
        name = metric.name.removeprefix(_METRIC)
        if name in totals:
            totals[name] += metric.value
    return Counts(**totals)


def counts_of_server(text: str) -> Counts:
    """Return a server's counts from the text of its path ``/metrics``."""
    totals = {}
    for each in fields(Counts):
        values = re.findall(rf"^{_METRIC}{each.name}_total\b.* (\S+)$", text, re.MULTILINE)
        totals[each.name] = int(sum(map(float, values)))  # over the server's engines
    return Counts(**totals)


def check_speculation(context: EngineContext, config: Mapping[str, Any], setting: str) -> None:
    """Check the configuration of an engine in this process or a server; warn of a stale drafter.

    Args:
        config: vLLM's ``speculative_config``.
        setting: the name of its setting, for errors.

    Raises:
        ValueError: completions would not follow the policy's distribution, or vLLM does not
            support the combination.
    """
    if config.get("rejection_sample_method") == "synthetic":
        raise ValueError(
            f"{setting}: expected the rejection_sample_method 'standard' or 'block', got "
            "'synthetic', which accepts tokens that the policy would not sample"
        )
    sampling = Sampling.from_config(
        context.args, context.tokenizer, context.policy(), context.vocab_size
    )
    params = vllm_params(sampling)
    if params["min_p"]:
        raise ValueError(
            f"min_p: expected None or 0, since vLLM does not support it with {setting}, got "
            f"{params['min_p']!r}"
        )
    if sampling.suppressed:
        raise ValueError(
            f"{setting}: expected none for a policy with token ids that must not be sampled (of "
            "images, or beyond a teacher's vocabulary), since vLLM does not support logit_bias "
            f"with it, got {config!r}"
        )
    if params.get("logit_bias"):
        raise ValueError(
            f"generation_kwargs['logit_bias']: expected none, since vLLM does not support it with "
            f"{setting}"
        )
    if drafter_has_weights(config):
        logger.warning(
            "%s: the weights of the drafter (%s, %s) do not change while the policy is trained, "
            "so fewer of its tokens are accepted over time; see sampling/draft_acceptance_rate. "
            "The methods ngram and suffix have no weights",
            setting,
            config.get("method") or "draft_model",
            config.get("model") or "of the policy's checkpoint",
        )


def drafter_has_weights(config: Mapping[str, Any] | None) -> bool:
    """Return whether the drafter of a ``speculative_config`` is a model; None means no drafter."""
    return config is not None and config.get("method") not in _WITHOUT_WEIGHTS


def with_speculation(
    context: EngineContext, engine_options: Mapping[str, Any], *, loads_weights: bool
) -> dict[str, Any]:
    """Check ``speculative_config`` in ``vllm_engine_kwargs``, and return them with its
    requirements.

    Args:
        loads_weights: whether vLLM loads the policy's weights itself. If they come from the policy,
            vLLM would give a drafter random weights, too.

    Raises:
        ValueError: see :func:`check_speculation`; or the drafter's weights cannot be found.
    """
    config = engine_options.get("speculative_config")
    if config is None:
        return dict(engine_options)
    if not isinstance(config, Mapping):
        raise ValueError(f"{SETTING}: expected a dictionary, got {config!r}")
    check_speculation(context, config, SETTING)
    if drafter_has_weights(config) and not loads_weights:
        if config.get("method") in (None, "draft_model"):
            raise ValueError(
                f"{SETTING}: expected another method than 'draft_model' if all weights of vLLM "
                "come from the policy, since vLLM then gives this drafter random weights; got "
                f"{config.get('method')!r}. The method 'suffix' has no weights; a server "
                "(vllm_mode='server') loads the drafter's weights"
            )
        if not config.get("model"):
            raise ValueError(
                f"{SETTING}: expected a 'model', the folder or hub id with the drafter's weights "
                "(for the method 'mtp' the policy's), got none"
            )
        config = {"draft_load_config": {"load_format": "auto"}} | dict(config)
    return {"disable_log_stats": False, **engine_options, "speculative_config": dict(config)}


def speculation_of_engine(llm: Any, device: torch.device) -> Speculation:
    """Return the Speculation that logs the drafts of ``llm``, a ``vllm.LLM``.

    Raises:
        ValueError: its sampler is wrong on this device.
    """
    engine = llm.llm_engine
    if engine.vllm_config.speculative_config is None:
        return Speculation(None)
    _check_sampler(device)
    return Speculation((lambda: counts_of_engine(llm)) if engine.log_stats else None)


def check_server_speculation(context: EngineContext, server: Mapping[str, Any]) -> None:
    """Check the drafter in a server's configuration, ``server``.

    Raises:
        ValueError: see :func:`check_speculation`; or the server runs on a CPU.
    """
    setting = "the server's --speculative-config"
    check_speculation(context, server["speculative_config"], setting)
    if server["device_config"]["device"] == "cpu":
        raise _wrong_sampler(setting, "cpu")


def _check_sampler(device: torch.device) -> None:
    """Raise ValueError if vLLM samples at another temperature than requested.

    The CPU build of vLLM 0.32 does: its kernel writes the temperatures of drafted tokens to a copy,
    and the tensor stays uninitialized.
    """
    from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

    temperatures = torch.tensor([0.5, 2.0], device=device)
    ends = torch.tensor([1, 3], dtype=torch.int32, device=device)
    expected = [0.5, 2.0, 2.0]
    if expand_batch_to_tokens(temperatures, ends, len(expected)).tolist() != expected:
        raise _wrong_sampler(SETTING, device.type)


def _wrong_sampler(setting: str, device: str) -> ValueError:
    return ValueError(
        f"{setting}: expected none on this device ({device}), where vLLM then samples at wrong "
        "temperatures"
    )
