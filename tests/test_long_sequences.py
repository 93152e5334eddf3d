"""The guide to long sequences: its example runs, its settings exist, its list is the code's."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import yaml

from grpo_kernels.hf import TOKEN_WISE_MLPS
from grpo_trainer import GRPOConfig
from grpo_trainer.cli.arguments import RunArguments
from grpo_trainer.policy.tiled_mlp import _Tiled
from tests.support.documents import ROOT, blocks, code, python_block, section, with_settings

GUIDE = (ROOT / "docs/guides/long-sequences.md").read_text()


def test_the_example_runs(tmp_path: Path) -> None:
    settings = f'output_dir="{tmp_path}", use_cpu=True, disable_tqdm=True, save_strategy="no"'
    names: dict = {}
    exec(with_settings(python_block(GUIDE, "mlp_tile_tokens=16"), settings), names)
    mlp = names["trainer"].model.model.layers[0].mlp
    assert isinstance(mlp, _Tiled) and mlp.tile_tokens == 16
    assert names["trainer"].state.global_step == 2


def test_the_settings_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda *_: True)
    own = {item.name for item in dataclasses.fields(GRPOConfig)}
    known = own | {item.name for item in dataclasses.fields(RunArguments)}
    found = [yaml.safe_load(block) for block in blocks(GUIDE, "yaml")]
    assert len(found) == 3
    for settings in found:
        assert set(settings) <= known
        mine = {name: settings[name] for name in settings.keys() & own}
        GRPOConfig(output_dir=str(tmp_path), use_cpu=True, **mine)


def test_the_supported_classes_are_those_of_the_code() -> None:
    assert code(section(GUIDE, "Supported models")) - {"mlp"} == set(TOKEN_WISE_MLPS)
