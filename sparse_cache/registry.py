"""Names for the classes that users choose by name: policies and allocators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    """Classes of one kind by name.

    Args:
        argument: the argument of `SparseBudgetCache` that takes such a name, as in `"policy"`.
        plural: what several are called.
        base: what every class derives from; it has an attribute `name`.
        decorator: the name under which `register` is known to users.
    """

    def __init__(self, argument: str, plural: str, base: Any, decorator: str) -> None:
        self.argument = argument
        self.plural = plural
        self.base = base
        self.decorator = decorator
        self.classes: dict[str, type[T]] = {}

    def register(self, name: str) -> Callable[[type[T]], type[T]]:
        """Class decorator: make a class known as `name`.

        Raises:
            ValueError: another class is registered under `name`.
            TypeError: `name` is not a non-empty string, or the class is of another kind.
        """
        if not isinstance(name, str) or not name:
            raise TypeError(
                f"{self.decorator} expects a name, as in @{self.decorator}('mine'), got {name!r}."
            )

        def register(cls: type[T]) -> type[T]:
            if not (isinstance(cls, type) and issubclass(cls, self.base)):
                raise TypeError(
                    f"{self.decorator} expects a subclass of {self.base.__name__}, got {cls!r}."
                )
            known = self.classes.get(name)
            if known is not None and (known.__module__, known.__qualname__) != (
                cls.__module__,
                cls.__qualname__,
            ):
                raise ValueError(
                    f"{self.argument} name {name!r} is taken by {known.__module__}."
                    f"{known.__qualname__}; choose another name."
                )
            cls.name = name  # type: ignore[attr-defined]
            self.classes[name] = cls
            return cls

        return register

    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted(self.classes)

    def get(self, name: str) -> type[T]:
        """The class registered under `name`.

        Raises:
            ValueError: the name is unknown (the message lists the known ones).
        """
        if name not in self.classes:
            raise ValueError(
                f"{self.argument}={name!r} is unknown; known {self.plural}: "
                f"{', '.join(self.names())}."
            )
        return self.classes[name]

    def resolve(self, chosen: Any) -> T:
        """Turn a name or an object into an object.

        Raises:
            ValueError: the name is unknown (the message lists the known ones).
            TypeError: neither a name nor such an object.
        """
        if isinstance(chosen, self.base):
            return chosen
        article = "an" if self.base.__name__[0] in "AEIOU" else "a"
        expected = f"{self.argument} must be a name or {article} {self.base.__name__}"
        names = ", ".join(self.names())
        if isinstance(chosen, type) and issubclass(chosen, self.base):
            raise TypeError(
                f"{expected}, got the class {chosen.__name__}; pass {chosen.__name__}() with its "
                f"options, or one of {names}."
            )
        if not isinstance(chosen, str):
            raise TypeError(f"{expected}, got {type(chosen).__name__}; known names: {names}.")
        return self.get(chosen)()
