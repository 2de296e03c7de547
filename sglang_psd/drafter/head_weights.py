"""The two matrices of the target that an EAGLE head works with: only they are read from its checkpoint."""

from __future__ import annotations

import glob
import json
import os

import torch
from safetensors import safe_open

from sglang_psd.errors import DrafterStartError

# Names in a checkpoint end like this, whatever prefix a multimodal model puts before them.
EMBEDDING = "embed_tokens.weight"
OUTPUT = "lm_head.weight"
INDEX = "model.safetensors.index.json"


def read_target_matrices(
    path: str, revision: str | None, *, want_output: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Read the embedding and, where wanted, the output matrix of a target.

    Parameters
    ----------
    path, revision
        Checkpoint folder, or its name and revision on the hub.
    want_output : bool

    Returns
    -------
    embedding, output : Tensor, ``[vocab, hidden]``
        As stored, on the host. A target with tied embeddings stores no output matrix: it is the embedding then.

    Raises
    ------
    DrafterStartError
        The checkpoint does not hold them as plain numbers.
    """
    folder = path if os.path.isdir(path) else _fetch(path, revision)
    files = _files_by_tensor(folder, path)
    embedding = _read(files, EMBEDDING)
    if embedding is None:
        raise DrafterStartError(f"The target checkpoint {path!r} holds no {EMBEDDING}, which an EAGLE head needs.")
    output = _read(files, OUTPUT) if want_output else None
    return embedding, (embedding if output is None else output) if want_output else None


def _fetch(name: str, revision: str | None) -> str:
    from sglang.srt.model_loader.weight_utils import download_weights_from_hf

    # The target's process wants all of it: SGLang's lock lets one of the two fetch, the other finds it.
    return download_weights_from_hf(name, None, ["*.safetensors", INDEX], revision)


def _files_by_tensor(folder: str, path: str) -> dict[str, str]:
    """File of each tensor."""
    index = os.path.join(folder, INDEX)
    if os.path.isfile(index):
        with open(index, encoding="utf-8") as file:
            return {name: os.path.join(folder, part) for name, part in json.load(file)["weight_map"].items()}
    found = {}
    for part in sorted(glob.glob(os.path.join(folder, "*.safetensors"))):
        with safe_open(part, "pt") as tensors:
            found.update(dict.fromkeys(tensors.keys(), part))
    if not found:
        raise DrafterStartError(
            f"The target checkpoint {path!r} holds no safetensors files; an EAGLE head takes its embedding from there."
        )
    return found


def _read(files: dict[str, str], ending: str) -> torch.Tensor | None:
    # The shortest name is the language model's own; a tower of a multimodal model has longer ones.
    names = sorted((n for n in files if n == ending or n.endswith("." + ending)), key=len)
    if not names:
        return None
    with safe_open(files[names[0]], "pt") as tensors:
        matrix = tensors.get_tensor(names[0])
    if not matrix.is_floating_point() or matrix.element_size() < 2:
        raise DrafterStartError(
            f"The target stores {names[0]} as {str(matrix.dtype).removeprefix('torch.')}; an EAGLE head needs it "
            "unquantized."
        )
    return matrix
