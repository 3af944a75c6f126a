"""Opening what is trained: a model with its tokenizer, adapters and optimizer."""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from .options import Options
from .tasks import RecallTask, Task, recall_tokenizer
from .tiny_model import tiny_model, warm_start


@dataclass
class Opened:
    """A model ready to be trained."""

    model: Any
    tokenizer: PreTrainedTokenizerBase
    end_ids: list[int]
    """Tokens that end a completion."""
    pad_id: int


def open_model(options: Options, task: Task, accelerator: Accelerator) -> Opened:
    """The model of the options, in training shape, not yet prepared by Accelerate.

    Raises:
        ValueError: it has no end token, or a generation config that could not be saved.
        ImportError: LoRA or 4-bit weights need a package that is missing.
        OSError: there is no such model.
    """
    if options.model == "tiny":
        model, tokenizer = _from_nothing(options, task, accelerator)
    else:
        model, tokenizer = _pretrained(options, accelerator)
    end_ids, pad_id = special_ids(model, tokenizer)
    tokenizer.padding_side = "left"
    _check_generation_config(model)
    if options.lora_rank:
        model = _with_lora(model, options)
    if options.gradient_checkpointing:
        model.config.use_cache = False
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if options.lora_rank:
            model.enable_input_require_grads()
    return Opened(model, tokenizer, end_ids, pad_id)


def _from_nothing(options: Options, task: Task, accelerator: Accelerator) -> tuple[Any, Any]:
    """The tiny model after its warm start, made by the first process and read by all."""
    if not isinstance(task, RecallTask):
        raise ValueError(
            f"model=tiny has words for the recall tasks only; with task={options.task}, set model "
            "to a folder or a hub id."
        )
    tokenizer = recall_tokenizer()
    folder = Path(options.output) / "warm-start"
    made = {
        name: getattr(options, name)
        for name in ("task", "seed", *(n for n in vars(options) if n.startswith("warm_start_")))
    }
    record = folder / "warm_start.json"
    if record.is_file() and json.loads(record.read_text()) != made:
        raise ValueError(
            f"{folder} was made with other options ({record}): choose another output folder."
        )
    if accelerator.is_main_process and not (folder / "config.json").is_file():
        torch.manual_seed(options.seed)
        model = tiny_model(len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id)
        warm_start(
            model,
            tokenizer,
            task,
            steps=options.warm_start_steps,
            dropout_steps=options.warm_start_dropout_steps,
            batch=96,
            learning_rate=options.warm_start_learning_rate,
            seed=options.seed,
            progress=options.progress,
        )
        with tempfile.TemporaryDirectory(dir=options.output) as temporary:
            model.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
            (Path(temporary) / record.name).write_text(json.dumps(made))
            Path(temporary).chmod(0o755)
            Path(temporary).rename(folder)
            Path(temporary).mkdir()
    accelerator.wait_for_everyone()
    return AutoModelForCausalLM.from_pretrained(folder), tokenizer


def _pretrained(options: Options, accelerator: Accelerator) -> tuple[Any, Any]:
    dtype: Any = options.dtype
    if dtype == "auto":
        frozen = options.lora_rank > 0 and torch.cuda.is_available()
        dtype = "bfloat16" if frozen else "float32"
    settings: dict[str, Any] = {
        "dtype": getattr(torch, dtype),
        "attn_implementation": None if options.attention == "auto" else options.attention,
        "trust_remote_code": options.trust_remote_code,
    }
    if options.load_in_4bit:
        from transformers import BitsAndBytesConfig

        settings["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=getattr(torch, dtype),
        )
        settings["device_map"] = {"": accelerator.device}
    try:
        model = AutoModelForCausalLM.from_pretrained(options.model, **settings)
    except OSError as error:
        raise OSError(
            f"model={options.model!r} could not be opened, as a folder or from the hub: "
            f"{str(error).splitlines()[0]}"
        ) from error
    for module in model.modules():
        # On CPUs with AVX512-BF16, bitsandbytes repacks 4-bit weights at the first forward in
        # evaluation mode, for a product without gradients, and stays with that in training: layers
        # below would silently learn nothing.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    tokenizer = AutoTokenizer.from_pretrained(
        options.model, trust_remote_code=options.trust_remote_code
    )
    return model, tokenizer


def _with_lora(model: Any, options: Options) -> Any:
    try:
        from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    except ImportError as error:
        raise ImportError(
            f"lora_rank={options.lora_rank} needs peft: pip install 'sparse-budget-cache[recipe]'"
        ) from error
    if options.load_in_4bit:
        # Gradient checkpointing follows the options, not this helper.
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    # No dropout: it would make the learner's policy another than the sampler's at equal weights.
    config = LoraConfig(
        r=options.lora_rank,
        lora_alpha=options.lora_alpha,
        lora_dropout=0.0,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config)


def special_ids(model: Any, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], int]:
    """Tokens that end a completion, and the one that pads.

    Raises:
        ValueError: nothing says how a completion ends.
    """
    ends: list[int] = []
    for given in (model.generation_config.eos_token_id, tokenizer.eos_token_id):
        for token in given if isinstance(given, (list, tuple)) else [given]:
            if token is not None and token not in ends:
                ends.append(int(token))
    if not ends:
        raise ValueError(
            "the model has no end-of-text token, so no completion would end: set eos_token_id in "
            "its generation_config.json or tokenizer."
        )
    # Padding is masked everywhere, so that any token will do where a model has none for it.
    pad = tokenizer.pad_token_id
    return ends, ends[0] if pad is None else int(pad)


def _check_generation_config(model: Any) -> None:
    """Find out now what would otherwise fail at the first checkpoint, hours from here."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            model.generation_config.save_pretrained(folder)
        except ValueError as error:
            raise ValueError(
                "the model's generation_config.json is not valid, so that no checkpoint could be "
                f"saved: {error}"
            ) from error


def new_optimizer(options: Options, model: Any) -> torch.optim.Optimizer:
    """AdamW over the trained weights.

    Raises:
        ImportError: 8-bit AdamW needs bitsandbytes, which is missing.
    """
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    settings: dict[str, Any] = {
        "lr": options.learning_rate,
        "betas": (0.9, options.beta2),
        "weight_decay": options.weight_decay,
    }
    if options.optimizer == "adamw":
        return torch.optim.AdamW(weights, **settings)
    try:
        import bitsandbytes
    except ImportError as error:
        raise ImportError(
            "optimizer=adamw_8bit needs bitsandbytes: pip install 'sparse-budget-cache[recipe]'"
        ) from error
    return bitsandbytes.optim.AdamW8bit(weights, **settings)


class Reference:
    """The policy that training started from: with LoRA the base, its adapter off; else a copy.

    Args:
        model: the policy, before Accelerate prepared it.
        accelerator: prepares the copy.
    """

    def __init__(self, model: Any, accelerator: Accelerator) -> None:
        self._copy = None
        if not hasattr(model, "disable_adapter"):
            copied = copy.deepcopy(model).eval().requires_grad_(False)
            self._copy = accelerator.prepare_model(copied, evaluation_mode=True)

    @contextmanager
    def within(self, model: Any) -> Iterator[Any]:
        """The model to call for the reference's log-probabilities.

        Args:
            model: the policy, prepared.
        """
        adapters = _inner(model).disable_adapter() if self._copy is None else nullcontext()
        with adapters:
            yield model if self._copy is None else self._copy


def _inner(model: Any) -> Any:
    while hasattr(model, "module") and not hasattr(model, "disable_adapter"):
        model = model.module
    return model
