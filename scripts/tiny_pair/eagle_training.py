"""Train an EAGLE-3 head on the target's own answers, with the head's own output fed back, and measure it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from . import evaluate
from .eagle_head import EagleHead, HeadShape
from .training import Answers, compiled, distill_loss, make_optimizer, optimize, set_rate, target_answers

WIDTH = 432  # the longest prompt with the longest answer
LATER_STEP = 0.8  # weight of a chain's step relative to the one before, as in EAGLE-3


@torch.no_grad()
def read_target(
    target: PreTrainedModel, ids: torch.Tensor, layers: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the target over ``ids``.

    Parameters
    ----------
    target : PreTrainedModel
        The target.
    ids : Tensor
        ``(rows, width)``.
    layers : tuple of int
        Layers whose output is wanted, counted from 0.

    Returns
    -------
    (Tensor, Tensor)
        Features ``(rows, width, len(layers) * hidden)`` and logits ``(rows, width, vocab)``.
    """
    out = target(input_ids=ids, attention_mask={"full_attention": None}, use_cache=False, output_hidden_states=True)
    return torch.cat([out.hidden_states[layer + 1] for layer in layers], dim=-1), out.logits


def unrolled_loss(
    head: EagleHead,
    embeds: torch.Tensor,
    features: torch.Tensor,
    teacher: torch.Tensor,
    weights: torch.Tensor,
    steps: int,
) -> torch.Tensor:
    """Return the loss of all chains of ``steps`` draft tokens, one started at each position.

    The tokens fed are the row's own: a chain counts only as far as its drafts are right, and those it is fed then.

    Parameters
    ----------
    head : EagleHead
        The head.
    embeds : Tensor
        Embeddings of the row's tokens, ``(rows, width, hidden)``.
    features : Tensor
        The target's features, ``(rows, width, layers * hidden)``.
    teacher : Tensor
        The target's logits after each token, over the target's vocabulary.
    weights : Tensor
        ``weights[:, i]`` weighs the prediction made after token i, ``(rows, width)``.
    steps : int
        Length of a chain.

    Returns
    -------
    Tensor
        Mean over the steps, in nats.
    """
    chains = embeds.shape[1] - steps  # those that end within the row
    hidden, past, losses, scale = head.fc(features[:, :chains]), [], 0.0, 0.0
    for depth in range(steps):
        fed = slice(depth + 1, depth + 1 + chains)  # chain i is fed token i + 1 + depth
        logits, hidden = head.step(embeds[:, fed], hidden, depth, past)
        wanted = teacher[:, fed]
        # What lies outside the draft vocabulary cannot be proposed.
        covered = torch.isin(wanted.argmax(-1), head.kept)
        loss = distill_loss(logits, wanted[..., head.kept], weights[:, fed] * covered)
        losses, scale = losses + LATER_STEP**depth * loss, scale + LATER_STEP**depth
    return losses / scale


def make_head(shape: HeadShape, target: PreTrainedModel, answers: list[list[int]]) -> tuple[EagleHead, float]:
    """Make an untrained head whose draft vocabulary holds the tokens that the target uses most.

    Returns
    -------
    (EagleHead, float)
        The head on the target's device, and the share of the answers' tokens that its vocabulary holds.
    """
    counts = np.bincount(np.concatenate([np.array(a) for a in answers]), minlength=shape.vocab_size)
    kept = np.sort(np.argsort(-counts, kind="stable")[: shape.draft_vocab_size])
    head = EagleHead(shape, torch.tensor(kept))
    for name, parameter in head.named_parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.02 if "down_proj" in name or "o_proj" in name else 0.04)
    with torch.no_grad():
        head.lm_head.weight.copy_(target.get_output_embeddings().weight[head.kept.to(target.device)])
    return head.to(target.device), float(counts[kept].sum() / counts.sum())


def train_head(
    head: EagleHead,
    target: PreTrainedModel,
    answers: Answers,
    steps: int,
    batch: int,
    depth: int,
    seed: int,
    rate: float = 2e-3,
) -> dict[str, float]:
    """Train the head in place.

    Parameters
    ----------
    head : EagleHead
        The head in float32.
    target : PreTrainedModel
        The frozen target.
    answers : Answers
        The target's answers.
    steps : int
        Optimiser steps.
    batch : int
        Rows per step.
    depth : int
        Length of the chains.
    seed : int
        Seed of the choice of rows.
    rate : float
        Peak learning rate.

    Returns
    -------
    dict of str to float
        Steps, tokens and seconds.
    """
    device, rng = target.device.type, np.random.default_rng(seed)
    optimizer = make_optimizer(head, rate, 0.05)
    torch._dynamo.config.suppress_errors = True  # slower then, but the run goes on
    loss_of, began, tokens = compiled(unrolled_loss, device), time.time(), 0
    embed = target.get_input_embeddings()
    for step in range(steps):
        ids, weights = answers.batch(batch, rng)
        ids = ids[:, :-1]
        set_rate(optimizer, rate, step, steps)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            features, teacher = read_target(target, ids, head.shape.layers)
            loss = loss_of(head, embed(ids).detach(), features, teacher, weights, depth)
        optimize(optimizer, head, loss)
        tokens += ids.numel()
        if step % 200 == 0:
            print(f"head step {step} {time.time() - began:.0f}s loss {loss.item():.3f}", flush=True)
    return {"steps": steps, "tokens": tokens, "seconds": round(time.time() - began, 1)}


