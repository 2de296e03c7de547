"""Paths of the model pair and the prompts that travel with the package; does a path hold a model?"""

from __future__ import annotations

import json
import os
from pathlib import Path

from sglang_psd.errors import PSDConfigError

PACKAGE = Path(__file__).parent
TINY_TARGET = PACKAGE / "models" / "tiny-target"
TINY_DRAFT = PACKAGE / "models" / "tiny-draft"
TINY_EAGLE3 = PACKAGE / "models" / "tiny-eagle3"
PROMPTS = PACKAGE / "data" / "prompts.jsonl"
NUM_PROMPTS = 64


def load_prompts(count: int) -> list[str]:
    """First ``count`` user messages of the prompt file (``NUM_PROMPTS`` in all)."""
    with open(PROMPTS, encoding="utf-8") as file:
        return [json.loads(line)["prompt"] for line in file][:count]


def check_checkpoint(flag: str, path: str, kind: str) -> None:
    """Refuse a path that looks local and is no checkpoint; names of a hub are left to SGLang.

    Parameters
    ----------
    flag, path : str
        What the user gave.
    kind : str
        What the checkpoint should be, for the message.

    Raises
    ------
    PSDConfigError
        There is no such folder, or it holds no ``config.json``.
    """
    looks_local = not path or path.startswith((".", "/", "~")) or os.path.isdir(path)
    if looks_local and not os.path.isfile(os.path.join(os.path.expanduser(path), "config.json")):
        raise PSDConfigError(f"{flag} {path!r} is no folder with a model's config.json; name a {kind} checkpoint.")
