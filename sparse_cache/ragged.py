"""What a layer holds whose KV heads keep different numbers of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .allocators import checked_head_counts
from .chunk import Chunk
from .held import HeldTokens, reorder_chunk
from .scoring import Candidates, score_tokens
from .settings import BudgetSettings
from .storage import _capacity as planned_capacity
from .trace import DeathRecord


@dataclass(frozen=True)
class _Candidates:
    """All tokens of a layer, wherever they lie."""

    tensors: dict[str, torch.Tensor]
    """`[B, A, N, ...]` by name; `A` is 1 for a pool, else the number of heads."""
    addresses: torch.Tensor
    """`[B, H, W]` int64 into `N`: a head's tokens in the order of the sequence, to the right."""
    lengths: list[list[int]]
    """Tokens by row and head."""
    together: list[bool]
    """Rows whose tokens are simply the last ones along `N`, in every head."""


class RaggedTokens(HeldTokens):
    """Tokens of a layer, in one pool a row, of which each KV head owns as much as it needs.

    Tensors are `[B, 1, H * C, ...]`, where `C` is what a layer of equal heads would allocate per
    head. Head `h` of row `b` has its tokens at slots `offsets[b, h] ..`, with room behind them for
    those that come until the row evicts next, which it does when its heads hold `budget + interval`
    on average. So what is allocated is what equal heads need, to the byte. An eviction lays a row's
    pool out anew, by one gather per tensor.

    Every head is scored by itself: a policy's view has one KV head, and heads with equally many
    tokens come as its rows. A policy that mixes heads (`tova` with `share_heads`) has nothing to
    mix, one that numbers them (`random`) draws the same lots for each.
    """

    def __init__(
        self,
        settings: BudgetSettings,
        layer_idx: int,
        batch: int,
        heads: int,
        device: torch.device,
    ) -> None:
        super().__init__(settings, layer_idx, batch, device)
        self.heads = heads
        self._excess = [[0] * heads for _ in range(batch)]
        """Tokens of a head beyond the average of its row, which stay as they are between
        evictions."""
        self._offsets = torch.zeros(batch, heads, dtype=torch.int64, device=device)
        self._ends: torch.Tensor | None = None

    # ------------------------------------------------------------------ where tokens lie

    @property
    def capacity(self) -> int:
        """Slots allocated per head, on average."""
        return self.storage.capacity // self.heads if self.storage else 0

    @property
    def offsets(self) -> torch.Tensor:
        """`[B, H]` int64: the first slot of each head in its row's pool."""
        return self._offsets

    @property
    def lengths_by_head(self) -> list[list[int]]:
        """Tokens stored now, by row and KV head."""
        return [
            [stored + more for more in row]
            for stored, row in zip(self.rows.stored, self._excess, strict=True)
        ]

    def lengths(self) -> torch.Tensor:
        """`[B, H]` int32: tokens stored now; between evictions one addition on the device."""
        if self._ends is None:
            longest = self.rows.longest
            self._ends = torch.tensor(
                [[length - longest for length in row] for row in self.lengths_by_head],
                dtype=torch.int32,
                device=self.device,
            ).view(self.rows.batch, self.heads)
        return self._ends + self.rows.longest

    def write_step(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write one token a row `[B, H, 1, ...]` behind each head's others."""
        slots = self._offsets + self.lengths()
        rows = torch.arange(slots.shape[0], device=slots.device).unsqueeze(1)
        for name, tokens in (("keys", keys), ("values", values)):
            self.storage[name][rows, 0, slots] = tokens[:, :, 0]

    def slots_by_head(self, new: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Where each head's tokens lie: slots `[B, H, L]` int64, and which of them are valid.

        Args:
            new: tokens behind the counted ones, already written.
        """
        longest = max((length for row in self.lengths_by_head for length in row), default=0) + new
        index = torch.arange(longest, device=self.device)
        valid = index < (self.lengths() + new).unsqueeze(-1)
        slots = (self._offsets.unsqueeze(-1) + index).where(valid, 0)
        return slots, valid

    def by_head(self, name: str, slots: torch.Tensor) -> torch.Tensor:
        """A copy `[B, H, L, ...]` of the tokens at `slots` `[B, H, L]`."""
        rows = torch.arange(slots.shape[0], device=slots.device).view(-1, 1, 1)
        return self.storage[name][rows, 0, slots]

    def add_mass(self, slots: torch.Tensor, mass: torch.Tensor) -> None:
        """Add `mass` `[B, H, L]` to the tokens at `slots` `[B, H, L]`."""
        self.storage["mass"][:, 0].scatter_add_(1, slots.flatten(1), mass.flatten(1))

    # ------------------------------------------------------------------ bookkeeping

    def place(self) -> None:
        """Give the tokens that came since the last call their positions: consecutive ones."""
        stored = self.rows.stored
        if self._placed == stored:
            return
        # Tokens that come singly come to all rows.
        new = max(now - then for now, then in zip(stored, self._placed, strict=True))
        index = torch.arange(new, device=self.device)
        slots = (self._offsets + self.lengths() - new).unsqueeze(-1) + index
        positions = self.storage["positions"]
        first = torch.tensor(self.rows.real_seen, device=self.device).view(-1, 1, 1) - new
        values = (first + index).expand(slots.shape).to(positions)
        positions[:, 0].scatter_(1, slots.flatten(1).to(positions.device), values.flatten(1))
        self._placed = stored

    def forget_beyond(self) -> None:
        """Forget what was derived from the lengths; zero the mass of free slots."""
        self._placed = self.rows.stored
        self._ends = None
        if "mass" in self.storage:
            mass = self.storage["mass"][:, 0]
            slot = torch.arange(mass.shape[1], device=mass.device)
            start = self._offsets.unsqueeze(-1)
            owned = (slot >= start) & (slot < start + self.lengths().unsqueeze(-1))
            mass.masked_fill_(~owned.any(dim=1), 0.0)

    def left_after_hiding(self, hidden: torch.Tensor) -> list[int]:
        """Not served: see `SparseBudgetCache`."""
        raise NotImplementedError("tokens of ragged heads cannot be hidden")

    def select_rows(self, rows: torch.Tensor) -> None:
        """Reorder, repeat or drop rows; `rows` `[B']` int64 are the old rows of the new ones."""
        if not self.storage:
            return
        super().select_rows(rows)
        self._offsets = self._offsets.index_select(0, rows.to(self._offsets.device))
        self._excess = [self._excess[row] for row in rows.tolist()]
        self._ends = None

    def bookkeeping_bytes(self) -> int:
        """Bytes of everything but keys and values."""
        ends = 0 if self._ends is None else self._ends.nbytes
        return super().bookkeeping_bytes() + self._offsets.nbytes + ends

    def dense_bytes(self) -> int:
        """Bytes that a dense cache would hold for the same columns."""
        if not self.storage:
            return 0
        return self.seen * self.stored_bytes() // self.capacity

    # ------------------------------------------------------------------ evictions

    def reserve_same(self, needed: int, limit: int) -> None:
        """Have room for `needed` tokens per head, on average."""
        if needed > self.capacity:
            self.place()
            candidates = self._pooled()
            kept = self._all_of(candidates)
            capacity = planned_capacity(self.capacity, needed, limit)
            self._lay_out(candidates, list(range(self.rows.batch)), kept, capacity)
            self.forget_beyond()

    def evict(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Evict in every row that is full; `keys` and `values` are those of the pool."""
        self.place()
        groups: dict[int, list[int]] = {}
        for row in range(self.rows.batch):
            if self.rows.is_full(row):
                groups.setdefault(self.rows.kept(row), []).append(row)
        candidates = self._pooled()
        for keep, rows in groups.items():
            kept = self._choose_by_head(candidates, rows, keep)
            self.rows.evicted(rows, keep)
            self._lay_out(candidates, rows, kept, self.capacity)
        self.forget_beyond()

    def take_in(
        self,
        chunk: Chunk,
        keys: torch.Tensor,
        values: torch.Tensor,
        mass: torch.Tensor | None,
    ) -> None:
        """Move what survives of `[stored tokens | chunk]` into the pool.

        Args:
            chunk: the chunk.
            keys: `[B, H, L + T, D]`, of which `L` are a copy of what is stored, each head's tokens
                first.
            values: `[B, H, L + T, Dv]`, likewise.
            mass: `[B, H, L + T]` float32, given by this chunk's queries alone.
        """
        width = keys.shape[2] - chunk.length
        before = self.lengths_by_head
        real = chunk.real or [chunk.length] * self.rows.batch
        order = chunk.padding_first
        tensors = {"keys": keys, "values": values}
        if width:
            self.place()
            slots, valid = self.slots_by_head()
            stored_positions = self.by_head("positions", slots)
        if mass is not None:
            if width:
                earlier = self.by_head("mass", slots).masked_fill(~valid, 0.0)
                mass = mass + torch.nn.functional.pad(earlier, (0, chunk.length))
            tensors["mass"] = mass
        tensors = {name: reorder_chunk(tensor, order) for name, tensor in tensors.items()}
        column = torch.arange(chunk.length, dtype=torch.int32, device=self.device)
        first = torch.tensor(
            [seen + new for seen, new in zip(self.rows.real_seen, real, strict=True)],
            dtype=torch.int32,
            device=self.device,
        ).view(-1, 1, 1)
        positions = (first - chunk.length + column).expand(-1, self.heads, -1)
        if width:
            positions = torch.cat([stored_positions, positions], dim=2)
        tensors["positions"] = positions

        if self.settings.record and self.deaths is None:
            self.deaths = DeathRecord(self.rows.batch, self.heads, self.device)
        self.seen = chunk.start + chunk.length
        self.rows.add_real(real)
        candidates = self._joined(tensors, before, real, width, chunk.length)
        kept = self._all_of(candidates)
        groups: dict[int, list[int]] = {}
        after = [self.rows.kept(row) for row in range(self.rows.batch)]
        capacity = self.capacity
        if max(after) > capacity or not self.storage:
            capacity = planned_capacity(capacity, max(after), self.rows.limit)
        for row, (stored, keep) in enumerate(zip(self.rows.stored, after, strict=True)):
            if keep < stored:
                groups.setdefault(keep, []).append(row)
        for keep, rows in groups.items():
            kept[rows] = self._choose_by_head(candidates, rows, keep)
            self.rows.evicted(rows, keep)
        self._lay_out(candidates, list(range(self.rows.batch)), kept, capacity)
        self.forget_beyond()

    def _pooled(self) -> _Candidates:
        """The tokens in the pool."""
        lengths = self.lengths_by_head
        width = max(length for row in lengths for length in row)
        index = torch.arange(width, device=self.device) - width
        ends = self._offsets + self.lengths()
        return _Candidates(
            tensors={name: self.storage[name] for name in self.storage},
            addresses=(ends.unsqueeze(-1) + index).clamp(min=0),
            lengths=lengths,
            together=[False] * self.rows.batch,
        )

    def _joined(
        self,
        tensors: dict[str, torch.Tensor],
        before: list[list[int]],
        real: list[int],
        width: int,
        length: int,
    ) -> _Candidates:
        """The tokens in `[stored tokens | chunk]`, the padding of the chunk in its front."""
        lengths = [[held + new for held in row] for row, new in zip(before, real, strict=True)]
        widest = max(each for row in lengths for each in row)
        stored = torch.tensor(before, device=self.device).view(-1, self.heads, 1)
        new = torch.tensor(real, device=self.device).view(-1, 1, 1)
        # The number of a token among those of its head; negative where there is none.
        index = torch.arange(widest, device=self.device) - (widest - stored - new)
        in_chunk = width + length - new + (index - stored)
        return _Candidates(
            tensors=tensors,
            addresses=index.where(index < stored, in_chunk).clamp(min=0),
            lengths=lengths,
            together=[not any(row) for row in before],
        )

    def _all_of(self, candidates: _Candidates) -> torch.Tensor:
        """`[B, H, W]` boolean, True for every token."""
        width = candidates.addresses.shape[2]
        lengths = torch.tensor(candidates.lengths, device=self.device)
        place = torch.arange(width, device=self.device)
        return place >= width - lengths.unsqueeze(-1)

    def _choose_by_head(self, candidates: _Candidates, rows: list[int], keep: int) -> torch.Tensor:
        """Which tokens of `rows` stay, `[b, H, W]` boolean; the others are noted in the trace."""
        settings = self.settings
        index = torch.tensor(rows, device=self.device)
        valid = self._all_of(candidates)[index]
        width = valid.shape[2]
        addresses = candidates.addresses[index]
        heads = torch.arange(self.heads, device=self.device)
        positions = _look_up(
            candidates.tensors["positions"],
            index.repeat_interleave(self.heads),
            heads.repeat(len(rows)),
            addresses.flatten(0, 1),
        ).unflatten(0, (-1, self.heads))
        # As in `select_kept`, per head.
        largest = torch.finfo(torch.float32).max
        scores = self._scores(candidates, rows, keep)
        scores = torch.nan_to_num(scores, nan=-largest, posinf=largest, neginf=-largest)
        protected = positions < (settings.sinks if settings.policy.keeps_sinks else 0)
        protected[..., width - settings.window :] = True
        scores = scores.masked_fill(protected, torch.inf).masked_fill(~valid, -torch.inf)
        lengths = torch.tensor([candidates.lengths[row] for row in rows], device=self.device)
        counts = checked_head_counts(settings.allocation, scores, lengths, keep)
        order = scores.flip(-1).sort(dim=-1, descending=True, stable=True).indices
        rank = torch.empty_like(order).scatter_(
            -1, order, torch.arange(width, device=self.device).expand_as(order)
        )
        kept = (rank < torch.tensor(counts, device=self.device).unsqueeze(-1)).flip(-1)
        if self.deaths is not None:
            self.deaths.evict_some(index, positions, valid & ~kept, at=self.seen)
        return kept

    def _scores(self, candidates: _Candidates, rows: list[int], keep: int) -> torch.Tensor:
        """The policy's scores of the tokens of `rows`, float32 `[b, H, W]`, to the right."""
        width = candidates.addresses.shape[2]
        scores = torch.zeros(len(rows), self.heads, width, device=self.device)
        # (row or None, length) -> (place in `rows`, head)
        groups: dict[tuple[int | None, int], list[tuple[int, int]]] = {}
        for place, row in enumerate(rows):
            for head, length in enumerate(candidates.lengths[row]):
                own = row if candidates.together[row] else None
                groups.setdefault((own, length), []).append((place, head))
        for (own, length), members in groups.items():
            places, heads = torch.tensor(members, device=self.device).unbind(1)
            if own is not None:
                # All heads of the row, where they lie: no copy.
                start = candidates.tensors["keys"].shape[2] - length
                tokens = {name: t[own, :, start:] for name, t in candidates.tensors.items()}
            else:
                of_rows = torch.tensor([rows[place] for place, _ in members], device=self.device)
                where = candidates.addresses[of_rows, heads, width - length :]
                tokens = {
                    name: _look_up(t, of_rows, heads, where)
                    for name, t in candidates.tensors.items()
                }
            scored = self._score_heads(tokens, [(rows[p], head) for p, head in members], keep)
            scores[places, heads, width - length :] = scored.to(scores.dtype)
        return scores

    def _score_heads(
        self, tokens: dict[str, torch.Tensor], members: list[tuple[int, int]], keep: int
    ) -> torch.Tensor:
        """Scores `[n, S]` of the tokens `[n, S, ...]` of heads, given by row and head."""
        rows, heads = torch.tensor(members, device=self.device).unbind(1)
        queries = self.queries.data
        if queries is not None and self.settings.policy.needs_queries:
            queries = queries.unflatten(1, (self.heads, -1))[rows, heads]
            queries = queries[:, :, -self.settings.window :]
        else:
            queries = None
        seen, mass = self.rows.real_seen, tokens.get("mass")
        return score_tokens(
            Candidates(
                keys=tokens["keys"].unsqueeze(1),
                values=tokens["values"].unsqueeze(1),
                positions=tokens["positions"].unsqueeze(1),
                mass=None if mass is None else mass.unsqueeze(1),
                queries=queries,
                seen=[seen[row] for row, _ in members],
                scaling=self.scaling,
                layer_idx=self.layer_idx,
            ),
            keep,
            self.settings,
        )[:, 0]

    def _lay_out(
        self, candidates: _Candidates, rows: list[int], kept: torch.Tensor, capacity: int
    ) -> None:
        """Fill the pool of `rows` with what is `kept` `[b, H, W]` of the candidates.

        The transient is a copy of one tensor's pool.
        """
        index = torch.tensor(rows, device=self.device)
        counts = kept.sum(-1)
        stored = [self.rows.stored[row] for row in rows]
        room = capacity - torch.tensor(stored, device=self.device).unsqueeze(-1)
        offsets = (counts + room).cumsum(-1) - (counts + room)
        size = capacity * self.heads
        slots = (offsets.unsqueeze(-1) + kept.cumsum(-1) - 1).where(kept, size)
        # Where each slot's token comes from: head and address. One slot takes what is not kept.
        length = next(iter(candidates.tensors.values())).shape[2]
        head = torch.arange(self.heads, device=self.device).view(-1, 1)
        origin = candidates.addresses[index] + head * length
        source = torch.zeros(len(rows), size + 1, dtype=torch.int64, device=self.device)
        source = source.scatter_(1, slots.flatten(1), origin.flatten(1))[:, :size].unsqueeze(1)
        for name, tensor in candidates.tensors.items():
            head = source // length if tensor.shape[1] > 1 else torch.zeros_like(source)
            laid = tensor[index.view(-1, 1, 1), head, source % length].detach()
            if name not in self.storage or self.storage[name].shape[2] != size:
                self.storage.put(name, laid)
            elif len(rows) == self.rows.batch:
                self.storage[name].copy_(laid)
            else:
                self.storage[name][index] = laid
        if len(rows) == self.rows.batch:
            self._offsets = offsets
        else:
            self._offsets = self._offsets.index_copy(0, index, offsets)
        for row, own, average in zip(rows, counts.tolist(), stored, strict=True):
            self._excess[row] = [count - average for count in own]


def _look_up(
    tensor: torch.Tensor, rows: torch.Tensor, heads: torch.Tensor, addresses: torch.Tensor
) -> torch.Tensor:
    """`[n, L, ...]` of `[B, A, N, ...]`, for rows `[n]`, heads `[n]`, addresses `[n, L]`."""
    where = heads if tensor.shape[1] > 1 else torch.zeros_like(heads)
    return tensor[rows.unsqueeze(1), where.unsqueeze(1), addresses]
