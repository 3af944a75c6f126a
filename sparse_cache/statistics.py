"""What a cache did and what it holds, in numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CacheStats:
    """Counts of one cache. Bytes are those of keys and values in budgeted and other layers."""

    tokens_seen: int
    """Columns seen: steps along the batch's token axis, padding included."""
    tokens_kept: int
    """Most tokens that a row stores in a budgeted layer, per KV head; on average where heads share
    their budget."""
    evictions: int
    """Evictions so far, each of one row in one layer."""
    tokens_evicted: int
    """Tokens evicted, summed over budgeted layers and rows (per KV head)."""
    bytes_held: int
    """Bytes allocated for keys and values, in use or not."""
    bytes_dense: int
    """Bytes that `DynamicCache` would hold for the same tokens."""
    bytes_bookkeeping: int
    """Bytes of positions, query windows, accumulated scores and the trace."""
    budgeted_layers: int
    """Layers under the budget."""
    other_layers: int
    """Layers left as transformers has them: sliding, chunked, linear, shared."""

    @property
    def share_of_dense(self) -> float:
        """`bytes_held / bytes_dense`; 1.0 before the first token."""
        return self.bytes_held / self.bytes_dense if self.bytes_dense else 1.0
