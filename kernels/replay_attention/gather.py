"""Attention block by block with the keys that are alive, in torch, on any device.

For a block of queries of a KV head, K and V being its living prefix and its own columns, and `L`
the log-sum-exp of a query's visible logits: `S = Q K^T * scaling`, `P = exp(S - L)`, `O = P V`.
Backward: `dV = P^T dO`, `dS = P * (dO V^T - rowsum(dO * O))`, `dQ = dS K`, `dK = dS^T Q`.

Only one block's `S` exists at a time. A block's keys are distinct, and blocks follow each other, so
the sums of `dK` and `dV` have one order: results are the same in every run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .periods import Block, blocks_of


@dataclass
class _Row:
    """Queries, keys and values of one row, by KV head, wide and contiguous."""

    queries: torch.Tensor
    """`[H, G, T, D]`, scaled."""
    keys: torch.Tensor
    """`[H, T, D]`."""
    values: torch.Tensor
    """`[H, T, Dv]`."""
    ends: torch.Tensor
    """`[H or 1, T + 1]` int32: deaths, and 0 for no token."""

    def index(self, block: Block) -> torch.Tensor:
        """Where the keys of the block's prefix lie in a flat `[H * T]`: `[H * W]`."""
        assert isinstance(block.prefix, torch.Tensor)
        heads, length = self.keys.shape[:2]
        start = torch.arange(heads, device=block.prefix.device)[:, None] * length
        return (block.prefix.clamp(max=length - 1) + start).flatten()

    def seen(self, tensor: torch.Tensor, block: Block) -> torch.Tensor:
        """Of keys or values, those of the block: `[H, W + n, D]`."""
        own = tensor[:, block.start : block.stop]
        if isinstance(block.prefix, slice):
            if block.prefix.stop == block.start:
                return tensor[:, block.prefix.start : block.stop]
            older = tensor[:, block.prefix]
        else:
            older = tensor.flatten(0, 1).index_select(0, self.index(block))
            older = older.view(tensor.shape[0], -1, tensor.shape[2])
        return torch.cat([older, own], dim=1)

    def logits(self, block: Block, keys: torch.Tensor, softcap: float | None) -> torch.Tensor:
        """`[H, G, n, W + n]`, not masked."""
        queries = self.queries[:, :, block.start : block.stop]
        logits = torch.bmm(queries.flatten(1, 2), keys.transpose(1, 2))
        if softcap is not None:
            logits = logits.div_(softcap).tanh_().mul_(softcap)
        return logits.view(*queries.shape[:3], -1)

    def hide(self, block: Block, logits: torch.Tensor) -> torch.Tensor:
        """-inf for what a query does not see, in place."""
        own = torch.arange(block.start, block.stop, device=logits.device)
        if block.is_causal:
            logits[..., block.width :].masked_fill_(own > own[:, None], float("-inf"))
            return logits
        if isinstance(block.prefix, slice):
            older = torch.arange(block.prefix.start, block.prefix.stop, device=logits.device)
            older = older.expand(self.ends.shape[0], -1)
        else:
            older = block.prefix
        columns = torch.cat([older, own.expand(older.shape[0], -1)], dim=1)
        ends = self.ends.gather(1, columns)[:, None, :]
        query = own[:, None]
        is_padding = self.ends[:, block.start : block.stop, None] == 0
        hidden = (columns[:, None, :] > query) | (ends <= query) | is_padding
        return logits.masked_fill_(hidden[:, None], float("-inf"))


def _rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    deaths: torch.Tensor,
    row: int,
    scaling: float,
) -> _Row:
    wide = torch.promote_types(query.dtype, torch.float32)
    heads = key.shape[1]
    ends = torch.nn.functional.pad(deaths[row], (0, 1))
    queries = (query[row].to(wide) * scaling).unflatten(0, (heads, -1)).contiguous()
    keys, values = (tensor[row].to(wide).contiguous() for tensor in (key, value))
    padding = (deaths[row] == 0).all(0)
    if bool(padding.any()):
        # Nothing of a padding column may reach the sums, not even 0 * NaN.
        queries, keys, values = (
            tensor.masked_fill(padding[:, None], 0) for tensor in (queries, keys, values)
        )
    return _Row(queries, keys, values, ends)


