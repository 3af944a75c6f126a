"""Generates one answer while showing it, and times it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import TextStreamer, set_seed

from ..progress import quiet_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from transformers.cache_utils import Cache


@dataclass(frozen=True)
class Answer:
    """What a model generated with one cache."""

    tokens: torch.Tensor
    """`[N]` int64, the new tokens."""
    tokens_per_second: float
    """Decoding speed: tokens after the first over the time they took, without the prompt."""
    cache: Cache
    """The cache as generation left it."""


class _TimedStreamer(TextStreamer):
    """Hands text on as it comes, and notes when the first and the last token came."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, show: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.show = show
        self.moments: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.moments.append(time.perf_counter())
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.show(text)

    def tokens_per_second(self) -> float:
        # The first moment is the prompt's; the token after it includes the time of the prefill.
        decoded = self.moments[1:]
        if len(decoded) < 2:
            return float("nan")
        return (len(decoded) - 1) / (decoded[-1] - decoded[0])


def encode(tokenizer: PreTrainedTokenizerBase, prompt: str) -> dict[str, torch.Tensor]:
    """The prompt as model inputs `[1, T]`, through the chat template where there is one."""
    if getattr(tokenizer, "chat_template", None):
        encoded = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
        )
    else:
        encoded = tokenizer(prompt, return_tensors="pt")
    return {name: encoded[name] for name in ("input_ids", "attention_mask")}


def generate_answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    inputs: dict[str, torch.Tensor],
    cache: Cache,
    show: Callable[[str], None],
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
) -> Answer:
    """Generate with `cache`, handing text to `show` as it comes.

    `temperature` 0 takes the likeliest token; any other samples from the whole distribution, with
    random numbers that start from `seed`.
    """
    inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
    streamer = _TimedStreamer(tokenizer, show)
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        # top_p and top_k at the values that change nothing, whatever the model's own defaults are.
        sampling = {"do_sample": True, "temperature": temperature, "top_p": 1.0, "top_k": 0}
    set_seed(seed)
    with quiet_transformers(), torch.inference_mode():
        output = model.generate(
            **inputs,
            past_key_values=cache,
            streamer=streamer,
            max_new_tokens=max_new_tokens,
            pad_token_id=_pad_token_id(model, tokenizer),
            **sampling,
        )
    prompt_length = inputs["input_ids"].shape[1]
    return Answer(output[0, prompt_length:].cpu(), streamer.tokens_per_second(), cache)


def _pad_token_id(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """Some id for padding, which a single prompt never uses but `generate` asks for."""
    end = model.generation_config.eos_token_id
    end = end[0] if isinstance(end, list) else end
    return next((id for id in (tokenizer.pad_token_id, end) if id is not None), 0)
