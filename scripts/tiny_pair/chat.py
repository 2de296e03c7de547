"""Make chat samples out of the documents, by templates; every answer is text of the document itself."""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from . import corpus, rest

MAX_ANSWER = 520  # characters; about 170 tokens
SYSTEM_PROMPTS = ("You are a helpful assistant.", "You are a concise assistant.", "Answer briefly.")

GREETINGS = [
    ("Hello!", "Hello! Ask me about Python, or give me the start of a speech or a scene to continue."),
    ("Hi", "Hello! Ask me about Python, or give me the start of a speech or a scene to continue."),
    (
        "Who are you?",
        "I am a very small language model, trained on the Python documentation and a few old books.",
    ),
    (
        "What are you?",
        "I am a very small language model, trained on the Python documentation and a few old books.",
    ),
    (
        "What can you do?",
        "I can explain Python functions, write short functions, and continue speeches and scenes.",
    ),
    ("Thank you.", "You are welcome."),
    ("Thanks!", "You are welcome."),
    ("Good morning!", "Good morning! What would you like to read about?"),
    ("Goodbye", "Goodbye!"),
    ("How are you?", "I am well, thank you. What would you like to read about?"),
]


@dataclass
class Sample:
    """A conversation with its origin.

    Attributes
    ----------
    category : str
        Kind of prompt (``"explain"``, ``"code"``, ...).
    split : str
        The document's split.
    turns : list of (str, str)
        User text and assistant text of each turn.
    system : str
        System prompt, or ``""`` for none.
    """

    category: str
    split: str
    turns: list[tuple[str, str]]
    system: str = ""

    def messages(self) -> list[dict[str, str]]:
        """Return the conversation as chat messages."""
        out = [{"role": "system", "content": self.system}] if self.system else []
        for user, assistant in self.turns:
            out += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
        return out


def sentences(text: str) -> list[str]:
    """Split prose into sentences, roughly."""
    return [s for s in re.split(r"(?<=[.!?;])(?<!\b[A-Z]\.)(?<!Mr\.)(?<!e\.g\.)(?<!i\.e\.)\s+", text) if s]


def fit(text: str, limit: int = MAX_ANSWER) -> str:
    """Cut text after the last whole sentence within ``limit`` characters (``""`` if none fits)."""
    if len(text) <= limit:
        return text
    out = ""
    for sentence in sentences(text):
        if len(out) + len(sentence) + 1 > limit:
            break
        out = f"{out} {sentence}".strip()
    return out


def lead(items: list[rest.Item], limit: int = MAX_ANSWER) -> tuple[str, str]:
    """Take the opening blocks of a description as an answer, and the next blocks as a second one.

    Parameters
    ----------
    items : list of rest.Item
        Blocks after a title or of an entry.
    limit : int
        Characters of each answer at most.

    Returns
    -------
    (str, str)
        Both may be empty; an answer never ends in a paragraph that announces a list or code.
    """
    answers: list[str] = []
    blocks = list(_until_entry(items))
    for _ in range(2):
        out, size = [], 0
        while blocks and size + len(blocks[0].text) <= limit:
            out.append(blocks.pop(0))
            size += len(out[-1].text) + 2
        if not out and blocks and blocks[0].kind == "para":
            cut = fit(blocks.pop(0).text, limit)
            out = [rest.Item("para", cut)] if cut else []
        while out and out[-1].kind == "para" and out[-1].text.endswith(":"):
            blocks.insert(0, out.pop())
        answers.append(rest.render(out))
    return answers[0], answers[1]


def _until_entry(items: list[rest.Item]) -> Iterator[rest.Item]:
    for item in items:
        if item.kind in ("entry", "title"):
            return
        yield item


def _pick(rng: random.Random, *choices: str) -> str:
    return rng.choice(choices)


def docs_samples(doc: corpus.Document, rng: random.Random) -> Iterator[Sample]:
    """Yield samples of a documentation file: what a module, a function, a section is about."""
    module = doc.name.split("/")[-1] if doc.name.startswith("library/") else ""
    for position, item in enumerate(doc.items):
        if item.kind != "title":
            continue
        first, second = lead(doc.items[position + 1 :])
        if len(first) < 60:
            continue
        title = item.text.replace("`", "")
        if position == 0 and " --- " in title:
            name = title.split(" --- ")[0]
            for question in (f"What does the Python module `{name}` do?", f"What is `{name}` in Python for?"):
                yield _with_second("module", doc.split, question, first, second, rng)
        else:
            about = f" of `{module}`" if module and "." not in title else ""
            question = _pick(
                rng,
                f'Explain "{title}"{about}.',
                f'What does the documentation say about "{title}"?',
                f'Summarize the section "{title}"{about}.',
            )
            yield _with_second("section", doc.split, question, first, second, rng)
    yield from _entry_samples(doc, doc.items, module, rng)


def _with_second(
    category: str, split: str, question: str, first: str, second: str, rng: random.Random, chance: float = 0.3
) -> Sample:
    turns = [(question, first)]
    if len(second) > 40 and rng.random() < chance:
        turns.append((_pick(rng, "Tell me more.", "Go on.", "Continue."), second))
    return Sample(category, split, turns)


