"""Plays a ``Scenario`` of the fuzzer, with drafts and without."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.rig.fuzz import Scenario
from tests.rig.fuzz_player import Player, weights_of
from tests.rig.proxy import FAULTS
from tests.rig.received import Output
from tests.rig.rig import Rig, Row
from tests.rig.test_eagle import Draft, record_drafts

# What a plain server has to share with the one it is compared with.
SHARED = (
    "grammar_backend",
    "reasoning_parser",
    "context_length",
    "allow_auto_truncate",
    "enable_custom_logit_processor",
    "return_hidden_states_mode",
    "enable_streaming_session",
)
# Drafts that are held against the replica of an EAGLE head.
REPLICATED = 24


@dataclass
class Served:
    """What came of a scenario.

    Attributes
    ----------
    outputs : list of Output
    seeded : dict of int to Output
        Of the seeded calls again, on the same server, without a drafter.
    prompts : dict of int to list of int
        Prompts of turns of a session, as the server put them together.
    ended : set of int
        Calls that were unfinished when everything was aborted.
    rows : list of list of Row
        Each call's rounds.
    drafts : list of (int, Draft)
        Some of the drafts that were made, with their calls.
    """

    outputs: list[Output]
    seeded: dict[int, Output] = field(default_factory=dict)
    prompts: dict[int, list[int]] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    rows: list[list[Row]] = field(default_factory=list)
    drafts: list[tuple[int, Draft]] = field(default_factory=list)


def _spoil(scenario: Scenario) -> dict[str, Any]:
    """Do to this process what is wrong in the scenario; the rest is for ``Rig``."""
    from sglang.srt.managers import scheduler

    from sglang_psd.scheduler import launch, vitals

    if scenario.retract_every:
        scheduler.TEST_RETRACT, scheduler.TEST_RETRACT_INTERVAL = True, scenario.retract_every

    drafter, options = dict(scenario.drafter), {}
    config: dict[str, Any] = {**scenario.config, "restart": bool(drafter.get("spares"))}
    if "kv_tokens" in drafter:
        launch.draft_kv_tokens = lambda args: drafter["kv_tokens"]
    if "wire" in drafter:
        name, seed = drafter["wire"]
        options["fault"] = (FAULTS[name], seed)
        vitals.PING_EVERY_S = 0.1
        config.update(draft_timeout_s=0.15)
    return {"config": config, "spares": drafter.get("spares", 0), "target": scenario.target, **options}


def serve(models: Path, scenario: Scenario) -> Served:
    """With drafts."""
    spoiled = _spoil(scenario)
    with Rig(models, scenario.draft, scenario.k, scenario.mode, scenario.loop, **spoiled, **scenario.options) as rig:
        if "mailbox" in scenario.drafter:
            from sglang_psd.channel.ring import RowRing

            rig.scheduler.psd_handoff._ring = RowRing(scenario.drafter["mailbox"])
        player, taken = Player(rig, models, scenario), record_drafts(rig)
        player.play()
        player.close_sessions()
        _end_well(rig, scenario)
        served = Served([rig.output(player.rids[i]) for i in range(len(scenario.calls))])
        served.prompts, served.ended = player.prompts, player.ended
        served.rows = [rig.rounds_of(player.rids[i]) for i in range(len(scenario.calls))]
        greedy = {player.rids[i]: i for i, call in enumerate(scenario.calls) if call.kind == "greedy"}
        made = [(greedy[draft.rid], draft) for draft in taken if draft.rid in greedy and draft.drafts]
        served.drafts = made[:: max(1, len(made) // REPLICATED)]
        rig.scheduler.psd_client.give_up("the test wants none")
        rig.scheduler.psd_supervisor.give_up("the test wants none")
        served.seeded = _again(rig, player, scenario)
        return served


def _again(rig: Rig, player: Player, scenario: Scenario) -> dict[int, Output]:
    """Seeded calls once more, if the target still has the weights that they met."""
    weights = weights_of(scenario)
    numbers = [i for i, call in enumerate(scenario.calls) if call.kind == "seeded" and weights[i] == weights[-1]]
    rids = [player.send(i) for i in numbers]
    rig.run_until_done()
    return {i: rig.output(rid) for i, rid in zip(numbers, rids)}


def _end_well(rig: Rig, scenario: Scenario) -> None:
    """Nothing is held on either side, where there still are two."""
    drafter = rig.drafter
    assert drafter is not None
    if drafter.proxy is not None:
        drafter.proxy.heal()
    client, supervisor = rig.scheduler.psd_client, rig.scheduler.psd_supervisor
    rig.run_until(lambda: rig.scheduler.psd_client.drafting or supervisor.given_up, "a drafter or none for good")
    if not supervisor.given_up and "wire" in scenario.drafter and client is rig.scheduler.psd_client:
        rig.ask_drafter()  # at this point of the stream both sides compare what is open
    # A busy machine lets the drafter be late: its drafts are missed then, and nothing else.
    rig.idle_check(late_allowed=True, drafter=not supervisor.given_up)


def plain(models: Path, scenario: Scenario, numbers: list[int], target: str, alone: bool) -> tuple[dict, dict]:
    """Without: outputs of the given calls, and the prompts of turns of sessions, on a server with these weights."""
    options = {name: scenario.options[name] for name in SHARED if name in scenario.options}
    # Sessions that stream keep KV in the prefix cache.
    options["disable_radix_cache"] = not options.get("enable_streaming_session")
    with Rig(models, None, target=target, **options) as rig:
        player = Player(rig, models, scenario)
        for number in numbers:
            # SGLang's scheduler ends of a batch in which some ask for ``token_ids_logprob`` and others do not: these
            # get a list where ``move_logprobs_to_cpu`` and ``_normalize_decode_outputs`` of its
            # ``BatchResultProcessor`` want a tensor.
            by_itself = alone or "token_ids_logprob" in scenario.calls[number].wish.get("fields", {})
            if by_itself:
                rig.run_until_done()
            player.send(number)
            if by_itself:
                rig.run_until_done()
        rig.run_until_done()
        return {i: rig.output(player.rids[i]) for i in numbers}, player.prompts
