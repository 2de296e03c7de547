"""The drafter's life: it can be lost without harm, and it never outlives its server.

These tests end the shared servers, so they come last (pytest runs files in alphabetical order).
"""

from __future__ import annotations

import os
import signal
import stat
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from scripts.faults.starts import STARTS, FailedStart, try_start
from scripts.faults.strikes import socket_paths, standbys_of
from sglang_psd.resources import TINY_TARGET
from sglang_psd.server_process import ServerProcess
from tests.e2e.conftest import MAX_TOKENS, START_TIMEOUT_S, process_tree
from tests.e2e.flags import BASE_FLAGS, ENVIRONMENT, PSD_FLAGS
from tests.e2e.test_doors import generate, server_info

pytestmark = pytest.mark.e2e

GONE_WITHIN_S = 20.0
# The others are tried by ``scripts/fault_matrix.py``: each costs the start of a server.
TRIED_STARTS = ("drafter cannot load", "socket file removed while loading")


def drafter_of(url: str) -> psutil.Process:
    """The drafter process of a running server."""
    return psutil.Process(psd_section(url)["drafter"]["pid"])


def command_line(process: psutil.Process) -> list[str]:
    """Arguments of a process; none when it has ended meanwhile."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:  # also of those that wait for their parent
        return []


def assert_all_gone(processes: list[psutil.Process]) -> None:
    """Fail when one of the processes still runs after ``GONE_WITHIN_S`` seconds."""
    _, alive = psutil.wait_procs(processes, timeout=GONE_WITHIN_S)
    left = [f"{p.pid} {' '.join(command_line(p))[:80]}" for p in alive if command_line(p)]
    for process in alive:
        process.kill()
    assert not left, left


def psd_section(url: str) -> dict:
    """The ``psd`` section of ``/server_info``."""
    return server_info(url)["internal_states"][0]["psd"]


def wait_for_standby(url: str) -> psutil.Process:
    """The standby process, once it is ready."""
    wait_for(url, lambda psd: psd["drafter"]["standby"] == "ready", every_s=0.5)
    (standby,) = standbys_of(drafter_of(url))
    return standby


def wait_for(url: str, reached: Callable[[dict], bool], every_s: float = 0.05) -> dict:
    """The ``psd`` section of ``/server_info``, once it says what is waited for."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while not reached(found := psd_section(url)):
        assert time.monotonic() < deadline, found
        time.sleep(every_s)
    return found


def test_requests_survive_a_killed_drafter(launched_url: str, oracle: dict) -> None:
    """SIGKILL under load: every answer is the oracle's, ``/server_info`` tells the truth, the standby takes over."""
    answers = oracle["answers"]
    expected = [answer["ids"] for answer in answers]
    standby, drafter = wait_for_standby(launched_url), drafter_of(launched_url)
    recovered = threading.Event()

    def ask() -> list[dict]:
        return generate(
            launched_url,
            text=[answer["prompt"] for answer in answers],
            sampling_params={"temperature": 0, "max_new_tokens": MAX_TOKENS},
        )

    def load() -> int:
        asked = 0
        while not recovered.is_set():
            assert [answer["output_ids"] for answer in ask()] == expected
            asked += 1
        return asked

    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(load)
        try:
            drafter.kill()
            away = wait_for(launched_url, lambda psd: psd["mode"] == "off")["drafter"]
            wait_for(launched_url, lambda psd: psd["mode"] != "off")
        finally:
            recovered.set()
        assert loading.result() > 0
    assert away["failure"] and away["state"] in ("waiting", "starting"), away
    back = psd_section(launched_url)["drafter"]
    assert back["restarts"] == 1 and back["pid"] == standby.pid
    got = ask()
    assert [answer["output_ids"] for answer in got] == expected
    assert max(answer["meta_info"]["spec_accept_length"] for answer in got) > 1.0


def test_a_stopped_drafter_is_replaced_and_health_stays_true(launched_url: str, oracle: dict) -> None:
    """SIGSTOP for good, and no standby: detected, served without, killed, replaced; health checks stay true."""
    answers = oracle["answers"]
    drafter = drafter_of(launched_url)
    wait_for(launched_url, lambda psd: psd["drafter"]["standby"] in ("importing", "ready"))
    (standby,) = standbys_of(drafter)
    standby.kill()
    drafter.send_signal(signal.SIGSTOP)
    modes = []
    deadline = time.monotonic() + START_TIMEOUT_S
    while "off" not in modes or modes[-1] == "off":
        assert time.monotonic() < deadline, psd_section(launched_url)
        got = generate(
            launched_url,
            text=[answer["prompt"] for answer in answers],
            sampling_params={"temperature": 0, "max_new_tokens": MAX_TOKENS},
        )
        assert [answer["output_ids"] for answer in got] == [answer["ids"] for answer in answers]
        for path in ("/health", "/health_generate"):
            with urllib.request.urlopen(launched_url + path, timeout=30) as answer:
                assert answer.status == 200
        modes.append(psd_section(launched_url)["mode"])
    assert modes[-1] == "sequential" and drafter_of(launched_url).pid not in (drafter.pid, standby.pid)
    assert not drafter.is_running() or drafter.status() == psutil.STATUS_ZOMBIE


