"""The roofline's bytes and times, against values worked out by hand."""

from __future__ import annotations

import pytest

from benchmarks.roofline import CARDS, Card, Shape, Work, decode_work, eviction_work, scoring_work


def test_the_slower_of_memory_and_arithmetic_counts() -> None:
    card = Card("test", bandwidth=10.0, peak=100.0)
    assert Work(bytes=20, operations=100).seconds(card) == 2.0
    assert Work(bytes=20, operations=500).seconds(card) == 5.0


def test_decode() -> None:
    work = decode_work(Shape(layers=2, batch=3, heads=5, group=4, head_size=64), tokens=100)
    heads = 2 * 3 * 5
    # A key and a value of 64 bf16, and 4 bytes of mass read and written; 4 queries and outputs.
    assert work.bytes == heads * (100 * (256 + 8) + 4 * 256)
    # 2 products a key, each a multiplication and an addition for every channel and query head.
    assert work.operations == heads * 4 * 100 * 2 * 2 * 64


def test_scoring_grows_with_the_square_of_the_tokens() -> None:
    small, large = (scoring_work(Shape(budget=b, interval=b)) for b in (256, 512))
    assert large.bytes == 2 * small.bytes
    assert 3.5 < large.operations / small.operations < 4


def test_eviction_moves_what_the_way_has_to() -> None:
    shape = Shape(layers=4, batch=2, heads=2, budget=256, interval=64)
    ways = eviction_work(shape)
    heads, row = 4 * 2 * 2, 2 * 128 * 2
    # A gather reads and writes every survivor's key and value twice.
    assert ways["gather and copy"]["moved"] > 4 * heads * 256 * row
    # No more holes than evicted tokens: at most 64 rows are read and written.
    assert ways["hole filling"]["moved"] < 2 * heads * 64 * row + heads * 320 * 40
    assert ways["hole filling"]["moved"] < ways["compaction"]["moved"]
    doubled = eviction_work(Shape(layers=8, batch=2, heads=2, budget=256, interval=64))
    for way, figures in ways.items():
        assert doubled[way]["moved"] == pytest.approx(2 * figures["moved"], rel=0.05)
    same = doubled["gather and copy"]["transient"]
    assert same == pytest.approx(ways["gather and copy"]["transient"], rel=0.05)


def test_cards_are_in_plausible_units() -> None:
    for card in CARDS:
        assert 1e12 < card.bandwidth < 1e13
        # Operations that a byte pays for: between 100 and 400 on all of them.
        assert 100 < card.peak / card.bandwidth < 400
