"""Random servers of every kind, and what may happen to them while they serve: the second generator of the fuzzer.

``fuzz.py`` draws servers whose drafter is well and whose requests come and go. Here the drafter may be an EAGLE head,
may have too little memory, a bad wire, or die; the server may be paused, flushed, get new weights; requests may belong
to sessions, have priorities, processors and hidden states, and reach the end of the context or of the pool.
"""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random
from typing import Any

from tests.models import CONTEXT_LEN, THINK_END
from tests.rig.fuzz import LETTERS, Call, Scenario, _sometimes, random_call
from tests.rig.proxy import FAULTS

HEADS = {"L_e3": "L", "L_e3s": "L", "L_e1": "L", "B_e1": "B"}
MODELS = ("D_same", "D_same", "D_mid", "D_bad", "D_hid", "D_voc", "D_ctx")
SESSIONS = ("a", "b", "c")
TURNS = 5
GRAMMAR_NAMES = {"regex", "json_schema", "ebnf", "structural_tag"}
TAGS = json.dumps(
    {
        "type": "structural_tag",
        "structures": [
            {"begin": "=f=", "schema": {"type": "object", "properties": {"c": {"enum": ["red"]}}}, "end": "=e="}
        ],
        "triggers": ["=f="],
    }
)
# Not with priorities, which know two policies only.
POLICIES = ("lpm", "random", "fcfs", "dfs-weight", "lof", "routing-key")


# --- requests --------------------------------------------------------------------------------------


def _fields(wish: dict[str, Any], **more: Any) -> None:
    wish["fields"] = {**wish.get("fields", {}), **more}


def _widen_wish(rng: Random, wish: dict[str, Any], prompt_len: int) -> None:
    """Ask for more than ``random_wish`` does; in place."""
    constrained = bool(GRAMMAR_NAMES & wish.keys())
    if not constrained and rng.randint(1, 12) == 1:
        bias = {**wish.get("logit_bias", {}), str(THINK_END): rng.choice([4.0, 6.0])}
        wish.update(logit_bias=bias)
        _fields(wish, require_reasoning=True)
    elif not constrained and "min_new_tokens" not in wish and rng.randint(1, 12) == 1:
        wish.update(structural_tag=TAGS, ignore_eos=False, logit_bias={"35": 6.0, "66": 5.0, "71": 5.0})
    if constrained and rng.randint(1, 4) == 1:
        wish["stop"] = LETTERS[rng.randint(0, 24) :]
    if wish.get("temperature") and rng.randint(1, 8) == 1:
        wish["top_k"] = 1
    if wish.get("logprobs"):
        if rng.randint(1, 4) == 1:
            _fields(wish, token_ids_logprob=rng.sample(range(320), rng.randint(1, 4)))
        if rng.randint(1, 3) == 1:
            _fields(wish, logprob_start_len=rng.randint(0, prompt_len - 1))
    if rng.randint(1, 8) == 1:
        wish["stream_interval"] = rng.randint(1, 9)
        _fields(wish, stream=True)
    if rng.randint(1, 10) == 1:
        _fields(wish, extra_key=rng.choice("xy"))


def _widen_for(rng: Random, wish: dict[str, Any], options: dict[str, Any]) -> None:
    """Ask for what this server has; in place."""
    if options.get("enable_priority_scheduling"):
        _fields(wish, priority=rng.randint(0, 30))
    if options.get("schedule_policy") == "routing-key":
        _fields(wish, routing_key=rng.choice("xyz"))
    how = options.get("return_hidden_states_mode")
    if how and rng.randint(1, 3) == 1:
        _fields(wish, return_hidden_states=rng.choice([True, "last"]) if how == "full" else "last")
    # A processor and a grammar may leave no token at all between them.
    if options.get("enable_custom_logit_processor") and rng.randint(1, 3) == 1 and not GRAMMAR_NAMES & wish.keys():
        name = rng.choice(["Ban", "NoRepeats", "Alternate", "DisallowedTokensLogitsProcessor"])
        banned = rng.sample(range(5, 320), rng.randint(1, 40))
        params = {"Ban": {"banned": banned}, "DisallowedTokensLogitsProcessor": {"token_ids": [7, 70, 170]}}
        wish["custom_params"] = params.get(name, {})
        _fields(wish, custom_logit_processor=name)


def _long_tail(rng: Random, call: Call, limit: int) -> Call:
    """A prompt of up to ``limit`` tokens."""
    room = limit - len(call.ids)
    more = tuple(rng.randint(5, 319) for _ in range(rng.randint(max(1, room - 30), room)))
    return replace(call, tail=call.tail + more)


def wide_call(rng: Random, options: dict[str, Any], longest: int) -> Call:
    """One request; ``longest`` is the length up to which some prompts are stretched."""
    call = random_call(rng)
    if longest > 110 and rng.randint(1, 12) == 1:
        call = _long_tail(rng, call, longest if rng.randint(1, 3) == 1 else rng.randint(100, longest))
    _widen_wish(rng, call.wish, len(call.ids))
    _widen_for(rng, call.wish, options)
    if rng.randint(1, 15) == 1:
        call.wish.pop("min_new_tokens", None)
        call = replace(call, length=rng.choice([0, 0, 1]))
    return call


