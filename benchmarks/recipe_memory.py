"""Memory and time of the recipe on 8 GPUs of 80 GB, on paper: computed from bytes and operations.

    python -m benchmarks.recipe_memory

Nothing is measured here. The tables go to the terminal and to docs/recipe-memory.md, with every
assumption that they rest on. Sizes are in bytes, times in seconds, GB are 10^9 bytes.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .documents import DOCS
from .reporting import markdown_table, print_table
from .roofline import CARDS, Card, Work

GB = 1e9
H100 = next(card for card in CARDS if card.name == "H100")
BF16, FP32 = 2, 4
ADAM = 2 * FP32
"""Both moments of a weight."""
NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Of a 4-bit weight: 8 bits of scale for 64 weights, and float32 for 256 such scales."""
SAMPLING = BF16 + 4 * FP32
"""Of an entry of a row's logits: as computed, and in float32 as such, divided by the temperature,
and as log-probabilities and probabilities."""
LINK = 450e9
"""Bytes a second that an H100 SXM receives over NVLink (900 GB/s are both directions)."""
PER_PAIR = 4 + 4 + 10
"""Operations for each query head, pair and coordinate: forward, recomputed forward, backward."""
EFFICIENCY = 0.4
"""Of the peak rate, in the learner."""
NEW_TOKENS = (512, 2048, 8192, 32768)
ROLLOUTS = 1024
"""Of a training step: 128 prompts times 8."""


@dataclass(frozen=True)
class Model:
    """Shape of a Qwen2 model, with untied embeddings."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocabulary: int

    @property
    def linear(self) -> int:
        """Weights of the matrices in one layer."""
        attention = self.hidden * self.head_size * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def layer(self) -> int:
        """All weights of one layer: those, biases of queries, keys and values, and two norms."""
        return self.linear + self.head_size * (self.heads + 2 * self.kv_heads) + 2 * self.hidden

    @property
    def embedding(self) -> int:
        """Weights of the embedding; the head has as many."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All weights."""
        return self.layers * self.layer + 2 * self.embedding + self.hidden

    @property
    def kv_bytes(self) -> int:
        """Keys and values of one token in bfloat16."""
        return 2 * self.layers * self.kv_heads * self.head_size * BF16

    @property
    def trace_bytes(self) -> int:
        """Of one token in an eviction trace: int32 for each layer and KV head."""
        return 4 * self.layers * self.kv_heads

    def adapters(self, rank: int) -> int:
        """Weights of LoRA adapters beside every matrix of every layer."""
        queries, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        attention = 2 * (self.hidden + queries) + 2 * (self.hidden + keys)
        return self.layers * rank * (attention + 3 * (self.hidden + self.intermediate))


# https://huggingface.co/Qwen/Qwen2.5-7B/blob/main/config.json and the same of Qwen2.5-32B.
QWEN_7B = Model("Qwen2.5-7B", 28, 3584, 28, 4, 128, 18944, 152064)
QWEN_32B = Model("Qwen2.5-32B", 64, 5120, 40, 8, 128, 27648, 152064)


@dataclass(frozen=True)
class Setting:
    """What the tables are about."""

    card: Card = H100
    gpus: int = 8
    usable: float = 72e9
    """Of the 80 GB of a GPU; the rest is for its context, the libraries and fragmentation."""
    prompt: int = 256
    budget: int = 512
    interval: int = 128
    rank: int = 32
    """Of LoRA."""


@dataclass(frozen=True)
class State:
    """Bytes on each GPU, outside rollouts and activations."""

    weights: float
    gradients: float
    optimizer: float
    gathered: float
    """Weights (and, in the backward, their gradients) that are whole for a while."""

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.gathered


# ---------------------------------------------------------------------- what is trained


FULL, LORA, QLORA = "all weights, FSDP2", "LoRA, FSDP2", "4-bit LoRA, DDP"
PLANS = (FULL, LORA, QLORA)


