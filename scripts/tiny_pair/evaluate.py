"""Measure a pair: accept lengths over greedy answers, losses, repetition and sizes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

MAX_NEW_TOKENS = 256


class MostlyEnded(StoppingCriteria):
    """Stop a batch once all but a few of its rows have produced their end token."""

    def __init__(self, prompt_length: int, eos: int, share: float) -> None:
        self.prompt_length, self.eos, self.share = prompt_length, eos, share

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:
        """Return the same verdict for every row."""
        if input_ids.shape[1] % 8:
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        ended = (input_ids[:, self.prompt_length :] == self.eos).any(1).float().mean()
        return (ended >= self.share).expand(len(input_ids))


@torch.inference_mode()
def generate(
    model: PreTrainedModel,
    prompts: list[list[int]],
    eos: int,
    pad: int,
    temperature: float = 0.0,
    batch: int = 64,
    share: float = 1.0,
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> list[list[int]]:
    """Generate one answer for each prompt, in batches of similar length.

    Parameters
    ----------
    model : PreTrainedModel
        Model on its device.
    prompts : list of list of int
        Token ids.
    eos, pad : int
        End and padding ids.
    temperature : float
        0 for greedy.
    batch : int
        Prompts at once.
    share : float
        A batch stops when this share of its rows has ended; the others are left unfinished.
    max_new_tokens : int
        Most tokens of an answer.

    Returns
    -------
    list of list of int
        The answers in the prompts' order, each with its end token if it reached it.
    """
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    answers: list[list[int]] = [[] for _ in prompts]
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    for first in range(0, len(order), batch):
        rows = order[first : first + batch]
        width = max(len(prompts[i]) for i in rows)
        ids = torch.full((len(rows), width), pad)
        for row, i in enumerate(rows):
            ids[row, width - len(prompts[i]) :] = torch.tensor(prompts[i])
        mask = torch.zeros_like(ids)
        for row, i in enumerate(rows):
            mask[row, width - len(prompts[i]) :] = 1
        out = model.generate(
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=max_new_tokens,
            eos_token_id=eos,
            pad_token_id=pad,
            stopping_criteria=StoppingCriteriaList([MostlyEnded(width, eos, share)] if share < 1 else []),
            **sampling,
        )
        for i, tokens in zip(rows, out[:, width:].tolist(), strict=True):
            answers[i] = tokens[: tokens.index(eos) + 1] if eos in tokens else tokens
    return answers


@torch.inference_mode()
def draft_matches(draft: PreTrainedModel, prompt: list[int], answer: list[int]) -> list[bool]:
    """Tell for each answer token whether the draft's argmax after the tokens before it is that token."""
    ids = torch.tensor([prompt + answer], device=draft.device)
    guesses = draft(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].argmax(-1)
    return (guesses == ids[0, len(prompt) :]).tolist()


def count_rounds(matches: list[bool], k: int) -> int:
    """Count the verify rounds that produce an answer.

    The first token comes from the prompt's pass. In each round the draft proposes ``k`` tokens; those before
    the first wrong one are accepted and the target adds one. A proposal that follows accepted ones sees just
    the tokens of the answer, so matches along the answer decide the whole chain.

    Parameters
    ----------
    matches : list of bool
        Result of :func:`draft_matches`.
    k : int
        Proposals per round.

    Returns
    -------
    int
        Rounds until every token after the first is out.
    """
    position, rounds = 1, 0
    while position < len(matches):
        accepted = 0
        while accepted < k and position + accepted < len(matches) and matches[position + accepted]:
            accepted += 1
        position += accepted + 1
        rounds += 1
    return rounds


@torch.inference_mode()
def chain_rounds(draft: PreTrainedModel, prompt: list[int], answer: list[int], k: int) -> int:
    """Count rounds by really proposing chains, to check :func:`count_rounds`."""
    position, rounds = 1, 0
    while position < len(answer):
        context, proposals = prompt + answer[:position], []
        for _ in range(k):
            ids = torch.tensor([context + proposals], device=draft.device)
            proposals.append(int(draft(input_ids=ids, use_cache=False).logits[0, -1].argmax()))
        accepted = 0
        while accepted < k and position + accepted < len(answer) and proposals[accepted] == answer[position + accepted]:
            accepted += 1
        position += accepted + 1
        rounds += 1
    return rounds


def accept_lengths(matches: list[list[bool]], depths: range = range(1, 6)) -> dict[str, float]:
    """Return tokens per verify round over all answers, by number of proposals ``k``."""
    out = {}
    for k in depths:
        rounds = sum(count_rounds(m, k) for m in matches)
        out[str(k)] = round(sum(len(m) - 1 for m in matches if m) / max(rounds, 1), 3)
    return out


def repeats(answer: list[int], size: int = 4, times: int = 8) -> bool:
    """Tell whether some ``size``-gram of tokens occurs more than ``times`` times."""
    grams = Counter(tuple(answer[i : i + size]) for i in range(len(answer) - size + 1))
    return bool(grams) and max(grams.values()) > times