def wide_calls(rng: Random, options: dict[str, Any], longest: int, num_calls: int) -> list[Call]:
    """Requests; some come as SGLang's front end sends ``n`` above 1: the prompt for its KV alone, then copies."""
    calls: list[Call] = []
    while len(calls) < num_calls:
        call = wide_call(rng, options, longest)
        if rng.randint(1, 12) == 1:
            first = {name: value for name, value in call.wish.items() if name != "min_new_tokens"}
            calls.append(replace(call, length=0, wish=first, abort=None))
            calls += [replace(call, wait=0)] * rng.randint(2, 4)
        else:
            calls.append(call)
    return calls[:num_calls]


def _with_sessions(rng: Random, calls: list[Call]) -> None:
    """Let some calls be turns of conversations; greedy, so that all servers agree on what was said before."""
    turns = dict.fromkeys(SESSIONS[: rng.randint(1, 3)], TURNS)
    for i, call in enumerate(calls):
        name = rng.choice(list(turns))
        if turns[name] and rng.randint(1, 4) == 1 and len(call.ids) < 100:
            turns[name] -= 1
            wish = {n: v for n, v in call.wish.items() if n not in ("temperature", "sampling_seed")}
            fields = {n: v for n, v in wish.get("fields", {}).items() if n not in ("logprob_start_len", "extra_key")}
            wish["fields"] = fields
            calls[i] = replace(call, session=name, wish=wish, abort=None, length=max(1, call.length))


# --- servers ---------------------------------------------------------------------------------------


