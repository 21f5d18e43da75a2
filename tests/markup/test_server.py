"""The markup on a real server with a tiny model: the official client, usage, explain, refusals."""

from __future__ import annotations

import argparse
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.http.server import Server
from tests.markup.conftest import DELIMITER, TOKEN_CROSS, TOKEN_PLUS
from vllm_spans.markup import explain_cli

DOCUMENTS = [
    {"title": f"Title {number}", "text": f"Document {number} says so. " * 12} for number in range(3)
]
QUESTION = [{"role": "user", "content": "Which one?"}]
PART = {"type": "text", "text": "a document of some words", "span": True}


@pytest.fixture(scope="module")
def server(tiny_model: str) -> Iterator[str]:
    """A server with spans in every form; its address."""
    started = Server(
        tiny_model,
        env={
            "VLLM_V1_SPANS_DELIMITER": DELIMITER,
            "VLLM_V1_SPANS_TOKEN_PLUS": str(TOKEN_PLUS),
            "VLLM_V1_SPANS_TOKEN_CROSS": str(TOKEN_CROSS),
        },
    )
    yield started.url
    started.close()


@pytest.fixture(scope="module")
def client(server: str) -> Iterator[Any]:
    import openai

    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as made:
        yield made


def post(url: str, body: Any) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def explained(server: str, **body: Any) -> dict[str, Any]:
    status, answer = post(f"{server}/v1/spans/explain", {"model": "tiny", **body})
    assert status == 200, answer
    return dict(answer)


def test_usage_reports_pads_in_responses_and_streams(server: str, client: Any) -> None:
    body = {"model": "tiny", "messages": QUESTION, "max_tokens": 4, "temperature": 0.7, "n": 2}
    answer = client.chat.completions.create(**body, extra_body={"documents": DOCUMENTS})
    explanation = explained(server, messages=QUESTION, documents=DOCUMENTS)
    assert len(answer.choices) == 2
    assert answer.usage.prompt_tokens == explanation["prompt_tokens"]
    assert answer.usage.span_pad_tokens == explanation["span_pad_tokens"] > 0
    assert explanation["spans"] == 3
    chunks = list(
        client.chat.completions.create(
            **body,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"documents": DOCUMENTS},
        )
    )
    assert chunks[-1].usage.prompt_tokens == answer.usage.prompt_tokens
    assert chunks[-1].usage.span_pad_tokens == answer.usage.span_pad_tokens


def test_completions_report_pads_too(client: Any) -> None:
    prompt = f"rules{DELIMITER}{DOCUMENTS[0]['text']}{DELIMITER}question"
    answer = client.completions.create(model="tiny", prompt=[prompt, "plain"], max_tokens=2)
    assert answer.usage.span_pad_tokens > 0
    chunks = list(
        client.completions.create(
            model="tiny",
            prompt=prompt,
            max_tokens=2,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[-1].usage.span_pad_tokens == answer.usage.span_pad_tokens


def test_requests_without_markup_have_no_such_field(client: Any) -> None:
    answer = client.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=2)
    assert not hasattr(answer.usage, "span_pad_tokens")


def test_echo_gives_the_text_without_pads(client: Any) -> None:
    prompt = f"rules{DELIMITER}{DOCUMENTS[0]['text']}{DELIMITER}question"
    answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=1, echo=True)
    assert answer.choices[0].text.startswith(prompt.replace(DELIMITER, ""))


def test_a_batch_of_chats(server: str) -> None:
    body = {
        "model": "tiny",
        "messages": [[{"role": "user", "content": [PART]}], QUESTION],
        "max_tokens": 2,
    }
    status, answer = post(f"{server}/v1/chat/completions/batch", body)
    assert status == 200, answer
    assert answer["usage"]["span_pad_tokens"] > 0


