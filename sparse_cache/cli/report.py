"""The closing table of `sparse-cache run`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from transformers.cache_utils import Cache

from ..statistics import CacheStats
from .answer import Answer
from .comparison import Divergence

ABSENT = "-"


@dataclass(frozen=True)
class Comparison:
    """All that the table shows; the dense side and what needs it are None with `--no-dense`."""

    sparse: Answer
    stats: CacheStats
    dense: Answer | None = None
    equal_tokens: float | None = None
    divergence: Divergence | None = None


def dense_bytes(cache: Cache) -> int:
    """Bytes of the keys and values that a cache of transformers holds."""
    tensors = [
        tensor
        for layer in cache.layers
        for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None))
        if tensor is not None
    ]
    return sum(tensor.nbytes for tensor in tensors)


def print_report(console: Console, comparison: Comparison) -> None:
    """Print the table, then the comparison of the two answers in words."""
    stats, dense = comparison.stats, comparison.dense
    table = Table(box=SIMPLE_HEAD, title_justify="left", pad_edge=False)
    table.add_column("")
    table.add_column("dense", justify="right")
    table.add_column("sparse", justify="right", style="bold")

    dense_cache_bytes = stats.bytes_dense if dense is None else dense_bytes(dense.cache)
    # The two answers may differ in length, so the saving is stated for the sparse one's own tokens.
    saved = f"{format_bytes(stats.bytes_held)} ({stats.share_of_dense:.0%} of dense)"
    rows = [
        (
            "new tokens",
            str(len(dense.tokens)) if dense else ABSENT,
            str(len(comparison.sparse.tokens)),
        ),
        ("tokens/s", _speed(dense), _speed(comparison.sparse)),
        ("tokens seen", _seen(dense), str(stats.tokens_seen)),
        ("tokens kept, at most, per layer and head", _seen(dense), str(stats.tokens_kept)),
        ("evictions, over all layers", "0" if dense else ABSENT, str(stats.evictions)),
        ("KV bytes held", format_bytes(dense_cache_bytes) if dense else ABSENT, saved),
        ("KV bytes dense would hold", ABSENT, format_bytes(stats.bytes_dense)),
    ]
    for row in rows:
        table.add_row(*row)
    console.print(table)

    if comparison.equal_tokens is not None:
        console.print(
            f"Equal tokens, position by position: [bold]{comparison.equal_tokens:.1%}[/] "
            "[dim](one different token early on makes two different texts)[/]"
        )
    if comparison.divergence is not None:
        console.print(
            f"Mean KL(dense || sparse) along the dense answer: "
            f"[bold]{max(comparison.divergence.mean_kl, 0.0):.4f} nats[/]; "
            f"same likeliest token: [bold]{comparison.divergence.same_top_token:.1%}[/]"
        )
    if not stats.evictions:
        console.print(
            "[yellow]Nothing was evicted: prompt and answer fit budget + interval. "
            "Lower --budget or raise --max-new-tokens to see the cache at work.[/]"
        )


def format_bytes(count: int) -> str:
    """`7864320` gives `7.5 MiB`."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.1f} {units[0]}"


def _speed(answer: Answer | None) -> str:
    if answer is None or math.isnan(answer.tokens_per_second):
        return ABSENT
    return f"{answer.tokens_per_second:.1f}"


def _seen(answer: Answer | None) -> str:
    return ABSENT if answer is None else str(answer.cache.get_seq_length())
