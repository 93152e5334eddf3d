"""What a client may rely on: true of the stand-in for a vLLM server, and of a real one."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_trainer.engines import WeightSource
from grpo_trainer.vllm import ServerError, VLLMClient
from tests.support.vllm_stub import CONFIG, KNOWN

PROMPTS = [[3, 4, 5], [7, 8]]


class ServerContract:
    """Tests of ``client``, which can send ``weights``, to a server as small as can be.

    A subclass is collected where these fixtures are.
    """

    def test_what_the_server_says_of_itself(self, client: VLLMClient) -> None:
        assert client.get_world_size() == 1
        said = client.get_server_info()
        for name, part in CONFIG.items():
            own = said[name]
            assert own == part or {key: own[key] for key in part} == part, name

    def test_its_schemas_name_fields(self, client: VLLMClient) -> None:
        schemas = client.server.ask("GET", "/openapi.json")["components"]["schemas"]
        assert set(KNOWN) <= schemas["CompletionRequest"]["properties"].keys()
        assert "content_parts" in schemas["GenerateRequest"]["properties"]
        with pytest.raises(ValueError, match="does not know sead"):
            client.generate(PROMPTS, sead=5)

    def test_token_ids_and_texts(self, client: VLLMClient) -> None:
        """The server encodes texts; all answers are in the order of prompts."""
        settings: dict[str, Any] = {"n": 2, "max_tokens": 3, "seed": 5}
        answer = client.generate(PROMPTS, **settings)
        assert answer["prompt_ids"] == PROMPTS and answer.keys() == {
            "prompt_ids", "completion_ids", "logprobs",
        }  # fmt: skip
        assert len(answer["completion_ids"]) == len(answer["logprobs"]) == 4
        for ids, values in zip(answer["completion_ids"], answer["logprobs"], strict=True):
            assert 1 <= len(ids) == len(values) <= 3 and max(values) <= 0
        answer = client.generate(["12=", "3="], **settings)
        assert answer == client.generate(answer["prompt_ids"], **settings)
        assert client.generate(PROMPTS, logprobs=None)["logprobs"] is None

    def test_weights_that_others_replaced(
        self, client: VLLMClient, weights: WeightSource, tmp_path: Any
    ) -> None:
        client.update_weights(weights)
        client.generate(PROMPTS)
        other = VLLMClient(client.server.url)
        other.init_communicator("cpu", folder=tmp_path / "others")
        other.update_weights(weights)
        with pytest.raises(ServerError, match="expected the weights that were sent last"):
            client.generate(PROMPTS)
        other.close()
        client.update_weights(weights)
        client.generate(PROMPTS)
