"""patches/README.md lists every hook, each with its entry."""

from __future__ import annotations

import re
from pathlib import Path

from sglang_psd.hooks import HOOKS

PATCHES = Path(__file__).parents[2] / "patches"
PAGE = (PATCHES / "README.md").read_text(encoding="utf-8")


def test_the_list_is_that_of_the_hooks() -> None:
    listed = re.findall(r"^\| \[(\w+)\]\((\w+)\.md\)", PAGE, re.MULTILINE)
    assert sorted(name for name, _ in listed) == sorted(hook.name for hook in HOOKS)
    assert all(name == file and (PATCHES / f"{file}.md").is_file() for name, file in listed)


def test_the_kinds_are_explained() -> None:
    assert {hook.kind for hook in HOOKS} <= set(re.findall(r"`([A-Z]+)`", PAGE))
