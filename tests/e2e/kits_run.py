"""Run SGLang's own test kits against a server.

To be imported in a fork: it imports SGLang's tests, and their settings.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import sys
import tempfile
import time
import unittest
from pathlib import Path
from typing import Any

import requests
from sglang.test.kits import radix_cache_server_kit
from sglang.test.kits.abort_timeout_kit import AbortAllMixin
from sglang.test.kits.basic_api_contract_kit import BasicAPIContractMixin
from sglang.test.kits.basic_decode_correctness_kit import BasicDecodeCorrectnessMixin
from sglang.test.kits.basic_scheduler_stress_kit import BasicSchedulerStressMixin
from sglang.test.kits.cache_hit_kit import run_multiturn_cache_hit_test
from sglang.test.kits.ebnf_constrained_kit import EBNFConstrainedMixin
from sglang.test.kits.json_constrained_kit import JSONConstrainedMixin
from sglang.test.kits.kl_divergence_kit import KLDivergenceMixin
from sglang.test.kits.matched_stop_kit import MatchedStopMixin
from sglang.test.kits.pause_generation_kit import PauseResumeInPlaceMixin
from sglang.test.kits.prefix_cache_branching_kit import PrefixCacheBranchingMixin
from sglang.test.kits.reasoning_kit import ReasoningTokenUsageMixin, SeparateReasoningMixin
from sglang.test.kits.regex_constrained_kit import RegexConstrainedMixin
from sglang.test.kits.spec_decoding_kit import SpecDecodingMixin
from sglang.test.kits.spec_server_kits import (
    SpecAccuracyKit,
    SpecCorrectnessKit,
    SpecFeatureKit,
    SpecGrammarKit,
    SpecHiddenStatesKit,
    SpecLogprobKit,
    SpecParityKit,
    SpecPenaltyKit,
    SpecPerfKit,
)
from sglang.test.kits.streaming_session_kit import AbortLeakReproKitMixin, StreamingSessionKitMixin
from sglang.test.server_fixtures.spec_eagle_fixture import PROMPTS, SpecEagleServerBase
from transformers import AutoTokenizer

from sglang_psd.resources import load_prompts


class RadixTree:
    """``radix_cache_server_kit`` in the size of the embedded models: their vocabulary, their context."""

    def test_radix_attention(self: Any) -> None:
        nodes = radix_cache_server_kit.gen_radix_tree(num_nodes=60, chunk_len=24)
        nodes = [node for node in nodes if len(node["input_ids"]) + node["decode_len"] < 1500]
        data = {
            "input_ids": [[token % 2000 + 10 for token in node["input_ids"]] for node in nodes],
            "sampling_params": [{"max_new_tokens": node["decode_len"] % 24, "temperature": 0} for node in nodes],
        }
        assert requests.post(self.base_url + "/generate", json=data).status_code == 200


class CacheHits:
    """``cache_hit_kit`` with questions from this package."""

    def test_multiturn_cache_hits(self: Any) -> None:
        texts = load_prompts(24)
        rows = [{"conversations": [{"value": text * 3}, {"value": text}]} for text in texts]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "conversations.json")
            path.write_text(json.dumps(rows))
            found = run_multiturn_cache_hit_test(
                self.base_url,
                self.model,
                num_clients=4,
                num_rounds=3,
                request_length=96,
                output_length=24,
                dataset_path=str(path),
            )
        assert found["overall"]["cache_hit_rate"] > 0.4


KITS: tuple[type, ...] = (
    BasicAPIContractMixin,
    BasicDecodeCorrectnessMixin,
    BasicSchedulerStressMixin,
    AbortAllMixin,
    PauseResumeInPlaceMixin,
    EBNFConstrainedMixin,
    JSONConstrainedMixin,
    RegexConstrainedMixin,
    MatchedStopMixin,
    SpecCorrectnessKit,
    SpecParityKit,
    SpecLogprobKit,
    SpecPenaltyKit,
    SpecFeatureKit,
    SpecHiddenStatesKit,
    SpecGrammarKit,
    StreamingSessionKitMixin,
    AbortLeakReproKitMixin,
    RadixTree,
    CacheHits,
    PrefixCacheBranchingMixin,
    ReasoningTokenUsageMixin,
    SeparateReasoningMixin,
    SpecDecodingMixin,
    SpecAccuracyKit,
    SpecPerfKit,
    KLDivergenceMixin,
)
# Sends token ids outside the vocabulary, of which a server without PSD dies: so it comes last.
DEADLY = ("SpecFeatureKit.test_radix_attention",)
# Sizes and thresholds for the embedded pair, whose accept length on such prompts is about two.
SIZES = {
    "abort_all_num_requests": 8,
    "abort_all_sleep": 1.0,
    "abort_all_max_new_tokens": 1800,
    "pause_num_requests": 8,
    "pause_max_new_tokens": 200,
    "pause_duration": 1.0,
    "acc_length_thres": 1.3,
    "batch_accept_len_thres": 1.3,
    "logprob_match_delta": 1e-3,
    # SGLang's own words: a server without its overlap loop has not computed the last token's KV yet.
    "kv_inherit_offsets": (0, -1),
    "reasoning_parser_name": "qwen3",
    "cache_chunk_size": 64,
    "accept_length_thres": 1.3,
    "bs_1_speed_thres": 0.0,
    "kl_div_thres": 1e-3,
}


def send(self: Any, max_new_tokens: int, timeout_s: float | None) -> None:
    """What ``SpecEagleServerBase`` sends, in the size of the embedded models."""
    for prompt in PROMPTS:
        sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
        data = {"text": prompt, "sampling_params": sampling}
        answer = requests.post(self.base_url + "/generate", json=data, timeout=timeout_s)
        assert answer.status_code == 200


def send_request(self: Any) -> None:
    """Requests that have to be answered."""
    send(self, 48, None)


def send_requests_abort(self: Any) -> None:
    """Requests whose client goes away."""
    with contextlib.suppress(requests.Timeout):
        send(self, 1200, 1.0)


class Server:
    """What the kits' tests look at: a server that runs already."""

    def __init__(self, pid: int):
        self.pid = pid

    def poll(self) -> int | None:
        """None while it runs."""
        return None if os.path.exists(f"/proc/{self.pid}") else 1


