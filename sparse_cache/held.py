"""What a budgeted layer holds: tokens per row, and all that belongs to them."""

from __future__ import annotations

import torch

from .chunk import Chunk
from .quantization import SCALES, dequantize, quantize
from .query_window import QueryWindow
from .rows import RowCounts
from .scoring import Candidates, check_keys, choose_kept, score_tokens
from .settings import BudgetSettings
from .storage import TokenStorage, gather_tokens
from .trace import DeathRecord


class HeldTokens:
    """Rows of tokens, left-aligned in storage, each row as many as it has.

    Keys, values, positions, accumulated attention, the last queries and the trace move together.
    Padding is dropped when it comes and every row evicts on its own schedule, so a row in a batch
    goes through the states that it goes through alone.

    Args:
        settings: how much is kept.
        layer_idx: the layer that the tokens belong to.
        batch: rows.
        device: where the tokens lie.
    """

    def __init__(
        self, settings: BudgetSettings, layer_idx: int, batch: int, device: torch.device
    ) -> None:
        self.settings = settings
        self.layer_idx = layer_idx
        self.device = device
        self.rows = RowCounts(settings, batch)
        self.storage = TokenStorage()
        self.queries = QueryWindow(settings.window)
        self.deaths: DeathRecord | None = None
        self.seen = 0
        """Columns seen: steps along the batch's token axis, padding included."""
        self.scaling = 1.0
        """Factor of the attention logits."""
        self.heads_together = False
        """Whether all heads keep the same tokens."""
        self.least_slots = 0
        """Slots to show to attention even if no row fills them."""
        self.dtype = torch.float32
        """Of keys and values as attention reads them."""
        self._placed = self.rows.stored
        self._row_ends: torch.Tensor | None = None

    # ------------------------------------------------------------------ keys and values

    def encoded(self, tokens: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Tensors by name as they are stored: keys and values with their scales, if quantized."""
        if self.settings.quantization is None:
            return tokens
        stored = dict(tokens)
        for name, scales in SCALES.items():
            if name in tokens and tokens[name].dtype != torch.int8:
                stored[name], stored[scales] = quantize(tokens[name])
        return stored

    def decoded(self, name: str, slots: int | None = None) -> torch.Tensor:
        """`[B, H, slots, D]`: the first `slots` keys or values (None: all) as attention reads them;
        a view of what is stored unless that is quantized."""
        tensor = self.storage[name][:, :, :slots]
        if tensor.dtype != torch.int8:
            return tensor
        return dequantize(tensor, self.storage[SCALES[name]][:, :, :slots], self.dtype)

    def rounded(
        self, name: str, tokens: torch.Tensor, encoded: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """`tokens` `[B, H, T, D]` with the values of their `encoded` form, but their gradient."""
        values = dequantize(encoded[name], encoded[SCALES[name]], self.dtype)
        return tokens + (values - tokens).detach() if tokens.requires_grad else values

    def placeholder(self, name: str, slots: int) -> torch.Tensor:
        """NaN in the shape `[B, H, slots, D]` of keys or values, which takes no memory."""
        tensor = self.storage[name]
        nan = torch.full((1, 1, 1, 1), torch.nan, dtype=self.dtype, device=tensor.device)
        return nan.expand(*tensor.shape[:2], slots, tensor.shape[3])

    def write(self, name: str, tokens: torch.Tensor, slot: int | torch.Tensor) -> None:
        """Store `[B, H, T, ...]` at slots `slot ..`, or one token a row at slots `[B]` int64."""
        for part, tensor in self.encoded({name: tokens}).items():
            self.storage.write(part, tensor, slot)

    @property
    def fixed(self) -> bool:
        """Whether all tensors stay at their addresses, for compiled graphs."""
        return self.storage.fixed

    @fixed.setter
    def fixed(self, fixed: bool) -> None:
        self.storage.fixed = self.queries.fixed = fixed

    def fits(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Whether what is allocated could hold tokens like `keys` and `values`."""
        return self.dtype == keys.dtype and all(
            (kept.shape[:2], kept.shape[3], kept.device)
            == (new.shape[:2], new.shape[3], new.device)
            for kept, new in ((self.storage["keys"], keys), (self.storage["values"], values))
        )

    def take_over(self, other: HeldTokens) -> None:
        """Use the memory of `other`, whose tokens are lost."""
        self.storage, self.queries = other.storage, other.queries
        self.storage.order = None
        for name in self.storage:
            self.storage[name].zero_()

    # ------------------------------------------------------------------ slots out of order

    def ensure_order(self) -> None:
        """Have an `order`: the slot of each token by age, for evictions that fill holes."""
        if self.storage.order is None:
            positions = self.storage["positions"]
            slot = torch.arange(positions.shape[2], dtype=torch.int32, device=positions.device)
            self.storage.order = slot.expand(positions.shape).contiguous()

    def restore_order(self) -> None:
        """Bring the tokens back into the order of the sequence, so that slot i is the i-th oldest.

        The transient is one copy of one tensor.
        """
        if self.storage.order is None:
            return
        self.place()
        order = self.storage.order[:, :, : self.rows.longest]
        self.storage.order = None
        slot = torch.arange(order.shape[2], device=order.device)
        stored = torch.tensor(self.rows.stored, device=order.device).view(-1, 1, 1)
        # Beyond a row's length the order means nothing.
        index = torch.where(slot < stored, order.long(), slot)
        for name in self.storage:
            if name != "positions":
                tensor = self.storage[name]
                tensor[:, :, : index.shape[2]] = gather_tokens(tensor, index)

    @property
    def placed(self) -> list[int]:
        """Tokens that have their positions, per row."""
        return self._placed

    def mark_placed(self) -> None:
        """All tokens have been given their positions."""
        self._placed = self.rows.stored

    def last_queries(self) -> torch.Tensor:
        """`[B, Hq, window, D]`."""
        assert self.queries.data is not None
        return self.queries.data[:, :, -self.settings.window :]

    def check_keys(self) -> None:
        """Raise ValueError if a stored key holds NaN."""
        for row, stored in enumerate(self.rows.stored):
            check_keys(self.decoded("keys", stored)[row], self.layer_idx)

    # ------------------------------------------------------------------ counts

    @property
    def slots(self) -> int:
        """Slots in use: the length of the longest row."""
        return max(self.rows.longest, self.least_slots)

    def add(self, tokens: int) -> None:
        """Every row got `tokens` real tokens, which are in storage already."""
        self.seen += tokens
        self.rows.add(tokens)

    def free_slots(self) -> torch.Tensor:
        """`[B]` int64: the first free slot of each row; its distance to the longest row is fixed
        between evictions, so the device copy is made once."""
        if self._row_ends is None:
            stored = torch.tensor(self.rows.stored, device=self.device)
            self._row_ends = stored - self.rows.longest
        return self._row_ends + self.rows.longest

    def place(self) -> None:
        """Give the tokens that came since the last call their positions: consecutive ones."""
        stored = self.rows.stored
        if self._placed != stored:
            positions = self.storage["positions"]
            count, seen, placed = (
                torch.tensor(each, device=positions.device, dtype=positions.dtype).view(-1, 1, 1)
                for each in (stored, self.rows.real_seen, self._placed)
            )
            slot = torch.arange(positions.shape[2], device=positions.device, dtype=positions.dtype)
            new = slot >= placed
            positions.copy_(torch.where(new, seen - count + slot, positions))
            if (order := self.storage.order) is not None:
                order.copy_(torch.where(new, slot, order))
            self._placed = stored

    def forget_beyond(self) -> None:
        """Forget what was derived from the rows' lengths; zero the mass of free slots."""
        self._placed = self.rows.stored
        self._row_ends = None
        if "mass" in self.storage:
            mass = self.storage["mass"]
            stored = torch.tensor(self._placed, device=mass.device).view(-1, 1, 1)
            mass.masked_fill_(torch.arange(mass.shape[2], device=mass.device) >= stored, 0.0)

    def _index(self, rows: list[int]) -> torch.Tensor | None:
        """`[b]` int64; None for all rows, which needs no copies."""
        if len(rows) == self.rows.batch:
            return None
        return torch.tensor(rows, device=self.device)

    def _choose(self, rows: list[int], tokens: dict[str, torch.Tensor], keep: int) -> torch.Tensor:
        """Slots `[b, H, keep]` of `tokens` that stay in `rows`, which are noted in the trace."""
        candidates = self._candidates(rows, tokens)
        kept = choose_kept(candidates, keep, self.settings, heads_together=self.heads_together)
        self.record_deaths(rows, candidates.positions, kept)
        return kept

    def record_deaths(self, rows: list[int], positions: torch.Tensor, kept: torch.Tensor) -> None:
        """Note, if that is wanted, that of `positions` `[b, H, S]` only `kept` `[b, H, N]` stay."""
        if self.deaths is not None:
            self.deaths.evict(self._index(rows), positions, kept, at=self.seen)

    def _candidates(self, rows: list[int], tokens: dict[str, torch.Tensor]) -> Candidates:
        queries = self.queries.data
        if queries is not None:
            queries = _pick(queries, rows)[:, :, -self.settings.window :]
        seen = self.rows.real_seen
        return Candidates(
            keys=tokens["keys"],
            values=tokens["values"],
            positions=tokens["positions"],
            mass=tokens.get("mass"),
            queries=queries if self.settings.policy.needs_queries else None,
            seen=[seen[row] for row in rows],
            scaling=self.scaling,
            layer_idx=self.layer_idx,
        )

    def _full_rows(self) -> dict[tuple[int, int], list[int]]:
        """Rows that have to evict, by the tokens they store and keep."""
        groups: dict[tuple[int, int], list[int]] = {}
        for row, stored in enumerate(self.rows.stored):
            if self.rows.is_full(row):
                groups.setdefault((stored, self.rows.kept(row)), []).append(row)
        return groups

    def score_full_rows(self, scores: torch.Tensor) -> None:
        """Write the policy's scores of rows that have to evict into `scores` `[B, H, S]`."""
        for (stored, keep), rows in self._full_rows().items():
            sources = {name: self.storage[name] for name in self.storage}
            sources |= {name: self.decoded(name) for name in SCALES}
            tokens = {name: _pick(source, rows)[:, :, :stored] for name, source in sources.items()}
            some = score_tokens(self._candidates(rows, tokens), keep, self.settings)
            if len(rows) == self.rows.batch:
                scores[:, :, :stored] = some
            else:
                scores[self._index(rows), :, :stored] = some.float()

    def evict(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Evict in place in every row that is full.

        Args:
            keys: `[B, Hk, slots, D]` as attention saw them.
            values: `[B, Hk, slots, Dv]`.
        """
        self.restore_order()
        self.place()
        for (stored, keep), rows in self._full_rows().items():
            sources = {"keys": keys, "values": values, "positions": self.storage["positions"]}
            if "mass" in self.storage:
                sources["mass"] = self.storage["mass"]
            tokens = {name: _pick(source, rows)[:, :, :stored] for name, source in sources.items()}
            kept = self._choose(rows, tokens, keep)
            self.storage.compact(self._index(rows), kept)
            self.rows.evicted(rows, keep)
        self.forget_beyond()

    def take(
        self,
        chunk: Chunk,
        sources: dict[str, torch.Tensor],
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        may_evict: bool,
        spare: int,
    ) -> None:
        """Move what survives of `[stored slots | chunk]` into storage, row group by row group.

        Args:
            chunk: the chunk.
            sources: `[B, H, slots + T, ...]` by name: what is stored. A "mass" is that given by
                this chunk's queries alone.
            keys: `[B, Hk, slots + T, D]` as attention saw them, which are what is scored.
            values: the same for values.
            may_evict: whether full rows evict now.
            spare: slots to allocate beyond those that rows fill.
        """
        slots, order = sources["keys"].shape[2] - chunk.length, chunk.padding_first
        heads = sources["keys"].shape[1]
        real = chunk.real or [chunk.length] * self.rows.batch
        if slots:
            self.place()
        before = self.rows.stored
        if slots and "mass" in sources:
            mass = sources["mass"].clone()
            mass[:, :, :slots] += self.storage["mass"][:, :, :slots]
            sources = sources | {"mass": mass}
        sources = {name: reorder_chunk(source, order) for name, source in sources.items()}
        sources["positions"] = self._joined_positions(chunk, slots, real, heads)
        keys, values = reorder_chunk(keys, order), reorder_chunk(values, order)

        if self.settings.record and self.deaths is None:
            self.deaths = DeathRecord(self.rows.batch, heads, self.device)
        self.seen = chunk.start + chunk.length
        self.rows.add_real(real)
        after = self.rows.stored
        if may_evict:
            after = [self.rows.kept(row) for row in range(self.rows.batch)]
        examples = self.encoded({name: source[:, :, :1] for name, source in sources.items()})
        self.storage.reserve(max(after), self.rows.limit + spare, examples)
        groups: dict[tuple[int, int, int], list[int]] = {}
        for row, sizes in enumerate(zip(before, real, after, strict=True)):
            groups.setdefault(sizes, []).append(row)
        for (stored, new, keep), rows in groups.items():
            tokens = {
                name: _real_tokens(_pick(source, rows), slots, stored, new)
                for name, source in sources.items()
            }
            if keep < stored + new:
                as_seen = {
                    "keys": _real_tokens(_pick(keys, rows), slots, stored, new),
                    "values": _real_tokens(_pick(values, rows), slots, stored, new),
                }
                kept = self._choose(rows, tokens | as_seen, keep)
                tokens = {name: gather_tokens(each, kept) for name, each in tokens.items()}
                self.rows.evicted(rows, keep)
            self.storage.replace(self._index(rows), self.encoded(tokens))
        self.forget_beyond()

    def _joined_positions(
        self, chunk: Chunk, slots: int, real: list[int], heads: int
    ) -> torch.Tensor:
        """Positions `[B, H, slots + T]` int32 of the stored slots and the chunk, padding first."""
        first = torch.tensor(
            [
                seen - (chunk.length - new)
                for seen, new in zip(self.rows.real_seen, real, strict=True)
            ],
            dtype=torch.int32,
            device=self.device,
        )
        column = torch.arange(chunk.length, dtype=torch.int32, device=self.device)
        positions = (first[:, None] + column).unsqueeze(1).expand(-1, heads, -1)
        if not slots:
            return positions
        return torch.cat([self.storage["positions"][:, :, :slots], positions], dim=2)

    def left_after_hiding(self, hidden: torch.Tensor) -> list[int]:
        """Tokens that each row has left in its poorest head once `hidden` are forgotten.

        Args:
            hidden: `[B, R]` boolean by position: the tokens to forget.
        """
        self.restore_order()
        self.place()
        return self._alive(hidden).sum(-1).amin(1).tolist()

    def uneven(self, hidden: torch.Tensor) -> bool:
        """Whether heads of a row differ in how many tokens they have left."""
        counts = self._alive(hidden).sum(-1)
        return bool((counts != counts[:, :1]).any())

    def _alive(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[B, H, slots]`, True for stored tokens that are not `hidden` `[B, R]`."""
        positions = self.storage["positions"][:, :, : self.slots].long()
        slot = torch.arange(positions.shape[2], device=positions.device)
        stored = torch.tensor(self.rows.stored, device=positions.device).view(-1, 1, 1)
        by_head = hidden.to(positions.device).unsqueeze(1).expand(-1, positions.shape[1], -1)
        return (slot < stored) & ~by_head.gather(2, positions.where(slot < stored, 0))

    def hide(self, hidden: torch.Tensor, position: torch.Tensor, left: list[int]) -> None:
        """Forget stored tokens that a later mask declares to be padding.

        Args:
            hidden: `[B, R]` boolean by position: the tokens to forget.
            position: `[B, R]`: the position of every other token from now on.
            left: tokens that each row keeps, at most what `left_after_hiding` says.
        """
        width, before = self.slots, self.rows.stored
        alive = self._alive(hidden)
        positions = self.storage["positions"][:, :, :width]
        device, slot = positions.device, torch.arange(width, device=positions.device)
        by_head = position.to(device).unsqueeze(1).expand(-1, positions.shape[1], -1)
        positions.copy_(by_head.gather(2, positions.long().where(alive, 0)))
        # Where a head has more tokens left than another, its oldest behind the sinks go.
        rank = slot + width * (positions < self.settings.sinks)
        order = rank.where(alive, -1).sort(dim=-1, descending=True).indices[..., : max(left)]
        wanted = torch.tensor(left, device=device).view(-1, 1, 1)
        chosen = torch.arange(order.shape[-1], device=device) < wanted
        order = order.where(chosen, width).sort(dim=-1).values.clamp(max=width - 1)
        self.storage.compact(None, order)
        gone = [stored - kept for stored, kept in zip(before, left, strict=True)]
        self.rows.remove(gone, seen_too=hidden.sum(-1).tolist())
        self.forget_beyond()
        # transformers has been told the old width for the mask under way.
        self.least_slots = width

    def select_rows(self, rows: torch.Tensor) -> None:
        """Reorder, repeat or drop rows; `rows` `[B']` int64 are the old rows of the new ones."""
        if not self.storage:
            return
        self.place()
        self.storage.select_rows(rows)
        self.queries.select_rows(rows)
        if self.deaths is not None:
            self.deaths.select_rows(rows)
        self.rows.select(rows)
        self._placed = self.rows.stored
        self._row_ends = None

    def remove_last(self, tokens: int) -> None:
        """Every row loses its last `tokens`, as if they had never come."""
        self.restore_order()
        self.place()
        self.seen -= tokens
        each = [tokens] * self.rows.batch
        self.rows.remove(each, seen_too=each)
        self.queries.drop_last(tokens)
        self.forget_beyond()

    def stored_bytes(self) -> int:
        """Bytes of the keys and values allocated, used or not, and of their scales."""
        names = (*SCALES, *SCALES.values())
        return sum(self.storage[name].nbytes for name in names if name in self.storage)

    def bookkeeping_bytes(self) -> int:
        """Bytes of everything else the layer holds: positions, queries, masses, deaths."""
        names = (*SCALES, *SCALES.values())
        others = [self.storage[name] for name in self.storage if name not in names]
        others += [t for t in (self.queries.data, self._row_ends) if t is not None]
        if self.deaths is not None:
            others.append(self.deaths.data)
        return sum(tensor.nbytes for tensor in others)

    def dense_bytes(self) -> int:
        """Bytes that a dense cache would hold for the same columns."""
        if not self.storage:
            return 0
        tensors = (self.storage["keys"], self.storage["values"])
        numbers = sum(tensor[:, :, 0].numel() for tensor in tensors)
        return self.seen * numbers * self.dtype.itemsize


def _pick(tensor: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """`tensor[rows]`, without a copy where that is everything."""
    return tensor if len(rows) == tensor.shape[0] else tensor[rows]


def reorder_chunk(tokens: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    """Put the last `T` tokens of `[B, H, slots + T, ...]` in the order `[B, T]` (None: as is)."""
    if order is None:
        return tokens
    slots = tokens.shape[2] - order.shape[1]
    stored = torch.arange(slots, device=tokens.device).expand(order.shape[0], -1)
    index = torch.cat([stored, order.to(tokens.device) + slots], dim=1)
    return gather_tokens(tokens, index.unsqueeze(1).expand(-1, tokens.shape[1], -1))


def _real_tokens(source: torch.Tensor, slots: int, stored: int, new: int) -> torch.Tensor:
    """The `stored` first and `new` last tokens of `[B, H, slots + T, ...]`."""
    if stored == slots and slots + new == source.shape[2]:
        return source
    end = source[:, :, source.shape[2] - new :]
    return torch.cat([source[:, :, :stored], end], dim=2) if stored else end
