"""Distance of an engine's log-probabilities from the trainer's, on text it sampled in bf16.

The trainer also runs in bf16, with our head or with eager PyTorch, which rounds logits to bf16. In
a third case it runs entirely in fp32, so only the engine rounds.
"""

from __future__ import annotations

import importlib.util
import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import text
from benchmarks.child import VLLM, ask
from benchmarks.conftest import Session, check_row
from benchmarks.measure import attempt
from benchmarks.providers.eager import logits_head
from benchmarks.real import lacking_model
from benchmarks.real_text import PROMPTS, converted_model
from benchmarks.results import Row
from benchmarks.shapes import Shape
from benchmarks.test_accuracy import BANDS, within
from grpo_kernels import linear_logprobs

_LONGEST = 1800.0  # seconds of an engine
_ENVIRONMENT = VLLM | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1"}
# completions, as token ids, with the log-probability of each token
Sampled = list[tuple[list[int], list[int], list[float]]]


def _case(model: str, length: int) -> Shape:
    return Shape(model, {"model": model, "tokens": 0, "dtype": "bf16", "length": length})


CASES = {"tiny": [_case("tiny", 4)], "cpu": [_case("smollm2-135m", 48)]}


def notes(case: Shape) -> dict[str, str]:
    heads = {name: note for name, (note, _, _) in _HEADS.items()}
    return {f"{engine}, {name}": note for engine in _ENGINES for name, note in heads.items()}


def about(case: Shape, device: str) -> str:
    return "|log p of the engine - log p of the trainer| of sampled tokens, temperature 1"


def measure(case: Shape, rows: Sequence[Row], session: Session) -> None:
    with tempfile.TemporaryDirectory() as place:
        for engine in _ENGINES:
            of_engine = [row for row in rows if row.provider.startswith(f"{engine}, ")]
            for row in of_engine:
                absent = engine == "vllm" and importlib.util.find_spec("vllm") is None
                row.leave_out("absent", "vLLM is not installed here" if absent else None)
                row.leave_out("absent", None if _is_tiny(case) else lacking_model())
            if not all(row.runs for row in of_engine):
                continue
            with attempt(*of_engine):
                folder = _tiny(Path(place)) if _is_tiny(case) else converted_model()
                own = _ENVIRONMENT if engine == "vllm" else {}
                sampled = ask(_sample, engine, folder, case, timeout=_LONGEST, **own)
                heads = [row.provider.split(", ")[1] for row in of_engine]
                scored = ask(_score, folder, sampled, heads, timeout=_LONGEST)
                for row, logprobs in zip(of_engine, scored, strict=True):
                    _fill(row, sampled, logprobs)


def _fill(row: Row, sampled: Sampled, own: list[list[float]]) -> None:
    theirs = torch.tensor([x for *_, logprobs in sampled for x in logprobs])
    apart = (theirs - torch.tensor([x for logprobs in own for x in logprobs])).abs().double()
    mean, high, most = apart.mean().item(), apart.quantile(0.99).item(), apart.max().item()
    row.info |= {"tokens": len(apart), "mean": mean, "p99": high, "largest": most}
    row.info["by_probability"] = {
        band: [apart[chosen].mean().item(), apart[chosen].quantile(0.99).item()]
        for band in BANDS
        if (chosen := within(band, theirs.double())).any()
    }
    row.cells = {
        "tokens": str(len(apart)),
        "mean": text.error(mean),
        "99th percentile": text.error(high),
    }
    row.cells |= {
        f"{band}: mean (p99)": f"{text.error(found[0])} ({text.error(found[1])})"
        for band, found in row.info["by_probability"].items()
    }
    row.leave_out("wrong", None if math.isfinite(most) else "a log-probability is not finite")


def _is_tiny(case: Shape) -> bool:
    """Return whether the model is random."""
    return case.name == "tiny"


def _tiny(place: Path) -> Path:
    from grpo_trainer.demo.policy import write_policy

    write_policy(place / "model", seed=0, heads=2)
    return place / "model"


def _prompts(folder: Path, case: Shape) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    if _is_tiny(case):
        return [tokenizer(f"{n}=")["input_ids"] for n in (12, 345)]
    conversations = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    options = {"add_generation_prompt": True, "return_dict": False}
    return [tokenizer.apply_chat_template(each, **options) for each in conversations]


def _sample(engine: str, folder: Path, case: Shape) -> Sampled:
    torch.manual_seed(0)
    prompts = _prompts(folder, case)
    return _ENGINES[engine](
        folder, case, [ids for ids in prompts for _ in range(2 if _is_tiny(case) else 4)]
    )


def _by_transformers(folder: Path, case: Shape, prompts: list[list[int]]) -> Sampled:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    found = []
    for ids in prompts:
        output = model.generate(
            input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=case["length"],
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        completion = output.sequences[0, len(ids) :].tolist()
        logprobs = torch.cat(output.logits).float().log_softmax(-1)
        taken = logprobs.gather(1, torch.tensor(completion)[:, None])[:, 0].tolist()
        found.append((ids, completion, taken))
    return found


def _by_vllm(folder: Path, case: Shape, prompts: list[list[int]]) -> Sampled:
    import vllm

    engine = vllm.LLM(
        str(folder), dtype="bfloat16", max_model_len=64 if _is_tiny(case) else 256, seed=0,
        generation_config="vllm", enforce_eager=True, block_size=32,
        kv_cache_memory_bytes=256 << 20,
    )  # fmt: skip
    params = vllm.SamplingParams(
        temperature=1.0, max_tokens=case["length"], logprobs=0, detokenize=False
    )
    outputs = engine.generate(
        [{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False
    )
    found = []
    for ids, output in zip(prompts, outputs, strict=True):
        completion = list(output.outputs[0].token_ids)
        pairs = zip(output.outputs[0].logprobs, completion, strict=True)
        found.append((ids, completion, [at[token].logprob for at, token in pairs]))
    return found


_ENGINES: dict[str, Callable[..., Sampled]] = {
    "transformers": _by_transformers,
    "vllm": _by_vllm,
}


def _ours(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return linear_logprobs(hidden, weight, target).logprobs


def _eager(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return logits_head(hidden, weight, target, softcap=None, with_entropy=False)[0]


# a note, the trainer's head, and the dtype of all its layers
_HEADS: dict[str, tuple[str, Callable[..., Tensor], torch.dtype]] = {
    "ours": ("the trainer's head is ours", _ours, torch.bfloat16),
    "eager": ("the trainer's logits are rounded to bf16", _eager, torch.bfloat16),
    "fp32": ("the whole trainer is in fp32", _ours, torch.float32),
}


@torch.no_grad()
def _score(folder: Path, sampled: Sampled, heads: Sequence[str]) -> list[list[list[float]]]:
    """Return, for each head, the trainer's log-probabilities of the sampled tokens."""
    from transformers import AutoModelForCausalLM

    found: list[list[list[float]]] = []
    for name in heads:
        _, head, dtype = _HEADS[name]
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        scores = []
        for prompt, completion, _ in sampled:
            ids = torch.tensor([prompt + completion])
            hidden = model.model(input_ids=ids).last_hidden_state[:, len(prompt) - 1 : -1]
            logprobs = head(hidden, model.lm_head.weight, ids[:, len(prompt) :])
            scores.append(logprobs[0].tolist())
        found.append(scores)
    return found


test_mismatch = check_row