def training_state(model: Model, plan: str, setting: Setting) -> State:
    """Bytes on each GPU in the backward of a training step."""
    share = 1 / setting.gpus
    count, adapters = model.parameters, model.adapters(setting.rank)
    if plan == QLORA:
        # The base is whole on every GPU; what is not a matrix of a layer is float32.
        matrices = model.layers * model.linear
        base = NF4 * matrices + FP32 * (count - matrices)
        return State(base + FP32 * adapters, FP32 * adapters, ADAM * adapters, 0)
    # Embedding and head belong to the root, which is whole all the time; of the layers the one that
    # is computed and the next one are. With all weights trained, gradients of the root and of one
    # layer are whole too.
    root = 2 * model.embedding
    gathered = BF16 * (root + 2 * model.layer)
    if plan == LORA:
        base = BF16 * count + FP32 * adapters
        return State(share * base, share * FP32 * adapters, share * ADAM * adapters, gathered)
    gathered += BF16 * (root + model.layer)
    return State(share * FP32 * count, share * FP32 * count, share * ADAM * count, gathered)


def rollout_state(model: Model, plan: str, setting: Setting, *, whole: bool = False) -> State:
    """Bytes on each GPU during rollouts: gradients are gone.

    Args:
        whole: whether FSDP2 keeps all weights gathered (`fsdp_reshard_after_forward: false`).
    """
    state = training_state(model, plan, setting)
    gathered = 0.0
    if plan != QLORA:
        gathered = BF16 * (2 * model.embedding + 2 * model.layer)
        gathered = BF16 * model.parameters if whole else gathered
    return State(state.weights, 0, state.optimizer, gathered)


# ---------------------------------------------------------------------- rollouts


def held(seen: int, budget: int, interval: int) -> int:
    """Tokens that a query attends to when `seen` tokens, itself included, have come."""
    limit = budget + interval
    return seen if seen <= limit else budget + 1 + (seen - limit - 1) % interval


def mean_held(setting: Setting, new_tokens: int, *, sparse: bool) -> float:
    """Tokens held, on average over the steps of a rollout."""
    seen = range(setting.prompt + 1, setting.prompt + new_tokens + 1)
    if not sparse:
        return sum(seen) / new_tokens
    return sum(held(each, setting.budget, setting.interval) for each in seen) / new_tokens


def row_bytes(model: Model, setting: Setting, new_tokens: int, *, sparse: bool) -> int:
    """Keys and values of a rollout at its longest; under the budget also its recorded trace."""
    tokens = setting.prompt + new_tokens
    if not sparse:
        return tokens * model.kv_bytes
    stored = min(tokens, setting.budget + setting.interval)
    return stored * model.kv_bytes + tokens * model.trace_bytes


def transient_bytes(model: Model, setting: Setting) -> int:
    """Of a row: the prompt in an MLP, or the sampling of a token, whichever is more."""
    prefill = setting.prompt * BF16 * (3 * model.intermediate + 2 * model.hidden)
    return max(prefill, SAMPLING * model.vocabulary)


def rows_that_fit(
    model: Model, setting: Setting, room: float, new_tokens: int, *, sparse: bool
) -> int:
    """Rollouts that a GPU decodes at a time in `room` bytes."""
    each = row_bytes(model, setting, new_tokens, sparse=sparse) + transient_bytes(model, setting)
    return max(0, math.floor(room / each))


def decode_step(
    model: Model, plan: str, setting: Setting, rows: int, tokens: float, *, whole: bool = False
) -> float:
    """Least seconds of a decoding step.

    Args:
        rows: of the batch.
        tokens: that a row holds.
        whole: whether weights of FSDP2 stay gathered.
    """
    matrices = model.layers * model.linear
    read = BF16 * (model.parameters - model.embedding)
    if plan == QLORA:
        # Unpacked to bfloat16 before every product: 4 bits read, 16 written, 16 read.
        read = round((NF4 + 2 * BF16) * matrices + FP32 * model.embedding)
    products = 2 * (matrices + model.embedding)
    attention = 4 * model.layers * model.heads * model.head_size * tokens
    work = Work(round(read + rows * tokens * model.kv_bytes), round(rows * (products + attention)))
    return max(work.seconds(setting.card), gather_seconds(model, plan, setting, whole=whole))


def gather_seconds(model: Model, plan: str, setting: Setting, *, whole: bool = False) -> float:
    """Least seconds to receive the other GPUs' pieces of the layers; 0 where nothing is sharded."""
    if plan == QLORA or whole:
        return 0.0
    return BF16 * model.layers * model.layer * (1 - 1 / setting.gpus) / LINK


