"""Sampling parameters that would take the scheduler down: refused, request by request.

SGLang checks ranges in its tokenizer process but takes types on trust: ``{"logit_bias": {"5": "abc"}}`` or a seed of
30 digits is found out when the scheduler fills a tensor with it, and the server dies of it. Here every number is looked
at before a request is queued; a bad one is answered like any other bad request.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler as _Base
else:
    _Base = object

INT64_MAX = 2**63 - 1
INT32_MAX = 2**31 - 1
MOST_DIGITS = 20

# Whole numbers of ``SamplingParams``: lowest and highest value that SGLang's tensors and loops can take.
WHOLE_NUMBERS: dict[str, tuple[int, int]] = {
    "max_new_tokens": (0, INT64_MAX),
    "min_new_tokens": (0, INT64_MAX),
    "top_k": (1, INT32_MAX),
    "sampling_seed": (-INT64_MAX - 1, INT64_MAX),
    "stream_interval": (1, INT64_MAX),
}
MAY_BE_ABSENT = ("max_new_tokens", "sampling_seed", "stream_interval")
NUMBERS = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
# What the scheduler looks up and sorts with, and what it is then.
LABELS: dict[str, tuple[type, str]] = {
    "extra_key": (str, "a string"),
    "routing_key": (str, "a string"),
    "session_id": (str, "a string"),
    "lora_id": (str, "a string"),
    "priority": (Integral, "a whole number"),
    "routed_experts_start_len": (Integral, "a whole number"),
}
# Logits may be divided by the smallest and have the largest added, and stay finite in float32.
SMALLEST_SCALE, LARGEST_NUMBER = 1e-30, 1e30


def sampling_problem(params: Any, vocab_size: int) -> str | None:
    """What is wrong with a request's sampling parameters, as one sentence; None when they can be served.

    Parameters
    ----------
    params : SamplingParams
        Normalised; ``None`` in an optional field means that it was not given.
    vocab_size : int
    """
    for name, (lowest, highest) in WHOLE_NUMBERS.items():
        value = getattr(params, name)
        if value is None and name in MAY_BE_ABSENT:
            continue
        if not ((_is_whole(value) or _is_whole_float(name, value)) and lowest <= value <= highest):
            return f"{name} must be a whole number from {lowest} to {highest}, got {_shorten(value)}."
    for name in NUMBERS:
        value = getattr(params, name)
        if not _is_number(value):
            return f"{name} must be a number up to {LARGEST_NUMBER:g}, got {_shorten(value)}."
    for name in ("temperature", "repetition_penalty"):
        if getattr(params, name) < SMALLEST_SCALE:
            return f"{name} must be at least {SMALLEST_SCALE}, got {_shorten(getattr(params, name))}."
    if params.min_new_tokens > 0:
        # These are forbidden for a while; elsewhere a stop that cannot occur does no harm.
        for token in params.stop_token_ids or ():
            if not _is_token(token, vocab_size):
                limits = f"between 0 and {vocab_size - 1}"
                return f"stop_token_ids must lie {limits} with min_new_tokens, got {_shorten(token)}."
    return _bias_problem(params.logit_bias, vocab_size) or _text_problem(params)


def use_plain_numbers(params: Any) -> None:
    """Turn numpy's numbers, which an Engine's caller may give, and 5.0 into Python's: the drafter takes no others.

    Parameters
    ----------
    params : SamplingParams
        Without a problem.
    """
    for name in WHOLE_NUMBERS:
        if (value := getattr(params, name)) is not None:
            setattr(params, name, int(value))
    for name in NUMBERS:
        setattr(params, name, float(getattr(params, name)))


def _bias_problem(bias: Any, vocab_size: int) -> str | None:
    if bias is None:
        return None
    if not isinstance(bias, Mapping):
        return f"logit_bias must map token ids to numbers, got {_shorten(bias)}."
    for token, value in bias.items():
        if not (_is_token(token, vocab_size) or _names_token(token, vocab_size)):
            return f"logit_bias must have token ids from 0 to {vocab_size - 1} as keys, got {_shorten(token)}."
        if not _is_number(value):
            return f"logit_bias of token {token} must be a number up to {LARGEST_NUMBER:g}, got {_shorten(value)}."
    return None


def _text_problem(params: Any) -> str | None:
    for name, values in (("stop", params.stop_strs), ("stop_regex", params.stop_regex_strs)):
        if not all(isinstance(value, str) for value in values or ()):
            return f"{name} must be a string or a list of strings, got {_shorten(values)}."
    for name in ("regex", "json_schema", "ebnf", "structural_tag"):
        value = getattr(params, name)
        if not (value is None or isinstance(value, str)):
            return f"{name} must be a string, got {_shorten(value)}."
    return None


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_whole_float(name: str, value: Any) -> bool:
    """A number such as 5.0; SGLang takes them, but for ``max_new_tokens``, which it counts with."""
    return name != "max_new_tokens" and isinstance(value, float) and value.is_integer()


def _is_token(value: Any, vocab_size: int) -> bool:
    return _is_whole(value) and 0 <= value < vocab_size


def _names_token(key: Any, vocab_size: int) -> bool:
    # Python refuses to read numbers of thousands of digits.
    return isinstance(key, str) and len(key) <= MOST_DIGITS and key.isdecimal() and int(key) < vocab_size


def _is_number(value: Any) -> bool:
    # Compared before anything turns it into a float: a whole number of 400 digits does not fit one. NaN fails both.
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    return bool(-LARGEST_NUMBER <= value <= LARGEST_NUMBER)  # type: ignore[operator]


def _is_table(rows: Any, width: int) -> bool:
    try:
        table = np.asarray(rows)
    except ValueError:  # rows of different lengths
        return False
    # Text that reads as a number is none to torch, and whole numbers may be too large for either.
    if table.ndim != 2 or table.shape[1] != width or table.dtype.kind not in "fiu":
        return False
    return bool(((table >= -LARGEST_NUMBER) & (table <= LARGEST_NUMBER)).all())


def _shorten(value: Any, limit: int = 60) -> str:
    try:
        text = repr(value)
    except ValueError:
        text = "a number of thousands of digits"
    return text if len(text) <= limit else text[:limit] + "…"


def request_problem(
    request: Any, vocab_size: int, hidden_size: int, *, custom_processors: bool, bfloat16: bool
) -> str | None:
    """What is wrong with a request besides its sampling parameters; see ``sampling_problem``.

    Parameters
    ----------
    request : TokenizedGenerateReqInput
    vocab_size, hidden_size : int
        The target's.
    custom_processors : bool
        Whether the server runs custom logit processors.
    bfloat16 : bool
        Whether the target runs in that type: SGLang turns input embeddings into it, whatever the model's type is.
    """
    if request.mm_inputs is None and request.input_embeds is None:
        ids = np.asarray(request.input_ids, dtype=np.int64)
        outside = ids[(ids < 0) | (ids >= vocab_size)]
        if len(outside):
            return f"input_ids must lie between 0 and {vocab_size - 1}, got {outside[0]}."
        if not len(ids) and request.session_params is None:
            return "The prompt must hold at least one token."
    if request.input_embeds is not None and not bfloat16:
        return "input_embeds need a target in bfloat16; start the server with --dtype bfloat16."
    if request.input_embeds is not None and not _is_table(request.input_embeds, hidden_size):
        return f"input_embeds must hold rows of {hidden_size} numbers up to {LARGEST_NUMBER:g}, one row at least."
    top = request.top_logprobs_num
    if top is not None and not (_is_whole(top) and 0 <= top <= vocab_size):
        return f"top_logprobs_num must be a whole number from 0 to {vocab_size}, got {_shorten(top)}."
    wanted = request.token_ids_logprob
    if wanted is not None and not isinstance(wanted, (list, tuple)):
        return f"token_ids_logprob must be a list of token ids, got {_shorten(wanted)}."
    for token in wanted or ():
        if not _is_token(token, vocab_size):
            return f"token_ids_logprob must hold token ids from 0 to {vocab_size - 1}, got {_shorten(token)}."
    start = request.logprob_start_len
    if start is not None and not (_is_whole(start) and start >= -1):
        return f"logprob_start_len must be a whole number, -1 or more, got {_shorten(start)}."
    if (problem := _label_problem(request) or _session_problem(request.session_params)) is not None:
        return problem
    if request.positional_embed_overrides is not None and not _are_overrides(
        request.positional_embed_overrides, hidden_size
    ):
        return f"positional_embed_overrides must hold vectors of {hidden_size} numbers; JSON cannot: use /v1/score."
    if custom_processors and request.custom_logit_processor:
        return _processor_problem(request.custom_logit_processor)
    return None


def _label_problem(request: Any) -> str | None:
    """What is wrong with the labels of a request, which SGLang takes for hashable and comparable.

    A list, which is how a batch names them, reaches the scheduler with a single request.
    """
    for name, (kind, wanted) in LABELS.items():
        value = getattr(request, name)
        if value is not None and not isinstance(value, kind):
            return f"{name} of a single request must be {wanted}, got {_shorten(value)}."
    if (wanted_states := request.return_hidden_states) not in (None, False, True, "last"):
        return f'return_hidden_states of a single request must be true, false or "last", got {_shorten(wanted_states)}.'
    return None


def _session_problem(params: Any) -> str | None:
    """What is wrong with ``SessionParams``, which SGLang looks up and slices with as they come."""
    if params is None:
        return None
    for name in ("id", "rid"):
        value = getattr(params, name)
        if not isinstance(value, Hashable):
            return f"session_params must have a string as {name}, got {_shorten(value)}."
    if params.offset and not isinstance(params.offset, Integral):
        return f"session_params must have a whole number as offset, got {_shorten(params.offset)}."
    return None


def _are_overrides(overrides: Any, hidden_size: int) -> bool:
    from sglang.srt.managers.embed_types import PositionalEmbeds

    if not isinstance(overrides, PositionalEmbeds):
        return False
    shape = tuple(overrides.embeds.shape)
    return shape == (len(overrides.positions), hidden_size) and all(map(_is_whole, overrides.positions))


def _processor_problem(text: str) -> str | None:
    from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

    try:
        CustomLogitProcessor.from_str(text)
    except Exception as error:
        return f"custom_logit_processor cannot be read ({type(error).__name__}: {_shorten(str(error))})."
    return None


class RefusalsMixin(_Base):
    """Answers requests that cannot be served before anything of them reaches a batch."""

    _psd_refused: dict[str, str]

    def handle_generate_request(self, recv_req) -> None:
        """Queue a request; a bad one with harmless parameters, to be ended by ``_psd_refuse``."""
        if self.psd is not None:
            problem = self._psd_problem(recv_req)
            if problem is not None:
                self._psd_make_harmless(recv_req)
                self._psd_refused[recv_req.rid] = problem
            use_plain_numbers(recv_req.sampling_params)
            self._psd_empty_session(recv_req.session_params)
        super().handle_generate_request(recv_req)

    def _psd_problem(self, recv_req) -> str | None:
        config = self.model_config
        return sampling_problem(recv_req.sampling_params, config.vocab_size) or request_problem(
            recv_req,
            config.vocab_size,
            config.hidden_size,
            custom_processors=self.server_args.enable_custom_logit_processor,
            bfloat16="bfloat16" in str(config.dtype),
        )

    def _psd_empty_session(self, params: Any) -> None:
        """Do what ``replace`` without ``rid`` asks for; SGLang removes requests while it walks over them."""
        session = None if params is None else self.session_controller.get(params.id)
        if session is not None and params.replace and params.rid is None and not session.streaming:
            for node in session.req_nodes.values():
                node.abort()
            session.req_nodes.clear()

    def _psd_make_harmless(self, recv_req) -> None:
        from array import array

        from sglang.srt.sampling.sampling_params import SamplingParams

        recv_req.sampling_params = SamplingParams(max_new_tokens=1)
        recv_req.sampling_params.normalize(self.tokenizer)
        recv_req.input_ids, recv_req.input_embeds = array("q", [0]), None
        recv_req.return_logprob, recv_req.top_logprobs_num, recv_req.logprob_start_len = False, 0, -1
        recv_req.custom_logit_processor = recv_req.positional_embed_overrides = None
        for label in LABELS:
            setattr(recv_req, label, None)
        recv_req.return_hidden_states = recv_req.return_routed_experts = False
        recv_req.session_params = None  # a refused request leaves its session as it was

    def _psd_refuse(self, req: Req) -> None:
        """End a request that was found bad; called when it is queued."""
        problem = self._psd_refused.pop(req.rid, None)
        if problem is not None:
            req.set_finish_with_abort(problem)
