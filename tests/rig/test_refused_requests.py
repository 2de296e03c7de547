"""Requests that would take SGLang's scheduler down: refused in one sentence, their neighbours served."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import numpy as np
import pytest

from tests.rig.oracle import assert_prefixes
from tests.rig.rig import Output, Rig
from tests.rig.together import PROMPTS

# What a client sends beyond the usual, and the word that the answer must hold. All of them reach the scheduler:
# SGLang's tokenizer process lets them pass.
BAD: list[tuple[dict[str, Any], str]] = [
    ({"logit_bias": {"5": "abc"}}, "logit_bias"),
    ({"logit_bias": {"5": None}}, "logit_bias"),
    ({"logit_bias": {"5": 1e308}}, "logit_bias"),
    ({"logit_bias": {"5": float("nan")}, "temperature": 1.0}, "logit_bias"),
    ({"logit_bias": [1, 2]}, "logit_bias"),
    ({"temperature": 1.0, "sampling_seed": 2**70}, "sampling_seed"),
    ({"temperature": 1.0, "sampling_seed": "abc"}, "sampling_seed"),
    ({"temperature": 1.0, "top_k": 2**40}, "top_k"),
    ({"temperature": 1.0, "top_k": 2.5}, "top_k"),
    ({"max_new_tokens": 2.5}, "max_new_tokens"),
    ({"min_new_tokens": 3, "stop_token_ids": [400]}, "stop_token_ids"),
    ({"min_new_tokens": 3, "stop_token_ids": [-5]}, "stop_token_ids"),
    ({"repetition_penalty": 1e-300}, "repetition_penalty"),
    ({"json_schema": {"type": "string"}}, "json_schema"),
    ({"fields": {"stream": True}, "stream_interval": 0}, "stream_interval"),
    ({"ids": [1, 320]}, "input_ids"),
    ({"ids": [1, -1]}, "input_ids"),
    ({"ids": []}, "at least one token"),
    ({"fields": {"return_logprob": True, "top_logprobs_num": 1000}}, "top_logprobs_num"),
    ({"fields": {"return_logprob": True, "token_ids_logprob": [400]}}, "token_ids_logprob"),
    ({"fields": {"return_logprob": True, "logprob_start_len": -7}}, "logprob_start_len"),
    ({"fields": {"input_embeds": [[0.1] * 64] * 3}}, "bfloat16"),
    ({"fields": {"extra_key": ["salt"]}}, "extra_key"),
    ({"fields": {"priority": "high"}}, "priority"),
    ({"fields": {"return_routed_experts": True, "routed_experts_start_len": "x"}}, "routed_experts_start_len"),
    ({"fields": {"return_hidden_states": [True]}}, "return_hidden_states"),
    ({"fields": {"custom_logit_processor": '{"callable": "00"}'}}, "custom_logit_processor"),
]
# Single requests with limits that are unusual and fine.
FINE: list[dict[str, Any]] = [
    {"logit_bias": {"5": 1e30}, "temperature": 1e-6},
    {"logit_bias": {str(token): -1e30 for token in range(320)}, "temperature": 1.0},
    {"temperature": 1.0, "sampling_seed": -(2**63)},
    {"temperature": 1e30},
    {"temperature": np.float32(0.8), "top_k": np.int64(5), "top_p": np.float64(0.9), "min_new_tokens": np.int32(2)},
    {"temperature": np.float64(0.8), "sampling_seed": np.int64(7), "max_new_tokens": np.int64(8)},
    {"temperature": 1.0, "top_p": 1e-300},
    {"stop_token_ids": [-5, 400, 2**40], "ignore_eos": False},
]


def test_bad_requests_are_refused_alone(run_case, models, oracle) -> None:
    """Each beside good ones, which never notice; afterwards nothing is held anywhere."""

    def case() -> tuple[list[Output], list[Output], list[Output]]:
        with Rig(models, "D_mid", 3, "parallel", "overlapped", enable_custom_logit_processor=True) as rig:
            good, bad, fine = [], [], []
            for i, (wish, _) in enumerate(BAD):
                wish = dict(wish)
                bad.append(rig.submit(wish.pop("ids", PROMPTS[i % 8]), wish.pop("max_new_tokens", 8), **wish))
                good.append(rig.submit(PROMPTS[i % 8], 12))
                rig.turns(i % 3)
            for i, wish in enumerate(FINE):
                wish = dict(wish)
                fine.append(rig.submit(PROMPTS[i], wish.pop("max_new_tokens", 8), **wish))
            rig.run_until_done()
            rig.idle_check()
            return tuple([rig.output(rid) for rid in rids] for rids in (good, bad, fine))  # type: ignore[return-value]

    good, bad, fine = run_case(case)
    truth = oracle.greedy(PROMPTS)
    assert_prefixes(good, [12] * len(good), [truth[i % 8] for i in range(len(good))])
    for (wish, named), output in zip(BAD, bad):
        assert output.finish is not None and output.finish["type"] == "abort", wish
        assert output.finish["status_code"] == HTTPStatus.BAD_REQUEST and named in output.finish["message"], wish
    for wish, output in zip(FINE, fine):
        assert output.finish == {"type": "length", "length": 8} and len(output.ids) == 8, wish


@pytest.mark.parametrize("key", ["320", "-1", "x", "1.5"])
def test_a_bias_outside_the_vocabulary_never_reaches_the_scheduler(sglang_loaded, key) -> None:
    """SGLang itself refuses these, in its tokenizer process."""
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = SamplingParams(logit_bias={key: 1.0})
    params.normalize(None)
    with pytest.raises(ValueError):
        params.verify(320)
