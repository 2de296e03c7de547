"""Random EAGLE heads for the tests, and a replica of them in plain PyTorch.

The replica shares nothing with SGLang's classes or with the drafter: it reads the checkpoint and computes a chain from
the whole sequence each time, as the papers describe it.

=========  ========================================================================================
``L``      target: Llama of four layers, else as ``T``
``L_e3``   EAGLE-3 head for it: reads layers 0, 1 and 2, 200 of 320 tokens
``L_e3s``  EAGLE-3 head that works with the target's output matrix
``L_e1``   EAGLE head for it: reads the last layer
``B``      target like ``L``, whose next token depends mostly on the last one
``B_e1``   EAGLE head for it that is right more often than not
``S_e3``   EAGLE-3 head for ``S4``, the target of the law tests with four layers
=========  ========================================================================================
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, MLP = 4, 2, 16, 64, 96
EPS, THETA = 1e-6, 10000.0
LAYERS = (0, 1, 2)


def _config(architecture: str, vocab: int, context: int, **more) -> dict:
    return {
        "architectures": [architecture],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": context,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        **more,
    }


def _layer(generator: torch.Generator, prefix: str, width: int) -> dict[str, torch.Tensor]:
    draw = lambda *shape: torch.randn(*shape, generator=generator) * 0.25  # noqa: E731
    return {
        f"{prefix}.self_attn.q_proj.weight": draw(HEADS * HEAD_DIM, width),
        f"{prefix}.self_attn.k_proj.weight": draw(KV_HEADS * HEAD_DIM, width),
        f"{prefix}.self_attn.v_proj.weight": draw(KV_HEADS * HEAD_DIM, width),
        f"{prefix}.self_attn.o_proj.weight": draw(HIDDEN, HEADS * HEAD_DIM),
        f"{prefix}.mlp.gate_proj.weight": draw(MLP, HIDDEN),
        f"{prefix}.mlp.up_proj.weight": draw(MLP, HIDDEN),
        f"{prefix}.mlp.down_proj.weight": draw(HIDDEN, MLP),
        f"{prefix}.post_attention_layernorm.weight": 1 + 0.2 * draw(HIDDEN),
    }


def _save(folder: Path, config: dict, weights: dict[str, torch.Tensor]) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def build_eagle3(folder: Path, vocab: int, context: int, draft_vocab: int | None, seed: int) -> None:
    """Write an EAGLE-3 head; ``draft_vocab`` None: it works with the target's output matrix."""
    generator = torch.Generator().manual_seed(seed)
    weights = _layer(generator, "midlayer", 2 * HIDDEN)
    weights["midlayer.input_layernorm.weight"] = 1 + 0.1 * torch.randn(HIDDEN, generator=generator)
    weights["midlayer.hidden_norm.weight"] = 1 + 0.1 * torch.randn(HIDDEN, generator=generator)
    weights["fc.weight"] = 0.15 * torch.randn(HIDDEN, len(LAYERS) * HIDDEN, generator=generator)
    weights["norm.weight"] = 1 + 0.1 * torch.randn(HIDDEN, generator=generator)
    if draft_vocab is not None:
        weights["lm_head.weight"] = 0.3 * torch.randn(draft_vocab, HIDDEN, generator=generator)
    if draft_vocab not in (None, vocab):
        kept = torch.randperm(vocab, generator=generator)[:draft_vocab].sort().values
        weights["d2t"] = kept - torch.arange(draft_vocab)
        weights["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, kept, True)
    more = {
        "draft_vocab_size": draft_vocab,
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": list(LAYERS)},
    }
    _save(folder, _config("LlamaForCausalLMEagle3", vocab, context, **more), weights)


def build_eagle(folder: Path, vocab: int, context: int, seed: int, mimic: bool = False) -> None:
    """Write an EAGLE head; ``mimic``: it passes the token's embedding on, little changed."""
    generator = torch.Generator().manual_seed(seed)
    weights = _layer(generator, "layers.0", HIDDEN)
    weights["fc.weight"] = 0.15 * torch.randn(HIDDEN, 2 * HIDDEN, generator=generator)
    weights["fc.bias"] = 0.1 * torch.randn(HIDDEN, generator=generator)
    if mimic:
        weights["fc.weight"] = 0.03 * weights["fc.weight"] + torch.eye(HIDDEN, 2 * HIDDEN)
        weights["fc.bias"] *= 0.02
        weights["layers.0.self_attn.o_proj.weight"] *= 0.02
        weights["layers.0.mlp.down_proj.weight"] *= 0.005
    _save(folder, _config("LlamaForCausalLMEagle", vocab, context), weights)


# --- the replica ---------------------------------------------------------------------------------


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


class Replica:
    """One target, one head, one request at a time, no cache: a chain is computed from its whole sequence.

    Parameters
    ----------
    target, head : Path
        Checkpoints; arithmetic is float32.
    """

    def __init__(self, target: Path, head: Path):
        from transformers import AutoModelForCausalLM

        self.target = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        self.config = json.loads((head / "config.json").read_text())
        self.weights = {name: weight.float() for name, weight in load_file(head / "model.safetensors").items()}
        self.eagle3 = "Eagle3" in self.config["architectures"][0]
        self.prefix = "midlayer" if self.eagle3 else "layers.0"

    @torch.no_grad()
    def features(self, tokens: list[int]) -> torch.Tensor:
        """The target's hidden states of ``tokens``, ``[n, feature_size]``."""
        out = self.target(torch.tensor([tokens]), output_hidden_states=True)
        if not self.eagle3:
            return out.hidden_states[-1][0]
        layers = self.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        return torch.cat([out.hidden_states[layer + 1][0] for layer in layers], dim=-1)

    @torch.no_grad()
    def draft(self, tokens: list[int], k: int, left_out: Collection[int] = ()) -> list[int]:
        """Greedy chain of ``k`` tokens after ``tokens``; the head's context lacks the positions ``left_out``."""
        known = len(tokens) - 1
        kept = [i for i in range(known) if i not in left_out]
        fed = [tokens[i + 1] for i in kept]
        hidden = self.features(tokens[:-1])[kept]
        if self.eagle3:
            hidden = hidden @ self.weights["fc.weight"].T
        drafts: list[int] = []
        while True:
            positions = torch.tensor([*kept, *range(known, known + len(drafts))])
            logits, out = self._forward(torch.tensor(fed + drafts), hidden, positions)
            drafts.append(int(logits[-1].argmax() if self._map() is None else self._map()[logits[-1].argmax()]))
            if len(drafts) == k:
                return drafts
            hidden = torch.cat([hidden, out[-1:]])

    def _map(self) -> torch.Tensor | None:
        d2t = self.weights.get("d2t")
        return None if d2t is None else (d2t + torch.arange(len(d2t))).long()

    def _forward(
        self, ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        w = {name.removeprefix(self.prefix + "."): weight for name, weight in self.weights.items()}
        embeds = self.target.get_input_embeddings().weight[ids]
        if self.eagle3:
            residual = hidden
            x = torch.cat([_norm(embeds, w["input_layernorm.weight"]), _norm(hidden, w["hidden_norm.weight"])], -1)
        else:
            x = residual = torch.cat([embeds, hidden], -1) @ w["fc.weight"].T + w["fc.bias"]
        x = residual + self._attend(x, w, positions)
        y = _norm(x, w["post_attention_layernorm.weight"])
        gate = F.silu(y @ w["mlp.gate_proj.weight"].T) * (y @ w["mlp.up_proj.weight"].T)
        out = x + gate @ w["mlp.down_proj.weight"].T
        head = w.get("lm_head.weight")
        head = self.target.get_output_embeddings().weight if head is None else head
        return (_norm(out, w["norm.weight"]) if self.eagle3 else out) @ head.T, out

    def _attend(self, x: torch.Tensor, w: dict[str, torch.Tensor], positions: torch.Tensor) -> torch.Tensor:
        c, n = self.config, len(x)
        heads, kv_heads, dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        frequencies = c["rope_theta"] ** (-torch.arange(0, dim, 2).float() / dim)
        angles = torch.cat([positions[:, None] * frequencies] * 2, -1)

        def rotate(y: torch.Tensor) -> torch.Tensor:
            half = torch.cat([-y[..., dim // 2 :], y[..., : dim // 2]], -1)
            return y * angles.cos() + half * angles.sin()

        q = rotate((x @ w["self_attn.q_proj.weight"].T).view(n, heads, dim).transpose(0, 1))
        k = rotate((x @ w["self_attn.k_proj.weight"].T).view(n, kv_heads, dim).transpose(0, 1))
        v = (x @ w["self_attn.v_proj.weight"].T).view(n, kv_heads, dim).transpose(0, 1)
        k, v = (y.repeat_interleave(heads // kv_heads, 0) for y in (k, v))
        scores = (q @ k.transpose(-1, -2) / dim**0.5).masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf"))
        return (scores.softmax(-1) @ v).transpose(0, 1).reshape(n, -1) @ w["self_attn.o_proj.weight"].T
