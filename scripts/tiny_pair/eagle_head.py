"""An EAGLE-3 head in plain PyTorch, under the names that its checkpoint has (Li et al., 2025).

The head reads two things at position i: the embedding of token i + 1 and features of the target at position i (three of
its layers, side by side). It predicts token i + 2. A second draft token has no target features to read: its step takes
the head's own output in their place.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class HeadShape:
    """Sizes of a head, as named in ``config.json``.

    Attributes
    ----------
    layers : tuple of int
        Layers of the target whose output is read, counted from 0.
    """

    vocab_size: int
    draft_vocab_size: int
    hidden_size: int = 256
    intermediate_size: int = 768
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 128
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 2048
    layers: tuple[int, ...] = (1, 3, 6)

    def to_config(self) -> dict[str, object]:
        """Return the ``config.json`` that SGLang's ``LlamaForCausalLMEagle3`` reads."""
        sizes = asdict(self)
        layers = sizes.pop("layers")
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "bos_token_id": None,
            "eos_token_id": 2,
            "pad_token_id": 0,
            **sizes,
            "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": list(layers)},
        }

    @classmethod
    def from_config(cls, config: dict[str, object]) -> HeadShape:
        """Read the shape back from :meth:`to_config`."""
        names = [name for name in cls.__dataclass_fields__ if name != "layers"]
        layers = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        return cls(**{name: config[name] for name in names}, layers=tuple(layers))


def rotate(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Apply rotary embeddings to ``x`` of shape ``(rows, heads, width, dim)`` at ``positions`` ``(width,)``."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = positions.float()[:, None] * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Attention(nn.Module):
    """Attention whose input is an embedding and a feature side by side."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(2 * shape.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(2 * shape.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(2 * shape.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, depth: int, past: list[Pair]) -> torch.Tensor:
        """Attend from the chains that start at every position, at their step ``depth``.

        The chain that started at position i sees the first step of all positions up to i and its own later steps.

        Parameters
        ----------
        x : Tensor
            ``(rows, width, 2 * hidden)``; column i belongs to the chain started at i.
        depth : int
            Steps already made.
        past : list of (Tensor, Tensor)
            Keys and values of the earlier steps; those of this step are appended.

        Returns
        -------
        Tensor
            ``(rows, width, hidden)``.
        """
        s, (rows, width, _) = self.shape, x.shape
        positions = torch.arange(width, device=x.device) + depth
        split = lambda y, heads: y.view(rows, width, heads, s.head_dim).transpose(1, 2)  # noqa: E731
        groups = s.num_attention_heads // s.num_key_value_heads
        query = rotate(split(self.q_proj(x), s.num_attention_heads), positions, s.rope_theta) * s.head_dim**-0.5
        key = rotate(split(self.k_proj(x), s.num_key_value_heads), positions, s.rope_theta)
        value = split(self.v_proj(x), s.num_key_value_heads)
        past.append((key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)))
        future = torch.ones(width, width, dtype=torch.bool, device=x.device).triu(1)
        scores = [(query @ past[0][0].transpose(-1, -2)).float().masked_fill(future, float("-inf"))]
        scores += [(query * k).sum(-1, keepdim=True).float() for k, _ in past[1:]]
        shares = torch.cat(scores, -1).softmax(-1).to(value.dtype)
        out = shares[..., :width] @ past[0][1]
        for step, (_, v) in enumerate(past[1:]):
            out = out + shares[..., width + step, None] * v
        return self.o_proj(out.transpose(1, 2).reshape(rows, width, -1))


class Mlp(nn.Module):
    """Gated MLP."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return an output of the input's shape."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """The head's one decoder layer."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        norm = lambda: nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)  # noqa: E731
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = norm(), norm(), norm()
        self.self_attn, self.mlp = Attention(shape), Mlp(shape)

    def forward(self, embeds: torch.Tensor, hidden: torch.Tensor, depth: int, past: list[Pair]) -> torch.Tensor:
        """Return the new hidden states, ``(rows, width, hidden)``, before the last norm."""
        x = torch.cat([self.input_layernorm(embeds), self.hidden_norm(hidden)], dim=-1)
        hidden = hidden + self.self_attn(x, depth, past)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class EagleHead(nn.Module):
    """The head without embeddings: they are the target's.

    Parameters
    ----------
    shape : HeadShape
        Sizes.
    kept : Tensor
        Target ids of the draft vocabulary, ascending, ``(draft_vocab_size,)``.
    """

    def __init__(self, shape: HeadShape, kept: torch.Tensor) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(len(shape.layers) * shape.hidden_size, shape.hidden_size, bias=False)
        self.midlayer = Layer(shape)
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.draft_vocab_size, bias=False)
        self.register_buffer("kept", kept)

    def step(self, embeds: torch.Tensor, hidden: torch.Tensor, depth: int, past: list[Pair]) -> Pair:
        """Make one step of every chain.

        Parameters
        ----------
        embeds : Tensor
            Embeddings of the tokens fed, ``(rows, width, hidden)``.
        hidden : Tensor
            Features after :attr:`fc` for the first step, the previous step's second result then.
        depth : int
            Steps already made.
        past : list of (Tensor, Tensor)
            Keys and values, appended to.

        Returns
        -------
        (Tensor, Tensor)
            Logits over the draft vocabulary, and the hidden states to feed back.
        """
        hidden = self.midlayer(embeds, hidden, depth, past)
        return self.lm_head(self.norm(hidden)), hidden

    def save(self, folder: Path) -> None:
        """Write ``config.json`` and ``model.safetensors`` in bfloat16 as published EAGLE-3 heads are."""
        folder.mkdir(parents=True, exist_ok=True)
        weights = {k: v.to(torch.bfloat16).cpu().contiguous() for k, v in self.state_dict().items() if k != "kept"}
        kept = self.kept.cpu()
        in_draft = torch.zeros(self.shape.vocab_size, dtype=torch.bool)
        in_draft[kept] = True
        weights |= {"d2t": kept - torch.arange(len(kept)), "t2d": in_draft}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(self.shape.to_config(), indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path) -> EagleHead:
        """Read a head written by :meth:`save`, in float32."""
        shape = HeadShape.from_config(json.loads((folder / "config.json").read_text()))
        weights = load_file(folder / "model.safetensors")
        d2t, _ = weights.pop("d2t"), weights.pop("t2d")
        head = cls(shape, d2t + torch.arange(len(d2t)))
        head.load_state_dict({k: v.float() for k, v in weights.items()} | {"kept": head.kept})
        return head.eval()
