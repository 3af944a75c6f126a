"""Reinforcement learning with rollouts under a KV-cache budget.

    accelerate launch -m sparse_cache.recipe.train --preset tiny
    accelerate launch --config_file recipe/accelerate/ddp.yaml -m sparse_cache.recipe.train \\
        --method smd --model MODEL --task FILE.jsonl --budget 512

What differs from textbook GRPO:

1. Rollouts are sampled by `model.generate` with a `SparseBudgetCache`, unless `--method dense`.
2. `sparse_rl` compares the sampler with the dense policy, rejects rollouts that the latter would
   hardly have produced, and weights the rest.
3. `smd` lets the learner see exactly what the sampler saw, by replaying what the cache evicted; and
   pulls the dense policy towards that one.
4. Denominators are taken over the whole batch and all processes, so that micro-batches and
   processes change memory and time but not the gradient.

Read it from `train` down; the arithmetic of a step is in update.py, the objectives in objectives/.
"""

from __future__ import annotations

import logging
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import DistributedType, set_seed
from tqdm.auto import tqdm

from sparse_cache import SparseBudgetCache
from sparse_cache.errors import UnsupportedModelError
from sparse_cache.policies import policy_class

from .checkpoints import Checkpoints, save_adapters_only
from .evaluate import DENSE, Accuracy, completions, evaluate
from .launch import check_launch
from .learner import Learner, in_micro_batches, micro_batches
from .metrics import gather_values, step_metrics
from .models import Opened, Reference, new_optimizer, open_model
from .objectives import FullKL
from .objectives.budget_control import BudgetControl
from .options import Options, read_options
from .plots import plot_run
from .prompts import Prompts, encode
from .rollouts import Rollouts, Sampler
from .run_folder import RunFolder
from .tasks import Example, Task, open_task
from .update import Batch, MicroLoss, dense_logprobs, micro_loss, mini_batches, prepare_batch
from .verifiers.counted import CountedReward, RewardError

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train as the command line says."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    options = read_options(arguments)
    try:
        train(options)
    except (
        ValueError,
        OSError,
        ImportError,
        NotImplementedError,
        RewardError,
        TrainingStopped,
        UnsupportedModelError,
    ) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted: add --resume to go on from the last checkpoint, if there is one")


class TrainingStopped(RuntimeError):
    """The run cannot go on; the message says why and what was saved."""


def train(options: Options) -> dict[str, Any]:
    """Train, and return the last evaluation by way of decoding.

    Raises:
        ValueError, OSError, ImportError: something of the options cannot be had; nothing was
            trained.
        TrainingStopped: a loss was not a number.
    """
    check_trackers(options.trackers)
    accelerator = Accelerator(
        log_with=options.trackers or None,
        project_dir=options.output,
        step_scheduler_with_optimizer=False,
    )
    # Losses are shares of the whole batch's already, whatever a launcher says.
    accelerator.gradient_accumulation_steps = 1
    check_launch(accelerator.num_processes)
    prepare_deepspeed(options, accelerator)
    folder = RunFolder(options, accelerator)
    with folder.held():
        return _train_in(folder, options, accelerator)


def _train_in(folder: RunFolder, options: Options, accelerator: Accelerator) -> dict[str, Any]:
    task = open_task(
        options.task, seed=options.seed, verifier=options.verifier, held_out=options.held_out
    )
    check_reward(task)
    budgets = [options.budget, *options.evaluate_budgets]
    if options.adaptive_budget:
        budgets.append(options.adaptive_least)
    for budget in budgets:
        cache_factory(options, budget)()  # Bad settings of the cache show here, and not in a step.
    set_seed(options.seed)
    opened = open_model(options, task, accelerator)
    run = Run(options, accelerator, task, opened, folder)
    first = 0
    if options.resume:
        first, extra = run.checkpoints.load_newest()
        if first > options.steps:
            raise ValueError(
                f"steps={options.steps}, but the checkpoint has done {first}: raise steps."
            )
        run.budget = extra["budget"]
        folder.cut(first)
    elif run.checkpoints.all():
        raise ValueError(
            f"output={options.output} has checkpoints of an earlier run: add --resume to go on "
            "with it, or choose another folder."
        )
    else:
        folder.cut(-1)
    folder.begin()
    try:
        return run.from_step(first)
    finally:
        accelerator.end_training()


