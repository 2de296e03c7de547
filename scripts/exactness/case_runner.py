"""Cases on one engine: new weights, memory given back, bursts of requests."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.exactness.cases import CASES, NUM_CHATS, PROBE_LENGTH, Case, greedy
from scripts.exactness.traffic import Request

if TYPE_CHECKING:
    from scripts.exactness.worker import Answerer, Cases


IDLE_S = 20.0


async def run_cases(answerer: Answerer, cases: Cases) -> None:
    """Answer the cases in order; a case that fails as a whole says so and leaves the others alone."""
    probe = await _probe(answerer, cases)
    for name in cases.names:
        case = CASES[name]
        try:
            said = await _prepare(answerer.engine, case, cases)
        except Exception as error:
            answerer.write(number=-1, case=name, answers=[{"error": f"{type(error).__name__}: {error}"}])
            continue
        if said:
            answerer.write(number=-2, case=name, answers=[{"said": said}])
        for burst in bursts(case.requests(probe), case.bursts):
            await answerer.answer(burst, case=name)


def bursts(requests: list[Request], sizes: Sequence[int]) -> Iterator[list[Request]]:
    """``requests`` in pieces of ``sizes``; all at once where there are none."""
    start = 0
    for size in sizes or (len(requests),):
        yield requests[start : start + size]
        start += size


async def _probe(answerer: Answerer, cases: Cases) -> list[list[int]]:
    """The plain engine's greedy texts: it makes them, the others wait."""
    from scripts.exactness.worker import ask, wait_for

    if cases.plain:
        requests = greedy(NUM_CHATS, PROBE_LENGTH)([])
        texts = [(await ask(answerer.engine, request, False))[0]["ids"] for request in requests]
        written = Path(cases.probe + ".soon")
        written.write_text(json.dumps(texts))
        written.rename(cases.probe)
    return json.loads(wait_for(cases.probe))


async def _prepare(engine: Any, case: Case, cases: Cases) -> str:
    """What has to happen before a case; returns what the server said."""
    from sglang.srt.managers.io_struct import (
        ReleaseMemoryOccupationReqInput,
        ResumeMemoryOccupationReqInput,
        UpdateWeightFromDiskReqInput,
    )

    manager = engine.tokenizer_manager
    weights = case.weights
    if case.release or weights is not None:
        await manager.flush_cache(timeout_s=IDLE_S)  # SGLang asserts an idle server in what follows
    if case.release and not cases.plain:
        await manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=None), None)
        await manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=None), None)
        weights = weights or "target"  # what was released is gone
    if weights is None:
        return ""
    manifest = None if case.draft is None or cases.plain else {"draft_model_path": cases.checkpoints[case.draft]}
    update = UpdateWeightFromDiskReqInput(model_path=cases.checkpoints[weights], flush_cache=True, manifest=manifest)
    success, message, *_ = await manager.update_weights_from_disk(update, None)
    if not success:
        raise RuntimeError(message)
    return message
