"""Bad requests, figures and limits of the server whose tokens are bytes (see ``test_bytes.py``)."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from sglang_psd.server_process import ServerProcess
from tests.command import run_command
from tests.e2e.conftest import BYTES_MAX_RUNNING, BYTES_STEPS
from tests.e2e.test_bytes import PROMPTS
from tests.e2e.test_doors import generate, server_info

pytestmark = pytest.mark.e2e

# --- bad requests --------------------------------------------------------------------------------

BAD: list[tuple[str, dict[str, Any], str]] = [
    ("/generate", {"text": "x", "sampling_params": {"logit_bias": {"320": 1}}}, "logit_bias"),
    ("/generate", {"text": "x", "sampling_params": {"logit_bias": {"-1": 1}}}, "logit_bias"),
    ("/generate", {"text": "x", "sampling_params": {"logit_bias": {"5": "abc"}}}, "logit_bias"),
    ("/generate", {"text": "x", "sampling_params": {"sampling_seed": 10**30, "temperature": 1}}, "sampling_seed"),
    ("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 2.5}}, "max_new_tokens"),
    ("/generate", {"text": "x", "sampling_params": {"regex": "("}}, "regex"),
    ("/generate", {"input_ids": [1, 320]}, "input_ids"),
    ("/generate", {"input_ids": [1, -1]}, "input_ids"),
    ("/generate", {"text": "x", "return_logprob": True, "top_logprobs_num": 999}, "top_logprobs_num"),
    ("/generate", {"text": "x", "custom_logit_processor": "garbage"}, "custom_logit_processor"),
    ("/generate", {"text": "x", "positional_embed_overrides": {"a": 1}}, "positional_embed_overrides"),
    ("/generate", {"text": "x", "extra_key": ["salt"]}, "extra_key"),
    ("/generate", {"text": "x", "session_params": {"id": ["s"]}}, "session_params"),
    ("/generate", {"text": "x", "return_hidden_states": True}, "return-hidden-states-mode"),
    ("/v1/completions", {"model": "x", "prompt": "x", "logit_bias": {"320": 1}}, "logit_bias"),
    ("/v1/completions", {"model": "x", "prompt": "x", "seed": 10**30, "temperature": 1}, "seed"),
    ("/v1/completions", {"model": "x", "prompt": [1, 320]}, "input_ids"),
    (
        "/v1/chat/completions",
        {"model": "x", "messages": [{"role": "user", "content": "x"}], "logit_bias": {"400": 1}},
        "logit_bias",
    ),
]


@pytest.mark.parametrize(("path", "body", "named"), BAD, ids=lambda value: value if isinstance(value, str) else None)
def test_a_bad_request_gets_400_and_the_server_lives(
    bytes_server: ServerProcess, path: str, body: dict, named: str
) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        request = urllib.request.Request(
            bytes_server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        urllib.request.urlopen(request, timeout=60)
    answer = caught.value.read().decode()
    assert caught.value.code == 400 and named in answer, answer
    alive = generate(bytes_server.url, text="x", sampling_params={"temperature": 0, "max_new_tokens": 3})
    assert isinstance(alive, dict) and len(alive["output_ids"]) == 3


# --- figures -------------------------------------------------------------------------------------


def metric(url: str, name: str) -> float:
    """Value of a Prometheus gauge or counter, summed over its labels."""
    with urllib.request.urlopen(url + "/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))


def test_figures_of_a_request_and_of_the_server_agree(bytes_server: ServerProcess) -> None:
    """A hundred tokens: identities of the meta information, Prometheus and ``/server_info``."""
    before = server_info(bytes_server.url)["internal_states"][0]["psd"]
    body = {"text": PROMPTS, "sampling_params": {"temperature": 0, "max_new_tokens": 100, "ignore_eos": True}}
    answers = generate(bytes_server.url, **body)
    assert isinstance(answers, list)
    rounds = accepted = 0
    for answer in answers:
        info = answer["meta_info"]
        assert info["completion_tokens"] == len(answer["output_ids"]) == 100
        assert info["spec_accept_length"] == pytest.approx(100 / info["spec_verify_ct"])
        assert info["spec_num_proposed_drafts"] == info["spec_verify_ct"] * BYTES_STEPS
        assert info["spec_accept_rate"] == info["spec_num_correct_drafts"] / info["spec_num_proposed_drafts"] <= 1
        assert 1 + info["spec_verify_ct"] + info["spec_num_correct_drafts"] == 100
        histogram = info["spec_correct_drafts_histogram"]
        assert sum(histogram) == info["spec_verify_ct"] == 11
        assert sum(i * count for i, count in enumerate(histogram)) == info["spec_num_correct_drafts"]
        rounds += info["spec_verify_ct"]
        accepted += info["spec_num_correct_drafts"]
    after = server_info(bytes_server.url)["internal_states"][0]["psd"]
    assert after["drafts_accepted"] - before["drafts_accepted"] == accepted
    assert after["accept_length"] <= BYTES_STEPS + 1 and after["accept_rate"] <= 1
    assert metric(bytes_server.url, "sglang:generation_tokens_total") >= 600
    assert 1.0 <= metric(bytes_server.url, "sglang:spec_accept_length") <= BYTES_STEPS + 1
    assert metric(bytes_server.url, "sglang:spec_accept_rate") <= 1


def test_the_running_limit_is_what_was_asked_for(bytes_server: ServerProcess) -> None:
    """Forty requests: never more than ten at once, but more than one slot's five; the number stands in the info."""
    info = server_info(bytes_server.url)
    assert info["max_running_requests"] == BYTES_MAX_RUNNING
    assert info["internal_states"][0]["effective_max_running_requests_per_dp"] == BYTES_MAX_RUNNING

    async def flood() -> list[int]:
        most: list[int] = []
        done = asyncio.Event()

        async def watch() -> None:
            while not done.is_set():
                state = await asyncio.to_thread(server_info, bytes_server.url)
                most.append(sum(state["internal_states"][0]["psd"]["slot_sizes"]))

        watcher = asyncio.create_task(watch())
        body = {"text": ["x"] * 40, "sampling_params": {"temperature": 0, "max_new_tokens": 120, "ignore_eos": True}}
        await asyncio.to_thread(lambda: generate(bytes_server.url, **body))
        done.set()
        await watcher
        return most

    most = max(asyncio.run(flood()))
    assert BYTES_MAX_RUNNING / 2 < most <= BYTES_MAX_RUNNING


