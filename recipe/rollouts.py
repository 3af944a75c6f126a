"""Rollouts: sampled completions with what the sampler knew about them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from sparse_cache import EvictionTrace, SparseBudgetCache

# transformers 5.24 renamed the argument, and warns of the older name.
CACHE_ARGUMENT = (
    "cache" if "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__ else "past_key_values"
)

NewCache = Callable[[], SparseBudgetCache | None]
"""Makes the cache of one `generate` call; None for a dense one."""


@dataclass(frozen=True)
class Rollouts:
    """`N` completions of up to `R` tokens, prompts padded on the left to `P` columns."""

    sequences: torch.Tensor
    """`[N, P + R]` int64: prompt and completion; padding behind the end."""
    attention_mask: torch.Tensor
    """`[N, P + R]` int64: 0 for padding on either side."""
    start: int
    """`P`, the first column of the completions."""
    mask: torch.Tensor
    """`[N, R]` boolean: tokens of the completions, the end token included."""
    sampled: torch.Tensor
    """`[N, R]` float32, nats: of each token in the distribution that it was drawn from."""
    truncated: torch.Tensor
    """`[N]` boolean: no end token came."""
    trace: EvictionTrace | None
    """What the sampler's cache evicted, of `P + R` columns; None for dense rollouts or if it was
    not asked for."""
    bytes_held: int = 0
    """Most bytes of keys and values that a `generate` call held."""
    bytes_dense: int = 0
    """What a dense cache would have held in the same call."""

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def lengths(self) -> torch.Tensor:
        """`[N]` int64: tokens of each completion."""
        return self.mask.sum(1)

    def select(self, rows: torch.Tensor) -> Rollouts:
        """Some rows, cut behind the longest of their completions.

        Args:
            rows: `[M]` int64 indices.
        """
        mask = self.mask[rows]
        longest = max(1, int(mask.sum(1).max()))
        columns = self.start + longest
        trace = None if self.trace is None else self.trace.select_rows(rows.to(self.trace.device))
        return replace(
            self,
            sequences=self.sequences[rows, :columns],
            attention_mask=self.attention_mask[rows, :columns],
            mask=mask[:, :longest],
            sampled=self.sampled[rows, :longest],
            truncated=self.truncated[rows],
            trace=None if trace is None else trace.truncate(columns),
        )


class Sampler:
    """Samples groups of completions, in calls small enough for the memory there is.

    The distribution is the model's own at a temperature, and nothing else: top-k, top-p or
    penalties would make the log-probabilities of the learner those of another distribution.

    Args:
        group: completions of a prompt.
        new_tokens: most tokens of one.
        temperature: of the sampling; 0 takes the likeliest token.
        end_ids: tokens that end a completion.
        pad_id: token that pads.
        rows: most rows of a `generate` call; None: all. Halved, for good, when memory runs out.
        record: whether caches record what they evict.
        sharded: whether the model's weights are spread over processes, which then have to make
            equally many steps.
    """

    def __init__(
        self,
        *,
        group: int,
        new_tokens: int,
        temperature: float,
        end_ids: list[int],
        pad_id: int,
        rows: int | None = None,
        sharded: bool = False,
    ) -> None:
        self.group = group
        self.rows = rows
        self._new_tokens = new_tokens
        self._temperature = temperature
        self._end_ids = torch.tensor(end_ids)
        self._pad_id = pad_id
        self._sharded = sharded
        drawn = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
        self._config = GenerationConfig(
            max_new_tokens=new_tokens,
            do_sample=temperature > 0,
            num_return_sequences=group,
            eos_token_id=list(end_ids),
            pad_token_id=pad_id,
            return_dict_in_generate=True,
            **drawn,
        )

    def sample(self, model: Any, prompts: dict[str, torch.Tensor], new_cache: NewCache) -> Rollouts:
        """`group` completions of each prompt, those of a prompt next to each other.

        Args:
            model: a transformers model, in evaluation mode.
            prompts: `input_ids` and `attention_mask`, `[M, P]`, padded on the left.
            new_cache: called for each `generate` call.

        Raises:
            RuntimeError: memory runs out for a single prompt.
        """
        count = len(prompts["input_ids"])
        while True:
            at_once = max(1, (self.rows or count * self.group) // self.group)
            try:
                parts = [
                    self._generate(
                        model,
                        {name: rows[first : first + at_once] for name, rows in prompts.items()},
                        new_cache(),
                    )
                    for first in range(0, count, at_once)
                ]
            except Exception as error:
                if not should_reduce_batch_size(error) or self._sharded:
                    raise
                if at_once == 1:
                    raise RuntimeError(
                        f"memory runs out in rollouts of a single prompt: lower group="
                        f"{self.group}, new_tokens={self._new_tokens} or the budget."
                    ) from error
                self.rows = at_once // 2 * self.group
                clear_device_cache(garbage_collection=True)
                continue
            return self._join(parts)

    def _generate(
        self, model: Any, prompts: dict[str, torch.Tensor], cache: SparseBudgetCache | None
    ) -> Rollouts:
        keep = _SampledLogprobs(self._temperature)
        start = prompts["input_ids"].shape[1]
        options: dict[str, Any] = {} if cache is None else {CACHE_ARGUMENT: cache}
        with torch.no_grad(), _only_given_settings(model):
            output = model.generate(
                **prompts,
                generation_config=self._config,
                logits_processor=LogitsProcessorList([keep]),
                synced_gpus=self._sharded,
                **options,
            )
        sequences = output.sequences
        completions = sequences[:, start:]
        is_end = torch.isin(completions, self._end_ids.to(completions.device))
        # The first end token is part of the completion.
        mask = (is_end.cumsum(1) - is_end.long()) == 0
        sampled = keep.of(sequences, start).masked_fill(~mask, 0.0)
        prompt_mask = prompts["attention_mask"].repeat_interleave(self.group, 0)
        trace = None
        held = dense = dense_bytes(output)
        if cache is not None:
            stats = cache.stats()
            held, dense = stats.bytes_held, stats.bytes_dense
            if cache.settings.record:
                trace = cache.trace().truncate(sequences.shape[1] - 1).extend(1)
        return Rollouts(
            sequences=torch.cat(
                [sequences[:, :start], completions.masked_fill(~mask, self._pad_id)], dim=1
            ),
            attention_mask=torch.cat([prompt_mask, mask.to(prompt_mask.dtype)], dim=1),
            start=start,
            mask=mask,
            sampled=sampled,
            truncated=~is_end.any(1),
            trace=trace,
            bytes_held=held,
            bytes_dense=dense,
        )

    def _join(self, parts: list[Rollouts]) -> Rollouts:
        """One batch, padded behind the end to the longest."""
        longest = max(part.mask.shape[1] for part in parts)

        def join(name: str, value: float) -> torch.Tensor:
            return torch.cat(
                [
                    torch.nn.functional.pad(
                        getattr(part, name), (0, longest - part.mask.shape[1]), value=value
                    )
                    for part in parts
                ]
            )

        traces = [part.trace for part in parts if part.trace is not None]
        return Rollouts(
            sequences=join("sequences", self._pad_id),
            attention_mask=join("attention_mask", 0),
            start=parts[0].start,
            mask=join("mask", False),
            sampled=join("sampled", 0.0),
            truncated=torch.cat([part.truncated for part in parts]),
            trace=EvictionTrace.stack(traces, side="right") if traces else None,
            bytes_held=max(part.bytes_held for part in parts),
            bytes_dense=max(part.bytes_dense for part in parts),
        )


class _SampledLogprobs(LogitsProcessor):
    """Keeps the log-probability of every sampled token, `[N]` a step.

    It is called before each step, when the token of the step before has been appended: so only the
    logits of one step are held.
    """

    def __init__(self, temperature: float) -> None:
        self._temperature = temperature
        self._last: torch.Tensor | None = None
        self._length = 0
        self._logprobs: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        # Processes that have finished go on stepping with the others, on the same tokens.
        if input_ids.shape[1] > self._length:
            self._take(input_ids)
            self._length = input_ids.shape[1]
            self._last = (scores.float() / (self._temperature or 1.0)).log_softmax(-1)
        return scores

    def _take(self, input_ids: torch.Tensor) -> None:
        if self._last is not None:
            token = input_ids[:, self._length, None]
            self._logprobs.append(self._last.gather(-1, token)[:, 0])

    def of(self, sequences: torch.Tensor, start: int) -> torch.Tensor:
        """`[N, R]`: of the tokens from column `start` on."""
        if sequences.shape[1] > self._length:
            self._take(sequences)
            self._length, self._last = sequences.shape[1], None
        return torch.stack(self._logprobs, dim=1)[:, : sequences.shape[1] - start]


def dense_bytes(output: Any) -> int:
    """Bytes of keys and values in the cache that a `generate` call made by itself."""
    total = 0
    for layer in getattr(getattr(output, CACHE_ARGUMENT, None), "layers", ()):
        for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None)):
            total += 0 if tensor is None else tensor.nbytes
    return total


@contextmanager
def _only_given_settings(model: Any) -> Iterator[None]:
    """Keep the model's own generation config out of `generate`, which fills in from it whatever a
    call leaves open: many checkpoints have penalties there."""
    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own
