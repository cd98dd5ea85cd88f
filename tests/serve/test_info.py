"""What can be asked beside answers."""

from __future__ import annotations

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from serve.fakes import FakeService
from serve.serving import serving


def test_models(client, served):
    (model,) = client.models.list()
    assert (model.id, model.created, model.owned_by) == ("fake", 1_700_000_000, "caravan")
    assert client.models.retrieve("fake") == model
    served.service.model_name = "org/name"
    assert client.models.retrieve("org/name").id == "org/name"


@pytest.mark.parametrize("path", ["/models", "/health"])
def test_the_prefix_may_be_left_out(path, served):
    assert served.get(path).json() == served.get(f"/v1{path}").json()


def test_answers_without_the_prefix(served):
    assert served.post("/completions", {"prompt": "a"}).json()["choices"][0]["text"] == "A"
    chat = served.post("/chat/completions", {"messages": [{"role": "user", "content": "a"}]})
    assert chat.json()["choices"][0]["message"]["content"] == "USER:A\n"
    assert len(served.post("/embeddings", {"input": "a"}).json()["data"]) == 1


def test_properties(served):
    found = served.get("/props").json()
    assert found["default_generation_settings"]["n_ctx"] == 512
    assert found["default_generation_settings"]["params"]["temperature"] == 0.8
    assert (found["total_slots"], found["model_alias"], found["chat"]) == (4, "fake", True)
    assert found["chat_template"] == served.service.template.source
    served.service.template = None
    assert served.get("/props").json()["chat_template"] == ""


@pytest.mark.parametrize("path", ["/health", "/v1/health"])
def test_health_without_a_body(path, served):
    reply = served.http.head(path)
    assert (reply.status_code, reply.content) == (200, b"")


def test_slots(served):
    batcher = served.service.batcher
    batcher.hold()
    assert [slot["is_processing"] for slot in served.get("/slots").json()] == [False] * 4


def test_tokens(served):
    text = "aä"
    tokens = list(text.encode())
    assert served.post("/tokenize", {"content": text}).json() == {"tokens": tokens}
    added = served.post("/tokenize", {"content": text, "add_special": True}).json()
    assert added == {"tokens": [256, *tokens]}
    pieces = served.post("/tokenize", {"content": text, "with_pieces": True}).json()
    assert pieces["tokens"] == [
        {"id": 97, "piece": "a"},
        {"id": 0xC3, "piece": [0xC3]},
        {"id": 0xA4, "piece": [0xA4]},
    ]
    assert served.post("/detokenize", {"tokens": tokens}).json() == {"content": text}
    assert served.post("/detokenize", {"tokens": [-1]}).status_code == 400


def metrics(served) -> dict[str, float]:
    reply = served.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    return {
        sample.name + "".join(f",{key}={value}" for key, value in sample.labels.items()): (
            sample.value
        )
        for family in text_string_to_metric_families(reply.text)
        for sample in family.samples
    }


def test_metrics(served):
    before = metrics(served)
    assert before["caravan_slots"] == 4
    assert before["caravan_slots_busy"] == 0
    served.post("/v1/completions", {"prompt": "abc"})
    served.post("/v1/completions", {"prompt": "abc", "max_tokens": 1})
    served.post("/completions", {"nonsense": 1})
    served.get("/whatever")
    after = metrics(served)
    http = {name: after[name] for name in after if name.startswith("caravan_http_requests_total")}
    assert http == {
        "caravan_http_requests_total,method=POST,route=/completions,status=200": 2,
        "caravan_http_requests_total,method=POST,route=/completions,status=400": 1,
        "caravan_http_requests_total,method=GET,route=other,status=404": 1,
        "caravan_http_requests_total,method=GET,route=/metrics,status=200": 1,
    }
    assert after["caravan_time_to_first_token_seconds_count"] == 2
    assert after["caravan_token_seconds_count"] == 1
    assert after["caravan_token_seconds_sum"] == pytest.approx(0.015)
    assert after["caravan_http_request_seconds_count,route=/completions"] == 3
    assert after["caravan_requests_total,finish=eog"] == 1
    assert after["caravan_requests_total,finish=length"] == 1
    for name in ("steps", "prompt_tokens", "cached_tokens", "generated_tokens", "busy_seconds"):
        assert after[f"caravan_{name}_total"] > 0
    assert after["caravan_requests_queued"] == 0
    assert after["caravan_computing"] == 1


def test_metrics_of_devices():
    class View:
        def snapshot(self):
            memory = {"free": 5, "total": 9, "used": {"weights": 3, "kv": 1}}
            return {
                "devices": [
                    {"name": "RPC0", "state": "there", "busy": [None, 0.25], "memory": memory},
                    {"name": "RPC1", "state": "lost", "busy": [0.5, None], "memory": memory},
                ],
                "losses": {"count": 2},
            }

    service = FakeService()
    service.view = View()
    with serving(service) as served:
        found = metrics(served)
    assert found["caravan_device_there,device=RPC0"] == 1
    assert found["caravan_device_there,device=RPC1"] == 0
    assert found["caravan_device_busy_ratio,device=RPC0"] == 0.25
    assert "caravan_device_busy_ratio,device=RPC1" not in found
    assert found["caravan_device_memory_bytes,device=RPC1,use=weights"] == 3
    assert found["caravan_worker_losses_total"] == 2


def test_the_schema_can_be_read(served):
    found = served.get("/openapi.json").json()
    assert "/v1/chat/completions" in found["paths"]
    assert not any(re.match(r"/chat", path) for path in found["paths"])