class Run:
    """What one training run consists of."""

    def __init__(
        self,
        options: Options,
        accelerator: Accelerator,
        task: Task,
        opened: Opened,
        folder: RunFolder,
    ) -> None:
        self.options, self.accelerator, self.folder = options, accelerator, folder
        self.task, self.tokenizer = task, opened.tokenizer
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token_id = opened.pad_id
        needs_reference = options.reference_kl > 0 or options.estimator == "online_dpo"
        self.reference = Reference(opened.model, accelerator) if needs_reference else None
        optimizer = new_optimizer(options, opened.model)
        self.model, self.optimizer = accelerator.prepare(opened.model, optimizer)
        # `generate` is a method of what is inside of the wrapper.
        self.sampling_model = accelerator.unwrap_model(self.model)
        rows = options.prompts * options.group // accelerator.num_processes
        if options.estimator == "online_dpo":
            rows //= options.group
        if options.minibatches > rows:
            raise ValueError(
                f"minibatches={options.minibatches} is more than the {rows} "
                f"{'groups' if options.estimator == 'online_dpo' else 'rollouts'} that a process "
                "has in a step; lower it, or raise prompts."
            )
        sharded = accelerator.distributed_type in (
            DistributedType.FSDP,
            DistributedType.DEEPSPEED,
        )
        if options.lora_rank and not sharded:
            save_adapters_only(accelerator, self.model)
        self.checkpoints = Checkpoints(options, accelerator)
        self.reward = CountedReward(task.reward, stop=options.stop_on_reward_error)
        self.prompts = Prompts(
            task.train,
            options.prompts,
            seed=options.seed,
            rank=accelerator.process_index,
            world=accelerator.num_processes,
            fits=self._fits,
        )
        common: dict[str, Any] = {
            "new_tokens": options.new_tokens,
            "end_ids": opened.end_ids,
            "pad_id": opened.pad_id,
            "rows": options.rollout_rows or None,
            "sharded": sharded,
        }
        self.sampler = Sampler(group=options.group, temperature=options.temperature, **common)
        self.greedy = Sampler(group=1, temperature=0.0, **common)
        distillation = None
        if options.distill:
            distillation = FullKL(options.distill_direction, options.temperature)
        self.learner = Learner(
            temperature=options.temperature,
            replayed=bool(options.replay),
            distillation=distillation,
            way=options.replay_way,
        )
        self.budget = options.budget
        self.control = None
        if options.adaptive_budget:
            self.control = BudgetControl(
                options.budget,
                options.adaptive_least,
                options.adaptive_most,
                target=options.adaptive_target,
            )
        self.stop = StopRequest(accelerator)

    # ------------------------------------------------------------------ the loop

    def from_step(self, first: int) -> dict[str, Any]:
        """Train from step `first` to the last."""
        options, bar = self.options, None
        if self.accelerator.is_main_process and options.progress:
            bar = tqdm(total=options.steps, initial=first, desc=options.method, mininterval=1.0)
        if first == 0:
            self._evaluate(0)
        with self.stop:
            for step in range(first, options.steps):
                metrics = self._step(step)
                self.folder.log_step(step + 1, metrics)
                if bar is not None:
                    bar.update()
                    bar.set_postfix(
                        reward=f"{metrics['reward']:.3f}",
                        grad=f"{metrics['grad_norm']:.2f}",
                        xi_p5=f"{metrics['mismatch/xi_p5']:.2f}",
                    )
                done, last = step + 1, step + 1 == options.steps
                stopping = self.stop.requested()
                if not last and options.evaluate_every and done % options.evaluate_every == 0:
                    self._evaluate(done)
                if last or stopping or (options.save_every and done % options.save_every == 0):
                    self.checkpoints.save(done, {"budget": self.budget})
                if stopping and not last:
                    raise TrainingStopped(
                        f"interrupted after step {done}, which is saved: go on with --resume."
                    )
        if bar is not None:
            bar.close()
        results = self._evaluate(options.steps)
        self.folder.save_model(self.model, self.tokenizer)
        if self.accelerator.is_main_process:
            print(self.folder.summary())
        return {result.decoding: result for result in results}

    def _step(self, step: int) -> dict[str, float]:
        """Rollout, reward, update."""
        options, accelerator = self.options, self.accelerator
        started = time.perf_counter()
        # A step's random numbers depend on nothing before it, so that a resumed run has the same.
        seed = options.seed * 1_000_003 + step * accelerator.num_processes
        set_seed(seed % 2**31, device_specific=True)
        self.model.eval()
        examples = self.prompts.of_step(step)
        if self.prompts.left_out:
            self.folder.warn_once(
                f"prompts longer than prompt_tokens={options.prompt_tokens} are left out: raise it "
                "if that is not wanted."
            )
        rollouts = self._sample(examples)
        sampled = time.perf_counter()
        rewards = self._judge(examples, rollouts)
        judged = time.perf_counter()
        dense = dense_logprobs(self.learner, self.model, rollouts, options.micro_batch)
        batch = prepare_batch(
            options, rollouts, rewards, dense, self._of_reference(rollouts), self._total
        )
        metrics = step_metrics(batch, self._gather, options.group)
        scored = time.perf_counter()
        metrics |= self._update(step, batch)
        ended = time.perf_counter()
        self._watch_tail(metrics["mismatch/xi_p5"])
        tokens = float(self._total(rollouts.lengths.sum()))
        metrics |= {
            "budget": float(self.budget) if options.sparse_rollouts else 0.0,
            "kv_bytes_held": float(rollouts.bytes_held),
            "kv_bytes_dense": float(rollouts.bytes_dense),
            "reward_failures": float(self._total(torch.tensor(float(self.reward.failures)))),
            "tokens_per_second": tokens / (sampled - started),
            "seconds/rollout": sampled - started,
            "seconds/reward": judged - sampled,
            "seconds/score": scored - judged,
            "seconds/update": ended - scored,
            "peak_memory_mib": peak_memory_mib(),
        }
        if self.control is not None:
            self.control.budget = self.budget
            self.budget = self.control.update(metrics["mismatch/xi_p5"])
        return metrics

    # ------------------------------------------------------------------ its parts

    def _sample(self, examples: list[Example]) -> Rollouts:
        inputs = encode(self.tokenizer, examples, self.options.system_prompt)
        inputs = inputs.to(self.accelerator.device)
        new_cache: Callable[[], SparseBudgetCache | None] = lambda: None  # noqa: E731
        if self.options.sparse_rollouts:
            new_cache = cache_factory(
                self.options,
                self.budget,
                record=bool(self.options.replay),
                model=self.sampling_model,
            )
        with self.accelerator.autocast():
            return self.sampler.sample(self.sampling_model, dict(inputs), new_cache)

    def _judge(self, examples: list[Example], rollouts: Rollouts) -> torch.Tensor:
        texts = completions(self.tokenizer, rollouts)
        group = self.options.group
        rewards = [
            self.reward(example, text)
            for number, example in enumerate(examples)
            for text in texts[number * group : (number + 1) * group]
        ]
        return torch.tensor(rewards, dtype=torch.float32, device=self.accelerator.device)

    def _of_reference(self, rollouts: Rollouts) -> torch.Tensor | None:
        if self.reference is None:
            return None
        with self.reference.within(self.model) as model:
            return in_micro_batches(
                rollouts,
                self.options.micro_batch,
                lambda part: self.learner.logprobs(model, part, replayed=bool(self.options.replay)),
            )

    def _update(self, step: int, batch: Batch) -> dict[str, float]:
        """Optimizer steps on one batch."""
        options, accelerator = self.options, self.accelerator
        deterministic(self.model)
        learning_rate = options.learning_rate * min(1.0, (step + 1) / max(1, options.warmup_steps))
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        # The same order of rows in every process, and other ones in every step.
        generator = torch.Generator().manual_seed(options.seed * 1_000_003 + step)
        norms, sums = [], torch.zeros(6, device=accelerator.device)
        for _ in range(options.epochs):
            for mini_batch in mini_batches(options, batch, generator, self._total):
                pairs = options.estimator == "online_dpo"
                cuts = list(micro_batches(torch.arange(len(mini_batch.rows)), options.micro_batch))
                for cut in cuts:
                    is_last = cut is cuts[-1]
                    rows = mini_batch.rows[cut]
                    coefficients = mini_batch.coefficients[cut[::2] // 2 if pairs else cut]
                    with self._gradients_of(is_last):
                        learned = self.learner.read(self.model, batch.rollouts.select(rows))
                        found = micro_loss(options, batch, rows, coefficients, learned)
                        self._check_number("loss", float(found.loss.detach()), step, batch)
                        # Processes' gradients are averaged, but the loss is a sum over them.
                        accelerator.backward(found.loss * accelerator.num_processes)
                    sums += _in_one(found)
                norm = accelerator.clip_grad_norm_(self.model.parameters(), options.max_grad_norm)
                norms.append(0.0 if norm is None else float(norm))
                if accelerator.scaler is None:
                    # float16's scaler leaves such a step out by itself.
                    self._check_number("gradient norm", norms[-1], step, batch)
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
        policy, reference_kl, distillation, entropy, clipped, tokens = self._total(sums).tolist()
        updates = len(norms)
        return {
            "loss": policy / updates,
            "reference_kl": reference_kl / updates,
            "distillation": distillation / updates,
            "entropy": entropy / max(1.0, tokens),
            "clipped": clipped / max(1.0, tokens),
            "grad_norm": max(norms),
            "learning_rate": learning_rate,
        }

    @contextmanager
    def _gradients_of(self, is_last: bool) -> Iterator[None]:
        """Exchange gradients between processes after the last micro-batch only."""
        kind = self.accelerator.distributed_type
        if kind == DistributedType.DEEPSPEED:
            # Its `backward` makes an optimizer step wherever gradients are exchanged.
            self.accelerator.gradient_state._set_sync_gradients(is_last)
        if is_last or kind in (DistributedType.FSDP, DistributedType.DEEPSPEED):
            # FSDP would keep whole gradients on every GPU until then.
            yield
        else:
            with self.accelerator.no_sync(self.model):
                yield

    def _check_number(self, what: str, value: float, step: int, batch: Batch) -> None:
        if not math.isfinite(value):
            path = self.folder.save_batch(step, batch)
            raise TrainingStopped(
                f"the {what} of step {step} is {value}; its rollouts are in {path}. The last "
                "checkpoint is untouched: lower learning_rate, or look at the batch."
            )

    def _watch_tail(self, tail: float) -> None:
        options = self.options
        if options.sparse_rollouts and tail < options.warn_tail_below:
            cure = (
                "raise budget, or set adaptive_budget"
                if options.replay or options.reject != "off"
                else "use method=smd or sparse_rl, or raise budget"
            )
            self.folder.warn_once(
                f"the sampler is far from the dense policy: the 5th percentile of dense/sparse "
                f"probability ratios is {tail:.3g}, under warn_tail_below="
                f"{options.warn_tail_below}. Training on such rollouts tends to collapse: {cure}."
            )

    def _evaluate(self, step: int) -> list[Accuracy]:
        options = self.options
        self.model.eval()
        caches: dict[str, Callable[[], SparseBudgetCache | None]] = {DENSE: lambda: None}
        for budget in options.evaluate_budgets or [options.budget]:
            caches[f"budget {budget}"] = cache_factory(options, budget, model=self.sampling_model)
        examples: list[Example] = []
        for index in range(len(self.task.held_out)):
            if len(examples) == options.evaluate_examples:
                break
            if self._fits(self.task.held_out[index]):
                examples.append(self.task.held_out[index])
        if not examples:
            raise ValueError(
                f"no held-out prompt is as short as prompt_tokens={options.prompt_tokens}: raise "
                "it, or use another task."
            )
        results = evaluate(
            self.sampling_model,
            self.tokenizer,
            examples,
            self.reward,
            self.greedy,
            caches,
            self.accelerator,
            rows=max(1, options.prompts * options.group // self.accelerator.num_processes),
            system_prompt=options.system_prompt,
            progress=options.progress,
        )
        self.folder.log_evaluation(step, results)
        if self.accelerator.is_main_process:
            plot_run(self.folder.path)
        return results

    # ------------------------------------------------------------------ over processes

    def _total(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.accelerator.num_processes == 1:
            return tensor
        return self.accelerator.reduce(tensor.to(self.accelerator.device), "sum")

    def _gather(self, values: torch.Tensor) -> torch.Tensor:
        return gather_values(self.accelerator, values)

    def _fits(self, example: Example) -> bool:
        tokens = encode(self.tokenizer, [example], self.options.system_prompt)["input_ids"]
        return tokens.shape[1] <= self.options.prompt_tokens


def cache_factory(
    options: Options, budget: int, *, record: bool = False, model: Any = None
) -> Callable[[], SparseBudgetCache]:
    """What makes the cache of a `generate` call."""
    try:
        policy = policy_class(options.policy)(**options.policy_options)
    except TypeError as error:
        raise ValueError(f"policy_options={options.policy_options}: {error}.") from error
    settings: dict[str, Any] = {
        "budget": budget,
        "policy": policy,
        "interval": options.interval,
        "window": options.window,
        "sinks": options.sinks,
        "record": record,
        "config": None if model is None else model.config,
    }
    return lambda: SparseBudgetCache(**settings)


def check_reward(task: Task) -> None:
    """Judge one example, so that a package that a verifier lacks shows before training.

    Raises:
        ImportError: one is missing; the message says how to install it.
    """
    try:
        task.reward(task.train[0], "")
    except ImportError:
        raise
    except Exception as error:
        # Of a single completion: counted like any other, when it happens in training.
        logger.debug("the reward of an empty completion failed: %s", error)


def deterministic(model: torch.nn.Module) -> None:
    """Make a model compute in its update what it computes in rollouts.

    Dropout or noise in routers would make the ratio to the sampler's policy something else than 1
    at equal weights. Modules that checkpoint have to be told that they are training, but nothing
    below them.
    """
    model.eval()
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True
            for name, value in vars(module).items():
                if "dropout" in name and isinstance(value, float):
                    setattr(module, name, 0.0)


def check_trackers(names: Sequence[str]) -> None:
    """Refuse trackers that are not there: Accelerate would leave them out without a word.

    Raises:
        ValueError: one is unknown or not installed.
    """
    there = [str(name) for name in get_available_trackers()]
    for name in names:
        if name not in there:
            raise ValueError(
                f"trackers={list(names)}: {name} is unknown or not installed; there are "
                f"{', '.join(there) or 'none'} (metrics.jsonl is always written)."
            )


def prepare_deepspeed(options: Options, accelerator: Accelerator) -> None:
    """Tell DeepSpeed what it otherwise learns from a data loader, which rollouts do not have.

    Raises:
        ValueError: an option does not go with it.
    """
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        return
    if options.model == "tiny":
        raise ValueError("model=tiny is made by one process; leave DeepSpeed out for it.")
    if not options.lora_rank and (options.reference_kl or options.estimator == "online_dpo"):
        raise ValueError(
            f"reference_kl={options.reference_kl} with estimator={options.estimator} needs a copy "
            "of the model, which DeepSpeed has spread over processes: set lora_rank, whose base is "
            "the reference, or use FSDP."
        )
    config = accelerator.state.deepspeed_plugin.deepspeed_config
    config["train_micro_batch_size_per_gpu"] = options.micro_batch
    config["gradient_clipping"] = options.max_grad_norm


class StopRequest:
    """Ctrl-C and SIGTERM, which let the step end and save; a second Ctrl-C stops at once."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._before[number] = signal.signal(number, self._ask)
            except ValueError:
                # Not the main thread: the caller keeps its own way to stop.
                return self
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _ask(self, number: int, frame: Any) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
        print("\nstopping after this step; once more stops at once", file=sys.stderr)

    def requested(self) -> bool:
        """Whether any process was asked to stop."""
        if self._accelerator.num_processes == 1:
            return self._asked
        asked = torch.tensor(float(self._asked), device=self._accelerator.device)
        return bool(self._accelerator.reduce(asked, "sum") > 0)


def peak_memory_mib() -> float:
    """Most memory of this process so far, in MiB: of the GPU if there is one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def _in_one(found: MicroLoss) -> torch.Tensor:
    return torch.stack(
        [
            found.policy,
            found.reference_kl,
            found.distillation,
            found.entropy,
            found.clipped.float(),
            found.tokens.float(),
        ]
    )


if __name__ == "__main__":
    main()
