"""A small reStructuredText reader, enough for the sources of the Python documentation.

It turns one ``.rst`` file into a list of :class:`Item` objects (titles, paragraphs, code blocks and
described objects such as functions), from which both plain training text and chat answers are made.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

OBJECT_DIRECTIVES = {
    "function", "method", "class", "attribute", "data", "exception", "classmethod", "staticmethod",
    "decorator", "decoratormethod", "describe", "property", "coroutinefunction", "coroutinemethod",
    "abstractmethod", "awaitablefunction", "awaitablemethod", "cfunction", "c:function", "c:macro",
    "c:type", "c:var", "c:member", "opcode", "option", "cmdoption", "envvar", "2to3fixer", "pdbcommand",
}  # fmt: skip
NOTE_DIRECTIVES = {"note", "warning", "important", "tip", "caution", "hint", "impl-detail"}
CODE_DIRECTIVES = {
    "code-block",
    "sourcecode",
    "doctest",
    "testcode",
    "parsed-literal",
    "code",
    "literalinclude",
}

_DIRECTIVE = re.compile(r"^(\s*)\.\. +([\w:-]+?)::(?: +(.*))?$")
_CODE_ROLES = {
    "mod", "func", "class", "meth", "attr", "exc", "data", "const", "keyword", "file", "option", "envvar",
    "program", "command", "samp", "code", "obj", "c:func", "c:type", "c:macro", "c:data", "c:member",
    "cfunc", "ctype", "cmacro", "opcode", "kbd", "token", "mimetype", "pdbcmd", "py:class", "py:meth",
}  # fmt: skip


@dataclass
class Item:
    """One block of a document.

    Attributes
    ----------
    kind : str
        ``"title"``, ``"para"``, ``"code"`` or ``"entry"``.
    text : str
        The block's text; for an entry its signatures, one a line.
    directive : str
        For an entry, the directive that described it (``"function"``, ``"class"``, ...).
    body : list of Item
        For an entry, the blocks of its description.
    """

    kind: str
    text: str
    directive: str = ""
    body: list[Item] = field(default_factory=list)


def _role(match: re.Match[str]) -> str:
    name, target = match.group(1), match.group(2)
    titled = re.match(r"^(.*?)\s*<[^>]*>$", target, re.S)
    if titled:
        target = titled.group(1)
    elif target.startswith("~"):
        target = target[1:].rsplit(".", 1)[-1]
    target = target.lstrip("!")
    if name == "pep":
        return f"PEP {target}"
    if name == "rfc":
        return f"RFC {target}"
    if name in ("func", "meth", "c:func") and not target.endswith(")"):
        target += "()"
    return f"`{target}`" if name in _CODE_ROLES else target


def clean_inline(text: str) -> str:
    """Turn inline reStructuredText markup into plain text with Markdown backticks."""
    text = re.sub(r":([\w:+-]+):`([^`]+)`", _role, text, flags=re.S)
    text = re.sub(r"``(.+?)``", r"`\1`", text, flags=re.S)
    text = re.sub(r"`([^`<]+?)\s*<[^>`]+>`__?", r"\1", text)
    text = re.sub(r"`([^`]+)`__?(?=\W|$)", lambda m: m.group(0).rstrip("_"), text)
    text = re.sub(r"\s*\[[#\w]*\]_", "", text)
    text = re.sub(r"\\([ *`_|\\])", lambda m: "" if m.group(1) == " " else m.group(1), text)
    text = re.sub(r"\*\*([^*]+)\*\*", r"\1", text)
    return re.sub(r"\s+", " ", text).strip()


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _is_rule(line: str) -> bool:
    line = line.rstrip()
    return len(line) >= 3 and len(set(line)) == 1 and line[0] in "=-*~^\"'#+`.:"


def _dedent(lines: list[str]) -> list[str]:
    margin = min((_indent(x) for x in lines if x.strip()), default=0)
    return [x[margin:] for x in lines]


def _take_body(lines: list[str], start: int, margin: int) -> tuple[list[str], int]:
    """Return the lines from ``start`` that are blank or indented past ``margin``, and the next index."""
    end = start
    while end < len(lines) and (not lines[end].strip() or _indent(lines[end]) > margin):
        end += 1
    return lines[start:end], end


def _code(lines: list[str]) -> str:
    return "\n".join(x.rstrip() for x in _dedent(lines)).strip("\n")


def _directive_items(name: str, argument: str, body: list[str]) -> list[Item]:
    if name in OBJECT_DIRECTIVES:
        signatures = [argument] if argument else []
        # Further signatures follow the first as indented lines with no blank line between.
        while body and body[0].strip() and not body[0].strip().startswith(":"):
            signatures.append(body.pop(0).strip())
        while body and body[0].strip().startswith(":"):
            body.pop(0)
        text = "\n".join(re.sub(r"\\(.)", r"\1", s) for s in signatures)
        return [Item("entry", text, name, parse("\n".join(_dedent(body))))]
    while body and re.match(r"^\s*:[\w-]+:", body[0]):
        body.pop(0)
    if name in NOTE_DIRECTIVES:
        inner = parse("\n".join(_dedent(([argument] if argument else []) + _dedent(body))))
        label = {"impl-detail": "CPython implementation detail"}.get(name, name.capitalize())
        if inner and inner[0].kind == "para":
            inner[0].text = f"{label}: {inner[0].text}"
        return inner
    if name in CODE_DIRECTIVES and name != "literalinclude":
        code = _code(body)
        return [Item("code", code)] if code else []
    if name == "glossary":
        return _glossary(_dedent(body))
    return []


def _glossary(lines: list[str]) -> list[Item]:
    items, i = [], 0
    while i < len(lines):
        if not lines[i].strip() or lines[i].startswith(" ") or lines[i].startswith(".."):
            i += 1
            continue
        body, j = _take_body(lines, i + 1, 0)
        items.append(Item("entry", clean_inline(lines[i]), "term", parse("\n".join(_dedent(body)))))
        i = j
    return items


def parse(source: str) -> list[Item]:
    """Parse reStructuredText into blocks.

    Parameters
    ----------
    source : str
        The text of a file, or of a directive's dedented body.

    Returns
    -------
    list of Item
        In document order; markup that carries no prose (indexes, tables, labels) is dropped.
    """
    lines = source.expandtabs().split("\n")
    items: list[Item] = []
    i = 0
    while i < len(lines):
        line = lines[i]
        if not line.strip():
            i += 1
            continue
        match = _DIRECTIVE.match(line)
        if match:
            body, i = _take_body(lines, i + 1, len(match.group(1)))
            items += _directive_items(match.group(2), (match.group(3) or "").strip(), body)
            continue
        if line.lstrip().startswith(".."):
            _, i = _take_body(lines, i + 1, _indent(line))
            continue
        if _is_rule(line):
            i += 1
            continue
        if i + 1 < len(lines) and _is_rule(lines[i + 1]) and len(lines[i + 1].rstrip()) >= len(line.rstrip()) - 1:
            items.append(Item("title", clean_inline(line)))
            i += 2
            continue
        i = _paragraph(lines, i, items)
    return items


def _paragraph(lines: list[str], i: int, items: list[Item]) -> int:
    """Append the paragraph at line ``i`` (and the literal block after it); return the next line's index."""
    start, margin = i, _indent(lines[i])
    while i < len(lines) and lines[i].strip() and not _DIRECTIVE.match(lines[i]):
        if i > start and re.match(r"^\s*([*-]|#\.|\d+\.) ", lines[i]):
            break
        i += 1
    block = lines[start:i]
    first = block[0].strip()
    if first.startswith(">>>"):
        items.append(Item("code", _code(block)))
        return i
    if first.startswith(("+--", "+==", "|", "===")) or re.match(r"^:[\w ]+:( |$)", first):
        return i
    text = " ".join(x.strip() for x in block)
    literal = text.endswith("::")
    text = clean_inline(re.sub(r"\s*::$", ":", text)) if literal else clean_inline(text)
    if text and text != ":" and not text.startswith("Source code:"):
        items.append(Item("para", re.sub(r"^\* ", "- ", text)))
    if literal:
        body, i = _take_body(lines, i, margin)
        if any(x.strip() for x in body):
            items.append(Item("code", _code(body)))
    return i


def render(items: list[Item], depth: int = 0) -> str:
    """Render blocks as Markdown-like text, the form that training text and answers share."""
    parts = []
    for item in items:
        if item.kind == "title":
            parts.append(f"# {item.text}")
        elif item.kind == "para":
            parts.append(item.text)
        elif item.kind == "code":
            parts.append(f"```\n{item.text}\n```")
        else:
            parts.append("\n".join(f"`{s}`" for s in item.text.split("\n")))
            if item.body:
                parts.append(render(item.body, depth + 1))
    return "\n\n".join(parts)
