"""Restart of a lost drafter: back-off, limit, and what a failed attempt leads to."""

from __future__ import annotations

import pytest

from sglang_psd.channel.messages import SCHEMA_VERSION, Failure, Hello
from sglang_psd.scheduler.standby import RETRY_S, StandbyKeeper
from sglang_psd.scheduler.supervisor import FIRST_DELAY_S, LEAVE_WITHIN_S, LOSS_WINDOW_S, DrafterSupervisor

MAX_LOSSES = 5
HELLO = Hello(SCHEMA_VERSION, 1, "cpu", 320, 512, 1000, 8, 0.1, 0.1, 1.0)


class FakeProcess:
    """A drafter that says what it is told to say."""

    def __init__(self):
        self.messages: list = []
        self.running = True
        self.abandoned = False
        self.hello = None
        self.channel = self

    def receive(self, timeout_s: float):
        return self.messages.pop(0) if self.messages else None

    def alive(self) -> bool:
        return self.running

    can_answer = alive

    def abandon(self) -> None:
        self.abandoned = True


class FakeStandby:
    """A standby that is ready when told so."""

    def __init__(self):
        self.ready = False
        self.exit_code: int | None = None
        self.ended = False

    def end(self) -> None:
        self.ended = True


class World:
    """Clock and spawn under control."""

    def __init__(self):
        self.now = 100.0
        self.spawned: list[FakeProcess] = []
        self.spawn_error: Exception | None = None
        self.standbys: list[FakeStandby] = []
        self.supervisor = DrafterSupervisor(self.spawn, 60.0, MAX_LOSSES, 30.0, clock=lambda: self.now)

    def keep_standby(self) -> None:
        """Let the supervisor keep a standby."""
        keeper = StandbyKeeper(self.start_standby, clock=lambda: self.now)
        self.supervisor = DrafterSupervisor(self.spawn, 60.0, MAX_LOSSES, 30.0, clock=lambda: self.now, standby=keeper)

    def start_standby(self) -> FakeStandby:
        if self.spawn_error is not None:
            raise self.spawn_error
        self.standbys.append(FakeStandby())
        return self.standbys[-1]

    def spawn(self, standby: FakeStandby | None) -> FakeProcess:
        self.used = standby
        if self.spawn_error is not None:
            raise self.spawn_error
        self.spawned.append(FakeProcess())
        return self.spawned[-1]

    def lose(self) -> None:
        """Lose a drafter and let the delay pass."""
        self.supervisor.lost()
        self.now += 1000.0 if self.supervisor.given_up else 31.0
        self.supervisor.tick()


def test_nothing_happens_while_it_is_up() -> None:
    world = World()
    assert world.supervisor.state == "up" and world.supervisor.tick() is None and not world.spawned


def test_restart_waits_then_reports_ready() -> None:
    world = World()
    world.supervisor.lost()
    assert world.supervisor.state == "waiting" and world.supervisor.tick() is None and not world.spawned
    world.now += FIRST_DELAY_S
    assert world.supervisor.tick() is None and world.supervisor.state == "starting"
    world.spawned[0].messages.append(HELLO)
    assert world.supervisor.tick() is world.spawned[0]
    assert (world.supervisor.state, world.supervisor.restarts, world.spawned[0].hello) == ("up", 1, HELLO)


def test_delay_doubles() -> None:
    world = World()
    world.lose()
    world.spawned[0].messages.append(HELLO)
    assert world.supervisor.tick() is not None
    world.supervisor.lost()
    world.now += FIRST_DELAY_S * 1.5
    assert world.supervisor.tick() is None and len(world.spawned) == 1
    world.now += FIRST_DELAY_S
    world.supervisor.tick()
    assert len(world.spawned) == 2


def test_failed_attempts_count_as_losses_and_end() -> None:
    world = World()
    world.lose()
    for attempt in range(MAX_LOSSES - 1):
        process = world.spawned[-1]
        if attempt % 3 == 0:
            process.messages.append(Failure("no memory", fatal=True))
        elif attempt % 3 == 1:
            process.running = False
        else:
            world.now += 61.0
        world.supervisor.tick()
        assert process.abandoned
        if not world.supervisor.given_up:
            world.now += 31.0
            world.supervisor.tick()
    assert world.supervisor.state == "given up"
    world.now += 10 * LOSS_WINDOW_S
    assert world.supervisor.tick() is None and len(world.spawned) == MAX_LOSSES - 1


def test_rare_losses_never_end_it() -> None:
    world = World()
    for _ in range(3 * MAX_LOSSES):
        world.lose()
        world.spawned[-1].messages.append(HELLO)
        assert world.supervisor.tick() is not None
        world.now += LOSS_WINDOW_S
    assert world.supervisor.state == "up"


