"""The transformer of the presets that start from nothing, and its supervised warm start."""

from __future__ import annotations

import random

import torch
from tqdm.auto import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from sparse_cache import NEVER, EvictionTrace
from sparse_cache.replay import replay

from .tasks.recall import RecallTask

_MOST_COPIES = 800
_FIRST_WORD = 7
"""Id of the first token of `recall_tokenizer` that is not a sign."""


def tiny_model(vocabulary: int, end: int, pad: int) -> LlamaForCausalLM:
    """3 layers of width 64, 4 query heads, 2 KV heads: 0.14 million parameters."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=168,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        # Larger than usual for the width, and positions that differ more at short range: both
        # halve the steps until such a model looks up what followed a token.
        initializer_range=0.04,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=pad,
    )
    return LlamaForCausalLM(config)


def warm_start(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    task: RecallTask,
    *,
    steps: int,
    dropout_steps: int,
    batch: int,
    learning_rate: float,
    seed: int,
    progress: bool = True,
) -> float:
    """Supervised training in three parts: copying, the task, the task with tokens hidden.

    1. Repeating random sequences, until 95 % of the repeated tokens are right. That is where a
       model of this size learns to look up what followed a token; on the task alone it often never
       does.
    2. `steps` on right answers of the task.
    3. `dropout_steps` with tokens hidden at random, as a cache would evict them. Without, so small
       a model is at chance under eviction, and nearly all of its rollouts would be rejected.

    Returns:
        The last loss in nats a token.

    Raises:
        RuntimeError: the model did not learn to copy.
    """
    generator = random.Random(f"warm-start/{seed}")
    noise = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01
    )
    model.train()
    total = _MOST_COPIES + steps + dropout_steps
    bar = tqdm(total=total, desc="warm start", disable=not progress, mininterval=1.0)

    def update(logits: torch.Tensor, labels: torch.Tensor, share: float) -> float:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * share
        targets = labels[:, 1:].flatten()
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        bar.update()
        return loss.item()

    for step in range(_MOST_COPIES):
        ids, labels = _copies(len(tokenizer), batch, generator, noise)
        logits = model(input_ids=ids, use_cache=False).logits
        update(logits, labels, min(1.0, (step + 1) / 40))
        repeated = labels[:, 1:] >= 0
        if ((logits[:, :-1].argmax(-1) == labels[:, 1:]) & repeated).sum() > 0.95 * repeated.sum():
            break
    else:
        raise RuntimeError(
            f"the warm start did not learn to copy in {_MOST_COPIES} steps; try another seed."
        )
    loss = float("nan")
    for step in range(steps + dropout_steps):
        ids, mask, labels = _answers(tokenizer, task, batch, generator)
        # Falls to a twentieth over the last two thirds.
        share = max(0.05, min(1.0, 1.5 * (1 - step / max(1, steps + dropout_steps))))
        if step < steps:
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        else:
            with replay(model, random_trace(model, mask, noise), way="dense"):
                logits = model(input_ids=ids, attention_mask=mask).logits
        loss = update(logits, labels, share)
    bar.close()
    model.eval()
    return loss


def _copies(
    vocabulary: int, batch: int, generator: random.Random, noise: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct random tokens three times over, with labels on the repetitions."""
    length = generator.randint(4, 12)
    first = min(_FIRST_WORD, vocabulary - length)
    ids = torch.rand(batch, vocabulary - first, generator=noise).argsort(1)[:, :length] + first
    ids = ids.repeat(1, 3)
    labels = ids.clone()
    labels[:, :length] = -100
    return ids, labels


def _answers(
    tokenizer: PreTrainedTokenizerBase, task: RecallTask, batch: int, generator: random.Random
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    pairs = [task.supervised(generator) for _ in range(batch)]
    inputs = tokenizer(
        [f"{prompt} {answer} {tokenizer.eos_token}" for prompt, answer in pairs],
        return_tensors="pt",
        padding=True,
    )
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    labels = ids.masked_fill(mask == 0, -100)
    for row, (prompt, _) in enumerate(pairs):
        labels[row, : int(mask[row].argmax()) + len(prompt.split())] = -100
    return ids, mask, labels


def random_trace(
    model: LlamaForCausalLM, mask: torch.Tensor, generator: torch.Generator
) -> EvictionTrace:
    """A trace in which each token of each layer and KV head may die at a random time.

    In half of the rows, between 0 and 60 % of the tokens die, each between 8 and 32 columns after
    it was read.

    Args:
        model: whose layers and heads.
        mask: `[B, T]`, 0 for padding.
        generator: draws it.
    """
    batch, length = mask.shape
    heads = model.config.num_key_value_heads
    columns = torch.arange(length)
    deaths = []
    share = torch.rand(batch, 1, 1, generator=generator) * 0.6
    share = share * (torch.rand(batch, 1, 1, generator=generator) < 0.5)
    for _ in range(model.config.num_hidden_layers):
        after = torch.randint(8, 33, (batch, heads, length), generator=generator)
        death = columns + after
        lives = torch.rand(batch, heads, length, generator=generator) >= share
        death = torch.where(lives | (death >= length), NEVER, death).int()
        deaths.append(death.masked_fill(mask[:, None] == 0, 0))
    return EvictionTrace(deaths, list(range(len(deaths))), length)
