"""``grpo-kernels plan --train``: sizes are those of real models, and the answer is the cheapest."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    Gemma3Config,
    Gemma3TextConfig,
    Qwen3Config,
    RecurrentGemmaConfig,
    SiglipVisionConfig,
)

from grpo_kernels.tools import cli
from grpo_kernels.tools.chart import bars
from grpo_kernels.tools.memory import GIB, Engine, Run, largest, missing, moments
from grpo_kernels.tools.model import Model, model_of
from grpo_kernels.tools.search import CHANGES, COSTS, Change, answer
from grpo_kernels.tools.training import NF4, training
from tests.support.tiny_models import FAMILIES, tiny_model
from tests.tools.test_cli import error

OTHERS = ("recurrent_gemma", "falcon_h1")  # layers that are no attention
MIXTURE = ("qwen3_moe", "granitemoe", "llama4_text")
QWEN3 = dict(
    vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=28,
    num_attention_heads=16, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
)  # fmt: skip


@pytest.fixture(scope="module")
def qwen3() -> Model:
    return model_of(Qwen3Config(**QWEN3))


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in OTHERS])
def test_parameters_and_adapters_are_those_of_the_model(family: str) -> None:
    peft = pytest.importorskip("peft")
    real = tiny_model(family)
    model = model_of(real.config)
    assert model.parameters == sum(x.numel() for x in real.parameters())
    assert model.tied == (real.get_output_embeddings().weight is real.get_input_embeddings().weight)
    assert bool(model.experts) == (family in MIXTURE)
    config = peft.LoraConfig(r=4, target_modules=list(model.adapted) or "all-linear")
    adapted = peft.get_peft_model(real, config)
    trained = sum(x.numel() for x in adapted.parameters() if x.requires_grad)
    assert trained == training("lora", 4).trainable(model)


SMALL = Gemma3TextConfig(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, vocab_size=99,
    num_attention_heads=2, num_key_value_heads=1, head_dim=16,
)  # fmt: skip


def with_images() -> Gemma3Config:
    vision = SiglipVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
    )
    return Gemma3Config(text_config=SMALL, vision_config=vision)


def test_the_part_for_images_counts() -> None:
    both, alone = model_of(with_images()), model_of(SMALL)
    assert both.layers == alone.layers and both.head == alone.head
    assert both.linear > alone.linear and both.parameters > alone.parameters
    assert both.images and not alone.images


@pytest.mark.parametrize("place", ["colocate", "server", "transformers"])
def test_no_4_bits_next_to_vllm_with_images(capsys: Any, tmp_path: Any, place: str) -> None:
    """It gets adapters of such models merged, which the trainer refuses for a quantized base."""
    for config, by_itself in ((with_images(), place == "transformers"), (SMALL, True)):
        model = model_of(config)
        asked = run_of(model, 1, training=training("lora"), engine=Engine(place=place))
        qlora = [change.apply(asked) for change in CHANGES if "QLoRA" in change.title]
        assert [run is not None for run in qlora] == [by_itself]
    with_images().save_pretrained(tmp_path)
    words = f"--train qlora --tokens 512 --gpu-memory 24GiB --engine {place}"
    if place == "transformers":
        assert "load_in_4bit: true" in planned(capsys, str(tmp_path), words)
        return
    shown = error(capsys, "plan", "--model", str(tmp_path), *words.split())
    assert "--train: expected full, bf16 or lora for a model with images" in shown


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "qwen3_moe"])
def test_weights_of_4_bits_are_those_of_bitsandbytes(tmp_path: Any, family: str) -> None:
    """It packs linear layers, no head, no embedding, and no stack of experts."""
    pytest.importorskip("bitsandbytes")
    config = AutoConfig.for_model(**tiny_model(family).config.to_dict() | {"hidden_size": 64})
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    packed = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        dtype=torch.bfloat16,
        quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    )
    scales = [x.quant_state.absmax for x in packed.parameters() if hasattr(x, "quant_state")]
    held = sum(x.nbytes for x in (*packed.parameters(), *scales))
    model = model_of(config)
    way = replace(training("qlora"), rank=0)
    assert scales and way.weights(model) == pytest.approx(held, rel=0.01)
    assert NF4 * model.linear < 0.3 * 2 * model.linear


def run_of(model: Model, gib: float = 24, **changes: Any) -> Run:
    settings = {"tokens": 8192, "training": training("full")} | changes
    return Run(model=model, memory=int(gib * GIB), **settings)


def costs(run: Run) -> list[str]:
    return [change.cost for change in answer(run).changes]


def ranks(changes: Iterable[Change]) -> list[int]:
    """Return what changes cost, the dearest first."""
    return sorted((COSTS.index(change.cost) for change in changes), reverse=True)


def test_what_fits_stays_as_it_is(qwen3: Model) -> None:
    run = run_of(qwen3, 80)
    assert answer(run).run == run and not answer(run).changes and not missing(run)


@pytest.mark.parametrize("gib", [8, 12, 20, 24, 28, 32, 36])
@pytest.mark.parametrize("name", ["full", "lora"])
def test_no_cheaper_set_of_changes_fits(qwen3: Model, gib: int, name: str) -> None:
    run = run_of(qwen3, gib, training=training(name), engine=Engine(place="colocate"))
    result = answer(run)
    assert bool(result.missing) == bool(missing(result.run))
    dearest = ranks(result.changes)
    for count in range(len(CHANGES) + 1):
        for changes in combinations(CHANGES, count):
            if not result.missing and ranks(changes) >= dearest:
                continue
            changed: Run | None = run
            for change in changes:
                changed = changed and change.apply(changed)
            if changed is not None:
                assert missing(changed) >= max(result.missing, 1)


def test_changes_come_in_the_order_of_their_costs(qwen3: Model) -> None:
    assert costs(run_of(qwen3, 36)) == ["time"]
    assert costs(run_of(qwen3, 24)) == ["rounding"]
    assert costs(run_of(qwen3, 15)) == ["time", "rounding"]
    assert costs(run_of(qwen3, 12)) == ["less is trained"]
    asked = run_of(qwen3, 7, training=training("lora"), engine=Engine(place="colocate"))
    assert costs(asked) == ["less is trained", "another GPU"]
    assert not answer(asked).missing


def test_two_passes_are_named_where_they_take_less(qwen3: Model) -> None:
    run = run_of(qwen3, 80)
    less = run.head_bytes() - replace(run, two_pass=True).head_bytes()
    assert less > GIB // 2
    needed = sum(moments(run)[0].parts.values())
    result = answer(replace(run, memory=needed - less // 2))
    assert result.run.settings()["schedule"] == "two_pass" and len(result.changes) == 1
    frozen = replace(run, training=training("lora"))
    assert replace(frozen, two_pass=True).head_bytes() >= frozen.head_bytes()


def test_a_sleeping_engine_has_to_wake(qwen3: Model) -> None:
    """Next to weights and states, without gradients and activations."""
    asleep = Engine(place="colocate", share=0.6, sleeps=True)
    run = run_of(qwen3, 40, engine=asleep, training=training("full"))
    training_, waking, share = moments(run)
    assert "engine weights" not in training_.parts and training_.free >= 0
    assert "gradients" not in waking.parts and "activations" not in waking.parts
    of_engine = waking.parts["engine weights"] + waking.parts["engine KV cache"]
    assert of_engine == share.limit == int(0.6 * 40 * GIB)
    assert waking.parts["weights"] == training_.parts["weights"]
    assert waking.free < 0 and missing(run) == -waking.free
    smaller = replace(run, engine=replace(asleep, share=0.3))
    assert not missing(smaller)


def test_weights_on_their_way_to_a_waking_engine(qwen3: Model) -> None:
    """A layer, or the head, until the cache wakes; none where vLLM loads the weights itself."""
    engine = Engine(place="colocate", share=0.09, sleeps=True)
    run = run_of(qwen3, 40, engine=engine, training=training("lora"))
    waking = moments(run)[1].parts
    assert waking["weights on their way"] == 2 * qwen3.head and "engine KV cache" not in waking
    waking = moments(replace(run, training=training("qlora")))[1].parts
    assert "weights on their way" not in waking and waking["engine KV cache"] < 2 * qwen3.head
    waking = moments(replace(run, engine=replace(engine, share=0.3)))[1].parts
    assert "weights on their way" not in waking and waking["engine KV cache"] > 2 * qwen3.head


def test_a_share_holds_the_engines_weights(qwen3: Model) -> None:
    memory = 16 * GIB
    engine = Engine(place="colocate")
    share = engine.share_of(qwen3, memory)
    assert share == 0.35 and share * memory > engine.weight_bytes(qwen3) + 2 * GIB
    assert engine.share_of(qwen3, 80 * GIB) == 0.3
    small = run_of(qwen3, 16, engine=replace(engine, share=0.2), training=training("qlora"))
    assert min(moments(small), key=lambda moment: moment.free).name == "vLLM's share"
    half = replace(engine, weights="fp8").weight_bytes(qwen3)
    assert half == engine.weight_bytes(qwen3) - qwen3.linear


def test_a_reference_counts_where_there_is_no_adapter(qwen3: Model) -> None:
    without, with_one = (moments(run_of(qwen3, reference=x))[0] for x in (False, True))
    assert without.free - with_one.free == 4 * qwen3.parameters
    adapted = run_of(qwen3, reference=True, training=training("lora"))
    assert "reference model" not in moments(adapted)[0].parts


def test_the_largest_micro_batch_is_the_last_that_fits(qwen3: Model) -> None:
    for one_sequence in (False, True):
        run = run_of(qwen3, training=training("lora"))
        tokens = largest(run, one_sequence=one_sequence)
        longest = tokens + 256 if one_sequence else run.longest
        assert missing(replace(run, tokens=tokens + 256, longest=longest))
        longest = tokens if one_sequence else run.longest
        assert not missing(replace(run, tokens=tokens, longest=longest))
    assert largest(run_of(qwen3, 8)) == 0


def test_bars_add_up() -> None:
    fits = bars({"weights": 6 * GIB, "nothing": 0, "states": 2 * GIB}, 16 * GIB)
    assert [line.split("  ")[0] for line in fits] == ["weights", "states", "free"]
    assert fits[0].count("#") == 15 and fits[2].endswith("." * 20)
    assert sum(int(line.split(" %")[0].split()[-1]) for line in fits) in (99, 100, 101)
    assert bars({"weights": 3 * GIB}, 2 * GIB)[-1].startswith("missing  1.00 GiB   50 %  ")
    assert bars({"weights": 1000 * GIB}, GIB)[0].count("#") == 80


@pytest.fixture
def folder(tmp_path: Any) -> str:
    Qwen3Config(**QWEN3).save_pretrained(tmp_path / "policy")
    return str(tmp_path / "policy")


def planned(capsys: Any, folder: str, words: str) -> str:
    assert cli.main(["plan", "--model", folder, *words.split()]) == 0
    return capsys.readouterr().out


def test_the_answer_is_a_run_file_and_where_the_memory_goes(capsys: Any, folder: str) -> None:
    words = "--train full --tokens 8192 --gpu-memory 24GiB --engine colocate"
    shown = planned(capsys, folder, words)
    facts = json.loads(planned(capsys, folder, f"{words} --json"))
    parts = shown.split("\n\n")
    settings = yaml.safe_load(next(x for x in parts if x.startswith("model_name_or_path")))
    assert settings == facts["settings"] and settings["max_tokens_per_micro_batch"] == 8192
    assert settings["optim_args"] == "bf16_stochastic_round=True"
    assert facts["fits"] and "It fits with 1 change:\n  * bf16 weights" in shown
    for moment in facts["moments"]:
        assert sum(moment["parts_bytes"].values()) <= moment["limit_bytes"]
    assert "LM head and loss" in shown and "engine KV cache" in shown and "free" in shown


def test_a_model_is_named_by_its_folder_and_with_how_its_files_are_quantized(
    capsys: Any, folder: str
) -> None:
    words, note = "--train lora --tokens 512 --gpu-memory 24GiB", "The files are quantized by mxfp4"
    config = Path(folder, "config.json")
    for model in (folder, str(config)):
        facts = json.loads(planned(capsys, model, f"{words} --json"))
        assert facts["settings"]["model_name_or_path"] == folder and facts["model"] == "policy"
    assert note not in planned(capsys, folder, words)
    quantized = {"quantization_config": {"quant_method": "mxfp4"}}
    config.write_text(json.dumps(json.loads(config.read_text()) | quantized))
    assert note in planned(capsys, folder, words)


def test_what_is_offloaded_takes_main_memory(capsys: Any, folder: str) -> None:
    words = "--train lora --tokens 50000 --gpu-memory 24GiB"
    facts = json.loads(planned(capsys, folder, f"{words} --json"))
    assert facts["settings"]["gradient_checkpointing_kwargs"] == {"offload": True}
    assert facts["main_memory_bytes"] == 50000 * 28 * 2048 * 2
    assert "Hidden states use 5.341 GiB of pinned main memory." in planned(capsys, folder, words)


def test_fp32_weights_are_told_of_two_passes(capsys: Any, folder: str) -> None:
    """Also where the run fits without them; a frozen head has nothing to save."""
    words = "--tokens 8192 --gpu-memory 80GiB"
    facts = json.loads(planned(capsys, folder, f"--train full {words} --json"))
    assert not facts["changes"] and facts["two_pass_saves_bytes"] > GIB // 2
    assert "schedule: two_pass saves 5" in planned(capsys, folder, f"--train full {words}")
    assert "two_pass" not in planned(capsys, folder, f"--train lora {words}")


def test_what_does_not_fit_gets_no_run_file(capsys: Any, folder: str) -> None:
    words = "--train qlora --tokens 200000 --longest 200000 --gpu-memory 10GiB"
    shown = planned(capsys, folder, f"{words} --engine transformers")
    assert "It does not fit. The closest, with 2 changes, lacks " in shown
    assert "GiB (training):" in shown and "max_tokens_per_micro_batch" not in shown
    assert "missing" in shown and "Room to generate" in shown


def test_a_card_by_its_name(capsys: Any, folder: str) -> None:
    words = "--train lora --tokens 1024 --gpu RTX-4090 --lora-rank 8 --json"
    facts = json.loads(planned(capsys, folder, words))
    assert facts["memory_bytes"] == 23 * GIB and facts["settings"]["lora_r"] == 8


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--train full", "--gpu-memory: expected a size such as 24GiB, or --gpu: this"),
        ("--train full --longest 6", "--longest: expected at most --tokens = 5 (a micro-batch"),
        ("--train full --reserved 1GiB", "--reserved: not allowed with --train"),
        ("--train full --gpu H200 --gpu-memory 8GiB", "--gpu: not allowed with --gpu-memory"),
        ("--train full --device cpu", "--device: expected cuda with --train"),
        ("--train full --gpu H1000", "--gpu: expected one of H100 SXM"),
        ("--train full --lora-rank 4", "--lora-rank: expected only with --train lora or qlora"),
        ("--train lora --engine server --engine-sleeps", "--engine-sleeps: expected only with"),
        ("--engine colocate", "--engine: expected only with --train"),
        ("--train lora --engine colocate --engine-share 2", "--engine-share: expected a number"),
        ("--train most", "--train: invalid choice: 'most'"),
    ],
)
def test_errors_name_the_argument(capsys: Any, folder: str, words: str, expected: str) -> None:
    assert expected in error(capsys, "plan", "--model", folder, "--tokens", "5", *words.split())


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "qwen3", "num_hidden_layers": 0}, "expected layers that can be checkpoint"),
        ({"model_type": "qwen3", "hidden_size": -64}, "expected hidden_size > 0"),
        ({"model_type": "qwen3", "vocab_size": 0}, "expected vocab_size > 0"),
        (RecurrentGemmaConfig().to_dict(), "expected attention layers"),
        (None, "expected a model with --train"),
    ],
)
def test_what_is_no_model_to_train(
    capsys: Any, tmp_path: Any, config: dict[str, Any] | None, expected: str
) -> None:
    words = ["plan", "--tokens", "5", "--train", "lora"]
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
        words += ["--model", str(tmp_path), "--gpu-memory", "8GiB"]
    assert f"--model: {expected}" in error(capsys, *words)
