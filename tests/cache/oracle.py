"""The truth for a Llama under eviction: a dense forward written out, with the mask spelled out.

Nothing of transformers' attention, masks or caches is used, only the weights of the model. Nothing
is evicted: token `j` is hidden from query `i` of a head exactly when the trace says so.
"""

from __future__ import annotations

import torch
from transformers import LlamaForCausalLM


def visible(deaths: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Which key each query sees: `[B, H, T, T]` boolean from deaths `[B, H, T]` and `[B, T]`."""
    batch, heads, length = deaths.shape
    seen = torch.zeros(batch, heads, length, length, dtype=torch.bool)
    query = torch.arange(length).view(1, 1, length, 1)
    key = torch.arange(length).view(1, 1, 1, length)
    seen |= (key <= query) & (query < deaths.view(batch, heads, 1, length))
    seen &= real.bool().view(batch, 1, 1, length)
    # A padding query sees itself, so that its softmax is defined; its output is never looked at.
    seen |= (key == query) & ~real.bool().view(batch, 1, length, 1)
    return seen


def _normed(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + epsilon).sqrt() * weight


def _rotated(x: torch.Tensor, positions: torch.Tensor, base: float) -> torch.Tensor:
    """Rotary embedding of `[B, H, T, D]`: coordinate pairs `(d, d + D/2)` turn with position."""
    half = x.shape[-1] // 2
    speed = base ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = positions[:, None, :, None].double() * speed
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


@torch.no_grad()
def dense_logits(
    model: LlamaForCausalLM,
    input_ids: torch.Tensor,
    real: torch.Tensor,
    deaths: list[torch.Tensor],
) -> torch.Tensor:
    """Logits `[B, T, V]` in float64; those of padding columns mean nothing.

    Args:
        model: a Llama without biases.
        input_ids: `[B, T]`.
        real: `[B, T]`, non-zero for real tokens, wherever the padding lies.
        deaths: per layer `[B, H, T]`, the column from which a token is hidden.
    """
    config = model.config
    size = config.head_dim
    positions = (real.long().cumsum(-1) - 1).clamp(min=0)
    weights = {name: tensor.double() for name, tensor in model.state_dict().items()}
    x = weights["model.embed_tokens.weight"][input_ids]
    for index, death in enumerate(deaths):
        layer = f"model.layers.{index}."
        mask = visible(death.long(), real)
        h = _normed(x, weights[layer + "input_layernorm.weight"], config.rms_norm_eps)

        def heads(name: str, h: torch.Tensor = h, layer: str = layer) -> torch.Tensor:
            projected = h @ weights[f"{layer}self_attn.{name}_proj.weight"].T
            return projected.unflatten(-1, (-1, size)).transpose(1, 2)

        base = config.rope_parameters["rope_theta"]
        query = _rotated(heads("q"), positions, base)
        key = _rotated(heads("k"), positions, base)
        value = heads("v")
        outputs = []
        for head in range(query.shape[1]):
            owner = head // (query.shape[1] // key.shape[1])
            logits = query[:, head] @ key[:, owner].transpose(-1, -2) / size**0.5
            logits = logits.masked_fill(~mask[:, owner], float("-inf"))
            outputs.append(logits.softmax(-1) @ value[:, owner])
        x = x + torch.cat(outputs, dim=-1) @ weights[layer + "self_attn.o_proj.weight"].T
        h = _normed(x, weights[layer + "post_attention_layernorm.weight"], config.rms_norm_eps)
        gate = torch.nn.functional.silu(h @ weights[layer + "mlp.gate_proj.weight"].T)
        up = h @ weights[layer + "mlp.up_proj.weight"].T
        x = x + (gate * up) @ weights[layer + "mlp.down_proj.weight"].T
    x = _normed(x, weights["model.norm.weight"], config.rms_norm_eps)
    return x @ weights["lm_head.weight"].T
