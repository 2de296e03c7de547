"""Custom logit processors at every position of a chunk, each as the plain server would have called it.

A processor is a client's code for one position. It may look at the request (``__req__``) and may keep what it likes in
the request's ``custom_params``. So position ``j`` is processed with drafts ``0 … j - 1`` standing in the request's
output, all requests of a processor in one call, and what a call leaves in ``custom_params`` is remembered for each
position: when it is known how many tokens count, the parameters become those after the last call that counts, and a
call that failed counts only if its position was reached.

What a processor keeps anywhere else cannot be taken back: one that may do so runs without drafts (``keeps_state``).
"""

from __future__ import annotations

import copy
import dis
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from http import HTTPStatus
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

logger = logging.getLogger(__name__)

# What a call cannot change.
_CONSTANT = (str, bytes, int, float, complex, bool, type(None), range)
_BOOKKEEPING = {"__dict__", "__weakref__", "__annotations__", "_abc_impl"}
_STORES = {"STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL"}
_WAYS_IN = {"setattr", "__dict__", "vars", "globals", "__globals__", "__closure__", "__defaults__"}
_COPYABLE = "_psd_copyable_params"


@lru_cache(maxsize=256)
def keeps_state(code: str) -> bool:
    """Whether the processor that a request sent may remember its calls outside of ``custom_params``.

    True in doubt: when the object has attributes, its class has some that are no constants, or its code, or what it
    calls of the client's, sets attributes or reaches a global or enclosing variable that is no constant.
    """
    from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

    processor = CustomLogitProcessor.from_str(code)
    classes = type(processor).__mro__
    if getattr(processor, "__dict__", None) != {} or CustomLogitProcessor not in classes:
        return True
    own = classes[: classes.index(CustomLogitProcessor)]
    modules, seen = {cls.__module__ for cls in own}, set(map(id, classes))
    reached = [part for cls in own for part in _parts_of_class(cls)]
    while reached:
        value = reached.pop()
        if id(value) in seen or _is_installed(value, modules):
            continue
        seen.add(id(value))
        parts = _parts(value)
        if parts is None:
            return True
        reached += parts
    return False


def _is_installed(value: Any, client_modules: set[str]) -> bool:
    """Whether a function or class is SGLang's, torch's or another library's, and did not come with the request."""
    if not isinstance(value, (FunctionType, type)) or value.__module__ in client_modules | {"__main__"}:
        return False
    found: Any = sys.modules.get(value.__module__ or "")
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is value


def _parts(value: Any) -> list[Any] | None:
    """What else to look at behind something that a processor reaches; None where it may hold what a call leaves."""
    if isinstance(value, FunctionType):
        return _parts_of_function(value)
    if isinstance(value, type):
        return [*value.__mro__, *_parts_of_class(value)]
    if isinstance(value, (staticmethod, classmethod)):
        return [value.__func__]
    if isinstance(value, property):
        return [value.fget, value.fset, value.fdel]
    if isinstance(value, (tuple, frozenset)):
        return list(value)
    if isinstance(value, BuiltinFunctionType):  # bound to its module, or to an object that it may change
        return [value.__self__]
    return [] if isinstance(value, (*_CONSTANT, ModuleType)) else None


def _parts_of_class(value: type) -> list[Any]:
    return [part for name, part in vars(value).items() if name not in _BOOKKEEPING]


def _parts_of_function(function: FunctionType) -> list[Any] | None:
    pending = [function.__code__]
    parts: list[Any] = [cell.cell_contents for cell in function.__closure__ or ()]
    parts += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    while pending:
        code = pending.pop()
        for step in dis.get_instructions(code):
            enclosing = step.opname == "STORE_DEREF" and step.argval in function.__code__.co_freevars
            if step.opname in _STORES or enclosing:
                return None
        if not _WAYS_IN.isdisjoint(code.co_names):
            return None
        parts += [function.__globals__[name] for name in code.co_names if name in function.__globals__]
        pending += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return parts


def can_be_followed(req: Req) -> bool:
    """Whether a request's processor can be called for drafts that may be rejected."""
    known = getattr(req, _COPYABLE, None)
    if known is None:
        try:
            known = not keeps_state(req.custom_logit_processor)
            _state_of(req)
        except Exception:  # code that cannot be looked through, parameters that cannot be copied
            known = False
        setattr(req, _COPYABLE, known)
    return known


def _state_of(req: Req) -> dict[str, Any] | None:
    """A copy of the request's parameters; the request itself, where they name it, stays what it is."""
    params = req.sampling_params.custom_params
    return _copied(params, req) if isinstance(params, dict) else None


def _copied(params: dict[str, Any], req: Req) -> dict[str, Any]:
    return copy.deepcopy({name: value for name, value in params.items() if name != "__req__"}, {id(req): req})


