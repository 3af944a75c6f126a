"""All options of a training run: one dataclass, read from a preset and the command line."""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import difflib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

PRESETS = Path(__file__).parent / "presets"

METHODS: dict[str, dict[str, Any]] = {
    # Dense rollouts, dense learner: GRPO as everybody runs it.
    "dense": {"sparse_rollouts": False, "reject": "off", "reweight": "off", "replay": False},
    # Rollouts under the budget that are treated as if they were dense.
    "naive": {"sparse_rollouts": True, "reject": "off", "reweight": "off", "replay": False},
    # Sparse-RL, https://arxiv.org/abs/2601.10079.
    "sparse_rl": {"sparse_rollouts": True, "reject": "token", "reweight": "token", "replay": False},
    # Shadow Mask Distillation, https://arxiv.org/abs/2605.06850, with the sampler's real trace.
    "smd": {"sparse_rollouts": True, "reject": "off", "reweight": "off", "replay": True},
}
"""What each method switches on. Any part can be set by itself."""

_BY_METHOD = "by the method"


def _option(default: Any, help: str, choices: Sequence[str] | None = None) -> Any:
    metadata = {"help": help, "choices": choices}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: copy.copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class Options:
    """Options of `python -m sparse_cache.recipe.train`."""

    # ---- what is trained
    method: str = _option("smd", "which objective", tuple(METHODS))
    task: str = _option(
        "recall", "recall, recall-mixed, reasoning-gym:NAME, or the path of a JSONL file"
    )
    held_out: str | None = _option(
        None, "a second JSONL file to evaluate on; none: a part is split off"
    )
    verifier: str = _option("math", "of JSONL tasks: exact, math, rouge, fuzzy or MODULE:FUNCTION")
    system_prompt: str | None = _option(
        None, "put before the prompts of models with a chat template"
    )
    model: str = _option("tiny", "tiny (made from nothing), or a model's folder or hub id")
    trust_remote_code: bool = _option(False, "run code that comes with the model")
    dtype: str = _option("auto", "of the weights", ("auto", "float32", "bfloat16", "float16"))
    attention: str = _option("auto", "attention implementation of transformers; auto: its choice")
    lora_rank: int = _option(0, "train LoRA adapters of this rank; 0: all weights")
    lora_alpha: int = _option(32, "scale of LoRA")
    load_in_4bit: bool = _option(False, "quantise the base to 4 bits (bitsandbytes; needs LoRA)")
    gradient_checkpointing: bool = _option(False, "recompute activations in the backward")

    # ---- rollouts
    budget: int = _option(512, "tokens kept per layer and KV head in rollouts")
    policy: str = _option("rkv", "eviction policy")
    policy_options: dict[str, Any] = _option({}, "its options, as JSON")  # noqa: RUF009
    interval: int = _option(128, "new tokens between evictions")
    window: int = _option(8, "most recent tokens never evicted")
    sinks: int = _option(4, "first tokens never evicted")
    prompts: int = _option(8, "prompts of a step, over all processes")
    group: int = _option(8, "rollouts of a prompt")
    new_tokens: int = _option(1024, "most tokens of a rollout")
    prompt_tokens: int = _option(1024, "longer prompts are left out, with a warning")
    temperature: float = _option(1.0, "of the sampling")
    rollout_rows: int = _option(0, "most rows of a generate call; 0: all that memory allows")

    # ---- the parts of the objective
    sparse_rollouts: bool | None = _option(None, f"sample under the budget ({_BY_METHOD})")
    replay: bool | None = _option(None, f"the learner sees what the sampler saw ({_BY_METHOD})")
    replay_way: str = _option(
        "auto",
        "how the replay attends (see sparse_cache.replay)",
        ("auto", "gather", "dense", "flex"),
    )
    reject: str | None = _option(
        None,
        f"reject rollouts by their dense/sparse ratio ({_BY_METHOD})",
        ("off", "token", "sequence", "geometric"),
    )
    reject_below: float = _option(1e-4, "least dense/sparse ratio of a rollout that is kept")
    reject_above: float = _option(math.inf, "largest one")
    reweight: str | None = _option(
        None,
        f"weight what is kept by its dense/sparse ratio ({_BY_METHOD})",
        ("off", "token", "sequence", "geometric"),
    )
    weight_bounds: str = _option("truncate", "beyond the bounds of weights", ("truncate", "mask"))
    weight_low: float = _option(0.0, "least weight")
    weight_high: float = _option(1.5, "largest weight")
    normalise_weights: bool = _option(True, "make the mean weight of a batch 1")
    baseline_after_rejection: bool = _option(True, "advantages against kept rollouts only")
    distill: float | None = _option(None, "weight of KL(shadow, dense) under replay (smd: 0.1)")
    distill_direction: str = _option(
        "shadow_to_dense", "which one is moved", ("shadow_to_dense", "dense_to_shadow", "both")
    )
    estimator: str = _option("grpo", "how a group is compared", ("grpo", "rloo", "online_dpo"))
    divide_by_std: bool = _option(True, "divide advantages by the group's deviation (grpo)")
    aggregation: str = _option(
        "sequence", "from tokens to a loss", ("sequence", "token", "constant")
    )
    clip_low: float = _option(0.2, "how far the ratio may fall")
    clip_high: float = _option(0.2, "how far it may rise")
    reference_kl: float = _option(0.0, "weight of the KL to the first model")
    dpo_beta: float = _option(0.1, "of online DPO")
    truncated: str = _option(
        "keep", "rollouts without an end: keep, or leave out of the loss", ("keep", "mask")
    )

    # ---- a budget that moves
    adaptive_budget: bool = _option(False, "move the budget so that the tail of xi holds a target")
    adaptive_target: float = _option(0.86, "5th percentile of xi")
    adaptive_least: int = _option(64, "smallest budget")
    adaptive_most: int = _option(4096, "largest budget")

    # ---- the update
    steps: int = _option(100, "training steps")
    epochs: int = _option(1, "passes over the rollouts of a step")
    minibatches: int = _option(1, "optimizer steps of a pass")
    micro_batch: int = _option(8, "rows of a forward and backward")
    optimizer: str = _option(
        "adamw", "adamw, or adamw_8bit (bitsandbytes)", ("adamw", "adamw_8bit")
    )
    learning_rate: float = _option(1e-6, "after the warm-up")
    warmup_steps: int = _option(0, "steps over which the learning rate rises")
    beta2: float = _option(0.99, "of AdamW")
    weight_decay: float = _option(0.0, "of AdamW")
    max_grad_norm: float = _option(1.0, "gradients are clipped to this norm")

    # ---- the warm start of the tiny model
    warm_start_steps: int = _option(200, "supervised steps on the task")
    warm_start_dropout_steps: int = _option(100, "further ones, with tokens hidden at random")
    warm_start_learning_rate: float = _option(4e-3, "of the supervised steps")

    # ---- watching and keeping
    output: str = _option("runs/latest", "folder of the run")
    seed: int = _option(0, "of everything")
    evaluate_every: int = _option(25, "steps between evaluations; 0: only at the end")
    evaluate_examples: int = _option(128, "held-out examples, decoded dense and under each budget")
    evaluate_budgets: list[int] = _option([], "budgets of the evaluation; none: the training's")  # noqa: RUF009
    save_every: int = _option(50, "steps between checkpoints; 0: only at the end")
    keep_checkpoints: int = _option(2, "older ones are deleted")
    resume: bool = _option(False, "go on from the newest checkpoint in the output folder")
    trackers: list[str] = _option(["tensorboard"], "of Accelerate: tensorboard, wandb, trackio")  # noqa: RUF009
    warn_tail_below: float = _option(0.2, "warn when the 5th percentile of xi falls below")
    stop_on_reward_error: bool = _option(False, "stop when a reward fails instead of counting it")
    progress: bool = _option(True, "show progress bars")

    def __post_init__(self) -> None:
        self._check_types()
        self._resolve_method()
        self._check()

    def _check_types(self) -> None:
        for option in dataclasses.fields(self):
            value = _of_type(option, getattr(self, option.name))
            setattr(self, option.name, value)

    def _resolve_method(self) -> None:
        _check_choice("method", self.method, tuple(METHODS))
        for name, value in METHODS[self.method].items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        if self.distill is None:
            self.distill = 0.1 if self.replay else 0.0

    def _check(self) -> None:
        for option in dataclasses.fields(self):
            choices = option.metadata["choices"]
            if choices:
                _check_choice(option.name, getattr(self, option.name), choices)
        for name in _AT_LEAST_ONE:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
        for name in _NOT_NEGATIVE:
            value = getattr(self, name)
            if not value >= 0:
                raise ValueError(f"{name}={value} must not be negative.")
        for name in _POSITIVE:
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name}={value} must be positive and finite.")
        for low, high in (
            ("reject_below", "reject_above"),
            ("weight_low", "weight_high"),
            ("adaptive_least", "adaptive_most"),
        ):
            bounds = getattr(self, low), getattr(self, high)
            if not 0 <= bounds[0] < bounds[1]:
                raise ValueError(
                    f"{low}={bounds[0]} and {high}={bounds[1]} must be ascending from 0."
                )
        if not 0 <= self.beta2 < 1:
            raise ValueError(f"beta2={self.beta2} must be at least 0 and below 1.")
        if not 0 < self.adaptive_target < 1:
            raise ValueError(f"adaptive_target={self.adaptive_target} must lie between 0 and 1.")
        if self.adaptive_budget and not self.adaptive_least <= self.budget <= self.adaptive_most:
            raise ValueError(
                f"budget={self.budget} must lie between adaptive_least={self.adaptive_least} and "
                f"adaptive_most={self.adaptive_most}."
            )
        for budget in self.evaluate_budgets:
            if budget < 1:
                raise ValueError(f"evaluate_budgets={self.evaluate_budgets} must be at least 1.")
        if self.group < 2:
            raise ValueError(
                f"group={self.group} is too small: rollouts are compared within their group, so it "
                "needs at least 2."
            )
        if self.replay and not self.sparse_rollouts:
            raise ValueError(
                "replay=True needs rollouts under a budget: set sparse_rollouts=True, or choose "
                "method=dense without replay."
            )
        if self.distill and not self.replay:
            raise ValueError(
                f"distill={self.distill} compares the learner with and without the sampler's "
                "evictions, so it needs replay=True (method=smd)."
            )
        if self.load_in_4bit and not self.lora_rank:
            raise ValueError("load_in_4bit=True cannot train its weights: set lora_rank too.")
        if self.estimator == "online_dpo" and self.micro_batch % 2:
            raise ValueError(
                f"micro_batch={self.micro_batch} must be even with estimator=online_dpo: both "
                "rollouts of a pair go through the model together."
            )


