"""A run of the recipe on a tiny model that was never trained, in seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from sparse_cache.recipe.models import open_model
from sparse_cache.recipe.options import Options
from sparse_cache.recipe.run_folder import RunFolder
from sparse_cache.recipe.tasks import open_task, recall_tokenizer
from sparse_cache.recipe.tiny_model import tiny_model
from sparse_cache.recipe.train import Run

SMALL: dict[str, Any] = {
    "budget": 22,
    "policy_options": {"kernel_size": 1},
    "interval": 4,
    "window": 8,
    "sinks": 0,
    "prompts": 2,
    "group": 4,
    "new_tokens": 20,
    "steps": 2,
    "micro_batch": 8,
    "learning_rate": 1e-2,
    "evaluate_examples": 4,
    "trackers": [],
    "progress": False,
}


def save_tiny_model(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A folder with a random model whose attention is sharp enough for evictions to matter."""
    torch.manual_seed(seed)
    tokenizer = recall_tokenizer()
    model = tiny_model(len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id)
    if changes:
        config = model.config
        for name, value in changes.items():
            setattr(config, name, value)
        model = type(model)(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                weight.mul_(6.0 if "proj" in name else 2.0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def small_options(model: Path | str, output: Path, **changes: Any) -> Options:
    """Options of a run of seconds."""
    return Options(model=str(model), output=str(output), **(SMALL | changes))


def small_run(options: Options) -> Run:
    """A run that was prepared and has not begun."""
    accelerator = Accelerator(cpu=True)
    folder = RunFolder(options, accelerator)
    task = open_task(options.task, seed=options.seed)
    torch.manual_seed(options.seed)
    return Run(options, accelerator, task, open_model(options, task, accelerator), folder)
