"""Whether a cache could have recorded a trace."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def check_trace(
    deaths: Sequence[torch.Tensor], layer_indices: Sequence[int], columns: int, *, never: int
) -> None:
    """Raise TypeError or ValueError with the place where a trace is wrong.

    Args:
        deaths: `[B, H, T]` int32 by layer.
        layer_indices: the layers.
        columns: `T`.
        never: the death of a token that lives.
    """
    if not deaths:
        raise ValueError("deaths is empty: a trace has at least one layer.")
    if len(layer_indices) != len(deaths):
        raise ValueError(
            f"layer_indices names {len(layer_indices)} layers for {len(deaths)} tensors of deaths."
        )
    if list(layer_indices) != sorted(set(layer_indices)) or min(layer_indices) < 0:
        raise ValueError(f"layer_indices={list(layer_indices)} must be ascending and not negative.")
    rows = deaths[0].shape[0] if deaths[0].dim() == 3 else 0
    for layer, death in zip(layer_indices, deaths, strict=True):
        if death.dtype != torch.int32:
            raise TypeError(f"deaths of layer {layer} must be int32, got {death.dtype}.")
        if death.dim() != 3 or 0 in death.shape or death.shape[::2] != (rows, columns):
            raise ValueError(
                f"deaths of layer {layer} must be [{rows}, heads, {columns}], got "
                f"{list(death.shape)}."
            )
    padding = deaths[0][:, :1] == 0
    for layer, death in zip(layer_indices, deaths, strict=True):
        # A query sees itself, so a token dies behind its own column.
        column = torch.arange(columns, device=death.device)
        possible = (death == never) | ((death > column) & (death <= columns)) | (death == 0)
        if not bool(possible.all()):
            row, head, at, value = _first(~possible, death)
            raise ValueError(
                f"layer {layer}, row {row}, head {head}: the token in column {at} dies at {value}, "
                f"which is neither between {at + 1} and {columns} nor {never} (never)."
            )
        agrees = (death == 0) == padding
        if not bool(agrees.all()):
            row, head, at, value = _first(~agrees, death)
            what = "is padding" if value == 0 else "holds a token"
            raise ValueError(
                f"layer {layer}, row {row}: column {at} {what} for head {head}, but not for head 0 "
                f"of layer {layer_indices[0]}; the trace has a hole."
            )


def _first(wrong: torch.Tensor, death: torch.Tensor) -> tuple[int, int, int, int]:
    row, head, column = wrong.nonzero()[0].tolist()
    return row, head, column, int(death[row, head, column])