@dataclass(frozen=True)
class Rollouts:
    """Of the whole machine, on paper."""

    rows: int
    """On each GPU at a time."""
    tokens_per_second: float
    per_hour: float
    step_seconds: float | None
    """Of the rollouts of one training step; None if none fits."""


def rollouts(
    model: Model, plan: str, setting: Setting, new_tokens: int, *, sparse: bool, whole: bool = False
) -> Rollouts:
    """How fast rollouts of `new_tokens` are decoded, as many at a time as fit."""
    room = setting.usable - rollout_state(model, plan, setting, whole=whole).total
    rows = rows_that_fit(model, setting, room, new_tokens, sparse=sparse)
    if rows == 0:
        return Rollouts(0, 0.0, 0.0, None)
    tokens = mean_held(setting, new_tokens, sparse=sparse)
    seconds = decode_step(model, plan, setting, rows, tokens, whole=whole)
    rate = setting.gpus * rows / seconds
    # In a training step there may be fewer rows than fit, or several calls one after another.
    needed = math.ceil(ROLLOUTS / setting.gpus)
    calls = math.ceil(needed / rows)
    in_a_call = math.ceil(needed / calls)
    step = decode_step(model, plan, setting, in_a_call, tokens, whole=whole)
    return Rollouts(rows, rate, 3600 * rate / new_tokens, calls * new_tokens * step)


# ---------------------------------------------------------------------- the learner


def attended_pairs(setting: Setting, new_tokens: int, *, sparse: bool) -> int:
    """Pairs of a query and a key of one head, over a prompt and its rollout."""
    tokens = setting.prompt + new_tokens
    if not sparse:
        return tokens * (tokens + 1) // 2
    return sum(held(seen, setting.budget, setting.interval) for seen in range(1, tokens + 1))


def learner_operations(
    model: Model, setting: Setting, new_tokens: int, *, sparse: bool
) -> tuple[int, int]:
    """Of one pass over a rollout with all weights trained: forward, again, and backward.

    Returns:
        Those of the matrices, and those of attention.
    """
    tokens = setting.prompt + new_tokens
    # 2 a weight forward, 2 recomputed, 4 backward; the head reads completions only.
    matrices = 8 * (tokens * model.layers * model.linear + new_tokens * model.embedding)
    pairs = attended_pairs(setting, new_tokens, sparse=sparse)
    return matrices, PER_PAIR * model.layers * model.heads * model.head_size * pairs


def learner_seconds(model: Model, setting: Setting, new_tokens: int, *, sparse: bool) -> float:
    """Seconds of a training step's pass over all its rollouts, on all GPUs."""
    operations = sum(learner_operations(model, setting, new_tokens, sparse=sparse))
    return ROLLOUTS * operations / (setting.gpus * EFFICIENCY * setting.card.peak)


def activation_bytes(model: Model, tokens: int) -> tuple[int, int]:
    """Of one row in the backward, with gradient checkpointing, in bfloat16.

    Returns:
        The layers' inputs, and what the layer holds that is being recomputed.
    """
    keys = model.kv_heads * model.head_size
    # Saved, in hidden sizes: residual twice (2), norms' inputs in float32 (4) and outputs (2),
    # queries before and after their rotation (2), attention's output (1), and a gradient (1); keys
    # before and after, values, and a gradient (4); gate, its activation, up and their product, and
    # two gradients (6).
    working = 12 * model.hidden + 4 * keys + 6 * model.intermediate
    return model.layers * model.hidden * tokens * BF16, working * tokens * BF16


# ---------------------------------------------------------------------- tables

Table = tuple[str, Sequence[str], list[Sequence[object]]]
CASES = ((QWEN_7B, FULL, True), (QWEN_32B, LORA, False), (QWEN_32B, QLORA, False))
"""Rollouts are shown for these: model, plan, and whether weights are kept whole."""


def tables(setting: Setting) -> dict[str, Table]:
    """Title, header and rows of each table."""
    return {
        "state": _state_table(setting),
        "kv": _kv_table(setting),
        "rollouts": _rollout_table(setting),
        "activations": _activation_table(setting),
        "learner": _learner_table(setting),
        "step": _step_table(setting),
    }


