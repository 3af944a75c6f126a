"""One training step's arithmetic: from judged rollouts to gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .learner import Learned, Learner, in_micro_batches
from .objectives import (
    Correction,
    clipped_surrogate,
    correct,
    group_advantages,
    k3,
    preference_loss,
    preference_pairs,
    token_coefficients,
)
from .objectives.aggregation import Total
from .options import Options
from .rollouts import Rollouts


@dataclass(frozen=True)
class Batch:
    """Judged rollouts with everything that stays fixed during a step. `[N, R]` unless said."""

    rollouts: Rollouts
    rewards: torch.Tensor
    """`[N]`."""
    advantages: torch.Tensor
    """`[N]`."""
    old: torch.Tensor
    """Log-probabilities of the learner's policy before the step."""
    dense: torch.Tensor
    """Those of the dense policy."""
    reference: torch.Tensor | None
    """Those of the reference, under the learner's kind of policy."""
    correction: Correction
    counted: torch.Tensor
    """Boolean: tokens that the loss is taken over."""


def prepare_batch(
    options: Options,
    rollouts: Rollouts,
    rewards: torch.Tensor,
    dense: torch.Tensor,
    reference: torch.Tensor | None,
    total: Total,
) -> Batch:
    """Corrections and advantages of judged rollouts.

    Under replay the sampler's own log-probabilities are those of the learner before the step: that
    is what makes it on-policy. Without, they are the dense policy's, whoever sampled.
    """
    correction = correct(
        dense,
        rollouts.sampled,
        rollouts.mask,
        reject=None if options.reject == "off" else options.reject,
        reject_below=options.reject_below,
        reject_above=options.reject_above,
        reweight=None if options.reweight == "off" else options.reweight,
        weight_bounds=options.weight_bounds,
        weight_low=options.weight_low,
        weight_high=options.weight_high,
        normalise=options.normalise_weights,
        total=total,
    )
    advantages = group_advantages(
        rewards,
        options.group,
        baseline="leave_one_out" if options.estimator == "rloo" else "mean",
        divide_by_std=options.divide_by_std and options.estimator != "rloo",
        kept=~correction.rejected if options.baseline_after_rejection else None,
    )
    counted = correction.kept
    if options.truncated == "mask":
        counted = counted & ~rollouts.truncated[:, None]
    old = rollouts.sampled if options.replay else dense
    return Batch(rollouts, rewards, advantages, old, dense, reference, correction, counted)


@dataclass(frozen=True)
class MiniBatch:
    """The rows of one optimizer step, in the order in which they are read."""

    rows: torch.Tensor
    """`[M]` int64, indices into the batch; two by two where pairs are compared."""
    coefficients: torch.Tensor
    """`[M, R]` float32: what each token's loss counts, or for pairs `[M / 2]`."""


def mini_batches(
    options: Options, batch: Batch, generator: torch.Generator, total: Total
) -> list[MiniBatch]:
    """Cut a batch into `options.minibatches` parts at random, with the denominators of each taken
    over all processes."""
    if options.estimator == "online_dpo":
        return _pairs(options, batch, total)
    order = torch.randperm(len(batch.rewards), generator=generator)
    if options.minibatches == 1:
        order = order.sort().values
    parts = []
    for rows in order.to(batch.counted.device).tensor_split(options.minibatches):
        coefficients = token_coefficients(
            batch.counted[rows], options.aggregation, longest=options.new_tokens, total=total
        )
        parts.append(MiniBatch(rows, coefficients))
    return parts


def _pairs(options: Options, batch: Batch, total: Total) -> list[MiniBatch]:
    kept = batch.counted.any(1)
    pairs = preference_pairs(batch.rewards, options.group, kept)
    parts = []
    for chosen in pairs.tensor_split(options.minibatches):
        valid = (chosen[:, 0] >= 0).float()
        parts.append(
            MiniBatch(chosen.clamp(min=0).flatten(), valid / total(valid.sum()).clamp(min=1))
        )
    return parts


@dataclass(frozen=True)
class MicroLoss:
    """Loss of a few rows, as their share of the mini-batch's."""

    loss: torch.Tensor
    """Scalar with gradients: policy + KL to the reference + distillation."""
    policy: torch.Tensor
    reference_kl: torch.Tensor
    distillation: torch.Tensor
    entropy: torch.Tensor
    """Sum over counted tokens."""
    clipped: torch.Tensor
    """Counted tokens whose gradient the clip took away."""
    tokens: torch.Tensor
    """Counted tokens."""


def micro_loss(
    options: Options, batch: Batch, rows: torch.Tensor, coefficients: torch.Tensor, learned: Learned
) -> MicroLoss:
    """The loss of some rows.

    Args:
        options: of the run.
        batch: what the step is about.
        rows: `[m]` int64, indices into the batch.
        coefficients: of a [`MiniBatch`], for these rows.
        learned: of `batch.rollouts.select(rows)`, so that it may be narrower than the batch.
    """
    width = learned.logprobs.shape[1]

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[rows, :width]

    counted = cut(batch.counted)
    weights = cut(batch.correction.weights)
    clipped = torch.zeros_like(counted)
    if options.estimator == "online_dpo":
        assert batch.reference is not None
        losses = preference_loss(
            learned.logprobs, cut(batch.reference), weights * counted, beta=options.dpo_beta
        )
        policy = (losses * coefficients).sum()
        valid = coefficients.repeat_interleave(2)[:, None] * counted
        token_share = valid / counted.sum(1, keepdim=True).clamp(min=1) / 2
    else:
        token_share = coefficients[:, :width]
        surrogate = clipped_surrogate(
            learned.logprobs,
            cut(batch.old),
            batch.advantages[rows],
            clip_low=options.clip_low,
            clip_high=options.clip_high,
        )
        # Where nothing counts there may be no number either.
        losses = torch.where(counted, surrogate.loss * weights, 0.0)
        policy = (losses * token_share).sum()
        clipped = surrogate.clipped & counted
    zero = policy.new_zeros(())
    reference_kl, distillation = zero, zero
    if options.reference_kl and batch.reference is not None:
        divergence = torch.where(counted, k3(learned.logprobs, cut(batch.reference)), 0.0)
        reference_kl = (divergence * token_share).sum()
    if learned.distillation is not None:
        distillation = (torch.where(counted, learned.distillation, 0.0) * token_share).sum()
    loss = policy + options.reference_kl * reference_kl + (options.distill or 0.0) * distillation
    return MicroLoss(
        loss,
        policy.detach(),
        reference_kl.detach(),
        distillation.detach(),
        torch.where(counted, learned.entropy, 0.0).sum(),
        clipped.sum(),
        counted.sum(),
    )


def dense_logprobs(
    learner: Learner, model: object, rollouts: Rollouts, micro_batch: int
) -> torch.Tensor:
    """Log-probabilities of the dense policy, `[N, R]`, without gradients."""
    return in_micro_batches(
        rollouts, micro_batch, lambda part: learner.logprobs(model, part, replayed=False)
    )
