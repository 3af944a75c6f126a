"""The folder of a run: options, metrics, evaluations, curves, checkpoints and the final model."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from accelerate import Accelerator
from filelock import FileLock, Timeout
from safetensors.torch import save_file

from .options import Options
from .update import Batch

if TYPE_CHECKING:
    from .evaluate import Accuracy

logger = logging.getLogger(__name__)

METRICS, EVALUATIONS, OPTIONS, FINAL = (
    "metrics.jsonl",
    "evaluations.jsonl",
    "options.yaml",
    "final",
)


class RunFolder:
    """Writes what a run leaves behind. Only the first process writes.

    Args:
        options: of the run.
        accelerator: with its trackers.

    Raises:
        OSError: the folder cannot be made.
    """

    def __init__(self, options: Options, accelerator: Accelerator) -> None:
        self.path = Path(options.output)
        self._options = options
        self._accelerator = accelerator
        self._warned: set[str] = set()
        if accelerator.is_main_process:
            self.path.mkdir(parents=True, exist_ok=True)
        accelerator.wait_for_everyone()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep other runs out of the folder.

        Raises:
            ValueError: one is in it.
        """
        if not self._accelerator.is_main_process:
            yield
            return
        try:
            with FileLock(self.path / ".lock", timeout=0):
                yield
        except Timeout as error:
            raise ValueError(
                f"another run is writing to output={self.path}: choose another folder."
            ) from error

    def begin(self) -> None:
        """Write the options down and start tensorboard and whatever else was asked for."""
        if self._accelerator.is_main_process:
            text = yaml.safe_dump(dataclasses.asdict(self._options), sort_keys=False)
            (self.path / OPTIONS).write_text(text)
        if not self._options.trackers:
            return
        plain = {
            name: value if isinstance(value, (int, float, str, bool)) else str(value)
            for name, value in dataclasses.asdict(self._options).items()
        }
        self._accelerator.init_trackers("sparse-budget-cache", config=plain)

    def cut(self, steps: int) -> None:
        """Drop what was logged after so many steps: a resumed run does them again."""
        if not self._accelerator.is_main_process:
            return
        for name in (METRICS, EVALUATIONS):
            path = self.path / name
            if path.is_file():
                kept = [entry for entry in read_lines(path) if entry["step"] <= steps]
                text = "".join(json.dumps(entry) + "\n" for entry in kept)
                beside = path.with_suffix(".new")
                beside.write_text(text)
                os.replace(beside, path)

    def log_step(self, step: int, metrics: dict[str, float]) -> None:
        """Append a step's figures and pass them to the trackers."""
        if self._options.trackers:
            self._accelerator.log(metrics, step=step)
        self._append(METRICS, {"step": step} | metrics)

    def log_evaluation(self, step: int, results: list[Accuracy]) -> None:
        """Append an evaluation and pass it to the trackers."""
        if self._options.trackers:
            self._accelerator.log(
                {f"accuracy/{result.decoding}": result.accuracy for result in results}, step=step
            )
        for result in results:
            self._append(EVALUATIONS, {"step": step} | dataclasses.asdict(result))

    def warn_once(self, message: str) -> None:
        """Log a warning that was not logged before."""
        if self._accelerator.is_main_process and message.split(":")[0] not in self._warned:
            self._warned.add(message.split(":")[0])
            logger.warning("warning: %s", message)

    def save_batch(self, step: int, batch: Batch) -> Path:
        """Keep the rollouts of a step whose loss was not a number."""
        path = self.path / f"bad-batch-{step:06d}-{self._accelerator.process_index}.safetensors"
        tensors = {
            "sequences": batch.rollouts.sequences,
            "attention_mask": batch.rollouts.attention_mask,
            "sampled": batch.rollouts.sampled,
            "dense": batch.dense,
            "rewards": batch.rewards,
            "advantages": batch.advantages,
            "weights": batch.correction.weights,
        }
        save_file({name: value.cpu().contiguous() for name, value in tensors.items()}, path)
        return path

    def save_model(self, model: Any, tokenizer: Any) -> None:
        """Write the trained model (of LoRA: the adapter) and its tokenizer to `final/`."""
        state = self._accelerator.get_state_dict(model)
        inner = self._accelerator.unwrap_model(model)
        inner.save_pretrained(
            self.path / FINAL,
            is_main_process=self._accelerator.is_main_process,
            state_dict=state,
            save_function=self._accelerator.save,
        )
        if self._accelerator.is_main_process:
            tokenizer.save_pretrained(self.path / FINAL)
        self._accelerator.wait_for_everyone()

    def summary(self) -> str:
        """What the run did to held-out accuracy, and where everything is."""
        entries = read_lines(self.path / EVALUATIONS)
        lines = [f"Held-out accuracy before and after {entries[-1]['step']} steps:"]
        for decoding in dict.fromkeys(entry["decoding"] for entry in entries):
            mine = [entry for entry in entries if entry["decoding"] == decoding]
            lines.append(
                f"  {decoding:12} {mine[0]['accuracy']:.3f} -> {mine[-1]['accuracy']:.3f}"
                f"  ({mine[-1]['examples']} examples)"
            )
        lines.append(f"{self.path}: {FINAL}/ (the model), curves.png, {METRICS}, {EVALUATIONS}")
        return "\n".join(lines)

    def _append(self, name: str, entry: dict[str, Any]) -> None:
        if not self._accelerator.is_main_process:
            return
        # JSON has no NaN.
        entry = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in entry.items()
        }
        with (self.path / name).open("a") as file:
            file.write(json.dumps(entry) + "\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Entries of a JSONL file; a last line that was cut off is left out."""
    entries = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            entries.append(json.loads(line))
    return entries
