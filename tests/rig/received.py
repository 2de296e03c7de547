"""What the clients of a rig received, message by message."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Output:
    """What a client would have received for one request.

    Attributes
    ----------
    ids : list of int
        Output tokens through the stop, as SGLang reports them.
    finish : dict or None
        Finish reason; None while the request runs.
    rounds, accepted : int
        Verify forwards the request took part in; drafts accepted in them.
    retractions, cached : int
        Times retracted; prompt tokens found in the prefix cache.
    logprobs, top_logprobs, token_ids_logprobs : list
        Of the output tokens, where asked for; the latter two as (value, token) pairs.
    input_logprobs : list
        Of the prompt's tokens, where asked for; None for a token without predecessor.
    hidden_states : list
        As the last message held them.
    reasoning : int
        Tokens through the end of the reasoning.
    usage : int
        ``completion_tokens`` of the last message.
    histogram : list of int
        Rounds by number of accepted drafts.
    chunks : list of int
        ``completion_tokens`` of every message.
    """

    ids: list[int]
    finish: dict | None
    rounds: int
    accepted: int
    retractions: int
    cached: int
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[float, int]]] = field(default_factory=list)
    token_ids_logprobs: list[list[tuple[float, int]]] = field(default_factory=list)
    input_logprobs: list[float | None] = field(default_factory=list)
    hidden_states: list = field(default_factory=list)
    reasoning: int = 0
    usage: int = 0
    histogram: list[int] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)


@dataclass
class Received:
    """Parts of an ``Output`` that travel in messages; they add up."""

    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[float, int]]] = field(default_factory=list)
    token_ids_logprobs: list[list[tuple[float, int]]] = field(default_factory=list)
    input_logprobs: list[float | None] = field(default_factory=list)
    hidden_states: list = field(default_factory=list)
    reasoning: int = 0
    usage: int = 0
    histogram: list[int] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)

    def add(self, message: Any, i: int) -> None:
        """Take over request ``i`` of a ``BatchTokenIDOutput``."""
        self.usage = message.completion_tokens[i]
        self.reasoning = message.reasoning_tokens[i]
        self.chunks.append(self.usage)
        if message.spec_correct_drafts_histogram:
            self.histogram = list(message.spec_correct_drafts_histogram[i])
        if message.output_hidden_states is not None and message.output_hidden_states[i] is not None:
            self.hidden_states = list(message.output_hidden_states[i])
        if message.output_token_logprobs_val is None:
            return
        self.logprobs.extend(message.output_token_logprobs_val[i])
        self.input_logprobs.extend(message.input_token_logprobs_val[i])
        self.top_logprobs.extend(pairs(message.output_top_logprobs_val[i], message.output_top_logprobs_idx[i]))
        self.token_ids_logprobs.extend(
            pairs(message.output_token_ids_logprobs_val[i], message.output_token_ids_logprobs_idx[i])
        )


def pairs(values: list, tokens: list) -> list[list[tuple[float, int]]]:
    """(value, token) of each position; positions without any are left out."""
    return [list(zip(val, idx)) for val, idx in zip(values, tokens) if val is not None]


@dataclass
class Recorder:
    """Takes the place of SGLang's sockets."""

    sent: list[Any] = field(default_factory=list)

    def send_output(self, output: Any, request: Any = None) -> None:
        """Keep what would have been sent."""
        self.sent.append(output)
