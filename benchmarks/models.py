"""The models that are measured: random ones of a few sizes, and the embedded real one."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

RANDOM_SIZES: dict[str, dict[str, int]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
    },
    "small": {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 8192,
    },
}
"""Llama-like shapes by name. `tiny` has a byte vocabulary, so that any text can be fed to it."""


class ByteTokenizer:
    """Text as UTF-8 bytes: enough of a tokenizer for models with random weights."""

    def encode(self, text: str) -> list[int]:
        """The bytes of `text` as token ids."""
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        """The text of `tokens`, with a mark for bytes that are not UTF-8."""
        return bytes(tokens).decode(errors="replace")


def random_model(size: str, seed: int = 0) -> LlamaForCausalLM:
    """A Llama-like model with random weights, float32, in eval mode.

    Raises:
        ValueError: `size` is not one of `RANDOM_SIZES`.
    """
    if size not in RANDOM_SIZES:
        known = ", ".join(RANDOM_SIZES)
        raise ValueError(f"size={size!r} is unknown; known sizes: {known}.")
    torch.manual_seed(seed)
    config = LlamaConfig(
        **RANDOM_SIZES[size],
        max_position_embeddings=65536,
        # No token may end a generation early: every run must decode as many tokens as it says.
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
        initializer_range=0.1,
    )
    model = LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    return model


def open_model(name: str, seed: int = 0) -> tuple[Any, Any]:
    """The model and tokenizer called `name`: `embedded`, a random size, or a transformers folder.

    Models are float32 and in eval mode. Random models come with a [`ByteTokenizer`].
    """
    if name in RANDOM_SIZES:
        return random_model(name, seed), ByteTokenizer()
    if name == "embedded":
        from sparse_cache.embedded_model import load_embedded_model

        model, tokenizer = load_embedded_model()
    else:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(name)
    return model.float().eval(), tokenizer


def cache_argument(model: Any) -> str:
    """The name under which `model.forward` takes a cache: transformers 5.24 renamed it."""
    names = inspect.signature(model.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def forward(model: Any, tokens: torch.Tensor, cache: Any, **more: Any) -> torch.Tensor:
    """Logits `[B, T, V]` of `tokens` `[B, T]` after what `cache` has seen."""
    return model(input_ids=tokens, **{cache_argument(model): cache}, **more).logits


def token_bytes(model: Any) -> int:
    """Bytes of keys and values that one token of one row needs over all layers of `model`."""
    config = model.config.get_text_config()
    head_size = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    element = torch.finfo(model.dtype).bits // 8
    return 2 * config.num_hidden_layers * config.num_key_value_heads * head_size * element
