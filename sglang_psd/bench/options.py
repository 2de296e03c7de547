"""What ``sglang-psd bench`` was asked for, checked before anything starts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from sglang_psd.errors import PSDConfigError
from sglang_psd.resources import TINY_DRAFT, TINY_TARGET, check_checkpoint

PROTOCOLS = ("fair", "reference")
# Made-up prompts, and the package's own; any other name is a file.
RANDOM_IDS, PROMPTS = DATASETS = ("random-ids", "prompts")


@dataclass
class BenchOptions:
    """Options of one comparison.

    Attributes
    ----------
    target, draft : str
    arms : list of str
        Empty: plain, sequential, parallel, and with a GPU standalone.
    num_steps, concurrency, input_len, output_len : list of int
        The grid: k, requests in flight, tokens of prompt and answer.
    rate : list of float
        Requests per second of Poisson arrivals, measured beside the closed loop.
    rate_seconds : float
        How long Poisson arrivals go on.
    waves, batches, repeats : int
        Requests per place in flight; measurements per cell and server start; rounds over all arms.
    protocol : list of str
        Of ``PROTOCOLS``.
    dataset : str
        ``random-ids``, ``prompts``, or a JSONL file in ``bench_serving``'s custom format; "" chooses by the weights.
    temperature : float
    simulate : list of float
        Accept length to simulate at each k of ``num_steps`` (``SGLANG_SIMULATE_ACC_LEN``); empty: real acceptance.
    trace : bool
        Write the step trace of PSD servers, from which round times are read.
    time_budget, cell_timeout, start_timeout : float
        Seconds; a budget of 0 is none.
    retry_failed, fresh : bool
        Measure cells again that failed; start a new result file.
    out, logs, plots, timeline, trace_file, report : Path or None
    results : list of Path
        Result files a report is made from.
    extra : list of str
        Flags passed on to every server.
    """

    target: str = str(TINY_TARGET)
    draft: str = str(TINY_DRAFT)
    arms: list[str] = field(default_factory=list)
    num_steps: list[int] = field(default_factory=lambda: [3])
    concurrency: list[int] = field(default_factory=lambda: [8])
    input_len: list[int] = field(default_factory=lambda: [128])
    output_len: list[int] = field(default_factory=lambda: [64])
    rate: list[float] = field(default_factory=list)
    rate_seconds: float = 10.0
    waves: int = 1
    batches: int = 3
    repeats: int = 1
    protocol: list[str] = field(default_factory=lambda: ["fair"])
    dataset: str = ""
    temperature: float = 0.0
    simulate: list[float] = field(default_factory=list)
    trace: bool = True
    time_budget: float = 0.0
    cell_timeout: float = 300.0
    start_timeout: float = 600.0
    retry_failed: bool = False
    fresh: bool = False
    out: Path | None = None
    logs: Path | None = None
    plots: Path | None = None
    timeline: Path | None = None
    trace_file: Path | None = None
    report: Path | None = None
    results: list[Path] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_checkpoint("--target", self.target, "target")
        check_checkpoint("--draft", self.draft, "draft")
        for name in ("num_steps", "concurrency", "input_len", "output_len"):
            if not getattr(self, name):
                raise PSDConfigError(f"--{name.replace('_', '-')} needs at least one number.")
            self._check_all(name, 1)
        for name in ("waves", "batches", "repeats"):
            self._check(name, getattr(self, name), 1)
        self._check_all("rate", 0.001)
        for name in ("cell_timeout", "start_timeout", "rate_seconds"):
            self._check(name, getattr(self, name), 1)
        unknown = [name for name in self.protocol if name not in PROTOCOLS]
        if unknown or not self.protocol:
            raise PSDConfigError(f"--protocol knows {', '.join(PROTOCOLS)}, got {','.join(self.protocol)!r}.")
        self._check_all("simulate", 1.0)
        if self.simulate and len(self.simulate) != len(self.num_steps):
            raise PSDConfigError(
                f"--simulate needs one accept length for each k of --num-steps: {len(self.num_steps)}, got "
                f"{len(self.simulate)}."
            )
        if self.dataset not in ("", *DATASETS) and not Path(self.dataset).is_file():
            raise PSDConfigError(
                f"--dataset knows {', '.join(DATASETS)}, and {self.dataset!r} is no file; name a JSONL file in "
                "bench_serving's custom format."
            )
        if self.trace_file is not None and self.timeline is None:
            raise PSDConfigError("--trace-file is drawn by --timeline FILE; name that file too.")
        if self.trace_file is not None and not self.trace_file.is_file():
            raise PSDConfigError(f"--trace-file {self.trace_file} is no file; name one that --psd-trace wrote.")
        if self.timeline is not None and self.trace_file is None and not self.trace:
            raise PSDConfigError("--timeline needs the step trace; leave out --no-trace.")

    def _check_all(self, name: str, minimum: float) -> None:
        for value in getattr(self, name):
            self._check(name, value, minimum)

    @staticmethod
    def _check(name: str, value: float, minimum: float) -> None:
        if not minimum <= value < float("inf"):
            raise PSDConfigError(f"--{name.replace('_', '-')} must be at least {minimum}, got {value}.")

    def simulated(self, k: int | None) -> float | None:
        """Accept length to simulate with k drafts a round; None for real acceptance."""
        return None if k is None or not self.simulate else self.simulate[self.num_steps.index(k)]

    @property
    def data(self) -> str:
        """The data set: made-up weights read made-up prompts."""
        return self.dataset or (RANDOM_IDS if self.dummy_weights else PROMPTS)

    @property
    def prompt_lengths(self) -> list[int]:
        """``input_len`` where prompts are made up; [0], as long as they are, where they are not."""
        return self.input_len if self.data == RANDOM_IDS else [0]

    @property
    def dummy_weights(self) -> bool:
        """Whether the servers are told to make weights up."""
        text = " ".join(self.extra).replace("=", " ")
        return "--load-format dummy" in text
