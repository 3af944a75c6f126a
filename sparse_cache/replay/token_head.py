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
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ..errors import UnsupportedModelError
from .sites import language_model
from .substitutes import forward_here, forward_of, own_forward

PerChunk = Callable[..., torch.Tensor]
"""From logits `[n, V]` float32, those beside them if there are any, and where their tokens lie
among all (a slice; rows one after the other) to what is wanted of them, `[n, k]`."""

Columns = slice | torch.Tensor
"""Of all rows alike, or `[B, N]` int64: those of each row."""


def read_logits(
    model: torch.nn.Module,
    per_chunk: PerChunk,
    columns: Columns,
    *,
    chunk_bytes: int,
    beside: torch.Tensor | None = None,
    **inputs: Any,
) -> torch.Tensor:
    """Call a model and keep of its logits what `per_chunk` makes of them.

    Args:
        model: a causal language model of transformers, or a module around one.
        per_chunk: pure and differentiable; called again in the backward.
        columns: whose logits are read.
        chunk_bytes: most bytes of a chunk of logits in float32; at least one token is read.
        beside: hidden states of another forward for the same columns, from [`read_states`]; their
            logits are the second argument of `per_chunk`, so that two policies can be compared over
            the whole vocabulary.
        inputs: what the model is called with.

    Returns:
        `[B, N, k]` for the `N` columns.

    Raises:
        UnsupportedModelError: the model is not a language head behind a body of layers.
        ValueError: its config says that it returns tuples.
    """
    reader = _Reader(with_head(model), per_chunk, columns, chunk_bytes, beside, inputs)
    return _called(model, reader.read, inputs)


def read_states(model: torch.nn.Module, columns: Columns, **inputs: Any) -> torch.Tensor:
    """Call a model and return what its language head would have read, for `read_logits(beside=)`.

    Args:
        model: a causal language model of transformers, or a module around one.
        columns: whose hidden states are returned.
        inputs: what the model is called with.

    Returns:
        `[B, N, hidden]` for the `N` columns, with gradients.

    Raises:
        UnsupportedModelError: the model is not a language head behind a body of layers.
        ValueError: its config says that it returns tuples.
    """
    reader = _Reader(with_head(model), None, columns, 1, None, inputs)
    return _called(model, reader.read_states, inputs)


def with_head(model: torch.nn.Module) -> PreTrainedModel:
    """The causal language model inside of whatever wraps it; raises what `read_logits` does."""
    inner = language_model(model)
    if inner.get_output_embeddings() is None:
        raise UnsupportedModelError(
            f"{type(inner).__name__} has no language head, so it gives no log-probabilities; load "
            "the model with AutoModelForCausalLM."
        )
    if not getattr(inner.config, "return_dict", True):
        raise ValueError(
            "model.config.return_dict=False makes the model return tuples, whose logits have no "
            "name; set it to True."
        )
    return inner


def _called(
    model: torch.nn.Module, forward: Callable[..., Any], inputs: dict[str, Any]
) -> torch.Tensor:
    # A compiler would take the loop over chunks too, anew for every length.
    with (
        forward_of(language_model(model), forward),
        torch.compiler.set_stance("force_eager"),
    ):
        return model(**inputs).logits


class _Reader:
    """One forward of a model."""

    def __init__(
        self,
        inner: PreTrainedModel,
        per_chunk: PerChunk | None,
        columns: Columns,
        chunk_bytes: int,
        beside: torch.Tensor | None,
        inputs: dict[str, Any],
    ) -> None:
        self._inner = inner
        self._forward = forward_here(inner)
        self._own_forward = own_forward(inner)
        self._per_chunk = per_chunk
        self._columns = columns
        self._beside = beside
        tokens = inputs.get("input_ids")
        self._length = (inputs["inputs_embeds"] if tokens is None else tokens).shape[1]
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
            forward = forward_here(body)

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
                    stack.enter_context(forward_of(body, watched(body)))
            return self._forward(*args, **kwargs), found

    def _states(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, torch.nn.Module, Any]:
        """The model's output, its body and what that returned."""
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
        if state[0].shape[1] != self._length:
            raise UnsupportedModelError(
                f"the model was given {self._length} tokens a row, but its layers saw "
                f"{state[0].shape[1]}; prompt tuning, which adds virtual tokens, is not served."
            )
        return output, body, state

    def read_states(self, *args: Any, **kwargs: Any) -> Any:
        """In place of the forward of the model: its hidden states as if they were logits."""
        output, _, state = self._states(args, kwargs)
        output.logits = _columns_of(state[0], self._columns)
        return output

    def read(self, *args: Any, **kwargs: Any) -> Any:
        """In place of the forward of the model."""
        output, body, state = self._states(args, kwargs)
        hidden = _columns_of(state[0], self._columns)
        # Without the graph of the body: checkpoints must not keep what it returned.
        frame = _with_states(state, hidden.new_empty(0))
        flat = hidden.reshape(-1, hidden.shape[-1])

        def logits_of(chunk: torch.Tensor) -> torch.Tensor:
            def give(*args: Any, **kwargs: Any) -> Any:
                return _with_states(frame, chunk[None])

            with forward_of(body, give):
                # Not under a trace, even if the body was: nothing attends here.
                return self._own_forward(*args, **kwargs).logits[0].float()

        def of_chunk(where: slice, *chunks: torch.Tensor) -> torch.Tensor:
            assert self._per_chunk is not None
            return self._per_chunk(*(logits_of(chunk) for chunk in chunks), where)

        flats = [flat]
        if self._beside is not None:
            flats.append(self._beside.reshape(-1, self._beside.shape[-1]))

        starts = range(0, len(flat), self._tokens)
        # Asked before the first chunk: from there on all processes have to do the same.
        chunks = self._chunks_of_all(len(starts), flat.device)
        parts = []
        for start in starts:
            where = slice(start, min(start + self._tokens, len(flat)))
            chosen = [each[where] for each in flats]
            parts.append(checkpoint(of_chunk, where, *chosen, use_reentrant=False))
        for _ in range(chunks - len(parts)):
            chosen = [each[:1] for each in flats]
            spare = checkpoint(of_chunk, slice(0, 1), *chosen, use_reentrant=False)
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


def _columns_of(states: torch.Tensor, columns: Columns) -> torch.Tensor:
    if isinstance(columns, slice):
        return states[:, columns]
    index = columns.to(states.device)[..., None].expand(-1, -1, states.shape[2])
    return states.gather(1, index)


def _with_states(output: Any, states: torch.Tensor) -> Any:
    """The output of a body with other hidden states."""
    if isinstance(output, tuple):
        return (states, *output[1:])
    changed = copy.copy(output)
    changed[next(iter(output.keys()))] = states
    return changed
