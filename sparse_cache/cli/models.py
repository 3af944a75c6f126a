"""Loads the model that a command line names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..embedded_model import load_embedded_model
from ..progress import Progress, quiet_transformers
from .errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(name: str | None) -> torch.device:
    """The named device, or a GPU when there is one.

    Raises:
        UsageError: there is no such device here.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UsageError(
            f"--device {name} cannot be used here ({str(error).splitlines()[0]}); try --device cpu."
        ) from error
    return device


def load_model(
    name: str | None, device: torch.device, dtype: torch.dtype | None, progress: Progress
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model named on the command line, or the embedded one for None.

    `dtype` None means bfloat16 on a GPU and float32 on a CPU.

    Raises:
        UsageError: there is no such model, or it is not one that generates text left to right.
        EmbeddedModelError: the embedded model cannot be had.
    """
    if name is None:
        return load_embedded_model(device=device, dtype=dtype, progress=progress)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    looks_like_path = name.startswith((".", "/", "~"))
    path = Path(name).expanduser()
    if looks_like_path and not path.is_dir():
        raise UsageError(f"--model {name}: there is no such folder.")
    source = path if path.is_dir() else name
    if dtype is None:
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    with progress.step(f"Loading {name}"), quiet_transformers():
        try:
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
            model = AutoModelForCausalLM.from_pretrained(
                source, dtype=dtype, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError, ImportError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UsageError(
                f"--model {name} could not be loaded as a causal language model with its "
                f"tokenizer: {reason}"
            ) from error
    return model.to(device).eval(), tokenizer
