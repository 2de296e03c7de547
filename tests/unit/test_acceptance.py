"""The acceptance rule: batch code against the readable reference, and both against the exact law."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_psd.noise import gumbel_argmax
from sglang_psd.target.acceptance import (
    Filters,
    VerifyRows,
    accept_chain,
    accept_chain_reference,
    draw_from,
    filtered_probs,
    target_choice,
)

EXAMPLES = settings(max_examples=80, deadline=None)


def one_row(
    drafts: list[int],
    uniforms: list[float],
    law: torch.Tensor | None = None,
    *,
    deterministic: bool = False,
    real: int | None = None,
) -> VerifyRows:
    """A batch of one. ``law`` is ``[K, V]``, dense: every token is listed."""
    ids = probs = None
    if law is not None:
        ids = torch.arange(law.shape[-1]).expand(1, len(drafts), -1).clone()
        probs = law.float().unsqueeze(0)
    return VerifyRows(
        drafts=torch.tensor([drafts], dtype=torch.int64),
        num_drafts=torch.tensor([len(drafts) if real is None else real]),
        law_ids=ids,
        law_probs=probs,
        uniforms=torch.tensor([uniforms], dtype=torch.float32),
        deterministic=torch.tensor([deterministic]),
    )


def emitted(rows: VerifyRows, choice: torch.Tensor, probs: torch.Tensor | None) -> list[int]:
    """Output tokens of a batch of one."""
    tokens, lengths = accept_chain(rows, choice, probs)
    return tokens[0, : int(lengths[0])].tolist()


def filters(batch: int, **changes) -> Filters:
    """Temperature 1, nothing cut."""
    values = {
        "temperatures": torch.ones(batch),
        "top_ks": torch.full((batch,), 1 << 30),
        "top_ps": torch.ones(batch),
        "min_ps": torch.zeros(batch),
        "greedy": torch.zeros(batch, dtype=torch.bool),
        "seeded": torch.zeros(batch, dtype=torch.bool),
        "seeds": torch.zeros(batch, dtype=torch.int64),
        "any_sampled": True,
        "any_seeded": False,
        "any_filter": True,
    }
    return Filters(**{**values, **changes})


# --- the batch code is the reference -------------------------------------------------------------


@st.composite
def chains(draw):
    """Random laws with zeros in them, drafts that are possible under ``q``, uniforms on a coarse grid."""
    steps, vocab = draw(st.integers(0, 5)), draw(st.integers(2, 9))
    batch = draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    sharp = draw(st.sampled_from([1.0, 4.0]))

    def laws(count: int) -> torch.Tensor:
        logits = torch.randn(batch, count, vocab, generator=generator) * sharp
        logits[torch.rand(logits.shape, generator=generator) < 0.25] = -torch.inf
        logits[..., 0] = logits[..., 0].nan_to_num(neginf=0.0)
        return torch.softmax(logits.double(), -1)

    p, q = laws(steps + 1), laws(steps)
    if draw(st.booleans()):
        q = p[:, :steps].clone()
    drafts = (
        torch.multinomial(q.reshape(-1, vocab).float(), 1, generator=generator).view(batch, steps) if steps else None
    )
    drafts = torch.empty(batch, 0, dtype=torch.int64) if drafts is None else drafts
    # A grid keeps float32 and float64 from disagreeing about a draw that sits exactly on an edge.
    uniforms = (torch.randint(0, 64, (batch, steps + 1), generator=generator).float() + 0.37) / 64
    counts = torch.randint(0, steps + 1, (batch,), generator=generator)
    deterministic = torch.rand(batch, generator=generator) < 0.4
    choice = p.argmax(-1)
    return p, q, drafts, uniforms, counts, deterministic, choice


@given(chains())
@EXAMPLES
def test_batch_equals_reference(chain) -> None:
    p, q, drafts, uniforms, counts, deterministic, choice = chain
    batch, steps = drafts.shape
    vocab = p.shape[-1]
    rows = VerifyRows(
        drafts=drafts,
        num_drafts=counts,
        law_ids=torch.arange(vocab).expand(batch, steps, vocab).clone(),
        law_probs=q.float(),
        uniforms=uniforms,
        deterministic=deterministic,
    )
    tokens, lengths = accept_chain(rows, choice, p.float())
    for b in range(batch):
        n = int(counts[b])
        # The draw at the end always uses the last uniform, however many drafts the row has.
        numbers = [*uniforms[b, :n].tolist(), float(uniforms[b, -1])]
        chosen = choice[b].tolist() if deterministic[b] else None
        expected = accept_chain_reference(drafts[b, :n].tolist(), p[b, : n + 1], q[b, :n], numbers, chosen)
        assert tokens[b, : int(lengths[b])].tolist() == expected


def test_all_greedy_needs_no_probabilities() -> None:
    rows = one_row([4, 5, 6], [0.0] * 4, deterministic=True)
    assert emitted(rows, torch.tensor([[4, 5, 9, 1]]), None) == [4, 5, 9]
    assert emitted(rows, torch.tensor([[4, 5, 6, 1]]), None) == [4, 5, 6, 1]


# --- single decisions ----------------------------------------------------------------------------


@pytest.mark.parametrize(("logits", "first"), [([1.0, 1.0, 0.0], 0), ([0.0, 0.0, 1.0, 0.0, 0.0, 1.0], 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ties_take_the_first_index(logits: list[float], first: int, dtype: torch.dtype) -> None:
    table = torch.tensor(logits, dtype=dtype).view(1, 1, -1)
    plain = filters(1, greedy=torch.tensor([True]), any_sampled=False, any_filter=False)
    assert target_choice(table, None, plain, torch.zeros(1, 1, dtype=torch.int64)).item() == first


def test_a_single_wrong_draft_is_rejected() -> None:
    """K = 1: the first draft is verified like any other."""
    assert emitted(one_row([3], [0.0, 0.0], deterministic=True), torch.tensor([[5, 1]]), None) == [5]
    p = torch.tensor([[[0.0, 0.0, 0.0, 0.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]]])
    q = torch.tensor([[0.0, 0.0, 0.0, 1.0, 0.0, 0.0]])
    for uniform in (0.0, 0.5, 0.999):
        assert emitted(one_row([3], [uniform, 0.5], q), torch.zeros(1, 2, dtype=torch.int64), p) == [5]


def test_equal_laws_accept_everything() -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.softmax(torch.randn(1, 5, 7, generator=generator) * 3, -1)
    for _ in range(200):
        drafts = torch.multinomial(p[0, :4], 1, generator=generator).view(-1).tolist()
        numbers = torch.rand(5, generator=generator).tolist()
        tokens = emitted(one_row(drafts, numbers, p[0, :4]), torch.zeros(1, 5, dtype=torch.int64), p)
        assert tokens[:4] == drafts and len(tokens) == 5


def test_padding_drafts_never_count() -> None:
    """Columns past ``num_drafts`` are not verified even where they would match."""
    rows = one_row([4, 5, 6], [0.0] * 4, deterministic=True, real=1)
    assert emitted(rows, torch.tensor([[4, 5, 6, 7]]), None) == [4, 5]
    rows = one_row([4, 5, 6], [0.0] * 4, deterministic=True, real=0)
    assert emitted(rows, torch.tensor([[4, 5, 6, 7]]), None) == [4]


def test_a_sampled_row_without_drafts_draws_from_the_target() -> None:
    """Its neighbours have laws, it has none: the residual must not be taken."""
    p = torch.tensor([[[0.25, 0.75], [0.5, 0.5]], [[0.25, 0.75], [0.5, 0.5]]])
    rows = VerifyRows(
        drafts=torch.tensor([[0], [0]]),
        num_drafts=torch.tensor([0, 1]),
        law_ids=torch.tensor([[[0]], [[0]]]),
        law_probs=torch.tensor([[[0.0]], [[1.0]]]),
        uniforms=torch.tensor([[0.9, 0.1], [0.9, 0.1]]),
        deterministic=torch.tensor([False, False]),
    )
    tokens, lengths = accept_chain(rows, torch.zeros(2, 2, dtype=torch.int64), p)
    assert lengths.tolist() == [1, 1]
    assert tokens[:, 0].tolist() == [0, 1]


def test_a_draft_without_a_law_was_certain() -> None:
    """One-hot proposals in a sampled row: accepted with probability p(d), else drawn from the rest."""
    p = torch.tensor([[[0.25, 0.75], [1.0, 0.0]]])
    no_choice = torch.zeros(1, 2, dtype=torch.int64)
    assert emitted(one_row([0], [0.2, 0.5]), no_choice, p) == [0, 0]
    assert emitted(one_row([0], [0.3, 0.01]), no_choice, p) == [1]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40), st.floats(0, 1, exclude_max=True))
@EXAMPLES
def test_weight_zero_is_never_drawn(weights: list[float], uniform: float) -> None:
    table = torch.tensor([[0.0, *weights, 0.5, 0.0, 0.0]])
    for number in (0.0, uniform, 1.0 - 2.0**-24):
        token = int(draw_from(table, torch.tensor([number])))
        assert table[0, token] > 0


def test_a_rejected_token_is_not_drawn_again() -> None:
    """A draft that is rejected has q > p, so the residual gives it nothing."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(500):
        p, q = torch.softmax(torch.randn(2, 6, generator=generator) * 2, -1)
        draft = int(torch.multinomial(q, 1, generator=generator))
        rows = one_row([draft], [0.9999, float(torch.rand(1, generator=generator))], q.view(1, -1))
        out = emitted(rows, torch.zeros(1, 2, dtype=torch.int64), p.expand(1, 2, -1))
        assert len(out) == 2 or out[0] != draft


