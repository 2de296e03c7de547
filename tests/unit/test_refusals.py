"""Requests that SGLang would take down its scheduler with: one sentence that names the parameter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_psd.scheduler.refusals import request_problem, sampling_problem, use_plain_numbers

VOCAB = 320
GOOD = {
    "max_new_tokens": 8,
    "min_new_tokens": 0,
    "top_k": 2**30,
    "sampling_seed": None,
    "stream_interval": None,
    "temperature": 1.0,
    "top_p": 1.0,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": None,
    "stop_token_ids": None,
    "stop_strs": [],
    "stop_regex_strs": [],
    "regex": None,
    "json_schema": None,
    "ebnf": None,
    "structural_tag": None,
}
FINE: list[dict[str, Any]] = [
    {},
    {"logit_bias": {"0": 100, "319": -100.0, 5: 0.5}},
    {"sampling_seed": -1},
    {"sampling_seed": 2**63 - 1},
    {"temperature": 1e-6},
    {"top_k": 5.0, "min_new_tokens": 1.0, "sampling_seed": 7.0},
    {"max_new_tokens": None},
    {"stop_strs": ["a"], "stop_regex_strs": ["a$"]},
]
BAD: list[tuple[str, Any]] = [
    ("logit_bias", {"320": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"5": "abc"}),
    ("logit_bias", {"5": None}),
    ("logit_bias", {"5": True}),
    ("logit_bias", {"5": float("nan")}),
    ("logit_bias", {"5": float("inf")}),
    ("logit_bias", {"5": -1e308}),
    ("logit_bias", {"5": 10**400}),
    ("logit_bias", {"9" * 5000: 1}),
    ("logit_bias", {2.0: 1}),
    ("logit_bias", [1, 2]),
    ("sampling_seed", 2**63),
    ("sampling_seed", 1.5),
    ("sampling_seed", "abc"),
    ("sampling_seed", True),
    ("top_k", 1.5),
    ("top_k", float("inf")),
    ("max_new_tokens", 16.0),
    ("top_k", 2**40),
    ("max_new_tokens", 2.5),
    ("max_new_tokens", "8"),
    ("max_new_tokens", 2**70),
    ("min_new_tokens", 1.5),
    ("min_new_tokens", None),
    ("top_k", None),
    ("stream_interval", 0),
    ("temperature", "1"),
    ("temperature", 10**400),
    ("presence_penalty", -(10**400)),
    ("sampling_seed", 10**400),
    ("temperature", float("nan")),
    ("repetition_penalty", 1e-300),
    ("frequency_penalty", "a"),
    ("stop_strs", [5]),
    ("stop_regex_strs", [None]),
    ("regex", 5),
    ("json_schema", {"type": "string"}),
]
NAMES = {"stop_strs": "stop", "stop_regex_strs": "stop_regex"}


@pytest.mark.parametrize("given", FINE)
def test_usual_parameters_pass(given: dict) -> None:
    assert sampling_problem(SimpleNamespace(**{**GOOD, **given}), VOCAB) is None


@pytest.mark.parametrize("token", [-1, VOCAB, 10**12])
def test_impossible_stops_matter_with_min_new_tokens_only(token: int) -> None:
    params = SimpleNamespace(**{**GOOD, "stop_token_ids": {token}})
    assert sampling_problem(params, VOCAB) is None
    params.min_new_tokens = 2
    assert (sampling_problem(params, VOCAB) or "").startswith("stop_token_ids")


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_bad_parameter_is_named(name: str, value: Any) -> None:
    problem = sampling_problem(SimpleNamespace(**{**GOOD, name: value}), VOCAB)
    assert problem is not None and problem.startswith(NAMES.get(name, name)) and problem.endswith(".")
    assert len(problem) < 200 and "\n" not in problem


def test_numbers_of_numpy_become_pythons() -> None:
    given = {"temperature": np.float32(0.5), "top_k": np.int64(3), "sampling_seed": np.int32(7), "max_new_tokens": None}
    params = SimpleNamespace(**{**GOOD, **given})
    assert sampling_problem(params, VOCAB) is None
    use_plain_numbers(params)
    found = {name: getattr(params, name) for name in given}
    assert found == {"temperature": 0.5, "top_k": 3, "sampling_seed": 7, "max_new_tokens": None}
    assert [type(value) for value in found.values()] == [float, int, int, type(None)]
    params = SimpleNamespace(**{**GOOD, "top_k": 5.0})
    use_plain_numbers(params)
    assert type(params.top_k) is int


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, -(10**400), 2**63])
    | st.floats()
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3),
    max_leaves=5,
)


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.fixed_dictionaries(
        {"stop_token_ids": st.none() | st.lists(ANYTHING, max_size=3), "stop_strs": st.lists(ANYTHING, max_size=3)},
        optional={name: ANYTHING for name in GOOD if name not in ("stop_token_ids", "stop_strs", "stop_regex_strs")},
    ),
    st.sampled_from([0, 3]),
)
def test_anything_at_all_is_taken_or_refused_in_one_line(given_values: dict, least: int) -> None:
    """The checks themselves never fail; ``normalize`` has made lists of the stops."""
    values = {**GOOD, "min_new_tokens": least, **given_values}
    problem = sampling_problem(SimpleNamespace(**values), VOCAB)
    assert problem is None or ("\n" not in problem and len(problem) < 200)


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.dictionaries(
        st.sampled_from(["top_logprobs_num", "token_ids_logprob", "logprob_start_len", "input_embeds"]), ANYTHING
    )
)
def test_any_other_wish_is_taken_or_refused_in_one_line(wish: dict) -> None:
    request = SimpleNamespace(**{**REQUEST, **wish})
    problem = request_problem(request, VOCAB, 4, custom_processors=False, bfloat16=True)
    assert problem is None or ("\n" not in problem and len(problem) < 200)


def test_numbers_that_python_does_not_print() -> None:
    """Over 4,300 digits ``repr`` raises; the sentence does without them."""
    problem = sampling_problem(SimpleNamespace(**{**GOOD, "sampling_seed": 10**5000}), VOCAB)
    assert problem is not None and problem.startswith("sampling_seed") and "thousands of digits" in problem


REQUEST = {
    "mm_inputs": None,
    "input_embeds": None,
    "input_ids": [1, 5, 319],
    "top_logprobs_num": 0,
    "token_ids_logprob": None,
    "session_params": None,
    "logprob_start_len": -1,
    "custom_logit_processor": None,
    "positional_embed_overrides": None,
    "extra_key": None,
    "routing_key": None,
    "session_id": None,
    "lora_id": None,
    "priority": None,
    "return_hidden_states": False,
    "routed_experts_start_len": 0,
}
SESSION = {"id": "s", "rid": None, "offset": None}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, None),
        ({"mm_inputs": object(), "input_ids": [10**9]}, None),
        ({"input_ids": [1, 320]}, "input_ids"),
        ({"input_ids": [1, -1]}, "input_ids"),
        ({"input_ids": []}, "The prompt"),
        ({"input_ids": [], "session_params": SimpleNamespace(**SESSION)}, None),
        ({"session_params": SimpleNamespace(**{**SESSION, "rid": "r", "offset": -2})}, None),
        ({"session_params": SimpleNamespace(**{**SESSION, "rid": 5, "offset": 10**30})}, None),
        ({"session_params": SimpleNamespace(**{**SESSION, "id": ["s"]})}, "session_params"),
        ({"session_params": SimpleNamespace(**{**SESSION, "rid": {"a": 1}})}, "session_params"),
        ({"session_params": SimpleNamespace(**{**SESSION, "offset": "x"})}, "session_params"),
        ({"session_params": SimpleNamespace(**{**SESSION, "offset": 2.5})}, "session_params"),
        ({"extra_key": "salt", "routing_key": "r", "session_id": "s", "priority": -3}, None),
        ({"extra_key": ["salt"]}, "extra_key"),
        ({"lora_id": {"a": 1}}, "lora_id"),
        ({"routing_key": 5}, "routing_key"),
        ({"session_id": ["s"]}, "session_id"),
        ({"priority": "high"}, "priority"),
        ({"routed_experts_start_len": "x"}, "routed_experts_start_len"),
        ({"return_hidden_states": "last"}, None),
        ({"return_hidden_states": [True]}, "return_hidden_states"),
        ({"return_hidden_states": "first"}, "return_hidden_states"),
        ({"positional_embed_overrides": {"a": 1}}, "positional_embed_overrides"),
        ({"positional_embed_overrides": [[0.5] * 4]}, "positional_embed_overrides"),
        ({"token_ids_logprob": [0, 319]}, None),
        ({"token_ids_logprob": [320]}, "token_ids_logprob"),
        ({"token_ids_logprob": ["a"]}, "token_ids_logprob"),
        ({"token_ids_logprob": 5}, "token_ids_logprob"),
        ({"token_ids_logprob": {"1": 2}}, "token_ids_logprob"),
        ({"logprob_start_len": -(10**400)}, "logprob_start_len"),
        ({"input_embeds": [[0.5] * 4]}, None),
        ({"input_embeds": [[0.5] * 3]}, "input_embeds"),
        ({"input_embeds": [[0.5, 0.5, 0.5, float("nan")]]}, "input_embeds"),
        ({"input_embeds": [[0.5, 1, True, -2.0]]}, None),
        ({"input_embeds": [[0.5, 0.5, 0.5, "1"]]}, "input_embeds"),
        ({"input_embeds": [["a", "b", "c", "d"]]}, "input_embeds"),
        ({"input_embeds": [[0.5, 0.5, 0.5, 10**400]]}, "input_embeds"),
        ({"input_embeds": [[0.5, 0.5, 0.5, 1e39]]}, "input_embeds"),
        ({"input_embeds": [[0.5] * 4, [0.5] * 3]}, "input_embeds"),
        ({"input_embeds": [], "input_ids": []}, "input_embeds"),
        ({"top_logprobs_num": 321}, "top_logprobs_num"),
        ({"top_logprobs_num": -1}, "top_logprobs_num"),
        ({"top_logprobs_num": 1.5}, "top_logprobs_num"),
        ({"logprob_start_len": -7}, "logprob_start_len"),
        ({"custom_logit_processor": "garbage"}, None),
    ],
)
def test_requests(given: dict, named: str | None) -> None:
    problem = request_problem(SimpleNamespace(**{**REQUEST, **given}), VOCAB, 4, custom_processors=False, bfloat16=True)
    assert problem is None if named is None else problem is not None and problem.startswith(named)


def test_embeddings_need_bfloat16() -> None:
    request = SimpleNamespace(**{**REQUEST, "input_embeds": [[0.5] * 4]})
    problem = request_problem(request, VOCAB, 4, custom_processors=False, bfloat16=False)
    assert problem is not None and "--dtype bfloat16" in problem
