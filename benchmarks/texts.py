"""English text that is on every machine, and chains of thought that the model writes itself."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

PYTHON_TOPICS = ("types", "compound", "customization", "execmodel", "debugger", "import")
"""Long prose among the help texts that come with Python."""
LICENSES = Path("/usr/share/common-licenses")
LICENSE_NAMES = ("GPL-3", "MPL-2.0")

PROMPTS = (
    "A baker makes 7 trays of 24 rolls every morning. He sells 5 trays to a school and the rest "
    "one by one at 30 cents. He also pays 12 dollars for flour each day. How much does he earn in "
    "a week of six days? Think step by step, check every step, and explain each of them.",
    "Explain to a new gardener how to plan a small vegetable garden for a whole year: which beds "
    "to make, what to sow in which month, and why. Think it through step by step.",
    "Two trains leave stations that are 420 km apart at the same time and drive towards each "
    "other, one at 80 km/h and the other at 60 km/h. A bird flies between them at 100 km/h until "
    "they meet. How far does each train go, and how far does the bird fly? Show all the steps.",
    "Write a careful plan for finding out why a program that worked yesterday gives wrong results "
    "today. Number the steps, and say for each of them what you would learn from it.",
    "A village must choose between building a bridge, a school, or a well. Discuss the reasons "
    "for and against each of the three at length, then come to a decision and defend it.",
    "Find all whole numbers between 1 and 60 that are divisible by 3 or by 5 but not by both. "
    "List them, count them, add them up, and reason aloud while you do it.",
)
"""Questions whose answers ask for a long chain of steps."""


def corpus(tokenizer: Any, length: int, count: int, files: list[Path]) -> list[list[int]]:
    """`count` texts of exactly `length` tokens.

    Args:
        tokenizer: anything with `encode`.
        length: tokens in each text.
        count: how many texts are wanted.
        files: plain text files to take instead of Python's help and the licences.

    Raises:
        ValueError: there is not enough text; the message says how much was found.
    """
    sources = [file.read_text() for file in files] if files else _installed_texts()
    texts: list[list[int]] = []
    # One piece of every source before a second piece of any: more kinds of text.
    encoded = [_encode(tokenizer, source) for source in sources]
    for start in range(0, max(map(len, encoded), default=0), length):
        for tokens in encoded:
            piece = tokens[start : start + length]
            if len(piece) == length:
                texts.append(piece)
    if len(texts) < count:
        raise ValueError(
            f"found {len(texts)} texts of {length} tokens but {count} are wanted; pass more --text "
            "files, or lower --text-tokens or --texts."
        )
    return texts[:count]


def _installed_texts() -> list[str]:
    from pydoc_data.topics import topics

    texts = [topics[name] for name in PYTHON_TOPICS if name in topics]
    for name in LICENSE_NAMES:
        if (LICENSES / name).is_file():
            texts.append((LICENSES / name).read_text())
    return texts


def _encode(tokenizer: Any, text: str) -> list[int]:
    try:
        return list(tokenizer.encode(text, add_special_tokens=False))
    except TypeError:  # a byte tokenizer knows no special tokens
        return list(tokenizer.encode(text))


@torch.no_grad()
def chains(
    model: Any, tokenizer: Any, length: int, count: int, temperature: float, seed: int
) -> list[list[int]]:
    """Chains of thought: the dense model's own answers, sampled; prompt and answer together.

    The model may not end an answer early, so that every chain has `length` tokens; a small model
    then tends to start again or to repeat itself, as it does in long rollouts.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer; a chat template is used where there is one.
        length: tokens of prompt and answer.
        count: chains; prompts are taken in turn.
        temperature: of the sampling.
        seed: of the sampling.
    """
    torch.manual_seed(seed)
    result = []
    for number in tqdm(range(count), desc="writing chains of thought", leave=False):
        prompt = _prompt(tokenizer, PROMPTS[number % len(PROMPTS)])[: length // 2]
        tokens = torch.tensor([prompt], device=model.device)
        # One by one: padding in a batch would make the texts depend on their neighbours.
        output = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=length - len(prompt),
            min_new_tokens=length - len(prompt),
            do_sample=True,
            temperature=temperature,
            top_k=0,
        )
        result.append(output[0].tolist())
    return result


def _prompt(tokenizer: Any, question: str) -> list[int]:
    if getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return _encode(tokenizer, text)
    return _encode(tokenizer, question)


def warn_of_unused(options_text: list[Path]) -> None:
    """Say on the error stream which text files are used in place of the installed ones."""
    if options_text:
        names = ", ".join(str(file) for file in options_text)
        print(f"texts are taken from {names} alone", file=sys.stderr)
