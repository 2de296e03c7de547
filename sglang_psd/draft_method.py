"""What kind of drafter a checkpoint is: a model of its own, or an EAGLE head that reads the target's hidden states.

The rules are pure Python over two configs; reading them uses SGLang's own loader, imported late.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_psd.config import DRAFT_METHODS
from sglang_psd.errors import DraftMismatchError, PSDConfigError

if TYPE_CHECKING:
    from sglang_psd.server_args import PSDServerArgs

DRAFT_MODEL, EAGLE, EAGLE3 = DRAFT_METHODS
# Layers that SGLang's target models hand to an EAGLE-3 head whose config names none.
DEFAULT_NUM_LAYERS = 3


@dataclass(frozen=True)
class Head:
    """An EAGLE head.

    Attributes
    ----------
    method : {"eagle", "eagle3"}
    layers : tuple of int or None
        EAGLE-3: layers of the target whose output the head reads, counted from 0; None: SGLang's choice.
    feature_size : int
        Numbers per token that the target hands over: its hidden size, times the number of layers for EAGLE-3.
    """

    method: str
    layers: tuple[int, ...] | None
    feature_size: int

    @property
    def reads_layers(self) -> bool:
        """Whether inner layers of the target are read, not the last one."""
        return self.method == EAGLE3 and self.layers != ()


def infer_method(architectures: list[str]) -> str:
    """Tell the method from the class that a checkpoint's config names, as SGLang names its classes."""
    name = architectures[0] if architectures else ""
    if "eagle3" in name.lower():
        return EAGLE3
    return EAGLE if "eagle" in name.lower() else DRAFT_MODEL


def resolve_head(wanted: str | None, draft: Mapping[str, Any], target: Mapping[str, Any], path: str) -> Head | None:
    """Check that a checkpoint fits the wanted method and the target.

    Parameters
    ----------
    wanted : str or None
        ``--psd-draft-method``; None infers it.
    draft, target : mapping
        The two configs, as in ``config.json``.
    path : str
        Draft checkpoint, for messages.

    Returns
    -------
    Head or None
        None for a draft model.

    Raises
    ------
    PSDConfigError
        The checkpoint is of another kind than ``--psd-draft-method`` says.
    DraftMismatchError
        The head was made for another target.
    """
    architectures = list(draft.get("architectures") or [])
    found = infer_method(architectures)
    if wanted not in (None, found):
        raise PSDConfigError(
            f"--psd-draft-method {wanted} does not fit --speculative-draft-model-path {path!r}: its config names "
            f"{architectures[0] if architectures else 'no architecture'}, which is used as {found}; leave the flag out."
        )
    if found == DRAFT_MODEL:
        return None
    hidden = int(target["hidden_size"])
    expected = int(draft.get("target_hidden_size") or draft["hidden_size"])
    if hidden != expected:
        raise DraftMismatchError(
            f"The EAGLE head {path!r} reads hidden states of {expected} numbers, the target's have {hidden}; name a "
            "head made for this target."
        )
    if int(draft["vocab_size"]) != int(target["vocab_size"]):
        raise DraftMismatchError(
            f"The EAGLE head {path!r} was made for {draft['vocab_size']} tokens, the target has "
            f"{target['vocab_size']}; name a head made for this target."
        )
    if found == EAGLE:
        return Head(EAGLE, None, hidden)
    options = draft.get("eagle_config") or {}
    if not options.get("use_aux_hidden_state", True):
        return Head(EAGLE3, (), hidden)
    layers = options.get("eagle_aux_hidden_state_layer_ids")
    _check_layers(layers, int(target["num_hidden_layers"]), path)
    count = draft.get("num_aux_hidden_states") or (len(layers) if layers else DEFAULT_NUM_LAYERS)
    return Head(EAGLE3, tuple(layers) if layers else None, hidden * int(count))


def _check_layers(layers: list[int] | None, depth: int, path: str) -> None:
    """Refuse a head that reads layers which the target does not hand out: the last one, or those beyond."""
    read = [1, depth // 2 - 1, depth - 4] if layers is None else layers
    if len(set(read)) < len(read) or min(read) < -1 or max(read) > depth - 2:
        raise DraftMismatchError(
            f"The EAGLE-3 head {path!r} reads layers {', '.join(map(str, read))} of its target, and of a target of "
            f"{depth} layers only 0 to {depth - 2} can be read; name a head made for this target."
        )


@functools.lru_cache(maxsize=8)
def read_config(path: str, trust_remote_code: bool, revision: str | None) -> dict[str, Any]:
    """Read a checkpoint's config, the text part of a multimodal one."""
    from sglang.srt.utils.hf_transformers_utils import get_config

    config = get_config(path, trust_remote_code=trust_remote_code, revision=revision)
    read: dict[str, Any] = getattr(config, "text_config", config).to_dict()
    return {**read, "architectures": list(config.architectures or [])}


@contextlib.contextmanager
def readable_draft(path: str) -> Iterator[None]:
    """Turn what SGLang's loaders say of a draft checkpoint they cannot read into a sentence about the flag.

    Raises
    ------
    PSDConfigError
        The checkpoint has no files here or on the hub, or they are damaged.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise PSDConfigError(
            f"--speculative-draft-model-path {path!r} is no checkpoint that can be read ({reason[0].rstrip('.')}); "
            "name a folder with a draft model, or a model of the hub that can be reached."
        ) from None


def head_of(args: PSDServerArgs) -> Head | None:
    """The EAGLE head of a PSD server; None where it drafts with a model. Errors as in ``resolve_head``."""
    path = str(args.speculative_draft_model_path)
    with readable_draft(path):
        draft = read_config(path, args.trust_remote_code, args.speculative_draft_model_revision)
    target = read_config(str(args.model_path), args.trust_remote_code, args.revision)
    head = resolve_head(args.psd_draft_method, draft, target, path)
    if head is not None:
        _check_class(draft["architectures"][0], path)
    if args.speculative_token_map is not None:
        _check_token_map(args.speculative_token_map, head, path)
    return head


def _check_token_map(token_map: str, head: Head | None, path: str) -> None:
    """Refuse a map that would be ignored, or that the drafter would stumble over while it loads."""
    if head is None:
        raise PSDConfigError(
            f"--speculative-token-map says what an EAGLE head may propose, and {path!r} is a draft model; "
            "leave the flag out."
        )
    if token_map.startswith((".", "/", "~")) and not os.path.isfile(token_map):
        raise PSDConfigError(
            f"--speculative-token-map {token_map!r} is no file; name one that torch.save wrote from a list of ids."
        )


def _check_class(architecture: str, path: str) -> None:
    """Refuse a head that the installed SGLang has no class for."""
    from sglang.srt.models.registry import ModelRegistry

    if architecture not in ModelRegistry.get_supported_archs():
        known = sorted(name for name in ModelRegistry.get_supported_archs() if "eagle" in name.lower())
        raise PSDConfigError(
            f"The installed SGLang has no class {architecture}, which the EAGLE head {path!r} is made for; "
            f"it knows {', '.join(known)}."
        )
