"""Reading a model's logits a few tokens at a time, with gradients.

Logits of all tokens in float32 are often the largest tensors of a training step. Here the model's
language head, with whatever the model does to logits behind it, runs on chunks of the hidden
states, each under a gradient checkpoint, and what is wanted of a chunk's logits is all that stays.

It is the model's own forward that runs on a chunk, with a body that returns the chunk's hidden
states instead of computing any. And it all happens inside of a call of the model as the user
wrapped it, so that wrappers (DDP, FSDP, adapters, autocast) do for it what they do for any forward.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ..errors import UnsupportedModelError
from .sites import language_model

PerChunk = Callable[[torch.Tensor, slice], torch.Tensor]
"""From logits `[n, V]` float32 and where their tokens lie among all (rows one after the other) to
what is wanted of them, `[n, k]`."""


def read_logits(
    model: torch.nn.Module,
    per_chunk: PerChunk,
    columns: slice,
    *,
    chunk_bytes: int,
    **inputs: Any,
) -> torch.Tensor:
    """Call a model and keep of its logits what `per_chunk` makes of them.

    Args:
        model: a causal language model of transformers, or a module around one.
        per_chunk: pure and differentiable; called again in the backward.
        columns: whose logits are read.
        chunk_bytes: most bytes of a chunk of logits in float32; at least one token is read.
        inputs: what the model is called with.

    Returns:
        `[B, N, k]` for the `N` columns.

    Raises:
        UnsupportedModelError: the model is not a language head behind a body of layers.
    """
    inner = language_model(model)
    if inner.get_output_embeddings() is None:
        raise UnsupportedModelError(
            f"{type(inner).__name__} has no language head, so it gives no log-probabilities; load "
            "the model with AutoModelForCausalLM."
        )
    reader = _Reader(inner, per_chunk, columns, chunk_bytes)
    # A compiler would take the loop over chunks too, anew for every length.
    with _forward_of(inner, reader.read), torch.compiler.set_stance("force_eager"):
        return model(**inputs).logits


@contextlib.contextmanager
def _forward_of(module: torch.nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace the forward of `module` in this thread."""
    own = vars(module).get("forward")
    original, thread = module.forward, threading.get_ident()

    def here_only(*args: Any, **kwargs: Any) -> Any:
        chosen = forward if threading.get_ident() == thread else original
        return chosen(*args, **kwargs)

    module.forward = here_only
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


class _Reader:
    """One forward of a model."""

    def __init__(
        self, inner: PreTrainedModel, per_chunk: PerChunk, columns: slice, chunk_bytes: int
    ) -> None:
        self._inner = inner
        self._inner_forward = inner.forward
        self._per_chunk = per_chunk
        self._columns = columns
        vocabulary = inner.config.get_text_config(decoder=True).vocab_size
        self._tokens = max(1, chunk_bytes // (4 * vocabulary))

    def _run_body(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, list[tuple[torch.nn.Module, Any]]]:
        """Call the model with a head that sees one token; returns its output and, by module, what
        the models inside of it that it called itself gave it."""
        found: list[tuple[torch.nn.Module, Any]] = []
        inside: list[torch.nn.Module] = []

        def watched(body: torch.nn.Module) -> Callable[..., Any]:
            forward = body.forward

            def run(*args: Any, **kwargs: Any) -> Any:
                if inside:
                    return forward(*args, **kwargs)
                inside.append(body)
                try:
                    output = forward(*args, **kwargs)
                finally:
                    inside.pop()
                found.append((body, output))
                # The head runs on one token of each row, of which nothing is used.
                return _with_states(output, output[0][:, :1])

            return run

        with contextlib.ExitStack() as stack:
            for body in self._inner.modules():
                if isinstance(body, PreTrainedModel) and body is not self._inner:
                    stack.enter_context(_forward_of(body, watched(body)))
            return self._inner_forward(*args, **kwargs), found

    def read(self, *args: Any, **kwargs: Any) -> Any:
        """In place of the forward of the model."""
        output, states = self._run_body(args, kwargs)
        if (
            len(states) != 1
            or not isinstance(output, ModelOutput)
            or output.logits.shape[:2] != (states[0][1][0].shape[0], 1)
        ):
            raise UnsupportedModelError(
                f"{type(self._inner).__name__} is not a language head behind the last hidden "
                "states of one body of layers, so its logits cannot be read in chunks."
            )
        ((body, state),) = states
        hidden = state[0][:, self._columns]
        # Without the graph of the body: checkpoints must not keep what it returned.
        frame = _with_states(state, hidden.new_empty(0))
        flat = hidden.reshape(-1, hidden.shape[-1])

        def of_chunk(chunk: torch.Tensor, where: slice) -> torch.Tensor:
            def give(*args: Any, **kwargs: Any) -> Any:
                return _with_states(frame, chunk[None])

            with _forward_of(body, give):
                logits = self._inner_forward(*args, **kwargs).logits
            return self._per_chunk(logits[0].float(), where)

        starts = range(0, len(flat), self._tokens)
        # Asked before the first chunk: from there on all processes have to do the same.
        chunks = self._chunks_of_all(len(starts), flat.device)
        parts = []
        for start in starts:
            where = slice(start, min(start + self._tokens, len(flat)))
            parts.append(checkpoint(of_chunk, flat[where], where, use_reentrant=False))
        for _ in range(chunks - len(parts)):
            spare = checkpoint(of_chunk, flat[:1], slice(0, 1), use_reentrant=False)
            # Nothing of it counts, but its backward has to run.
            parts[0] = parts[0] + torch.where(torch.zeros_like(spare) > 0, spare, 0.0)
        output.logits = torch.cat(parts).unflatten(0, hidden.shape[:2])
        return output

    def _chunks_of_all(self, chunks: int, device: torch.device) -> int:
        """Most chunks of any process, where the head's weights are gathered for each of them.

        Processes with shorter texts would otherwise not take part in gathering, and all would wait.
        """
        head = self._inner.get_output_embeddings()
        gathers = isinstance(head, FSDPModule) or any(
            hasattr(parameter, "ds_id") for parameter in head.parameters()
        )
        if not (gathers and torch.distributed.is_initialized()):
            return chunks
        most = torch.tensor(chunks, device=device)
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
        return int(most)


def _with_states(output: Any, states: torch.Tensor) -> Any:
    """The output of a body with other hidden states."""
    if isinstance(output, tuple):
        return (states, *output[1:])
    changed = copy.copy(output)
    changed[next(iter(output.keys()))] = states
    return changed
