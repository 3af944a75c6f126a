"""Held-out accuracy under greedy decoding, dense and under budgets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from tqdm.auto import tqdm

from sparse_cache import SparseBudgetCache

from .prompts import encode
from .rollouts import Rollouts, Sampler
from .tasks import Example

DENSE = "dense"


@dataclass(frozen=True)
class Accuracy:
    """Of one way to decode."""

    decoding: str
    """`dense`, or `budget N`."""
    reward: float
    """Mean reward."""
    accuracy: float
    """Share of examples with full reward."""
    length: float
    """Mean tokens of a completion."""
    examples: int

    @property
    def error(self) -> float:
        """Standard error of the accuracy."""
        return (self.accuracy * (1 - self.accuracy) / max(1, self.examples)) ** 0.5


def evaluate(
    model: Any,
    tokenizer: Any,
    examples: Sequence[Example],
    reward: Callable[[Example, str], float],
    sampler: Sampler,
    caches: dict[str, Callable[[], SparseBudgetCache | None]],
    accelerator: Accelerator,
    *,
    rows: int = 64,
    system_prompt: str | None = None,
    progress: bool = True,
) -> list[Accuracy]:
    """Decode held-out examples in each of several ways.

    Args:
        model: in evaluation mode.
        tokenizer: pads on the left.
        examples: each process takes its share.
        reward: judges a completion.
        sampler: greedy, one completion of a prompt.
        caches: by name, what makes the cache of a `generate` call.
        accelerator: of the processes.
        rows: examples of a `generate` call.
        system_prompt: see `encode`.
        progress: whether to show a bar.
    """
    rank, world = accelerator.process_index, accelerator.num_processes
    mine = list(examples)[rank::world]
    # Every process takes part in equally many calls, whose weights may be spread over processes.
    calls = -(-len(examples) // (rows * world))
    found = []
    bar = tqdm(
        total=calls * len(caches),
        desc="evaluate",
        disable=not (progress and accelerator.is_main_process),
        leave=False,
    )
    for name, new_cache in caches.items():
        results: list[tuple[float, int]] = []
        for call in range(calls):
            part = mine[call * rows : (call + 1) * rows]
            fed = part or list(examples)[:1]
            inputs = encode(tokenizer, fed, system_prompt).to(accelerator.device)
            with accelerator.autocast():
                rollouts = sampler.sample(model, dict(inputs), new_cache)
            texts = completions(tokenizer, rollouts)
            lengths = rollouts.lengths.tolist()
            results += [
                (reward(example, text), length)
                for example, text, length in zip(part, texts, lengths, strict=False)
            ]
            bar.update()
        results = gather_object(results)
        rewards = torch.tensor([result[0] for result in results], dtype=torch.float64)
        tokens = torch.tensor([float(result[1]) for result in results])
        found.append(
            Accuracy(
                name,
                float(rewards.mean()),
                float((rewards >= 1).double().mean()),
                float(tokens.mean()),
                len(results),
            )
        )
    bar.close()
    return found


def completions(tokenizer: Any, rollouts: Rollouts) -> list[str]:
    """Texts of completions, without the end token and what follows it.

    Tokenizers leave out only what they call special, which the tokens that end a completion or pad
    it need not be.
    """
    lengths = rollouts.lengths - (~rollouts.truncated).long()
    tokens = rollouts.sequences[:, rollouts.start :]
    return [
        str(tokenizer.decode(row[:length], skip_special_tokens=True))
        for row, length in zip(tokens, lengths.tolist(), strict=True)
    ]
