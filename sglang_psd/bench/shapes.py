"""Model shapes: folders that hold a ``config.json`` and nothing else, for made-up weights.

``bench_serving`` counts text, so a server needs a tokenizer even where the weights mean nothing. A shape gets one that
turns every id of the model into a word of its own; prompts are sent as ids.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from sglang_psd.errors import PSDConfigError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def is_shape(path: str) -> bool:
    """Whether ``path`` is a folder with a config, without tokenizer and weights (EAGLE heads have only the latter)."""
    folder = Path(path)
    if not (folder / "config.json").is_file() or any((folder / name).exists() for name in TOKENIZER_FILES):
        return False
    return not any(folder.glob("*.safetensors"))


def with_tokenizer(path: str, work: Path) -> str:
    """``path`` itself, or a copy of a shape under ``work`` with a stand-in tokenizer beside its config.

    Raises
    ------
    PSDConfigError
        The config says nothing about the vocabulary.
    """
    if not is_shape(path):
        return path
    source = Path(path)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    vocab_size = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    if not isinstance(vocab_size, int):
        raise PSDConfigError(f"{path} has a config.json without a vocab_size; name a folder with a tokenizer.")
    folder = work / "shapes" / source.resolve().name
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source / "config.json", folder / "config.json")
    _write_tokenizer(folder, vocab_size)
    return str(folder)


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocab_size)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0").save_pretrained(folder)
