"""The server that is attacked, and the clients that must not notice: what the fault matrix and the soak share."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from scripts.faults.load import Load, plain_answers, warm_up
from sglang_psd.resources import TINY_TARGET
from sglang_psd.server_process import ServerProcess
from tests.e2e.flags import BASE_FLAGS, DRAFT_FLAGS, ENVIRONMENT, PSD_FLAGS

# What ``BASE_FLAGS`` and ``PSD_FLAGS`` are on a machine without a GPU.
DEFAULT_FLAGS = ["--random-seed", "1", "--log-level", "info", *DRAFT_FLAGS]
SETTINGS = {"exact": [*BASE_FLAGS, *PSD_FLAGS], "default": DEFAULT_FLAGS}
# A hung drafter is given up after less than the default 20 s, so that a matrix takes minutes; more losses than anybody
# allows in earnest; before every restart a pause as short as before the first.
CONFIG = {"hung_after_s": 5.0, "max_losses": 10_000, "max_restart_delay_s": 0.5, "integrity_checks": True}


@dataclass(frozen=True)
class Subject:
    """A server of the embedded pair and its clients.

    Attributes
    ----------
    concurrency : int
        Clients.
    log : Path
        Of the server.
    settings : {"exact", "default"}
        On a GPU: SGLang's deterministic kernels without CUDA graphs, where every text has to be plain SGLang's; or what
        SGLang and PSD do by default, where near ties may fall either way, and texts are only counted.
    start_timeout_s : float
        Longest start of the server, and longest run of the Engine without PSD before it.
    extra : tuple of str
        Further flags of the server.
    """

    concurrency: int
    log: Path
    settings: str = "exact"
    start_timeout_s: float = 600.0
    extra: tuple[str, ...] = ()

    @classmethod
    def from_command_line(cls, given: argparse.Namespace) -> Subject:
        """From the flags that ``add_flags`` adds."""
        return cls(given.concurrency, given.log, given.settings, given.start_timeout, tuple(given.extra))

    @contextmanager
    def under_load(self) -> Iterator[tuple[ServerProcess, Load]]:
        """Start everything; the clients are asking when the block begins, and rest when it ends."""
        answers = plain_answers(self.start_timeout_s)
        flags = ["--model-path", str(TINY_TARGET), *SETTINGS[self.settings], "--psd-config", json.dumps(CONFIG)]
        flags += ["--max-running-requests", str(max(48, self.concurrency)), *self.extra]
        # As users start it: with every model class that SGLang knows, whose imports are part of what is timed.
        environment = {name: value for name, value in ENVIRONMENT.items() if name != "SGLANG_DISABLED_MODEL_ARCHS"}
        with ServerProcess(flags, self.log, environment=environment) as server:
            server.wait_ready(self.start_timeout_s)
            warm_up(server.url, answers)
            load = Load(server.url, answers, self.concurrency, exact=self.settings == "exact")
            yield server, load
            load.stop()


def add_flags(parser: argparse.ArgumentParser, concurrency: int, log: Path) -> None:
    """Flags that make a ``Subject``; the arguments are defaults."""
    parser.add_argument(
        "--concurrency", type=int, default=concurrency, help=f"clients that never stop (default {concurrency})"
    )
    parser.add_argument(
        "--settings",
        choices=sorted(SETTINGS),
        default="exact",
        help="exact: deterministic kernels, no CUDA graphs, texts must be plain SGLang's; default: as SGLang chooses, "
        "texts are counted (the same without a GPU)",
    )
    parser.add_argument("--log", type=Path, default=log, help=f"the server's output (default {log})")
    parser.add_argument(
        "--start-timeout", type=float, default=600.0, metavar="SECONDS", help="longest start (default 600)"
    )
    parser.add_argument("extra", nargs="*", help="further flags of the server, after --")