def make_case(kit: type, url: str, model: str, pid: int, texts: dict[str, str]) -> type[unittest.TestCase]:
    """A test case of one kit."""
    members = {
        **SIZES,
        "send_request": send_request,
        "send_requests_abort": send_requests_abort,
        "run_decode": SpecEagleServerBase.run_decode,
        "base_url": url,
        "model": model,
        "api_key": "none",
        "process": Server(pid),
        "tokenizer": AutoTokenizer.from_pretrained(model),
        "parity_ref_outputs": texts,
        "setUpClass": classmethod(lambda cls: None),
        "flush_cache": classmethod(lambda cls: requests.post(cls.base_url + "/flush_cache")),
    }
    return type(kit.__name__, (kit, unittest.TestCase), members)


def run_kits(url: str, model: str, pid: int, texts: dict[str, str], chosen: list[str] | None) -> dict[str, str]:
    """Run the tests that are chosen, or all of them.

    Parameters
    ----------
    url, model, pid : str, str, int
        A server that runs already.
    texts : dict of str to str
        What the target says without speculation, by prompt.
    chosen : list of str or None
        As ``kit.test``.

    Returns
    -------
    dict of str to str
        ``passed``, ``not run`` or what went wrong, by ``kit.test``.
    """
    random.seed(0)
    cases = {}
    for kit in KITS:
        case = make_case(kit, url, model, pid, texts)
        for name in unittest.TestLoader().getTestCaseNames(case):
            cases[f"{kit.__name__}.{name}"] = case(name)
    outcomes, begin = dict.fromkeys(cases, "not run"), time.monotonic()
    labels = [label for label in cases if chosen is None or label in chosen]
    for label in sorted(labels, key=lambda label: label in DEADLY):
        result = unittest.TestResult()
        with contextlib.redirect_stdout(io.StringIO()):
            cases[label].run(result)
        wrong = [text for _, text in [*result.failures, *result.errors]]
        outcomes[label] = "passed" if not wrong else wrong[0][-1500:]
        print(f"{time.monotonic() - begin:6.1f} s: {label}", file=sys.stderr, flush=True)
    return outcomes
