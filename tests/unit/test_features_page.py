"""Every row of the features page names tests, and they exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "features.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def rows() -> list[str]:
    """The rows of the tables of features, without their heads."""
    tables = [block for block in re.split(r"\n\n", PAGE) if block.startswith("| Feature |")]
    return [row for table in tables for row in table.splitlines()[2:]]


def test_every_row_names_a_test() -> None:
    assert len(rows()) > 50
    assert not [row for row in rows() if not NAMED.search(row.split("|")[3])]


def test_every_named_test_exists() -> None:
    missing = [
        f"{path}::{name}"
        for path, name in NAMED.findall(PAGE)
        if not (ROOT / path).is_file() or f"def {name}(" not in (ROOT / path).read_text(encoding="utf-8")
    ]
    assert not missing


def test_nothing_else_is_named() -> None:
    """A test without its function's name would be checked by nobody."""
    assert set(re.findall(r"`(tests/[^`]*)`", PAGE)) == {f"{path}::{name}" for path, name in NAMED.findall(PAGE)}
