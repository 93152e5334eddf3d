"""The client of a vLLM server, against one that fails in every way."""

from __future__ import annotations

import base64
import io
import json
import re
import threading
import traceback

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from grpo_trainer.common import start, together
from grpo_trainer.vllm import NoServerError, ServerError, VLLMClient
from tests.support.server_contract import ServerContract
from tests.support.vllm_stub import StubServer, choices, slowly

COMPLETE = "/v1/completions"
RESET = "/reset_prefix_cache?reset_running_requests=true"
UPDATE = [
    "/pause?mode=keep", "/collective_rpc", "/reset_encoder_cache", RESET,
    "/update_weight_version", "/resume",
]  # fmt: skip


def weights(value: float):
    shared = torch.full((2, 3), value)
    return lambda: iter([("embed", shared), ("head", shared), ("norm", torch.ones(3)[::2])])


@pytest.fixture
def client(make_client):
    return make_client()


@pytest.fixture(name="weights")
def some_weights():
    return weights(1.0)


class TestStub(ServerContract): ...


def test_the_request_for_completions(make_client, stub):
    prompts = ["Hello", "two words"]
    answer = make_client().generate(prompts, n=2, temperature=0.5, max_tokens=3)
    assert answer == {
        "prompt_ids": [[0], [0, 1]],
        "completion_ids": [[7, 0], [7, 1], [7, 2], [7, 3]],
        "logprobs": [[-0.5, -0.0], [-0.5, -1.0], [-0.5, -2.0], [-0.5, -3.0]],
    }
    body = stub.asked[-1][1]
    assert body["prompt"] == prompts and body["n"] == 2 and body["temperature"] == 0.5
    assert body["return_token_ids"] is True and "structured_outputs" not in body
    assert body["add_special_tokens"] is True


@pytest.mark.parametrize(
    "prompts",
    [
        *("Hello", ["Hello", [1]], [[1], "Hello"], [1, 2], [[1, "a"]], [[True]], [[-1]], None, []),
        [[{"role": "user", "content": "Hello"}]],
    ],
)
def test_prompts_of_another_kind(make_client, stub, prompts):
    message = f"prompts: expected a list of texts or of lists of token ids, got {prompts!r}"
    with pytest.raises(ValueError, match=re.escape(message)):
        make_client().generate(prompts)
    assert COMPLETE not in stub.paths()


def picture(colour: str) -> Image.Image:
    return Image.new("RGB", (4, 2), colour)


def sent_image(url: str) -> Image.Image:
    kind, _, data = url.partition(",")
    assert kind == "data:image/png;base64"
    return Image.open(io.BytesIO(base64.b64decode(data)))


@pytest.mark.parametrize("prompts", [[[1, 2], [3]], ["one two", "one"]])
def test_images_beside_tokens_and_texts(make_client, stub, prompts):
    images = [[picture("red"), "https://example.com/a.png"], None]
    answer = make_client().generate(prompts, images, n=2, seed=3, temperature=0.5, max_tokens=3)
    ids = prompts if prompts[0] == [1, 2] else [[0, 1], [0]]
    assert answer["prompt_ids"] == [[*ids[0], 8, 8], ids[1]]
    assert answer["completion_ids"] == [[7, 0]] * 4 and answer["logprobs"] == [[-0.5, -1.0]] * 4
    bodies = [body for path, body, _ in stub.asked if path == "/inference/v1/generate"]
    # requests of one call come in any order
    second, first = sorted(bodies, key=lambda body: len(body["content_parts"]))
    assert [first["token_ids"], second["token_ids"]] == ids and second["content_parts"] == []
    assert first["content_parts"][1] == {"type": "image_url", "url": "https://example.com/a.png"}
    assert sent_image(first["content_parts"][0]["url"]).size == (4, 2)
    assert first["sampling_params"]["seed"] == 3 and first["sampling_params"]["n"] == 2
    mask = make_client().generate(prompts, images, logprobs=1)["sampling_mask"]
    assert mask == [[[7], [0]]] * 2


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ("one", "1 entries, one per prompt .*, got str"),
        ([1, 2], "1 entries, one per prompt .*, got 2"),
        (["a.png"], "PIL images or URLs of images, got 'a.png'"),
    ],
)
def test_images_that_do_not_fit(make_client, images, message):
    with pytest.raises(ValueError, match=f"images: expected {message}"):
        make_client().generate([[1]], images)


