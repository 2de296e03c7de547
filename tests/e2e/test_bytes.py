"""Doors and streams with a target whose tokens are bytes: its text breaks characters at every second token.

One server of its own: eight drafts a round of a draft that is always right, so that chunks are as long as they can be.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import openai
import pytest

from sglang_psd.server_process import ServerProcess
from tests.e2e.conftest import START_TIMEOUT_S
from tests.e2e.flags import ENVIRONMENT, SERVE
from tests.e2e.test_doors import generate, server_info

pytestmark = pytest.mark.e2e

DEAF: dict[str, Any] = {"extra_body": {"ignore_eos": True}}
PROMPTS = ["Tell me something.", "äöü €", "日本語のテキスト", "x", "emoji 🙂🙃 here", "The quick brown fox"]


@pytest.fixture(scope="module")
def client(bytes_server: ServerProcess) -> openai.OpenAI:
    """OpenAI's own client."""
    return openai.OpenAI(base_url=bytes_server.url + "/v1", api_key="none", max_retries=0)


def stream_of(url: str, body: dict[str, Any], path: str = "/generate") -> list[dict[str, Any]]:
    """Events of a streamed answer."""
    request = urllib.request.Request(
        url + path, json.dumps({**body, "stream": True}).encode(), {"Content-Type": "application/json"}
    )
    events = []
    with urllib.request.urlopen(request, timeout=120) as answer:
        for line in answer:
            if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                events.append(json.loads(line[6:]))
    return events


# --- streams -------------------------------------------------------------------------------------

ENDS: list[dict[str, Any]] = [
    {"max_new_tokens": 41},
    {"max_new_tokens": 40, "stop": ["a", "b", "c", "d", "e", "x4"]},
    {"max_new_tokens": 40, "stop_regex": ["[a-z]$"]},
    {"max_new_tokens": 40, "stop": ["e", "o", "i"], "no_stop_trim": True},
    {"max_new_tokens": 40, "stop_token_ids": list(range(40, 80)), "skip_special_tokens": False},
    {"max_new_tokens": 40, "regex": "(ä|ö|🙂|日本){9}"},
]


@pytest.mark.parametrize("end", ENDS, ids=lambda end: "-".join([*end][1:]) or "length")
def test_streamed_equals_whole(bytes_server: ServerProcess, end: dict) -> None:
    """Text, ids, log probabilities, finish reason and usage of a stream are those of the whole answer."""
    for prompt in PROMPTS:
        body = {"text": prompt, "sampling_params": {"temperature": 0, **end}, "return_logprob": True}
        whole = generate(bytes_server.url, **body)
        assert isinstance(whole, dict)
        events = stream_of(bytes_server.url, body)
        last = events[-1]
        assert last["text"] == whole["text"] and last["output_ids"] == whole["output_ids"]
        reasons = [event["meta_info"]["finish_reason"] for event in events]
        assert reasons[-1] == whole["meta_info"]["finish_reason"] and not any(reasons[:-1])
        info = last["meta_info"]
        assert info["completion_tokens"] == len(whole["output_ids"]) == whole["meta_info"]["completion_tokens"]
        found, expected = (
            [value for value, *_ in meta["output_token_logprobs"]] for meta in (info, whole["meta_info"])
        )
        assert found == pytest.approx(expected, abs=1e-4) and len(found) == len(whole["output_ids"])
        texts = [event["text"] for event in events]
        assert all(later.startswith(earlier.rstrip("\ufffd")) for earlier, later in itertools.pairwise(texts))


def test_completions_stream(client: openai.OpenAI) -> None:
    """Joined deltas are the whole text, one finish reason, usage in the last chunk."""
    for prompt in PROMPTS:
        request: dict[str, Any] = {"model": "x", "prompt": prompt, "temperature": 0, "max_tokens": 41, **DEAF}
        whole = client.completions.create(**request)
        text, reasons, usage = "", [], []
        for chunk in client.completions.create(stream=True, stream_options={"include_usage": True}, **request):
            text += "".join(choice.text for choice in chunk.choices)
            reasons += [choice.finish_reason for choice in chunk.choices if choice.finish_reason]
            usage += [chunk.usage] if chunk.usage else []
        assert text == whole.choices[0].text
        assert reasons == [whole.choices[0].finish_reason] == ["length"]
        assert len(usage) == 1 and usage[0].completion_tokens == whole.usage.completion_tokens == 41


THINKING = r"[a-z ]{9}</think>\n?[A-Z]{7}"
CALLS = r'ok<tool_call>\n\{"name": "f", "arguments": \{"a": [0-9]{3}\}\}\n</tool_call>'
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    }
]


