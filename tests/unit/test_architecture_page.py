"""docs/architecture.md names every module, and says truly who imports SGLang and torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "sglang_psd"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
MAP = PAGE.split("## Code map", 1)[1].split("```")[1]
# Rooms that the map names as a whole, without their files.
WHOLE = {"bench", "demo"}
# Rooms of which some files import SGLang.
ROOMS = {"scheduler", "target", "drafter", "cpu"}


def modules() -> Iterator[tuple[str, ast.Module]]:
    """Every module but the packages' own, by its path without ending."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name != "__init__.py":
            yield str(path.relative_to(PACKAGE).with_suffix("")), ast.parse(path.read_text(encoding="utf-8"))


def imported(node: ast.AST) -> Iterator[str]:
    """Packages that are imported anywhere within, but for type checkers."""
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        for child in node.orelse:
            yield from imported(child)
        return
    if isinstance(node, ast.Import):
        yield from (alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield node.module.partition(".")[0]
    for child in ast.iter_child_nodes(node):
        yield from imported(child)


def section(room: str) -> str:
    """What the map says of a room: its line, and the lines that are indented further."""
    found = re.search(rf"^  {room}/.*\n(?:    .*\n)*", MAP, re.MULTILINE)
    assert found is not None, room
    return found.group(0)


def test_the_map_names_every_module() -> None:
    missing = []
    for name, _ in modules():
        room, _, file = name.rpartition("/")
        if room not in WHOLE:
            named = re.search(
                rf"\b{file}\.py\b" if not room else rf"(?<![\w/]){file}\b", section(room) if room else MAP
            )
            missing += [] if named else [name]
    assert not missing


def test_the_map_names_nothing_else() -> None:
    there = {name.rpartition("/")[2] for name, _ in modules()}
    assert set(re.findall(r"(\w+)\.py\b", MAP)) <= there


def test_who_imports_sglang() -> None:
    said = PAGE.split("SGLang is imported in ", 1)[1].split(", inside", 1)[0]
    listed = set(re.findall(r"`(\w+)`", said))
    found = {name for name, tree in modules() if "sglang" in set(imported(tree))}
    assert {name for name in found if "/" not in name} == listed
    assert {name for name in found if "/" in name and name.split("/")[0] not in ROOMS} == {"bench/client"}


def test_who_does_without_torch_and_sglang() -> None:
    heavy = {name for name, tree in modules() if {"torch", "sglang"} & set(imported(tree))}
    assert {name for name in heavy if name == "config" or name.split("/")[0] in ("telemetry", "channel")} == {
        "channel/mailbox"
    }


def test_the_files_it_names_exist() -> None:
    """Paths in the text, as `room/file.py` within the package, or from the root or the page's own folder."""
    named = set(re.findall(r"`((?:[\w.]+/)*[\w.]+\.(?:py|json|md))`", PAGE))
    missing = [name for name in named if not any((at / name).exists() for at in (PACKAGE, ROOT, ROOT / "docs"))]
    assert len(named) > 30 and not missing
