"""A control message that fails is answered so; in SGLang it ends the scheduler, and all requests with it.

A weight update that names a group nobody made, a profile by stage without a number of steps, a sleep beyond any clock:
SGLang's handlers raise, at once or in the forward after, and nothing between them and the event loop catches it.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler as _Base
else:
    _Base = object

logger = logging.getLogger(__name__)

# Fields of SGLang's answers: those that say that nothing was done, with what they say then, and those with a reason.
SAYS_NO: dict[str, Any] = {"success": False, "updated": False, "parameter": None, "session_id": None}
REASONS = ("message", "error_message")
# Control messages that nobody waits for.
WITHOUT_ANSWER = ("CloseSessionReqInput", "ConfigureLoggingReq", "ContinueGenerationReqInput", "FreezeGCReq")


class GuardedDispatcher:
    """SGLang's dispatcher of messages, with an answer where a control message's handler raises.

    Requests are checked before (``refusals.py``): what a half-queued one leaves behind nobody could tell.

    Parameters
    ----------
    stock : TypeBasedDispatcher
    """

    def __init__(self, stock: Any):
        self._stock = stock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)

    def __call__(self, message: Any) -> Any:
        """What SGLang's handler answers, or that it failed.

        Raises
        ------
        Exception
            The handler's, where the message is a request or its answer could not say that it failed.
        """
        try:
            return self._stock(message)
        except Exception as error:
            name = type(message).__name__
            answer_type = failure_type(name)
            if answer_type is None and name not in WITHOUT_ANSWER:
                raise
            logger.exception("%s failed; the server goes on.", name)
            return None if answer_type is None else failure(answer_type, f"{type(error).__name__}: {error}")


def failure_type(name: str) -> type | None:
    """Answer to the control messages of class ``name`` where it can say "no"; None of others."""
    from sglang.srt.managers import io_struct

    answer = "LoRAUpdateOutput" if "LoRAAdapter" in name else name.removesuffix("Input") + "Output"
    answer_type = getattr(io_struct, answer, None)
    if answer_type is None:
        return None
    fields = {field.name: field for field in msgspec.structs.fields(answer_type)}
    required = {name for name, field in fields.items() if field.required}
    return answer_type if fields.keys() & SAYS_NO.keys() and required <= SAYS_NO.keys() | set(REASONS) else None


def failure(answer_type: type, reason: str) -> Any:
    """An answer without success; ``reason`` where it has a place for one."""
    values = {**SAYS_NO, **dict.fromkeys(REASONS, reason)}
    fields = answer_type.__struct_fields__  # type: ignore[attr-defined]
    return answer_type(**{name: value for name, value in values.items() if name in fields})


class GuardedProfiler:
    """Stands before ``SchedulerProfilerManager``: a profile that fails in a forward ends, the forward does not.

    Parameters
    ----------
    stock : SchedulerProfilerManager
    """

    def __init__(self, stock: Any):
        self._stock = stock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)

    def _profile_batch_predicate(self, batch: Any) -> None:
        """SGLang's, before each forward: starts and stops what is due."""
        try:
            self._stock._profile_batch_predicate(batch)
        except Exception:
            logger.exception("Profiling failed and is over; the server goes on.")
            profiler = getattr(self._stock, "torch_profiler", None)
            self._stock.__post_init__()
            if profiler is not None:
                with contextlib.suppress(Exception):  # it may be what failed
                    profiler.stop()


class GuardsMixin(_Base):
    """Puts the guards in place."""

    _request_dispatcher: Any

    def init_profiler(self) -> None:
        """Before SGLang's dispatcher takes its methods."""
        super().init_profiler()
        if self.psd is not None:
            self.profiler_manager: Any = GuardedProfiler(self.profiler_manager)

    def init_request_dispatcher(self) -> None:
        """SGLang's, guarded."""
        super().init_request_dispatcher()
        if self.psd is not None:
            self._request_dispatcher = GuardedDispatcher(self._request_dispatcher)

    def slow_down(self, recv_req: Any) -> Any:
        """As SGLang's; not for so long that its watchdog would end the server, or the clock the scheduler."""
        sleep_s, limit_s = recv_req.forward_sleep_time, self.server_args.watchdog_timeout
        if self.psd is not None and sleep_s is not None and not sleep_s < limit_s:
            from sglang.srt.managers.io_struct import SlowDownReqOutput

            logger.error("slow_down was ignored: %s s before each forward is not below --watchdog-timeout.", sleep_s)
            return SlowDownReqOutput()
        return super().slow_down(recv_req)
