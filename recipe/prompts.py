"""From examples to tokens."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from .tasks import Example

logger = logging.getLogger(__name__)


def render(tokenizer: Any, example: Example, system_prompt: str | None = None) -> str:
    """The text that a completion follows: chat models get their template around it."""
    prompt = example.prompt
    if not tokenizer.chat_template:
        if isinstance(prompt, str):
            return prompt
        return "\n\n".join(message["content"] for message in prompt) + "\n\n"
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if system_prompt and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system_prompt}, *messages]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def encode(tokenizer: Any, examples: Sequence[Example], system_prompt: str | None = None) -> Any:
    """`input_ids` and `attention_mask`, `[N, P]`, padded on the left."""
    texts = [render(tokenizer, example, system_prompt) for example in examples]
    # A template has put its special tokens already.
    encoded = tokenizer(
        texts,
        return_tensors="pt",
        padding=True,
        add_special_tokens=not tokenizer.chat_template,
        return_token_type_ids=False,
    )
    if tokenizer.pad_token_id is None:
        raise ValueError("the tokenizer has no pad token.")
    return encoded


class Prompts:
    """The prompts of each step: all of them once in a random order, then again in another.

    Which ones a step gets depends on the seed and the step alone, so that a resumed run goes on
    where it stopped, and each process takes its own part of them.

    Args:
        examples: to draw from.
        count: prompts of a step, over all processes.
        seed: of the order.
        rank, world: this process, and how many there are.
        fits: whether an example's prompt is short enough.

    Raises:
        ValueError: `world` does not divide `count`, or there are no examples.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        count: int,
        *,
        seed: int,
        rank: int = 0,
        world: int = 1,
        fits: Any = None,
    ) -> None:
        if count % world:
            raise ValueError(
                f"prompts={count} must be a multiple of the {world} processes, so that each has as "
                "many."
            )
        if not len(examples):
            raise ValueError("the task has no examples to train on.")
        self._examples, self._count, self._seed = examples, count, seed
        self._rank, self._world = rank, world
        self._fits = fits or (lambda example: True)
        self._order: tuple[int, torch.Tensor] | None = None
        self.left_out = 0

    def of_step(self, step: int) -> list[Example]:
        """This process's prompts of a step, in a fixed order.

        Raises:
            ValueError: hardly any prompt is short enough.
        """
        each = self._count // self._world
        first = step * self._count + self._rank * each
        return [self._example(position) for position in range(first, first + each)]

    def _example(self, position: int) -> Example:
        # A prompt that is too long gives its place to the one that comes half a round later.
        for attempt in range(20):
            shifted = position + attempt * (len(self._examples) // 2 + 1)
            example = self._examples[int(self._at(shifted))]
            if self._fits(example):
                return example
            self.left_out += 1
        raise ValueError(
            "nearly all prompts are longer than prompt_tokens: raise it, or use another task."
        )

    def _at(self, position: int) -> torch.Tensor:
        turn, place = divmod(position, len(self._examples))
        if self._order is None or self._order[0] != turn:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + turn)
            self._order = (turn, torch.randperm(len(self._examples), generator=generator))
        return self._order[1][place]
