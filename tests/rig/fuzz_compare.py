"""What has to hold between the answers of a ``Scenario`` and those of SGLang without speculation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.heads import Replica
from tests.models import CONTEXT_LEN
from tests.rig.fuzz import Call, Scenario
from tests.rig.fuzz_player import weights_of
from tests.rig.fuzz_serve import Served, plain, serve
from tests.rig.fuzz_wide import HEADS
from tests.rig.received import Output
from tests.rig.together import CLOSE, assert_same_values

# What SGLang says to requests that do not fit the context.
REFUSED = ("exceeds the maximum allowed length", "use a smaller logprob_start_len")
# Events after which a draft may be wrong, or its context another one than the replica's.
NEW_WEIGHTS = {"target", "draft"}
LOSSES = {"kill", "lose", "stop", "reset", "reopen"}


def close_on(scenario: Scenario) -> float:
    """How far values may lie apart: in float32 a head's target of four layers has been seen to differ by 1.2e-4."""
    return CLOSE if scenario.target == "T" else 5 * CLOSE


def is_refused(output: Output) -> bool:
    """Whether a request did not fit the context."""
    message = str(output.finish.get("message")) if output.finish is not None else ""
    return any(words in message for words in REFUSED)


def is_empty(output: Output) -> bool:
    """Whether a request ended without a token; the log probability of one may stand there (docs/features.md)."""
    return output.finish == {"type": "length", "length": 0}


def agree(call: Call, ours: Output, theirs: Output, *, ended: bool = False) -> bool:
    """Whether a request got what it should have got; ``ended``: all were aborted while it ran."""
    if is_refused(ours):
        # What SGLang makes of the prompt of one token that it then serves is nobody's: the client gets the message.
        return ours.finish == theirs.finish
    if ours.finish is not None and ours.finish["type"] == "abort" and (call.abort is not None or ended):
        # While its grammar is compiled SGLang ends a request by giving it a prompt of one token, and answers that.
        waited = ours.finish.get("message") == "Aborted by AbortReq."
        # An abort comes first in ``Req.update_finish_state``: one token then stands where none was wanted.
        unwanted = is_empty(theirs) and len(ours.ids) <= 1
        return waited or unwanted or ours.ids == theirs.ids[: len(ours.ids)]
    return (ours.ids, ours.finish, ours.reasoning) == (theirs.ids, theirs.finish, theirs.reasoning)


def assert_ends_where_it_says(call: Call, output: Output, *, ended: bool = False) -> None:
    """Counts fit, and nothing stands behind an end."""
    assert output.finish is not None
    if output.finish["type"] == "abort":
        assert call.abort is not None or ended or is_refused(output), (call, output.finish)
        return
    assert output.usage == len(output.ids) <= call.length, (call, output)
    if not is_empty(output):
        assert len(output.logprobs) == (len(output.ids) if call.wish.get("logprobs") else 0)
    assert output.rounds + output.accepted >= output.usage - 1 - output.retractions
    stops = set(call.wish.get("stop_token_ids", ()))
    if not call.wish.get("ignore_eos", True):
        first = next((i for i, token in enumerate(output.ids) if token in stops), None)
        assert first in (None, len(output.ids) - 1), (call, output)
    least = call.wish.get("min_new_tokens", 0)
    if output.finish["type"] == "stop" and isinstance(output.finish.get("matched"), int):
        assert len(output.ids) > least, (call, output)


def _rows(hidden: list[Any]) -> list[list[float]]:
    """Rows of hidden states, of a prompt and of tokens; one row alone where only the last was asked for."""
    if hidden and not isinstance(hidden[0], list):
        return [hidden]
    return [row for part in hidden for row in (_rows(part) if part and isinstance(part[0], list) else [part])]


def assert_same_hidden_states(scenario: Scenario, call: Call, ours: Output, theirs: Output) -> None:
    """The same rows; of a prompt only those that were computed in its last forward."""
    wanted = call.wish.get("fields", {}).get("return_hidden_states")
    if not wanted:
        assert not ours.hidden_states
        return
    if ours.retractions or is_empty(ours):
        return  # SGLang keeps what was computed before, and adds the whole of it again
    mine, other = _rows(ours.hidden_states), _rows(theirs.hidden_states)
    whole = scenario.options.get("disable_radix_cache") and "chunked_prefill_size" not in scenario.options
    if not whole and wanted is True:
        mine, other = mine[-len(ours.ids) :], other[-len(ours.ids) :]
    assert len(mine) == len(other), (call, len(mine), len(other))
    for row, plain_row in zip(mine, other):
        assert row == pytest.approx(plain_row, abs=close_on(scenario)), call


