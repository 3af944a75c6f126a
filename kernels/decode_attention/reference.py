"""Plain torch in float32. Only slots that hold tokens are touched, through slices, not copies."""

from __future__ import annotations

from collections.abc import Iterator

import torch


def decode_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    mass: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.decode_attention.decode_attention`; lengths are `[B, H]` here.

    Reads lengths and offsets on the host. The product of heads with one length is one matmul.
    """
    heads = lengths.shape[1]
    grouped = query[:, :, 0].unflatten(1, (heads, query.shape[1] // heads))
    output = query.new_zeros(*grouped.shape[:3], values.shape[3])
    log_sum_exp = query.new_empty(grouped.shape[:3], dtype=torch.float32)
    group_sinks = None if sinks is None else sinks.float().view(heads, -1)
    for rows, own_heads, stored_heads, slots in _blocks(lengths, offsets):
        stored = (rows, stored_heads, slots)
        logits = grouped[rows, own_heads].float() @ keys[stored].float().transpose(-1, -2)
        logits = logits * scaling
        if key_scales is not None:
            logits = logits * key_scales[stored].unsqueeze(-2)
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        total = logits.logsumexp(dim=-1)
        if group_sinks is not None:
            total = torch.logaddexp(total, group_sinks[own_heads])
        log_sum_exp[rows, own_heads] = total
        if logits.shape[-1] == 0:
            continue
        probabilities = (logits - total.unsqueeze(-1)).exp()
        if mass is not None:
            mass[stored] += probabilities.mean(dim=-2)
        if value_scales is not None:
            probabilities = probabilities * value_scales[stored].unsqueeze(-2)
        output[rows, own_heads] = (probabilities @ values[stored].float()).to(output.dtype)
    return output.flatten(1, 2).unsqueeze(2), log_sum_exp.flatten(1, 2)


def _blocks(
    lengths: torch.Tensor, offsets: torch.Tensor | None
) -> Iterator[tuple[slice, slice, slice, slice]]:
    """Rows, KV heads, heads of the storage and slots, for the largest parts of one length."""
    table: list[list[int]] = lengths.tolist()
    batch, heads = lengths.shape
    if offsets is not None:
        starts: list[list[int]] = offsets.tolist()
        for row in range(batch):
            for head in range(heads):
                start = starts[row][head]
                slots = slice(start, start + table[row][head])
                yield slice(row, row + 1), slice(head, head + 1), slice(0, 1), slots
    elif len({length for row in table for length in row}) == 1:
        yield slice(0, batch), slice(0, heads), slice(0, heads), slice(0, table[0][0])
    else:
        for row in range(batch):
            own = slice(row, row + 1)
            if len(set(table[row])) == 1:
                yield own, slice(0, heads), slice(0, heads), slice(0, table[row][0])
                continue
            for head in range(heads):
                one = slice(head, head + 1)
                yield own, one, one, slice(0, table[row][head])