def _state_table(setting: Setting) -> Table:
    rows: list[Sequence[object]] = []
    for model in (QWEN_7B, QWEN_32B):
        for plan in PLANS:
            state = training_state(model, plan, setting)
            parts = (state.weights, state.gradients, state.optimizer, state.gathered, state.total)
            decoding = rollout_state(model, plan, setting).total
            left = [_gb(setting.usable - taken) for taken in (state.total, decoding)]
            rows.append((model.name, plan, *map(_gb, parts), *left))
    header: tuple[str, ...] = (
        "model",
        "trained",
        "weights",
        "gradients",
        "optimizer",
        "gathered",
        "total",
    )
    header += ("left for activations", "left for rollouts")
    return f"GB on each of {setting.gpus} GPUs", header, rows


def _kv_table(setting: Setting) -> Table:
    here = math.ceil(ROLLOUTS / setting.gpus)
    rows: list[Sequence[object]] = []
    for model in (QWEN_7B, QWEN_32B):
        for new in NEW_TOKENS:
            dense, sparse = (row_bytes(model, setting, new, sparse=way) for way in (False, True))
            trace = (setting.prompt + new) * model.trace_bytes
            one = [f"{each / 1e6:.0f}" for each in (dense, sparse, trace)]
            all_rows = [_gb(here * each) for each in (dense, sparse)]
            rows.append((model.name, new, *one, *all_rows, f"{dense / sparse:.1f}"))
    header: tuple[str, ...] = ("model", "new tokens", "dense MB", "budget MB", "of it trace MB")
    header += (f"{here} dense GB", f"{here} budget GB", "dense / budget")
    return "KV bytes of rollouts", header, rows


def _rollout_table(setting: Setting) -> Table:
    rows: list[Sequence[object]] = []
    for model, plan, whole in CASES:
        for new in NEW_TOKENS:
            dense, sparse = (
                rollouts(model, plan, setting, new, sparse=way, whole=whole)
                for way in (False, True)
            )
            fit = [each.rows for each in (dense, sparse)]
            rates = [f"{each.tokens_per_second:,.0f}" for each in (dense, sparse)]
            hourly = [f"{each.per_hour:,.0f}" for each in (dense, sparse)]
            gain = f"{sparse.per_hour / dense.per_hour:.1f}" if dense.rows else None
            rows.append((model.name, plan, new, *fit, *rates, *hourly, gain))
    header: tuple[str, ...] = (
        "model",
        "trained",
        "new tokens",
        "rows dense",
        "rows budget",
        "tokens/s dense",
    )
    header += ("tokens/s budget", "per hour dense", "per hour budget", "budget / dense")
    return "Rollouts, as many at a time as fit", header, rows


def _activation_table(setting: Setting) -> Table:
    rows: list[Sequence[object]] = []
    for model in (QWEN_7B, QWEN_32B):
        for new in NEW_TOKENS:
            inputs, working = activation_bytes(model, setting.prompt + new)
            rows.append((model.name, new, *map(_gb, (inputs, working, inputs + working))))
    return "GB of activations", ("model", "new tokens", "layers' inputs", "one layer", "sum"), rows


def _learner_table(setting: Setting) -> Table:
    rows: list[Sequence[object]] = []
    for model in (QWEN_7B, QWEN_32B):
        for new in NEW_TOKENS:
            matrices, dense = learner_operations(model, setting, new, sparse=False)
            _, replayed = learner_operations(model, setting, new, sparse=True)
            shown = [f"{each / 1e12:,.1f}" for each in (matrices, dense, replayed)]
            shares = (replayed / dense, (matrices + replayed) / (matrices + dense))
            rows.append((model.name, new, *shown, *(f"{each:.2f}" for each in shares)))
    header: tuple[str, ...] = (
        "model",
        "new tokens",
        "matrices",
        "attention dense",
        "attention replayed",
    )
    return "Operations", (*header, "of dense attention", "of the dense pass"), rows


def _step_table(setting: Setting) -> Table:
    rows: list[Sequence[object]] = []
    for new in NEW_TOKENS:
        sampled = [
            rollouts(QWEN_7B, FULL, setting, new, sparse=way, whole=True).step_seconds
            for way in (False, True)
        ]
        learned = [learner_seconds(QWEN_7B, setting, new, sparse=way) for way in (False, True)]
        minutes = [None if each is None else f"{each / 60:.2f}" for each in (*sampled, *learned)]
        rows.append((new, *minutes))
    header = ("new tokens", "rollouts dense", "rollouts budget", "learner dense")
    return "Minutes of a training step", (*header, "learner replayed"), rows


