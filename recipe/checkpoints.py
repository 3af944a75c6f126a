"""Checkpoints that are there whole or not at all, and going on from the newest."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from safetensors import SafetensorError

from .options import Options

STATE = "state.json"
PARTIAL = ".partial"

FREE_TO_CHANGE = frozenset(
    {
        "steps", "output", "resume", "progress", "trackers", "evaluate_every", "evaluate_examples",
        "evaluate_budgets", "save_every", "keep_checkpoints", "micro_batch", "rollout_rows",
        "warn_tail_below", "stop_on_reward_error", "gradient_checkpointing", "replay_way",
    }
)  # fmt: skip
"""Options that a resumed run may have otherwise: none of them changes what is computed."""


class Checkpoints:
    """The checkpoints in a run's folder, `checkpoint-000050` and so on.

    Args:
        options: of the run; they are stored, and a run with others does not resume.
        accelerator: writes and reads weights, optimizer and random states in its own way for each
            kind of distribution.
    """

    def __init__(self, options: Options, accelerator: Accelerator) -> None:
        self._options = options
        self._accelerator = accelerator
        self._folder = Path(options.output)

    def all(self) -> list[Path]:
        """Those that are whole, oldest first."""
        found = {
            int(path.name.removeprefix("checkpoint-")): path
            for path in self._folder.glob("checkpoint-*")
            if re.fullmatch(r"checkpoint-\d{6,}", path.name) and (path / STATE).is_file()
        }
        return [found[step] for step in sorted(found)]

    def save(self, step: int, extra: dict[str, Any]) -> Path:
        """Write the state after `step` steps. All processes call this.

        It is written beside its final name, which it gets when everything is on the disk.

        Raises:
            OSError: it cannot be written; earlier checkpoints are untouched.
        """
        final = self._folder / f"checkpoint-{step:06d}"
        partial = final.with_name(final.name + PARTIAL)
        try:
            self._write(partial, {"step": step, "options": _stored(self._options), "extra": extra})
        except (OSError, RuntimeError, SafetensorError) as error:
            if self._accelerator.is_main_process:
                shutil.rmtree(partial, ignore_errors=True)
            whole = self.all()
            raise OSError(
                f"checkpoint {step} could not be written to {self._folder} ({error}); "
                f"the newest whole one is {whole[-1] if whole else None}. Make room and use "
                "--resume."
            ) from error
        if self._accelerator.is_main_process:
            if final.exists():
                shutil.rmtree(final)
            partial.rename(final)
            for old in self.all()[: -self._options.keep_checkpoints]:
                shutil.rmtree(old)
        self._accelerator.wait_for_everyone()
        return final

    def _write(self, partial: Path, state: dict[str, Any]) -> None:
        main = self._accelerator.is_main_process
        if main:
            for left_over in self._folder.glob(f"checkpoint-*{PARTIAL}"):
                shutil.rmtree(left_over)
            partial.mkdir(parents=True)
        self._accelerator.wait_for_everyone()
        self._accelerator.save_state(str(partial))
        self._accelerator.wait_for_everyone()
        if main:
            with (partial / STATE).open("w") as file:
                file.write(json.dumps(state, indent=1))
                file.flush()
                os.fsync(file.fileno())

    def load_newest(self) -> tuple[int, dict[str, Any]]:
        """Take up the newest checkpoint.

        Returns:
            The steps done, and what was stored beside them.

        Raises:
            ValueError: it is damaged, or of a run with other options; the message says which.
            FileNotFoundError: there is none.
        """
        found = self.all()
        if not found:
            raise FileNotFoundError(
                f"resume=True, but {self._folder} has no checkpoint; leave --resume out to start."
            )
        newest = found[-1]
        try:
            state = json.loads((newest / STATE).read_text())
            step, stored, extra = state["step"], state["options"], state["extra"]
        except (ValueError, KeyError, TypeError) as error:
            raise self._damaged(newest, error) from error
        self._check(newest, stored)
        try:
            self._accelerator.load_state(str(newest))
        except (SafetensorError, RuntimeError, OSError, ValueError, EOFError, KeyError) as error:
            raise self._damaged(newest, error) from error
        return step, extra

    def _damaged(self, path: Path, error: Exception) -> ValueError:
        before = [found.name for found in self.all() if found != path][-1:]
        instead = f"go on from {before[0]}" if before else "start anew"
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return ValueError(f"{path} is damaged ({reason}): delete it to {instead}.")

    def _check(self, path: Path, stored: dict[str, Any]) -> None:
        mine = _stored(self._options)
        other = [
            f"{name}={stored.get(name)!r} there and {value!r} here"
            for name, value in mine.items()
            if name not in FREE_TO_CHANGE and stored.get(name) != value
        ]
        if other:
            raise ValueError(
                f"{path} is of another run ({'; '.join(other)}): resume with its options, or "
                "choose another output folder."
            )


def _stored(options: Options) -> dict[str, Any]:
    values = json.loads(json.dumps(dataclasses.asdict(options)))
    return dict(values)


def save_adapters_only(accelerator: Accelerator, model: Any) -> None:
    """Let checkpoints of a LoRA model hold the adapter and not the frozen base under it."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict
    from safetensors.torch import load_file, save_file

    name = "adapter.safetensors"

    def save(models: list[Any], weights: list[Any], folder: str) -> None:
        while weights:
            weights.pop()
        if accelerator.is_main_process:
            state = get_peft_model_state_dict(accelerator.unwrap_model(model))
            save_file({key: value.contiguous() for key, value in state.items()}, f"{folder}/{name}")

    def load(models: list[Any], folder: str) -> None:
        while models:
            models.pop()
        set_peft_model_state_dict(accelerator.unwrap_model(model), load_file(f"{folder}/{name}"))

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