def test_two_servers_share_nothing(served_url: str, launched_url: str) -> None:
    """Side by side on one host: two drafters, socket files of their own, open to this user alone."""
    paths = [socket_paths(drafter_of(url)) for url in (served_url, launched_url)]
    assert all(len(found) == 2 for found in paths), paths
    assert len({os.path.dirname(path) for found in paths for path in found}) == 2
    for path in paths[0] + paths[1]:
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        assert stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode) == 0o700


def test_the_metrics_say_whether_it_drafts(served_url: str) -> None:
    """``--enable-metrics``: PSD's figures stand among SGLang's."""
    with urllib.request.urlopen(served_url + "/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    drafting = [line for line in lines if line.startswith("sglang:psd_drafting{")]
    assert len(drafting) == 1 and drafting[0].endswith(" 1.0"), drafting


def test_a_live_request_id_is_refused(served_url: str, oracle: dict) -> None:
    """The second request of a name gets a sentence, the first its text."""
    answer = oracle["answers"][0]
    body = {
        "text": answer["prompt"],
        "rid": "twin",
        "sampling_params": {"temperature": 0, "max_new_tokens": MAX_TOKENS},
    }
    with pytest.raises(urllib.error.HTTPError) as refused:
        generate(served_url, text=[answer["prompt"]] * 2, rid=["twin", "twin"], sampling_params=body["sampling_params"])
    assert refused.value.code == 400 and b"Duplicate request ID" in refused.value.read()
    assert generate(served_url, **body)["output_ids"] == answer["ids"]


def test_sigkill_of_the_launcher_leaves_nothing(launched: ServerProcess, launched_url: str) -> None:
    """The kernel ends scheduler, drafter and standby when their parents are killed outright."""
    wait_for(launched_url, lambda psd: psd["drafter"]["standby"] in ("importing", "ready"))
    processes = process_tree(launched)
    assert len(standbys_of(drafter_of(launched_url))) == 1
    os.kill(launched.pid, signal.SIGKILL)
    assert_all_gone(processes)


def test_ctrl_c_leaves_nothing(served: ServerProcess, served_url: str) -> None:
    """Ctrl-C reaches every process of the terminal; the drafter leaves with its server."""
    drafter = drafter_of(served_url)
    processes = process_tree(served)
    assert drafter in processes
    for process in processes:
        try:
            process.send_signal(signal.SIGINT)
        except psutil.NoSuchProcess:
            pass
    assert_all_gone(processes)


def test_sigterm_while_loading_leaves_nothing(logs: Path) -> None:
    """A server that is told to stop before it is ready takes the half-loaded drafter along."""
    flags = ["--model-path", str(TINY_TARGET), *BASE_FLAGS, *PSD_FLAGS]
    server = ServerProcess(flags, logs / "early.log", environment=ENVIRONMENT)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        # By now SGLang's processes have imported everything: before, they do not notice that their launcher is gone.
        while not any("sglang_psd::drafter" in command_line(p) for p in process_tree(server)):
            assert server.running() and time.monotonic() < deadline, server.log_tail()
            time.sleep(0.05)
        processes = process_tree(server)
        os.kill(server.pid, signal.SIGTERM)
        assert_all_gone(processes)
    finally:
        server.stop()


@pytest.fixture(scope="module")
def failed_starts() -> dict[str, FailedStart]:
    """Servers that cannot come up, tried side by side."""

    def attempt(obstacle, needle: str) -> FailedStart:
        with obstacle() as (flags, port, environment):
            return try_start(flags, port, environment, needle)

    with ThreadPoolExecutor(len(TRIED_STARTS)) as pool:
        futures = {name: pool.submit(attempt, *STARTS[name]) for name in TRIED_STARTS}
        return {name: future.result() for name, future in futures.items()}


@pytest.mark.parametrize("name", TRIED_STARTS)
def test_a_start_that_fails_says_why_and_leaves_nothing(failed_starts: dict[str, FailedStart], name: str) -> None:
    start = failed_starts[name]
    assert start.exit_code != 0, "the launcher did not end, or ended as if all were well"
    assert start.sentence and start.processes_left == 0, start
