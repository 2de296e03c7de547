"""Which cells are measured, on which server, in which order. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from sglang_psd.bench.arms import Arm
from sglang_psd.bench.options import BenchOptions


@dataclass(frozen=True)
class Cell:
    """One point of the grid.

    Attributes
    ----------
    arm, protocol : str
    k : int or None
        Drafts per round; None without a draft model.
    n : int
        Most requests in flight; 0 where ``rate`` alone decides.
    row : int
        The n of the arms it is compared with: half of n for the parallel arm of the reference protocol.
    input_len, output_len : int
        Tokens; input_len 0: the prompts of a data set, as long as they are.
    rate : float or None
        Poisson arrivals per second; None for a closed loop.
    """

    arm: str
    protocol: str
    k: int | None
    n: int
    row: int
    input_len: int
    output_len: int
    rate: float | None = None

    @property
    def key(self) -> str:
        """Its name in the result file."""
        parts = [self.protocol, self.arm]
        if self.k is not None:
            parts.append(f"k{self.k}")
        parts.append(f"n{self.n}" if self.rate is None else f"r{self.rate:g}")
        return "/".join([*parts, f"{self.input_len or 'prompts'}+{self.output_len}"])

    def to_json(self) -> dict[str, Any]:
        """As a dictionary."""
        return {"key": self.key, **asdict(self)}


@dataclass
class ServerPlan:
    """One server start and the cells measured on it."""

    arm: Arm
    k: int | None
    protocol: str
    repeat: int
    cells: list[Cell] = field(default_factory=list)

    @property
    def key(self) -> str:
        """Its name in logs and in the result file."""
        drafts = f"-k{self.k}" if self.k is not None else ""
        return f"{self.protocol}-{self.arm.name}{drafts}-{self.repeat}"


def in_flight(arm: Arm, protocol: str, row: int) -> int:
    """Requests in flight of one arm where its row says ``row``.

    The reference's own protocol gives its parallel arm two batches of the size that the others get one of.
    """
    return 2 * row if protocol == "reference" and arm.name == "parallel" else row


def cells_of(arm: Arm, k: int | None, protocol: str, options: BenchOptions) -> list[Cell]:
    """Closed-loop cells by rising n, then the Poisson ones: what may break a server comes late."""
    lengths = [(i, o) for i in options.prompt_lengths for o in options.output_len]
    cells = [
        Cell(arm.name, protocol, k, in_flight(arm, protocol, row), row, i, o)
        for row in sorted(set(options.concurrency))
        for i, o in lengths
    ]
    if protocol == "fair":
        cells += [
            Cell(arm.name, protocol, k, 0, 0, i, o, rate) for rate in sorted(set(options.rate)) for i, o in lengths
        ]
    return cells


def plan(options: BenchOptions, arms: list[Arm]) -> Iterator[ServerPlan]:
    """Every server start, in order.

    A repeat goes over all arms before the next begins, so that slow drifts of the machine meet every arm. Within a
    repeat the arms of one k follow each other: an early end leaves whole comparisons.
    """
    for repeat in range(options.repeats):
        for protocol in options.protocol:
            starts: list[tuple[Arm, int | None]] = [(arm, None) for arm in arms if not arm.drafts]
            starts += [(arm, k) for k in options.num_steps for arm in arms if arm.drafts]
            for arm, k in starts:
                yield ServerPlan(arm, k, protocol, repeat, cells_of(arm, k, protocol, options))


def measured_sizes(options: BenchOptions, arms: list[Arm], protocol: str) -> list[int]:
    """Every number of requests in flight of one protocol, whatever the arm."""
    sizes = {in_flight(arm, protocol, row) for arm in arms for row in options.concurrency}
    return sorted(sizes)
