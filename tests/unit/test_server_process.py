"""A server's ports, and what its log says about its end."""

from __future__ import annotations

import random

import pytest

from sglang_psd.server_process import PORTS, cause_in, free_port, ports_of

TRACEBACK = """[2026-11-30 21:58:06] Scheduler hit an exception: Traceback (most recent call last):
  File "sglang/srt/configs/model_config.py", line 790, in _derive_context_length
    raise ValueError(
ValueError: the draft model's context is shorter

[2026-11-30 21:58:06] Received sigquit from a child process. It usually means the child failed.
[2026-11-30 21:58:06] kill_process_tree called: parent_pid=8833, include_parent=True, pid=8833
"""


def test_the_last_exception_says_why_a_server_ended() -> None:
    """What its parent prints while it cleans up does not."""
    assert cause_in(TRACEBACK) == "ValueError: the draft model's context is shorter"
    again = TRACEBACK + "torch.OutOfMemoryError: CUDA out of memory.\nbye\n"
    assert cause_in(again) == "torch.OutOfMemoryError: CUDA out of memory."


def test_without_an_exception_it_is_the_last_line() -> None:
    assert cause_in("loading\nlaunch_server.py: error: unknown flag --x\n\n") == (
        "launch_server.py: error: unknown flag --x"
    )
    assert cause_in("") == ""


def test_processes_with_one_seed_choose_different_ports() -> None:
    """Hypothesis seeds ``random`` alike in every worker."""
    chosen = set()
    for _ in range(4):
        random.seed(0)
        chosen.add(free_port())
    assert len(chosen) > 1 and chosen <= set(PORTS)


@pytest.mark.parametrize("flag", ["--dp-size", "--dp", "--data-parallel-size", "--nccl-port"])
def test_a_server_gets_a_port_for_its_ranks(flag: str) -> None:
    """Unless SGLang needs one per replica, or the user named one."""
    assert list(ports_of(["--tp-size", "2"])) == ["--port", "--nccl-port"]
    assert list(ports_of([flag, "2"])) == list(ports_of([flag + "=2"])) == ["--port"]
