"""A prompt that is completed several times goes through the model once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig

from grpo_trainer.engines import transformers as engine_module
from grpo_trainer.engines.base import Sampling
from grpo_trainer.engines.transformers import _shared_cache
from tests.support.tiny_models import FAMILIES, tiny_model
from tests.support.trainer import adapted, generating

# left-padded; the first twice, not next to one another
IDS = torch.tensor([[5, 8, 3, 9, 7, 6], [0, 0, 4, 9, 3, 8], [5, 8, 3, 9, 7, 6], [0, 7, 7, 5, 4, 6]])
MASK = (IDS != 0).long()
# the layers of two carry a state along, and transformers returns no cache of the third
NOT_SHARED = {"recurrent_gemma", "falcon_h1", "mpt"}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_a_prompt_each(family):
    model = tiny_model(family)
    config = GenerationConfig(
        max_new_tokens=5, pad_token_id=0, use_cache=True, do_sample=False,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    cache = _shared_cache(model, IDS, MASK, config)
    assert (not cache) == (family in NOT_SHARED)
    shared, plain = (
        model.generate(input_ids=IDS, attention_mask=MASK, generation_config=config, **more)
        for more in (cache, {})
    )
    assert torch.equal(shared.sequences, plain.sequences)
    torch.testing.assert_close(torch.stack(shared.logits), torch.stack(plain.logits))


@pytest.fixture
def counted(monkeypatch):
    """Generate by an engine; return the completions and how many tokens each forward had."""

    def generate(model, tokenizer, prompts, **changes):
        sizes = []
        hook = model.get_input_embeddings().register_forward_pre_hook(
            lambda _, inputs: sizes.append(inputs[0].numel())
        )
        engine = generating(model, tokenizer)
        torch.manual_seed(0)
        sampling = Sampling(eos_token_ids=frozenset([1]), max_tokens=2, **changes)
        completions = engine.generate(prompts, sampling)
        hook.remove()
        return completions, sizes

    return generate


@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("mask_size", [0, 8])
def test_a_group_needs_its_prompt_once(policy, tokenizer, counted, monkeypatch, adapter, mask_size):
    model = adapted(policy, r=2) if adapter else policy
    prompts = [[3, 4, 5, 6]] * 4 + [[7, 8]] * 4
    more = {"sampling_mask_size": mask_size, "top_k": 5} if mask_size else {}
    shared, sizes = counted(model, tokenizer, prompts, **more)
    assert sizes[:2] == [2 * 3, 8]
    monkeypatch.setattr(engine_module, "_shared_cache", lambda *_: {})
    plain, sizes = counted(model, tokenizer, prompts, **more)
    assert sizes[0] == 8 * 4 and shared == plain


@pytest.mark.parametrize("prompts", [[[3, 4], [3, 5]], [[3], [3]], [[3, 4], [3, 4], [5]]])
def test_nothing_to_share(policy, tokenizer, counted, prompts):
    longest = max(map(len, prompts))
    assert counted(policy, tokenizer, prompts)[1][0] == len(prompts) * longest


@pytest.mark.parametrize(
    "settings",
    [
        {"use_cache": False}, {"num_beams": 2}, {"cache_implementation": "static"},
        {"prompt_lookup_num_tokens": 2}, {"prefill_chunk_size": 2},
    ],
)  # fmt: skip
def test_other_ways_to_generate_keep_their_own_cache(policy, settings):
    config = GenerationConfig(**{"use_cache": True, "pad_token_id": 0} | settings)
    assert _shared_cache(policy, IDS, MASK, config) == {}


def test_what_makes_no_cache_is_not_asked(policy, monkeypatch):
    monkeypatch.setattr(policy, "_supports_default_dynamic_cache", lambda: False)
    monkeypatch.setattr(policy, "generate", SimpleNamespace())  # which cannot be called
    config = GenerationConfig(use_cache=True, pad_token_id=0)
    assert _shared_cache(policy, IDS, MASK, config) == {}
