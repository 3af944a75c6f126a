"""Attention of one new token over a sparse cache, which also says what each key received."""

from .api import DecodeAttention, decode_attention

__all__ = ["DecodeAttention", "decode_attention"]
