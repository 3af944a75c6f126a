"""`sparse-cache run`: one question, answered with a dense cache and under a budget."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..allocators import allocator_names
from ..cache import SparseBudgetCache
from ..policies import policy_names
from ..progress import Progress
from .errors import UsageError
from .models import DTYPES, choose_device, load_model

if TYPE_CHECKING:
    from rich.console import Console

DEFAULT_PROMPT = (
    "Why does the moon seem to change its shape during a month? Reason step by step, from new moon "
    "to full moon and back, and explain each phase in a paragraph of its own."
)


def add_parser(commands: Any) -> None:
    """Add `run` to the subcommands of an argument parser."""
    parser = commands.add_parser(
        "run",
        help="answer a question with a dense cache and under a budget, and compare the two",
        description="Answers a question twice, with all tokens kept and with a fixed number of "
        "them, and prints what the budget saved and what it changed.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", help="hub id or folder of a causal language model (default: a small one)")
    add("--budget", type=_budget, default=128, help="tokens kept, or a share such as 0.25")
    add("--interval", type=int, default=32, help="new tokens between two evictions")
    add("--window", type=int, default=8, help="most recent tokens that are never evicted")
    add("--sinks", type=int, default=4, help="first tokens that are never evicted")
    add("--policy", default="rkv", help=f"one of {', '.join(policy_names())}")
    add("--allocation", default="uniform", help=f"one of {', '.join(allocator_names())}")
    add("--quantization", choices=["int8"], help="store keys and values in 8 bits")
    add("--prompt", default=DEFAULT_PROMPT, help="the question")
    add("--max-new-tokens", type=int, default=400, help="longest answer, in tokens")
    add("--temperature", type=float, default=0.0, help="0 takes the likeliest token")
    add("--seed", type=int, default=0, help="for temperatures above 0")
    add("--dtype", choices=sorted(DTYPES), help="default: float32 on a CPU, else bfloat16")
    add("--device", help="such as cpu or cuda:1 (default: a GPU when there is one)")
    add("--no-dense", action="store_true", help="only the sparse answer")
    add(
        "--plot", type=Path, metavar="FILE", help="save a picture of the tokens kept, as PNG or PDF"
    )
    parser.set_defaults(run=run)


def _budget(text: str) -> int | float:
    return float(text) if "." in text or "e" in text.lower() else int(text)


_budget.__name__ = "budget"  # argparse names the function when a value cannot be read


def run(options: argparse.Namespace) -> None:
    """Run the command.

    Raises:
        UsageError: an option makes no sense, or the model cannot be loaded.
        EmbeddedModelError: the embedded model cannot be had.
        UnsupportedModelError: the model cannot run under a budget.
    """
    _check(options)
    # All mistakes in the cache's own arguments come out here, before anything slow happens.
    _new_cache(options)
    device = choose_device(options.device)
    # Imported late: without rich nothing above should fail.
    from rich.console import Console

    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    progress = Progress()
    model, tokenizer = load_model(options.model, device, DTYPES.get(options.dtype or ""), progress)
    compare(model, tokenizer, options, Console(highlight=False), progress)


def compare(
    model: Any, tokenizer: Any, options: argparse.Namespace, console: Console, progress: Progress
) -> None:
    """Answer twice, print both answers as they come, then the table."""
    from transformers import DynamicCache

    from .answer import Answer, encode, generate_answer
    from .comparison import replayed_divergence, share_of_equal_tokens
    from .report import Comparison, print_report

    inputs = encode(tokenizer, options.prompt)
    if inputs["input_ids"].shape[1] == 0:
        raise UsageError("--prompt has no tokens; write a question.")

    def answer(title: str, style: str, cache: Any, limit: int, quiet: bool = False) -> Answer:
        if not quiet:
            console.rule(f"[bold {style}]{title}", align="left", style=style)
        return generate_answer(
            model,
            tokenizer,
            inputs,
            cache,
            (lambda text: None) if quiet else _printer(console, style),
            max_new_tokens=limit,
            temperature=options.temperature,
            seed=options.seed,
        )

    console.print(f"\n[bold]Question[/] [dim]({inputs['input_ids'].shape[1]} tokens)[/]")
    console.print(options.prompt, markup=False)
    console.print()
    # The first generation in a process pays for start-up work that is not the caches'.
    answer("", "", _new_cache(options, model), 2, quiet=True)

    dense = None
    if not options.no_dense:
        dense = answer(
            "Dense: every token is kept",
            "cyan",
            DynamicCache(config=model.config),
            options.max_new_tokens,
        )
        console.print("\n")
    cache = _new_cache(options, model, record=options.plot is not None)
    budget = options.budget
    kept = str(budget) if isinstance(budget, int) else f"{budget:.0%}"
    sparse = answer(
        f"Sparse: {options.policy} keeps {kept} tokens, plus up to {options.interval} new ones",
        "green",
        cache,
        options.max_new_tokens,
    )
    console.print("\n")
    stats = cache.stats()

    equal, divergence = None, None
    if dense is not None:
        equal = share_of_equal_tokens(dense.tokens, sparse.tokens)
        with progress.step("Replaying the dense answer under the budget", measured=True) as advance:
            divergence = replayed_divergence(
                model, inputs["input_ids"], dense.tokens, _new_cache(options, model), advance
            )
    print_report(console, Comparison(sparse, stats, dense, equal, divergence))
    if options.plot is not None:
        from ..plot import plot_kept_tokens

        plot_kept_tokens(cache, path=options.plot, prompt_length=inputs["input_ids"].shape[1])
        console.print(f"Which tokens each layer and head kept: {options.plot}")


def _printer(console: Console, style: str) -> Callable[[str], None]:
    def show(text: str) -> None:
        # `out` neither wraps nor interprets: pieces of a text must come out as they are.
        console.out(text, end="", style=style, highlight=False)
        console.file.flush()

    return show


def _new_cache(
    options: argparse.Namespace, model: Any = None, *, record: bool = False
) -> SparseBudgetCache:
    try:
        return SparseBudgetCache(
            options.budget,
            policy=options.policy,
            interval=options.interval,
            window=options.window,
            sinks=options.sinks,
            allocation=options.allocation,
            quantization=options.quantization,
            config=None if model is None else model.config,
            record=record,
        )
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from error


def _check(options: argparse.Namespace) -> None:
    """Raise for options that are wrong whatever the model is."""
    if options.max_new_tokens < 1:
        raise UsageError(f"--max-new-tokens {options.max_new_tokens}: ask for at least 1 token.")
    if not 0 <= options.temperature < float("inf"):
        raise UsageError(f"--temperature {options.temperature}: pass 0 or a positive number.")
    if not options.prompt.strip():
        raise UsageError("--prompt is empty; write a question.")
    needed = ["rich"] + (["matplotlib"] if options.plot is not None else [])
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"this command needs {' and '.join(missing)}; "
            "install them with: pip install 'sparse-budget-cache[run]'"
        )
    if options.plot is not None:
        if not options.plot.absolute().parent.is_dir():
            raise UsageError(f"--plot {options.plot}: there is no folder {options.plot.parent}.")
        if options.plot.suffix.lower() not in (".png", ".pdf", ".svg"):
            raise UsageError(f"--plot {options.plot}: use a name that ends in .png, .pdf or .svg.")