def test_explain_shows_what_is_cached(server: str, client: Any) -> None:
    documents = [{"text": f"Never seen before, part {number}. " * 12} for number in range(2)]
    before = explained(server, messages=QUESTION, documents=documents)
    spans = [piece for piece in before["pieces"] if piece["kind"] == "plus"]
    assert [piece["cached_tokens"] for piece in spans] == [0, 0]
    assert before["prompt_tokens"] == before["pieces"][-1]["end"]
    client.chat.completions.create(
        model="tiny", messages=QUESTION, max_tokens=1, extra_body={"documents": documents}
    )
    after = explained(server, messages=QUESTION, documents=documents[::-1])
    for piece in after["pieces"]:
        if piece["kind"] == "plus":
            assert piece["cached_tokens"] == piece["tokens"] - after["gap_length"]


def test_explain_takes_completions_and_plain_requests(server: str) -> None:
    tokens = [TOKEN_PLUS] + [9] * 31 + [TOKEN_CROSS] + [9] * 7
    answer = explained(server, prompt=tokens, spans={"gap_policy": "none"})
    assert [piece["kind"] for piece in answer["pieces"]] == ["plus", "cross"]
    assert answer["gap_policy"] == "none"
    plain = explained(server, prompt="plain text")
    assert [piece["kind"] for piece in plain["pieces"]] == ["prefix"]
    assert plain["pieces"][0]["text"] == "plain text"


def test_explain_on_the_command_line(
    server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    explain_cli.add_arguments(parser)
    body = tmp_path / "body.json"
    body.write_text(json.dumps({"messages": QUESTION, "documents": DOCUMENTS}))
    assert explain_cli.run(parser.parse_args([str(body), "--url", f"{server}/v1"])) == 0
    output = capsys.readouterr().out
    assert "3 spans" in output
    assert output.count("plus") == 3
    assert explain_cli.run(parser.parse_args([str(body), "--url", server, "--json"])) == 0
    assert json.loads(capsys.readouterr().out)["spans"] == 3
    body.write_text(json.dumps({"messages": QUESTION, "spans": {"what": 1}}))
    assert explain_cli.run(parser.parse_args([str(body), "--url", server])) == 1
    assert "spans.what" in capsys.readouterr().err


def test_explain_without_a_server_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    explain_cli.add_arguments(parser)
    body = tmp_path / "body.json"
    body.write_text("{}")
    assert explain_cli.run(parser.parse_args([str(body), "--url", "http://127.0.0.1:9"])) == 1
    assert "vllm-spans serve" in capsys.readouterr().err
    assert explain_cli.run(parser.parse_args([str(tmp_path / "none")])) == 1
    body.write_text("{")
    assert explain_cli.run(parser.parse_args([str(body)])) == 1


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("chat/completions", {"messages": QUESTION, "spans": {"gap": 1}}, "spans.gap"),
        (
            "chat/completions",
            {"messages": [{"role": "assistant", "content": [PART]}], "stream": True},
            "messages[0].content[0].span",
        ),
        (
            "completions",
            {"prompt": [9] * 64, "vllm_xargs": {"span_starts": [9]}},
            "vllm_xargs.span_starts",
        ),
        (
            "completions",
            {"prompt": [9] * 64, "vllm_xargs": {"span_starts": [32]}, "prompt_logprobs": 1},
            "prompt_logprobs",
        ),
        (
            "messages",
            {"messages": [{"role": "user", "content": [PART]}], "max_tokens": 2},
            "messages[0].content[0].span",
        ),
        (
            "responses",
            {"input": [{"role": "user", "content": [{**PART, "type": "input_text"}]}]},
            "input[0].content[0].span",
        ),
        ("responses", {"input": f"{DELIMITER}a{DELIMITER}b"}, "input"),
        ("spans/explain", {"messages": QUESTION, "spans": []}, "spans"),
        ("spans/explain", {"prompt": 5}, "prompt"),
        ("spans/explain", {}, "messages"),
        ("spans/explain", {"prompt": ["a", "b"]}, "prompt"),
        ("spans/explain", b"{", None),
    ],
)
def test_refusals_name_the_part_at_fault(
    server: str, path: str, body: Any, param: str | None
) -> None:
    if isinstance(body, dict):
        body = {"model": "tiny", **body}
    status, answer = post(f"{server}/v1/{path}", body)
    assert status == 400, answer
    assert answer["error"]["param"] == param
    assert answer["error"]["type"] == "BadRequestError"
    assert answer["error"]["message"]
