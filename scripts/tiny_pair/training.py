"""Train the target on text and chats, then the draft on the target's own distributions and answers."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from . import evaluate, unloop

WIDTH = 512  # tokens of a training row
SHAPES = {
    "target": {
        "hidden_size": 256,
        "intermediate_size": 640,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "draft": {
        "hidden_size": 128,
        "intermediate_size": 640,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
}
PROMPT_WEIGHT = 0.1  # weight of the loss on a chat's prompts


class Rows:
    """Random training rows of text and chats, kept on the device.

    Parameters
    ----------
    data : dict of str to ndarray
        The arrays of ``data.npz``.
    device : str
        Where the rows are made.
    seed : int
        Seed of the choice.
    splits : tuple of int
        Indices into ``data.SPLITS`` whose chats are used: the draft also sees those of distill documents.
    """

    def __init__(self, data: dict[str, np.ndarray], device: str, seed: int, splits: tuple[int, ...] = (0,)) -> None:
        self.device = device
        self.generator = torch.Generator(device=device).manual_seed(seed)
        self.numpy = np.random.default_rng(seed)
        text = [data["text_train"]] + [data["text_distill"]] * 3 * (1 in splits)
        self.text = torch.tensor(np.concatenate(text).astype(np.int16), device=device)
        self.data = data
        self.chosen = np.flatnonzero(np.isin(data["chat_split"], splits))
        self.shuffle_chats()

    def shuffle_chats(self) -> None:
        """Lay the chats out in a new random order, so that rows hold other neighbours."""
        order = self.numpy.permutation(self.chosen)
        offsets, lengths = self.data["chat_offsets"], np.diff(self.data["chat_offsets"])[order]
        starts = np.concatenate([[0], np.cumsum(lengths)])
        index = np.repeat(offsets[order] - starts[:-1], lengths) + np.arange(starts[-1])
        self.chat = torch.tensor(self.data["chat_tokens"][index].astype(np.int16), device=self.device)
        weight = np.where(self.data["chat_answer"][index] == 1, 1.0, PROMPT_WEIGHT).astype(np.float16)
        self.weight = torch.tensor(weight, device=self.device)
        usable = starts[:-1][starts[:-1] < starts[-1] - WIDTH - 1]
        self.chat_starts = torch.tensor(usable, device=self.device)

    def batch(self, rows: int, chat_share: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids ``(rows, WIDTH + 1)`` and loss weights ``(rows, WIDTH)``.

        A chat row starts at the start of a conversation, as at inference; others follow it in the row.
        """
        chats = round(rows * chat_share)
        span = torch.arange(WIDTH + 1, device=self.device)
        draw = lambda high, n: torch.randint(high, (n,), generator=self.generator, device=self.device)  # noqa: E731
        text = self.text[draw(len(self.text) - WIDTH - 1, rows - chats)[:, None] + span]
        index = self.chat_starts[draw(len(self.chat_starts), chats)][:, None] + span
        weights = torch.ones(rows, WIDTH, device=self.device)
        weights[rows - chats :] = self.weight[index[:, 1:]].float()
        return torch.cat([text, self.chat[index]]).long(), weights


class Steps:
    """The sizes of a run.

    Attributes
    ----------
    target, unloop, draft : int
        Steps of each stage; 0 leaves it out.
    answers : int
        Greedy answers of the target that the draft is trained on.
    rows : int
        Rows per step.
    generated : int
        Answers generated at once.
    """

    def __init__(self, target: int, unloop: int, answers: int, draft: int, smoke: bool = False) -> None:
        self.target, self.unloop, self.answers, self.draft = target, unloop, answers, draft
        self.rows, self.generated = 128, 4608
        if smoke:
            self.target, self.unloop, self.answers, self.draft = 4, 3, 4, 4
            self.rows, self.generated = 2, 4


def make_model(name: str, tokenizer: object) -> Qwen3ForCausalLM:
    """Make an untrained model of the pair in float32."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        head_dim=128,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        rms_norm_eps=1e-6,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        **SHAPES[name],
    )
    return Qwen3ForCausalLM(config)


def make_optimizer(model: torch.nn.Module, rate: float, decay: float) -> torch.optim.AdamW:
    """Return AdamW that decays matrices only."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=torch.cuda.is_available())