@torch.inference_mode()
def heldout_losses(
    model: PreTrainedModel, data: dict[str, np.ndarray], rows: int = 64, width: int = 512
) -> dict[str, float]:
    """Return the mean cross-entropy (nats per token) on held-out text and on held-out answers."""
    text = data["text_heldout"]
    starts = np.linspace(0, len(text) - width - 1, rows).astype(int)
    ids = torch.tensor(np.stack([text[s : s + width] for s in starts]).astype(np.int64), device=model.device)
    total = sum(float(model(input_ids=b, labels=b, use_cache=False).loss) * len(b) for b in ids.split(16))
    chosen = np.flatnonzero(data["chat_split"] == 2)[: 4 * rows]
    loss_sum, count = 0.0, 0
    for i in chosen:
        span = slice(data["chat_offsets"][i], data["chat_offsets"][i + 1])
        tokens = torch.tensor(data["chat_tokens"][span].astype(np.int64)[None, :width], device=model.device)
        answer = torch.tensor(data["chat_answer"][span][None, :width] == 1, device=model.device)
        labels = tokens.masked_fill(~answer, -100)
        n = int((labels[:, 1:] != -100).sum())
        loss_sum += float(model(input_ids=tokens, labels=labels, use_cache=False).loss) * n
        count += n
    return {"text": round(total / rows, 4), "answers": round(loss_sum / max(count, 1), 4)}


def measure(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: object,
    prompts: list[dict[str, str]],
    batch: int = 64,
) -> dict[str, object]:
    """Let the target answer greedily and simulate speculative decoding with the draft.

    Parameters
    ----------
    target, draft : PreTrainedModel
        The pair, on one device.
    tokenizer : PreTrainedTokenizerFast
        The pair's tokenizer.
    prompts : list of dict
        With ``prompt`` and ``category``.
    batch : int
        Prompts generated at once.

    Returns
    -------
    dict
        Accept lengths overall and by category, output lengths, repetition, and a few samples.
    """
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    ids = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": p["prompt"]}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
        )["input_ids"]
        for p in prompts
    ]
    answers = generate(target, ids, eos, pad, batch=batch)
    matches = [draft_matches(draft, p, a) for p, a in zip(ids, answers, strict=True)]
    checked = [i for i in range(len(ids)) if len(answers[i]) < 60][:5]
    agree = all(chain_rounds(draft, ids[i], answers[i], 3) == count_rounds(matches[i], 3) for i in checked)
    by_category = {
        c: accept_lengths([m for m, p in zip(matches, prompts, strict=True) if p["category"] == c], range(3, 4))["3"]
        for c in sorted({p["category"] for p in prompts})
    }
    return {
        "prompts": len(prompts),
        "accept_length": accept_lengths(matches),
        "accept_length_k3_by_category": by_category,
        "draft_agreement": round(sum(map(sum, matches)) / max(sum(map(len, matches)), 1), 4),
        "chain_check_passed": agree,
        "chain_check_prompts": len(checked),
        "mean_output_tokens": round(sum(map(len, answers)) / len(answers), 1),
        "ended_by_eos": round(sum(a[-1] == eos for a in answers) / len(answers), 4),
        "repeating_outputs": round(sum(map(repeats, answers)) / len(answers), 4),
        "samples": [
            {**p, "answer": tokenizer.decode(a, skip_special_tokens=True), "tokens": len(a)}
            for p, a in list(zip(prompts, answers, strict=True))[:24]
        ],
    }


def evaluate_pair(models: Path, data_dir: Path, limit: int) -> dict[str, object]:
    """Measure the saved pair in float32 from its bfloat16 weights.

    Parameters
    ----------
    models : Path
        Folder holding ``tiny-target`` and ``tiny-draft``.
    data_dir : Path
        Output of the ``data`` step.
    limit : int
        Number of held-out prompts.

    Returns
    -------
    dict
        The report of :func:`measure` with sizes, losses and the training log.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = dict(np.load(data_dir / "data.npz"))
    prompts = [json.loads(x) for x in (data_dir / "heldout.jsonl").read_text().splitlines()][:limit]
    pair = {
        name: AutoModelForCausalLM.from_pretrained(models / f"tiny-{name}", dtype=torch.float32).to(device).eval()
        for name in ("target", "draft")
    }
    tokenizer = AutoTokenizer.from_pretrained(models / "tiny-target")
    report: dict[str, object] = {"weights": "bfloat16", "arithmetic": "float32"}
    report |= measure(pair["target"], pair["draft"], tokenizer, prompts)
    report["heldout_loss"] = {name: heldout_losses(model, data) for name, model in pair.items()}
    report["parameters"] = {name: sum(p.numel() for p in m.parameters()) for name, m in pair.items()}
    report["file_bytes"] = {
        f"{name}/{f.name}": f.stat().st_size
        for name in ("tiny-target", "tiny-draft")
        for f in sorted((models / name).iterdir())
    }
    report["data"] = json.loads((data_dir / "counts.json").read_text())
    log = models / "training.json"
    if log.exists():
        report["training"] = json.loads(log.read_text())
    return report