def is_free(call: Call) -> bool:
    """Whether nothing but its length shapes a call's text: a right draft is accepted."""
    shapes = {"frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "min_new_tokens", "regex"}
    shapes |= {"json_schema", "ebnf", "structural_tag", "stop", "stop_regex", "custom_params"}
    return call.kind == "greedy" and not shapes & call.wish.keys()


def scaled_by_neighbours(call: Call) -> bool:
    """Whether log probabilities depend on the batch.

    SGLang's ``Sampler.forward`` and ``compute_spec_v2_logprobs`` divide by the temperature unless all requests of the
    batch are greedy, which one with ``top_k`` 1 is at any temperature.
    """
    return call.wish.get("top_k") == 1 and call.wish.get("temperature", 1.0) != 1.0


def assert_right_drafts(models: Path, scenario: Scenario, served: Served) -> None:
    """A draft of the target's own weights is right; a head's are its replica's."""
    happened = {name for events in scenario.events.values() for name, *_ in events}
    if happened & NEW_WEIGHTS or scenario.drafter.get("wire", ("",))[0] == "corrupted":
        return
    if scenario.draft == "D_same":
        for call, rows in zip(scenario.calls, served.rows):
            wrong = [row for row in rows if row.gained <= row.drafts and not row.finished]
            assert not (is_free(call) and wrong), (call, wrong)
    # Without a prefix cache the drafter's pool holds whatever the target's does, and a head gets all hidden states.
    whole = scenario.options.get("disable_radix_cache") and not happened & LOSSES and not scenario.drafter
    if scenario.draft in ("D_same", "D_mid", "D_bad", "D_hid", "D_voc") and whole:
        for call, rows in zip(scenario.calls, served.rows):
            fits = len(call.ids) + call.length + scenario.k <= CONTEXT_LEN  # the draft's context, drafts included
            bare = [row for row in rows if not row.drafts and not row.finished]
            assert not (is_free(call) and fits and bare), (call, rows)
    if scenario.draft in HEADS and whole:
        replica = Replica(models / scenario.target, models / scenario.draft)
        for number, draft in served.drafts:
            expected = replica.draft(draft.tokens, scenario.k)[: len(draft.drafts)]
            assert draft.drafts == expected, (number, scenario.calls[number], draft)


def _expected(
    run_case, models: Path, scenario: Scenario, numbers: list[int], alone: bool
) -> tuple[dict[int, Output], dict[int, list[int]]]:
    """The plain server's answers and prompts, each with the weights that the call met."""
    weights = weights_of(scenario)
    outputs: dict[int, Output] = {}
    prompts: dict[int, list[int]] = {}
    for target in dict.fromkeys(weights[i] for i in numbers):
        some = [i for i in numbers if weights[i] == target]
        found = run_case(plain, models, scenario, some, target, alone, timeout_s=300)
        outputs.update(found[0])
        prompts.update(found[1])
    return outputs, prompts


def check(run_case, models: Path, scenario: Scenario) -> None:
    """Serve a scenario and compare all of it."""
    served: Served = run_case(serve, models, scenario, timeout_s=300)
    outputs, calls = served.outputs, scenario.calls
    greedy = [i for i, call in enumerate(calls) if call.kind == "greedy"]
    expected, prompts = _expected(run_case, models, scenario, greedy, False)

    def agreed(i: int, right: Output) -> bool:
        return agree(calls[i], outputs[i], right, ended=i in served.ended)

    odd = [i for i in greedy if not agreed(i, expected[i])]
    if odd:
        # The plain server itself may round differently in a batch: one at a time is what counts.
        sessions = {calls[i].session for i in odd} - {None}
        odd = [i for i in greedy if i in odd or calls[i].session in sessions]
        again, said = _expected(run_case, models, scenario, odd, True)
        expected.update(again)
        prompts.update(said)
    for i, call in enumerate(calls):
        assert_ends_where_it_says(call, outputs[i], ended=i in served.ended)
        right = expected.get(i) or served.seeded.get(i)
        if right is not None:
            assert agreed(i, right), f"{i}: {call}\nours   {outputs[i]}\nright  {right}"
        assert served.prompts.get(i) == prompts.get(i), f"{i}: {call}"
    whole = [i for i in greedy if outputs[i].finish["type"] != "abort" and not is_empty(outputs[i])]
    for i in whole:
        if not scaled_by_neighbours(calls[i]):
            assert_same_values([outputs[i]], [expected[i]], close_on(scenario))
        assert_same_hidden_states(scenario, calls[i], outputs[i], expected[i])
    assert_right_drafts(models, scenario, served)
