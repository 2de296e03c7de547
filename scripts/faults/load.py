"""Clients that never stop asking and compare every greedy answer with plain SGLang's."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e.flags import ENVIRONMENT

ROOT = Path(__file__).resolve().parents[2]
REQUEST_TIMEOUT_S = 300


def plain_answers(timeout_s: float) -> list[dict[str, Any]]:
    """Prompt and token ids of each answer of an Engine without PSD (``tests/e2e/engine_plain.py``).

    Raises
    ------
    RuntimeError
        It failed; the message carries the end of its log.
    """
    command = [sys.executable, str(ROOT / "tests/e2e/engine_plain.py"), "[]"]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, cwd=ROOT, timeout=timeout_s)
    if done.returncode:
        raise RuntimeError(f"The Engine without PSD ended with code {done.returncode}:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])["answers"]


def generate(url: str, text: str, max_new_tokens: int) -> list[int]:
    """Greedy token ids that continue ``text``."""
    body = {"text": text, "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens}}
    request = urllib.request.Request(url + "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as answer:
        return json.load(answer)["output_ids"]


def warm_up(url: str, answers: list[dict[str, Any]]) -> None:
    """Let the server read each prompt alone, as the Engine without PSD did: the last bits of KV may depend on it."""
    for expected in answers:
        generate(url, expected["prompt"], 1)


def get_json(url: str) -> dict[str, Any]:
    """GET an object."""
    with urllib.request.urlopen(url, timeout=REQUEST_TIMEOUT_S) as answer:
        return json.load(answer)


def psd_section(url: str) -> dict[str, Any]:
    """The ``psd`` part of ``/server_info``."""
    return get_json(url + "/server_info")["internal_states"][0]["psd"]


@dataclass
class Answer:
    """One request: when it began, how long it took (seconds), what went wrong if anything did.

    ``same`` is the number of tokens up to the first one that is not plain SGLang's; None when there is no such token.
    """

    started_s: float
    seconds: float
    error: str | None
    same: int | None = None


@dataclass
class Load:
    """``concurrency`` clients in threads.

    Parameters
    ----------
    url : str
    answers : list of dict
        From ``plain_answers``.
    concurrency : int
    exact : bool
        Whether another text than plain SGLang's is an error.
    """

    url: str
    answers: list[dict[str, Any]]
    concurrency: int
    exact: bool = True
    done: list[Answer] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._numbers = itertools.count()
        self._running = threading.Event()
        self._ended = threading.Event()
        self._idle = threading.Barrier(self.concurrency + 1)
        self._threads = [threading.Thread(target=self._client, daemon=True) for _ in range(self.concurrency)]
        self._running.set()
        for thread in self._threads:
            thread.start()

    def _client(self) -> None:
        while not self._ended.is_set():
            if not self._running.is_set():
                self._idle.wait()
                self._running.wait()
            self._ask(self.answers[next(self._numbers) % len(self.answers)])

    def _ask(self, expected: dict[str, Any]) -> None:
        wanted: list[int] = expected["ids"]
        started, error, same = time.monotonic(), None, None
        try:
            # The plain answer ended by itself or at this length.
            got = generate(self.url, expected["prompt"], max(1, len(wanted)))
            if got != wanted:
                same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(got, wanted)))
                if self.exact or not got:
                    error = f"another text, from token {same} of {len(wanted)} on"
        except (urllib.error.URLError, OSError, ValueError, KeyError) as problem:
            error = f"{type(problem).__name__}: {problem}"
        self.done.append(Answer(started, time.monotonic() - started, error, same))

    def await_answers(self, count: int) -> None:
        """Wait until ``count`` more requests have been answered."""
        until = len(self.done) + count
        while len(self.done) < until:
            time.sleep(0.05)

    def pause(self) -> None:
        """Let every client finish its request and wait; returns when the server has none."""
        self._running.clear()
        self._idle.wait()

    def resume(self) -> None:
        """Go on after ``pause``."""
        self._running.set()

    def stop(self) -> None:
        """End all clients after their current request."""
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def since(self, begin_s: float) -> list[Answer]:
        """Requests that were running at ``begin_s`` (``time.monotonic``) or began later."""
        return [answer for answer in self.done if answer.started_s + answer.seconds >= begin_s]