_AT_LEAST_ONE = (
    "budget", "interval", "window", "prompts", "new_tokens", "prompt_tokens", "epochs",
    "minibatches", "micro_batch", "evaluate_examples", "keep_checkpoints", "lora_alpha",
    "adaptive_least",
)  # fmt: skip
_NOT_NEGATIVE = (
    "seed", "warn_tail_below",
    "sinks", "lora_rank", "rollout_rows", "steps", "warmup_steps", "weight_decay", "reference_kl",
    "clip_low", "clip_high", "evaluate_every", "save_every", "warm_start_steps",
    "warm_start_dropout_steps", "distill",
)  # fmt: skip
_POSITIVE = (
    "temperature", "learning_rate", "max_grad_norm", "dpo_beta", "warm_start_learning_rate",
)  # fmt: skip
_TYPES: dict[str, tuple[type, str]] = {
    "int": (int, "a whole number"),
    "float": (float, "a number"),
    "bool": (bool, "true or false"),
    "str": (str, "a text"),
    "dict[str, Any]": (dict, "options by name, such as {kernel_size: 3}"),
    "list[int]": (list, "a list of whole numbers"),
    "list[str]": (list, "a list of texts"),
}


def _of_type(option: dataclasses.Field[Any], value: Any) -> Any:
    """`value`, after checking its type: a preset may hold anything."""
    kind = str(option.type)
    if value is None and kind.endswith(" | None"):
        return None
    kind = kind.removesuffix(" | None")
    expected, name = _TYPES[kind]
    if value is False and "off" in (option.metadata["choices"] or ()):
        return "off"  # What YAML makes of it.
    if expected is float and type(value) in (int, str):
        # YAML takes 1e-6 for a text.
        with contextlib.suppress(ValueError):
            return float(value)
    inner = {"list[int]": int, "list[str]": str}.get(kind)
    right = isinstance(value, expected) and not (kind != "bool" and isinstance(value, bool))
    if right and isinstance(value, list):
        right = all(type(each) is inner for each in value)
    if not right:
        raise ValueError(f"{option.name}={value!r} must be {name}.")
    return value