def wide_server(rng: Random) -> dict[str, Any]:
    """A server's arguments, all but the size of its pool."""
    page = rng.choice([1, 1, 4, 16, 64])
    options: dict[str, Any] = {"page_size": page, "reasoning_parser": "qwen3"}
    options["grammar_backend"] = rng.choice(["xgrammar", "llguidance"])
    # Whole pages, as ``ServerArgs.check_server_args`` asks: behind half a page ``PrefillAdder`` would begin a second
    # chunk in the same batch, and take the first one for the end of its prompt.
    options.update(_sometimes(rng, 2, [{"chunked_prefill_size": -(-n // page) * page} for n in (16, 40)]))
    options.update(_sometimes(rng, 3, [{"disable_radix_cache": True}]))
    options.update(_sometimes(rng, 2, [{"max_running_requests": n} for n in (1, 2, 3, 5, 7)]))
    options.update(_sometimes(rng, 4, [{"prefill_max_requests": n} for n in (1, 2)]))
    options.update(_sometimes(rng, 4, [{"stream_interval": n} for n in (2, 5)]))
    options.update(_sometimes(rng, 4, [{"radix_eviction_policy": name} for name in ("lfu", "slru", "priority")]))
    options.update(_sometimes(rng, 4, [{"return_hidden_states_mode": how} for how in ("full", "last")]))
    options.update(_sometimes(rng, 4, [{"enable_custom_logit_processor": True}]))
    options.update(_sometimes(rng, 5, [{"context_length": n} for n in (64, 100, 128)]))
    if "context_length" in options and rng.randint(1, 3) == 1:
        options["allow_auto_truncate"] = True
    if rng.randint(1, 4) == 1:
        options["enable_priority_scheduling"] = True
        options["priority_scheduling_preemption_threshold"] = rng.choice([1, 5, 10])
        options.update(_sometimes(rng, 2, [{"schedule_low_priority_values_first": True}]))
        options.update(_sometimes(rng, 2, [{"retraction_policy": "priority"}]))
        options.update(_sometimes(rng, 4, [{"disable_priority_preemption": True}]))
        options.update(_sometimes(rng, 2, [{"schedule_policy": "lof"}]))
    else:
        options.update(_sometimes(rng, 2, [{"schedule_policy": name} for name in POLICIES]))
    return options


def _spare_sessions(options: dict[str, Any]) -> None:
    """Leave out what SGLang's streaming sessions cannot stand, with or without drafts; in place."""
    if options.get("max_running_requests", 16) <= len(SESSIONS):
        # Each keeps a row of ``ReqToTokenPool``, which has as many as may run: requests wait for ever.
        del options["max_running_requests"]
    if options.get("schedule_policy") == "dfs-weight":
        # ``SchedulePolicy._sort_by_dfs_weight`` walks over the prefix cache, where their requests do not stand: it
        # drops them from the queue.
        del options["schedule_policy"]


def tight_pool(rng: Random, calls: list[Call], page: int, k: int) -> int:
    """KV tokens for a pool in which each request fits by itself, and some pages more.

    SGLang shortens an answer for which there is less than the prompt's pages, the answer and one page more
    (``Scheduler.init_req_max_new_tokens``), and refuses a prompt that leaves less than seven tokens
    (``TpModelWorker``, ``max_req_input_len``); a verify reserves a whole chunk (docs/features.md).
    """

    def paged(tokens: int) -> int:
        return -(-tokens // page) * page

    least = max(
        max(paged(len(call.ids)) + call.length + page + 2, paged(len(call.ids) + call.length + k), len(call.ids) + 7)
        for call in calls
    )
    return paged(least) + page * rng.randint(0, 3)


def wide_config(rng: Random) -> dict[str, Any]:
    """More keys for ``--psd-config``."""
    config: dict[str, Any] = _sometimes(rng, 4, [{"min_parallel_requests": n} for n in (3, 6)])
    config.update(_sometimes(rng, 4, [{"rebalance_threshold": n} for n in (3, 5)]))
    config.update(_sometimes(rng, 4, [{"proposal_top_m": m} for m in (1, 2, 400)]))
    return config


# --- what happens ----------------------------------------------------------------------------------

Events = dict[int, list[tuple[Any, ...]]]


def _at(rng: Random, events: Events, num_calls: int, *chain: tuple[Any, ...]) -> None:
    """Put events before random calls, in the order given."""
    places = sorted(rng.sample(range(num_calls), min(len(chain), num_calls)))
    for place, event in zip(places, chain):
        events.setdefault(place, []).append(event)


def trouble(rng: Random, events: Events, num_calls: int, head: bool) -> dict[str, Any]:
    """What is wrong with the drafter: from the start (returned) or as events."""
    kind = rng.choice(["none"] * 6 + ["killed", "killed", "lost", "stopped", "wire", "wire", "pool", "told", "mailbox"])
    if kind == "killed":
        _at(rng, events, num_calls, ("kill",), ("await_drafter",))
        return {"spares": 1}
    if kind == "lost":
        _at(rng, events, num_calls, rng.choice([("kill",), ("lose",)]))
    if kind == "stopped":
        _at(rng, events, num_calls, ("stop",), ("go_on",))
    if kind == "wire":
        return {"wire": (rng.choice(sorted(FAULTS)), rng.randrange(1000)), "spares": 1}
    if kind == "pool":
        return {"kv_tokens": rng.choice([60, 150, 300])}
    if kind == "told":
        for _ in range(rng.randint(1, 4)):
            _at(rng, events, num_calls, rng.choice([("reset",), ("reopen",)]))
    if kind == "mailbox" and head:
        return {"mailbox": rng.choice([8, 20, 60])}
    return {}


def controls(rng: Random, events: Events, num_calls: int, scenario: dict[str, Any], sessions: bool) -> None:
    """What a server's owner does meanwhile."""
    for _ in range(rng.randint(0, 2)):
        _at(rng, events, num_calls, ("pause", rng.choice(["retract", "in_place"])), ("continue",))
    if rng.randint(1, 3) == 1:
        _at(rng, events, num_calls, ("flush",), ("idle",), ("flush",))
    if rng.randint(1, 3) == 1:
        _at(rng, events, num_calls, ("same_weights", rng.choice([True, False])))
    if rng.randint(1, 5) == 1:
        _at(rng, events, num_calls, ("abort_all",)) if not sessions else None
    if scenario["target"] == "T" and not sessions and rng.randint(1, 5) == 1:
        names = [rng.choice(["D_mid", "D_bad", "T", "D_hid", "nowhere"]) for _ in range(rng.randint(1, 2))]
        _at(rng, events, num_calls, *(("target", name) for name in names))
    elif rng.randint(1, 5) == 1:
        _at(rng, events, num_calls, ("draft", rng.choice(["D_same", "D_mid", "D_bad", "D_hid", "D_tok"])))


def wide_scenario(rng: Random, num_calls: int) -> Scenario:
    """A server, ``num_calls`` requests and what happens meanwhile."""
    head = rng.randint(1, 5) <= 2
    draft = rng.choice([*HEADS, "B_e1", "B_e1"]) if head else rng.choice(MODELS)
    k = rng.choice([1, 2, 3, 4, 5, 6, 7, 8, 12, 31])
    options = wide_server(rng)
    sessions = rng.randint(1, 4) == 1 and not options.get("enable_custom_logit_processor")
    small = not sessions and rng.randint(1, 2) == 1
    longest = options.get("context_length", 110 if small else CONTEXT_LEN) + 2
    calls = wide_calls(rng, options, longest, num_calls)
    if sessions:
        _with_sessions(rng, calls)
        options["enable_streaming_session"] = rng.randint(1, 2) == 1 and "disable_radix_cache" not in options
        if options["enable_streaming_session"]:
            _spare_sessions(options)
    if small:
        options["max_total_tokens"] = tight_pool(rng, calls, options["page_size"], k)
        options["schedule_conservativeness"] = rng.choice([1.0, 0.05])
    parts = {"draft": draft, "target": HEADS.get(draft, "T")}
    events: Events = {}
    drafter = trouble(rng, events, num_calls, head)
    controls(rng, events, num_calls, parts, sessions)
    return Scenario(
        k=k,
        mode=rng.choice(["parallel", "parallel", "sequential"]),
        loop=rng.choice(["overlapped", "overlapped", "synchronous"]),
        options=options,
        calls=calls,
        config=wide_config(rng),
        drafter=drafter,
        events=events,
        retract_every=rng.choice([0, 0, 0, 0, 0, 2, 3, 7]),
        **parts,
    )