@dataclass
class ChunkCalls:
    """What the calls of one chunk left behind.

    Attributes
    ----------
    states : dict of int to list of dict
        ``custom_params`` after each position, by row.
    failures : dict of int to (int, str)
        The first position whose call failed, and the message, by row; ``settle`` forgets those behind rejected drafts.
    lost : dict of int to int
        The first position whose call left parameters that cannot be copied, by row.
    """

    states: dict[int, list[dict[str, Any] | None]] = field(default_factory=dict)
    failures: dict[int, tuple[int, str]] = field(default_factory=dict)
    lost: dict[int, int] = field(default_factory=dict)

    def settle(self, row: int, req: Req, length: int) -> int:
        """``length`` tokens of ``row`` count: forget the calls behind them. Returns how many count after all."""
        failed, said = self.failures.get(row, (length, ""))
        if failed == 0:
            end_with_error(req, said)
        elif failed >= length:
            self.failures.pop(row, None)
        # A chunk has one token at least; where the first call failed it is one of an unprocessed law.
        length = max(1, min(length, failed, self.lost.get(row, length)))
        self.restore(row, req, length)
        return length

    def blame(self, row: int, req: Req, length: int) -> None:
        """End a request whose processor has failed, if that was behind its ``length`` tokens, none of them an end."""
        failed, said = self.failures[row]
        if failed == length:
            end_with_error(req, said)

    def note(self, row: int, req: Req, position: int) -> None:
        """Remember what the call at ``position`` has left in the request's parameters."""
        try:
            self.states.setdefault(row, []).append(_state_of(req))
        except Exception:
            logger.warning("Request %s: its custom_params can no longer be copied; it runs without drafts.", req.rid)
            setattr(req, _COPYABLE, False)
            self.lost[row] = position

    def restore(self, row: int, req: Req, calls: int) -> None:
        """Make the parameters of ``row`` those after its first ``calls`` calls (or its only one)."""
        states, params = self.states.get(row), req.sampling_params.custom_params
        if not states or not isinstance(params, dict):
            return
        _put(params, _copied(states[min(max(calls, 1), len(states)) - 1] or {}, req))


def _put(params: dict[str, Any], state: dict[str, Any]) -> None:
    for name in [name for name in params if name != "__req__"]:
        del params[name]
    params.update(state)


def end_with_error(req: Req, message: str) -> None:
    """Mark a request as ending with an error of its client's code."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    if req.to_finish is None:
        req.to_finish = FINISH_ABORT(message, HTTPStatus.BAD_REQUEST, "BadRequestError")


def process_chunk(
    reqs: Sequence[Req],
    info: SamplingBatchInfo,
    logits: torch.Tensor,
    drafts: Sequence[Any],
    reading: Req | None = None,
) -> ChunkCalls:
    """Call every request's processor at every position, in place.

    Parameters
    ----------
    reqs : sequence of Req
        The batch; most have no processor.
    info : SamplingBatchInfo
        Its processors, which SGLang has read from the requests.
    logits : Tensor, ``[B, N, V]``
        With all of SGLang's own adjustments.
    drafts : sequence of sequence of int
        The drafts of each request, at most ``N - 1``.
    reading : Req, optional
        The request whose prompt goes on after this forward. SGLang calls its processor for each part of a prompt, so
        that what the processor remembers depends on how prompts happened to be cut.
    """
    calls = ChunkCalls()
    groups: dict[str, list[int]] = {}
    for row, req in enumerate(reqs):
        if req.custom_logit_processor and req is not reading:
            groups.setdefault(req.custom_logit_processor, []).append(row)
    for code, rows in groups.items():
        processor = info.custom_logit_processor[hash(code)][0]
        for position in range(1 + max(len(drafts[row]) for row in rows)):
            over = calls.failures.keys() | calls.lost.keys()
            there = [row for row in rows if len(drafts[row]) >= position and row not in over]
            if not there:
                break
            with _as_if_generated([(reqs[row], drafts[row][:position]) for row in there]):
                _call(processor, there, reqs, logits, position, calls)
            for row in there:
                if len(drafts[row]) and row not in calls.failures:
                    calls.note(row, reqs[row], position)
    return calls


def _call(
    processor: Callable, rows: list[int], reqs: Sequence[Req], logits: torch.Tensor, position: int, calls: ChunkCalls
) -> None:
    """One call for one position of ``rows``; where it fails, one call for each, so that only the culprits end."""
    params = [reqs[row].sampling_params.custom_params for row in rows]
    before = _states_before(rows, reqs) if len(rows) > 1 and not position else {}
    try:
        logits[rows, position] = processor(logits[rows, position], params)
        return
    except Exception as error:
        # It is the clients' code: its faults end their requests, not the server.
        failure = error
    for row in rows:
        if position:
            calls.restore(row, reqs[row], position)
        elif (state := before.get(row)) is not None:
            _put(reqs[row].sampling_params.custom_params, state)
        if len(rows) > 1:
            _call(processor, [row], reqs, logits, position, calls)
        else:
            logger.warning("A custom logit processor failed.", exc_info=failure)
            said = f"custom_logit_processor failed ({type(failure).__name__}: {failure})."
            calls.failures[row] = position, said


def _states_before(rows: Sequence[int], reqs: Sequence[Req]) -> dict[int, dict[str, Any] | None]:
    """Parameters of several requests, by row, for the case that one of them makes their common call fail."""
    states = {}
    for row in rows:
        with suppress(Exception):  # such parameters stay what the failed call has left
            states[row] = _state_of(reqs[row])
    return states


@contextmanager
def _as_if_generated(rows: Sequence[tuple[Req, Sequence[int]]]) -> Iterator[None]:
    """Let drafts stand in their requests' outputs."""
    lengths = [len(req.output_ids) for req, _ in rows]
    try:
        for req, drafts in rows:
            req.output_ids.extend(drafts)
        yield
    finally:
        for (req, _), length in zip(rows, lengths):
            del req.output_ids[length:]
