"""Vision-language models are trained on the images of their prompts."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from datasets import Image as ImageColumn
from torch import Tensor

from grpo_kernels.hf import add_fused_head, check_fused_head
from grpo_trainer import GRPOConfig, GRPOTrainer
from grpo_trainer.data import MicroBatch, Rollout, collate, encode_prompts, with_images
from grpo_trainer.experience import Collector
from grpo_trainer.model import target_logprobs
from grpo_trainer.rollout import Completions, RolloutEngine
from tests.support.vision import (
    END,
    FAMILIES,
    IDS,
    IMAGE,
    VIDEO,
    picture,
    tiny_model,
    tiny_processor,
    user,
)

SETTINGS: dict[str, Any] = dict(
    max_steps=2, per_device_train_batch_size=4, num_generations=2, max_completion_length=3,
    report_to="none", save_strategy="no", bf16=False, logging_steps=1, disable_tqdm=True,
    learning_rate=1e-2, use_cpu=True,
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


def dataset(column: str | None = "image", rows: int = 8) -> Dataset:
    """Return questions with an image in ``column``; None: in the messages."""
    images = [picture(30 * index) for index in range(rows)]
    asked = [{"role": "user", "content": "bright?"}]
    if column is None:
        return Dataset.from_list([{"prompt": user(image, "bright?")} for image in images])
    values = images if column == "image" else [[image] * 2 for image in images]
    return Dataset.from_dict({"prompt": [asked] * rows, column: values})


def lengths(completions: Any, **columns: Any) -> list[float]:
    return [float(len(completion[0]["content"])) for completion in completions]


def make(family: str, folder: Path, reward: Any = lengths, **changes: Any) -> GRPOTrainer:
    rows = changes.pop("train_dataset", None) or dataset()
    return GRPOTrainer(
        changes.pop("model", None) or tiny_model(family),
        reward,
        GRPOConfig(output_dir=str(folder), **(SETTINGS | changes.pop("settings", {}))),
        rows,
        processing_class=changes.pop("processing_class", None) or tiny_processor(family),
        **changes,
    )


def batch_of(family: str) -> MicroBatch:
    prompts = [user(picture(200), "?"), user("hi"), user(picture(9), " or ", picture(80))]
    encoded = encode_prompts(prompts, tiny_processor(family))
    rollouts = [
        Rollout(prompt, made.ids, "", [20 + row, 30, 2], images=made.images)
        for row, (prompt, made) in enumerate(zip(prompts, encoded, strict=True))
    ]
    one = torch.tensor(3.0)
    return collate(rollouts, torch.tensor([1.0, -1.0, 0.5]), one, one, 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_fused_head_scores_what_the_model_does(family: str) -> None:
    model, batch = tiny_model(family).eval(), batch_of(family)
    with torch.no_grad():
        logits = model(batch.input_ids, attention_mask=batch.attention_mask, **batch.inputs).logits
    expected = (
        (logits.double() / 0.7)
        .log_softmax(-1)
        .gather(-1, batch.target.clamp(min=0)[..., None])
        .squeeze(-1)
    )
    add_fused_head(model)
    check_fused_head(model)
    found = target_logprobs(model, batch, 0.7)
    kept = batch.target >= 0
    torch.testing.assert_close(found[kept].double(), expected[kept], rtol=1e-5, atol=1e-5)


def weights(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("column", "settings"),
    [
        ("image", {"beta": 0.1, "num_iterations": 2, "max_steps": 4}),
        ("images", {"steps_per_generation": 2, "gradient_accumulation_steps": 2}),
        (None, {"gradient_checkpointing": True, "mask_truncated_completions": True}),
    ],
)
def test_training(
    family: str, column: str | None, settings: dict[str, Any], tmp_path: Path
) -> None:
    seen: list[Any] = []

    def reward(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        seen.extend([(prompt[-1]["content"], columns) for prompt in prompts])
        return [float(row % 3) for row, _ in enumerate(prompts)]

    trainer = make(family, tmp_path, reward, train_dataset=dataset(column), settings=settings)
    before = weights(trainer.model)
    trainer.train()
    moved = {
        name for name, value in weights(trainer.model).items() if (value != before[name]).any()
    }
    if not settings.get("mask_truncated_completions"):
        assert any("vision" in name or "visual" in name for name in moved)
        assert any("language_model" in name or "text_model" in name for name in moved)
    content, columns = seen[0]
    images = 2 if column == "images" else 1
    assert [part["type"] for part in content] == ["image"] * images + ["text"]
    assert set(columns) >= ({column} if column else set())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_image_decides(family: str, tmp_path: Path) -> None:
    """Two images under one question give other log-probabilities, in all passes alike."""
    kept: list[MicroBatch] = []

    class Keeping(GRPOTrainer):
        def compute_loss(self, model: Any, inputs: MicroBatch, *args: Any, **more: Any) -> Tensor:
            kept.append(inputs)
            return super().compute_loss(model, inputs, *args, **more)

    trainer = Keeping(
        tiny_model(family),
        lengths,
        GRPOConfig(
            output_dir=str(tmp_path),
            **(SETTINGS | {"beta": 0.1, "num_iterations": 2, "learning_rate": 0.0}),
        ),
        dataset(),
        processing_class=tiny_processor(family),
    )
    trainer.train()
    batch = kept[0]
    assert batch.inputs and batch.old_logprobs is not None and batch.ref_logprobs is not None
    torch.testing.assert_close(batch.old_logprobs, batch.ref_logprobs)
    black = MicroBatch(**vars(batch) | {"inputs": dict(batch.inputs)})
    black.inputs["pixel_values"] = torch.full_like(batch.inputs["pixel_values"], 0.7)
    own = target_logprobs(trainer.model, batch, 1.0)
    torch.testing.assert_close(own, batch.old_logprobs, rtol=1e-4, atol=1e-5)
    assert (target_logprobs(trainer.model, black, 1.0) - own).abs().max() > 1e-3


def test_a_run_resumes_to_the_bit(tmp_path: Path) -> None:
    settings = {"num_iterations": 2, "max_steps": 4, "save_strategy": "steps", "save_steps": 1}
    straight = make("llava", tmp_path / "a", settings=settings)
    straight.train()
    again = make("llava", tmp_path / "b", settings=settings)
    again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-1"))
    for name, value in weights(straight.model).items():
        assert torch.equal(value, weights(again.model)[name]), name


@pytest.mark.parametrize("family", ["gemma3", "llava"])
def test_by_name(family: str, tmp_path: Path) -> None:
    """Model and processor come from one folder, and a saved run can be loaded as one."""
    tiny_model(family).save_pretrained(tmp_path / "start")
    tiny_processor(family).save_pretrained(tmp_path / "start")
    args = GRPOConfig(output_dir=str(tmp_path / "out"), **SETTINGS)
    trainer = GRPOTrainer(str(tmp_path / "start"), lengths, args, dataset())
    assert type(trainer.processing_class) is type(tiny_processor(family))
    trainer.train()
    trainer.save_model()
    loaded = GRPOTrainer(
        str(tmp_path / "out"), lengths, GRPOConfig(output_dir=str(tmp_path / "b"), **SETTINGS),
        dataset(),
    )  # fmt: skip
    pairs = zip(trainer.model.parameters(), loaded.model.parameters(), strict=True)
    assert all(torch.equal(first, second) for first, second in pairs)


def test_an_adapter_by_name(tmp_path: Path) -> None:
    """Its base says what is loaded."""
    peft = pytest.importorskip("peft")
    tiny_model("llava").save_pretrained(tmp_path / "base")
    base = type(tiny_model("llava")).from_pretrained(tmp_path / "base")
    config = peft.LoraConfig(target_modules=["q_proj"], r=2)
    peft.get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
    args = GRPOConfig(output_dir=str(tmp_path / "out"), **SETTINGS)
    trainer = GRPOTrainer(
        str(tmp_path / "adapter"), lengths, args, dataset(),
        processing_class=tiny_processor("llava"),
    )  # fmt: skip
    assert isinstance(trainer.model, peft.PeftModel)
    assert type(trainer.model.get_base_model()).__name__ == type(base).__name__


def test_without_images(tmp_path: Path) -> None:
    """A model that takes images trains on text, with its processor and with its tokenizer."""
    asked = [[{"role": "user", "content": [{"type": "text", "text": f"say {n}"}]}] for n in "abcd"]
    for family in FAMILIES:
        rows = Dataset.from_dict({"prompt": asked})
        make(family, tmp_path, train_dataset=rows).train()
    tokenizer = tiny_processor("llava").tokenizer
    rows = Dataset.from_dict({"prompt": ["a", "b", "c", "d"]})
    reward = lambda completions, **columns: [float(len(text)) for text in completions]  # noqa: E731
    make("llava", tmp_path, reward, train_dataset=rows, processing_class=tokenizer).train()


def seeing_reward(seen: list[list[str]]) -> Any:
    """Return a reward that notes the types of the parts of each prompt."""

    def reward(prompts: Any, **columns: Any) -> list[float]:
        seen.extend([part["type"] for part in prompt[-1]["content"]] for prompt in prompts)
        return [float(row % 3) for row, _ in enumerate(prompts)]

    return reward


@pytest.mark.parametrize("column", ["image", "images", None])
@pytest.mark.parametrize("streamed", [False, True])
def test_unused_columns_are_not_those_of_images(
    streamed: bool, column: str | None, tmp_path: Path
) -> None:
    rows = dataset(column)
    rows = rows.add_column("other", list(range(len(rows))))
    rows = rows.to_iterable_dataset() if streamed else rows
    seen: list[list[str]] = []
    settings = {"remove_unused_columns": True, "per_device_eval_batch_size": 4}
    trainer = make(
        "llava", tmp_path, seeing_reward(seen), train_dataset=rows, eval_dataset=rows,
        settings=settings,
    )  # fmt: skip
    trainer.train()
    trainer.evaluate()
    assert len(seen) > 8 and all(types[0] == "image" for types in seen)


def test_rows_of_text_beside_rows_with_images(tmp_path: Path) -> None:
    """A dataset gives all parts all keys; a template may ask for them."""
    prompts = [user(picture(9), "seen?") if row % 2 else user("2 + 2?") for row in range(8)]
    rows = Dataset.from_list([{"prompt": prompt} for prompt in prompts])
    assert rows[0]["prompt"][0]["content"][0]["image"] is None
    seen: list[list[str]] = []
    processor = tiny_processor("qwen3_vl")
    processor.chat_template = TOOLS
    encoded = encode_prompts([with_images(row) for row in rows], processor)
    texts = [processor.tokenizer.decode(each.ids) for each in encoded]
    assert ["2 + 2?" in text for text in texts] == [True, False] * 4
    trainer = make(
        "qwen3_vl", tmp_path, seeing_reward(seen), train_dataset=rows, processing_class=processor
    )
    trainer.train()
    assert ["text"] in seen and ["image", "text"] in seen


class OneCall(RolloutEngine):
    """Calls the tool once, and then says something."""

    def __init__(self, tokenizer: Any) -> None:
        self._encode = partial(tokenizer.encode, add_special_tokens=False)
        self._decode = tokenizer.decode
        self._call = '<tool_call>{"name": "look", "arguments": {"at": "x"}}</tool_call>' + END

    def generate(self, prompt_ids: Any, sampling: Any, images: Any = None) -> Completions:
        asked = ["</tool_call>" in self._decode(ids) for ids in prompt_ids]
        return Completions([self._encode("ok" + END if done else self._call) for done in asked])


def with_tools(folder: Path, **changes: Any) -> tuple[GRPOTrainer, list[Any]]:
    """Return a trainer whose policy sees images and calls tools, and what it says."""
    model, processor = tiny_model("qwen3_vl"), tiny_processor("qwen3_vl")
    processor.chat_template = TOOLS
    said: list[Any] = []

    def reward(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        said.extend(zip(prompts, completions, strict=True))
        return [float(row % 3) for row, _ in enumerate(prompts)]

    trainer = make(
        "qwen3_vl", folder, reward, model=model, processing_class=processor,
        rollout_engine=OneCall(processor.tokenizer),
        **changes | {"settings": {"max_completion_length": 180}},
    )  # fmt: skip
    return trainer, said


def test_an_answer_of_a_tool_names_no_image(tmp_path: Path) -> None:
    answers = iter(["fine", f"an {IMAGE} tag"] * 9)

    def look(at: str) -> str:
        """Look.

        Args:
            at: what.
        """
        return next(answers)

    trainer, said = with_tools(tmp_path, tools=[look])
    trainer.train()
    texts = {completion[1]["content"] for _, completion in said}
    assert texts == {"fine", str({"error": "The answer has a token that stands for an image."})}
    assert trainer.state.log_history[0]["tools/failure_frequency"] == 0.5


def test_an_environment_without_prompts_shows_the_rows_images(tmp_path: Path) -> None:
    class Room:
        def reset(self, **row: Any) -> str:
            return "hi"

        def look(self, at: str) -> str:
            """Look.

            Args:
                at: what.
            """
            return "x"

    rows = dataset().remove_columns("prompt")
    trainer, said = with_tools(tmp_path, environment_factory=Room, train_dataset=rows)
    trainer.train()
    [prompt, _], *_ = said
    assert [part["type"] for part in prompt[0]["content"]] == ["image", "text", "text"]


def test_tokens_of_images_are_never_drawn(tmp_path: Path) -> None:
    model, never = tiny_model("qwen2_5_vl"), [IDS[IMAGE], IDS[VIDEO]]
    with torch.no_grad():  # it would draw nothing else
        model.lm_head.weight[never] *= 1000
    drawn: list[list[int]] = []

    def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        drawn.extend(completion_ids)
        return [0.0] * len(completion_ids)

    make("qwen2_5_vl", tmp_path, reward, model=model).train()
    assert drawn and not set(never) & set(itertools.chain(*drawn))


@pytest.mark.parametrize("shown", [True, False])
def test_completions_and_report_show_the_images(shown: bool, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    settings = {"log_completions": True, "num_completions_to_print": 2, "log_multimodal": shown}
    make("llava", tmp_path, train_dataset=dataset("images"), settings=settings).train()
    table = Dataset.from_parquet(str(tmp_path / "completions" / "completions_00001.parquet"))
    assert table["prompt"][0] == "user: [image]\n[image]\nbright?"
    page = (tmp_path / "report.html").read_text()
    assert ('<img src="data:image/png;base64,' in page) == shown
    if not shown:
        assert "images" not in table.column_names
        return
    [first, second] = table["images"][0]
    assert first == second and first.startswith("data:image/png;base64,") and first in page


def test_an_adapter(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    trainer = make(
        "qwen2_5_vl", tmp_path, settings={"beta": 0.1, "num_iterations": 2},
        peft_config=peft.LoraConfig(target_modules="all-linear", r=2),
    )  # fmt: skip
    before = weights(trainer.model)
    trainer.train()
    moved = {
        name for name, value in weights(trainer.model).items() if (value != before[name]).any()
    }
    assert moved and all("lora" in name for name in moved)
    assert any("visual" in name for name in moved)


def test_several_processes_see_images_together() -> None:
    two = SimpleNamespace(_accelerator=SimpleNamespace(num_processes=2))
    for seeing in ([1.0, 1.0], [0.0, 0.0]):
        Collector._check_together(two, torch.tensor(seeing))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="images: expected in all prompts .* got them in 1 of 3"):
        Collector._check_together(two, torch.tensor([0.0, 1.0, 0.0]))  # type: ignore[arg-type]


def wrong_processor(tmp_path: Path) -> None:
    make("gemma3", tmp_path, processing_class=tiny_processor("llava"))


def wrong_processor_for_qwen(tmp_path: Path) -> None:
    make("qwen3_vl", tmp_path, processing_class=tiny_processor("llava")).train()


def wrong_token(tmp_path: Path) -> None:
    make("llava", tmp_path, model=tiny_model("llava", image_token_index=7))


def processor_for_text(tmp_path: Path) -> None:
    from tests.parity.canned import tiny_model as text_model

    make("llava", tmp_path, model=text_model())


def tokenizer_for_images(tmp_path: Path, column: str | None = "image") -> None:
    tokenizer = tiny_processor("llava").tokenizer
    make("llava", tmp_path, processing_class=tokenizer, train_dataset=dataset(column))


def dropping_template(tmp_path: Path) -> None:
    processor = tiny_processor("llava")
    processor.chat_template = "{% for m in messages %}{{ m.role }}{% endfor %}"
    make("llava", tmp_path, processing_class=processor).train()


def unreadable(tmp_path: Path) -> None:
    rows = dataset().cast_column("image", ImageColumn(decode=False))
    broken = rows.map(lambda row: {"image": {"bytes": b"none", "path": None}})
    make("llava", tmp_path, train_dataset=broken).train()


def in_text(tmp_path: Path) -> None:
    rows = Dataset.from_dict({"prompt": ["?"] * 4, "image": [picture(0)] * 4})
    make("llava", tmp_path, train_dataset=rows).train()


def audio(tmp_path: Path) -> None:
    sound = [{"role": "user", "content": [{"type": "audio", "audio": "a.wav"}]}]
    make("llava", tmp_path, train_dataset=Dataset.from_dict({"prompt": [sound] * 4}))


def untyped(tmp_path: Path) -> None:
    parts = [{"role": "user", "content": [{"image": picture(0)}, {"text": "?"}]}]
    make("llava", tmp_path, train_dataset=Dataset.from_list([{"prompt": parts}] * 4))


def of_strings(tmp_path: Path) -> None:
    parts = [{"role": "user", "content": ["?"]}]
    make("llava", tmp_path, train_dataset=Dataset.from_list([{"prompt": parts}] * 4))


def placeholder_in_text(tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "<image>\n?"}]
    rows = Dataset.from_dict({"prompt": [asked] * 4, "image": [picture(0)] * 4})
    make("llava", tmp_path, train_dataset=rows).train()


def placeholder_alone(tmp_path: Path) -> None:
    make("llava", tmp_path, train_dataset=Dataset.from_dict({"prompt": ["<image>?"] * 4})).train()


def batched(tmp_path: Path) -> None:
    make("llava", tmp_path, settings={"use_transformers_continuous_batching": True}).train()


def by_function(tmp_path: Path) -> None:
    make("llava", tmp_path, rollout_func=lambda prompts, trainer: {}).train()


WRONG = {
    wrong_processor: "expected the processor of the policy, got a LlavaProcessor, with whose imag",
    wrong_processor_for_qwen: "expected the processor of the policy, got a LlavaProcessor, with wh",
    wrong_token: "expected the processor of LlavaForConditionalGeneration, in which token 7 stand",
    processor_for_text: "expected the processor of Qwen2ForCausalLM",
    tokenizer_for_images: "train_dataset: expected no images without a processor as processing_cla",
    lambda path: tokenizer_for_images(path, "images"): "train_dataset: expected no images without",
    lambda path: tokenizer_for_images(path, None): "train_dataset: expected no images without a p",
    dropping_template: "expected a chat template that writes <image> for each image, 1 in all, go",
    unreadable: "images: expected images, paths or URLs of images, got one that cannot be read in",
    in_text: "prompt: expected messages in a row with images, got text in row 2",
    audio: "train_dataset: expected prompts of text and images, got .* of type 'audio'",
    untyped: "train_dataset: expected prompts of text and images, got .* of type None",
    of_strings: "train_dataset: expected parts of messages as {'type': ...}, got '\\?'",
    placeholder_in_text: "prompt: expected no <image> in a text .an image goes where a message has",
    placeholder_alone: "prompt: expected no <image> in a text",
    batched: "use_transformers_continuous_batching: expected prompts of text, got images",
    by_function: "rollout_func: expected prompts of text, got images",
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said_before_anything_is_generated(case: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=WRONG[case]):
        case(tmp_path)