def set_rate(optimizer: torch.optim.Optimizer, peak: float, step: int, steps: int) -> None:
    """Warm up over 100 steps, hold, then fall to zero over the last 70 % of the steps."""
    progress = step / steps
    fall = 1.0 if progress < 0.3 else 0.5 * (1 + math.cos(math.pi * (progress - 0.3) / 0.7))
    for group in optimizer.param_groups:
        group["lr"] = peak * min(1.0, (step + 1) / 100) * fall


def logits_of(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Return logits ``(rows, width, vocab)``, in bfloat16 arithmetic on an accelerator."""
    with torch.autocast(ids.device.type, dtype=torch.bfloat16, enabled=ids.is_cuda):
        # A ready (absent) mask keeps the attention on its plain causal kernel under compilation.
        return model(input_ids=ids, attention_mask={"full_attention": None}, use_cache=False).logits


def compile_layers(model: PreTrainedModel) -> None:
    """Compile each layer on an accelerator: they share one graph, so that this takes seconds."""
    torch._dynamo.config.suppress_errors = True  # slower then, but the run goes on
    if next(model.parameters()).is_cuda:
        for layer in model.model.layers:
            layer.compile(dynamic=False)


def compiled(function: Callable[..., torch.Tensor], device: str) -> Callable[..., torch.Tensor]:
    """Compile a loss on an accelerator."""
    return torch.compile(function, dynamic=False) if device == "cuda" else function


def optimize(optimizer: torch.optim.Optimizer, model: torch.nn.Module, loss: torch.Tensor) -> None:
    """Take one clipped step."""
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def text_loss(logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted mean cross-entropy of ``logits`` ``(rows, width, vocab)``, in nats."""
    losses = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()


def train_target(model: PreTrainedModel, rows: Rows, steps: int, batch: int, rate: float = 3e-3) -> dict[str, float]:
    """Pre-train on text with some chats, then turn to mostly chats.

    The texts are few for the model's size: many passes over them make it recite, and its answers about new
    documents worse. So the steps are few and the weight decay strong.

    Parameters
    ----------
    model : PreTrainedModel
        Target in float32, trained in place.
    rows : Rows
        Training rows.
    steps : int
        Number of steps.
    batch : int
        Rows per step.
    rate : float
        Peak learning rate.

    Returns
    -------
    dict of str to float
        Steps, tokens and seconds.
    """
    optimizer, step_loss = make_optimizer(model, rate, 0.4), compiled(text_loss, rows.device)
    began = time.time()
    for step in range(steps):
        if step % 500 == 499:
            rows.shuffle_chats()
        ids, weights = rows.batch(batch, 0.25 if step < 0.4 * steps else 0.6)
        set_rate(optimizer, rate, step, steps)
        loss = step_loss(logits_of(model, ids[:, :-1]), ids[:, 1:], weights)
        optimize(optimizer, model, loss)
        if step % 200 == 0:
            print(f"target step {step} {time.time() - began:.0f}s loss {loss:.3f}", flush=True)
    return {"steps": steps, "tokens": steps * batch * WIDTH, "seconds": round(time.time() - began, 1)}


def distill_loss(student: torch.Tensor, teacher: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return KL(teacher || student) plus half the cross-entropy of the teacher's first choice.

    Parameters
    ----------
    student, teacher : Tensor
        Logits of shape ``(rows, width, vocab)``.
    weights : Tensor
        Weight of each position, ``(rows, width)``.

    Returns
    -------
    Tensor
        Weighted mean, in nats.
    """
    log_q, log_p = F.log_softmax(student.float(), -1), F.log_softmax(teacher.float(), -1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    first = -log_q.gather(-1, teacher.argmax(-1, keepdim=True)).squeeze(-1)
    return ((kl + 0.5 * first) * weights).sum() / weights.sum()


class Answers:
    """The target's answers as training rows, sorted by length so that a batch wastes little padding.

    Parameters
    ----------
    prompts, answers : list of list of int
        Token ids.
    width : int
        Tokens kept of a row.
    device : str
        Where the rows are kept.
    """

    def __init__(self, prompts: list[list[int]], answers: list[list[int]], width: int, device: str) -> None:
        pairs = sorted(zip(prompts, answers, strict=True), key=lambda pair: len(pair[0]) + len(pair[1]))
        ids = np.zeros((len(pairs), width + 1), dtype=np.int16)
        weights = np.zeros((len(pairs), width), dtype=np.uint8)
        for row, (prompt, answer) in enumerate(pairs):
            tokens = (prompt + answer)[: width + 1]
            ids[row, : len(tokens)] = tokens
            # Position i predicts token i + 1: those that predict an answer token count.
            weights[row, len(prompt) - 1 : len(tokens) - 1] = 1
        self.lengths = [min(len(p) + len(a), width + 1) for p, a in pairs]
        self.ids, self.weights = torch.tensor(ids, device=device), torch.tensor(weights, device=device)

    def batch(self, rows: int, rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids and weights like :meth:`Rows.batch`, trimmed to the longest row on a CPU."""
        if self.ids.is_cuda:  # one shape, so that nothing is compiled again
            pick = torch.tensor(rng.integers(len(self.lengths), size=rows), device=self.ids.device)
            return self.ids[pick].long(), self.weights[pick].float()
        first = int(rng.integers(max(len(self.lengths) - rows, 0) + 1))
        width = max(self.lengths[first : first + rows])
        return self.ids[first : first + rows, :width].long(), self.weights[first : first + rows, : width - 1].float()


def plain_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return an uncompiled copy for generation, in bfloat16 on an accelerator."""
    dtype = torch.bfloat16 if model.device.type == "cuda" else torch.float32
    copy = AutoModelForCausalLM.from_config(model.config).to(model.device, dtype).eval()
    copy.load_state_dict(model.state_dict())
    return copy


def prompt_of(data: dict[str, np.ndarray], index: int) -> list[int]:
    """Return the ids of a conversation's first prompt."""
    return data["chat_tokens"][data["chat_offsets"][index] :][: data["chat_prompt"][index]].tolist()


def short_prompts(data: dict[str, np.ndarray], *splits: int) -> np.ndarray:
    """Return the indices of the conversations of some splits whose first prompt is short."""
    return np.flatnonzero(np.isin(data["chat_split"], splits) & (data["chat_prompt"] <= 170))


def target_answers(
    target: PreTrainedModel,
    data: dict[str, np.ndarray],
    count: int,
    batch: int,
    seed: int,
    ends: tuple[int, int],
    skip: int = 0,
) -> tuple[list[list[int]], list[list[int]]]:
    """Let the target answer greedily, prompts of distill documents first and of training documents then.

    Parameters
    ----------
    target : PreTrainedModel
        Trained target.
    data : dict of str to ndarray
        Arrays of ``data.npz``.
    count : int
        Number of answers.
    batch : int
        Prompts at once.
    seed : int
        Seed of the order.
    ends : (int, int)
        End and padding ids.
    skip : int
        Prompts of that order left out at its begin.

    Returns
    -------
    (list, list)
        Prompts and answers as token ids.
    """
    rng, began = np.random.default_rng(seed), time.time()
    order = np.concatenate([rng.permutation(short_prompts(data, s)) for s in (1, 0)])[skip : skip + count]
    model, answers = plain_copy(target), []
    prompts = [prompt_of(data, i) for i in order]
    for first in range(0, len(prompts), batch):
        some = prompts[first : first + batch]
        answers += evaluate.generate(model, some, *ends, batch=batch, share=0.97)
        print(f"answers {len(answers)} {time.time() - began:.0f}s", flush=True)
    return prompts, answers


def train_draft(
    draft: PreTrainedModel,
    target: PreTrainedModel,
    rows: Rows,
    steps: int,
    batch: int,
    answers: Answers | None,
    rate: float = 4e-3,
) -> dict[str, float]:
    """Train the draft to follow the target, on training rows first and mostly on the target's answers then.

    Parameters
    ----------
    draft, target : PreTrainedModel
        The pair; only the draft is trained.
    rows : Rows
        Training rows.
    steps : int
        Number of steps.
    batch : int
        Rows per step.
    answers : Answers or None
        The target's answers; three of four steps use them after 40 % of the steps.
    rate : float
        Peak learning rate.

    Returns
    -------
    dict of str to float
        Steps, tokens and seconds.
    """
    optimizer, step_loss = make_optimizer(draft, rate, 0.05), compiled(distill_loss, rows.device)
    began, tokens = time.time(), 0
    for step in range(steps):
        on_answers = answers is not None and step >= 0.4 * steps and step % 4 > 0
        ids, weights = answers.batch(batch, rows.numpy) if on_answers else rows.batch(batch, 0.6)
        set_rate(optimizer, rate, step, steps)
        with torch.no_grad():
            teacher = logits_of(target, ids[:, :-1])
        loss = step_loss(logits_of(draft, ids[:, :-1]), teacher, weights)
        optimize(optimizer, draft, loss)
        tokens += weights.numel()
        if step % 200 < 2:  # one step on rows, one on answers
            print(f"draft step {step} {time.time() - began:.0f}s loss {loss:.3f} {on_answers=}", flush=True)
    return {"steps": steps, "tokens": tokens, "seconds": round(time.time() - began, 1)}


def save(model: PreTrainedModel, tokenizer_dir: Path, folder: Path, tokenizer: object) -> None:
    """Save a model in bfloat16 with its tokenizer and generation settings."""
    folder.mkdir(parents=True, exist_ok=True)
    copy = AutoModelForCausalLM.from_config(model.config)
    copy.load_state_dict(model.state_dict())
    copy.tie_weights()
    copy.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        max_new_tokens=evaluate.MAX_NEW_TOKENS,
    )
    copy.to(torch.bfloat16).save_pretrained(folder)
    for file in tokenizer_dir.iterdir():
        shutil.copy(file, folder / file.name)


def load_or_make(name: str, folder: Path | None, tokenizer: object, device: str) -> PreTrainedModel:
    """Return a model of the pair in float32: the one saved in ``folder``, or an untrained one."""
    if folder is None:
        return make_model(name, tokenizer).to(device)
    return AutoModelForCausalLM.from_pretrained(folder / f"tiny-{name}", dtype=torch.float32).to(device)


def train_pair(data_dir: Path, out: Path, steps: Steps, seed: int, start: tuple[Path | None, Path | None]) -> None:
    """Train and save the pair.

    Parameters
    ----------
    data_dir : Path
        Output of the ``data`` step.
    out : Path
        Gets ``tiny-target``, ``tiny-draft`` and ``training.json``.
    steps : Steps
        Sizes of the stages.
    seed : int
        Seed.
    start : (Path or None, Path or None)
        Folders of a saved pair whose target and whose draft to start from.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(seed)
    data = dict(np.load(data_dir / "data.npz"))
    tokenizer = AutoTokenizer.from_pretrained(data_dir / "tokenizer")
    ends = (tokenizer.eos_token_id, tokenizer.pad_token_id)
    log: dict[str, object] = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "seed": seed,
        "target_started_from_earlier_run": start[0] is not None,
        "draft_started_from_earlier_run": start[1] is not None,
    }
    target = load_or_make("target", start[0], tokenizer, device)
    compile_layers(target)
    if steps.target:
        log["target"] = train_target(target, Rows(data, device, seed), steps.target, steps.rows)
    if steps.unloop:
        log["unloop"] = unloop.unloop_target(target, data, steps, ends, seed + 3)
    save(target, data_dir / "tokenizer", out / "tiny-target", tokenizer)
    target.requires_grad_(False).eval()
    answers = None
    if steps.answers:
        prompts, texts = target_answers(target, data, steps.answers, steps.generated, seed + 1, ends)
        log["answers"] = {"count": len(texts), "tokens": sum(map(len, texts))}
        answers = Answers(prompts, texts, WIDTH, device)
    draft = load_or_make("draft", start[1], tokenizer, device)
    compile_layers(draft)
    if steps.draft:
        rows = Rows(data, device, seed + 2, (0, 1))
        log["draft"] = train_draft(draft, target, rows, steps.draft, steps.rows, answers)
    save(draft, data_dir / "tokenizer", out / "tiny-draft", tokenizer)
    (out / "training.json").write_text(json.dumps(log, indent=1) + "\n")
