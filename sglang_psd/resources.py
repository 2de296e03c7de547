"""Paths of the model pair and the prompts that travel with the package."""

from __future__ import annotations

import json
from pathlib import Path

PACKAGE = Path(__file__).parent
TINY_TARGET = PACKAGE / "models" / "tiny-target"
TINY_DRAFT = PACKAGE / "models" / "tiny-draft"
TINY_EAGLE3 = PACKAGE / "models" / "tiny-eagle3"
PROMPTS = PACKAGE / "data" / "prompts.jsonl"


def load_prompts(count: int) -> list[str]:
    """First ``count`` user messages of the prompt file (64 in all)."""
    with open(PROMPTS, encoding="utf-8") as file:
        return [json.loads(line)["prompt"] for line in file][:count]
