"""The step trace: one JSON object per line.

Field names follow the trace of the MineDraft reference where a field means the same; what that schema lacks is added
under names with units. Times are microseconds of ``time.monotonic``, one clock for both processes of a host.
docs/trace.md lists every field.
"""

from __future__ import annotations

import contextlib
import json
import logging
from typing import IO, Any

from sglang_psd.telemetry.stats import RoundRecord

logger = logging.getLogger(__name__)

FLUSH_EVERY = 64


def round_to_json(index: int, record: RoundRecord) -> dict[str, Any]:
    """The trace line of one round; None fields are left out."""
    line = {
        "tid": f"Step:{index}",
        "type": "Step",
        "start_us": _us(record.launch_s),
        "end_us": _us(record.result_s),
        "is_prompt_run": 0,
        "batched_requests": record.rids,
        "preempted_requests": record.preempted or None,
        "is_parallelised": record.mode == "parallel" and sum(1 for size in record.sizes if size) > 1,
        "proposed_len": record.num_steps,
        "verify_len": record.verified,
        "accepted_num": record.accepted,
        "generated_num": record.emitted,
        "match_count": record.rows_with_drafts,
        "measured_draft_time": _span(record.draft_start_s, record.draft_end_s),
        "measured_target_time": record.verify_end_s - record.verify_start_s,
        "slot": record.slot,
        "mode": record.mode,
        "slot_sizes": list(record.sizes),
        "late_rows": record.late_rows,
        "wait_us": round(record.wait_s * 1e6),
        "verify_start_us": _us(record.verify_start_s),
        "verify_end_us": _us(record.verify_end_s),
        "commit_us": _us(record.commit_s),
        "draft_start_us": _us(record.draft_start_s),
        "draft_end_us": _us(record.draft_end_s),
    }
    return {name: value for name, value in line.items() if value is not None}


def _us(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1e6)


def _span(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


class TraceWriter:
    """Appends trace lines to a file; a full disk ends the trace, never the server."""

    def __init__(self, path: str):
        self._path = path
        self._file: IO[str] | None = open(path, "a", encoding="utf-8")  # noqa: SIM115
        self._lines = 0

    def write_round(self, record: RoundRecord) -> None:
        """Append one round."""
        self._write(round_to_json(self._lines, record))

    def write_prefill(self, slot: int, rids: list[str], num_tokens: int, start_s: float, end_s: float) -> None:
        """Append one prefill of the target."""
        self._write(
            {
                "tid": f"Step:{self._lines}",
                "type": "Step",
                "start_us": _us(start_s),
                "end_us": _us(end_s),
                "is_prompt_run": len(rids),
                "batched_token_num": num_tokens,
                "batched_requests": rids,
                "slot": slot,
            }
        )

    def write_draft(self, round_id: int, rids: list[str], sent_s: float, received_s: float, span: tuple) -> None:
        """Append one answer of the drafter; ``span`` is its (started, finished) in seconds."""
        self._write(
            {
                "tid": f"Draft:{round_id}",
                "type": "Draft",
                "start_us": _us(span[0]),
                "end_us": _us(span[1]),
                "batched_requests": rids,
                "commit_us": _us(sent_s),
                "received_us": _us(received_s),
            }
        )

    def flush(self) -> None:
        """Write out what is buffered."""
        self._guarded(lambda file: file.flush())

    def close(self) -> None:
        """Flush and close."""
        self._guarded(lambda file: file.close())
        self._file = None

    def _write(self, line: dict[str, Any]) -> None:
        self._lines += 1
        self._guarded(lambda file: file.write(json.dumps(line, separators=(",", ":")) + "\n"))
        if self._lines % FLUSH_EVERY == 0:
            self.flush()

    def _guarded(self, action) -> None:
        if self._file is None:
            return
        try:
            action(self._file)
        except OSError as error:
            logger.warning("PSD: the trace %s ends here (%s); serving goes on.", self._path, error)
            # What is still buffered has no place; closing now keeps the finaliser from complaining about it later.
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None
