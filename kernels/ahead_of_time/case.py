"""One kernel in one configuration that is shipped, as the ahead-of-time compiler needs it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """A kernel and all that its compilation depends on.

    Each operation lists its own in `kernels/<operation>/ahead_of_time.py: cases()`.
    """

    operation: str
    """The folder under `kernels/`."""
    variant: str
    """What tells this configuration from the operation's others, such as `"bf16 D128 G4"`."""
    kernel: Any
    """The function made by `triton.jit`."""
    signature: dict[str, str]
    """Triton type of each argument that is not a constant, such as `{"p_keys": "*bf16"}`."""
    constants: dict[str, Any]
    """Value of each `tl.constexpr` argument."""
    divisible_by_16: tuple[str, ...] = ()
    """Pointers and integers that the launcher guarantees to be multiples of 16."""
    num_warps: int = 4
    num_stages: int = 1
    in_place: bool = False
    """Whether it loads and stores the same memory, so that the order of loads, barriers and stores
    is checked."""
    forward: bool = False
    """For a kernel in place: no iteration of a loop loads what an earlier one stored, so that only
    the way from an iteration's loads to its stores needs a barrier."""
    wide_loads: bool = True
    """Whether its bulk loads have to be vectorised."""
    options: dict[str, Any] = field(default_factory=dict)
    """More options of the compiler, beside those of every launch (`kernels/launch.py`)."""
