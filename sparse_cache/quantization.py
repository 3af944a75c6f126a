"""Keys and values in 8 bits, with one scale for each token of a head."""

from __future__ import annotations

import torch

QUANTIZATIONS = (None, "int8")
SCALES = {"keys": "key_scales", "values": "value_scales"}
"""Under which name the scales of a tensor are stored."""
_LARGEST = 127


def quantize(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round tokens to 255 levels between minus and plus their largest absolute coordinate.

    Symmetric absolute-maximum quantization, as in LLM.int8() (https://arxiv.org/abs/2208.07339)
    with vectors of one token of one head. No coordinate is off by more than half a level, which is
    1/254 of the token's largest absolute coordinate, plus the rounding of float32 (2e-7 of the
    largest, and 1e-43, which is all that is left of tokens as small as that) and that of the dtype
    in which `dequantize` gives it back.

    Args:
        tokens: `[..., D]`, floating point.

    Returns:
        int8 `[..., D]` and scales float32 `[...]`; NaN or infinity in a token makes its scale just
        that and what `dequantize` gives back NaN, so that it is not lost.
    """
    scales = tokens.abs().amax(dim=-1).float() / _LARGEST
    levels = tokens.float() / scales.where(scales != 0, 1.0).unsqueeze(-1)
    return levels.round().clamp(-_LARGEST, _LARGEST).nan_to_num(0.0).to(torch.int8), scales


def dequantize(levels: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tokens that `quantize` rounded.

    Args:
        levels: int8 `[..., D]`.
        scales: float32 `[...]`.
        dtype: of the result.

    Returns:
        `[..., D]`; the product is made in float32.
    """
    return (levels.float() * scales.unsqueeze(-1)).to(dtype)
