"""What the matrix checks of one model type; see `check_type`.

Reference values come from the same model with transformers' `DynamicCache`, from single rows, or
from the masked dense forward of `oracle`. A refusal by `UnsupportedModelError` is an answer;
anything else that goes wrong is a fault.
"""

import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin
from transformers.generation import StoppingCriteriaList

import sparse_cache
from sparse_cache import SparseBudgetCache, UnsupportedModelError
from sparse_cache.layer import BudgetLayer

from .build import build_tiny
from .oracle import oracle_logits

QUERY_POLICIES = ("rkv", "snapkv", "tova", "h2o")
KEY_POLICIES = ("window", "streaming", "random", "knorm", "keydiff", "lagkv")
BUDGET, INTERVAL, WINDOW, SINKS = 16, 4, 4, 2
PROMPT, NEW_TOKENS, LOSSLESS_TOKENS = 30, 40, 24
ROW_LENGTHS, ROW_TOKENS = (13, 19, 30), 9
POLICY_TOKENS = 6

PASSED, KEY_ONLY, NOTHING, REFUSED = "passes", "passes, key-only", "nothing to evict", "refused"
FAULT, NO_CACHE, NOT_BUILT = "FAULT", "no DynamicCache", "not built"


@dataclass
class TypeReport:
    """The result of one model type; `checks` maps a check's name to "ok ..." or what went wrong."""

    model_type: str
    model_class: str = ""
    result: str = FAULT
    reason: str = ""
    dense: str = ""
    layers: str = ""
    policies: list[str] = field(default_factory=list)
    refused_policies: dict[str, str] = field(default_factory=dict)
    checks: dict[str, str] = field(default_factory=dict)
    notes: str = ""
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class CheckFailed(Exception):
    """A check found wrong numbers; the message says which and by how much."""


@dataclass
class Run:
    """A greedy generation."""

    tokens: Tensor
    """[B, N]: the new tokens."""
    logits: Tensor
    """[B, N, V] float32: what they were chosen from."""
    inputs: list[Tensor]
    """[B, T] per forward: the token ids that the model was really given."""
    cache: Cache


def generate(
    model: PreTrainedModel,
    prompt: Tensor,
    cache: Cache,
    new_tokens: int,
    mask: Tensor | None = None,
    each_step: Callable[[], None] | None = None,
) -> Run:
    """Greedy generation with a cache; `each_step` is called after every forward."""

    def watch(input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        if each_step is not None:
            each_step()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    inputs: list[Tensor] = []

    def listen(module: Any, arguments: Any, keywords: dict[str, Any]) -> None:
        inputs.append(keywords["input_ids"])

    hook = model.register_forward_pre_hook(listen, with_kwargs=True)
    try:
        output = model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt) if mask is None else mask,
            past_key_values=cache,
            max_new_tokens=new_tokens,
            do_sample=False,
            num_beams=1,
            output_logits=True,
            return_dict_in_generate=True,
            stopping_criteria=StoppingCriteriaList([watch]),
        )
    finally:
        hook.remove()
    tokens = output.sequences[:, prompt.shape[1] :]
    return Run(tokens, torch.stack(output.logits, dim=1).float(), inputs, cache)


def largest_difference(run: Run, expected: Run, row: int = 0, tolerance: float = 1e-5) -> float:
    """Largest difference of logits, relative to their scale where that is above 1.

    Raises:
        CheckFailed: the tokens differ although the two best logits were not equal within the
            tolerance, or a logit is not finite.
    """
    scale = max(1.0, float(expected.logits.abs().max()))
    worst = 0.0
    for step in range(expected.logits.shape[1]):
        mine, theirs = run.logits[row, step], expected.logits[0, step]
        if not bool(torch.isfinite(mine).all()):
            raise CheckFailed(f"logits are not finite at new token {step}")
        worst = max(worst, float((mine - theirs).abs().max()) / scale)
        if int(run.tokens[row, step]) != int(expected.tokens[0, step]):
            best = theirs.topk(2).values
            if float(best[0] - best[1]) > 2 * tolerance * scale or worst > tolerance:
                raise CheckFailed(
                    f"tokens differ from new token {step} on, logits by {worst:.1e} until there"
                )
            return worst  # an exact tie: what follows is another text
    return worst