@torch.inference_mode()
def chain_matches(head: EagleHead, target: PreTrainedModel, tokens: list[int], depth: int) -> list[list[bool]]:
    """Tell which drafts of the chains over ``tokens`` are right, their own tokens being fed.

    Returns
    -------
    list of list of bool
        ``[d][i]``: step d of the chain started at i proposes token i + 2 + d.
    """
    ids = torch.tensor([tokens], device=target.device)
    features, _ = read_target(target, ids, head.shape.layers)
    embeds, past, matches = target.get_input_embeddings()(ids), [], []
    chains = len(tokens) - 1
    hidden = head.fc(features[:, :chains])
    for step in range(depth):
        fed = torch.nn.functional.pad(embeds[:, step + 1 :], (0, 0, 0, step))  # past the end: no match is counted
        logits, hidden = head.step(fed, hidden, step, past)
        guesses = head.kept[logits[0].argmax(-1)]
        wanted = torch.nn.functional.pad(ids[0, step + 2 :], (0, step + 1), value=-1)
        matches.append((guesses == wanted).tolist())
    return matches


def count_rounds(matches: list[list[bool]], prompt: int, total: int, k: int) -> int:
    """Count the verify rounds that produce tokens ``prompt + 1 .. total``; the first one comes from the prompt's pass.

    Before token p is proposed, p tokens are known and the target has features of p - 1 of them: the chain starts
    at p - 2.
    """
    position, rounds = prompt + 1, 0
    while position < total:
        accepted = 0
        while accepted < k and position + accepted < total and matches[accepted][position - 2]:
            accepted += 1
        position += accepted + 1
        rounds += 1
    return rounds


@torch.inference_mode()
def propose(head: EagleHead, target: PreTrainedModel, tokens: list[int], k: int) -> list[int]:
    """Draft ``k`` tokens after ``tokens``, each fed back, as a drafter does."""
    embed = target.get_input_embeddings()
    features, _ = read_target(target, torch.tensor([tokens[:-1]], device=target.device), head.shape.layers)
    past: list[tuple[torch.Tensor, torch.Tensor]] = []
    fed = embed(torch.tensor([tokens[1:]], device=target.device))
    logits, hidden = head.step(fed, head.fc(features), 0, past)
    drafts = [int(head.kept[logits[0, -1].argmax()])]
    width = len(tokens) - 1
    for depth in range(1, k):
        # Only the last chain is wanted; the others are fed nonsense, which it does not see.
        fed = embed(torch.tensor([drafts[-1:] * width], device=target.device))
        logits, hidden = head.step(fed, hidden, depth, past)
        drafts.append(int(head.kept[logits[0, -1].argmax()]))
    return drafts


def really_proposed(head: EagleHead, target: PreTrainedModel, prompt: list[int], answer: list[int], k: int) -> int:
    """Count rounds by really proposing chains, to check :func:`count_rounds`."""
    tokens, position, rounds = prompt + answer, len(prompt) + 1, 0
    while position < len(tokens):
        drafts, accepted = propose(head, target, tokens[:position], k), 0
        while accepted < k and position + accepted < len(tokens) and drafts[accepted] == tokens[position + accepted]:
            accepted += 1
        position += accepted + 1
        rounds += 1
    return rounds