def _gb(count: float) -> str:
    return f"{count / GB:.1f}"


# ---------------------------------------------------------------------- the document


def compose(setting: Setting) -> str:
    """The document as Markdown."""
    found = {name: markdown_table(*table[1:]) for name, table in tables(setting).items()}
    card, limit = setting.card, setting.budget + setting.interval
    gather = {
        model.name: 1e3 * gather_seconds(model, FULL, setting) for model in (QWEN_7B, QWEN_32B)
    }
    parts = [
        "# Memory and time of the recipe, on paper",
        "Written by `python -m benchmarks.recipe_memory`; do not edit it by hand.",
        "**Computed from bytes and operations. Nothing here was measured, and nothing of it has "
        "run on these GPUs.** Times are the least that the hardware allows: real ones are longer, "
        "above all for small batches and short texts.",
        f"{setting.gpus} {card.name} GPUs of 80 GB in one machine; rollouts under a budget of "
        f"{setting.budget} tokens with an interval of {setting.interval}, after prompts of "
        f"{setting.prompt} tokens, all of them as long as they may get. GB are 10^9 bytes.",
        "## Assumptions",
        _bullets(
            "Shapes are those of the published configurations, "
            "[Qwen2.5-7B](https://huggingface.co/Qwen/Qwen2.5-7B/blob/main/config.json) (28 "
            "layers, hidden size 3,584, 28 query and 4 KV heads of size 128, MLP of 18,944) and "
            "[Qwen2.5-32B](https://huggingface.co/Qwen/Qwen2.5-32B/blob/main/config.json) (64, "
            "5,120, 40 and 8 of 128, 27,648), vocabulary 152,064. They give "
            f"{QWEN_7B.parameters:,} and {QWEN_32B.parameters:,} weights.",
            f"Of a GPU's 80 GB, {setting.usable / GB:.0f} can be used. It moves "
            f"{card.bandwidth / 1e12:.2f} TB/s, computes {card.peak / 1e12:.0f} TFLOP/s in "
            f"bfloat16 and receives {LINK / GB:.0f} GB/s over NVLink (data sheet of the H100 SXM).",
            "Weights, gradients and both moments of AdamW are float32 (16 bytes a weight), in "
            "equal pieces under FSDP2; what is computed with is gathered in bfloat16: embedding "
            "and head all the time, of the layers two at a time. Gradients are reduced after "
            "every micro-batch: accumulating them first would leave 2 bytes a weight whole on "
            "every GPU. There is no model for reference (another 4 bytes a weight in pieces; none "
            "with LoRA, where the base is the reference).",
            f"LoRA has rank {setting.rank} beside every matrix of every layer "
            f"({QWEN_7B.adapters(setting.rank) / 1e6:.0f} and "
            f"{QWEN_32B.adapters(setting.rank) / 1e6:.0f} million weights) in float32 over a base "
            "in bfloat16. The 4-bit base (NF4 with quantised scales, "
            f"{NF4:.3f} bytes a weight) is whole on every GPU, with embedding and head in "
            "float32, and is unpacked to bfloat16 for every product.",
            "Rollouts run beside weights and optimizer, without gradients. A row takes its keys "
            "and values in bfloat16; under the budget also the recorded trace, 4 bytes for each "
            "token, layer and KV head; and the more of its prompt's pass through an MLP and its "
            "logits' sampling. Prompts of all rows are read at once.",
            "A decoding step takes the largest of: its bytes over the bandwidth (all weights but "
            "the embedding once, and the tokens held on average once), its operations over the "
            "peak rate, and, where weights are in pieces, gathering the layers: "
            + " and ".join(f"{ms:.0f} ms for {name}" for name, ms in gather.items())
            + ". Not counted: launches (eager decoding of dozens of layers takes tens of "
            "milliseconds a step whatever the batch), the evictions ([gpu.md](gpu.md)), the "
            "prompts, and rows that end early.",
            "The learner keeps each layer's input in bfloat16 and recomputes the rest of it; "
            "attention never holds a matrix of tokens by tokens, and logits come in chunks. "
            f"It reaches {EFFICIENCY:.0%} of the peak rate, in all parts alike.",
        ),
        "## What training holds",
        f"GB on each GPU in the backward, before activations, and what is left of "
        f"{setting.usable / GB:.0f}:",
        found["state"],
        _on_states(setting),
        "## Keys and values of rollouts",
        f"Of one rollout, and of the {math.ceil(ROLLOUTS / setting.gpus)} that a GPU has in a "
        f"training step of {ROLLOUTS:,}. A token is {QWEN_7B.kv_bytes:,} bytes of Qwen2.5-7B and "
        f"{QWEN_32B.kv_bytes:,} of Qwen2.5-32B; under the budget there are never more than "
        f"{limit}, and only the trace grows:",
        found["kv"],
        "## Rollouts",
        "Rows that fit on a GPU at a time, and tokens and rollouts of all GPUs together. All "
        "weights of Qwen2.5-7B are kept whole while decoding (`fsdp_reshard_after_forward: "
        "false`); LoRA of Qwen2.5-32B gathers them in every step:",
        found["rollouts"],
        _on_rollouts(setting),
        "## The learner",
        "GB of activations of one row of a micro-batch with gradient checkpointing. "
        "Distillation (`smd`) keeps the inputs of both passes, the dense and the replayed one:",
        found["activations"],
        "Operations of one pass over one rollout, in 10^12, all weights trained: forward, again "
        f"for checkpointing, and backward. Attention takes {PER_PAIR} for each pair of a query "
        "and a key, query head and coordinate (4 forward, 4 again, 10 backward, as in "
        "[replay.md](replay.md)). Replayed are the pairs that the trace leaves visible; gathering "
        "by period computes about a tenth more of them:",
        found["learner"],
        "LoRA needs no gradients of the matrices, which leaves 6 of their 8 operations a weight. "
        "Not in the table: the pass without gradients that every method makes over its rollouts "
        "for their dense log-probabilities (a quarter of the matrices' operations, and 4 of the "
        f"{PER_PAIR} of attention); and distillation's dense pass.",
        "## A training step",
        f"Qwen2.5-7B, all weights, {ROLLOUTS:,} rollouts; minutes of decoding (with at most the "
        "rows that fit, and no more than there are) and of one pass of the learner:",
        found["step"],
    ]
    return "\n\n".join(parts) + "\n"


