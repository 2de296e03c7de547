"""Log probabilities and hidden states: one entry per token, the target's own, within 1e-4 of the plain server's."""

from __future__ import annotations

import pytest

from tests.models import EOS
from tests.rig.rig import Ask, Output
from tests.rig.together import LOOPS, PROMPTS, assert_same, assert_same_values, plain, together

EVERYTHING = {
    "logprobs": True,
    "top_logprobs": 3,
    "fields": {"logprob_start_len": 0, "token_ids_logprob": [5, 77, 200], "stream": True},
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("draft", ["D_same", "D_mid"])
def test_logprobs(run_case, models, oracle, draft, loop) -> None:
    """With and without, with different numbers of alternatives, of chosen ids, of the prompt; streamed and not."""
    wishes = [{"logprobs": True, "top_logprobs": n} for n in (0, 1, 5)] + [{}, EVERYTHING]
    wishes += [{"logprobs": True, "fields": {"token_ids_logprob": [9]}}]
    asks: list[Ask] = [(ids, 9 + i, wishes[i % 6]) for i, ids in enumerate(PROMPTS)]
    asks += [(PROMPTS[0], 20, {"logprobs": True, "top_logprobs": 2, "stop_token_ids": [oracle.greedy(PROMPTS)[0][6]]})]
    expected = oracle.outputs(asks)
    found, _ = run_case(together, models, draft, 4, loop, asks)
    assert_same(found, expected, asks)
    assert_same_values(found, expected)
    assert all(len(o.logprobs) == (len(o.ids) if "logprobs" in ask[2] else 0) for o, ask in zip(found, asks))
    assert sum(len(o.input_logprobs) == len(ids) for o, (ids, _, _) in zip(found, asks)) == 1


def test_logprobs_of_adjusted_laws(run_case, models, oracle) -> None:
    """Penalties and bias are in the reported values, as on the plain server."""
    wishes = [{"frequency_penalty": 0.7}, {"repetition_penalty": 1.3}, {"logit_bias": {"45": 3.0, str(EOS): -2.0}}]
    asks: list[Ask] = [(ids, 16, {**wishes[i % 3], "logprobs": True}) for i, ids in enumerate(PROMPTS)]
    found, _ = run_case(together, models, "D_mid", 3, "overlapped", asks)
    expected = oracle.outputs(asks)
    assert_same(found, expected, asks)
    assert_same_values(found, expected)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_logprobs_of_sampled_tokens(run_case, models, temperature) -> None:
    """Scored again by the plain server: the whole text as a prompt that is to be read and nothing more."""
    wish = {"temperature": temperature, "logprobs": True, "top_logprobs": 2}
    asks: list[Ask] = [(ids, 16, {**wish, "sampling_seed": i} if i % 2 else wish) for i, ids in enumerate(PROMPTS)]
    found, _ = run_case(together, models, "D_mid", 3, "overlapped", asks)
    whole: list[Ask] = [
        ([*ids, *output.ids], 1, {"logprobs": True, "top_logprobs": 320, "fields": {"logprob_start_len": 0}})
        for (ids, _, _), output in zip(asks, found)
    ]
    for (ids, _, _), output, read in zip(asks, found, run_case(_scores, models, whole)):
        laws = [[value / temperature for value in law] for law in read[len(ids) :]]
        expected = [law[token] - _log_sum_exp(law) for law, token in zip(laws, output.ids)]
        assert output.logprobs == pytest.approx(expected, abs=1e-4)


def _scores(models, asks: list[Ask]) -> list[list[list[float]]]:
    """Log probability of every token at every position of each prompt, ``[N, V]``, by Hugging Face's model."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(models / "T").eval()
    laws = []
    for ids, _, _ in asks:
        with torch.inference_mode():
            law = torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1)
        laws.append([[0.0] * law.shape[-1], *law[:-1].tolist()])
    return laws


def _log_sum_exp(values: list[float]) -> float:
    import math

    return math.log(sum(math.exp(value) for value in values))


def test_logprobs_survive_retraction_and_chunked_prompts(run_case, models, oracle) -> None:
    asks: list[Ask] = [(ids, 40, EVERYTHING) for ids in PROMPTS]
    options = {"max_total_tokens": 170, "chunked_prefill_size": 8, "schedule_conservativeness": 0.05}
    found, _ = run_case(together, models, "D_mid", 3, "overlapped", asks, **options)
    expected = oracle.outputs(asks)
    assert sum(output.retractions for output in found) > 0, "the pool was not small enough for this test"
    assert_same(found, expected, asks)
    assert_same_values(found, expected)


@pytest.mark.parametrize("how", [True, "last"])
@pytest.mark.parametrize("loop", LOOPS)
def test_hidden_states(run_case, models, oracle, loop, how) -> None:
    """Of every token read or emitted, or of the last one; requests without them beside."""
    options = {"return_hidden_states_mode": "full" if how is True else "last"}
    asks: list[Ask] = [(ids, 13, {"fields": {"return_hidden_states": how}}) for ids in PROMPTS[:3]]
    asks += [(PROMPTS[3], 13, {})]
    text = oracle.greedy(PROMPTS)[4]
    asks += [
        (PROMPTS[4], 13, {"stop_token_ids": [text[6]], "ignore_eos": False, "fields": {"return_hidden_states": how}})
    ]
    expected = run_case(plain, models, asks, **options)
    # What is found in the cache is not read, and has no hidden states.
    found, _ = run_case(together, models, "D_same", 4, loop, asks, disable_radix_cache=True, **options)
    assert_same(found, expected, asks)
    assert [_shape(o) for o in found] == [_shape(o) for o in expected]
    assert _shape(found[0]) and not _shape(found[3])
    for ours, theirs in zip(found, expected):
        assert _flat(ours.hidden_states) == pytest.approx(_flat(theirs.hidden_states), abs=1e-4)


def _shape(output: Output) -> list:
    return [len(row) if isinstance(row, list) else 0 for row in output.hidden_states]


def _flat(values) -> list[float]:
    return [x for value in values for x in _flat(value)] if isinstance(values, list) else [values]
