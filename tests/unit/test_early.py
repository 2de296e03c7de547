"""A process that ``multiprocessing`` spawns takes the offer of an early start; nobody else does, and nobody twice."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from sglang_psd import early
from sglang_psd.cpu import bootstrap
from tests.unit.test_standby import SPEC

# What an interpreter does by itself where the package is installed, and what came of it.
ASKED = "from sglang_psd import early; early.accept(); print(early.take(), early.why_none())"
ROOT = str(Path(__file__).parents[2])


def what_i_began(results) -> None:
    begun = early.take()
    results.put(
        None
        if begun is None
        else (begun.spec.parent_pid, begun.spec.import_niceness, begun.standby.pid, begun.spec.num_steps)
    )
    results.put(early.why_none())
    if begun is not None:
        begun.standby.end()
        begun.standby._process.wait()
    results.put(early.VARIABLE in os.environ)


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The token of an open offer, which is in this process's environment."""
    monkeypatch.setenv(early.VARIABLE, early.write_offer(SPEC, None))
    return Path(json.loads(os.environ[early.VARIABLE])["token"])


def test_the_first_spawned_process_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever interpreter is up first: the second one, as SGLang's detokenizer, has no offer to take."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")]))
    early.offer(msgspec.structs.replace(SPEC, num_steps=9), None)  # of a server that did not come to spawn anything
    early.offer(SPEC, None)
    spawn = multiprocessing.get_context("spawn")
    started = []
    for _ in range(2):
        results = spawn.SimpleQueue()
        started.append((spawn.Process(target=what_i_began, args=(results,)), results))
        started[-1][0].start()
        assert early.VARIABLE not in os.environ
    found = [(process.pid, results.get(), results.get(), results.get()) for process, results in started]
    for process, _ in started:
        process.join()
    (first, (parent, niceness, child, num_steps), taken, told_on), (_, second, late, _) = found
    assert parent == first and niceness == 0 and child != first and taken == "it has been taken" and not told_on
    assert num_steps == SPEC.num_steps
    assert second is None and late == "it found no offer when its interpreter started"


def test_one_process_can_take_it(offered: Path) -> None:
    """Should two have it after all."""
    spawned = [sys.executable, "-c", ASKED, "--multiprocessing-fork"]
    first, second = (subprocess.run(spawned, capture_output=True, text=True, check=True).stdout for _ in range(2))
    assert first.startswith("EarlyStart(") and not offered.exists()
    assert second.strip() == "None another process had taken the offer"


LAUNCHER = """
import multiprocessing, sys, time
from sglang_psd import early
from tests.unit.test_early import linger
from tests.unit.test_standby import SPEC
if __name__ == "__main__":
    early.offer(SPEC, None)
    spawn = multiprocessing.get_context("spawn")
    pids = spawn.SimpleQueue()
    spawn.Process(target=linger, args=(pids,)).start()
    print(*pids.get(), flush=True)
    time.sleep(600)
"""


def linger(pids) -> None:
    begun = early.take()
    pids.put((os.getpid(), begun.standby.pid))
    time.sleep(600)


def test_nobody_outlives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    """The spawned process has not come to its own precautions yet."""
    script = tmp_path / "launcher.py"
    script.write_text(LAUNCHER)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen(
        [sys.executable, str(script)], env=environment, stdout=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout is not None
        both = [psutil.Process(int(pid)) for pid in launcher.stdout.readline().split()]
        assert len(both) == 2
        launcher.kill()
    assert not psutil.wait_procs(both, timeout=20.0)[1]


def test_other_processes_leave_it(offered: Path) -> None:
    """A plain interpreter, and one that was spawned by somebody else."""
    spawned = [sys.executable, "-c", ASKED, "--multiprocessing-fork"]
    # The process in between hands the offer on, as one does that does not know of it.
    by_others = (
        f"import os, subprocess; os.environ[{early.VARIABLE!r}] = {os.environ[early.VARIABLE]!r}; "
        f"subprocess.run({spawned!r})"
    )
    for script, reason in ((ASKED, "not spawned by multiprocessing"), (by_others, "for children of process")):
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        assert done.stdout.startswith("None ") and reason in done.stdout and offered.exists()
    offered.unlink()


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda offer: offer["spec"].update(num_steps="three"), "failed with ValidationError: Expected `int`"),
        (lambda offer: offer.pop("visible_device"), "failed with KeyError: 'visible_device'"),
    ],
)
def test_what_goes_wrong_is_kept(offered: Path, harm, reason: str) -> None:
    """The process that was to start a drafter lives, and can say why there is none."""
    offer = json.loads(os.environ[early.VARIABLE])
    harm(offer)
    spawned = [sys.executable, "-c", ASKED, "--multiprocessing-fork"]
    environment = {**os.environ, early.VARIABLE: json.dumps(offer)}
    done = subprocess.run(spawned, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.startswith("None taking the offer ") and reason in done.stdout
    assert not offered.exists()


def test_without_an_offer_there_is_a_reason_too() -> None:
    environment = {name: value for name, value in os.environ.items() if name != early.VARIABLE}
    done = subprocess.run([sys.executable, "-c", ASKED], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "None it found no offer when its interpreter started"


def test_what_starts_with_python_knows_the_variable() -> None:
    """It is named there a second time: importing this package's module in every interpreter would cost too much."""
    assert early.VARIABLE in Path(bootstrap.__file__).read_text()
