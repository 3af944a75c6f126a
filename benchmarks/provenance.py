"""Where figures in a document come from."""

from __future__ import annotations

from typing import Any


def provenance(content: dict[str, Any]) -> str:
    """One paragraph: what the figures were measured on."""
    machine = content["environment"]
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    text = (
        f"Measured {machine['date'][:10]} on {machine['processor']}, {machine['threads']} threads, "
        f"{machine['memory_gib']} GiB, Python {machine['python']}, {packages}; load average when "
        f"done {machine['load_average'][0] if machine['load_average'] else 'unknown'}."
    )
    return text + (f" **{content['note']}**" if content.get("note") else "")
