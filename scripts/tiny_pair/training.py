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
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from . import evaluate

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


class Clock:
    """A time budget that starts when the compiled step is warm."""

    def __init__(self, seconds: float, warmup_steps: int, max_steps: int | None) -> None:
        self.seconds, self.warmup_steps, self.max_steps = seconds, warmup_steps, max_steps
        self.step, self.start = 0, time.time()

    def progress(self) -> float:
        """Advance by a step and return the share of the budget that is used."""
        if self.step == self.warmup_steps:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.start = time.time()
        self.step += 1
        if self.max_steps:
            return (self.step - 1) / self.max_steps
        return 0.0 if self.step <= self.warmup_steps else (time.time() - self.start) / self.seconds


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


def set_rate(optimizer: torch.optim.Optimizer, peak: float, step: int, progress: float) -> None:
    """Warm up over 100 steps, hold, then fall to zero over the last 70 % of the budget."""
    fall = 1.0 if progress < 0.3 else 0.5 * (1 + math.cos(math.pi * min((progress - 0.3) / 0.7, 1.0)))
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


def train_target(model: PreTrainedModel, rows: Rows, clock: Clock, batch: int, rate: float = 3e-3) -> dict[str, float]:
    """Pre-train on text with some chats, then turn to mostly chats.

    The texts are few for the model's size: more than about eight passes over them make it recite, and its
    answers about new documents worse. So the budget is short and the weight decay strong.

    Parameters
    ----------
    model : PreTrainedModel
        Target in float32, trained in place.
    rows : Rows
        Training rows.
    clock : Clock
        Time budget.
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
    began, reported = time.time(), -1
    while (progress := clock.progress()) < 1.0:
        if clock.step % 500 == 0:
            rows.shuffle_chats()
        ids, weights = rows.batch(batch, 0.25 if progress < 0.4 else 0.6)
        set_rate(optimizer, rate, clock.step, progress)
        loss = step_loss(logits_of(model, ids[:, :-1]), ids[:, 1:], weights)
        optimize(optimizer, model, loss)
        if int(progress * 10) > reported:
            reported = int(progress * 10)
            print(f"target {progress:.2f} step {clock.step} {time.time() - began:.0f}s loss {loss:.3f}", flush=True)
    return {"steps": clock.step, "tokens": clock.step * batch * WIDTH, "seconds": round(time.time() - began, 1)}


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


def target_answers(
    target: PreTrainedModel, data: dict[str, np.ndarray], seconds: float, batch: int, seed: int, ends: tuple[int, int]
) -> tuple[list[list[int]], list[list[int]]]:
    """Let the target answer prompts of unseen distill documents and of training documents.

    Parameters
    ----------
    target : PreTrainedModel
        Trained target.
    data : dict of str to ndarray
        Arrays of ``data.npz``.
    seconds : float
        Time budget.
    batch : int
        Prompts at once.
    seed : int
        Seed of the order and of sampling.
    ends : (int, int)
        End and padding ids.

    Returns
    -------
    (list, list)
        Prompts and answers as token ids: greedy answers first, sampled ones as the time allows.
    """
    model = AutoModelForCausalLM.from_config(target.config).to(target.device, torch.bfloat16 if target.device.type == "cuda" else torch.float32).eval()
    model.load_state_dict(target.state_dict())
    rng = np.random.default_rng(seed)
    if seconds <= 0:
        return [], []
    groups = [rng.permutation(np.flatnonzero((data["chat_split"] == s) & (data["chat_prompt"] <= 170))) for s in (1, 0)]
    torch.manual_seed(seed)
    began, prompts, answers = time.time(), [], []
    plans = [(groups[0], 0.0), (groups[0], 0.7), (groups[1], 0.0), (groups[0], 1.0), (groups[1], 0.7)]
    for group, temperature in plans:
        for first in range(0, len(group), batch):
            if time.time() - began > seconds:
                return prompts, answers
            chosen = group[first : first + batch]
            some = [data["chat_tokens"][data["chat_offsets"][i] :][: data["chat_prompt"][i]].tolist() for i in chosen]
            prompts += some
            answers += evaluate.generate(model, some, *ends, temperature, batch, 0.98)
            print(f"answers {len(answers)} T={temperature} {time.time() - began:.0f}s", flush=True)
    return prompts, answers


def train_draft(
    draft: PreTrainedModel, target: PreTrainedModel, rows: Rows, clock: Clock, batch: int, answers: Answers | None, rate: float
) -> dict[str, float]:
    """Train the draft to follow the target, on training rows first and mostly on the target's answers then.

    Parameters
    ----------
    draft, target : PreTrainedModel
        The pair; only the draft is trained.
    rows : Rows
        Training rows.
    clock : Clock
        Time budget.
    batch : int
        Rows per step.
    answers : Answers or None
        The target's answers; used for nearly all steps if the draft was trained before.
    rate : float
        Peak learning rate.

    Returns
    -------
    dict of str to float
        Steps, tokens and seconds.
    """
    optimizer, step_loss = make_optimizer(draft, rate, 0.05), compiled(distill_loss, rows.device)
    began, reported, average, tokens = time.time(), -1, 0.0, 0
    # Where training rows are slow (on a CPU), all the time goes to the answers.
    switch = 0.4 if rows.device == "cuda" else 0.0
    while (progress := clock.progress()) < 1.0:
        # The warm-up steps try both shapes, so that both are compiled before the clock starts.
        if answers and (clock.step in (2, 4) or (progress >= switch and clock.step % 8)):
            ids, weights = answers.batch(batch, rows.numpy)
        else:
            ids, weights = rows.batch(batch if rows.device == "cuda" else max(batch // 4, 1), 0.6)
        set_rate(optimizer, rate, clock.step, progress)
        with torch.no_grad():
            teacher = logits_of(target, ids[:, :-1])
        loss = step_loss(logits_of(draft, ids[:, :-1]), teacher, weights)
        optimize(optimizer, draft, loss)
        tokens += weights.numel()
        average += (loss.detach() - average) * max(0.02, 1 / clock.step)
        if int(progress * 10) > reported:
            reported = int(progress * 10)
            print(f"draft {progress:.2f} step {clock.step} {time.time() - began:.0f}s loss {average:.3f}", flush=True)
    return {"steps": clock.step, "tokens": tokens, "seconds": round(time.time() - began, 1)}


def save(model: PreTrainedModel, tokenizer_dir: Path, folder: Path, tokenizer: object) -> None:
    """Save a model in bfloat16 with its tokenizer and generation settings."""
    folder.mkdir(parents=True, exist_ok=True)
    copy = AutoModelForCausalLM.from_config(model.config)
    copy.load_state_dict(model.state_dict())
    copy.tie_weights()
    copy.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, max_new_tokens=evaluate.MAX_NEW_TOKENS
    )
    copy.to(torch.bfloat16).save_pretrained(folder)
    for file in tokenizer_dir.iterdir():
        shutil.copy(file, folder / file.name)


def load_or_make(name: str, folder: Path | None, tokenizer: object, device: str) -> PreTrainedModel:
    """Return a model of the pair in float32: the one saved in ``folder``, or an untrained one."""
    if folder is None:
        return make_model(name, tokenizer).to(device)
    return AutoModelForCausalLM.from_pretrained(folder / f"tiny-{name}", dtype=torch.float32).to(device)


def train_pair(
    data_dir: Path,
    out: Path,
    seconds: tuple[float, float, float, float],
    seed: int,
    start: tuple[Path | None, Path | None],
    smoke: bool = False,
) -> None:
    """Train and save the pair.

    Parameters
    ----------
    data_dir : Path
        Output of the ``data`` step.
    out : Path
        Gets ``tiny-target``, ``tiny-draft`` and ``training.json``, to which each run adds.
    seconds : (float, float, float, float)
        Time for training the target, for its answers, for training the draft (compilation not counted), and
        for training the target out of loops, which comes second; 0 leaves a step out.
    seed : int
        Seed.
    start : (Path or None, Path or None)
        Folders of a saved pair whose target and whose draft to start from.
    smoke : bool
        Run a few tiny steps only.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(seed)
    data = dict(np.load(data_dir / "data.npz"))
    tokenizer = AutoTokenizer.from_pretrained(data_dir / "tokenizer")
    ends = (tokenizer.eos_token_id, tokenizer.pad_token_id)
    max_steps, batch, generated = (6, 2, 4) if smoke else (None, 96, 3072) if device == "cuda" else (None, 48, 256)
    log: dict[str, object] = {"device": torch.cuda.get_device_name() if device == "cuda" else "cpu", "seed": seed}
    log["draft_started_from_earlier_run"] = start[1] is not None
    target = load_or_make("target", start[0], tokenizer, device)
    compile_layers(target)
    if seconds[0]:
        log["target"] = train_target(target, Rows(data, device, seed), Clock(seconds[0], 5, max_steps), batch)
    if seconds[3]:
        from . import unloop

        rounds, count, size = (1, 4, 2) if smoke else (2, 768, 12) if device == "cpu" else (3, 3072, 64)
        log["unloop"] = unloop.unloop_target(target, data, seconds[3], rounds, count, size, ends, seed + 3)
    save(target, data_dir / "tokenizer", out / "tiny-target", tokenizer)
    target.requires_grad_(False).eval()
    if smoke:
        data = {**data, "chat_split": np.where(np.arange(len(data["chat_split"])) < 300, data["chat_split"], 2)}
    prompts, texts = target_answers(target, data, seconds[1], generated, seed + 1, ends)
    log["answers"] = {"count": len(texts), "tokens": sum(map(len, texts))}
    answers = Answers(prompts, texts, 384, device) if texts else None
    draft = load_or_make("draft", start[1], tokenizer, device)
    compile_layers(draft)
    if seconds[2]:
        rows = Rows(data, device, seed + 2, (0, 1))
        log["draft"] = train_draft(
            draft, target, rows, Clock(seconds[2], 5, max_steps), batch, answers, 2e-3 if start[1] else 4e-3
        )
    save(draft, data_dir / "tokenizer", out / "tiny-draft", tokenizer)
    earlier = [p / "training.json" for p in dict.fromkeys(start) if p and (p / "training.json").exists()]
    log["earlier_runs"] = [json.loads(p.read_text()) for p in earlier]
    (out / "training.json").write_text(json.dumps(log, indent=1) + "\n")
