"""SGLang's own test kits (``sglang.test.kits``) against a PSD server with the embedded pair.

They run in one fork of the test process (``kits_run.py``); every test here asserts the outcome of one of theirs. What
is left out is named in ``LEFT_OUT`` with the reason; each of these fails on a server without PSD as well, always or by
chance. A test of a kit that stands in no list fails, so nothing is missed when SGLang adds some.
``PSD_KITS=plain`` runs all of them, those left out as well, against a server without PSD, and holds this page against
what it sees; ``PSD_KITS=all`` runs those against PSD, too, that pass but take long (``SLOW``).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_psd.resources import TINY_TARGET
from sglang_psd.server_process import ServerProcess
from tests.e2e.conftest import START_TIMEOUT_S
from tests.e2e.flags import BASE_FLAGS, ENVIRONMENT, KITS_FLAGS

MODE = os.environ.get("PSD_KITS", "")
PLAIN = MODE == "plain"
RUN_TIMEOUT_S = 800.0
KNOWLEDGE = "asks what the embedded models do not know"
CONTEXT = "needs prompts or answers longer than the embedded models' context of 2,048 tokens"
ENDS = "expects an answer to end where those of the embedded models do not"
OPEN = "draws a text without bound, cut at 128 tokens: it is complete by chance"
DOWNLOAD = "downloads a data set"
THINKING = "needs a model that thinks"

RUN: dict[str, tuple[str, ...]] = {
    "BasicAPIContractMixin": (
        "test_get_model_info",
        "test_get_server_info",
        "test_health",
        "test_health_generate",
        "test_openai_chat_completion",
        "test_openai_completion",
    ),
    "BasicDecodeCorrectnessMixin": (
        "test_ascii_ratio",
        "test_determinism_temp_zero",
        "test_max_token_one",
        "test_no_repetition_blowup",
    ),
    "AbortAllMixin": ("test_abort_all",),
    "PauseResumeInPlaceMixin": ("test_pause_resume_in_place",),
    "EBNFConstrainedMixin": (
        "test_ebnf_generate_all_optional_function_params",
        "test_ebnf_generate_date",
        "test_ebnf_generate_email",
        "test_ebnf_generate_greeting",
        "test_ebnf_generate_hex_color",
        "test_ebnf_generate_number",
        "test_ebnf_generate_phone",
    ),
    "JSONConstrainedMixin": (
        "test_json_generate",
        "test_json_invalid",
        "test_json_openai",
        "test_mix_json_and_other",
    ),
    "RegexConstrainedMixin": (
        "test_regex_generate_date",
        "test_regex_generate_email",
        "test_regex_generate_greeting",
        "test_regex_generate_hex_color",
        "test_regex_generate_number",
        "test_regex_generate_phone",
    ),
    "MatchedStopMixin": ("test_finish_length", "test_finish_stop_regex_str"),
    "SpecCorrectnessKit": (
        "test_acc_length",
        "test_batch_generation",
        "test_eos_token",
        "test_first_token_finish",
    ),
    "SpecParityKit": ("test_parity_vs_reference",),
    "SpecLogprobKit": (
        "test_logprob_match",
        "test_logprob_spec_v2_match",
        "test_logprob_start_len",
        "test_token_ids_logprob_ragged",
    ),
    "SpecPenaltyKit": ("test_penalty_mixed",),
    "SpecFeatureKit": ("test_request_abort",),
    "SpecHiddenStatesKit": ("test_return_hidden_states",),
    "SpecGrammarKit": (
        "test_grammar_logprob_count_matches_completion_tokens",
        "test_grammar_structured_output_no_trailing_tokens",
    ),
    "ReasoningTokenUsageMixin": (
        "test_reasoning_tokens_non_thinking",
        "test_reasoning_tokens_non_thinking_stream",
    ),
    "SeparateReasoningMixin": (
        "test_nonstreaming_separate_reasoning_false",
        "test_streaming_separate_reasoning_false",
    ),
    "StreamingSessionKitMixin": ("test_kv_cache_inheritance", "test_preabort_recovery"),
    "RadixTree": ("test_radix_attention",),
    "CacheHits": ("test_multiturn_cache_hits",),
}

LEFT_OUT: dict[str, str] = {
    "BasicDecodeCorrectnessMixin.test_basic_math": KNOWLEDGE,
    "BasicDecodeCorrectnessMixin.test_capital_france": KNOWLEDGE,
    "BasicDecodeCorrectnessMixin.test_color_completion": KNOWLEDGE,
    "BasicSchedulerStressMixin.test_concurrent_requests": KNOWLEDGE,
    "BasicSchedulerStressMixin.test_long_prompt": CONTEXT,
    "BasicSchedulerStressMixin.test_streaming_response": KNOWLEDGE,
    "EBNFConstrainedMixin.test_ebnf_generate_complex_json": "expects members that its grammar leaves open",
    "EBNFConstrainedMixin.test_ebnf_generate_custom_log_format": OPEN,
    "RegexConstrainedMixin.test_regex_generate_complex_json": OPEN,
    "RegexConstrainedMixin.test_regex_generate_custom_log_format": OPEN,
    "MatchedStopMixin.test_finish_stop_eos": ENDS,
    "MatchedStopMixin.test_finish_stop_str": ENDS,
    "SpecFeatureKit.test_constrained_decoding": ENDS,
    "SpecFeatureKit.test_radix_attention": "ends a server with token ids outside the vocabulary; RadixTree keeps to it",
    "StreamingSessionKitMixin.test_first_mid_abort_recovery": CONTEXT,
    "StreamingSessionKitMixin.test_nth_mid_abort_recovery": CONTEXT,
    "StreamingSessionKitMixin.test_stress_concurrent_sessions": CONTEXT,
    "AbortLeakReproKitMixin.test_abort_heavy_chunked_prefill_does_not_leak": CONTEXT,
    "PrefixCacheBranchingMixin.test_prefix_cache_branching": "is about models with a recurrent state",
    "ReasoningTokenUsageMixin.test_reasoning_tokens_generate_exact_count": THINKING,
    "ReasoningTokenUsageMixin.test_reasoning_tokens_thinking": THINKING,
    "ReasoningTokenUsageMixin.test_reasoning_tokens_thinking_stream": THINKING,
    "SeparateReasoningMixin.test_nonstreaming_separate_reasoning_true": THINKING,
    "SeparateReasoningMixin.test_streaming_separate_reasoning_true": THINKING,
    "SeparateReasoningMixin.test_streaming_separate_reasoning_true_stream_reasoning_false": THINKING,
    "SpecDecodingMixin.test_bs_1_speed": CONTEXT,
    "SpecAccuracyKit.test_gsm8k": DOWNLOAD,
    "SpecPerfKit.test_max_token_one": DOWNLOAD,
    "KLDivergenceMixin.test_input_output_logprobs_match_decode_cache_hit": DOWNLOAD,
    "KLDivergenceMixin.test_input_output_logprobs_match_prefill_cache_hit": DOWNLOAD,
}
# A minute each on two cores that have other work.
SLOW = ("SpecLogprobKit.test_logprob_mixed", "StreamingSessionKitMixin.test_leak_logprob_concurrent")
# What a server without PSD fails by its nature: they read figures of speculation.
SPECULATIVE = (
    "SpecCorrectnessKit.test_acc_length",
    "SpecGrammarKit.test_grammar_logprob_count_matches_completion_tokens",
    "SpecGrammarKit.test_grammar_structured_output_no_trailing_tokens",
)
CHOSEN = [f"{kit}.{name}" for kit, names in RUN.items() for name in names]
CHOSEN += SLOW if MODE in ("all", "plain") else ()


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, logs: Path) -> Iterator[ServerProcess]:
    """``served``, which has the flags that the kits ask for, or one without PSD; ready when first used."""
    if PLAIN:
        flags = ["--model-path", str(TINY_TARGET), *BASE_FLAGS, *KITS_FLAGS]
        with ServerProcess(flags, logs / "kits.log", environment=ENVIRONMENT) as started:
            yield started
    else:
        yield request.getfixturevalue("served")


def _run(*args: Any) -> dict[str, str]:
    """In a fork: the kits and what they import stay out of the test process."""
    os.environ.pop("SGLANG_IS_IN_CI", None)  # as in ENVIRONMENT
    from tests.e2e.kits_run import run_kits

    return run_kits(*args)


@pytest.fixture(scope="module")
def outcomes(server: ServerProcess, plain: dict, run_case: Callable[..., Any]) -> dict[str, str]:
    """Outcome by kit and test: ``passed``, ``not run``, or what went wrong."""
    server.wait_ready(START_TIMEOUT_S)  # it has been loading while the plain engine answered
    chosen = None if PLAIN else CHOSEN
    return run_case(_run, server.url, str(TINY_TARGET), server.pid, plain["parity"], chosen, timeout_s=RUN_TIMEOUT_S)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CHOSEN)
def test_kit(name: str, outcomes: dict[str, str]) -> None:
    if PLAIN and name in SPECULATIVE:
        assert outcomes[name] != "passed"
    else:
        assert outcomes[name] == "passed", outcomes[name]


def test_every_test_of_the_kits_is_run_or_explained(outcomes: dict[str, str]) -> None:
    assert sorted(outcomes) == sorted({*CHOSEN, *SLOW, *LEFT_OUT})


@pytest.mark.skipif(not PLAIN, reason="set PSD_KITS=plain")
def test_what_is_left_out_fails_without_psd(outcomes: dict[str, str]) -> None:
    print(json.dumps({name: outcomes[name][-300:] for name in LEFT_OUT}, indent=1))
    assert not [name for name, reason in LEFT_OUT.items() if reason != OPEN and outcomes[name] == "passed"]