def chat(client: openai.OpenAI, **more: Any) -> tuple[Any, dict[str, str], list[str], Any]:
    """The whole message; and of its stream the joined parts, finish reasons and usage."""
    request: dict[str, Any] = {
        "model": "x",
        "messages": [{"role": "user", "content": "Hi."}],
        "temperature": 0,
        "max_tokens": 120,
        **more,
    }
    whole = client.chat.completions.create(**request)
    parts: dict[str, str] = {"content": "", "reasoning": "", "arguments": "", "name": ""}
    reasons, usage = [], None
    for chunk in client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **request):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            parts["content"] += choice.delta.content or ""
            parts["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or ():
                parts["name"] += call.function.name or ""
                parts["arguments"] += call.function.arguments or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
    return whole, parts, reasons, usage


def test_chat_stream(client: openai.OpenAI) -> None:
    """Plain text, with log probabilities."""
    whole, parts, reasons, usage = chat(client, logprobs=True, top_logprobs=2)
    message = whole.choices[0]
    assert parts["content"] + parts["reasoning"] == (message.message.content or "") + (
        getattr(message.message, "reasoning_content", None) or ""
    )
    assert reasons == [message.finish_reason] and usage.completion_tokens == whole.usage.completion_tokens
    assert len(message.logprobs.content) == whole.usage.completion_tokens
    # SGLang keys them by their text, and many bytes are the same broken character.
    assert all(1 <= len(entry.top_logprobs) <= 2 for entry in message.logprobs.content)


def test_each_token_of_a_streamed_chunk_has_its_own_alternatives(client: openai.OpenAI) -> None:
    """Log probabilities of a streamed chat are those of the whole message, also behind a chunk's first token."""
    request: dict[str, Any] = {
        "model": "x",
        "messages": [{"role": "user", "content": "Hi."}],
        "temperature": 0,
        "max_tokens": 40,
        "logprobs": True,
        "top_logprobs": 3,
        **DEAF,
    }
    chunks = [
        choice.logprobs.content
        for chunk in client.chat.completions.create(stream=True, **request)
        for choice in chunk.choices
        if choice.logprobs is not None
    ]
    assert max(map(len, chunks)) > 4, "no chunk holds several tokens"
    whole = client.chat.completions.create(**request).choices[0].logprobs.content
    streamed = [token for chunk in chunks for token in chunk]
    assert len(streamed) == len(whole) == 40
    for token, expected in zip(streamed, whole):
        assert token.token == expected.token
        found, wanted = ({one.token: one.logprob for one in entry.top_logprobs} for entry in (token, expected))
        assert found == pytest.approx(wanted, abs=1e-4)


def test_tool_calls_are_parsed_from_chunks_of_many_tokens(client: openai.OpenAI) -> None:
    """A whole tag may arrive in one chunk; nothing of the call is lost or said twice."""
    whole, parts, reasons, _ = chat(
        client,
        tools=TOOLS,
        extra_body={"regex": CALLS, "chat_template_kwargs": {"enable_thinking": False}, "separate_reasoning": False},
    )
    (call,) = whole.choices[0].message.tool_calls
    assert call.function.name == parts["name"] == "f"
    assert json.loads(call.function.arguments) == json.loads(parts["arguments"])
    assert (whole.choices[0].message.content or "").strip() == parts["content"].strip() == "ok"
    assert reasons == ["tool_calls"]


def test_reasoning_is_parsed_from_chunks_of_many_tokens(client: openai.OpenAI) -> None:
    """The end of reasoning stands inside a chunk; both parts are whole, and no more was reasoned than was said."""
    whole, parts, reasons, usage = chat(client, extra_body={"regex": THINKING})
    message = whole.choices[0].message
    assert (message.reasoning_content or "") == parts["reasoning"]
    assert (message.content or "").strip() == parts["content"].strip()
    assert len(reasons) == 1
    for counted in (usage, whole.usage):
        assert 0 <= (counted.reasoning_tokens or 0) <= counted.completion_tokens


# --- several answers -----------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 5])
def test_several_answers(client: openai.OpenAI, n: int) -> None:
    """Sampled ones differ, greedy ones are equal, usage adds up; three such requests at once."""

    async def ask(temperature: float) -> list[Any]:
        many = openai.AsyncOpenAI(base_url=str(client.base_url), api_key="none")
        request: dict[str, Any] = {"model": "x", "max_tokens": 16, "temperature": temperature, "n": n, **DEAF}
        request["logprobs"] = 1
        return list(await asyncio.gather(*(many.completions.create(prompt=p, **request) for p in PROMPTS[:3])))

    for temperature in (0.0, 1.0):
        for answer in asyncio.run(ask(temperature)):
            texts = [choice.text for choice in answer.choices]
            assert len(texts) == n and len(set(texts)) == (1 if temperature == 0 else n)
            assert answer.usage.completion_tokens == 16 * n
            assert all(len(choice.logprobs.token_logprobs) == 16 for choice in answer.choices)


def test_a_lost_client_ends_all_its_answers(bytes_server: ServerProcess, client: openai.OpenAI) -> None:
    """The connection goes while three answers of one request are streamed: the server becomes idle long before their
    limit, and serves on."""
    stream = client.completions.create(
        model="x", prompt="x", max_tokens=450, temperature=1.0, n=3, stream=True, extra_body={"ignore_eos": True}
    )
    for _ in range(5):
        next(iter(stream))
    stream.close()
    psd = server_info(bytes_server.url)["internal_states"][0]["psd"]
    before = psd["rounds"]
    while sum(psd["slot_sizes"]):
        psd = server_info(bytes_server.url)["internal_states"][0]["psd"]
        assert psd["rounds"] < before + 3 * 450
    assert generate(bytes_server.url, text="x", sampling_params={"max_new_tokens": 3})


def test_several_http_processes(bytes_server: ServerProcess, models: Path, logs: Path) -> None:
    """They know the algorithm, which SGLang lets them load no plugin for, and tokenize like a single one."""
    flags = ["--model-path", str(models / "T"), "--max-total-tokens", "2048", "--psd-config", '{"standby": false}']
    flags += ["--speculative-algorithm", "PSD", "--speculative-draft-model-path", str(models / "D_same")]
    flags += ["--tokenizer-worker-num", "2", "--max-running-requests", "4"]
    server = ServerProcess(flags, logs / "http_workers.log", SERVE, ENVIRONMENT)
    try:
        server.wait_ready(START_TIMEOUT_S)
        for prompt in PROMPTS:
            body = {"text": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 20}}
            answer, expected = generate(server.url, **body), generate(bytes_server.url, **body)
            assert isinstance(answer, dict) and isinstance(expected, dict)
            assert answer["output_ids"] == expected["output_ids"] and answer["text"] == expected["text"]
    finally:
        server.stop()
