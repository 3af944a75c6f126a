"""The arithmetic on paper, against values worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import recipe_memory
from benchmarks.recipe_memory import (
    FULL,
    LORA,
    PLANS,
    QLORA,
    QWEN_7B,
    QWEN_32B,
    Model,
    Setting,
    activation_bytes,
    attended_pairs,
    decode_step,
    gather_seconds,
    held,
    learner_operations,
    learner_seconds,
    mean_held,
    rollout_state,
    rollouts,
    row_bytes,
    rows_that_fit,
    tables,
    training_state,
    transient_bytes,
)
from benchmarks.roofline import Card

TINY = Model(
    "tiny", layers=2, hidden=8, heads=4, kv_heads=2, head_size=2, intermediate=16, vocabulary=10
)
SETTING = Setting(
    card=Card("test", bandwidth=1e6, peak=1e9), gpus=4, prompt=4, budget=8, interval=4, rank=3
)
# Queries and output 8 x 8 each, keys and values 8 x 4 each, an MLP of three times 8 x 16.
LINEAR = 64 + 64 + 32 + 32 + 384
# Biases 8 + 4 + 4, norms 8 + 8.
LAYER = LINEAR + 16 + 16
WEIGHTS = 2 * LAYER + 2 * 80 + 8
# Each matrix has 3 x (in + out): 16, 16, 12, 12, and three times 24.
ADAPTERS = 2 * 3 * (16 + 16 + 12 + 12 + 72)


def test_published_sizes() -> None:
    """The model cards say 7.61 and 32.5 billion weights, 6.53 and 31.0 without embeddings."""
    assert QWEN_7B.parameters == 7_615_616_512
    assert QWEN_32B.parameters == 32_763_876_352
    assert (QWEN_7B.parameters - 2 * QWEN_7B.embedding) / 1e9 == pytest.approx(6.53, abs=0.01)
    assert (QWEN_32B.parameters - 2 * QWEN_32B.embedding) / 1e9 == pytest.approx(31.0, abs=0.25)
    # Keys and values: 2 x 28 x 4 x 128 x 2 and 2 x 64 x 8 x 128 x 2.
    assert (QWEN_7B.kv_bytes, QWEN_32B.kv_bytes) == (57_344, 262_144)
    assert (QWEN_7B.trace_bytes, QWEN_32B.trace_bytes) == (448, 2048)


def test_weights_of_a_tiny_model() -> None:
    assert (TINY.linear, TINY.layer, TINY.parameters) == (LINEAR, LAYER, WEIGHTS)
    assert TINY.adapters(3) == ADAPTERS
    assert TINY.kv_bytes == 2 * 2 * 2 * 2 * 2


def test_state_of_all_weights() -> None:
    state = training_state(TINY, FULL, SETTING)
    assert (state.weights, state.gradients, state.optimizer) == (WEIGHTS, WEIGHTS, 2 * WEIGHTS)
    # Root and two layers in bf16; gradients of the root and of a layer.
    assert state.gathered == 2 * (160 + 2 * LAYER) + 2 * (160 + LAYER)
    decoding = rollout_state(TINY, FULL, SETTING)
    assert decoding.total == WEIGHTS + 2 * WEIGHTS + 2 * (160 + 2 * LAYER)
    assert rollout_state(TINY, FULL, SETTING, whole=True).gathered == 2 * WEIGHTS


def test_state_of_adapters() -> None:
    state = training_state(TINY, LORA, SETTING)
    assert state.weights == (2 * WEIGHTS + 4 * ADAPTERS) / 4
    assert (state.gradients, state.optimizer) == (ADAPTERS, 2 * ADAPTERS)
    state = training_state(TINY, QLORA, SETTING)
    four_bits = 2 * LINEAR * (0.5 + 1 / 64 + 4 / 16384)
    assert state.weights == pytest.approx(four_bits + 4 * (WEIGHTS - 2 * LINEAR) + 4 * ADAPTERS)
    assert (state.gradients, state.optimizer, state.gathered) == (4 * ADAPTERS, 8 * ADAPTERS, 0)


def test_tokens_held() -> None:
    """Budget 8 and interval 4: all up to 12, then 9, 10, 11, 12 and again."""
    assert [held(seen, 8, 4) for seen in range(1, 19)] == [*range(1, 13), 9, 10, 11, 12, 9, 10]
    # A prompt of 4 and 10 more: 5 to 12, then 9 and 10.
    assert mean_held(SETTING, 10, sparse=True) == (sum(range(5, 13)) + 19) / 10
    assert mean_held(SETTING, 10, sparse=False) == sum(range(5, 15)) / 10


def test_bytes_of_a_rollout() -> None:
    assert row_bytes(TINY, SETTING, 10, sparse=False) == 14 * 32
    # 12 tokens stored, and a trace of 14: 4 x 2 x 2 bytes each.
    assert row_bytes(TINY, SETTING, 10, sparse=True) == 12 * 32 + 14 * 16
    # A prompt of 4 in the MLP: 3 x 16 + 2 x 8 of 2 bytes; 18 bytes of each of 10 logits are less.
    assert transient_bytes(TINY, SETTING) == 4 * 2 * 64
    assert rows_that_fit(TINY, SETTING, 3 * (448 + 512) + 959, 10, sparse=False) == 3
    assert rows_that_fit(TINY, SETTING, -1.0, 10, sparse=False) == 0


def test_decoding_is_bound_by_memory_operations_or_links() -> None:
    # All but the embedding, and 5 rows of 6.5 tokens.
    moved = 2 * (WEIGHTS - 80) + 5 * 6.5 * 32
    fast = Setting(card=Card("test", 1e6, 1e15), gpus=4)
    assert decode_step(TINY, FULL, fast, 5, 6.5, whole=True) == pytest.approx(moved / 1e6)
    # 2 a weight of layers and head, 4 a token, head and coordinate.
    operations = 5 * (2 * (2 * LINEAR + 80) + 4 * 2 * 4 * 2 * 6.5)
    slow = Setting(card=Card("test", 1e15, 1e6), gpus=4)
    assert decode_step(TINY, FULL, slow, 5, 6.5, whole=True) == pytest.approx(operations / 1e6)
    # Unpacked weights are read, written and read again.
    moved = (0.5 + 1 / 64 + 4 / 16384 + 4) * 2 * LINEAR + 4 * 80 + 5 * 6.5 * 32
    assert decode_step(TINY, QLORA, fast, 5, 6.5) == pytest.approx(moved / 1e6, rel=1e-3)
    no_limit = Setting(card=Card("test", 1e30, 1e30), gpus=4)
    gather = 2 * 2 * LAYER * 0.75 / 450e9
    assert decode_step(TINY, LORA, no_limit, 5, 6.5) == pytest.approx(gather)
    assert gather_seconds(TINY, LORA, no_limit) == pytest.approx(gather)
    assert gather_seconds(TINY, QLORA, no_limit) == 0
    assert gather_seconds(TINY, FULL, no_limit, whole=True) == 0
    # 28 layers of 233,057,792 weights: 13.05 GB, seven eighths of them over 450 GB/s.
    assert gather_seconds(QWEN_7B, FULL, Setting()) == pytest.approx(0.02538, rel=1e-3)


def test_rollouts_of_the_large_model() -> None:
    setting = Setting()
    found = rollouts(QWEN_7B, FULL, setting, 8192, sparse=False, whole=True)
    # 72 GB less 12 bytes a weight in eighths and 2 whole; a row of 8,448 tokens and its prompt.
    room = 72e9 - QWEN_7B.parameters * (12 / 8 + 2)
    prompt = 256 * 2 * (3 * 18944 + 2 * 3584)
    assert found.rows == int(room / (8448 * 57_344 + prompt)) == 87
    moved = 2 * (QWEN_7B.parameters - 152064 * 3584) + 87 * (256 + 8193 / 2) * 57_344
    assert found.tokens_per_second == pytest.approx(8 * 87 / (moved / 3.35e12), rel=1e-6)
    assert found.per_hour == pytest.approx(3600 * found.tokens_per_second / 8192)
    # 128 on each GPU: two calls of 64.
    moved = 2 * (QWEN_7B.parameters - 152064 * 3584) + 64 * (256 + 8193 / 2) * 57_344
    assert found.step_seconds == pytest.approx(2 * 8192 * moved / 3.35e12, rel=1e-6)
    assert rollouts(QWEN_32B, FULL, Setting(usable=40e9), 512, sparse=True).step_seconds is None


def test_operations_of_the_learner() -> None:
    assert attended_pairs(SETTING, 10, sparse=False) == 105
    assert attended_pairs(SETTING, 10, sparse=True) == sum(range(1, 13)) + 19
    matrices, attention = learner_operations(TINY, SETTING, 10, sparse=True)
    assert matrices == 8 * (14 * 2 * LINEAR + 10 * 80)
    assert attention == 18 * 2 * 4 * 2 * 97
    seconds = learner_seconds(TINY, SETTING, 10, sparse=True)
    assert seconds == pytest.approx(1024 * (matrices + attention) / (4 * 0.4 * 1e9))


def test_replayed_pairs_are_those_counted_from_traces() -> None:
    """docs/replay.md: least / dense at budget 512 and interval 128, of 1,024 to 8,192 tokens."""
    for tokens, share in ((1024, 0.813), (2048, 0.485), (4096, 0.262), (8192, 0.136)):
        dense, sparse = (
            attended_pairs(Setting(), tokens - 256, sparse=way) for way in (False, True)
        )
        assert sparse / dense == pytest.approx(share, abs=2e-3)


def test_activations() -> None:
    inputs, working = activation_bytes(TINY, tokens=14)
    assert inputs == 2 * 8 * 14 * 2
    assert working == (12 * 8 + 4 * 4 + 6 * 16) * 14 * 2


def test_tables_are_whole() -> None:
    for title, header, rows in tables(Setting()).values():
        assert title and rows
        assert all(len(row) == len(header) for row in rows)
    assert len(tables(Setting())["state"][2]) == 2 * len(PLANS)


def test_command_writes_the_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe_memory.main(["--docs", str(tmp_path)])
    written = (tmp_path / "recipe-memory.md").read_text()
    assert "Nothing here was measured" in written
    assert "GB on each of 8 GPUs" in capsys.readouterr().out
    kept = Path(recipe_memory.DOCS) / "recipe-memory.md"
    assert written == kept.read_text(), "run python -m benchmarks.recipe_memory"
    with pytest.raises(SystemExit):
        recipe_memory.main(["--budget", "0"])