def _on_states(setting: Setting) -> str:
    full = training_state(QWEN_32B, FULL, setting).total
    whole = rollout_state(QWEN_7B, FULL, setting, whole=True).total
    return (
        f"All weights of Qwen2.5-32B {'do not fit' if full > setting.usable else 'fit'} "
        f"({_gb(full)} GB of {setting.usable / GB:.0f}): that takes a second machine, an optimizer "
        "in 8 bits or in the host's memory, or LoRA. Qwen2.5-7B with its weights kept whole for "
        f"decoding takes {_gb(whole)} GB during rollouts."
    )


def _on_rollouts(setting: Setting) -> str:
    at = NEW_TOKENS[2]
    dense, sparse = (
        rollouts(QWEN_7B, FULL, setting, at, sparse=way, whole=True) for way in (False, True)
    )
    weights = BF16 * (QWEN_7B.parameters - QWEN_7B.embedding) / setting.card.bandwidth
    return (
        f"With {at:,} new tokens {sparse.per_hour / dense.per_hour:.0f} times as many rollouts an "
        f"hour: more rows share the {1e3 * weights:.1f} ms in which weights are read, and each of "
        "them reads fewer keys and values. Rollouts hardly longer than the budget gain next to "
        "nothing."
    )


def _bullets(*lines: str) -> str:
    return "\n".join(f"- {line}" for line in lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables and write the document."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recipe_memory", description="Memory and time on paper."
    )
    parser.add_argument("--prompt", type=int, default=Setting.prompt, help="tokens of a prompt")
    parser.add_argument("--budget", type=int, default=Setting.budget)
    parser.add_argument("--interval", type=int, default=Setting.interval)
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder for recipe-memory.md")
    options = parser.parse_args(arguments)
    for name in ("prompt", "budget", "interval"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(options, name)}.")
    setting = Setting(prompt=options.prompt, budget=options.budget, interval=options.interval)
    for title, header, rows in tables(setting).values():
        print_table(title, header, rows)
    options.docs.mkdir(parents=True, exist_ok=True)
    target = options.docs / "recipe-memory.md"
    target.write_text(compose(setting))
    print(f"\nwrote {target}")


if __name__ == "__main__":
    main()