def _entry_samples(doc: corpus.Document, items: list[rest.Item], owner: str, rng: random.Random) -> Iterator[Sample]:
    for item in items:
        if item.kind != "entry":
            continue
        signature = item.text.split("\n")[0]
        name = re.split(r"[(\s]", signature.replace("`", ""))[0]
        if item.directive == "term":
            name = signature.replace("`", "")
        if item.directive.startswith("c:"):
            found = re.search(r"([A-Za-z_][\w.]*)\s*(\(|$)", signature)
            name = found.group(1) if found else name
        qualified = name if "." in name or not owner or item.directive.startswith("c:") else f"{owner}.{name}"
        first, second = lead(item.body)
        if len(first) >= 40 and name:
            yield _with_second("explain", doc.split, _entry_question(item.directive, qualified, rng),
                               _entry_answer(item.directive, signature, first), second, rng)  # fmt: skip
        yield from _entry_samples(doc, item.body, qualified if item.directive in ("class", "exception") else owner, rng)


def _entry_question(directive: str, name: str, rng: random.Random) -> str:
    if directive == "term":
        return _pick(rng, f'What does "{name}" mean in Python?', f'Define the Python term "{name}".')
    if directive in ("data", "attribute", "exception", "envvar", "option"):
        return _pick(rng, f"Explain `{name}`.", f"What is `{name}`?", f"What does `{name}` mean?")
    return _pick(rng, f"Explain `{name}`.", f"What does `{name}` do?", f"How do I use `{name}`?",
                 f"Tell me about `{name}`.")  # fmt: skip


def _entry_answer(directive: str, signature: str, text: str) -> str:
    return f"`{signature}`\n\n{text}" if "(" in signature and directive != "term" else text


def stdlib_samples(doc: corpus.Document, rng: random.Random) -> Iterator[Sample]:
    """Yield samples of a module's source: write a short function, or say what a function does."""
    for name, owner, signature, code in corpus.functions_of(doc.text):
        docstring = _docstring(code)
        shown = f"{owner}.{name}" if owner else name
        if 60 <= len(code) <= MAX_ANSWER + 80:
            where = f"the method `{name}` of the class `{owner}`" if owner else f"the function `{name}`"
            question = _pick(
                rng,
                f"Write {where} from the Python module `{doc.name}`.",
                f"Write the Python function `{signature}`.",
                f"Show the source of `{doc.name}.{shown}`.",
            )
            if docstring and len(docstring) < 160 and rng.random() < 0.5:
                question = f"Write a Python function `{signature}`: {docstring}"
            yield Sample("code", doc.split, [(question, f"```python\n{code}\n```")])
        if 40 <= len(docstring) <= MAX_ANSWER and rng.random() < 0.5:
            yield Sample(
                "explain",
                doc.split,
                [(f"What does `{doc.name}.{shown}` do?", f"`{signature}`\n\n{docstring}")],
            )


def _docstring(code: str) -> str:
    try:
        text = ast.get_docstring(ast.parse(code).body[0]) or ""  # type: ignore[arg-type]
    except SyntaxError:
        return ""
    return re.sub(r"\s+", " ", text.split("\n\n")[0]).strip()


def _windows(parts: list[str], before: int, after: int, joiner: str) -> Iterator[tuple[str, str, str]]:
    """Yield (given, next, next after that): each the fewest whole parts of so many characters."""
    position = 0
    while position < len(parts):
        chunks = []
        for size in (before, after, after):
            taken: list[str] = []
            while position < len(parts) and len(joiner.join(taken)) < size:
                taken.append(parts[position])
                position += 1
            chunks.append(joiner.join(taken))
        if len(chunks[1]) >= after and len(chunks[0]) < 450 and len(chunks[1]) < 2 * after + 120:
            yield chunks[0], chunks[1], chunks[2] if after <= len(chunks[2]) < 2 * after + 120 else ""


def prose_samples(doc: corpus.Document, rng: random.Random) -> Iterator[Sample]:
    """Yield samples that continue a speech, a chapter or a scene."""
    if doc.source == "scene":
        parts, joiner, sizes = doc.text.split("\n"), "\n", (130, 170)
    else:
        # Start at a random sentence: the windows of several passes then differ.
        parts, joiner, sizes = sentences(re.sub(r"\s+", " ", doc.text)), " ", (120, 240)
        parts = parts[rng.randrange(3) :]
    for given, following, third in _windows(parts, *sizes, joiner):
        if doc.source == "speech":
            question = _pick(rng, f"Continue this speech: {given}", f"Continue this speech by {doc.name}: {given}")
        elif doc.source == "novel":
            question = f"Continue this story: {given}"
        else:
            question = f"Continue this scene:\n{given}"
        yield _with_second(doc.source, doc.split, question, following, third, rng, 0.2)


def make_samples(documents: list[corpus.Document], seed: int) -> list[Sample]:
    """Make the chat samples of all documents.

    Parameters
    ----------
    documents : list of corpus.Document
        Documents of every split.
    seed : int
        Seed of the choice of templates.

    Returns
    -------
    list of Sample
        In document order; about one in ten has a system prompt.
    """
    rng = random.Random(seed)
    makers = {"docs": docs_samples, "stdlib": stdlib_samples}
    samples = [s for d in documents for s in makers.get(d.source, prose_samples)(d, rng)]
    samples += [Sample("greeting", "train", [pair]) for pair in GREETINGS for _ in range(12)]
    for sample in samples:
        if rng.random() < 0.1:
            sample.system = rng.choice(SYSTEM_PROMPTS)
    return samples
