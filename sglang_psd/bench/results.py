"""The result file: what was measured, and by being written after every cell also what need not be measured again."""

from __future__ import annotations

import datetime
import json
import os
from pathlib import Path
from typing import Any

from sglang_psd.errors import PSDConfigError

SCHEMA = "sglang-psd-bench/1"
# What all cells of one file must have in common.
IDENTITY = ("target", "draft", "dataset", "temperature", "waves", "extra", "environment_accept_length")


class ResultFile:
    """Measurements of one pair of models under one set of flags.

    Parameters
    ----------
    path : Path
        Read when it exists (the run then goes on where it ended), written by ``save``.
    settings : dict
        ``IDENTITY`` keys and whatever else describes the run.
    environment : dict
    fresh : bool
        Forget what the file holds.

    Raises
    ------
    PSDConfigError
        The file is none of ours, or holds measurements of something else.
    """

    def __init__(self, path: Path, settings: dict[str, Any], environment: dict[str, Any], *, fresh: bool = False):
        self.path = path
        self.data: dict[str, Any] = {
            "schema": SCHEMA,
            "settings": settings,
            "runs": [],
            "servers": {},
            "cells": {},
        }
        if path.exists() and not fresh:
            self.data = load_results(path)
            self._check_identity(settings)
            self.data["settings"] = {**settings, "simulated": self._merge_simulated(settings)}
        self.data["runs"].append({"started": _now(), "command": settings.get("command"), "environment": environment})

    def _check_identity(self, settings: dict[str, Any]) -> None:
        before = self.data["settings"]
        for name in IDENTITY:
            if before.get(name) != settings.get(name):
                raise PSDConfigError(
                    f"{self.path} holds measurements with {name} = {before.get(name)!r}, now it is "
                    f"{settings.get(name)!r}; choose another --out, or start it anew with --fresh."
                )

    def _merge_simulated(self, settings: dict[str, Any]) -> dict[str, float | None]:
        """Simulated accept length by k; another run may add another k."""
        before, now = self.data["settings"]["simulated"], settings["simulated"]
        for k in before.keys() & now.keys():
            if before[k] != now[k]:
                raise PSDConfigError(
                    f"{self.path} holds measurements of k={k} with a simulated accept length of {before[k]}, now it is "
                    f"{now[k]}; choose another --out, or start it anew with --fresh."
                )
        return {**before, **now}

    def entry(self, cell: dict[str, Any]) -> dict[str, Any]:
        """The cell's entry, created when it is new: the cell's fields, ``measurements`` and ``errors``."""
        return self.data["cells"].setdefault(cell["key"], {**cell, "measurements": [], "errors": []})

    def measured(self, key: str, repeat: int) -> int:
        """Measurements of this cell in this repeat."""
        entry = self.data["cells"].get(key, {"measurements": []})
        return sum(1 for measurement in entry["measurements"] if measurement["repeat"] == repeat)

    def failed(self, key: str, repeat: int) -> bool:
        """Whether the cell broke in this repeat."""
        entry = self.data["cells"].get(key, {"errors": []})
        return any(error["repeat"] == repeat for error in entry["errors"])

    def forget_errors(self) -> None:
        """Let failed cells be measured again."""
        for entry in self.data["cells"].values():
            entry["errors"] = []

    def save(self) -> None:
        """Write the file in one piece."""
        self.data["updated"] = _now()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_name(self.path.name + ".part")
        part.write_text(json.dumps(self.data, indent=1) + "\n", encoding="utf-8")
        os.replace(part, self.path)


def load_results(path: Path) -> dict[str, Any]:
    """Read a result file.

    Raises
    ------
    PSDConfigError
        It cannot be read, or was not written by ``sglang-psd bench``.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PSDConfigError(f"{path} cannot be read as a result of 'sglang-psd bench' ({error}).") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise PSDConfigError(f"{path} was not written by this version of 'sglang-psd bench' (schema {SCHEMA}).")
    return data


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