def measure_head(head: EagleHead, target: PreTrainedModel, tokenizer: object, prompts: list[dict[str, str]]) -> dict:
    """Let the target answer held-out prompts greedily and simulate speculative decoding with the head.

    Returns
    -------
    dict
        Accept length for k = 1 .. 5 overall and for k = 3 by category, agreement at each step, and the chain check.
    """
    ids = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": p["prompt"]}], add_generation_prompt=True, tokenize=True, return_dict=True
        )["input_ids"]
        for p in prompts
    ]
    answers = evaluate.generate(target, ids, tokenizer.eos_token_id, tokenizer.pad_token_id)
    deepest = 5
    matches = [chain_matches(head, target, p + a, deepest) for p, a in zip(ids, answers, strict=True)]

    def accept_length(k: int, chosen: list[int]) -> float:
        rounds = sum(count_rounds(matches[i], len(ids[i]), len(ids[i]) + len(answers[i]), k) for i in chosen)
        return round(sum(len(answers[i]) - 1 for i in chosen) / max(rounds, 1), 3)

    everyone = list(range(len(ids)))
    checked = [i for i in everyone if len(answers[i]) < 60][:4]
    agree = all(
        really_proposed(head, target, ids[i], answers[i], 3)
        == count_rounds(matches[i], len(ids[i]), len(ids[i]) + len(answers[i]), 3)
        for i in checked
    )
    starts = [range(len(p) - 1, len(p) + len(a) - 2 - deepest) for p, a in zip(ids, answers, strict=True)]
    agreement = [
        round(sum(m[d][i] for m, s in zip(matches, starts, strict=True) for i in s) / max(sum(map(len, starts)), 1), 4)
        for d in range(deepest)
    ]
    categories = sorted({p["category"] for p in prompts})
    return {
        "prompts": len(prompts),
        "accept_length": {str(k): accept_length(k, everyone) for k in range(1, deepest + 1)},
        "accept_length_k3_by_category": {
            c: accept_length(3, [i for i in everyone if prompts[i]["category"] == c]) for c in categories
        },
        "agreement_by_step": agreement,
        "chain_check_passed": agree,
        "chain_check_prompts": len(checked),
        "mean_output_tokens": round(sum(map(len, answers)) / len(answers), 1),
    }


def cached_answers(
    file: Path,
    target: PreTrainedModel,
    data: dict[str, np.ndarray],
    count: int,
    batch: int,
    seed: int,
    ends: tuple,
    skip: int = 0,
) -> tuple[list[list[int]], list[list[int]]]:
    """Return prompts and the target's answers, from ``file`` if an earlier run of the same size and seed left it."""
    if file.exists():
        saved = np.load(file)
        if (int(saved["count"]), int(saved["seed"]), int(saved["skip"])) == (count, seed, skip):
            cut = lambda flat, ends: [x.tolist() for x in np.split(saved[flat], saved[ends][:-1])]  # noqa: E731
            return cut("prompts", "prompt_ends"), cut("answers", "answer_ends")
    prompts, answers = target_answers(target, data, count, batch, seed, ends, skip)
    flat = {}
    for name, lists in (("prompt", prompts), ("answer", answers)):
        flat[f"{name}s"] = np.concatenate([np.array(x, dtype=np.uint16) for x in lists])
        flat[f"{name}_ends"] = np.cumsum([len(x) for x in lists])
    file.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(file, count=count, seed=seed, skip=skip, **flat)
    return prompts, answers


def train_and_measure(args: object) -> dict:
    """Train a head for ``args.target``, save it to ``args.out`` and measure what was saved.

    Parameters
    ----------
    args : argparse.Namespace
        The options of ``scripts/train_tiny_eagle.py``.

    Returns
    -------
    dict
        The report.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(args.seed)
    data = dict(np.load(args.data / "data.npz"))
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    ends = (tokenizer.eos_token_id, tokenizer.pad_token_id)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32).to(device).eval()
    target.requires_grad_(False)
    began = time.time()
    generated = 4608 if device == "cuda" else 32
    prompts, answers = cached_answers(
        args.answers_file, target, data, args.answers, generated, args.seed + 1, ends, args.skip_answers
    )
    log = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "seed": args.seed,
        "answers": {"count": len(answers), "tokens": sum(map(len, answers)), "seconds": round(time.time() - began, 1)},
        "chain_steps": args.chain_steps,
        "rows_per_step": args.batch,
    }
    shape = HeadShape(
        vocab_size=target.config.vocab_size,
        draft_vocab_size=args.draft_vocab,
        hidden_size=target.config.hidden_size,
        intermediate_size=args.intermediate_size,
        max_position_embeddings=target.config.max_position_embeddings,
        rope_theta=target.config.rope_parameters["rope_theta"],
        layers=tuple(args.layers),
    )
    if args.init_from is None:
        head, log["draft_vocabulary_share"] = make_head(shape, target, answers)
    else:
        head = EagleHead.load(args.init_from).to(target.device)
        log["init_from"] = json.loads(args.init_report.read_text()) if args.init_report else str(args.init_from)
    rows = Answers(prompts, answers, WIDTH, device)
    log["head"] = train_head(head, target, rows, args.steps, args.batch, args.chain_steps, args.seed + 2, args.rate)
    head.save(args.out)
    # Float32 arithmetic on the saved bfloat16 weights, as CPU serving does.
    torch.set_float32_matmul_precision("highest")
    saved = EagleHead.load(args.out).to(device)
    held_out = [json.loads(x) for x in (args.data / "heldout.jsonl").read_text().splitlines()][: args.limit]
    return {
        "weights": "bfloat16",
        "arithmetic": "float32",
        **measure_head(saved, target, tokenizer, held_out),
        "parameters": sum(p.numel() for p in head.parameters()),
        "file_bytes": {f.name: f.stat().st_size for f in sorted(args.out.iterdir())},
        "training": log,
    }
