"""Read the training texts and split them, by document, into train, distill and held-out parts."""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

from . import rest

# Percent of documents: the held-out ones are never trained on by either model; the distill ones are unseen
# by the target, so that its answers about them are like those about any new document, and the draft
# learns to follow it there.
HELD_OUT_PERCENT = 6
DISTILL_PERCENT = 10


@dataclass
class Document:
    """One unit of the split: a documentation file, a module's source, a speech, a chapter or a play.

    Attributes
    ----------
    source : str
        ``"docs"``, ``"stdlib"``, ``"speech"``, ``"novel"`` or ``"scene"``.
    name : str
        Human-readable name, used in prompts.
    split : str
        ``"train"``, ``"distill"`` or ``"heldout"``.
    text : str
        The document as training text.
    items : list of rest.Item
        The parsed blocks, for ``"docs"`` only.
    """

    source: str
    name: str
    split: str
    text: str
    items: list[rest.Item] = field(default_factory=list)


def split_of(key: str) -> str:
    """Assign a document to a split by a hash of its key, the same on every machine."""
    percent = int(hashlib.sha1(key.encode()).hexdigest(), 16) % 100
    if percent < HELD_OUT_PERCENT:
        return "heldout"
    return "distill" if percent < HELD_OUT_PERCENT + DISTILL_PERCENT else "train"


def read_docs(folder: Path) -> list[Document]:
    """Read the reStructuredText sources of the Python documentation (``*.rst.txt`` or ``*.rst``)."""
    documents = []
    for path in sorted([*folder.rglob("*.rst.txt"), *folder.rglob("*.rst")]):
        name = str(path.relative_to(folder)).split(".rst")[0]
        items = rest.parse(path.read_text(encoding="utf-8"))
        text = rest.render(items)
        if len(text) > 400:
            # A module's documentation and its source share a key, so that neither leaks the other.
            key = "module:" + name.split("/")[1].split(".")[0] if name.startswith("library/") else "docs:" + name
            documents.append(Document("docs", name, split_of(key), text, items))
    return documents


def read_stdlib() -> list[Document]:
    """Read the running interpreter's standard library, without its tests and generated tables."""
    folder = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "test", "tests", "idle_test", "encodings", "__pycache__", "lib2to3"}
    skipped |= {"pydoc_data", "ensurepip", "turtledemo"}
    documents = []
    for path in sorted(folder.rglob("*.py")):
        relative = path.relative_to(folder)
        if skipped & set(relative.parts) or relative.parts[0].startswith(("config-", "_sysconfigdata")):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        name = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
        if 400 < len(text) < 300_000:
            documents.append(Document("stdlib", name, split_of("module:" + name.split(".")[0].lstrip("_")), text))
    return documents


def read_speeches(folder: Path) -> list[Document]:
    """Read the State of the Union addresses (``YEAR_name.json`` with year, name and text)."""
    documents = []
    for path in sorted(folder.glob("[12][0-9][0-9][0-9]_*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        text = re.sub(r"\s+", " ", record["text"]).strip()
        name = f"{record['name']}, {record['year']}"
        documents.append(Document("speech", name, split_of("speech:" + path.stem), text))
    return documents


def read_novel(folder: Path) -> list[Document]:
    """Read the chapters of Moby-Dick (``chapter_N.txt``)."""
    documents = []
    for path in sorted(folder.glob("chapter_*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        paragraphs = [re.sub(r"\s+", " ", p).strip() for p in re.split(r"\n\s*\n", record["text"])]
        text = "\n\n".join(p for p in paragraphs if p)
        title = record.get("title") or record["chapter"]
        documents.append(Document("novel", str(title), split_of("novel:" + path.stem), text))
    return documents


def read_plays(path: Path) -> list[Document]:
    """Read the complete works of Shakespeare from one file and split it at the scenes."""
    scenes = re.split(r"\n(?=(?:ACT [IVX0-9]+\b|SCENE [IVX0-9]+\b)[^\n]*\n)", path.read_text(encoding="utf-8"))
    documents = []
    for number, scene in enumerate(scenes):
        lines = [re.sub(r"\s+", " ", x).strip() for x in scene.split("\n")]
        text = "\n".join(x for x in lines if x)
        if len(text) > 1500:
            documents.append(Document("scene", f"scene {number}", split_of(f"scene:{number}"), text))
    return documents


def functions_of(source: str) -> list[tuple[str, str, str, str]]:
    """Find the short functions of a module.

    Parameters
    ----------
    source : str
        Python source text.

    Returns
    -------
    list of (name, owner, signature, code)
        ``owner`` is the class's name or ``""``; ``code`` is dedented source with its decorators.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return []
    lines, found = source.expandtabs().split("\n"), []
    owners = [("", tree.body)] + [(n.name, n.body) for n in tree.body if isinstance(n, ast.ClassDef)]
    for owner, body in owners:
        for node in body:
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            first = min([node.lineno] + [d.lineno for d in node.decorator_list]) - 1
            margin = len(lines[first]) - len(lines[first].lstrip())
            code = "\n".join(x[margin:].rstrip() for x in lines[first : node.end_lineno])
            found.append((node.name, owner, f"{node.name}({ast.unparse(node.args)})", code))
    return found
