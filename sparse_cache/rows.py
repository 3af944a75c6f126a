"""How many tokens each row of a layer stores, has seen, and may store before it evicts."""

from __future__ import annotations

import torch

from .settings import BudgetSettings


class RowCounts:
    """Counts per row, kept on the host so that decoding never waits for the device.

    Single tokens are counted for all rows at once and folded into the rows when somebody looks,
    so a decoding step changes two integers whatever the batch size.
    """

    def __init__(self, settings: BudgetSettings, batch: int) -> None:
        self._settings = settings
        self._stored = [0] * batch
        self._real_seen = [0] * batch
        self._evict_at = [settings.eviction_length(0)] * batch
        self._steps = 0
        self.evictions = 0
        self.tokens_evicted = 0
        self._refresh()

    def _refresh(self) -> None:
        self._longest = max(self._stored, default=0)
        self._room = min(
            (full - stored for full, stored in zip(self._evict_at, self._stored, strict=True)),
            default=0,
        )
        self.uniform = len(set(self._stored)) <= 1
        """Whether all rows store equally many tokens."""
        self.limit = max(self._evict_at, default=0)
        """Tokens that no row exceeds while decoding."""

    def _fold(self) -> None:
        if self._steps:
            self._stored, self._real_seen = self.stored, self.real_seen
            self._steps = 0

    @property
    def batch(self) -> int:
        return len(self._stored)

    @property
    def stored(self) -> list[int]:
        """Tokens stored, per row (the same for every KV head)."""
        return [stored + self._steps for stored in self._stored]

    @property
    def real_seen(self) -> list[int]:
        """Real tokens seen so far, per row."""
        return [seen + self._steps for seen in self._real_seen]

    @property
    def longest(self) -> int:
        """Tokens stored by the row that stores most."""
        return self._longest + self._steps

    @property
    def room(self) -> int:
        """Tokens that may come before some row evicts."""
        return self._room - self._steps

    def add(self, tokens: int) -> None:
        """Every row takes in `tokens` real tokens."""
        self._steps += tokens

    def add_real(self, real: list[int]) -> None:
        """Row `b` takes in `real[b]` tokens."""
        self._fold()
        self._stored = [stored + new for stored, new in zip(self._stored, real, strict=True)]
        self._real_seen = [seen + new for seen, new in zip(self._real_seen, real, strict=True)]
        self._refresh()

    def remove(self, tokens: list[int], *, seen_too: list[int]) -> None:
        """Row `b` loses `tokens[b]` stored tokens, of which it unlearns to have seen some."""
        self._fold()
        self._stored = [stored - gone for stored, gone in zip(self._stored, tokens, strict=True)]
        self._real_seen = [s - gone for s, gone in zip(self._real_seen, seen_too, strict=True)]
        self._refresh()

    def is_full(self, row: int) -> bool:
        """Whether `row` has to evict."""
        return self._stored[row] + self._steps >= self._evict_at[row]

    def kept(self, row: int) -> int:
        """Tokens that `row` stores after evicting now, as many as it stores if it is not full."""
        stored = self._stored[row] + self._steps
        if not self.is_full(row):
            return stored
        seen = self._real_seen[row] + self._steps
        return min(self._settings.kept_after_eviction(seen), stored)

    def evicted(self, rows: list[int], keep: int) -> None:
        """`rows` have evicted down to `keep` tokens."""
        self._fold()
        for row in rows:
            self.evictions += 1
            self.tokens_evicted += self._stored[row] - keep
            self._stored[row] = keep
            self._evict_at[row] = self._settings.eviction_length(self._real_seen[row])
        self._refresh()

    def select(self, rows: torch.Tensor) -> None:
        """Reorder, repeat or drop rows; `rows` `[B']` int64 are the old rows of the new ones."""
        self._fold()
        counts = (self._stored, self._real_seen, self._evict_at)
        if all(len(set(count)) == 1 for count in counts):
            # Equal rows need no copy of the indices to the host, which would wait for the device.
            chosen = [count[:1] * rows.shape[0] for count in counts]
        else:
            order = rows.tolist()
            chosen = [[count[row] for row in order] for count in counts]
        self._stored, self._real_seen, self._evict_at = chosen
        self._refresh()
