"""Divergences between policies: estimated from the sampled tokens, or over the whole vocabulary."""

from __future__ import annotations

import torch

DIRECTIONS = ("shadow_to_dense", "dense_to_shadow", "both")


def k1(logprobs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """`log(p / q)` of each token: for tokens sampled from `p`, an unbiased estimate of
    `KL(p || q)` that may be negative (http://joschu.net/blog/kl-approx.html)."""
    return logprobs.float() - other.float()


def k3(logprobs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """`q / p - 1 - log(q / p)` of each token: unbiased too, never negative, of less variance."""
    log_ratio = other.float() - logprobs.float()
    # Bounded as a token that q likes e^20 times better says nothing more; exp would overflow.
    log_ratio = log_ratio.clamp(max=20.0)
    return log_ratio.exp() - 1 - log_ratio


class FullKL:
    """KL divergence between the dense and the shadow policy over the whole vocabulary, per token.

    Shadow Mask Distillation (https://arxiv.org/abs/2605.06850). `"shadow_to_dense"` moves the
    shadow policy: `KL(dense || shadow)` with the dense one held fixed, so that the model learns to
    say under eviction what it would say with everything in sight. `"dense_to_shadow"` moves the
    dense policy: `KL(shadow || dense)` with the shadow held fixed. `"both"` lets gradients into
    both sides of the latter.

    Args:
        direction: one of the three.
        temperature: logits are divided by it, as in sampling.

    Raises:
        ValueError: `direction` is unknown, or `temperature` is not positive.
    """

    def __init__(self, direction: str = "shadow_to_dense", temperature: float = 1.0) -> None:
        if direction not in DIRECTIONS:
            raise ValueError(
                f"distill_direction={direction!r} is unknown; choose one of "
                f"{', '.join(DIRECTIONS)}."
            )
        if not temperature > 0:
            raise ValueError(f"temperature={temperature} must be positive.")
        self.direction = direction
        self.temperature = temperature

    def __call__(self, dense: torch.Tensor, shadow: torch.Tensor) -> torch.Tensor:
        """Nats per token, `[...]` float32.

        Where logits are no distribution (NaN, inf, or -inf throughout) the result is NaN, but no
        gradient passes: whoever masks such a place out has masked its gradient out too.

        Args:
            dense, shadow: logits `[..., V]`.
        """
        dense_logs, dense_broken = self._logs(dense, self.direction != "shadow_to_dense")
        shadow_logs, shadow_broken = self._logs(shadow, self.direction != "dense_to_shadow")
        if self.direction == "shadow_to_dense":
            nats = (dense_logs.exp() * (dense_logs - shadow_logs)).sum(-1)
        else:
            nats = (shadow_logs.exp() * (shadow_logs - dense_logs)).sum(-1)
        return nats.masked_fill(dense_broken | shadow_broken, float("nan"))

    def _logs(self, logits: torch.Tensor, moved: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities, and `[...]` where there are none."""
        logits = (logits if moved else logits.detach()).float() / self.temperature
        broken = ~logits.detach().amax(-1).isfinite()
        # Before the softmax, whose backward makes NaN of a gradient of 0.
        logits.masked_fill_(broken[..., None], 0.0)
        # A word that cannot be said (-inf) adds 0, which 0 * -inf would not be.
        return logits.log_softmax(-1).clamp(min=-1e4), broken
