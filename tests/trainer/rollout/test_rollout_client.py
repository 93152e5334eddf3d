"""The client of a vLLM server, against one that fails in every way."""

from __future__ import annotations

import re
import threading
import time
import traceback

import pytest
import torch
from safetensors.torch import load_file
from vllm_stub import StubServer, choices, slowly

from grpo_trainer.rollout import ServerError, http
from grpo_trainer.rollout.vllm_client import VLLMClient
from grpo_trainer.rollout.weight_files import FileTransfer

COMPLETE = "/v1/completions"
UPDATE = [
    "/pause?mode=keep",
    "/update_weight_version",
    "/collective_rpc",
    "/reset_prefix_cache",
    "/weight_info",
    "/update_weight_version",
    "/resume",
]


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(http, "_FIRST_DELAY", 0.02)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)


@pytest.fixture
def stub():
    server = StubServer()
    yield server
    server.close()


@pytest.fixture
def make_client(stub, tmp_path):
    def make(**changes) -> VLLMClient:
        settings = {"connection_timeout": 5.0, "request_timeout": 5.0}
        return VLLMClient(
            stub.url,
            transfer=lambda client: FileTransfer(tmp_path / "weights", 5.0),
            **(settings | changes),
        )

    return make


def weights(value: float):
    shared = torch.full((2, 3), value)
    return lambda: iter([("embed", shared), ("head", shared), ("norm", torch.ones(3)[::2])])


def test_token_ids_in_and_out(make_client, stub):
    answer = make_client().generate([[1, 2], [3]], n=2, temperature=0.5, max_tokens=3)
    assert answer == {
        "prompt_ids": [[1, 2], [3]],
        "completion_ids": [[7, 0], [7, 1], [7, 2], [7, 3]],
        "logprobs": [[-0.5, -0.0], [-0.5, -1.0], [-0.5, -2.0], [-0.5, -3.0]],
    }
    body = stub.asked[-1][1]
    assert body["prompt"] == [[1, 2], [3]] and body["n"] == 2 and body["temperature"] == 0.5
    assert body["return_token_ids"] is True and "structured_outputs" not in body


def test_texts_are_encoded_by_the_server(make_client, stub):
    answer = make_client().generate(["Hello", "two words"], n=2)
    assert answer["prompt_ids"] == [[0], [0, 1]]
    assert answer["completion_ids"] == [[7, 0], [7, 1], [7, 2], [7, 3]]
    body = stub.asked[-1][1]
    assert body["prompt"] == ["Hello", "two words"] and body["add_special_tokens"] is True


@pytest.mark.parametrize(
    "prompts", ["Hello", ["Hello", [1]], [[1], "Hello"], [1, 2], [[1, "a"]], [[True]], [[-1]], None]
)
def test_prompts_of_another_kind(make_client, stub, prompts):
    message = "prompts: expected a list of texts, or a list of lists of token ids, got "
    with pytest.raises(ValueError, match=re.escape(message + repr(prompts))):
        make_client().generate(prompts)
    assert COMPLETE not in stub.paths()


def test_without_logprobs_and_with_a_regex(make_client, stub):
    answer = make_client().generate([[1]], logprobs=None, structured_outputs_regex="a+")
    assert answer["logprobs"] is None
    assert stub.asked[-1][1]["structured_outputs"] == {"regex": "a+"}


def test_api_key(make_client, stub, monkeypatch):
    make_client().generate([[1]])
    assert {key for _, _, key in stub.asked} == {None}
    make_client(api_key="secret").generate([[1]])
    assert stub.asked[-1][2] == "Bearer secret"
    monkeypatch.setenv("VLLM_API_KEY", "other")
    make_client().generate([[1]])
    assert stub.asked[-1][2] == "Bearer other"


def test_names_that_the_server_would_ignore(make_client, stub):
    client = make_client()
    client.generate([[1]], generation_kwargs={"seed": 3})
    assert stub.asked[-1][1]["seed"] == 3
    with pytest.raises(ValueError, match="does not know sead"):
        client.generate([[1]], generation_kwargs={"sead": 3})
    with pytest.raises(ValueError, match="temperature have arguments of their own"):
        client.generate([[1]], generation_kwargs={"temperature": 3})
    with pytest.raises(ValueError, match="logprobs: expected a number >= 0 or None, got -1"):
        client.generate([[1]], logprobs=-1)