# --- the exact law -------------------------------------------------------------------------------


def exact_output_law(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Law of the first emitted token, by enumerating drafts and integrating over the uniforms analytically."""
    vocab = len(p)
    law = torch.zeros(vocab, dtype=torch.float64)
    for draft in range(vocab):
        if q[draft] == 0:
            continue
        accept = min(1.0, float(p[draft] / q[draft]))
        law[draft] += q[draft] * accept
        residual = (p - q).clamp(min=0)
        law += q[draft] * (1 - accept) * (residual / residual.sum() if residual.sum() > 0 else p)
    return law


@pytest.mark.parametrize("seed", range(4))
def test_first_token_follows_the_target(seed: int) -> None:
    """Sum over drafts and a fine grid of uniforms: the emitted token has law p, whatever q is."""
    generator = torch.Generator().manual_seed(seed)
    p = torch.softmax(torch.randn(4, generator=generator, dtype=torch.float64) * 1.5, -1)
    q = torch.softmax(torch.randn(4, generator=generator, dtype=torch.float64) * 1.5, -1)
    assert torch.allclose(exact_output_law(p, q), p)
    grid = (torch.arange(400, dtype=torch.float64) + 0.5) / 400
    law = torch.zeros(4, dtype=torch.float64)
    for draft in range(4):
        first, last = (x.reshape(-1) for x in torch.meshgrid(grid, grid, indexing="ij"))
        count = len(first)
        rows = VerifyRows(
            drafts=torch.full((count, 1), draft),
            num_drafts=torch.ones(count, dtype=torch.int64),
            law_ids=torch.arange(4).expand(count, 1, 4),
            law_probs=q.float().expand(count, 1, 4),
            uniforms=torch.stack([first, last], 1).float(),
            deterministic=torch.zeros(count, dtype=torch.bool),
        )
        tokens, _ = accept_chain(rows, torch.zeros(count, 2, dtype=torch.int64), p.float().expand(count, 2, 4))
        law += q[draft] * torch.bincount(tokens[:, 0], minlength=4) / count
    assert torch.allclose(law, p, atol=5e-3)


def test_chains_follow_the_target() -> None:
    """Two drafts with laws that depend on the prefix: all 27 sequences of three tokens come out right."""
    generator = torch.Generator().manual_seed(3)
    vocab, count = 3, 400_000
    p1, q1 = torch.softmax(torch.randn(2, vocab, generator=generator), -1)
    p2, q2 = torch.softmax(torch.randn(2, vocab, vocab, generator=generator), -1)
    p3 = torch.softmax(torch.randn(vocab, vocab, vocab, generator=generator), -1)
    first = torch.multinomial(q1.expand(count, -1), 1, generator=generator).squeeze(1)
    second = torch.multinomial(q2[first], 1, generator=generator).squeeze(1)
    rows = VerifyRows(
        drafts=torch.stack([first, second], 1),
        num_drafts=torch.full((count,), 2),
        law_ids=torch.arange(vocab).expand(count, 2, vocab),
        law_probs=torch.stack([q1.expand(count, -1), q2[first]], 1),
        uniforms=torch.rand(count, 3, generator=generator),
        deterministic=torch.zeros(count, dtype=torch.bool),
    )
    probs = torch.stack([p1.expand(count, -1), p2[first], p3[first, second]], 1)
    tokens, lengths = accept_chain(rows, torch.zeros(count, 3, dtype=torch.int64), probs)
    # Continue every sequence that stopped early by plain draws, so that all have three tokens.
    for column in range(1, 3):
        law = p2[tokens[:, 0]] if column == 1 else p3[tokens[:, 0], tokens[:, 1]]
        plain = torch.multinomial(law, 1, generator=generator).squeeze(1)
        tokens[:, column] = torch.where(lengths > column, tokens[:, column], plain)
    for a, b, c in itertools.product(range(vocab), repeat=3):
        expected = float(p1[a] * p2[a, b] * p3[a, b, c])
        found = float(((tokens == torch.tensor([a, b, c])).all(1)).float().mean())
        assert abs(found - expected) < 5 * (expected / count) ** 0.5 + 1e-4


# --- filters -------------------------------------------------------------------------------------


def naive_filter(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> list[float]:
    """Cuts as sentences: the k most likely; the smallest set with mass top_p; at least min_p of the best."""
    probs = torch.softmax(torch.tensor(logits, dtype=torch.float64) / temperature, -1).tolist()
    order = sorted(range(len(probs)), key=lambda i: -probs[i])
    kept, mass = [], 0.0
    for rank, i in enumerate(order):
        if rank < top_k and mass <= top_p and probs[i] >= probs[order[0]] * min_p:
            kept.append(i)
        mass += probs[i]
    total = sum(probs[i] for i in kept)
    return [probs[i] / total if i in kept else 0.0 for i in range(len(probs))]


@given(
    st.lists(st.integers(-40, 40), min_size=3, max_size=12, unique=True),
    st.sampled_from([0.5, 1.0, 2.0]),
    st.sampled_from([1, 2, 5, 1 << 30]),
    st.sampled_from([0.3, 0.77, 1.0]),
    st.sampled_from([0.0, 0.11, 0.6]),
)
@EXAMPLES
def test_filters(logits, temperature, top_k, top_p, min_p) -> None:
    # Far enough apart that both sort alike.
    logits = [0.1037 * value for value in logits]
    expected = torch.tensor(naive_filter(logits, temperature, top_k, top_p, min_p))
    table = torch.tensor(logits).expand(1, 2, -1)
    found = filtered_probs(
        table,
        filters(
            1,
            temperatures=torch.tensor([temperature]),
            top_ks=torch.tensor([top_k]),
            top_ps=torch.tensor([top_p]),
            min_ps=torch.tensor([min_p]),
        ),
    )
    assert torch.allclose(found.sum(-1), torch.ones(1, 2))
    # Cuts may fall differently only for tokens whose probability sits on the edge to within rounding.
    assert torch.allclose(found[0, 0].double(), expected.double(), atol=1e-5)


def test_seeded_choice_depends_on_seed_and_position_only() -> None:
    logits = torch.randn(3, 2, 50, generator=torch.Generator().manual_seed(2))
    logits[1] = logits[0]
    rows = filters(
        3, seeded=torch.tensor([True, True, False]), seeds=torch.tensor([7, 7, 0]), any_seeded=True, any_filter=False
    )
    positions = torch.tensor([[5, 6]] * 3)
    probs = filtered_probs(logits, rows)
    choice = target_choice(logits, probs, rows, positions)
    assert choice[0].tolist() == choice[1].tolist()
    alone = gumbel_argmax(probs[1:2], torch.tensor([[7]]), positions[1:2])
    assert choice[1].tolist() == alone[0].tolist()
    assert choice[2].tolist() == logits[2].argmax(-1).tolist()
