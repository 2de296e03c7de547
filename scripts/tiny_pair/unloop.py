"""Train the target out of loops: unlikelihood on the tokens with which its own greedy answers repeat."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from . import evaluate, training

ROUNDS = 3

KEEP_AFTER_LOOP = 24  # repeating tokens kept of an answer: the entry of a loop matters, not its length


def repeating_positions(answer: list[int]) -> list[int]:
    """Return the positions whose token completes a 4-gram seen twice before or an 8-gram seen once."""
    seen: Counter[tuple[int, ...]] = Counter()
    found = []
    for end in range(4, len(answer) + 1):
        short, long = tuple(answer[end - 4 : end]), tuple(answer[max(end - 8, 0) : end])
        if seen[short] >= 2 or (len(long) == 8 and seen[long] >= 1):
            found.append(end - 1)
        seen[short] += 1
        if len(long) == 8:
            seen[long] += 1
    return found


def loop_rows(prompts: list[list[int]], answers: list[list[int]], width: int) -> list[tuple[list[int], list[int]]]:
    """Return (ids, positions of repeating tokens in ids) of the answers that repeat."""
    rows = []
    for prompt, answer in zip(prompts, answers, strict=True):
        positions = repeating_positions(answer)[:KEEP_AFTER_LOOP]
        if positions and len(prompt) + positions[-1] < width:
            rows.append(((prompt + answer)[: len(prompt) + positions[-1] + 1], [len(prompt) + p for p in positions]))
    return sorted(rows, key=lambda row: len(row[0]))


def unloop_target(
    target: PreTrainedModel,
    data: dict[str, np.ndarray],
    steps: training.Steps,
    ends: tuple[int, int],
    seed: int,
    rate: float = 4e-4,
) -> dict[str, object]:
    """Alternate greedy answers with steps that keep the training chats likely and the loops unlikely.

    Parameters
    ----------
    target : PreTrainedModel
        Trained target in float32, changed in place.
    data : dict of str to ndarray
        Arrays of ``data.npz``; only prompts of the train and distill splits are used.
    steps : training.Steps
        Sizes of the run.
    ends : (int, int)
        End and padding ids.
    seed : int
        Seed of the choice.
    rate : float
        Peak learning rate; it falls linearly to zero.

    Returns
    -------
    dict of str to object
        Steps, seconds and the share of answers with a loop before each round.
    """
    rng, began = np.random.default_rng(seed), time.time()
    usable, train = training.short_prompts(data, 0, 1), training.short_prompts(data, 0)
    optimizer = training.make_optimizer(target, rate, 0.0)
    shares: list[float] = []
    for step in range(steps.unloop):
        if step % -(-steps.unloop // ROUNDS) == 0:
            prompts = [training.prompt_of(data, i) for i in rng.choice(usable, steps.generated, replace=False)]
            model = training.plain_copy(target)
            answers = evaluate.generate(model, prompts, *ends, batch=steps.generated, share=0.9, max_new_tokens=160)
            loops = loop_rows(prompts, answers, training.WIDTH)
            shares.append(round(len(loops) / len(prompts), 3))
            print(f"unloop step {step} {time.time() - began:.0f}s: {shares[-1]:.3f} of answers loop", flush=True)
        for group in optimizer.param_groups:
            group["lr"] = rate * (1 - step / steps.unloop) * min(1.0, (step + 1) / 10)
        loss = _step_loss(target, data, train, loops, max(steps.rows // 2, 1), rng)
        training.optimize(optimizer, target, loss)
    print(f"unloop end {time.time() - began:.0f}s loss {loss:.3f}", flush=True)
    return {"steps": steps.unloop, "seconds": round(time.time() - began, 1), "looping_by_round": shares}


def _step_loss(
    target: PreTrainedModel,
    data: dict[str, np.ndarray],
    train: np.ndarray,
    loops: list[tuple[list[int], list[int]]],
    batch: int,
    rng: np.random.Generator,
) -> torch.Tensor:
    """Return cross-entropy on whole training chats plus unlikelihood on loops."""
    device = target.device
    chats = [slice(*data["chat_offsets"][i : i + 2]) for i in rng.choice(train, batch, replace=False)]
    rows = [
        (data["chat_tokens"][s][: training.WIDTH].tolist(), None, data["chat_answer"][s][: training.WIDTH])
        for s in chats
    ]
    # The rows of all training have one shape on an accelerator: another would be compiled again.
    rows += [(*loops[i], None) for i in rng.integers(len(loops), size=batch)] if loops else rows
    width = training.WIDTH + 1 if device.type == "cuda" else max(len(ids) for ids, _, _ in rows)
    tokens = np.zeros((len(rows), width), dtype=np.int64)
    likely = np.zeros((len(rows), width - 1), dtype=np.float32)
    unlikely = np.zeros_like(likely)
    for row, (ids, positions, answer) in enumerate(rows):
        tokens[row, : len(ids)] = ids
        if positions is None:
            likely[row, : len(ids) - 1] = answer[1:]
        else:
            unlikely[row, np.array(positions) - 1] = 1
    ids = torch.tensor(tokens, device=device)
    logits = training.logits_of(target, ids[:, :-1]).float()
    log_p = -F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(len(rows), -1)
    likely_t, unlikely_t = torch.tensor(likely, device=device), torch.tensor(unlikely, device=device)
    against = -torch.log1p(-log_p.exp().clamp(max=1 - 1e-4))
    loss = -(log_p * likely_t).sum() / likely_t.sum()
    return loss + (against * unlikely_t).sum() / unlikely_t.sum().clamp(min=1)
