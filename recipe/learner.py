"""What the learner computes of rollouts: log-probabilities, and how far its policies lie apart."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from sparse_cache.replay import replay, rollout_logprobs
from sparse_cache.replay.context import positions_of
from sparse_cache.replay.sites import language_model
from sparse_cache.replay.token_head import read_logits, read_states

from .objectives import FullKL
from .rollouts import Rollouts


class Learned(NamedTuple):
    """Of each token of a completion, `[N, R]` float32, 0 for padding."""

    logprobs: torch.Tensor
    """Of the learner's policy: under the sampler's evictions if they are replayed, else dense."""
    entropy: torch.Tensor
    """Of that policy, without gradients."""
    distillation: torch.Tensor | None
    """KL divergence between dense and shadow policy over the whole vocabulary, if asked for."""


class Learner:
    """Reads rollouts with a model.

    Args:
        temperature: of the sampler.
        replayed: whether the policy is the shadow one.
        distillation: the divergence to compute beside it, or None.
        way: how the replay attends, see `sparse_cache.replay.replay`.
        chunk_bytes: most bytes of logits at a time.
    """

    def __init__(
        self,
        *,
        temperature: float,
        replayed: bool,
        distillation: FullKL | None = None,
        way: str = "auto",
        chunk_bytes: int = 128 * 2**20,
    ) -> None:
        self.replayed = replayed
        self._temperature = temperature
        self._distillation = distillation
        self._chunk_bytes = chunk_bytes
        self._way = way

    def logprobs(self, model: Any, rollouts: Rollouts, *, replayed: bool) -> torch.Tensor:
        """Log-probabilities, `[N, R]` float32, of one policy without gradients."""
        with torch.no_grad():
            return rollout_logprobs(
                model,
                rollouts.sequences,
                rollouts.trace if replayed else None,
                attention_mask=rollouts.attention_mask,
                start=rollouts.start,
                temperature=self._temperature,
                way=self._way,
                chunk_bytes=self._chunk_bytes,
            ).logprobs

    def read(self, model: Any, rollouts: Rollouts) -> Learned:
        """With gradients: the policy that is trained, and the distillation."""
        if self._distillation is not None:
            return self._read_both(model, rollouts)
        found = rollout_logprobs(
            model,
            rollouts.sequences,
            rollouts.trace if self.replayed else None,
            attention_mask=rollouts.attention_mask,
            start=rollouts.start,
            temperature=self._temperature,
            way=self._way,
            entropy=True,
            chunk_bytes=self._chunk_bytes,
        )
        assert found.entropy is not None
        return Learned(found.logprobs, found.entropy.detach(), None)

    def _read_both(self, model: Any, rollouts: Rollouts) -> Learned:
        assert self._distillation is not None and rollouts.trace is not None
        divergence, temperature = self._distillation, self._temperature
        columns = slice(rollouts.start - 1, -1)
        tokens = rollouts.sequences[:, rollouts.start :].flatten()
        inputs: dict[str, Any] = {
            "input_ids": rollouts.sequences,
            "attention_mask": rollouts.attention_mask,
            "use_cache": False,
        }
        if "position_ids" in inspect.signature(language_model(model).forward).parameters:
            inputs["position_ids"] = positions_of(rollouts.attention_mask != 0)
        with replay(model, rollouts.trace, way=self._way):
            shadow_states = read_states(model, columns, **inputs)

        def of_chunk(dense: torch.Tensor, shadow: torch.Tensor, where: slice) -> torch.Tensor:
            logs = (shadow / temperature).log_softmax(-1)
            sampled = logs.gather(-1, tokens[where, None].to(logs.device))[:, 0]
            entropy = -(logs.exp() * logs.clamp(min=torch.finfo(logs.dtype).min)).sum(-1)
            return torch.stack([sampled, entropy, divergence(dense, shadow)], dim=-1)

        found = read_logits(
            model,
            of_chunk,
            columns,
            chunk_bytes=self._chunk_bytes,
            beside=shadow_states,
            **inputs,
        )
        # Not by a product: padding may have any logits.
        found = found.masked_fill(~rollouts.mask[..., None].to(found.device), 0.0)
        return Learned(found[..., 0], found[..., 1].detach(), found[..., 2])


def in_micro_batches(
    rollouts: Rollouts, size: int, compute: Callable[[Rollouts], torch.Tensor]
) -> torch.Tensor:
    """`compute`, of `[n, r]`, for all rows, a few at a time: `[N, R]`."""
    width = rollouts.mask.shape[1]
    parts = []
    for rows in micro_batches(torch.arange(len(rollouts)), size):
        part = compute(rollouts.select(rows.to(rollouts.mask.device)))
        parts.append(torch.nn.functional.pad(part, (0, width - part.shape[1])))
    return torch.cat(parts)


def micro_batches(rows: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    """Consecutive parts of `rows`, `size` at a time."""
    yield from rows.split(size)
