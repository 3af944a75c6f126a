"""A representative share of the architecture matrix, and proof that its oracle can fail."""

import pytest
import torch
from transformers import DynamicCache

from sparse_cache import NEVER

from .build import build_tiny
from .checks import KEY_ONLY, NOTHING, PASSED, REFUSED, TypeChecker, check_type, generate
from .oracle import oracle_logits

EXPECTED = {
    # plain decoders: grouped queries, mixtures of experts, soft-capping, attention sinks
    "llama": PASSED,
    "qwen2": PASSED,
    "qwen3_moe": PASSED,
    "phi3": PASSED,
    "gpt2": PASSED,
    "gpt_neox": PASSED,
    # sliding-window layers beside full ones, and alone
    "gemma2": PASSED,
    "gemma3_text": PASSED,
    "gpt_oss": PASSED,
    "mistral": NOTHING,
    # tensors rearranged between cache and attention
    "deepseek_v3": PASSED,
    "deepseek_v32": PASSED,
    "diffllama": PASSED,
    "jetmoe": PASSED,
    "gemma3n_text": PASSED,
    # linear-attention hybrids
    "zamba2": PASSED,
    "qwen3_next": PASSED,
    "lfm2": PASSED,
    # attention code of their own
    "bloom": REFUSED,
    "falcon": KEY_ONLY,
    "mpt": REFUSED,
}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("model_type", EXPECTED)
def test_architecture(model_type):
    report = check_type(model_type)
    assert (report.result, report.reason if report.result == "FAULT" else "") == (
        EXPECTED[model_type],
        "",
    )


@pytest.mark.parametrize("model_type", ["llama", "deepseek_v32", "jetmoe", "gpt_oss"])
def test_oracle_equals_dense_when_nothing_dies(model_type):
    model, vocabulary, _ = build_tiny(model_type)
    eager = build_tiny(model_type, attention="eager")[0]
    ids = torch.randint(3, vocabulary, (2, 40), generator=torch.Generator().manual_seed(0))
    layers = len(DynamicCache(config=model.config).layers)
    deaths = [torch.full((2, 1, 40), NEVER, dtype=torch.int32) for _ in range(layers)]
    with torch.no_grad():
        expected = model(ids).logits
    assert (oracle_logits(eager, ids, deaths)[0] - expected).abs().max() < 2e-5


def test_oracle_notices_one_token_too_many():
    """Let one evicted token live on in one head: the replay must no longer fit."""
    checker = TypeChecker("llama")
    assert checker.build()
    cache = checker.sparse_cache("keydiff", record=True)
    run = generate(checker.model, checker.prompt(30, 1), cache, 40)
    assert checker.replay(run, cache).startswith("ok")
    trace = cache.trace()
    deaths = [death.clone() for death in trace.deaths]
    victim = int((deaths[0][0, 0] < 40).nonzero()[-1])
    deaths[0][0, 0, victim] = NEVER
    eager = build_tiny("llama", attention="eager")[0]
    logits, _ = oracle_logits(eager, torch.cat(run.inputs, dim=1), deaths)
    assert (logits[:, 29:] - run.logits).abs().max() > 1e-3


def test_oracle_notices_a_death_one_step_late():
    checker = TypeChecker("llama")
    assert checker.build()
    cache = checker.sparse_cache("keydiff", record=True)
    run = generate(checker.model, checker.prompt(30, 1), cache, 40)
    deaths = [torch.where(d < NEVER, d + 1, d) for d in cache.trace().deaths]
    eager = build_tiny("llama", attention="eager")[0]
    logits, _ = oracle_logits(eager, torch.cat(run.inputs, dim=1), deaths)
    assert (logits[:, 29:] - run.logits).abs().max() > 1e-3
