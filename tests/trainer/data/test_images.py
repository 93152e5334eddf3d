"""Images in prompts: where they come from and may come from, what a processor makes of them."""

from __future__ import annotations

import base64
import io
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, Features, List, Value
from datasets import Image as ImageFeature
from huggingface_hub import constants
from PIL import Image

from grpo_trainer import GRPOConfig
from grpo_trainer.data import (
    ImageError,
    Media,
    PromptStream,
    data_url,
    distrust_rows,
    encode_prompts,
    images_of,
    model_inputs,
    open_images,
    unopened,
)
from grpo_trainer.data import images as media_module
from tests.support.vision import FAMILIES, picture, tiny_model, tiny_processor, user

ASKED = [{"role": "user", "content": "?"}]
PLACE = {"type": "image"}


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
    files = {"bytes": png(red), "path": None}, {"bytes": None, "path": file}
    for source in (red, file, url, *files):
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
    prompt = message({"type": "text", "text": "a"}, PLACE, PLACE)
    prompt = open_images({"prompt": prompt, "images": images})["prompt"]
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
        ({"prompt": ASKED, "image": "/no/file.png", "row": 7}, "'row': 7.*Incorrect image"),
        ({"prompt": ASKED, "image": picture(0), "images": [picture(1)]}, "images: .*one column"),
        ({"prompt": message(PLACE, PLACE), "image": picture(0)}, "images: expected 2, .* got 1"),
        ({"prompt": message(PLACE)}, "images: expected 1, .* got 0"),
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


RED = png(picture((255, 0, 0)))


@pytest.fixture
def server() -> Any:
    """Serve an image, a redirect to a file, and a URL that does not answer."""
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/never":
                over.wait(30)
            elif self.path == "/file":
                self.send_response(302)
                self.send_header("Location", "file:///etc/passwd")
                self.end_headers()
            else:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(RED)

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_address[1]}"
        over.set()
        running.shutdown()


def config(**changes: Any) -> GRPOConfig:
    return GRPOConfig(use_cpu=True, bf16=False, report_to="none", **changes)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("column", ["image", "images"])
def test_the_row_of_an_image_that_cannot_be_read(column: str, streams: bool) -> None:
    """`datasets` would open it where nobody knows its row."""
    values: list[Any] = [{"bytes": RED, "path": None}, {"bytes": RED[:45], "path": None}]
    kind: Any = ImageFeature()
    if column == "images":
        values, kind = [[value] for value in values], List(kind)
    prompt = [{"role": Value("string"), "content": Value("string")}]
    rows = Dataset.from_dict(
        {"prompt": [ASKED] * 2, column: values, "other": [{"bytes": RED, "path": None}] * 2},
        features=Features({"prompt": prompt, column: kind, "other": ImageFeature()}),
    )
    dataset = unopened(rows.to_iterable_dataset() if streams else rows, config())
    good, bad = PromptStream(dataset).take(2)
    assert colours(open_images(good, Media())["prompt"]) == [(255, 0, 0)]
    assert isinstance(good["other"], Image.Image)
    with pytest.raises(ImageError, match=f"cannot be read in '{column}' of row 1, .*Error"):
        open_images(bad, Media())


UNREADABLE = ({"bytes": 5}, {"bytes": RED[:45]}, {"bytes": b""}, {"bytes": b"no image"}, "///", 3)


@pytest.mark.parametrize("source", UNREADABLE)
def test_any_error_is_one(source: Any) -> None:
    with pytest.raises(ImageError, match="cannot be read in 'image' of the row"):
        open_images({"prompt": ASKED, "image": source}, Media())


def test_a_decompression_bomb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 4)
    with pytest.raises(ImageError, match="DecompressionBombError"):
        Media().open({"bytes": RED})


def test_urls(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Media().open(f"{server}/red.png").getpixel((0, 0)) == (255, 0, 0)
    with pytest.raises(ImageError, match="UnsupportedProtocol"):
        Media().open(f"{server}/file")
    for url in ("file:///etc/passwd", "ftp://127.0.0.1/x", "zip://a.png::file:///etc/x.zip"):
        with pytest.raises(ImageError, match="UnsupportedProtocol|ImageError|InvalidURL"):
            Media().open(url)
    monkeypatch.setattr(media_module, "_SECONDS", 0.2)
    with pytest.raises(ImageError, match="Timeout"):
        Media().open(f"{server}/never")


def test_what_is_allowed(server: str, tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    for folder in (inside, outside):
        folder.mkdir()
        (folder / "red.png").write_bytes(RED)
    (inside / "link.png").symlink_to(outside / "red.png")
    (inside / "own.png").symlink_to(inside / "red.png")
    args = config(allow_remote_images=False, allowed_media_path=str(inside))
    media = Media.of(args)
    for name in ("red.png", "own.png"):
        assert media.open(str(inside / name)).getpixel((0, 0)) == (255, 0, 0)
    for path in (outside / "red.png", inside / "../out/red.png", inside / "link.png"):
        for source in (str(path), {"bytes": None, "path": str(path)}):
            with pytest.raises(
                ValueError, match="allowed_media_path: .*in 'image' of the row"
            ) as e:
                open_images({"prompt": ASKED, "image": source}, media)
            assert not isinstance(e.value, ImageError)  # which may be skipped
    for url in (f"{server}/red.png", "hf://datasets/a/b/c.png", "zip://a.png::hf://datasets/a/b"):
        with pytest.raises(ValueError, match="allow_remote_images: expected True"):
            media.open(url)
    trusted = config()
    assert Media.of(trusted) == Media()
    distrust_rows(trusted)
    assert Media.of(trusted) == Media(remote=False, folder=constants.HF_HUB_CACHE)
    distrust_rows(args)
    assert Media.of(args) == media
