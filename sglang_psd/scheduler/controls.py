"""Control messages that would end SGLang's scheduler: weights that do not fit, an idle server taken for granted.

SGLang asserts that nothing runs before it gives memory back or flushes its cache after a weight update, its way back
from weights that do not fit reads the new checkpoint once more, and it raises where there is no expert distribution to
record. Here the server says so, and the old weights return.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler as _Base
else:
    _Base = object

logger = logging.getLogger(__name__)

BUSY = (
    "Requests are running or waiting: wait for them, abort them (abort_all_requests), or send flush_cache false to "
    "change the weights under them."
)
# Turns after which a server without requests has processed all it launched.
MOST_TURNS = 8


class CarefulWeightUpdater:
    """Stands before SGLang's ``SchedulerWeightUpdaterManager``; what it does not name goes there.

    Parameters
    ----------
    stock : SchedulerWeightUpdaterManager
    idle : callable
        Whether nothing runs or waits.
    model_path : str
        Checkpoint of the weights that are loaded.
    """

    def __init__(self, stock: Any, idle: Callable[[], bool], model_path: str):
        self._stock, self._idle, self._model_path = stock, idle, model_path
        self._newer = False  # than that checkpoint: weights came from memory since

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)

    def update_weights_from_disk(self, recv_req: Any) -> Any:
        """As SGLang's; an answer without success instead of a failed assertion, and the old weights after a misfit."""
        from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqOutput

        if recv_req.flush_cache and not self._idle():
            return UpdateWeightFromDiskReqOutput(success=False, message=BUSY)
        try:
            output = self._stock.update_weights_from_disk(recv_req)
        except Exception as error:
            logger.exception("New weights could not be loaded; the old ones are loaded again.")
            path, recv_req.model_path = recv_req.model_path, self._model_path
            success, message = self._stock.tp_worker.update_weights_from_disk(recv_req)
            if not success:
                raise RuntimeError(f"the old weights could not be loaded again: {message}") from error
            recv_req.model_path = path
            reason = f"{type(error).__name__}: {error}; the weights of {self._model_path} are loaded again."
            if self._newer:
                self._newer = False
                reason += " Those that were served were in no checkpoint and are lost: send them again."
                if self._idle():
                    self._stock.flush_cache_after_weight_update(recv_req)
            return UpdateWeightFromDiskReqOutput(success=False, message=reason)
        if self._has_new_weights(output):
            self._model_path, self._newer = recv_req.model_path, False
        return output

    def update_weights_from_tensor(self, recv_req: Any) -> Any:
        """As SGLang's; a busy server says so."""
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqOutput

        return self._unless_busy(recv_req, self._stock.update_weights_from_tensor, UpdateWeightsFromTensorReqOutput)

    def update_weights_from_distributed(self, recv_req: Any) -> Any:
        """As SGLang's; a busy server says so."""
        from sglang.srt.managers.io_struct import UpdateWeightsFromDistributedReqOutput

        return self._unless_busy(
            recv_req, self._stock.update_weights_from_distributed, UpdateWeightsFromDistributedReqOutput
        )

    def update_weights_from_ipc(self, recv_req: Any) -> Any:
        """As SGLang's; a busy server says so."""
        from sglang.srt.managers.io_struct import UpdateWeightsFromIPCReqOutput

        return self._unless_busy(recv_req, self._stock.update_weights_from_ipc, UpdateWeightsFromIPCReqOutput)

    def _unless_busy(self, recv_req: Any, update: Callable[[Any], Any], output: type) -> Any:
        if recv_req.flush_cache and not self._idle():
            return output(success=False, message=BUSY)
        answer = update(recv_req)
        self._newer = self._newer or self._has_new_weights(answer)
        return answer

    def _has_new_weights(self, answer: Any) -> bool:
        """Whether the target does: a draft that keeps its weights makes an answer without success."""
        from sglang_psd.target.worker import TARGET_ALONE

        return answer.success or answer.message.startswith(TARGET_ALONE)

    def release_memory_occupation(self, recv_req: Any) -> Any:
        """As SGLang's; a busy server keeps its memory, and its log says so: the answer has no place for it."""
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqOutput

        if not self._idle():
            logger.error("release_memory_occupation was ignored: requests are running or waiting.")
            return ReleaseMemoryOccupationReqOutput()
        return self._stock.release_memory_occupation(recv_req)

    def resume_memory_occupation(self, recv_req: Any) -> Any:
        """As SGLang's, for what was given back."""
        from sglang.srt.constants import GPU_MEMORY_ALL_TYPES
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqOutput

        wanted = recv_req.tags or GPU_MEMORY_ALL_TYPES
        recv_req.tags = [tag for tag in wanted if tag in self._stock.offload_tags]
        if not recv_req.tags:
            logger.error("resume_memory_occupation was ignored: nothing of %s was released.", ", ".join(wanted))
            return ResumeMemoryOccupationReqOutput()
        return self._stock.resume_memory_occupation(recv_req)


class ControlsMixin(_Base):
    """Puts the careful updater in place of SGLang's."""

    weight_updater: Any

    def init_weight_updater(self) -> None:
        """Before SGLang's dispatcher takes its methods."""
        super().init_weight_updater()
        if self.psd is not None:
            self.weight_updater = CarefulWeightUpdater(
                self.weight_updater, self._psd_is_idle, str(self.server_args.model_path)
            )

    def expert_distribution_handle(self, recv_req: Any) -> Any:
        """As SGLang's; where nothing is recorded the log says so: the answer has no place for it."""
        from sglang.srt.managers.io_struct import ExpertDistributionReqOutput

        if self.psd is None or self.server_args.expert_distribution_recorder_mode is not None:
            return super().expert_distribution_handle(recv_req)
        logger.error("Expert distributions are not recorded: start with --expert-distribution-recorder-mode.")
        return ExpertDistributionReqOutput()

    def _psd_is_idle(self) -> bool:
        """Whether nothing runs or waits, once what has been launched is processed."""
        for _ in range(MOST_TURNS):
            if self.is_fully_idle():
                return True
            live = any(not req.finished() for slot in self.psd_slots for req in slot.all_requests())
            if live or self.waiting_queue or self.chunked_req is not None or self._engine_paused:
                return False
            for slot in self.psd_slots:
                self.psd_turn_of(slot)
        return self.is_fully_idle()