ROWS: list[dict[str, Any]] = [
    {"conversations": []},
    {"conversations": [{"from": "human", "value": "only one turn"}]},
    {"conversations": [{"from": "human", "value": ""}, {"from": "gpt", "value": "an answer to nothing"}]},
    {"conversations": [{"from": "human", "value": "long " * 2000}, {"from": "gpt", "value": "too long " * 9}]},
    {"conversations": [{"from": "human", "value": "A question?"}, {"from": "gpt", "value": "Some answer."}]},
    {"conversations": [{"from": "human", "value": "Änderung €"}, {"from": "gpt", "value": "Ein längerer Satz, 日本."}]},
    {"conversations": [{"from": "human", "value": "Another one"}, {"from": "gpt", "value": "x" * 40}]},
    {"conversations": [{"from": "human", "value": "And one more"}, {"from": "gpt", "value": "y" * 25}]},
]


def test_bench_serving_with_bad_rows(run_case, bytes_server: ServerProcess, models: Path, tmp_path: Path) -> None:
    """Empty, short and overlong rows, fewer than asked for: what is good is served, with equal totals everywhere."""
    data = tmp_path / "rows.json"
    data.write_text(json.dumps(ROWS), encoding="utf-8")
    lengths = [len(row["conversations"][1]["value"].encode()) for row in ROWS[4:]]
    for backend in ("sglang", "sglang-oai-chat"):
        flags = ["--backend", backend, "--base-url", bytes_server.url]
        flags += ["--dataset-name", "sharegpt", "--dataset-path", str(data), "--num-prompts", "20"]
        flags += ["--sharegpt-context-len", "400", "--model", str(models / "T")]
        flags += ["--output-file", str(tmp_path / backend)]
        done = run_case(run_command, "sglang.bench_serving", flags, timeout_s=300)
        assert done.code == 0, done.out[-1500:] + done.err[-3000:]
        figures = json.loads((tmp_path / backend).read_text().splitlines()[-1])
        assert (figures["completed"], figures["total_output_tokens"]) == (4, sum(lengths)), backend
