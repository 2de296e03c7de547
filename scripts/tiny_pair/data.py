"""Build the tokenizer and the tokenised training data."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from . import chat, corpus

VOCAB_SIZE = 2048
PAD, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = [PAD, IM_START, IM_END, "<think>", "</think>", "<tool_call>", "</tool_call>"]
SPLITS = ("train", "distill", "heldout")
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + (message.content | trim) + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
# Words with their leading space, digits one by one, punctuation, and runs of white space (indentation).
WORD_PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer; every UTF-8 text survives a round trip."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=IM_END,
        additional_special_tokens=[IM_START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )


def encode_texts(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> np.ndarray:
    """Encode documents into one stream of uint16 ids, each followed by ``<|endoftext|>``."""
    end = np.array([tokenizer.pad_token_id], dtype=np.uint16)
    parts: list[np.ndarray] = []
    for encoding in tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False):
        parts += [np.array(encoding.ids, dtype=np.uint16), end]
    return np.concatenate(parts) if parts else end[:0]


def encode_chats(tokenizer: PreTrainedTokenizerFast, samples: list[chat.Sample]) -> dict[str, np.ndarray]:
    """Encode conversations.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerFast
        The pair's tokenizer.
    samples : list of chat.Sample
        Conversations.

    Returns
    -------
    dict of str to ndarray
        ``tokens`` uint16 and ``answer`` uint8 (1 where the assistant speaks, its end token included), both
        flat; ``offsets`` int64 of shape ``(n + 1,)``; ``prompt`` int32 ``(n,)``, the length of the first
        turn's prompt including the generation prompt; ``split`` uint8 ``(n,)``, an index into ``SPLITS``.
    """
    start, end = tokenizer.convert_tokens_to_ids([IM_START, IM_END])
    messages = [(m["role"], m["content"].strip()) for s in samples for m in s.messages()]
    heads = {r: tokenizer.encode(f"{r}\n", add_special_tokens=False) for r in ("system", "user", "assistant")}
    newline = tokenizer.encode("\n", add_special_tokens=False)
    # A user message is encoded with its role line, as the template's text is; an answer is encoded alone,
    # because that is how it is generated.
    texts = [c if r == "assistant" else f"{r}\n{c}" for r, c in messages]
    encoded = iter(tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False))
    tokens: list[int] = []
    answer: list[int] = []
    offsets, prompts = [0], []
    for sample in samples:
        prompt = 0
        for message in sample.messages():
            ids = next(encoded).ids
            if message["role"] == "assistant":
                tokens += [start, *heads["assistant"]]
                answer += [0] * (1 + len(heads["assistant"]))
                prompt = prompt or len(tokens) - offsets[-1]
                tokens += [*ids, end, *newline]
                answer += [1] * (len(ids) + 1) + [0] * len(newline)
            else:
                tokens += [start, *ids, end, *newline]
                answer += [0] * (2 + len(ids) + len(newline))
        offsets.append(len(tokens))
        prompts.append(prompt)
    return {
        "tokens": np.array(tokens, dtype=np.uint16),
        "answer": np.array(answer, dtype=np.uint8),
        "offsets": np.array(offsets, dtype=np.int64),
        "prompt": np.array(prompts, dtype=np.int32),
        "split": np.array([SPLITS.index(s.split) for s in samples], dtype=np.uint8),
    }


def choose_prompts(samples: list[chat.Sample], shares: dict[str, int], seed: int) -> list[dict[str, str]]:
    """Choose held-out prompts (first turns without a system prompt) by category, in a mixed order."""
    rng = random.Random(seed)
    chosen: list[dict[str, str]] = []
    for category, count in shares.items():
        pool = sorted({s.turns[0][0] for s in samples if s.category == category and s.split == "heldout"})
        pool = [p for p in pool if 20 < len(p) < 420]
        chosen += [{"prompt": p, "category": category} for p in rng.sample(pool, min(count, len(pool)))]
    rng.shuffle(chosen)
    return chosen


def write_jsonl(path: Path, records: list[dict[str, str]]) -> None:
    """Write records as JSON, one a line."""
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records), encoding="utf-8")


def build(documents: list[corpus.Document], out: Path, seed: int) -> dict[str, int]:
    """Write the tokenizer, ``data.npz``, ``heldout.jsonl`` and ``prompts.jsonl`` to ``out``.

    Parameters
    ----------
    documents : list of corpus.Document
        All documents.
    out : Path
        Folder, created if missing.
    seed : int
        Seed of every random choice.

    Returns
    -------
    dict of str to int
        Token and sample counts, also written to ``counts.json``.
    """
    out.mkdir(parents=True, exist_ok=True)
    samples = chat.make_samples(documents, seed)
    # More phrasings and passages of the distill documents: prompts only, their answers are not used.
    for extra in (1, 2):
        more = chat.make_samples([d for d in documents if d.split == "distill"], seed + extra)
        samples += [s for s in more if s.split == "distill"]
    random.Random(seed).shuffle(samples)
    train_texts = [d.text for d in documents if d.split == "train"]
    tokenizer = train_tokenizer(train_texts + [a for s in samples if s.split == "train" for t in s.turns for a in t])
    tokenizer.save_pretrained(out / "tokenizer")
    chats = encode_chats(tokenizer, samples)
    arrays = {f"chat_{k}": v for k, v in chats.items()}
    for split in SPLITS:
        arrays[f"text_{split}"] = encode_texts(tokenizer, [d.text for d in documents if d.split == split])
    np.savez_compressed(out / "data.npz", **arrays)
    shares = {"explain": 16, "section": 8, "module": 4, "code": 14, "speech": 12, "scene": 6, "novel": 4}
    prompts = choose_prompts(samples, shares, seed)
    write_jsonl(out / "prompts.jsonl", prompts)
    more = choose_prompts(samples, {k: 3 * v for k, v in shares.items()}, seed + 1)
    known = {p["prompt"] for p in prompts}
    write_jsonl(out / "heldout.jsonl", prompts + [p for p in more if p["prompt"] not in known])
    counts = {
        "vocab_size": len(tokenizer),
        "text_train_tokens": len(arrays["text_train"]),
        "text_heldout_tokens": len(arrays["text_heldout"]),
        "chat_tokens": len(chats["tokens"]),
        **{f"chat_samples_{s}": int((chats["split"] == i).sum()) for i, s in enumerate(SPLITS)},
        **{f"documents_{s}": sum(d.split == s for d in documents) for s in SPLITS},
        "characters_train": sum(len(t) for t in train_texts),
    }
    (out / "counts.json").write_text(json.dumps(counts, indent=1) + "\n")
    return counts
