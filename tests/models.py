"""Tiny random models for the tests: made in seconds, no network, always the same.

Their text is noise, which is what exactness tests want: every token is a close decision, and any slip in
positions, KV or acceptance changes it at once.

=============  ====================================================================================
``T``          target: Llama, fp32, 320 byte-level tokens, 512 positions
``D_same``     the target's weights: every greedy draft is right
``D_mid``      the target plus noise: drafts are right about every other time
``D_bad``      another seed: drafts are almost never right
``D_hid``      another hidden size and seed
``D_voc``      the target, its vocabulary padded by 64 rows
``D_tok``      the target's weights with a tokenizer that reads the ids differently
``D_ctx``      the target with room for 64 positions only
``Q``          another target: Qwen3 (per-head norms, tied embeddings)
``Q_mid``      ``Q`` plus noise
``S``          target of the law tests: 16 tokens, flat logits, no tokenizer
``S_near``     a draft that resembles ``S``
``S_far``      a draft that resembles it less
``L``, ``B``, ``S4``
               targets of the EAGLE heads in ``heads.py``, which also lists those
=============  ====================================================================================
"""

from __future__ import annotations

from pathlib import Path

import torch

from tests.heads import build_eagle, build_eagle3

VOCAB_SIZE = 320
PADDED_VOCAB_SIZE = VOCAB_SIZE + 64
SMALL_VOCAB_SIZE = 16
CONTEXT_LEN = 512
SHORT_CONTEXT_LEN = 64

BOS, EOS, THINK, THINK_END = 1, 2, 3, 4
# What the generator puts before the bytes; D_tok rotates all that follows.
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<think>", "</think>")


def build_tokenizer(rotate: int = 0):
    """A byte-level tokenizer without merges: one token per byte, the rest unused.

    ``rotate`` shifts the meaning of all ids that are not special.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += [f"<x{i}>" for i in range(VOCAB_SIZE - len(tokens))]
    kept, moved = tokens[: len(SPECIAL_TOKENS)], tokens[len(SPECIAL_TOKENS) :]
    tokens = kept + moved[rotate:] + moved[:rotate]
    core = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [], unk_token=None))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=["<think>", "</think>"],
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return tokenizer


def _shape(hidden: int, vocab: int, context: int, spread: float, layers: int = 2) -> dict:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": context,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": 0,
        "initializer_range": spread,
    }


def _llama(
    seed: int,
    *,
    hidden: int = 64,
    vocab: int = VOCAB_SIZE,
    context: int = CONTEXT_LEN,
    spread: float = 0.35,
    layers: int = 2,
):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(**_shape(hidden, vocab, context, spread, layers), tie_word_embeddings=False)
    return LlamaForCausalLM(config).float().eval()


def _qwen(seed: int):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(**_shape(64, VOCAB_SIZE, CONTEXT_LEN, 0.35), tie_word_embeddings=True)
    return Qwen3ForCausalLM(config).float().eval()


@torch.no_grad()
def _add_noise(model, share: float):
    """Perturb every weight by ``share`` of its tensor's spread; returns the model."""
    generator = torch.Generator().manual_seed(5)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.add_(torch.randn(weight.shape, generator=generator) * share * weight.std())
    return model


@torch.no_grad()
def _pad_vocabulary(model, padded):
    """Copy ``model`` into the larger ``padded``; the rows beyond get logits that would win if nobody cut them off."""
    source = model.state_dict()
    for name, weight in padded.named_parameters():
        rows = source[name].shape[0]
        weight[:rows].copy_(source[name])
    padded.lm_head.weight[VOCAB_SIZE:] = 4 * source["lm_head.weight"][:64]
    return padded


@torch.no_grad()
def _flatten(model, scale: float):
    """Scale the logits, so that many tokens have a fair chance."""
    model.lm_head.weight.mul_(scale)
    return model


@torch.no_grad()
def _damp(model):
    """Let the layers add little to the embedding: the next token depends mostly on the last one."""
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.mul_(0.006)
        layer.mlp.down_proj.weight.mul_(0.003)
    return model


def build_models(folder: Path) -> Path:
    """Write every model of the table above into ``folder`` and return it."""
    plain = build_tokenizer()
    small = {"vocab": SMALL_VOCAB_SIZE, "context": 64}
    models = {
        "T": _llama(0),
        "D_same": _llama(0),
        "D_mid": _add_noise(_llama(0), 0.02),
        "D_bad": _llama(9),
        "D_hid": _llama(3, hidden=32),
        "D_voc": _pad_vocabulary(_llama(0), _llama(0, vocab=PADDED_VOCAB_SIZE)),
        "D_ctx": _llama(0, context=SHORT_CONTEXT_LEN),
        "Q": _qwen(1),
        "Q_mid": _add_noise(_qwen(1), 0.02),
        "S": _flatten(_llama(20, **small), 0.5),
        "L": _llama(4, layers=4),
        "B": _damp(_llama(5, layers=4)),
        "S4": _flatten(_llama(21, layers=4, **small), 0.5),
        "S_near": _flatten(_add_noise(_llama(20, **small), 0.1), 0.5),
        "S_far": _flatten(_add_noise(_llama(20, **small), 0.4), 0.5),
    }
    for name, model in models.items():
        model.save_pretrained(folder / name)
        if not name.startswith("S"):
            plain.save_pretrained(folder / name)
    build_eagle3(folder / "L_e3", VOCAB_SIZE, SHORT_CONTEXT_LEN, 200, 31)
    build_eagle3(folder / "L_e3s", VOCAB_SIZE, CONTEXT_LEN, None, 32)
    build_eagle(folder / "L_e1", VOCAB_SIZE, CONTEXT_LEN, 33)
    build_eagle(folder / "B_e1", VOCAB_SIZE, CONTEXT_LEN, 35, mimic=True)
    build_eagle3(folder / "S_e3", SMALL_VOCAB_SIZE, 64, SMALL_VOCAB_SIZE - 4, 34)
    models["T"].save_pretrained(folder / "D_tok")
    build_tokenizer(rotate=37).save_pretrained(folder / "D_tok")
    return folder
