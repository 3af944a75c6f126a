"""Which tokens of the chunk being processed are real, row by row."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from .errors import UnsupportedModelError


@dataclass(frozen=True)
class Chunk:
    """One call of the model: `length` new columns after `start` columns already seen.

    A column is one step along the batch's token axis, padding included.
    """

    start: int
    length: int
    real: list[int] | None
    """Real tokens in each row's chunk; None: all of them."""
    mask: torch.Tensor | None
    """`[B, length]` boolean, True for real tokens; None: all of them."""
    seen_mask: torch.Tensor | None
    """`[B, start]` boolean, given only if it hides tokens that were real when they came."""

    @functools.cached_property
    def padding_first(self) -> torch.Tensor | None:
        """`[B, length]` columns of the chunk with each row's padding moved to its front; None if
        it is there already."""
        if self.mask is None or not bool((self.mask[:, :-1] & ~self.mask[:, 1:]).any()):
            return None
        return self.mask.int().sort(dim=-1, stable=True).indices

    @classmethod
    def unpadded(cls, start: int, length: int) -> Chunk:
        """A chunk whose tokens are all real."""
        return cls(start, length, None, None, None)

    @classmethod
    def from_attention_mask(
        cls,
        attention_mask: torch.Tensor | None,
        start: int,
        length: int,
        real_seen: list[int],
        seen_mask: torch.Tensor | None,
    ) -> Chunk:
        """Read a chunk off the 2D mask `[B, start + length]` that the model was called with.

        Args:
            attention_mask: True or non-zero for real tokens; None when there is no padding.
            start: columns seen before this chunk.
            length: columns of this chunk.
            real_seen: real tokens seen before, per row; empty before the first chunk.
            seen_mask: `[B, start]`, which of the columns seen were real when they came; None: all.

        Raises:
            UnsupportedModelError: right padding, or a mask of another length.
        """
        if attention_mask is None:
            return cls.unpadded(start, length)
        _check_mask_length(attention_mask.shape[-1], start, length)
        mask = attention_mask.bool()
        batch = mask.shape[0]
        if real_seen and len(real_seen) != batch:
            return cls.unpadded(start, length)  # the layer, which knows both sizes, reports it
        before, chunk_mask = mask[:, :start], mask[:, start:]
        if length == 1:
            # One look at the device while decoding: the counts, and the newest column.
            *counts, newest = torch.cat([mask.sum(-1), chunk_mask.all().long()[None]]).tolist()
            if newest and counts == [seen + 1 for seen in real_seen or [0] * batch]:
                return cls.unpadded(start, length)
        if bool((chunk_mask.any(-1) & ~chunk_mask[:, -1]).any()):
            raise UnsupportedModelError(
                "attention_mask has padding to the right of real tokens; a cache appends after "
                "the last column, so pad on the left (tokenizer.padding_side = 'left')."
            )
        expected = torch.ones_like(before) if seen_mask is None else seen_mask.to(before.device)
        all_real = bool(chunk_mask.all())
        return cls(
            start,
            length,
            None if all_real else chunk_mask.sum(-1).tolist(),
            None if all_real else chunk_mask,
            None if torch.equal(before, expected) else before,
        )


def _check_mask_length(columns: int, start: int, length: int) -> None:
    if columns == start + length:
        return
    if start == 0:
        raise UnsupportedModelError(
            f"attention_mask covers {columns} tokens but the cache has seen none before these "
            f"{length}: either earlier calls did not write to it (generation in train mode with "
            "gradient checkpointing drops the cache; call model.eval() first), or the mask belongs "
            "to a longer text."
        )
    raise UnsupportedModelError(
        f"attention_mask covers {columns} tokens but the cache has seen {start} before these "
        f"{length}; to continue, pass the whole conversation, and for another prompt call "
        "cache.reset() or make a new cache."
    )