def test_a_spawn_that_fails_is_tried_again() -> None:
    world = World()
    world.spawn_error = OSError("no processes left")
    world.lose()
    assert world.supervisor.state == "waiting"
    world.spawn_error = None
    world.now += 31.0
    world.supervisor.tick()
    assert world.supervisor.state == "starting"
    world.supervisor.stop()
    assert world.spawned[-1].abandoned and world.supervisor.state == "up"


def test_the_delay_ends_where_it_is_told() -> None:
    world = World()
    world.supervisor = DrafterSupervisor(world.spawn, 60.0, 100, 2.0, clock=lambda: world.now)
    for _ in range(10):
        world.supervisor.lost()
        world.now += 2.0
        world.supervisor.tick()
        assert world.supervisor.state == "starting"
        world.spawned[-1].messages.append(HELLO)
        assert world.supervisor.tick() is world.spawned[-1]


# --- the standby ---------------------------------------------------------------------------------


def test_a_standby_is_started_while_the_drafter_is_up_and_becomes_the_next() -> None:
    world = World()
    world.keep_standby()
    assert world.supervisor.standby_state == "none"
    for _ in range(3):
        world.supervisor.tick()
    (standby,) = world.standbys
    assert world.supervisor.standby_state == "importing"
    standby.ready = True
    assert world.supervisor.standby_state == "ready"
    world.lose()
    assert world.used is standby and not standby.ended and world.supervisor.standby_state == "none"
    world.supervisor.tick()
    assert len(world.standbys) == 1, "the next one waits until the drafter is up"
    world.spawned[-1].messages.append(HELLO)
    assert world.supervisor.tick() is world.spawned[-1]
    world.supervisor.tick()
    assert len(world.standbys) == 2


def test_without_a_ready_standby_a_new_process_is_started() -> None:
    """One that still imports stays for the next loss; one that has ended is replaced, but not at once."""
    world = World()
    world.keep_standby()
    world.supervisor.tick()
    world.lose()
    assert world.used is None and len(world.spawned) == 1 and not world.standbys[0].ended
    world.spawned[-1].messages.append(HELLO)
    assert world.supervisor.tick() is not None
    world.standbys[0].exit_code = 1
    world.supervisor.tick()
    assert world.standbys[0].ended and world.supervisor.standby_state == "none" and len(world.standbys) == 1
    world.now += RETRY_S
    world.supervisor.tick()
    assert len(world.standbys) == 2


def test_a_standby_that_cannot_be_started_costs_nothing() -> None:
    world = World()
    world.keep_standby()
    world.spawn_error = OSError("no processes left")
    world.supervisor.tick()
    assert (world.supervisor.state, world.supervisor.standby_state) == ("up", "none")
    world.spawn_error = None
    world.now += RETRY_S
    world.supervisor.tick()
    assert len(world.standbys) == 1


def test_a_standby_that_was_taken_in_vain_is_ended() -> None:
    """No room for the drafter's sockets, say."""
    world = World()
    world.keep_standby()
    world.supervisor.tick()
    world.standbys[0].ready = True
    world.spawn_error = OSError("no space left")
    world.lose()
    assert world.standbys[0].ended and world.supervisor.state == "waiting"


@pytest.mark.parametrize("end", ["give_up", "stop"])
def test_no_standby_outlives_the_supervision(end: str) -> None:
    world = World()
    world.keep_standby()
    world.supervisor.tick()
    if end == "stop":
        world.supervisor.stop()
    else:
        world.supervisor.give_up("useless drafts")
    assert world.standbys[0].ended and world.supervisor.standby_state == "off"
    world.now += 10 * RETRY_S
    world.supervisor.tick()
    assert len(world.standbys) == 1


# --- the predecessor -----------------------------------------------------------------------------


def test_the_next_one_waits_until_the_last_one_has_left() -> None:
    """Its memory is not free before; one that will not go is not waited for without end."""
    world = World()
    first = FakeProcess()
    world.supervisor.lost(first)
    world.now += FIRST_DELAY_S
    world.supervisor.tick()
    assert world.supervisor.state == "waiting"
    first.running = False
    world.supervisor.tick()
    assert world.supervisor.state == "starting"
    world.spawned[0].messages.append(Failure("no memory", fatal=True))
    world.supervisor.tick()
    world.now += 2 * FIRST_DELAY_S
    world.supervisor.tick()
    assert world.supervisor.state == "waiting" and world.spawned[0].running
    world.now += LEAVE_WITHIN_S
    world.supervisor.tick()
    assert world.supervisor.state == "starting" and len(world.spawned) == 2
