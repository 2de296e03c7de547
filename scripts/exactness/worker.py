"""One engine: starts, says so, waits for the others, and answers random traffic or cases.

    python -m scripts.exactness.worker JOB.json

``JOB.json`` is a ``Job``; beside it the worker writes ``ANSWERS``, line by line as answers come, and ``READY``. The
last line says how it ended.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from scripts.exactness.traffic import Request, random_requests
from sglang_psd.server_process import free_port

ANSWERS, READY = "answers.jsonl", "ready"
# Alternatives asked of the engine that the others are compared with: what a difference costs is read from them.
ALTERNATIVES = {"greedy": 8, "seeded": 24, "sampled": 24}


@dataclass(frozen=True)
class Traffic:
    """Random requests, as ``random_requests`` takes it.

    ``plain``: for the engine without PSD, which aborts nothing and answers only what others are compared with.
    """

    seed: int
    count: int
    law_every: int
    plain: bool


@dataclass(frozen=True)
class Cases:
    """Cases by name; ``probe`` is the file of the plain engine's texts, written by the ``plain`` one."""

    names: Sequence[str]
    probe: str
    plain: bool
    checkpoints: dict[str, str]


@dataclass(frozen=True)
class Job:
    """What a worker does.

    Attributes
    ----------
    keywords : dict
        Of ``sgl.Engine``.
    go : str
        File that the caller makes when all engines are up; holds the time (``time.time()``) after which no request is
        sent.
    concurrency : int
        Requests sent at once.
    reference : sequence of str
        Kinds of requests that others are compared with: they ask for alternatives.
    traffic, cases
        One of them.
    """

    keywords: dict[str, Any]
    go: str
    concurrency: int
    reference: Sequence[str]
    traffic: Traffic | None = None
    cases: Cases | None = None


def read_job(path: Path) -> Job:
    """The job that the caller wrote."""
    job = json.loads(path.read_text())
    if job["traffic"] is not None:
        job["traffic"] = Traffic(**job["traffic"])
    if job["cases"] is not None:
        job["cases"] = Cases(**job["cases"])
    return Job(**job)


async def ask(engine: Any, request: Request, aborts: bool) -> list[dict[str, Any]]:
    """Send a request and return its answers, one for each of ``n``; an error is an answer, too."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    rid = f"x{request.number}-"
    manager = engine.tokenizer_manager
    obj = GenerateReqInput(
        input_ids=request.input_ids, sampling_params=dict(request.sampling), rid=rid, **request.fields
    )
    timer = None
    if aborts and request.abort_ms is not None:
        timer = asyncio.get_running_loop().call_later(request.abort_ms / 1000, manager.abort_request, rid)
    answer: Any = None
    broken = False
    try:
        async for sent in manager.generate_request(obj, None):
            if request.fields.get("stream") and answer is not None:
                broken |= not sent["text"].startswith(answer["text"])
            answer = sent
    except Exception as error:
        return [{"error": f"{type(error).__name__}: {error}"}]
    finally:
        if timer is not None:
            timer.cancel()
    answers = [digest(one) for one in (answer if isinstance(answer, list) else [answer])]
    return [{**one, "broken_stream": True} for one in answers] if broken else answers


def digest(answer: dict[str, Any]) -> dict[str, Any]:
    """What is compared of an answer."""
    meta = answer["meta_info"]
    kept = {
        "ids": list(answer["output_ids"]),
        "text": answer["text"],
        "finish": meta["finish_reason"],
        "usage": meta["completion_tokens"],
        "reasoning": meta.get("reasoning_tokens", 0),
        "rounds": meta.get("spec_verify_ct"),
        "cached": meta.get("cached_tokens"),
        "spec": {name: value for name, value in meta.items() if name.startswith("spec_")},
    }
    if meta.get("output_token_logprobs"):
        kept["logprobs"] = [entry[0] for entry in meta["output_token_logprobs"]]
        kept["input_logprobs"] = [entry[0] for entry in meta.get("input_token_logprobs") or []]
        tops = meta.get("output_top_logprobs") or []
        kept["tops"] = [[[entry[0], entry[1]] for entry in row or []] for row in tops]
    return kept


class Answerer:
    """Sends requests of a job to its engine and writes the answers to ``out``."""

    def __init__(self, engine: Any, job: Job, deadline: float, out: TextIO):
        self.engine, self.job, self._deadline, self._out = engine, job, deadline, out

    async def answer(self, requests: Sequence[Request], **more: Any) -> None:
        """Answer ``requests`` in order, ``job.concurrency`` at once, until the deadline; ``more`` goes beside each."""
        waiting = iter(requests)

        async def client() -> None:
            for request in waiting:
                if time.time() > self._deadline:
                    return
                asked = request
                if request.kind in self.job.reference:
                    wider = {"return_logprob": True, "top_logprobs_num": ALTERNATIVES[request.kind]}
                    asked = replace(request, fields={**request.fields, **wider})
                aborts = self.job.traffic is not None and not self.job.traffic.plain
                answers = await ask(self.engine, asked, aborts)
                self.write(number=request.number, answers=answers, **more)

        await asyncio.gather(*(client() for _ in range(self.job.concurrency)))

    def write(self, **entry: Any) -> None:
        """One line."""
        self._out.write(json.dumps(entry) + "\n")
        self._out.flush()


async def serve(answerer: Answerer) -> None:
    """Do the job."""
    job = answerer.job
    if job.traffic is not None:
        traffic = job.traffic
        requests = random_requests(traffic.seed, traffic.count, traffic.law_every)
        if traffic.plain:
            requests = [one for one in requests if one.kind in job.reference or one.kind.startswith("law")]
        await answerer.answer(requests)
    if job.cases is not None:
        from scripts.exactness.case_runner import run_cases

        await run_cases(answerer, job.cases)


def wait_for(path: str) -> str:
    """What a file holds once somebody has written it."""
    while not os.path.exists(path):
        time.sleep(0.05)
    return Path(path).read_text()


def psd_figures(engine: Any) -> dict[str, Any] | None:
    """The server's ``psd`` section."""
    section = engine.get_server_info()["internal_states"][0].get("psd")
    return section if isinstance(section, dict) else None


def main() -> int:
    path = Path(sys.argv[1])
    job = read_job(path)
    with open(path.with_name(ANSWERS), "w") as out:
        try:
            import sglang as sgl

            begin = time.monotonic()
            engine = sgl.Engine(nccl_port=free_port(), **job.keywords)
            path.with_name(READY).write_text(str(round(time.monotonic() - begin, 1)))
            answerer = Answerer(engine, job, float(wait_for(job.go)), out)
            begin = time.monotonic()
            engine.loop.run_until_complete(serve(answerer))
            answerer.write(done={"seconds": round(time.monotonic() - begin, 1), "psd": psd_figures(engine)})
            engine.shutdown()
        except BaseException:
            out.write(json.dumps({"failed": traceback.format_exc()[-4000:]}) + "\n")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
