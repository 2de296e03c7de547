"""PSDConfig: every option of the product, checked once.

Flags, ``sgl.Engine`` keywords and ``--psd-config`` share their names: flag ``--psd-mode``, keyword
``psd_mode``, JSON key ``mode``. An explicit flag or keyword wins over the JSON, which wins over the
default. This module imports neither torch nor SGLang.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from sglang_psd.errors import PSDConfigError

ALGORITHM = "PSD"
MODES = ("parallel", "sequential", "off")
# As SGLang's --dtype.
DTYPES = ("auto", "half", "float16", "bfloat16", "float", "float32")
LOOPS = ("overlapped", "synchronous")
MAX_NUM_STEPS = 32
# Of any number; more is a slip of the keyboard, and does not fit where options end up.
LARGEST = 2**31 - 1
# Well below ``gate.STUCK_S``, after which a waiting verify is let go.
LONGEST_DRAFT_TIMEOUT_S = 30.0
DRAFT_METHODS = ("draft_model", "eagle", "eagle3")

# Flags and keywords; the other fields of PSDConfig can be set through --psd-config only.
FLAG_FIELDS = (
    "mode",
    "draft_method",
    "drafter_device",
    "drafter_mem_fraction",
    "drafter_attention_backend",
    "drafter_dtype",
    "proposal_top_m",
    "trace",
)


@dataclass(frozen=True)
class PSDConfig:
    """Options of parallel speculative decoding.

    Attributes
    ----------
    mode : {"parallel", "sequential", "off"}
        Two alternating slots, one slot, or stock SGLang without a drafter.
    draft_method : {"draft_model", "eagle", "eagle3"} or None
        What the draft checkpoint is: a model, or a head that reads the target's hidden states. None asks its config.
    drafter_device : str or None
        ``cuda:N`` (counted as the server process counts) or ``cpu``; None picks the GPU after the
        target's, or the target's own when there is no other.
    drafter_mem_fraction : float or None
        Share of the drafter GPU's memory for weights and KV, in (0, 1); None picks 0.8 on a GPU
        of its own and 0.1 on the target's.
    drafter_attention_backend, drafter_dtype : str or None
        As SGLang's ``--attention-backend`` and ``--dtype``, for the drafter; None follows the target's
        backend and the draft checkpoint's own dtype.
    proposal_top_m : int
        The drafter samples from its ``m`` most likely tokens, renormalised, and sends exactly that
        law. Does not change what is generated, only how often drafts are accepted.
    trace : str or None
        File for the step trace (JSON lines).
    loop : {"overlapped", "synchronous"}
        ``synchronous`` finishes each round before it starts the next: the oracle of the overlapped loop.
    queue_ahead : bool
        Queue a verify on the GPU before its drafts are there (where both models have a GPU of their own).
    min_parallel_requests : int
        Fewer running requests than this stay in one slot.
    rebalance_threshold : int
        Slots whose sizes differ by at least this many requests are evened out.
    draft_timeout_s : float or None
        Longest wait for proposals. A round whose proposals are late runs without them. None: 20 times the usual
        answer, but 1 s at least and 10 s at most.
    start_timeout_s : float
        Longest wait for the drafter to load.
    restart : bool
        Start a lost drafter again, with back-off.
    standby : bool
        Keep a process at hand that has its imports behind it and becomes the drafter when that is lost.
    max_losses : int
        So many losses within ten minutes, and drafting stays off.
    max_restart_delay_s : float
        The wait before each restart doubles from half a second up to this.
    hung_after_s : float
        A drafter that leaves a ping unanswered for this long is killed and counts as lost.
    acceptance_floor : float
        Accept rate, as a share of the usual one, below which drafts are broken: requests are handed over again, and if
        that does not help drafting stays off. 0 switches this off.
    integrity_checks : bool
        Check slots, pools and request rows of both sides on every round (tests, debugging).
    """

    mode: str = "parallel"
    draft_method: str | None = None
    drafter_device: str | None = None
    drafter_mem_fraction: float | None = None
    drafter_attention_backend: str | None = None
    drafter_dtype: str | None = None
    proposal_top_m: int = 32
    trace: str | None = None
    loop: str = "overlapped"
    queue_ahead: bool = True
    min_parallel_requests: int = 2
    rebalance_threshold: int = 2
    draft_timeout_s: float | None = None
    start_timeout_s: float = 600.0
    restart: bool = True
    standby: bool = True
    max_losses: int = 5
    max_restart_delay_s: float = 30.0
    hung_after_s: float = 20.0
    acceptance_floor: float = 0.1
    integrity_checks: bool = False

    def __post_init__(self) -> None:
        self._check_types()
        _check_choice("mode", self.mode, MODES)
        _check_choice("loop", self.loop, LOOPS)
        if self.draft_method is not None:
            _check_choice("draft_method", self.draft_method, DRAFT_METHODS)
        fraction = self.drafter_mem_fraction
        if fraction is not None and not 0.0 < fraction < 1.0:
            raise PSDConfigError(
                f"--psd-drafter-mem-fraction must lie between 0 and 1, got {fraction}; "
                "0.8 suits a GPU of its own, 0.1 a shared one."
            )
        _check_minimum("proposal_top_m", self.proposal_top_m, 1)
        _check_minimum("min_parallel_requests", self.min_parallel_requests, 2)
        _check_minimum("rebalance_threshold", self.rebalance_threshold, 2)
        if self.draft_timeout_s is not None:
            _check_minimum("draft_timeout_s", self.draft_timeout_s, 0.001)
            if self.draft_timeout_s > LONGEST_DRAFT_TIMEOUT_S:
                raise PSDConfigError(
                    f"{flag_name('draft_timeout_s')} must be at most {LONGEST_DRAFT_TIMEOUT_S:g} seconds, got "
                    f"{self.draft_timeout_s}: no round should wait longer for drafts that it can do without."
                )
        _check_minimum("start_timeout_s", self.start_timeout_s, 1)
        _check_minimum("max_losses", self.max_losses, 1)
        _check_minimum("max_restart_delay_s", self.max_restart_delay_s, 0.0)
        _check_minimum("hung_after_s", self.hung_after_s, 0.1)
        if not 0.0 <= self.acceptance_floor < 1.0:
            raise PSDConfigError(
                f"{flag_name('acceptance_floor')} must lie between 0 and 1, got {self.acceptance_floor}; "
                "0 switches it off."
            )
        if self.drafter_device is not None:
            check_device_name(self.drafter_device)
        if self.drafter_dtype is not None:
            _check_choice("drafter_dtype", self.drafter_dtype, DTYPES)
        if self.trace is not None:
            check_trace_path(self.trace)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (int, float)) and value > LARGEST:
                raise PSDConfigError(f"{flag_name(field.name)} must be at most {LARGEST}, got {value}.")

    def _check_types(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            kinds = _FIELD_KINDS[field.name]
            if (isinstance(value, bool) and bool not in kinds) or not isinstance(value, kinds):
                raise PSDConfigError(f"{flag_name(field.name)} must be {_wanted(kinds)}, got {value!r}.")

    @property
    def num_slots(self) -> int:
        """Slots the scheduler alternates between: 2 in parallel mode, else 1."""
        return 2 if self.mode == "parallel" else 1


_KIND_NAMES = {str: "a string", float: "a number", int: "a whole number", bool: "true or false"}


def _wanted(kinds: tuple[type, ...]) -> str:
    """The types of a field in words; None needs none, whoever leaves an option out gets it."""
    return next(name for kind, name in _KIND_NAMES.items() if kind in kinds)


def _kinds(hint: Any) -> tuple[type, ...]:
    """Types that a field of the annotated type takes; a whole number is a number too."""
    kinds = get_args(hint) or (hint,)
    return (*kinds, int) if float in kinds else kinds


_FIELD_KINDS = {name: _kinds(hint) for name, hint in get_type_hints(PSDConfig).items()}


def uses_psd(server_args: Any) -> bool:
    """Whether ``--speculative-algorithm PSD`` is asked for; any ``ServerArgs`` will do."""
    return (server_args.speculative_algorithm or "").upper() == ALGORITHM


def flag_name(field: str) -> str:
    """How a user sets ``field``: its flag, or its key in ``--psd-config``."""
    if field in FLAG_FIELDS:
        return "--psd-" + field.replace("_", "-")
    return f"{field!r} in --psd-config"


def resolve_config(flags: Mapping[str, Any], source: str | Mapping[str, Any] | None) -> PSDConfig:
    """Merge explicit flags over ``--psd-config`` over defaults.

    Parameters
    ----------
    flags : mapping
        Field name to value; None means that the user gave no such flag.
    source : str, mapping or None
        JSON text, path of a JSON file, or an already parsed object (Engine keyword).

    Raises
    ------
    PSDConfigError
        Unknown key, wrong type, value out of range, unreadable file or malformed JSON.
    """
    known = {field.name for field in dataclasses.fields(PSDConfig)}
    values = dict(load_config_source(source))
    unknown = sorted(set(values) - known, key=str)
    if unknown:
        raise PSDConfigError(f"--psd-config has no option {unknown[0]!r}; it knows {', '.join(sorted(known))}.")
    values.update({name: value for name, value in flags.items() if value is not None})
    return PSDConfig(**values)


_NO_OBJECT = '--psd-config must hold a JSON object such as {"mode": "parallel"}.'


def load_config_source(source: str | Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Parse ``--psd-config``: a JSON object given inline, as a file, or as a mapping."""
    if source is None:
        return {}
    if isinstance(source, Mapping):
        return source
    if not isinstance(source, str):
        raise PSDConfigError(_NO_OBJECT)
    text = source.strip()
    if not text.startswith(("{", "[")):
        try:
            with open(text, encoding="utf-8-sig") as file:
                text = file.read()
        except (OSError, UnicodeDecodeError, ValueError) as error:
            reason = getattr(error, "strerror", None) or type(error).__name__
            raise PSDConfigError(
                f"--psd-config {_shorten(source)} is neither a JSON object nor a readable file ({reason})."
            ) from None
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PSDConfigError(f"--psd-config holds malformed JSON ({error}).") from None
    if not isinstance(parsed, dict):
        raise PSDConfigError(_NO_OBJECT)
    return parsed


def check_device_name(device: str) -> None:
    """Accept ``cpu``, ``cuda`` or ``cuda:N``."""
    kind, _, index = device.partition(":")
    if device == "cpu" or (kind == "cuda" and (index.isdecimal() or device == "cuda")):
        return
    raise PSDConfigError(f"--psd-drafter-device must be cuda:N or cpu, got {device!r}.")


def check_trace_path(path: str) -> None:
    """Refuse a trace file that cannot be written, before any model is loaded."""
    try:
        with open(path, "a", encoding="utf-8"):
            pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise PSDConfigError(
            f"--psd-trace {_shorten(path)} cannot be written ({reason}); name a file in an existing folder."
        ) from None


def _shorten(text: str, limit: int = 80) -> str:
    """``repr`` of user input that keeps an error message to one readable line."""
    return repr(text if len(text) <= limit else text[:limit] + "…")


def _check_choice(field: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise PSDConfigError(f"{flag_name(field)} must be one of {', '.join(choices)}, got {value!r}.")


def _check_minimum(field: str, value: float, minimum: float) -> None:
    if not minimum <= value < float("inf"):
        raise PSDConfigError(f"{flag_name(field)} must be at least {minimum}, got {value}.")
