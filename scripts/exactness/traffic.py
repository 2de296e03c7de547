"""Random requests as clients of an ``Engine`` send them, from the generator of the CPU fuzzer."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

from sglang_psd.resources import TINY_TARGET, load_prompts
from tests.rig.fuzz import random_call

# Groups of requests that ask the same again and again: their answers are samples of one law.
LAW_LENGTH = 4
LAWS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 8},
    {"temperature": 1.0, "min_p": 0.05},
)


@dataclass(frozen=True)
class Request:
    """One request; ``Request(**json)`` reads it back.

    Attributes
    ----------
    number : int
    kind : str
        ``greedy``, ``seeded``, ``sampled``, or ``law`` and the number of its group.
    input_ids : list of int
    sampling : dict
        SGLang's sampling parameters.
    fields : dict
        Further fields of ``GenerateReqInput``.
    abort_ms : int or None
        Milliseconds after which it is aborted, by engines with PSD.
    """

    number: int
    kind: str
    input_ids: list[int]
    sampling: dict[str, Any]
    fields: dict[str, Any] = field(default_factory=dict)
    abort_ms: int | None = None

    @property
    def length(self) -> int:
        """Most new tokens."""
        return self.sampling["max_new_tokens"]


def chat_prompts(count: int) -> list[list[int]]:
    """Chats as the models know them, as token ids."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TINY_TARGET)
    chats = [[{"role": "user", "content": prompt}] for prompt in load_prompts(count)]
    return [
        tokenizer.encode(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
        for chat in chats
    ]


def random_requests(seed: int, count: int, law_every: int) -> list[Request]:
    """``count`` requests that depend on the arguments only, one in ``law_every`` of them for a law; 0: none."""
    rng, chats = Random(seed), chat_prompts(64)
    requests = []
    for number in range(count):
        if law_every and number % law_every == 0:
            requests.append(_law_request(number, number // law_every % len(LAWS), chats))
        else:
            requests.append(_random_request(rng, number, chats))
    return requests


def _law_request(number: int, group: int, chats: list[list[int]]) -> Request:
    sampling = {**LAWS[group], "max_new_tokens": LAW_LENGTH, "ignore_eos": True}
    return Request(number, f"law{group}", chats[group], sampling)


def _random_request(rng: Random, number: int, chats: list[list[int]]) -> Request:
    call = random_call(rng)
    wish = dict(call.wish)
    fields = dict(wish.pop("fields", {}))
    if wish.pop("logprobs", False):
        fields.update(return_logprob=True, top_logprobs_num=wish.pop("top_logprobs", 0))
    # Noise as in the rig, and chats as in life.
    ids = call.ids if rng.random() < 0.5 else [*rng.choice(chats), *call.tail]
    sampling = {"temperature": 0.0, "ignore_eos": True, **wish, "max_new_tokens": call.length}
    if call.kind != "seeded" and call.abort is None and rng.randint(1, 20) == 1:
        sampling["n"] = rng.randint(2, 4)
        fields.pop("stream", None)
    if rng.randint(1, 20) == 1:
        fields["logprob_start_len"] = -1
    abort_ms = None if call.abort is None else 5 * call.abort
    return Request(number, call.kind, ids, sampling, fields, abort_ms)