def test_options_of_the_server(make_client, stub):
    options = {"seed": 3, "structured_outputs": {"regex": "a+"}, "ignore_eos": True}
    answer = make_client().generate([[1]], None, 2, 0.5, 3, logprobs=None, **options)
    expected = options | {"n": 2, "temperature": 0.5, "max_tokens": 3}
    assert answer["logprobs"] is None and stub.asked[-1][1].items() >= expected.items()


def test_api_key(make_client, stub, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "other")
    for given, sent in (({}, "Bearer other"), ({"api_key": "secret"}, "Bearer secret")):
        make_client(**given).generate([[1]])
        assert stub.asked[-1][2] == sent


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"generation_kwargs": {"seed": 3}}, "does not know generation_kwargs"),
        ({"logprobs": -1}, "logprobs: expected a number >= 0 or None, got -1"),
        ({"tools": [print], "chat_template": "x"}, "does not know chat_template, tools"),
    ],
)
def test_options_that_the_server_would_ignore(make_client, stub, options, message):
    with pytest.raises(ValueError, match=message):
        make_client().generate([[1]], **options)
    assert COMPLETE not in stub.paths()


BUSY, GONE, OUT = (500, {"error": "busy"}), (502, b"gateway"), (400, {"error": "out of memory"})


@pytest.mark.parametrize(
    ("faults", "tries"),
    [
        ([BUSY, (503, b"")], 3),
        ([GONE] * 3, 4),  # a gateway without its server
        ([slowly(1.0)], 2),
    ],
)
def test_faults_are_retried(make_client, stub, faults, tries):
    stub.script[COMPLETE] = list(faults)
    client = make_client(request_timeout=0.3)
    assert client.generate([[1]])["completion_ids"] == [[7, 0]]
    assert stub.paths().count(COMPLETE) == tries


@pytest.mark.parametrize(
    ("path", "fault", "tries", "message"),
    [
        (COMPLETE, BUSY, 4, "{url}{path}: got 500: .*busy"),
        (COMPLETE, OUT, 1, "{url}{path}: got 400: .*out of memory"),
        (COMPLETE, (503, b"no server"), 4, "got 503: 'no server', 4 times in"),
        (COMPLETE, slowly(0.5), 4, "no answer within 0.3 seconds, 4 times"),
        ("/health", (307, b""), 1, r"/health: got 307: ''. `grpo-train serve --model"),  # TRL's
        ("/openapi.json", (200, {"components": {"schemas": {}}}), 1, r"images .*: vLLM 0\.32 or l"),
        ("/pause?mode=keep", (404, {"detail": "Not Found"}), 1, "grpo-train serve"),
        ("/collective_rpc", (500, {"error": "Repo id"}), 4, "Repo id.* read the folder .*weights"),
        (RESET, (200, {"success": False}), 4, "cache is in use"),
    ],
)
def test_faults_that_last_are_named(make_client, stub, path, fault, tries, message):
    stub.script[path] = [fault] * 99
    calls = {
        COMPLETE: lambda client: client.generate([[1]]),
        "/openapi.json": lambda client: client.generate([[1]], images=[picture("red")]),
    }
    call = calls.get(path, lambda client: client.update_weights(weights(1.0)))
    with pytest.raises(ServerError, match=message.format(url=stub.url, path=path)):
        call(make_client(connection_timeout=0.2, request_timeout=0.3))
    assert stub.paths().count(path) == tries


RIGHT = choices([[1]], 1)[0]


def told(*values, **more):
    return {"logprobs": {"token_logprobs": list(values)} | more}


# answers, or changes of a right choice -> what the error says; test_rollout.py has more of what
# token ids and log-probabilities may not be
IMPOSSIBLE = [
    *((answer, "{url}") for answer in (
        b"<html>proxy error</html>", b'{"choices": [{"index"', [], {"choices": []},
        {"choices": [RIGHT, RIGHT | {"index": 1}]},
    )),
    ({"index": 3}, "index"),
    ({"token_ids": None}, "token_ids"),
    ({"token_ids": [7, 16]}, "expected token ids 0 <= id < 16, got 16"),
    ({"token_ids": [7, 7, 7]}, "expected 1 to 2 tokens, got 3"),
    ({"prompt_token_ids": [1, 1]}, "prompt"),
    ({"logprobs": None}, "log"),
    (told(-1.0), "log"),
    (told(0.5, None), "expected log-probabilities of at most 0, got 0.5"),
    (told(-1.0, -1.0, top_logprobs=[{"token_id:16": -1.0}, {}]), "token ids 0 <= id < 16, got 16"),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "message"), IMPOSSIBLE)
