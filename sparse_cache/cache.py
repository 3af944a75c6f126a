"""`SparseBudgetCache`: a transformers cache that keeps a fixed number of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    StaticSlidingWindowLayer,
)

from . import attention, masking, reuse
from .allocators import BudgetAllocator, resolve_allocator
from .columns import Columns
from .errors import UnsupportedModelError, warn_once
from .hybrid import is_hybrid
from .kernel_eviction import evict_together
from .layer import BudgetLayer
from .layer_kinds import LayerKinds
from .layer_plan import LayerPlan
from .policies import EvictionPolicy, resolve_policy
from .settings import BudgetSettings
from .static_layer import StaticBudgetLayer
from .statistics import CacheStats
from .steps import UnseenSteps
from .trace import EvictionTrace

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class SparseBudgetCache(Cache):
    """A KV cache that keeps at most a fixed number of tokens per layer and KV head.

    ```python
    cache = SparseBudgetCache(budget=512)
    output = model.generate(**inputs, past_key_values=cache)
    print(cache.stats())
    ```

    A row of a batch evicts when it stores `budget + interval` tokens, and then keeps `budget` of
    them, chosen by the policy per layer and KV head. Positions stay those of the sequence. With a
    budget that is never reached, results equal those of `DynamicCache`. Only full-attention layers
    have a budget; sliding-window, chunked and linear-attention layers are left as they are.

    Args:
        budget: tokens kept per layer and KV head after an eviction: an int, or a float in (0, 1)
            as a share of the real tokens that the row has seen.
        policy: a policy's name or an [`EvictionPolicy`].
        allocation: how the budget is divided, an allocator's name or a [`BudgetAllocator`]:
            `"uniform"`, `"pyramid"` (lower layers keep more) or `"adaptive"` (the KV heads of a
            layer share its budget). The bytes held are the same, up to the rounding of a budget
            that is a share.
        interval: new tokens between two evictions. While decoding, a row never holds more than
            `budget + interval` tokens in a budgeted layer, where `budget` is what the allocation
            gives the layer (on average over its heads).
        window: most recent tokens that are never evicted; also the number of queries that
            query-based policies score with.
        sinks: first real tokens of a row that are never evicted.
        config: the model's config. Needed by models with linear-attention layers; others are
            recognised while they run.
        record: keep the eviction trace, see [`trace`][SparseBudgetCache.trace].
        static: hand out tensors of one shape in every decoding step, so that `generate` compiles
            it (on GPUs by itself) into one graph; see [`evict`][SparseBudgetCache.evict] for loops
            of your own. Needs a `budget` in tokens.
        quantization: `"int8"` stores keys and values in 8 bits with one float32 scale for each
            token of a head; no coordinate is off by more than 1/254 of the token's largest. None
            stores them as they are.
        backend: `"auto"` takes the Triton kernels on a GPU and torch elsewhere; `"torch"` or
            `"triton"` takes just that.

    Raises:
        ValueError, TypeError: an argument makes no sense; the message says what would.
    """

    def __init__(
        self,
        budget: int | float = 512,
        *,
        policy: str | EvictionPolicy = "rkv",
        allocation: str | BudgetAllocator = "uniform",
        interval: int = 128,
        window: int = 8,
        sinks: int = 4,
        config: PreTrainedConfig | None = None,
        record: bool = False,
        static: bool = False,
        quantization: str | None = None,
        backend: str = "auto",
    ) -> None:
        self.settings = BudgetSettings(
            budget=budget,
            policy=resolve_policy(policy),
            interval=interval,
            window=window,
            sinks=sinks,
            record=record,
            static=static,
            backend=backend,
            quantization=quantization,
            allocation=resolve_allocator(allocation),
        )
        self._plan = LayerPlan(self.settings)
        super().__init__(layers=[])
        self._columns = Columns()
        self._kinds = LayerKinds(config)
        self._open: BudgetLayer | None = None
        self._conversation: torch.Tensor | None = None
        self._record_past = False
        self._steps = UnseenSteps()
        self._make_layers()
        attention.install()
        masking.install()

    # ------------------------------------------------------------------ layers

    def _new_layer(self, layer_idx: int) -> Any:
        stock = self._kinds.stock_layer(layer_idx)
        if self.settings.static:
            layer = self._new_static_layer(layer_idx, stock)
        elif stock is None or is_hybrid(stock):
            layer = self._plan.new_layer(layer_idx, self._columns, self._kinds, stock)
        else:
            layer = stock
        if self._record_past and hasattr(layer, "activate_past_recording"):
            layer.activate_past_recording()
        return layer

    def _new_static_layer(self, layer_idx: int, stock: Any) -> Any:
        if stock is None:
            return StaticBudgetLayer(
                self.settings, layer_idx, self._columns, self._kinds, self._steps
            )
        if type(stock) is DynamicSlidingWindowLayer:
            window = stock.sliding_window
            return StaticSlidingWindowLayer(max_cache_len=window, sliding_window=window)
        if not stock.is_compileable:
            raise UnsupportedModelError(
                f"layer {layer_idx} of this model is a {type(stock).__name__}, which cannot be "
                "compiled; use static=False."
            )
        return stock

    def _learn(self, config: PreTrainedConfig) -> None:
        """Take the kinds of all layers from the model that is about to run."""
        first = not self._kinds.known
        self._kinds.learn(config)
        if first and not (self.layers and self._suits_layers()):
            self._make_layers()

    def _suits_layers(self) -> bool:
        """Whether the layers there, kept through a reset, are what the model wants."""
        wanted = [self._new_layer(index) for index in range(len(self._kinds))]
        return not self.settings.static or [_likeness(each) for each in wanted] == [
            _likeness(each) for each in self.layers
        ]

    def _make_layers(self) -> None:
        self.layers = [self._new_layer(index) for index in range(len(self._kinds))]
        if self.layers and not self._budgeted():
            self._warn_no_budget()

    def _budgeted(self) -> list[BudgetLayer]:
        return [layer for layer in self.layers if isinstance(layer, BudgetLayer)]

    def _warn_no_budget(self) -> None:
        if all(self.is_linear):
            raise UnsupportedModelError(
                "config describes a model without attention layers, so there is nothing to put "
                "under a budget; use the model's own cache."
            )
        warn_once(
            "no layer of this model has full attention (all are sliding-window, chunked or "
            "linear), so SparseBudgetCache has nothing to evict and acts like DynamicCache."
        )

    def _settle(self) -> None:
        """Finish the layer that was updated last, and put layers that turned out not to have full
        attention into transformers' hands."""
        layer = self._open
        self._open = None
        for static in self._steps.layers:
            # Steps of a compiled graph fill all layers before Python hears of any.
            if static.waits_for_attention:
                continue
            static.catch_up()
            if not static.is_due_with_others:
                static.settle()
        if layer is None or self.layers[layer.layer_idx] is not layer:
            return
        if layer.seen == 0 and layer.is_of_another_kind():
            stock = self._kinds.stock_layer(layer.layer_idx)
            handed = layer.give_up()
            if handed is not None:
                stock.update(*handed)
            if self._record_past and hasattr(stock, "activate_past_recording"):
                stock.activate_past_recording()
            self.layers[layer.layer_idx] = stock
            if len(self.layers) == len(self._kinds) and not self._budgeted():
                self._warn_no_budget()
        elif not layer.is_due_with_others:
            layer.settle()

    def _finish_step(self) -> None:
        """Settle all layers; nothing of the last call of the model is left to do."""
        self._settle()
        due = [layer for layer in self._budgeted() if layer.is_due_with_others]
        if due:
            evict_together([layer.held for layer in due])
            for layer in due:
                layer.evicted_with_others()

    def evict(self) -> None:
        """Evict now in every row that is full.

        Evictions happen by themselves, except in a loop of your own around a compiled model with
        `static=True`: there, call this before each step, or the step after the slots are full ends
        in an index out of bounds. `generate` needs no such call.
        """
        self._finish_step()
        for layer in self._budgeted():
            layer.settle()

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take in the keys and values of a chunk and return all that attention may see.

        Args:
            key_states: `[B, H, T, D]`.
            value_states: `[B, H, T, Dv]`.
            layer_idx: the layer they belong to.

        Returns:
            Keys and values, valid until the layer is updated next.

        Raises:
            ValueError: another batch size, or a layer that the given config does not have.
            UnsupportedModelError: the model cannot be served exactly.
        """
        if torch.compiler.is_dynamo_compiling() and self.settings.static:
            return self._layer_in_graph(layer_idx).update(key_states, value_states, *args, **kwargs)
        if self._open is not None and self._open.layer_idx != layer_idx:
            self._settle()
        if self._kinds.given and layer_idx >= len(self.layers):
            raise ValueError(
                f"config is of another model: it has {len(self.layers)} layers, but the model "
                f"that runs updates layer {layer_idx}; pass config=model.config."
            )
        while len(self.layers) <= layer_idx:
            self.layers.append(self._new_layer(len(self.layers)))
        layer = self.layers[layer_idx]
        if isinstance(layer, BudgetLayer):
            self._open = layer
        return layer.update(key_states, value_states, *args, **kwargs)

    def _layer_in_graph(self, layer_idx: int) -> Any:
        if layer_idx >= len(self.layers) or not self.layers[layer_idx].is_initialized:
            raise UnsupportedModelError(
                "SparseBudgetCache(static=True) compiles decoding steps only; give the prompt to "
                "the model itself, not to its compiled form, as generate does."
            )
        return self.layers[layer_idx]

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Take in keys of a sparse-attention indexer; see `BudgetLayer.update_indexer`."""
        return self.layers[layer_idx].update_indexer(indexer_key_states)

    # ------------------------------------------------------------------ sizes

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns seen so far, evicted or not: the position of the next token."""
        if torch.compiler.is_dynamo_compiling() and self.settings.static:
            return self._layer_in_graph(layer_idx).get_seq_length()
        self._settle()
        return super().get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Sizes `(kv_length, kv_offset)` of the next mask, in stored slots."""
        # Some releases pass the positions themselves instead of their number.
        if isinstance(query_length, torch.Tensor):
            query_length = query_length.shape[0]
        if torch.compiler.is_dynamo_compiling() and self.settings.static:
            return self._layer_in_graph(layer_idx).get_mask_sizes(query_length)
        self._steps.check_finished()
        self._finish_step()
        masking.request_mask(None)
        layer = self._layer_for_mask(layer_idx)
        if layer is None:
            if self.layers and layer_idx < len(self.layers):
                return super().get_mask_sizes(query_length, layer_idx)
            layer = BudgetLayer(self.settings, layer_idx, self._columns, self._kinds)
        masking.request_mask(layer.mask_request(query_length, self._hide, self._learn))
        return layer.get_mask_sizes(query_length)

    def _layer_for_mask(self, layer_idx: int) -> BudgetLayer | None:
        if layer_idx >= len(self.layers):
            return None
        layer = self.layers[layer_idx]
        if isinstance(layer, BudgetLayer):
            return layer
        if layer_idx == 0 and isinstance(layer, LinearAttentionCacheLayerMixin):
            attending = [other for other in self.layers if isinstance(other, CacheLayerMixin)]
            if attending and isinstance(attending[0], BudgetLayer):
                return attending[0]
        return None

    def _hide(self, seen_mask: torch.Tensor) -> None:
        """A mask declares tokens to be padding that were real when they came: forget them."""
        if self.settings.record:
            raise UnsupportedModelError(
                "attention_mask hides tokens that the cache has already seen as real, which the "
                "trace of record=True cannot express; use record=False or cache.reset()."
            )
        allocation = self.settings.allocation
        if allocation.varies_by_layer or allocation.shares_heads:
            raise UnsupportedModelError(
                "attention_mask hides tokens that the cache has already seen as real, which only "
                f"allocation='uniform' serves, not {allocation.name!r}; use that or cache.reset()."
            )
        old = self._columns.real()
        if old is None:
            old = torch.ones_like(seen_mask)
        old = old.to(seen_mask.device)
        if bool((seen_mask & ~old).any()):
            raise UnsupportedModelError(
                "attention_mask shows tokens that were padding when the cache saw them; pass the "
                "mask of the whole conversation unchanged, or call cache.reset()."
            )
        # From columns to each row's real tokens, in order.
        order = old.int().sort(dim=-1, descending=True, stable=True).indices
        hidden = (old & ~seen_mask).gather(-1, order)
        position = (seen_mask.int().cumsum(-1) - 1).gather(-1, order)
        held = [layer.held for layer in self._budgeted() if layer.seen]
        counts = [each.left_after_hiding(hidden) for each in held]
        # One mask serves all layers, so they stay in step with the one that has fewest left.
        left = [min(row) for row in zip(*counts, strict=True)]
        if any(count != left for count in counts) or any(each.uneven(hidden) for each in held):
            warn_once(
                "some heads had evicted real tokens to make room for tokens that are now masked "
                "as padding; the other heads drop their oldest tokens to stay in step."
            )
        for each in held:
            each.hide(hidden, position, left)
        self._columns.replace_real(seen_mask)

    @property
    def is_compileable(self) -> bool:
        """Whether decoding steps can be compiled into one graph."""
        return self.settings.static

    @property
    def is_croppable(self) -> bool:
        """Whether the last tokens can be taken back exactly (after `activate_past_recording`)."""
        return bool(self.layers) and all(layer.is_croppable for layer in self.layers)

    # ------------------------------------------------------------------ linear-attention layers

    def _require_linear(self, layer_idx: int) -> None:
        layer = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        if not isinstance(layer, LinearAttentionCacheLayerMixin):
            raise UnsupportedModelError(
                f"layer {layer_idx} of this model is a linear-attention layer, which the cache "
                "cannot know by itself; pass config=model.config to SparseBudgetCache."
            )

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        """Whether the linear-attention layer has seen tokens."""
        if not self._kinds.known:
            self._require_linear(layer_idx or 0)
        return super().has_previous_state(layer_idx, state_idx)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """The convolution state of a linear-attention layer, None before its first token."""
        self._require_linear(layer_idx)
        return super().get_conv_state(layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """The recurrent state of a linear-attention layer, None before its first token."""
        self._require_linear(layer_idx)
        return super().get_recurrent_state(layer_idx, state_idx)

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Update the convolution state of a linear-attention layer."""
        self._require_linear(layer_idx)
        return super().update_conv_state(conv_states, layer_idx, *args, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Update the recurrent state of a linear-attention layer."""
        self._require_linear(layer_idx)
        return super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)

    # ------------------------------------------------------------------ verbs

    def reset(self) -> None:
        """Forget all tokens; the cache is as new, for any prompt, batch size and weights."""
        self._open = None
        self._conversation = None
        self._record_past = False
        super().reset()
        self._columns.clear()
        self._steps.restart()
        if self._kinds.given:
            return
        # What was learnt from one model need not hold for the next.
        self._kinds = LayerKinds()
        if self.settings.static:
            for layer in self._budgeted():
                layer.kinds = self._kinds
        else:
            self.layers = []

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last `-tokens_to_remove` tokens, exactly or not at all.

        Raises:
            UnsupportedModelError: tokens were evicted since, and `activate_past_recording` was not
                called before they came.
        """
        self._finish_step()
        tokens_to_remove = int(tokens_to_remove)  # older releases give a tensor
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop({tokens_to_remove}): pass minus the number of tokens to take back."
            )
        budgeted = self._budgeted()
        for layer in budgeted:
            layer.check_crop(-tokens_to_remove)
        super().crop(tokens_to_remove)
        self._columns.remove(-tokens_to_remove)

    def prefetch(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        """Bring an offloaded layer back to its device."""
        if self.layers:
            self.layers[layer_idx % len(self.layers)].prefetch()

    def offload(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        """Move a layer's tokens to the CPU until it is updated next."""
        if layer_idx < len(self.layers):
            super().offload(layer_idx, only_non_sliding)

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1, any number of tokens may be seen; the window of a sliding-window layer."""
        if layer_idx is None and not self.layers:
            return -1
        return super().get_max_length(layer_idx)

    def activate_past_recording(self) -> None:
        """Let evictions wait until `crop` confirms the newest tokens (assisted decoding)."""
        self._finish_step()
        self._record_past = True
        super().activate_past_recording()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Move rows along with their beams; `beam_idx` `[B]` int64."""
        self._finish_step()
        super().reorder_cache(beam_idx)
        self._columns.select_rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times, copies side by side."""
        self._finish_step()
        super().batch_repeat_interleave(repeats)
        if self.batch_size > 0:
            rows = torch.arange(self.batch_size // repeats)
            self._columns.select_rows(rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices` `[B']`, or those where a boolean `[B]` is True."""
        self._finish_step()
        super().batch_select_indices(indices)
        rows = indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices
        self._columns.select_rows(rows)

    # ------------------------------------------------------------------ reuse

    @property
    def _is_user_defined(self) -> bool:
        return True

    @_is_user_defined.setter
    def _is_user_defined(self, value: bool) -> None:
        """`generate` marks the cache that it was given; that is where a call begins."""
        self._finish_step()
        self._record_past = False
        for layer in self.layers:
            if isinstance(layer, BudgetLayer):
                layer.stop_past_recording()
            elif getattr(layer, "record_past", False):
                layer.crop(0)
                layer.record_past = False
        seen = self._columns.seen
        self._conversation = reuse.check_continuation(self._conversation, seen)

    # ------------------------------------------------------------------ reports

    def stats(self) -> CacheStats:
        """Counts and bytes so far; see [`CacheStats`]."""
        budgeted = self._budgeted()
        if not any(layer.waits_for_attention for layer in budgeted):
            self._finish_step()
        for layer in budgeted:
            layer.settle_if_done()
        others = [layer for layer in self.layers if not isinstance(layer, BudgetLayer)]
        other_bytes = sum(
            tensor.nbytes
            for layer in others
            for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None))
            if tensor is not None
        )
        return CacheStats(
            tokens_seen=self._columns.seen,
            tokens_kept=max((max(layer.lengths, default=0) for layer in budgeted), default=0),
            evictions=sum(layer.evictions for layer in budgeted),
            tokens_evicted=sum(layer.tokens_evicted for layer in budgeted),
            bytes_held=sum(layer.held.stored_bytes() for layer in budgeted) + other_bytes,
            bytes_dense=sum(layer.held.dense_bytes() for layer in budgeted) + other_bytes,
            bytes_bookkeeping=sum(layer.held.bookkeeping_bytes() for layer in budgeted),
            budgeted_layers=len(budgeted),
            other_layers=len(others),
        )

    def trace(self) -> EvictionTrace:
        """When each token stopped being visible, per layer, row and KV head.

        After a beam search this is the trace of the beams that were running at its end, which need
        not be the sequences that `generate` returns, nor be in their order. For a trace of those,
        feed them to a new cache with `record=True` as they were sampled: the prompt in one call,
        then token by token.

        Raises:
            ValueError: the cache was not made with `record=True`, has seen nothing, or the model
                has no layers with a budget.
        """
        if not self.settings.record:
            raise ValueError("the cache keeps no trace; make it with record=True.")
        self._finish_step()
        layers = [layer for layer in self._budgeted() if layer.deaths is not None]
        if self.layers and not self._budgeted():
            raise ValueError(
                "no layer of this model has a budget, so nothing is evicted and there is no trace."
            )
        if not layers:
            raise ValueError("the cache has seen no tokens yet, so there is no trace of them.")
        for layer in layers:
            layer.settle()
        seen, real = self._columns.seen, self._columns.real()
        return EvictionTrace(
            deaths=[layer.deaths.by_column(real, seen) for layer in layers if layer.deaths],
            layer_indices=[layer.layer_idx for layer in layers],
            tokens_seen=seen,
        )

    def plot(self, path: str | Path | None = None, **options: Any) -> Figure:
        """Draw which tokens are still held, see `sparse_cache.plot.plot_kept_tokens`.

        Args:
            path: where to save the picture; None: nowhere.
            options: passed on.

        Raises:
            ValueError: the cache was not made with `record=True`, or has seen nothing.
            ImportError: matplotlib is not installed.
        """
        from .plot import plot_kept_tokens

        return plot_kept_tokens(self, path, **options)

    def __repr__(self) -> str:
        settings = self.settings
        stats = self.stats()
        modes = [f"allocation={settings.allocation.name!r}, "] * bool(
            settings.allocation.varies_by_layer or settings.allocation.shares_heads
        )
        modes += ["static=True, "] * settings.static
        modes += [f"quantization={settings.quantization!r}, "] * bool(settings.quantization)
        return (
            f"SparseBudgetCache(budget={settings.budget}, policy={settings.policy.name!r}, "
            f"interval={settings.interval}, {''.join(modes)}seen={stats.tokens_seen}, "
            f"kept={stats.tokens_kept}, evictions={stats.evictions}, "
            f"held={stats.bytes_held / 2**20:.1f} MiB, dense={stats.bytes_dense / 2**20:.1f} MiB)"
        )


def _likeness(layer: Any) -> tuple[type, int | None]:
    """What tells one kind of static layer from another."""
    return type(layer), getattr(layer, "max_cache_len", None)
