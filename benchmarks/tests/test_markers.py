"""Numbers in documents: what a marker becomes."""

from __future__ import annotations

import pytest

from benchmarks.context import Context
from benchmarks.load import Device, load
from benchmarks.markers import rewrite
from benchmarks.tests.synthetic_results import (
    NEWER,
    accuracy,
    device,
    row,
    rows,
    run,
    table,
    training,
    write,
)


def fill(devices: dict[str, Device], call: str) -> str:
    document = f"a <!-- results: {call} -->old<!-- /results --> b"
    context = Context(devices=devices, results="benchmarks/results")
    new = rewrite(document, context, "doc.md")
    return new.partition(" -->")[2].partition("<!-- /")[0]


@pytest.mark.parametrize(
    "call, expected",
    [
        ("ratio cpu dapo qwen2.5-0.5b 1024 fp32 trl ours", "1.82"),
        ("ratio test-cpu dapo qwen2.5-0.5b most fp32 trl ours", "1.82"),
        ("median cpu dapo qwen2.5-0.5b 1024 fp32 trl", "4.00 s"),
        ("extra cpu dapo qwen2.5-0.5b 1024 fp32 trl", "1000 MiB"),
        ("rate cpu dapo qwen2.5-0.5b 1024 fp32 ours", "0.380 TFLOP/s"),
        ("prediction cpu dapo qwen2.5-0.5b 1024 fp32 ours", "0.95"),
        ("error cpu dapo qwen2.5-0.5b 1024 fp32 ours dweight", "8e-7"),
        ("step cpu train trl ours", "2.00"),
        ("step cpu step trl ours", "2.00"),
        ("step cpu step trl-liger ours", "not measured yet"),
        ("commit cpu", "0123456789ab"),
        ("date cpu", "2026-01-02"),
        ("device cpu", "Test CPU, 2 threads"),
        ("ratio cuda dapo qwen2.5-0.5b 1024 fp32 trl ours", "not measured yet"),
        ("ratio cpu dapo qwen2.5-0.5b 512 fp32 trl ours", "not measured yet"),
        ("ratio cpu dapo qwen2.5-0.5b 1024 fp32 cce ours", "not measured yet"),
        ("ratio cpu dapo qwen2.5-0.5b 1024 fp32 quack ours", "not measured yet"),
        ("error cpu dapo qwen2.5-0.5b 1024 fp32 ours entropy", "not measured yet"),
        ("headline cuda dapo qwen2.5-0.5b 1024", "\n\nnot measured yet\n\n"),
        ("noise cpu small bf16 trl", "2e-2"),
        ("noise cpu small bf16 cce", "not measured yet"),
        ("noise cpu small bf16 eager", "not measured yet"),
        ("noise cpu small fp32 trl", "not measured yet"),
        ("accuracy cuda", "\n\nnot measured yet\n\n"),
        ("training cuda", "\n\nnot measured yet\n\n"),
    ],
)  # fmt: skip
def test_markers(tmp_path, call, expected):
    data = run([table(rows())], training=[training()], accuracy=[accuracy()])
    found = device(tmp_path, data)
    assert fill({"test-cpu": found}, call) == expected


def test_accuracy_marker_names_who_is_not_in_the_table(tmp_path):
    found = {"test-cpu": device(tmp_path, run([], accuracy=[accuracy()]))}
    said = fill(found, "accuracy cpu")
    assert "Ratio noise: " in said and "small (D = 256, V = 32000), bf16; T = 4 tokens" in said
    assert "Test CPU, 2 threads; 2026-01-02." in said
    assert "Not here: cce (needs a GPU). Not able: liger (a GRPO loss only)." in said


def test_links_are_relative_to_the_document(tmp_path):
    found = {"test-cpu": device(tmp_path, run([table(rows())]))}
    assert "](benchmarks/results/test-cpu/time.png)" in fill(found, "plot cpu time")
    assert "](benchmarks/results/test-cpu/report.md)" in fill(found, "reports")
    assert "](benchmarks/results/test-cpu/report.md#dapo" in fill(found, "summary cpu")


@pytest.mark.parametrize(
    "call, message",
    [
        ("speed cpu", "doc.md: results: expected one of accuracy, .* got 'speed cpu'"),
        ("commit", "commit: expected DEVICE, got nothing"),
        ("commit cdua", "DEVICE: expected cpu | cuda | test-cpu, got 'cdua'"),
        ("median cpu dapo qwen2.5-0.5b 1k fp32 trl", 'TOKENS: expected a number or "most"'),
        ("median cpu dapo qwen2.5-0.5b 1024 fp32 trll", "PROVIDER: expected .* got 'trll'"),
        ("headline cpu dopa qwen2.5-0.5b 1024", "WORK: expected .* got 'dopa'"),
    ],
)
def test_an_unknown_marker_is_an_error(tmp_path, call, message):
    found = device(tmp_path, run([table(rows())]))
    with pytest.raises(ValueError, match=message.replace("|", r"\|")):
        fill({"test-cpu": found}, call)


def test_the_newest_device_of_a_kind_is_quoted(tmp_path):
    write(tmp_path, run([table([row("ours", [1.0])])]), slug="a-cpu")
    write(tmp_path, run([table([row("ours", [2.0])])], environment=NEWER), slug="b-cpu")
    write(tmp_path, run([table([row("ours", [3.0])])]), slug="c-cpu")
    assert fill(load(tmp_path), "median cpu dapo qwen2.5-0.5b 1024 fp32 ours") == "2.00 s"
    assert fill(load(tmp_path), "median c-cpu dapo qwen2.5-0.5b 1024 fp32 ours") == "3.00 s"


def test_code_is_left_alone_and_lonely_markers_are_errors():
    context = Context(devices={}, results="results")
    code = "`<!-- results: x -->`\n\n```\n<!-- results: y -->\n```\n"
    assert rewrite(code, context, "doc.md") == code
    marker = "<!-- results: commit cpu -->"
    for bad in (marker, "a <!-- /results -->", f"{marker} {marker}<!-- /results -->"):
        with pytest.raises(ValueError, match="doc.md: expected <!-- results: NAME"):
            rewrite(bad, context, "doc.md")
