"""A target spread over two tensor-parallel ranks: rank 0 has the drafter, both take the same decisions."""

from __future__ import annotations

import json
import re
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from sglang_psd.resources import TINY_TARGET
from sglang_psd.server_process import ServerProcess
from tests.e2e.conftest import MAX_TOKENS, START_TIMEOUT_S
from tests.e2e.flags import BASE_FLAGS, ENVIRONMENT, ON_GPU, PSD_FLAGS
from tests.e2e.test_doors import generate
from tests.e2e.test_lifecycle import psd_section, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(ON_GPU, reason="tests/gpu has a case of its own")]

GREEDY = {"temperature": 0, "max_new_tokens": MAX_TOKENS}
# Sampled, constrained and cut off: whatever one rank decides otherwise ends the server or changes a text.
MIXED: tuple[dict, ...] = (
    {"temperature": 0.9, "sampling_seed": 11, "max_new_tokens": 40},
    {"temperature": 0.9, "sampling_seed": 12, "top_k": 5, "frequency_penalty": 0.6, "max_new_tokens": 40},
    {"temperature": 0.7, "sampling_seed": 13, "regex": "[a-z]{3,9}( [a-z]{2,8}){4}", "max_new_tokens": 40},
    {"temperature": 0, "repetition_penalty": 1.3, "min_new_tokens": 8, "max_new_tokens": 40},
    {"temperature": 0, "stop": ["e", "."], "max_new_tokens": 40},
    {"temperature": 0.8, "sampling_seed": 14, "min_p": 0.1, "logit_bias": {"77": -50}, "max_new_tokens": 40},
)


@pytest.fixture(scope="module")
def url(logs: Path) -> Iterator[str]:
    """A server that checks its pools in every round; two batches, chunked prompts, a pool that has to be shared."""
    flags = ["--model-path", str(TINY_TARGET), *BASE_FLAGS, *PSD_FLAGS, "--tp-size", "2"]
    flags += ["--max-running-requests", "6", "--max-total-tokens", "768", "--chunked-prefill-size", "32"]
    flags += ["--psd-config", '{"standby": false, "integrity_checks": true}']
    server = ServerProcess(flags, logs / "ranks.log", environment=ENVIRONMENT)
    try:
        server.wait_ready(START_TIMEOUT_S)
        yield server.url
    finally:
        server.stop()


def test_greedy_texts_are_those_of_one_rank_without_drafts(url: str, plain: dict) -> None:
    answers = plain["answers"]
    for _ in range(2):  # the second time prompts are found in the cache
        got = generate(url, text=[answer["prompt"] for answer in answers], sampling_params=GREEDY)
        assert [answer["output_ids"] for answer in got] == [answer["ids"] for answer in answers]
    psd = psd_section(url)
    assert psd["mode"] == "parallel" and len(psd["slot_sizes"]) == 2 and psd["accept_length"] > 1.5


def test_all_kinds_of_requests_side_by_side(url: str, plain: dict) -> None:
    """Each alone, then all at once: the same texts, and what was asked for."""
    prompts = [answer["prompt"] for answer in plain["answers"]][: len(MIXED)]
    alone = [generate(url, text=prompt, sampling_params=params) for prompt, params in zip(prompts, MIXED)]
    crowd = generate(url, text=prompts * 2, sampling_params=[*MIXED, *MIXED], return_logprob=True)
    assert [answer["text"] for answer in crowd] == [answer["text"] for answer in alone] * 2
    assert (
        re.fullmatch(MIXED[2]["regex"], alone[2]["text"]) or alone[2]["meta_info"]["finish_reason"]["type"] == "length"
    )
    assert len(alone[3]["output_ids"]) >= 8 and not set("e.") & set(alone[4]["text"])
    free = generate(url, text=prompts, sampling_params={"temperature": 1.0, "max_new_tokens": 24, "n": 2})
    assert len(free) == 2 * len(prompts) and all(answer["output_ids"] for answer in free)


def test_aborts_and_a_lost_drafter(url: str, plain: dict) -> None:
    """Some requests leave, the drafter is killed: nobody else notices, and drafts come back."""
    answers, done = plain["answers"], threading.Event()
    before = psd_section(url)["drafter"]

    def ask() -> None:
        while not done.is_set():
            got = generate(url, text=[answer["prompt"] for answer in answers], sampling_params=GREEDY)
            assert [answer["output_ids"] for answer in got] == [answer["ids"] for answer in answers]

    def leave() -> None:
        for number in range(6):
            body = {"text": answers[number]["prompt"], "rid": f"leaves-{number}", "sampling_params": GREEDY}
            with ThreadPoolExecutor(1) as pool:
                leaving = pool.submit(generate, url, **body)
                time.sleep(0.05 * number)
                _abort(url, f"leaves-{number}")
                leaving.exception(timeout=60)

    with ThreadPoolExecutor(2) as pool:
        asking = pool.submit(ask)
        try:
            leave()
            psutil.Process(before["pid"]).kill()
            wait_for(url, lambda psd: psd["drafter"]["state"] == "up" and psd["drafter"]["pid"] != before["pid"])
        finally:
            done.set()
        asking.result()
    got = generate(url, text=[answer["prompt"] for answer in answers], sampling_params=GREEDY)
    assert [answer["output_ids"] for answer in got] == [answer["ids"] for answer in answers]
    assert max(answer["meta_info"]["spec_accept_length"] for answer in got) > 1.0


def _abort(url: str, rid: str) -> None:
    body = json.dumps({"rid": rid}).encode()
    request = urllib.request.Request(url + "/abort_request", body, {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=60).close()
