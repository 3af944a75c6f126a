"""The table of all registered policies, made from the classes themselves."""

from __future__ import annotations

import dataclasses

from .base import policy_class, policy_names

_HEAD = """# Eviction policies

Made by `python -m sparse_cache.policies > docs/policies.md`; a test keeps it in step.

Every policy is passed by name, `SparseBudgetCache(policy="snapkv")`, or as an object with options,
`SparseBudgetCache(policy=SnapKVPolicy(kernel_size=7))`. "Sees" says what a policy reads beside the
stored keys, values and positions: policies that see neither queries nor attention work on every
model.

| name | keeps | sees | options (defaults) | paper |
|---|---|---|---|---|
"""


def catalogue() -> str:
    """Return the registered policies as a Markdown page."""
    return _HEAD + "".join(_row(name) for name in policy_names())


def _row(name: str) -> str:
    cls = policy_class(name)
    summary = (cls.__doc__ or "").strip().split("\n\n")[0].split(". ")[0].replace("\n", " ")
    keeps = " ".join(summary.removeprefix("Keep ").split()).removesuffix(".")
    sees = [
        word
        for word, needed in (
            ("queries", cls.needs_queries),
            ("attention", cls.needs_attention_mass),
        )
        if needed
    ]
    options = [f"`{field.name}={field.default!r}`" for field in dataclasses.fields(cls)]
    paper = f"[{cls.paper.rsplit('/', 1)[-1]}]({cls.paper})" if cls.paper else "none"
    cells = [f"`{name}`", keeps, ", ".join(sees), "<br>".join(options), paper]
    return f"| {' | '.join(cell or '-' for cell in cells)} |\n"
