"""Ledger entries that cannot be read are named, whatever is wrong with their heads."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_psd.errors import PatchError
from sglang_psd.ledger import REQUIRED_FIELDS, patches_folder, read_entry

GOOD = "---\n" + "".join(f"{name}: a: b\n" for name in REQUIRED_FIELDS) + "---\nText.\n"


def test_a_head_is_read(tmp_path: Path) -> None:
    path = tmp_path / "hook.md"
    path.write_text(GOOD, encoding="utf-8")
    assert read_entry(path) == dict.fromkeys(REQUIRED_FIELDS, "a: b")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Text.\n", "no head"),
        (GOOD.replace("reason: a: b\n", ""), "'reason'"),
        (GOOD.replace("kind: a: b\n", "kind:\n"), "'kind'"),
        (GOOD.replace("target: a: b\n", "target\n"), "'target'"),
    ],
)
def test_a_head_that_lacks_something_is_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "hook.md"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(PatchError, match=f"hook.md .*{words}"):
        read_entry(path)


def test_every_entry_can_be_read() -> None:
    entries = [path for path in patches_folder().glob("*.md") if path.stem != "README"]
    assert len(entries) > 10 and all(read_entry(path) for path in entries)
