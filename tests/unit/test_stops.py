"""One look at a whole batch, against a look at each request."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_psd.scheduler.commits import Prospect, certain_rows, commit_row
from sglang_psd.scheduler.stops import ChunkEnds, may_end_with, settled_len, wants_text

TOKEN = st.integers(0, 12)


@st.composite
def requests(draw: st.DrawFn, index: int) -> Any:
    """A request as SGLang's ``Req``: the parts that decide where it ends."""
    params = SimpleNamespace(
        max_new_tokens=draw(st.integers(1, 12)),
        stop_strs=draw(st.sampled_from([[], [], [], ["x"]])),
        stop_regex_strs=[],
        ignore_eos=draw(st.booleans()),
        stop_token_ids=draw(st.none() | st.lists(TOKEN, max_size=1)),
    )
    req = SimpleNamespace(
        rid=str(index),
        sampling_params=params,
        origin_input_ids=array("q", [1] * draw(st.integers(1, 3))),
        output_ids=array("q", [2] * draw(st.integers(0, 6))),
        eos_token_ids={0},
        tokenizer=None,
        to_finish=draw(st.sampled_from([None, None, None, "abort"])),
        finished_reason=draw(st.sampled_from([None, None, None, "length"])),
        grammar=draw(st.sampled_from([None, None, None, SimpleNamespace(is_terminated=lambda: True)])),
        custom_logit_processor=None,
    )
    req.finished = lambda: req.finished_reason is not None
    return req


@given(st.data())
@settings(max_examples=500, deadline=None)
def test_what_goes_on_is_the_same(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 4))
    reqs = [data.draw(requests(i)) for i in range(count)]
    chunks = data.draw(st.lists(st.lists(TOKEN, max_size=4), min_size=count, max_size=count))
    open_rids = data.draw(st.sets(st.sampled_from([req.rid for req in reqs])))
    # Rejected drafts stand between the chunks: they may be anything.
    rejected = data.draw(st.lists(TOKEN, max_size=2))
    possible = ChunkEnds.of(reqs).possible([*rejected, *[token for chunk in chunks for token in chunk]])
    if not possible:
        for req, chunk in zip(reqs, chunks):
            assert settled_len(req, chunk) == len(chunk) and not wants_text(req) and req.grammar is None
    rows = certain_rows(Prospect.of(reqs, open_rids.__contains__), chunks, may_stop=possible)
    expected = [
        commit_row(req, chunk, counted=False)
        for req, chunk in zip(reqs, chunks)
        if chunk and not req.finished() and not may_end_with(req, chunk) and req.rid in open_rids
    ]
    assert rows == expected
