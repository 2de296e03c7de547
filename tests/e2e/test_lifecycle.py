"""The drafter's life: it can be lost without harm, and it never outlives its server.

These tests end the shared servers, so they come last (pytest runs files in alphabetical order).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from sglang_psd.resources import TINY_TARGET
from sglang_psd.server_process import ServerProcess
from tests.e2e.conftest import MAX_TOKENS, START_TIMEOUT_S, process_tree
from tests.e2e.flags import BASE_FLAGS, ENVIRONMENT, PSD_FLAGS
from tests.e2e.test_doors import generate, server_info

pytestmark = pytest.mark.e2e

GONE_WITHIN_S = 20.0


def drafter_of(url: str) -> psutil.Process:
    """The drafter process of a running server."""
    return psutil.Process(psd_section(url)["drafter"]["pid"])


def assert_all_gone(processes: list[psutil.Process]) -> None:
    """Fail when one of the processes still runs after ``GONE_WITHIN_S`` seconds."""
    _, alive = psutil.wait_procs(processes, timeout=GONE_WITHIN_S)
    left = [f"{p.pid} {p.status()} {' '.join(p.cmdline())[:80]}" for p in alive if p.status() != psutil.STATUS_ZOMBIE]
    for process in alive:
        process.kill()
    assert not left, left


def psd_section(url: str) -> dict:
    """The ``psd`` section of ``/server_info``."""
    return server_info(url)["internal_states"][0]["psd"]


def test_requests_survive_a_killed_drafter(launched_url: str, oracle: dict) -> None:
    """SIGKILL under load: every answer is the oracle's, ``/server_info`` tells the truth, and the drafter returns."""
    answers = oracle["answers"]
    expected = [answer["ids"] for answer in answers]
    drafter = drafter_of(launched_url)
    killer = threading.Timer(0.3, drafter.kill)
    killer.start()
    deadline = time.monotonic() + 4.0
    while time.monotonic() < deadline:
        got = generate(
            launched_url,
            text=[answer["prompt"] for answer in answers],
            sampling_params={"temperature": 0, "max_new_tokens": MAX_TOKENS},
        )
        assert [answer["output_ids"] for answer in got] == expected
    killer.join()
    psd = psd_section(launched_url)
    assert psd["mode"] == "off" and psd["drafter"]["failure"] and psd["drafter"]["state"] in ("waiting", "starting")
    deadline = time.monotonic() + START_TIMEOUT_S
    while psd_section(launched_url)["mode"] == "off":
        assert time.monotonic() < deadline, psd_section(launched_url)
        time.sleep(0.5)
    psd = psd_section(launched_url)
    assert psd["drafter"]["restarts"] == 1 and psd["drafter"]["pid"] != drafter.pid
    got = generate(
        launched_url,
        text=[answer["prompt"] for answer in answers],
        sampling_params={"temperature": 0, "max_new_tokens": MAX_TOKENS},
    )
    assert [answer["output_ids"] for answer in got] == expected
    assert max(answer["meta_info"]["spec_accept_length"] for answer in got) > 1.0


def test_sigkill_of_the_launcher_leaves_nothing(launched: ServerProcess, launched_url: str) -> None:
    """The kernel ends scheduler and drafter when their parents are killed outright."""
    processes = process_tree(launched)
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
        while not any("sglang_psd.drafter" in p.cmdline() for p in process_tree(server)):
            assert server.running() and time.monotonic() < deadline, server.log_tail()
            time.sleep(0.05)
        processes = process_tree(server)
        os.kill(server.pid, signal.SIGTERM)
        assert_all_gone(processes)
    finally:
        server.stop()


def test_a_broken_draft_fails_the_start(logs: Path, tmp_path: Path) -> None:
    """A draft that cannot be loaded ends the start with one sentence and leaves no process."""
    broken = tmp_path / "broken"
    broken.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (broken / name).write_bytes((Path(PSD_FLAGS[3]) / name).read_bytes())
    flags = ["--model-path", str(TINY_TARGET), *BASE_FLAGS, *PSD_FLAGS]
    flags[flags.index(PSD_FLAGS[3])] = str(broken)
    server = ServerProcess(flags, logs / "broken.log", environment=ENVIRONMENT)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        seen: dict[int, psutil.Process] = {}
        while server.running() and time.monotonic() < deadline:
            seen.update({p.pid: p for p in process_tree(server)} if server.running() else {})
            time.sleep(0.2)
        assert not server.running()
        assert_all_gone(list(seen.values()))
        log = server.log_path.read_text(errors="replace")
        assert "DrafterStartError: The drafter (" in log and "could not start" in log
    finally:
        server.stop()


def test_bad_flags_exit_with_a_sentence() -> None:
    """A misspelt value names its flag; nothing is loaded before."""
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(TINY_TARGET), *PSD_FLAGS]
    command += ["--psd-drafter-mem-fraction", "1.5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=ENVIRONMENT)
    assert done.returncode != 0
    assert "--psd-drafter-mem-fraction must lie between 0 and 1, got 1.5" in done.stderr
