"""The process that waits to become the drafter: a real one, with lighter imports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest

from sglang_psd.drafter.spec import DrafterSpec
from sglang_psd.drafter.standby import StandbyProcess

WITHIN_S = 30.0
SPEC = DrafterSpec("", os.getpid(), "/models/draft", "cpu", "cpu", "float32", "torch_native", 0.5, 8, 320, 3, 32, 1)
# What ``python -m sglang_psd.drafter`` does with a specification without endpoint, for other modules. It prints what it
# was told, its priority, and what its stdin is worth then.
CHILD = """
import os, sys, msgspec
from sglang_psd.drafter import standby
from sglang_psd.drafter.spec import DrafterSpec
standby.LATE_IMPORTS, standby.engine_module = (), lambda spec: {module!r}
told = standby.await_spec(msgspec.json.decode(sys.argv[1], type=DrafterSpec))
print(told.endpoint, os.getpriority(os.PRIO_PROCESS, 0), repr(os.read(0, 1)))
"""
NICE_NOW = "import os, threading; print('importing at', os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))"


class LightStandby(StandbyProcess):
    """Imports ``module`` in place of SGLang."""

    def __init__(self, module: str = "json", environment: dict[str, str] | None = None):
        self._module = module
        super().__init__(SPEC, {**os.environ, **(environment or {})})

    def _start(self, spec, environment, control):
        command = [sys.executable, "-c", CHILD.format(module=self._module), msgspec.json.encode(spec).decode()]
        return subprocess.Popen(command, env=environment, stdin=control, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def start() -> Iterator[Callable[..., LightStandby]]:
    """Makes standbys that are gone after the test."""
    made: list[LightStandby] = []

    def make(*args, **kwargs) -> LightStandby:
        made.append(LightStandby(*args, **kwargs))
        return made[-1]

    yield make
    for standby in made:
        standby.end()
        standby._process.communicate(timeout=WITHIN_S)


def wait_until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_it_imports_quietly_and_becomes_what_it_is_told(start, tmp_path) -> None:
    """The imports run at a lower priority, the rest at the usual one; stdin is empty from then on."""
    (tmp_path / "slow_module.py").write_text(NICE_NOW)
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    standby = start("slow_module", {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"})
    assert not standby.ready
    wait_until(lambda: standby.ready)
    process = standby.begin(msgspec.structs.replace(SPEC, endpoint="ipc:///here"))
    assert process.pid == standby.pid
    said, _ = process.communicate(timeout=WITHIN_S)
    assert (
        said.splitlines() == [f"importing at {min(19, usual + SPEC.import_niceness)}", f"ipc:///here {usual} b''"]
        and process.returncode == 0
    )


def test_it_leaves_when_nobody_needs_it(start) -> None:
    """The other end of its socket is closed, as by a scheduler that is gone: no signal is needed."""
    standby = start()
    wait_until(lambda: standby.ready)
    standby._control.close()
    said, _ = standby._process.communicate(timeout=WITHIN_S)
    assert said == "" and standby.exit_code == 0 and not standby.ready


def test_it_is_not_ready_while_it_is_stopped(start) -> None:
    standby = start()
    wait_until(lambda: standby.ready)
    os.kill(standby.pid, signal.SIGSTOP)
    wait_until(lambda: not standby.ready)
    os.kill(standby.pid, signal.SIGCONT)
    wait_until(lambda: standby.ready)
    standby.end()
    wait_until(lambda: standby.exit_code is not None)


def test_one_that_cannot_import_ends(start) -> None:
    standby = start("no_such_module")
    wait_until(lambda: standby.exit_code is not None)
    assert standby.exit_code == 1 and not standby.ready


def test_one_that_has_ended_cannot_begin(start) -> None:
    standby = start()
    wait_until(lambda: standby.ready)
    standby._process.kill()
    wait_until(lambda: standby.exit_code is not None)
    with pytest.raises(OSError):
        standby.begin(SPEC)
