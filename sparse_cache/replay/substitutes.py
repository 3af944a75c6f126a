"""Callables that stand in for attributes of a module while somebody in some thread needs them.

Contexts of several threads overlap and end in any order, so a substitute counts who needs it. It is
taken away with the last of them, unless somebody else has set the attribute meanwhile.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

_Kind = TypeVar("_Kind", bound="Substitute")
_lock = threading.Lock()


class Substitute:
    """What a module has in place of a callable attribute.

    Args:
        module: the module.
        name: of the attribute.
    """

    def __init__(self, module: torch.nn.Module, name: str) -> None:
        self.original: Callable[..., Any] = getattr(module, name)
        self._own = vars(module).get(name)
        self._users = 0
        # Whoever asks for a signature gets the original's.
        functools.update_wrapper(self, self.original, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What calls of the attribute do."""
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        """A copy of the module has the attribute itself, of its own."""
        return copy.deepcopy(self.original, memo)


@contextlib.contextmanager
def substituted(kind: type[_Kind], module: torch.nn.Module, name: str) -> Iterator[_Kind]:
    """Have a substitute of a kind in a module; gives the one that is there."""
    with _lock:
        found = vars(module).get(name)
        substitute = found if isinstance(found, kind) else kind(module, name)
        setattr(module, name, substitute)
        substitute._users += 1
    try:
        yield substitute
    finally:
        with _lock:
            substitute._users -= 1
            if not substitute._users and vars(module).get(name) is substitute:
                if substitute._own is None:
                    delattr(module, name)
                else:
                    setattr(module, name, substitute._own)


class _Forward(Substitute):
    """The forward of a module, which may be another one in each thread."""

    def __init__(self, module: torch.nn.Module, name: str) -> None:
        super().__init__(module, name)
        self.chosen: dict[int, list[Callable[..., Any]]] = {}

    @property
    def here(self) -> Callable[..., Any]:
        """What a call in this thread runs."""
        chosen = self.chosen.get(threading.get_ident())
        return chosen[-1] if chosen else self.original

    @torch.compiler.disable(recursive=False)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.here(*args, **kwargs)


@contextlib.contextmanager
def forward_of(module: torch.nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let calls of `module` by this thread run `forward`; other threads get the module's own."""
    with substituted(_Forward, module, "forward") as substitute:
        chosen = substitute.chosen.setdefault(threading.get_ident(), [])
        chosen.append(forward)
        try:
            yield
        finally:
            chosen.remove(forward)


def forward_here(module: torch.nn.Module) -> Callable[..., Any]:
    """The forward that a call of `module` by this thread runs."""
    forward = vars(module).get("forward")
    here: Callable[..., Any] = forward.here if isinstance(forward, _Forward) else module.forward
    return here


def own_forward(module: torch.nn.Module) -> Callable[..., Any]:
    """The forward of `module` without substitutes."""
    forward = vars(module).get("forward")
    own: Callable[..., Any] = forward.original if isinstance(forward, _Forward) else module.forward
    return own