def test_answers_that_cannot_be(make_client, stub, answer, message):
    """They are errors, and are not asked for again."""
    options = {"max_tokens": 2, "logprobs": int("top_logprobs" in str(answer))}
    whole = not isinstance(answer, dict) or "choices" in answer
    stub.script[COMPLETE] = [(200, answer if whole else {"choices": [RIGHT | answer]})]
    client = make_client(vocab_size=16)
    with pytest.raises(ServerError, match=message.format(url=stub.url)):
        client.generate([[1]], **options)
    assert stub.paths().count(COMPLETE) == 1


def test_unknown_logprobs_are_nan(make_client, stub):
    stub.script[COMPLETE] = [(200, {"choices": [RIGHT | told(None, -9999.0)]})]
    [row] = make_client().generate([[1]])["logprobs"]
    assert all(value != value for value in row)


def loaded(tmp_path) -> dict[str, torch.Tensor]:
    """Return what the one file of weights holds."""
    [file] = (tmp_path / "weights").rglob("*.safetensors")
    return load_file(file)


def test_weights_are_loaded_between_pause_and_resume(make_client, stub, tmp_path):
    client = make_client()
    for value in (1.0, 2.0):  # the old ones are gone
        before = len(stub.asked)
        client.update_weights(weights(value))
        assert stub.paths()[before:] == UPDATE
        assert stub.asked[-2][1]["new_version"] == stub.version
        found, expected = loaded(tmp_path), dict(weights(value)())
        assert list(found) == list(expected)
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    client.close()
    assert not list((tmp_path / "weights").iterdir())


FACTORS = {
    f"base_model.model.layers.{i}.{name}_proj.lora_{factor}.weight": torch.full(shape, i + 1.0)
    for i, name in enumerate("qo")
    for factor, shape in (("A", (i + 2, 5)), ("B", (6, i + 2)))
}


def test_weights_come_while_completions_wait_for_the_server(make_client, stub, monkeypatch):
    """It is paused, so none of them ends and makes room."""
    monkeypatch.setattr("grpo_trainer.vllm.client._COMPLETIONS", 2)
    client, resumed, begun = make_client(), threading.Event(), threading.Semaphore(0)
    client.init_communicator("cpu")
    client.update_weights(weights(1.0))

    def answer():
        begun.release()
        return None if resumed.wait(20) else (400, {})

    def resume():
        resumed.set()

    stub.script |= {"/inference/v1/generate": [answer] * 6, "/resume": [resume]}
    fields = {"n": 1, "max_tokens": 2, "logprobs": 0}
    asked = [client.complete([[1]], [[]], fields, in_flight=True) for _ in range(6)]
    work = start([together(asked)])
    assert all(begun.acquire(timeout=20) for _ in range(2))
    client.update_weights(weights(2.0))
    [answers] = work.result(20)
    assert [one.token_ids for _, one in answers] == [[[7, 0]]] * 6


def test_an_adapter_is_a_model_of_its_own(make_client, stub, tmp_path):
    """Of another name for each update, which completions are asked of."""
    client, load = make_client(), "/v1/load_lora_adapter"
    stub.script[load] = [(200, b"Success: LoRA adapter added")] * 2
    client.update_weights(weights(1.0))
    names = []
    for drops in ([], ["/v1/unload_lora_adapter"]):
        before = len(stub.asked)
        client.update_weights(lambda: iter(FACTORS.items()), adapter=True)
        assert stub.paths()[before:] == [UPDATE[0], *drops, load, *UPDATE[2:]]
        [body] = [body for path, body, _ in stub.asked[before:] if path == load]
        names.append(body["lora_name"])
        assert {name: x.shape for name, x in loaded(tmp_path).items()} == {
            name: x.shape for name, x in FACTORS.items()
        }
        [file] = (tmp_path / "weights").rglob("adapter_config.json")
        assert str(file.parent) == body["lora_path"]
        described = json.loads(file.read_text())
        assert described["r"] == described["lora_alpha"] == 3  # B has the scaling
        client.generate([[1]])
        assert stub.asked[-1][1]["model"] == names[-1] == stub.version
    assert names[0] != names[1]
    assert [body for path, body, _ in stub.asked if "unload" in path] == [{"lora_name": names[0]}]
    client.update_weights(weights(2.0))
    client.generate([[1]])
    assert "model" not in stub.asked[-1][1] and len(stub.loaded) == 2
    stub.script[load] = [(404, {"detail": "Not Found"})]
    with pytest.raises(
        ServerError, match=r"load_lora_adapter: got 404.* read the folder .*weights"
    ):
        client.update_weights(lambda: iter(FACTORS.items()), adapter=True)