def _by_row(blocks: list[Block]) -> dict[int, list[Block]]:
    found: dict[int, list[Block]] = {}
    for block in blocks:
        found.setdefault(block.row, []).append(block)
    return found


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    deaths: torch.Tensor,
    *,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output `[B, Hq, T, Dv]`, and log-sum-exp `[B, Hq, T]` (inf where a query sees nothing)."""
    wide = torch.promote_types(query.dtype, torch.float32)
    batch, query_heads, length = query.shape[:3]
    heads = key.shape[1]
    output = query.new_zeros(batch, query_heads, length, value.shape[3])
    log_sum_exp = query.new_full((batch, query_heads, length), float("inf"), dtype=wide)
    for row, blocks in _by_row(blocks_of(deaths)).items():
        tensors = _rows(query, key, value, deaths, row, scaling)
        for block in blocks:
            keys = tensors.seen(tensors.keys, block)
            logits = tensors.hide(block, tensors.logits(block, keys, softcap))
            top = logits.amax(-1, keepdim=True)
            if sinks is not None:
                sink = sinks.to(wide).view(heads, -1, 1, 1)
                top = torch.maximum(top, sink)
            top.clamp_(min=torch.finfo(wide).min)
            weights = logits.sub_(top).exp_()
            total = weights.sum(-1, keepdim=True)
            if sinks is not None:
                total = total + (sink - top).exp()
            result = torch.bmm(weights.flatten(1, 2), tensors.seen(tensors.values, block))
            result = result.view(*weights.shape[:3], -1) / total.masked_fill(total == 0, 1)
            columns = slice(block.start, block.stop)
            output[row, :, columns] = result.flatten(0, 1).to(output.dtype)
            ends = (top + total.log()).masked_fill(total == 0, float("inf"))
            log_sum_exp[row, :, columns] = ends.flatten(0, 1)[..., 0]
    return output, log_sum_exp


def backward(
    grad_output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    deaths: torch.Tensor,
    output: torch.Tensor,
    log_sum_exp: torch.Tensor,
    *,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gradients of query, key, value and sinks, in their dtypes."""
    wide = log_sum_exp.dtype
    heads = key.shape[1]
    grads = [
        torch.zeros_like(tensor, memory_format=torch.contiguous_format)
        for tensor in (query, key, value)
    ]
    delta = (grad_output.to(wide) * output.to(wide)).sum(-1)
    for row, blocks in _by_row(blocks_of(deaths)).items():
        tensors = _rows(query, key, value, deaths, row, scaling)
        grad_keys, grad_values = (torch.zeros_like(t) for t in (tensors.keys, tensors.values))
        for block in blocks:
            columns = slice(block.start, block.stop)
            keys = tensors.seen(tensors.keys, block)
            values = tensors.seen(tensors.values, block)
            logits = tensors.logits(block, keys, softcap)
            slope = None if softcap is None else 1 - (logits / softcap).square()

            def by_head(
                tensor: torch.Tensor, row: int = row, columns: slice = columns
            ) -> torch.Tensor:
                return tensor[row, :, columns].to(wide).unflatten(0, (heads, -1))

            ends = by_head(log_sum_exp)[..., None]
            weights = tensors.hide(block, logits).sub_(ends).exp_()
            grad = by_head(grad_output).flatten(1, 2)
            inner = torch.bmm(grad, values.transpose(1, 2)).view_as(weights)
            inner.sub_(by_head(delta)[..., None]).mul_(weights)
            if slope is not None:
                inner.mul_(slope)
            inner, weights = inner.flatten(1, 2), weights.flatten(1, 2)
            queries = tensors.queries[:, :, columns].flatten(1, 2)
            grad_queries = torch.bmm(inner, keys).mul_(scaling)
            grads[0][row, :, columns] = grad_queries.view(
                query.shape[1], block.stop - block.start, -1
            ).to(query.dtype)
            _add(grad_keys, torch.bmm(inner.transpose(1, 2), queries), block, tensors)
            _add(grad_values, torch.bmm(weights.transpose(1, 2), grad), block, tensors)
        grads[1][row] = grad_keys.to(key.dtype)
        grads[2][row] = grad_values.to(value.dtype)
    grad_sinks = None
    if sinks is not None:
        share = (sinks.to(wide)[None, :, None] - log_sum_exp).exp()
        grad_sinks = -(share * delta).sum((0, 2)).to(sinks.dtype)
    return grads[0], grads[1], grads[2], grad_sinks


def _add(total: torch.Tensor, part: torch.Tensor, block: Block, tensors: _Row) -> None:
    """Add the gradients of a block's keys `[H, W + n, D]` to those of all, `[H, T, D]`."""
    width = block.width
    total[:, block.start : block.stop] += part[:, width:]
    if isinstance(block.prefix, slice):
        total[:, block.prefix] += part[:, :width]
    else:
        older = part[:, :width].reshape(-1, part.shape[2])
        total.flatten(0, 1).index_add_(0, tensors.index(block), older)