def within(difference: float, tolerance: float) -> str:
    """ "ok" with the difference, or CheckFailed."""
    if not difference <= tolerance:
        raise CheckFailed(f"logits differ by {difference:.1e}, allowed {tolerance:.0e}")
    return f"ok {difference:.0e}"


def describe(error: BaseException) -> str:
    """An error's type, message and the last place in the library and in transformers."""
    places = []
    for frame in traceback.extract_tb(error.__traceback__):
        for package in ("sparse_cache", "transformers", "architectures"):
            if f"/{package}/" in frame.filename:
                places.append(f"{Path(frame.filename).name}:{frame.lineno}")
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message[:300]} [{' < '.join(reversed(places[-3:]))}]"


class TypeChecker:
    """Runs all checks of one model type and keeps what they need."""

    def __init__(self, model_type: str) -> None:
        self.report = TypeReport(model_type)
        self.model: PreTrainedModel
        self.eager: PreTrainedModel | None = None
        self.dense: Run | None = None
        self.vocabulary = 0
        self.config: Any = None
        """The config to give the cache; None unless the model has linear-attention layers."""

    # ------------------------------------------------------------------ ingredients

    def prompt(self, length: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        high = min(self.vocabulary, 100)
        return torch.randint(3, high, (1, length), generator=generator)

    def padded(self, rows: list[Tensor]) -> tuple[Tensor, Tensor]:
        width = max(row.shape[1] for row in rows)
        pad = torch.nn.functional.pad
        ids = torch.cat([pad(row, (width - row.shape[1], 0)) for row in rows])
        mask = torch.cat([pad(torch.ones_like(row), (width - row.shape[1], 0)) for row in rows])
        return ids, mask

    def dense_cache(self) -> DynamicCache:
        return DynamicCache(config=self.model.config)

    def sparse_cache(self, policy: str, budget: int = BUDGET, **settings: Any) -> SparseBudgetCache:
        options = {"interval": INTERVAL, "window": WINDOW, "sinks": SINKS, "config": self.config}
        return SparseBudgetCache(budget, policy=policy, **{**options, **settings})

    # ------------------------------------------------------------------ checks

    def lossless(self, policy: str, config: Any) -> str:
        """(a) A budget above the length: the same tokens and logits as dense."""
        prompt = self.prompt(PROMPT, seed=1)
        cache = self.sparse_cache(policy, budget=PROMPT + LOSSLESS_TOKENS + 1, config=config)
        sparse = generate(self.model, prompt, cache, LOSSLESS_TOKENS)
        if self.dense is None:
            return "ok"
        try:
            return within(largest_difference(sparse, self.dense), 1e-5)
        except CheckFailed:
            if config is not None:
                raise
            # transformers itself gives another result without a config for a few types
            plain = generate(self.model, prompt, DynamicCache(), LOSSLESS_TOKENS)
            return within(largest_difference(sparse, plain), 1e-5) + " (as DynamicCache())"

    def bounded_and_replayed(self, policy: str, seed: int) -> str:
        """(b) and (e): never more than budget + interval tokens, and the oracle's logits."""
        prompt = self.prompt(PROMPT, seed)
        cache = self.sparse_cache(policy, record=True)
        steps = 0
        budgeted: list[BudgetLayer] = []

        def each_step() -> None:
            nonlocal steps
            seen = cache.get_seq_length()
            if steps and seen != first + steps:
                raise CheckFailed(f"get_seq_length() is {seen} after {steps} steps from {first}")
            budgeted[:] = [layer for layer in cache.layers if isinstance(layer, BudgetLayer)]
            for layer in budgeted:
                stored = 0 if layer.keys is None else layer.keys.shape[-2]
                if stored > BUDGET + INTERVAL:
                    raise CheckFailed(f"layer {layer.layer_idx} holds {stored} tokens")
            steps += 1

        first = 0
        original = each_step

        def count_first() -> None:
            nonlocal first
            if not steps:
                first = cache.get_seq_length()
            original()

        run = generate(self.model, prompt, cache, NEW_TOKENS, each_step=count_first)
        active = [layer for layer in budgeted if layer.seen]
        if not active:
            return "ok nothing to evict"
        if first < PROMPT:
            raise CheckFailed(f"get_seq_length() is {first} after a prompt of {PROMPT}")
        if not all(layer.evictions for layer in active):
            raise CheckFailed("a budgeted layer never evicted")
        return self.replay(run, cache)

    def replay(self, run: Run, cache: SparseBudgetCache) -> str:
        trace = cache.trace()
        total = max(trace.layer_indices, default=0) + 1
        deaths: list[Tensor | None] = [None] * max(total, len(cache.layers))
        for index, death in zip(trace.layer_indices, trace.deaths, strict=True):
            deaths[index] = death
        if self.eager is None:
            self.eager = build_tiny(self.report.model_type, attention="eager")[0]
        logits, used = oracle_logits(self.eager, torch.cat(run.inputs, dim=1), deaths)
        evicted = {
            index for index, death in enumerate(deaths) if death is not None and
            bool((death < trace.tokens_seen).any())
        }  # fmt: skip
        if not evicted <= used:
            raise CheckFailed(f"the oracle found no scores of layers {sorted(evicted - used)}")
        last = torch.tensor([ids.shape[1] for ids in run.inputs]).cumsum(0) - 1
        # some models put tokens of their own before the prompt
        last += logits.shape[1] - 1 - int(last[-1])
        expected = Run(run.tokens, logits[:, last].float(), run.inputs, cache)
        return within(largest_difference(run, expected, tolerance=1e-4), 1e-4)

    def rows_alone(self, make_cache: Callable[[], Cache], seed: int) -> float:
        """(c) Largest difference between rows of a left-padded batch and the rows alone."""
        rows = [self.prompt(length, seed + length) for length in ROW_LENGTHS]
        ids, mask = self.padded(rows)
        together = generate(self.model, ids, make_cache(), ROW_TOKENS, mask)
        worst = 0.0
        for index, row in enumerate(rows):
            alone = generate(self.model, row, make_cache(), ROW_TOKENS)
            try:
                worst = max(worst, largest_difference(together, alone, index, 1e-4))
            except CheckFailed as failure:
                raise CheckFailed(f"row of length {row.shape[1]}: {failure}") from None
        return worst

    # ------------------------------------------------------------------ the whole

    def attempt(self, name: str, check: Callable[[], str]) -> str:
        """Run a check: "ok ...", "refused: ..." or "FAULT: ...", also kept in the report."""
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                outcome = check()
        except UnsupportedModelError as refusal:
            outcome = f"refused: {' '.join(str(refusal).split())}"
        except CheckFailed as failure:
            outcome = f"FAULT: {failure}"
        except Exception as error:
            outcome = f"FAULT: {describe(error)}"
        self.report.checks[name] = outcome
        return outcome

    def build(self) -> bool:
        try:
            self.model, self.vocabulary, self.report.notes = build_tiny(self.report.model_type)
        except Exception as error:
            self.report.result, self.report.reason = NOT_BUILT, describe(error)
            return False
        self.report.model_class = type(self.model).__name__
        return True

    def run_dense(self) -> bool:
        """Does the model generate with transformers' own `DynamicCache`?"""
        report = self.report
        try:
            cache = self.dense_cache()
            run = generate(self.model, self.prompt(PROMPT, 1), cache, LOSSLESS_TOKENS)
        except Exception as error:
            report.dense = f"fails: {describe(error)}"
            return False
        kinds = list(dict.fromkeys(type(layer).__name__ for layer in cache.layers))
        report.layers = ", ".join(kinds)
        linear = [isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers]
        if any(linear):
            self.config = self.model.config
        touched = all(linear) or cache.get_seq_length() > 0
        finite = bool(torch.isfinite(run.logits).all())
        report.dense = "runs" if touched else "ignores the cache"
        report.dense += "" if finite else ", logits not finite"
        self.dense = run
        return touched and finite

    def check_all(self) -> TypeReport:
        report = self.report
        if not self.build():
            return report
        dense_runs = self.run_dense()
        policies = [name for name in (*QUERY_POLICIES, *KEY_POLICIES)]
        unknown = sorted(set(sparse_cache.policy_names()) - set(policies))
        policies += unknown
        first = self.attempt("lossless rkv", lambda: self.lossless("rkv", self.config))
        if not dense_runs:
            report.result = NO_CACHE
            report.reason = f"{report.dense}; with ours: {first}"
            return report
        key_first = self.attempt("lossless keydiff", lambda: self.lossless("keydiff", self.config))
        if key_first.startswith("refused"):
            report.result, report.reason = REFUSED, key_first.removeprefix("refused: ")
            return self.finish(refused_whole=True)
        if self.config is None:
            self.attempt("lossless config", lambda: self.lossless("keydiff", self.model.config))
        else:
            self.attempt("no config", self.without_config)
        for policy, seed in (("rkv", 1), ("keydiff", 2), ("random", 3)):
            self.attempt(
                f"replay {policy}", lambda p=policy, s=seed: self.bounded_and_replayed(p, s)
            )
        self.check_rows()
        for policy in policies:
            outcome = self.attempt(f"policy {policy}", lambda p=policy: self.short_run(p))
            if outcome.startswith("ok"):
                report.policies.append(policy)
            elif outcome.startswith("refused"):
                report.refused_policies[policy] = outcome.removeprefix("refused: ")
        return self.finish(refused_whole=False)

    def check_rows(self) -> None:
        dense = self.attempt(
            "rows dense", lambda: within(self.rows_alone(self.dense_cache, 11), 1e-4)
        )
        if not dense.startswith("ok"):
            self.report.checks["rows dense"] = dense.replace("FAULT", "dense differs too")
            return
        for policy in ("rkv", "keydiff"):
            self.attempt(
                f"rows {policy}",
                lambda p=policy: within(self.rows_alone(lambda: self.sparse_cache(p), 11), 1e-4),
            )

    def without_config(self) -> str:
        """Linear-attention models need the config, and are told so."""
        try:
            self.lossless("rkv", None)
        except UnsupportedModelError as refusal:
            if "config" in str(refusal):
                return "ok says so"
            raise
        return "ok works without"

    def short_run(self, policy: str) -> str:
        cache = self.sparse_cache(policy)
        run = generate(self.model, self.prompt(PROMPT, 5), cache, POLICY_TOKENS)
        if not bool(torch.isfinite(run.logits).all()):
            raise CheckFailed("logits are not finite")
        return "ok"

    def finish(self, refused_whole: bool) -> TypeReport:
        report = self.report
        faults = {name: text for name, text in report.checks.items() if text.startswith("FAULT")}
        refusals = [text for text in report.checks.values() if text.startswith("refused")]
        if faults:
            report.result = FAULT
            report.reason = "; ".join(f"{name}: {text[7:]}" for name, text in faults.items())
        elif refused_whole:
            pass
        elif not report.policies:
            report.result, report.reason = REFUSED, refusals[0].removeprefix("refused: ")
        elif refusals:
            report.result, report.reason = KEY_ONLY, refusals[0].removeprefix("refused: ")
        elif report.checks.get("replay rkv") == "ok nothing to evict":
            report.result = NOTHING
        else:
            report.result = PASSED
        return report


def check_type(model_type: str) -> TypeReport:
    """Run every check of one model type.

    (a) a budget above the length gives the dense tokens and logits; (b) a small budget stays
    bounded; (c) rows of a left-padded batch equal the rows alone; (d) which policies run; (e) the
    logits under three policies equal those of a dense forward that masks what was evicted.
    """
    return TypeChecker(model_type).check_all()
