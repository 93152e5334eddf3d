"""Images in prompts: where they come from, what a processor makes of them, how rows are joined."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from grpo_trainer.data import data_url, encode_prompts, images_of, model_inputs, open_images
from tests.support.vision import FAMILIES, picture, tiny_model, tiny_processor, user

ASKED = [{"role": "user", "content": "?"}]


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def colours(prompt: Any) -> list[tuple[int, int, int]]:
    return [image.getpixel((0, 0)) for image in images_of(prompt)]


def message(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def test_an_image_from_everywhere(tmp_path: Path) -> None:
    red, file = picture((255, 0, 0)), str(tmp_path / "red.png")
    Path(file).write_bytes(png(red))
    url = "data:image/png;base64," + base64.b64encode(png(red)).decode()
    text = {"type": "text", "text": "?"}
    for source in (
        red,
        file,
        url,
        {"bytes": png(red), "path": None},
        {"bytes": None, "path": file},
    ):
        here = {"type": "image", "image": source}
        for row in (
            {"prompt": ASKED, "image": source},
            {"prompt": ASKED, "image": source, "images": []},
            {"prompt": ASKED, "images": [source]},
            {"prompt": message(here, text)},
            # as a dataset gives it: every part has all keys
            {"prompt": message(here | {"text": None}, text | {"image": None})},
        ):
            prompt = open_images(row)["prompt"]
            assert colours(prompt) == [(255, 0, 0)]
            assert [part["type"] for part in prompt[0]["content"]] == ["image", "text"]


def test_where_images_of_a_column_go() -> None:
    images = [picture(0), picture(255)]
    asked = [{"role": "system", "content": "be short"}, {"role": "user", "content": "which?"}]
    prompt = open_images({"prompt": asked, "images": images})["prompt"]
    assert colours(prompt[:1]) == []
    assert colours(prompt[1:]) == [(0, 0, 0), (255, 255, 255)]
    assert prompt[1]["content"][2] == {"type": "text", "text": "which?"}
    places = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "image"}]
    prompt = open_images({"prompt": message(*places), "images": images})["prompt"]
    assert [part["type"] for part in prompt[0]["content"]] == ["text", "image", "image"]
    assert colours(prompt) == [(0, 0, 0), (255, 255, 255)]


@pytest.mark.parametrize("mode", ["CMYK", "HSV", "F", "RGBA", "L", "1", "P"])
def test_any_image_is_sent(mode: str) -> None:
    kind, _, data = data_url(picture(0).convert("RGB").convert(mode)).partition(",")
    assert kind == "data:image/png;base64" and base64.b64decode(data)


@pytest.mark.parametrize("row", [{}, {"image": None}, {"images": []}])
@pytest.mark.parametrize("prompt", ["text", [{"role": "user", "content": "text"}]])
def test_without_images_the_prompt_is_as_it_was(row: dict[str, Any], prompt: Any) -> None:
    assert open_images({"prompt": prompt, **row})["prompt"] is prompt


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ({"prompt": "?", "image": picture(0)}, "prompt: expected messages in a row with images"),
        (
            {"prompt": ASKED, "image": {"bytes": b"no image"}},
            "cannot be read in 'image' of the row",
        ),
        ({"prompt": ASKED, "image": "/no/file.png", "row": 7}, "'row': 7.*Incorrect image"),
        ({"prompt": ASKED, "image": 3}, "cannot be read in 'image' of the row"),
        (
            {"prompt": ASKED, "image": picture(0), "images": [picture(1)]},
            "images: expected them in one column, got images and image in the row",
        ),
        (
            {"prompt": message(*[{"type": "image"}] * 2), "image": picture(0)},
            "images: expected 2, one for each place in the messages, got 1 in the row",
        ),
        (
            {"prompt": message({"type": "image"})},
            "images: expected 1, one for each place in the messages, got 0 in the row",
        ),
    ],
)
def test_what_is_wrong_with_a_row(row: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        open_images(row)


PROMPTS = [
    user("what is ", picture(200), "?"),
    user("hi"),
    user(picture(3), " or ", picture((9, 200, 0)), "?"),
]


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_joined_are_what_each_is_alone(family: str, left: bool) -> None:
    encoded = encode_prompts(PROMPTS, tiny_processor(family))
    model = tiny_model(family)

    def hidden(rows: list[Any]) -> list[torch.Tensor]:
        lengths = [len(row.ids) for row in rows]
        width, here = max(lengths), torch.device("cpu")
        ids, mask = torch.zeros(2, len(rows), width, dtype=torch.int64)
        spans = [slice(width - n, width) if left else slice(n) for n in lengths]
        for index, (row, span) in enumerate(zip(rows, spans, strict=True)):
            ids[index, span], mask[index, span] = torch.tensor(row.ids), 1
        more = model_inputs([row.images for row in rows], lengths, width, here, left=left)
        found = model.base_model(input_ids=ids, attention_mask=mask, **more).last_hidden_state
        return [each[span] for each, span in zip(found, spans, strict=True)]

    with torch.no_grad():
        for together, row in zip(hidden(encoded), encoded, strict=True):
            torch.testing.assert_close(together, hidden([row])[0], rtol=1e-4, atol=1e-5)


def test_prompts_are_told_apart_by_what_is_in_their_images() -> None:
    processor = tiny_processor("llava")
    same, again, other = encode_prompts([user(picture(x)) for x in (5, 5, 6)], processor)
    assert same == again
    assert same != other
    assert same.ids == other.ids


@pytest.mark.parametrize("family", FAMILIES)
def test_a_template_that_drops_images(family: str) -> None:
    processor = tiny_processor(family)
    processor.chat_template = "{% for m in messages %}{{ m.role }}{% endfor %}"
    with pytest.raises(ValueError, match="a chat template that writes .* 1 in all, got 0 in"):
        encode_prompts([user(picture(0), "?")], processor)
    with pytest.raises(ValueError, match="processing_class: expected a processor for prompts wit"):
        encode_prompts([user(picture(0))], processor.tokenizer)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_with_images_is_not_cut(family: str) -> None:
    processor = tiny_processor(family)
    long = encode_prompts([user("a long question")], processor)[0].ids
    cut = encode_prompts([user("a long question")], processor, max_length=5)[0]
    assert cut.ids == long[-5:]
    if cut.images is not None:
        assert {value.shape for value in cut.images.inputs.values()} == {(1, 5)}
    with pytest.raises(ValueError, match="max_prompt_length: expected at least .* got 5 for"):
        encode_prompts([user(picture(0), "?")], processor, max_length=5)
