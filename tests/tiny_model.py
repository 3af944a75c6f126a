"""A tiny random model with a tokenizer of its own, saved as a folder, for tests of commands."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.masking_utils import create_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sparse_cache import SparseBudgetCache


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, ids 0 to 255, and an end-of-text token 256."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")


def tiny_llama(seed: int = 0) -> LlamaForCausalLM:
    """Three layers, four query heads on two KV heads, for [`byte_tokenizer`]; never ends a text."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.4,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def save_tiny_model(folder: Path) -> Path:
    """Write both to `folder` and return it."""
    tiny_llama().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


_ATTENTION = torch.nn.Identity()


def feed(cache: SparseBudgetCache, states: torch.Tensor) -> None:
    """Give a cache tokens `[B, H, T, D]` as a model of one layer does, mask and attention included.

    A cache refuses tokens whose masks were made out of its sight, so updating it is not enough.
    """
    config = LlamaConfig(
        hidden_size=8, num_attention_heads=1, num_hidden_layers=1, attn_implementation="sdpa"
    )
    create_causal_mask(config, states[:, 0], None, cache)
    keys, values = cache.update(states, states, 0)
    ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", None)(_ATTENTION, states, keys, values, None)
