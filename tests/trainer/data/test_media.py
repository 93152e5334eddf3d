"""Which images rows may name, and what becomes of a row whose images cannot be read."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, Features, List, Value
from datasets import Image as ImageFeature
from huggingface_hub import constants
from PIL import Image

from grpo_trainer import GRPOConfig
from grpo_trainer.data import ImageError, Media, PromptStream, distrust_rows, open_images, unopened
from grpo_trainer.data import images as media_module
from tests.support.vision import picture
from tests.trainer.data.test_images import ASKED, colours, png

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


@pytest.mark.parametrize("source", [{"bytes": 5}, {"bytes": RED[:45]}, {"bytes": b""}, "///", 3])
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
