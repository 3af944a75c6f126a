"""Write the documents about figures in docs/, and their pictures, from the JSON files.

    python -m benchmarks.documents

Nothing is measured here. The words about policies are put together from the data
too, so they change with it.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import (
    allocation_document,
    kernels_document,
    quality_document,
    quantization_document,
    recipe_document,
    replay_document,
    speed_document,
)
from .reporting import RESULTS

DOCS = Path(__file__).parent.parent / "docs"


def main(arguments: Sequence[str] | None = None) -> None:
    """Write each document whose figures are there."""
    parser = argparse.ArgumentParser(description="Write the documents from the JSON files.")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--docs", type=Path, default=DOCS)
    options = parser.parse_args(arguments)
    found = {
        part: json.loads((options.results / f"{part}.json").read_text())
        for part in ("decode", "soak", "nochange", "quality", "kernels")
        if (options.results / f"{part}.json").is_file()
    }
    options.docs.mkdir(parents=True, exist_ok=True)
    if "quality" in found:
        _write(options, "quality", quality_document, {"quality": found["quality"]})
    if found.keys() & {"decode", "soak", "nochange"}:
        _write(options, "speed", speed_document, found)
    if "kernels" in found:
        _write(options, "gpu", kernels_document, found, picture="kernels")
    for part, writer in (
        ("allocation", allocation_document),
        ("quantization", quantization_document),
    ):
        if (options.results / f"{part}.json").is_file():
            print(f"wrote {writer.write(options.results / f'{part}.json', options.docs)}")
    replayed = {
        part: json.loads((options.results / f"{part}.json").read_text())
        for part in ("replay", "replay_cost")
        if (options.results / f"{part}.json").is_file()
    }
    if len(replayed) == 2:
        _write(options, "replay", replay_document, replayed)
    trained = {
        part: json.loads((options.results / f"{part}.json").read_text())
        for part in recipe_document.PARTS
        if (options.results / f"{part}.json").is_file()
    }
    if trained:
        target = options.docs / "recipe.md"
        picture = _relative(options.results / "recipe_study.png", options.docs)
        target.write_text(recipe_document.compose(trained, picture))
        print(f"wrote {target}")


def _write(
    options: argparse.Namespace,
    name: str,
    writer: Any,
    found: dict[str, Any],
    picture: str | None = None,
) -> None:
    drawn = options.results / f"{picture or name}.png"
    writer.draw(found, drawn)
    target = options.docs / f"{name}.md"
    target.write_text(writer.compose(found, _relative(drawn, options.docs)))
    print(f"wrote {target}")


def _relative(picture: Path, folder: Path) -> str | None:
    """How a document in `folder` refers to `picture`; None when there is no picture."""
    if not picture.is_file():
        return None
    return Path(os.path.relpath(picture.resolve(), folder.resolve())).as_posix()


if __name__ == "__main__":
    main()