def read_options(arguments: Sequence[str] | None = None) -> Options:
    """Options from a preset, files and the command line, the later ones overriding.

    `--preset NAME` (or the path of a YAML file) is read first. Every field of [`Options`] is an
    option of the command line, with dashes or underscores.

    Args:
        arguments: those of the process when None.

    Raises:
        SystemExit: an argument makes no sense; the message says which, and what was near.
    """
    parser = argparse.ArgumentParser(
        prog="python -m sparse_cache.recipe.train",
        description="Reinforcement learning with rollouts under a KV-cache budget.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    known = ", ".join(preset_names())
    parser.add_argument("--preset", help=f"{known}, or the path of a YAML file")
    for option in dataclasses.fields(Options):
        _add_argument(parser, option)
    given, unknown = parser.parse_known_args(arguments)
    if unknown:
        names = [option.name for option in dataclasses.fields(Options)]
        parser.error(_unknown("option", unknown[0].lstrip("-").split("=")[0], names))
    values = vars(given)
    try:
        preset = values.pop("preset", None)
        return Options(**((read_preset(preset) if preset else {}) | values))
    except (ValueError, TypeError) as error:
        parser.error(str(error))


def preset_names() -> list[str]:
    """Names of the presets that come with the recipe."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def read_preset(name: str, *, _above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Options of a preset, by name or path. With `base: NAME` it adds to another preset.

    Raises:
        ValueError: there is no such preset, it has an unknown option or a value of another type, or
            presets are based on each other in a circle.
    """
    path = Path(name) if Path(name).suffix in (".yaml", ".yml") else PRESETS / f"{name}.yaml"
    if path.resolve() in _above:
        raise ValueError(f"{path} is based on itself: take its `base` out, or a preset's under it.")
    if not path.is_file():
        raise ValueError(_unknown("preset", name, preset_names()))
    try:
        values = yaml.safe_load(path.read_text()) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must have one `option: value` a line.")
    base = values.pop("base", None)
    options = {option.name: option for option in dataclasses.fields(Options)}
    for key, value in values.items():
        if key not in options:
            raise ValueError(f"{path}: {_unknown('option', str(key), list(options))}")
        try:
            values[key] = _of_type(options[key], value)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    below = read_preset(str(base), _above=(*_above, path.resolve())) if base else {}
    return below | values


def _add_argument(parser: argparse.ArgumentParser, option: dataclasses.Field[Any]) -> None:
    kind, default = str(option.type).removesuffix(" | None"), option.default
    if option.default_factory is not dataclasses.MISSING:
        default = option.default_factory()
    flags = [f"--{option.name.replace('_', '-')}"]
    if "_" in option.name:
        flags.append(f"--{option.name}")
    settings: dict[str, Any] = {
        "dest": option.name,
        "help": f"{option.metadata['help']} (default: {default})".replace("%", "%%"),
    }
    if kind == "bool":
        settings |= {"type": _yes_or_no, "nargs": "?", "const": True, "metavar": "BOOL"}
    elif kind.startswith("list"):
        settings |= {"nargs": "*", "type": int if "int" in kind else str}
    elif kind.startswith("dict"):
        settings |= {"type": _json_object}
    else:
        settings |= {"type": {"int": int, "float": float, "str": str}[kind]}
        if option.metadata["choices"]:
            settings |= {"metavar": "{" + ",".join(option.metadata["choices"]) + "}"}
    parser.add_argument(*flags, **settings)


def _json_object(text: str) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        value = json.loads(text)
        if isinstance(value, dict):
            return value
    raise argparse.ArgumentTypeError(f'{text!r} must be JSON such as {{"kernel_size": 3}}')


def _yes_or_no(text: str) -> bool:
    if text.lower() in ("true", "yes", "1"):
        return True
    if text.lower() in ("false", "no", "0"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} must be true or false")


def _check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(_unknown(name, str(value), choices))


def _unknown(what: str, value: str, choices: Sequence[str]) -> str:
    near = difflib.get_close_matches(value.replace("-", "_"), choices, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(choices)}."
    return f"{what} {value!r} is unknown; {hint}"
