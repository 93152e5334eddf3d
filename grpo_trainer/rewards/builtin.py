"""Rewards for format, length and math answers. A ``get_...`` function returns a reward."""

from __future__ import annotations

import importlib.util
import math
import re
import threading
from collections.abc import Callable
from typing import Any

from grpo_kernels.tools import install_command

Reward = Callable[..., list[float]]
LogExtra = Callable[[str, list[Any]], None]

_THINK_THEN_ANSWER = re.compile(r"<think>(?!.*<think>).*?</think>.*", re.DOTALL)
_PARSE_SECONDS, _VERIFY_SECONDS = 10, 5
_NO_ANSWER = (0.0, "[incomplete reasoning]", "[incomplete reasoning]")  # the format of _compare


def text_of(completion: str | list[dict[str, Any]]) -> str:
    """Return the text of a completion: itself, or the content of its last message.

    With it, a reward works for both text prompts and message prompts.
    """
    return completion if isinstance(completion, str) else content_of(completion[-1])


def content_of(message: dict[str, Any]) -> str:
    """Return the text of a message, also if its content is in parts, some of them images."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or "" for part in content)


def think_format_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """Return 1 for one ``<think>...</think>`` block followed by the answer, else 0."""

    def whole(completion: Any) -> str:
        thought, text = _parts(completion)
        return f"<think>{thought}</think>{text}" if thought and text else text

    return [float(_THINK_THEN_ANSWER.fullmatch(whole(item)) is not None) for item in completions]


def _parts(completion: str | list[dict[str, Any]]) -> tuple[str | None, str]:
    """Return the separate reasoning, if there is any, and the text of the (last) message."""
    thought = None if isinstance(completion, str) else completion[-1].get("reasoning_content")
    return thought, text_of(completion)


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> Reward:
    """Return a reward that falls from 0 to -1 over the last tokens before a length limit.

    Equation 13 of DAPO, arXiv:2503.14476: 0 up to ``max_completion_len - soft_punish_cache``
    tokens, then linearly down to -1 at ``max_completion_len``, and -1 beyond.

    Raises:
        ValueError: ``soft_punish_cache`` is not in [0, max_completion_len].
    """
    if not 0 <= soft_punish_cache <= max_completion_len:
        raise ValueError(
            "soft_punish_cache: expected a number between 0 and max_completion_len = "
            f"{max_completion_len!r}, got {soft_punish_cache!r}"
        )
    start, length = max_completion_len - soft_punish_cache, soft_punish_cache or 1

    def soft_overlong_punishment_reward(
        completion_ids: list[list[int]], **kwargs: Any
    ) -> list[float]:
        return [max(min(start - len(ids), 0) / length, -1.0) for ids in completion_ids]

    return soft_overlong_punishment_reward


def get_repetition_penalty_reward(ngram_size: int = 3, max_penalty: float = -1.0) -> Reward:
    """Return a reward of ``max_penalty`` times the share of repeated n-grams.

    Appendix C.2 of arXiv:2502.03373, with n-grams of tokens. A completion shorter than an n-gram
    gets 0.

    Raises:
        ValueError: ``ngram_size`` is below 1, or ``max_penalty`` above 0.
    """
    if ngram_size < 1:
        raise ValueError(f"ngram_size: expected an integer >= 1, got {ngram_size!r}")
    if max_penalty > 0:
        raise ValueError(f"max_penalty: expected a number <= 0, got {max_penalty!r}")

    def penalty(ids: list[int]) -> float:
        total = len(ids) - ngram_size + 1
        different = {tuple(ids[start : start + ngram_size]) for start in range(total)}
        return (total - len(different)) / total * max_penalty if total > 0 else 0.0

    def repetition_penalty_reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        return [penalty(ids) for ids in completion_ids]

    return repetition_penalty_reward


def accuracy_reward(
    completions: list[Any], solution: list[str], log_extra: LogExtra | None = None, **kwargs: Any
) -> list[float | None]:
    """Return 1 if the completion's answer is mathematically equal to ``solution``, else 0.

    None (not applicable) if the solution cannot be parsed. The answer must be LaTeX: in
    ``\\boxed{}`` or a formula. The completions table gets the columns ``solution``, ``gold_parsed``
    and ``answer_parsed``.

    Raises:
        ImportError: math-verify is not installed.
    """
    return _accuracies([text_of(completion) for completion in completions], solution, log_extra)


def reasoning_accuracy_reward(
    completions: list[Any],
    solution: list[str],
    reasoning_delimiters: list[str] | None = None,
    log_extra: LogExtra | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """Return :func:`accuracy_reward` of the answer after the reasoning.

    The answer is the text after the last occurrence of the first delimiter that occurs (default:
    ``</think>``), or the ``content`` of a message with ``reasoning_content``. Unfinished reasoning
    gets 0.
    """
    ends = ["</think>"] if reasoning_delimiters is None else reasoning_delimiters

    def answer(completion: Any) -> str | None:  # None: unfinished reasoning
        thought, text = _parts(completion)
        return text if thought else next((text.rpartition(e)[2] for e in ends if e in text), None)

    return _accuracies([answer(completion) for completion in completions], solution, log_extra)


def get_cosine_scaled_reward(
    max_len: int,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
) -> Callable[..., list[float | None]]:
    """Return a reward that falls with length for correct answers, and rises with it for wrong ones.

    Appendix C.1 of arXiv:2502.03373: half a cosine from the value at length 0 to the value at
    ``max_len`` tokens, and constant beyond. A correct completion goes from ``max_value_correct`` to
    ``min_value_correct``, a wrong completion from ``min_value_wrong`` to ``max_value_wrong``, so
    longer thinking is penalized less if the answer is wrong. :func:`accuracy_reward` decides
    whether it is correct.

    Raises:
        ValueError: ``max_len`` is below 1.
        ImportError: math-verify is not installed.
    """
    if max_len < 1:
        raise ValueError(f"max_len: expected an integer >= 1, got {max_len!r}")
    require_math_verify()
    # the values at length 0 and at max_len
    correct, wrong = (max_value_correct, min_value_correct), (min_value_wrong, max_value_wrong)

    def scaled(accuracy: float | None, length: int) -> float | None:
        if accuracy is None:
            return None
        short, long = correct if accuracy else wrong
        return long + 0.5 * (short - long) * (1 + math.cos(math.pi * min(length / max_len, 1.0)))

    def cosine_scaled_reward(
        completions: list[Any], solution: list[str], completion_ids: list[list[int]], **kwargs: Any
    ) -> list[float | None]:
        accuracies = accuracy_reward(completions, solution)
        return [scaled(*pair) for pair in zip(accuracies, map(len, completion_ids), strict=True)]

    return cosine_scaled_reward


def require_math_verify() -> None:
    """Raise ImportError, with the install command, unless math-verify is installed."""
    if importlib.util.find_spec("math_verify") is None:
        raise ImportError(
            "accuracy_reward and related rewards: expected the package math-verify, which is not "
            f"installed; {install_command('math')}"
        )


def _accuracies(
    answers: list[str | None],  # None: no answer
    solution: list[str],
    log_extra: LogExtra | None,
) -> list[float | None]:
    require_math_verify()
    compared = [
        _NO_ANSWER if answer is None else _compare(answer, gold)
        for answer, gold in zip(answers, solution, strict=True)
    ]
    if log_extra is not None:
        log_extra("solution", list(solution))
        log_extra("gold_parsed", [gold for _, gold, _ in compared])
        log_extra("answer_parsed", [answer for _, _, answer in compared])
    return [reward for reward, _, _ in compared]


def _compare(text: str, solution: str) -> tuple[float | None, str, str]:
    """Return the reward, the parsed solution and the parsed answer."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    # math-verify's timeout uses a signal, which only the main thread receives
    limited = threading.current_thread() is threading.main_thread()
    parse_limit = {"parsing_timeout": _PARSE_SECONDS if limited else None}
    gold = parse(solution, **parse_limit)
    if not gold:
        return None, "[unparseable]", "[skipped]"
    extraction = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True),
        boxed_match_priority=0,  # a boxed expression is the answer
        try_extract_without_anchor=False,
    )
    answer = parse(
        text, extraction_config=[extraction], extraction_mode="first_match", **parse_limit
    )
    reward = float(verify(gold, answer, timeout_seconds=_VERIFY_SECONDS if limited else None))
    return reward, str(gold), str(answer) if answer else "[unparseable]"


BUILTIN_REWARDS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        accuracy_reward,
        get_cosine_scaled_reward,
        reasoning_accuracy_reward,
        get_repetition_penalty_reward,
        get_soft_overlong_punishment,
        think_format_reward,
    )
}


def no_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """Return zeros, for a policy that learns only from its teacher."""
    return [0.0] * len(completions)
