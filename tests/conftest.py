"""What all tests share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if not torch.cuda.is_available():
    # The kernels run in Triton's interpreter. It looks at this when a kernel is defined.
    os.environ.setdefault("TRITON_INTERPRET", "1")

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Several test processes share the cores.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def real_model() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The embedded real model on the CPU in float32, and its tokenizer.

    The first use on a machine downloads and converts it. A test that uses it fails without it,
    unless SPARSE_CACHE_SKIP_REAL_MODEL=1 says that this is wanted.
    """
    if os.environ.get("SPARSE_CACHE_SKIP_REAL_MODEL") == "1":
        pytest.skip("SPARSE_CACHE_SKIP_REAL_MODEL=1")
    from sparse_cache.embedded_model import load_embedded_model

    return load_embedded_model(device="cpu", dtype=torch.float32)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model and tokenizer as a transformers folder."""
    from tests.tiny_model import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("tiny-model"))