def test_a_communicator_that_is_not_there(stub):
    client = VLLMClient(stub.url)
    assert client.generate([[1]])["completion_ids"] == [[7, 0]]  # nobody asks for it
    with pytest.raises(ValueError, match="init_communicator: expected a call before"):
        client.update_weights(weights(1.0))


def test_a_server_that_has_lost_its_weights(make_client, stub):
    """Its own ones would answer, or those of somebody else."""
    client = make_client()
    client.update_weights(weights(1.0))
    stub.version = "default"  # what a new process says
    with pytest.raises(ServerError, match=f"{stub.url}: .* restarted.*resume_from_checkpoint"):
        client.generate([[1]])
    stub.script["/collective_rpc"] = [(400, {})]  # nor has it all of those
    with pytest.raises(ServerError, match="got 400"):
        client.update_weights(weights(2.0))
    with pytest.raises(ServerError, match="expected the weights that were sent last"):
        client.generate([[1]])
    assert COMPLETE not in stub.paths()
    client.update_weights(weights(2.0))
    assert client.generate([[1]])["completion_ids"] == [[7, 0]]


def test_a_server_that_is_gone(make_client, stub, caplog):
    client = make_client()
    stub.close()
    gone = rf"{stub.url}.*no connection.*, 4 times in .*`grpo-train serve --model"
    for ask in (lambda: client.generate([[1]]), lambda: client.update_weights(weights(1.0))):
        with pytest.raises(NoServerError, match=gone):
            ask()
        [warning] = caplog.messages  # of many tries
        assert warning.endswith("; trying again")
        caplog.clear()
    with pytest.raises(ConnectionError, match="no connection.*`grpo-train serve --model") as error:
        make_client(connection_timeout=0.0)
    assert isinstance(error.value, ServerError) and stub.url in str(error.value)


def test_a_server_that_is_not_up_yet(make_client, stub):
    stub.close()
    with pytest.raises(NoServerError, match="no connection.* times in 0.[2-9] seconds"):
        make_client(connection_timeout=0.2)
    started = []
    timer = threading.Timer(0.3, lambda: started.append(StubServer(stub.port)))
    timer.start()
    assert make_client(connection_timeout=30.0).get_world_size() == 1
    timer.join()
    started[0].close()


def test_a_password_in_the_url(stub, caplog):
    url = stub.url.replace("//", "//user:hf_private@")
    client = VLLMClient(url, connection_timeout=5.0)
    stub.script[COMPLETE] = [(500, {"error": "busy"}), (400, {"error": "no"})]
    with pytest.raises(ServerError, match=r"http://\*\*\*@127.0.0.1:.*got 400") as error:
        client.generate([[1]])
    assert {key for _, _, key in stub.asked} == {"Basic dXNlcjpoZl9wcml2YXRl"}
    stub.close()
    with pytest.raises(ServerError, match="no connection") as gone:
        VLLMClient(url)
    assert "got 500" in caplog.text and "hf_private" not in caplog.text
    for raised in (error.value, gone.value):
        assert "hf_private" not in "".join(traceback.format_exception(raised))
    with pytest.raises(ValueError, match=r"api_key: expected none .*, http://\*\*\*@127.0.0.1:"):
        VLLMClient(url, api_key="secret")
    with pytest.raises(ValueError, match="base_url: expected http://host:port, got '127.0.0.1:1'"):
        VLLMClient("127.0.0.1:1")
    with pytest.raises(ValueError, match=r"url: .* without a query, got 'http://.*:1\?\*\*\*'"):
        VLLMClient("http://127.0.0.1:1?key=secret", api_key="secret")
    with pytest.raises(ValueError, match="host: expected http://host:port, got .*::g"):
        VLLMClient(host="::g")


def test_addresses():
    with pytest.raises(ServerError, match=r"http://\[::1\]:1/health"):
        VLLMClient(host="::1", server_port=1)
    for host in ("127.0.0.1", "0.0.0.0"):
        with pytest.raises(ServerError, match="http://127.0.0.1:1/health"):
            VLLMClient(host=host, server_port=1)