def test_faults_are_retried(make_client, stub):
    stub.script[COMPLETE] = [(500, {"error": "busy"}), (503, b"")]
    assert make_client().generate([[1]])["completion_ids"] == [[7, 0]]
    assert stub.paths().count(COMPLETE) == 3


@pytest.mark.parametrize(("status", "tries"), [(500, 4), (400, 1)])
def test_faults_that_last_and_refusals_name_server_and_answer(make_client, stub, status, tries):
    stub.script[COMPLETE] = [(status, {"error": "out of memory"})] * 9
    with pytest.raises(ServerError, match=rf"{stub.url}{COMPLETE}: got {status}: .*out of memory"):
        make_client().generate([[1]])
    assert stub.paths().count(COMPLETE) == tries


def test_a_gateway_without_its_server_is_waited_for(make_client, stub):
    stub.script[COMPLETE] = [(502, b"bad gateway")] * 5
    assert make_client().generate([[1]])["completion_ids"] == [[7, 0]]
    stub.script[COMPLETE] = [(503, b"no server")] * 99
    with pytest.raises(ServerError, match="got 503: 'no server', for 0.2 seconds"):
        make_client(connection_timeout=0.2).generate([[1]])


def test_slow_answers(make_client, stub):
    stub.script[COMPLETE] = [slowly(1.0)]
    client = make_client(request_timeout=0.2)
    assert client.generate([[1]])["completion_ids"] == [[7, 0]]
    stub.script[COMPLETE] = [slowly(0.3)] * 9
    with pytest.raises(ServerError, match=r"no answer within 0.1 seconds, 4 times"):
        make_client(request_timeout=0.1).generate([[1]])


RIGHT = choices([[1]], 1)[0]


@pytest.mark.parametrize(
    "answer",
    [
        b"<html>proxy error</html>",
        b'{"choices": [{"index"',
        [],
        {},
        {"choices": []},
        {"choices": [RIGHT, RIGHT | {"index": 1}]},
        {"choices": [RIGHT | {"index": 3}]},
        {"choices": [RIGHT | {"token_ids": None}]},
        {"choices": [RIGHT | {"token_ids": []}]},
        {"choices": [RIGHT | {"token_ids": ["7", "8"]}]},
        {"choices": [RIGHT | {"prompt_token_ids": [1, 1]}]},
        {"choices": [RIGHT | {"logprobs": None}]},
        {"choices": [RIGHT | {"logprobs": {"token_logprobs": [-1.0]}}]},
        {"choices": [RIGHT | {"logprobs": {"token_logprobs": [-1.0, "x"]}}]},
    ],
)
def test_malformed_answers(make_client, stub, answer):
    stub.script[COMPLETE] = [(200, answer)]
    with pytest.raises(ServerError, match=stub.url):
        make_client().generate([[1]])
    assert stub.paths().count(COMPLETE) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": [7, -1]}, "token id -1, expected 0 <= id < 16"),
        ({"token_ids": [7, 16]}, "token id 16, expected 0 <= id < 16"),
        ({"token_ids": [7, True]}, "token id True"),
        ({"token_ids": [7, 7, 7]}, "3 tokens, expected 1 to max_tokens = 2"),
        ({"logprobs": {"token_logprobs": [0.5, None]}}, "log-probability 0.5, expected at most 0"),
        ({"logprobs": {"token_logprobs": [float("inf"), -1.0]}}, "log-probability inf"),
        (
            {"logprobs": RIGHT["logprobs"] | {"top_logprobs": [{"token_id:16": -1.0}, {}]}},
            "token id 16",
        ),
    ],
)
def test_values_that_cannot_be(make_client, stub, changes, message):
    stub.script[COMPLETE] = [(200, {"choices": [RIGHT | changes]})]
    logprobs = len(changes.get("logprobs", {})) - 1 if "logprobs" in changes else 0
    with pytest.raises(ServerError, match=message):
        make_client(vocab_size=16).generate([[1]], max_tokens=2, logprobs=logprobs)


def test_unknown_logprobs_are_nan(make_client, stub):
    values = {"token_logprobs": [None, -9999.0]}
    stub.script[COMPLETE] = [(200, {"choices": [RIGHT | {"logprobs": values}]})]
    [row] = make_client().generate([[1]])["logprobs"]
    assert all(value != value for value in row)


