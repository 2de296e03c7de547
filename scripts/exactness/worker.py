"""One engine: starts, says so, waits for the others, and answers requests until the deadline.

    python -m scripts.exactness.worker JOB.json

``JOB.json`` is a ``Job``. Answers are written line by line as they come; the last line says how it ended.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import traceback
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from scripts.exactness.traffic import Request, random_requests

# Alternatives asked of the engine that the others are compared with: what a difference costs is read from them.
ALTERNATIVES = 8


@dataclass(frozen=True)
class Job:
    """What a worker does.

    Attributes
    ----------
    keywords : dict
        Of ``sgl.Engine``.
    answers, ready, go : str
        Files: the answers; made when the engine is up; made by the caller when all are.
    seed, count, deterministic
        As ``random_requests`` takes them.
    concurrency : int
        Requests sent at once.
    deadline : float
        ``time.time()`` after which no request is sent.
    aborts : bool
        Abort what is to be aborted.
    reference : tuple of str
        Kinds of requests that others are compared with: they ask for alternatives.
    """

    keywords: dict[str, Any]
    answers: str
    ready: str
    go: str
    seed: int
    count: int
    deterministic: bool
    concurrency: int
    deadline: float
    aborts: bool
    reference: tuple[str, ...]


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
    try:
        async for sent in manager.generate_request(obj, None):
            answer = sent
    except Exception as error:
        return [{"error": f"{type(error).__name__}: {error}"}]
    finally:
        if timer is not None:
            timer.cancel()
    return [_digest(one) for one in (answer if isinstance(answer, list) else [answer])]


def _digest(answer: dict[str, Any]) -> dict[str, Any]:
    """What is compared of an answer."""
    meta = answer["meta_info"]
    kept = {
        "ids": list(answer["output_ids"]),
        "text": answer["text"],
        "finish": meta["finish_reason"],
        "usage": meta["completion_tokens"],
        "reasoning": meta.get("reasoning_tokens", 0),
        "rounds": meta.get("spec_verify_ct"),
    }
    if meta.get("output_token_logprobs"):
        kept["logprobs"] = [entry[0] for entry in meta["output_token_logprobs"]]
        kept["input_logprobs"] = [entry[0] for entry in meta.get("input_token_logprobs") or []]
        tops = meta.get("output_top_logprobs") or []
        kept["tops"] = [[[entry[0], entry[1]] for entry in row or []] for row in tops]
    return kept


async def serve(engine: Any, job: Job, requests: list[Request], out: TextIO) -> dict[str, Any]:
    """Answer ``requests`` in order, ``job.concurrency`` at once; returns figures."""
    waiting = iter(requests)
    begin = time.monotonic()

    async def client() -> None:
        for request in waiting:
            if time.time() > job.deadline:
                return
            asked = request
            if request.kind in job.reference:
                wider = {"return_logprob": True, "top_logprobs_num": ALTERNATIVES}
                asked = replace(request, fields={**request.fields, **wider})
            answers = await ask(engine, asked, job.aborts)
            out.write(json.dumps({"number": request.number, "answers": answers}) + "\n")
            out.flush()

    await asyncio.gather(*(client() for _ in range(job.concurrency)))
    return {"seconds": round(time.monotonic() - begin, 1)}


def psd_figures(engine: Any) -> dict[str, Any] | None:
    """The server's ``psd`` section, without what has no place in a result."""
    section = engine.get_server_info()["internal_states"][0].get("psd")
    return section if isinstance(section, dict) else None


def main() -> int:
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    with open(job.answers, "w") as out:
        try:
            import sglang as sgl

            begin = time.monotonic()
            engine = sgl.Engine(**job.keywords)
            Path(job.ready).write_text(str(round(time.monotonic() - begin, 1)))
            requests = random_requests(job.seed, job.count, job.deterministic)
            while not os.path.exists(job.go):
                time.sleep(0.05)
            figures = engine.loop.run_until_complete(serve(engine, job, requests, out))
            figures["psd"] = psd_figures(engine)
            out.write(json.dumps({"done": figures}) + "\n")
            out.flush()
            engine.shutdown()
        except BaseException:
            out.write(json.dumps({"failed": traceback.format_exc()[-4000:]}) + "\n")
            return 1
    return 0


def write_job(path: Path, job: Job) -> None:
    """Save ``job`` for a worker."""
    path.write_text(json.dumps(asdict(job)))


if __name__ == "__main__":
    sys.exit(main())
