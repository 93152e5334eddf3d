"""Vision-language models are trained on the images of their prompts."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers.utils import get_json_schema

from grpo_trainer import GRPOConfig, GRPOTrainer
from grpo_trainer.data import MicroBatch, Sample, encode_prompts, images_of, model_inputs
from grpo_trainer.engines import Completions, RolloutEngine
from grpo_trainer.experience import measure
from grpo_trainer.vllm.requests import requests_of
from tests.support.batches import BatchTrainer
from tests.support.trainer import BackgroundEngine, generating, parameters
from tests.support.vision import (
    BEGIN,
    END,
    FAMILIES,
    IDS,
    IMAGE,
    PLACES,
    STOP,
    VIDEO,
    picture,
    tiny_model,
    tiny_processor,
    user,
)

SETTINGS: dict[str, Any] = dict(
    max_steps=1, per_device_train_batch_size=4, num_generations=2, max_completion_length=3,
    report_to="none", save_strategy="no", bf16=False, logging_steps=1, disable_tqdm=True,
    learning_rate=1e-2, use_cpu=True, write_report=False,
)  # fmt: skip

# messages of text, images and calls, as Qwen writes them
TOOLS = (
    "{% if tools %}<start>t{{ tools[0].function.name }}<end>{% endif %}"
    "{% for m in messages %}<start>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{{ '<begin><image><stop>' if 'image' in part else part.text }}{% endfor %}{% endif %}"
    "{% for call in m.tool_calls or [] %}"
    "<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<end>{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant\n{% endif %}"
)
ASKED = [{"role": "user", "content": "bright?"}]


def dataset(column: str | None = "image", rows: int = 8) -> Dataset:
    """Return questions with an image in ``column``; None: in the messages."""
    images = [picture(30 * index) for index in range(rows)]
    if column is None:
        return Dataset.from_list([{"prompt": user(image, "bright?")} for image in images])
    values = images if column == "image" else [[image] * 2 for image in images]
    return Dataset.from_dict({"prompt": [ASKED] * rows, column: values})


def mixed() -> Dataset:
    """Return rows of text beside rows with images. A dataset gives all parts all keys."""
    prompts = [user(picture(9), "seen?") if row % 2 else user("2 + 2?") for row in range(8)]
    rows = Dataset.from_list([{"prompt": prompt} for prompt in prompts])
    assert rows[0]["prompt"][0]["content"][0]["image"] is None
    return rows


def lengths(completion_ids: Any, **columns: Any) -> list[float]:
    return [float(len(ids) + row % 3) for row, ids in enumerate(completion_ids)]


def make(
    family: str, folder: Path, reward: Any = lengths, kind: type = GRPOTrainer, **changes: Any
) -> Any:
    """Return a trainer of a model of ``family``; ``settings`` are fields of its config."""
    given = {
        "model": tiny_model(family),
        "train_dataset": dataset(),
        "processing_class": tiny_processor(family),
    } | changes
    args = GRPOConfig(output_dir=str(folder), **(SETTINGS | given.pop("settings", {})))
    return kind(reward_funcs=reward, args=args, **given)


def with_template(family: str, template: str) -> Any:
    processor = tiny_processor(family)
    processor.chat_template = template
    return processor


def lora(family: str, modules: Any = "all-linear") -> Any:
    return pytest.importorskip("peft").LoraConfig(target_modules=modules, r=2)


def own_logprobs(
    family: str, batch: MicroBatch, greedy: bool = False, **changes: Any
) -> torch.Tensor:
    """Return (B, L) log-probabilities of the logits of the model that training begins with.

    ``greedy``: of the likeliest tokens that are not of images, in place of the target.
    """
    given = {"attention_mask": batch.attention_mask} | batch.inputs | changes
    with torch.no_grad():
        logits = tiny_model(family)(batch.input_ids, **given).logits
    if greedy:
        logprobs = logits.log_softmax(-1)
        logprobs[..., [IDS[IMAGE], IDS[VIDEO]]] = -torch.inf
        return logprobs.amax(-1)
    return logits.log_softmax(-1).gather(-1, batch.target.clamp(min=0)[..., None]).squeeze(-1)


@pytest.mark.parametrize(("family", "adapts"), [("idefics3", False), ("qwen3_vl", True)])
def test_training(family: str, adapts: bool, tmp_path: Path) -> None:
    """All that a run has more than one pass for, at once: every pass sees the same images.

    Of a stream of rows with two images each; and with LoRA, of rows with and without images. The
    inputs of other families are compared where a tool returns a picture.
    """
    rows = mixed() if adapts else dataset("images")
    special = {"peft_config": lora(family), "processing_class": with_template(family, TOOLS)}
    seen: list[tuple[list[str], set[str]]] = []

    def reward(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        shown = [[part["type"] for part in prompt[-1]["content"]] for prompt in prompts]
        seen.extend((types, set(columns)) for types in shown)
        return [float(row % 3) for row, _ in enumerate(prompts)]

    images = [name for name in rows.column_names if name != "prompt"]
    rows = rows.add_column("other", list(range(len(rows))))
    rows = rows if adapts else rows.to_iterable_dataset()
    trainer = make(
        family, tmp_path, reward, BatchTrainer, train_dataset=rows, eval_dataset=rows,
        settings={
            "beta": 0.1, "num_iterations": 2, "max_steps": 2, "steps_per_generation": 2,
            "gradient_accumulation_steps": 2, "gradient_checkpointing": True,
            "per_device_eval_batch_size": 4, "remove_unused_columns": True,
        },
        **(special if adapts else {}),
    )  # fmt: skip
    start = copy.deepcopy(trainer.model)
    trainer.train()
    before, after = dict(start.named_parameters()), dict(trainer.model.named_parameters())
    moved = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert any("vision" in name or "visual" in name for name in moved)
    assert any("language_model" in name or "text_model" in name for name in moved)
    assert not adapts or all("lora" in name for name in moved)
    trainer.evaluate()
    assert len(seen) > 8 + 8
    assert all(columns >= set(images) and "other" not in columns for _, columns in seen)
    kinds = {("image", "text"), ("text",)} if adapts else {("image", "image", "text")}
    assert {tuple(types) for types, _ in seen} == kinds

    batch = next(batch for batch in trainer.batches if batch.inputs)
    own, kept = own_logprobs(family, batch), batch.target >= 0
    for found in (batch.old_logprobs, batch.ref_logprobs):
        torch.testing.assert_close(found[kept], own[kept], rtol=1e-4, atol=1e-5)
    grey = {"pixel_values": torch.full_like(batch.inputs["pixel_values"], 0.7)}
    assert (own_logprobs(family, batch, **grey) - own)[kept].abs().max() > 1e-3  # it decides


def test_by_name(tmp_path: Path) -> None:
    """Model and processor come from one folder, a saved run and an adapter can be loaded as one."""
    start, out, adapter = (tmp_path / name for name in ("start", "out", "adapter"))
    tiny_model("gemma3").save_pretrained(start)
    tiny_processor("gemma3").save_pretrained(start)
    trainer = make("gemma3", out, model=str(start), processing_class=None)
    assert type(trainer.processing_class) is type(tiny_processor("gemma3"))
    with torch.no_grad():
        next(trainer.model.parameters()).add_(1)
    trainer.save_model()
    loaded = make("gemma3", tmp_path / "b", model=str(out), processing_class=None)
    assert torch.equal(parameters(loaded.model), parameters(trainer.model))
    peft = pytest.importorskip("peft")
    base = type(tiny_model("gemma3")).from_pretrained(start)
    peft.get_peft_model(base, lora("gemma3", ["q_proj"])).save_pretrained(adapter)
    model = make("gemma3", tmp_path / "c", model=str(adapter)).model
    assert isinstance(model, peft.PeftModel)
    assert type(model.get_base_model()).__name__ == type(base).__name__


def test_a_tokenizer_is_enough_for_text(tmp_path: Path) -> None:
    rows = Dataset.from_dict({"prompt": ["a", "b", "c", "d"]})
    tokenizer = tiny_processor("llava").tokenizer
    make("llava", tmp_path, train_dataset=rows, processing_class=tokenizer).train()


class OneCall(RolloutEngine):
    """Calls the tool once, and then says something."""

    def __init__(self, tokenizer: Any) -> None:
        self._encode = partial(tokenizer.encode, add_special_tokens=False)
        self._decode = tokenizer.decode
        self._call = '<tool_call>{"name": "look", "arguments": {"at": "x"}}</tool_call>' + END

    def generate(self, prompt_ids: Any, sampling: Any, images: Any = None) -> Completions:
        asked = ["</tool_call>" in self._decode(ids) for ids in prompt_ids]
        return Completions([self._encode("ok" + END if done else self._call) for done in asked])


def room(answers: Any, shown: Any = None) -> type:
    """Return an environment that begins with what is ``shown``, and has a tool with ``answers``."""

    class Room:
        def reset(self, **row: Any) -> Any:
            return shown

        def look(self, at: str) -> Any:
            """Look.

            Args:
                at: what.
            """
            return next(answers)

    return Room


def listening(said: list[Any]) -> Any:
    """Return a reward that keeps prompts and completions."""

    def reward(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        said.extend(zip(prompts, completions, strict=True))
        return [float(row % 3) for row, _ in enumerate(prompts)]

    return reward


def test_an_environment_that_looks_at_the_rows_images(tmp_path: Path) -> None:
    """It shows them and one of its own, without a prompt; what its tools answer has none."""
    kind = room(iter(["fine", f"an {IMAGE} tag"] * 9), user(picture(200), "hi")[0]["content"])
    said: list[Any] = []
    processor = with_template("qwen3_vl", TOOLS)
    trainer = make(
        "qwen3_vl", tmp_path, listening(said), environment_factory=kind, processing_class=processor,
        rollout_engine=OneCall(processor.tokenizer), settings={"max_completion_length": 180},
        train_dataset=dataset().remove_columns("prompt"),
    )  # fmt: skip
    trainer.train()
    types = [part["type"] for part in said[0][0][0]["content"]]
    assert sorted(set(types)) == ["image", "text"] and types.count("image") == 2
    texts = {completion[1]["content"] for _, completion in said}
    assert texts == {
        "fine",
        str({"error": "The answer contains a token that represents an image."}),
    }
    assert trainer.state.log_history[0]["tools/failure_frequency"] == 0.5


class LooksOnce(RolloutEngine):
    """Calls the tool once; what follows the model says itself."""

    def __init__(self, engine: Any, tokenizer: Any) -> None:
        self._engine = engine
        self._call = OneCall(tokenizer)
        self.images: list[Any] = []  # of the last turns

    def generate(self, prompt_ids: Any, sampling: Any, images: Any = None) -> Completions:
        called = self._call.generate(prompt_ids, sampling)
        if called.token_ids[0] != self._call.generate([[]], sampling).token_ids[0]:
            self.images = images
            return self._engine.generate(prompt_ids, sampling, images)
        return called


def show(at: int) -> Any:
    """Return what the tool ``look`` answers the ``at``th time."""
    part = {"type": "image", "image": picture((20 * at, 250 - 20 * at, 90))}
    return part["image"] if at % 3 else [part, {"type": "text", "text": "so"}, part]


# with an image in the prompt, too, or without
@pytest.mark.parametrize(
    ("family", "shown"),
    [
        *((family, True) for family in FAMILIES),
        *((family, False) for family in ("gemma3", "idefics3", "qwen3_vl")),
    ],
)
def test_a_picture_that_a_tool_returns(family: str, shown: bool, tmp_path: Path) -> None:
    """It is what the model would see of the whole conversation, in generation and in training.

    Of an environment, where there is one in the prompt, too.
    """
    seen: list[Any] = []
    kind = room(map(show, range(99)))
    acting = {"environment_factory": kind} if shown else {"tools": [kind().look]}
    place = PLACES.get(family, f"{BEGIN}{IMAGE}{STOP}")
    processor = with_template(family, TOOLS.replace(f"{BEGIN}{IMAGE}{STOP}", place))
    model = tiny_model(family)
    engine = LooksOnce(generating(model, processor.tokenizer), processor.tokenizer)
    rows = dataset() if shown else dataset().remove_columns("image")
    trainer = make(
        family, tmp_path, listening(seen), BatchTrainer, processing_class=processor,
        model=model, rollout_engine=engine, train_dataset=rows,
        settings={"max_completion_length": 170, "num_iterations": 2, "top_k": 1}, **acting,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.log_history[0]["tools/failure_frequency"] == 0
    [batch, *_] = trainer.batches
    talks = [prompt + completion[:-1] for prompt, completion in seen]
    pictures = [images_of(talk) for talk in talks]
    assert [len(each) for each in pictures] == [2 - bool(at % 3) + shown for at in range(4)]
    schemas = [[get_json_schema(kind().look)]] * len(talks)
    whole = encode_prompts(talks, processor, tools=schemas)
    requests = requests_of([each.ids for each in whole], engine.images)
    for row, (talk, request) in enumerate(zip(whole, requests, strict=True)):
        assert batch.input_ids[row, : len(talk.ids)].tolist() == talk.ids
        assert talk.images is not None and request.short_ids == talk.images.short_ids
        assert request.images == talk.images.images
    lengths, width = [len(talk.ids) for talk in whole], batch.input_ids.shape[1]
    wanted = model_inputs([talk.images for talk in whole], lengths, width, torch.device("cpu"))
    assert wanted.keys() == batch.inputs.keys()
    own, kept = own_logprobs(family, batch), batch.target >= 0
    torch.testing.assert_close(batch.old_logprobs[kept], own[kept], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(own_logprobs(family, batch, **wanted)[kept], own[kept])
    later = kept & (torch.arange(width) >= torch.tensor(lengths)[:, None] - 1)
    best = own_logprobs(family, batch, greedy=True)
    torch.testing.assert_close(own[later], best[later])  # it is what was drawn
    differences = (
        own_logprobs(family, batch, pixel_values=-batch.inputs["pixel_values"]) - own
    ).abs()
    assert differences[later].max() > 1e-3
    if not shown:  # the call came before
        assert differences[kept & ~later].max() < 1e-6


def test_a_picture_for_an_engine_that_takes_none(tmp_path: Path) -> None:
    class Blind(OneCall):
        def generate(self, prompt_ids: Any, sampling: Any) -> Completions:  # type: ignore[override]
            return super().generate(prompt_ids, sampling)

    processor = with_template("qwen3_vl", TOOLS)
    trainer = make(
        "qwen3_vl", tmp_path, tools=[room(map(picture, range(9)))().look],
        processing_class=processor, rollout_engine=Blind(processor.tokenizer),
        settings={"max_completion_length": 180},
        train_dataset=dataset().remove_columns("image"),
    )  # fmt: skip
    with pytest.raises(
        ValueError, match="rollout_engine: expected an engine whose generate accepts image"
    ):
        trainer.train()


def test_tokens_of_images_are_never_drawn(tmp_path: Path) -> None:
    trainer, never = make("qwen2_5_vl", tmp_path), [IDS[IMAGE], IDS[VIDEO]]
    with torch.no_grad():  # it would draw nothing else
        trainer.model.lm_head.weight[never] *= 1000
    drawn = trainer.rollouts.generate([[3, 4]] * 8).token_ids
    assert not set(never) & {token for ids in drawn for token in ids}


@pytest.mark.parametrize("shown", [True, False])
def test_completions_and_report_show_the_images(shown: bool, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    settings = {"log_completions": True, "num_completions_to_print": 2, "log_multimodal": shown}
    rows, settings = dataset("images"), settings | {"write_report": True}
    make("llava", tmp_path, train_dataset=rows, settings=settings).train()
    table = Dataset.from_parquet(str(tmp_path / "completions" / "completions_00001.parquet"))
    assert table["prompt"][0] == "user: [image]\n[image]\nbright?"
    page = (tmp_path / "report.html").read_text()
    assert ('<img src="data:image/png;base64,' in page) == shown
    assert ("images" in table.column_names) == shown
    if shown:
        [first, second] = table["images"][0]
        assert first == second and first.startswith("data:image/png;base64,") and first in page


def test_several_processes_see_images_together() -> None:
    """Two processes, of which the other one has a prompt with images."""

    def accelerator(others: float) -> Any:
        def gather(table: torch.Tensor) -> torch.Tensor:
            return torch.cat([table, table.new_tensor([[1.0, 1.0, 0.0, others]])])

        return SimpleNamespace(num_processes=2, device=torch.device("cpu"), gather=gather)

    rollouts = [Sample("1", [3], "2", [4])] * 2
    assert measure(rollouts, accelerator(0.0)).shape == (3, 3)
    with pytest.raises(ValueError, match="images: .* in all prompts .* got them in 1 of 3"):
        measure(rollouts, accelerator(1.0))


def text_model() -> Any:
    from tests.parity.canned import tiny_model

    return tiny_model()


def questions(prompt: Any, **columns: Any) -> Dataset:
    return Dataset.from_list([{"prompt": prompt} | columns] * 4)


def asking(content: Any, **columns: Any) -> Dataset:
    """Return rows of one question with ``content``."""
    return questions([{"role": "user", "content": content}], **columns)


LLAVA = tiny_processor("llava")
IMAGE_FREE = "train_dataset: expected no images without a processor"
OTHER = "train_dataset: expected prompts of text and images, got .* of type"
# what is wrong with a run, and what names it; the family is llava
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"family": "qwen3_vl", "processing_class": LLAVA}, "a LlavaProcessor, and the policy fails"),
    ({"model": partial(tiny_model, "llava", image_token_index=7)}, "with the image token 7"),
    ({"model": text_model}, "expected the processor of Qwen2ForCausalLM"),
    ({"processing_class": LLAVA.tokenizer}, IMAGE_FREE),
    ({"processing_class": LLAVA.tokenizer, "train_dataset": dataset(None)}, IMAGE_FREE),
    ({"processing_class": with_template("llava", "?")}, "writes <image> for each image, 1 in all"),
    ({"train_dataset": asking([{"type": "audio", "audio": "a.wav"}])}, f"{OTHER} 'audio'"),
    ({"train_dataset": asking([{"image": picture(0)}, {"text": "?"}])}, f"{OTHER} None"),
    ({"train_dataset": asking(["?"])}, r"train_dataset: expected parts of .*, got '\?'"),
    (
        {"train_dataset": asking("<image>\n?", image=picture(0))},
        "prompt: expected no <image> in a text .for an image, add a message part",
    ),
    ({"train_dataset": questions("<image>?")}, "prompt: expected no <image> in a text"),
    ({"rollout_func": lambda prompts, trainer: {}}, "rollout_func: expected text prompts"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_what_is_wrong_is_said_before_anything_is_generated(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = {name: value() for name, value in changes.items() if name == "model"}
    with pytest.raises(ValueError, match=message):
        make(**{"family": "llava", "folder": tmp_path} | changes | model).train()


def test_text_that_is_completed_ahead_keeps_its_inputs_in_a_checkpoint(tmp_path: Path) -> None:
    """Gemma wants to know what kind each token is of, without images, too."""
    rows = Dataset.from_list([{"prompt": ASKED}] * 8)
    inputs: list[list[list[str]]] = []
    for resume in (None, str(tmp_path / "checkpoint-1")):
        inputs.append([])
        processor, policy = tiny_processor("gemma3"), tiny_model("gemma3")
        engine = BackgroundEngine(processor.tokenizer, copy.deepcopy(policy).eval(), group=2)
        engine.update_weights = lambda weights: None  # their names are those of a checkpoint
        settings = {
            "max_steps": 2, "save_strategy": "steps", "save_steps": 1, "max_completion_length": 4,
        }  # fmt: skip
        args = GRPOConfig(
            output_dir=str(tmp_path), generation_batches_ahead=1, **SETTINGS | settings
        )
        trainer = GRPOTrainer(
            policy, lambda completion_ids, **_: [float(ids[0]) for ids in completion_ids], args,
            rows, processing_class=processor, rollout_engine=engine,
            columns=[lambda batch, policy: inputs[-1].append(sorted(batch.inputs))],
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=resume)
    assert inputs == [[["token_type_ids"]] * 2, [["token_type_ids"]]]
