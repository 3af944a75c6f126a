"""R-KV: attention of the last queries, minus redundancy among the keys."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from ..kernels.redundancy import redundancy
from ..kernels.window_importance import window_importance
from ._observation import (
    GROUP_REDUCTIONS,
    POOLINGS,
    check_choice,
    check_kernel_size,
    check_share,
    grouped_queries,
    pool,
    required_queries,
)
from .base import EvictionPolicy, LayersView, PolicyView, register_policy

# float32 numbers of the similarity matrix that are held at once: 8 MiB. Beside the memory it saves,
# a block of this size halves the time on CPUs, which larger ones spend on page faults.
_BLOCK_NUMBERS = 2**21
# Columns tried first. In SmolLM2-135M 92 to 100 % of the rows find a similar key there.
_RECENT = 64
_FIXED_POINT = 2.0**32


@register_policy("rkv")
@dataclass(frozen=True)
class RKVPolicy(EvictionPolicy):
    """Keep tokens that the last queries attend to and that do not repeat a later token.

    `score = w * importance - (1 - w) * redundancy`, with `w = importance_weight`.

    Importance: logits of the last `window` queries against the keys older than the window, reduced
    over the query heads of a group, softmaxed over those keys, averaged over the queries, pooled.
    Redundancy: cosine similarities between all keys of a head, without the diagonal and without,
    in each row, the last key above `similarity_threshold` (one copy of a repeated key is free);
    averaged over rows, softmaxed over all keys.

    `reference=True` computes what the published code does, to the bit for one row. With 0.1, "avg",
    "mean" that is the Sparse-RL form, with 0.07, "max", "max" the first R-KV release. The
    default differs from it in these points:

    1. Redundancy comes from each row's own keys; the published code uses those of row 0 for all.
    2. In a row of the matrix without any similar key nothing is forgiven; the published code
       clears its similarity with key 0, whatever it is.
    3. All is computed in float32; the published code works in the cache's dtype, except for the
       softmax of the importance.
    4. Logits are scaled as the model scales them; the published code always divides by the root
       of the head size.
    5. The similarity matrix is never held whole: column sums do not need it, and the key that a row
       forgives is looked for among the recent ones first.

    The published `retain_ratio` has no effect with its default direction and is left out.

    Raises:
        ValueError: an option is out of its range.
    """

    needs_queries: ClassVar[bool] = True
    paper: ClassVar[str] = "https://arxiv.org/abs/2505.24133"

    importance_weight: float = 0.5
    """Lambda of the paper, in [0, 1]: 1 is attention alone, 0 is redundancy alone. The published
    settings are 0.1 and 0.07; with the other options as here, 0.5 was closer to the dense model
    than 0.1 in every cell of docs/quality.md."""
    kernel_size: int = 7
    """Width of the pooling of the importance; odd, 1 for none."""
    pooling: str = "avg"
    """"avg" or "max"."""
    group_reduction: str = "mean"
    """"mean" or "max" of the logits over the query heads of a group, before the softmax."""
    similarity_threshold: float = 0.5
    """Cosine similarity above which two keys count as repeating each other, in [-1, 1]."""
    reference: bool = False
    """Reproduce the published code, its quirks included."""

    def __post_init__(self) -> None:
        check_share("importance_weight", self.importance_weight, 0, 1)
        check_kernel_size(self.kernel_size)
        check_choice("pooling", self.pooling, POOLINGS)
        check_choice("group_reduction", self.group_reduction, GROUP_REDUCTIONS)
        check_share("similarity_threshold", self.similarity_threshold, -1, 1)
        if not isinstance(self.reference, bool):
            raise ValueError(f"reference must be True or False, got {self.reference!r}.")

    def score(self, view: PolicyView) -> torch.Tensor:
        """Return importance minus redundancy, float32 `[B, H, S]`; 0 for the window itself.

        Raises:
            ValueError: the view carries no query.
        """
        older = view.keys.shape[2] - view.window
        importance = self._importance(view, older)
        redundancy = self._redundancy(view.keys)[..., :older]
        weight = self.importance_weight
        scores = importance * weight - redundancy * (1 - weight)
        return F.pad(scores.float(), (0, view.window))

    def score_layers(self, view: LayersView) -> torch.Tensor | None:
        """The same scores for all layers at once, float32 `[L, B, H, S]`; None for the reference.

        Raises:
            ValueError: the view carries no query.
        """
        if self.reference:
            return None
        importance = window_importance(
            required_queries(view.queries, self.name),
            view.keys,
            view.order,
            view.lengths,
            view.stored,
            window=view.window,
            scaling=view.scaling,
            group_reduction=self.group_reduction,
            key_scales=view.key_scales,
            implementation=view.implementation,
        )
        repeats = redundancy(
            view.keys,
            view.order,
            view.lengths,
            view.stored,
            similarity_threshold=self.similarity_threshold,
            key_scales=view.key_scales,
            implementation=view.implementation,
        )
        # Beyond the keys older than the window the importance is 0, as if there were nothing.
        scores = pool(importance.flatten(0, 1), self.kernel_size, self.pooling)
        scores = scores.view(importance.shape)
        return scores.mul_(self.importance_weight).sub_(repeats, alpha=1 - self.importance_weight)

    def _importance(self, view: PolicyView, older: int) -> torch.Tensor:
        """`[B, H, older]`, in the cache's dtype for the reference, else in float32."""
        queries, keys = grouped_queries(view, self.name), view.keys
        if self.reference:
            logits = queries @ keys[:, :, None].transpose(-1, -2) / math.sqrt(keys.shape[-1])
        else:
            logits = queries.float() @ keys[:, :, None].float().transpose(-1, -2) * view.scaling
        logits = logits.amax(2) if self.group_reduction == "max" else logits.mean(2)
        attention = logits[..., :older].softmax(dim=-1, dtype=torch.float32).mean(dim=-2)
        return pool(attention.to(logits.dtype), self.kernel_size, self.pooling)

    def _redundancy(self, keys: torch.Tensor) -> torch.Tensor:
        """`[B, H, S]` float32; for the reference `[1, H, S]` in the cache's dtype."""
        if self.reference:
            return _published_redundancy(keys[:1], self.similarity_threshold)
        keys = keys.float()
        stored = keys.shape[2]
        directions = keys / (keys.norm(dim=-1, keepdim=True) + 1e-8)
        # The sum of a column needs no matrix; only the forgiven key of each row does, and in most
        # rows that is a recent one, so the recent columns are tried first.
        summed = directions @ directions.sum(dim=2).unsqueeze(-1)
        total = summed.squeeze(-1) - directions.square().sum(dim=-1)
        older = max(stored - _RECENT, 0)
        rows = torch.arange(stored, device=keys.device).expand(keys.shape[:3])
        last, forgiven = self._last_similar(directions, directions[:, :, older:], rows - older)
        last = torch.where(last < 0, last, last + older)
        missed = (last < 0).sum(dim=-1).max().item()
        if missed and older:
            # Rows that found nothing come first; the found ones among them find the same again.
            rows = last.sort(dim=-1, stable=True).indices[..., : int(missed)]
            step = max(1, _BLOCK_NUMBERS // keys[..., 0].numel())
            for some in rows.split(step, dim=-1):
                chosen = directions.gather(2, some.unsqueeze(-1).expand(-1, -1, -1, keys.shape[3]))
                some_last, some_forgiven = self._last_similar(chosen, directions, some)
                last = last.scatter(-1, some, some_last)
                forgiven = forgiven.scatter(-1, some, some_forgiven)
        # Whole numbers add up to the same in any order, which floats on a GPU do not.
        counted = torch.zeros_like(last).scatter_add_(
            -1, last.clamp(min=0), (forgiven.double() * _FIXED_POINT).round().long()
        )
        total -= (counted.double() / _FIXED_POINT).float()
        return (total / stored).softmax(dim=-1)

    def _last_similar(
        self, chosen: torch.Tensor, columns: torch.Tensor, rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """For each chosen key, the last column that is similar to it and not itself.

        Args:
            chosen: directions `[B, H, R, D]`.
            columns: directions `[B, H, C, D]`.
            rows: `[B, H, R]` int64, the column of each chosen key itself, negative if not there.

        Returns:
            Column (-1: none) and similarity (0: none), both `[B, H, R]`.
        """
        similarities = chosen @ columns.transpose(-1, -2)
        own = rows.clamp(min=0).unsqueeze(-1)
        itself = similarities.gather(-1, own).where(rows.unsqueeze(-1) < 0, 0.0)
        similarities.scatter_(-1, own, itself)
        index = torch.arange(1, columns.shape[2] + 1, dtype=torch.float32, device=chosen.device)
        last = ((similarities > self.similarity_threshold) * index).amax(dim=-1).long() - 1
        value = similarities.gather(-1, last.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return last, value.masked_fill(last < 0, 0.0)


def _published_redundancy(keys: torch.Tensor, threshold: float) -> torch.Tensor:
    """Redundancy `[1, H, S]` in the keys' dtype, operation by operation as published."""
    directions = keys / (keys.norm(dim=-1, keepdim=True) + 1e-8)
    similarities = directions @ directions.transpose(-1, -2)
    similarities.diagonal(dim1=-2, dim2=-1).zero_()
    index = torch.arange(keys.shape[2], device=keys.device)
    last = torch.where(similarities > threshold, index, 0).amax(dim=-1, keepdim=True)
    return similarities.scatter_(-1, last, 0.0).mean(dim=-2).softmax(dim=-1)