def test_weights_are_loaded_between_pause_and_resume(make_client, stub, tmp_path):
    client = make_client()
    before = len(stub.asked)
    client.update_weights(weights(1.0))
    assert stub.paths()[before:] == UPDATE
    assert stub.asked[before][1] == {}  # JSON: the server refuses other kinds
    assert stub.asked[-2][1]["new_version"] == stub.version
    [file] = (tmp_path / "weights").rglob("*.safetensors")
    assert str(file).startswith(stub.loaded[0])
    loaded = load_file(file)
    assert list(loaded) == ["embed", "head", "norm"]
    assert loaded["head"].eq(1).all() and loaded["norm"].shape == (2,)
    client.update_weights(weights(2.0))
    [file] = (tmp_path / "weights").rglob("*.safetensors")  # the old ones are gone
    assert load_file(file)["embed"].eq(2).all()
    client.close()
    assert not list((tmp_path / "weights").iterdir())


def test_large_weights_are_cut_into_files(make_client, tmp_path, monkeypatch):
    monkeypatch.setattr("grpo_trainer.rollout.weight_files._FILE_BYTES", 30)
    client = make_client()
    client.update_weights(lambda: ((str(i), torch.full((4,), float(i))) for i in range(5)))
    files = sorted((tmp_path / "weights").rglob("*.safetensors"))
    assert [list(load_file(file)) for file in files] == [["0", "1"], ["2", "3"], ["4"]]


def test_a_server_without_weight_updates(make_client, stub):
    stub.script["/pause?mode=keep"] = [(404, {"detail": "Not Found"})]
    with pytest.raises(ServerError, match="grpo-train serve"):
        make_client().update_weights(weights(1.0))


def test_a_folder_that_the_server_does_not_see(make_client, stub):
    stub.script["/collective_rpc"] = [(500, {"error": "Repo id must be"})] * 9
    with pytest.raises(ServerError, match=r"Repo id .*does the server see the folder .*weights"):
        make_client().update_weights(weights(1.0))


def test_a_running_request_holds_the_cache(make_client, stub):
    stub.script["/reset_prefix_cache"] = [(200, {"success": False})] * 9
    with pytest.raises(ServerError, match="requests are running"):
        make_client().reset_prefix_cache()


def test_a_restarted_server_gets_the_weights_first(make_client, stub):
    client = make_client()
    client.update_weights(weights(1.0))
    stub.version = "default"  # what a new process says
    before = len(stub.asked)
    client.generate([[1]])
    assert stub.paths()[before:] == ["/weight_info", *UPDATE, COMPLETE]
    assert stub.loaded == stub.loaded[:1] * 2


def test_a_server_that_dies_while_it_answers(make_client, stub):
    def die():
        stub.version = "default"
        return 500, {"error": "EngineCore encountered an issue"}

    client = make_client()
    client.update_weights(weights(1.0))
    stub.script[COMPLETE] = [die]
    before = len(stub.asked)
    assert client.generate([[1]])["completion_ids"] == [[7, 0]]
    again = ["/weight_info", *UPDATE, COMPLETE]
    assert stub.paths()[before:] == ["/weight_info", COMPLETE, *again]


def test_a_server_that_dies_while_it_loads(make_client, stub):
    def die():
        stub.version = "default"
        return 200, {}

    stub.script["/collective_rpc"] = [die]
    client = make_client()
    client.update_weights(weights(1.0))
    assert stub.paths().count("/collective_rpc") == 2
    assert not stub.version.endswith("-loading")


def test_a_server_that_is_gone_for_a_while(make_client, stub):
    client = make_client()
    client.update_weights(weights(1.0))
    stub.close()
    started = []

    def restart():
        time.sleep(0.3)
        started.append(StubServer(stub.port))

    thread = threading.Thread(target=restart)
    thread.start()
    assert client.generate([[1]])["completion_ids"] == [[7, 0]]
    thread.join()
    assert started[0].loaded == stub.loaded
    started[0].close()


def test_a_server_that_stays_away(make_client, stub):
    client = make_client(connection_timeout=0.2)
    stub.close()
    with pytest.raises(ServerError, match=rf"{stub.url}.*no connection.*for 0.2 seconds"):
        client.generate([[1]])
    assert not client.health()
    with pytest.raises(ServerError, match="no connection"):
        make_client(connection_timeout=0.0)


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
    with pytest.raises(ValueError, match="url: expected http://host:port, got .*::g"):
        VLLMClient(host="::g")


def test_addresses():
    with pytest.raises(ServerError, match=r"http://\[::1\]:1/health"):
        VLLMClient(host="::1", server_port=1)
    with pytest.raises(ServerError, match="http://127.0.0.1:1/health"):
        VLLMClient(server_port=1)
