"""Invariant 7: models and calls that do not use the cache compute the same bits."""

from __future__ import annotations

import subprocess
import sys

import pytest

COMMON = """
import warnings
warnings.filterwarnings("ignore")
import torch
torch.set_num_threads(1)
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
config = LlamaConfig(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                     num_attention_heads=4, num_key_value_heads=2, initializer_range=0.4,
                     eos_token_id=None, bos_token_id=None, pad_token_id=None)
model = LlamaForCausalLM._from_config(config, attn_implementation=ATTENTION).eval()
ids = torch.randint(3, 61, (2, 40))
mask = torch.ones_like(ids); mask[1, :13] = 0

def results():
    with torch.no_grad():
        out = [model(ids).logits, model(ids, attention_mask=mask).logits]
        out.append(model(ids, past_key_values=DynamicCache()).logits)
    more = dict(attention_mask=mask, max_new_tokens=20, do_sample=False, pad_token_id=0,
                return_dict_in_generate=True, output_logits=True)
    answer = model.generate(ids, **more)
    out += [answer.sequences, *answer.logits]
    out.append(model.generate(ids, **{**more, "num_beams": 2}).sequences)
    model.train()
    loss = model(ids, labels=ids).loss
    loss.backward()
    model.eval()
    out += [loss.detach(), *[p.grad.clone() for p in model.parameters()]]
    model.zero_grad()
    return out

def same(first, second):
    return len(first) == len(second) and all(map(torch.equal, first, second))

def use():
    for policy in ("rkv", "h2o", "streaming"):
        cache = SparseBudgetCache(budget=20, interval=5, window=4, sinks=2, policy=policy)
        model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=20,
                       do_sample=False, pad_token_id=0)
        assert cache.stats().evictions > 0
"""

BITS = """
before = results()
from sparse_cache import SparseBudgetCache
assert same(before, results()), "importing changed the results"
use()
assert same(before, results()), "using the cache changed the results"
abandoned = SparseBudgetCache(budget=20, interval=5, window=4, sinks=2)
model(ids, past_key_values=abandoned)
assert same(before, results()), "a cache that was left half-way changed the results"
abandoned.get_mask_sizes(1, 0)
assert same(before, results()), "a mask that was asked for and not built changed the results"
print("equal")
"""

COMPILED = """
before = model(ids).logits
from sparse_cache import SparseBudgetCache
use()
compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
with torch.no_grad():
    assert (compiled(ids, use_cache=False).logits - before).abs().max() < 1e-5
print("equal")
"""

FAILED_CALL = """
before = results()
from sparse_cache import SparseBudgetCache
def fail(*args): raise KeyboardInterrupt
cache = SparseBudgetCache(budget=20, interval=5, window=4, sinks=2)
for module in (model.model.layers[1].self_attn.o_proj, model.model.layers[1].self_attn.q_proj,
               model.model.layers[1]):
    handle = module.register_forward_pre_hook(fail)
    try:
        model(ids, past_key_values=cache)
        raise SystemExit("the hook did not fire")
    except KeyboardInterrupt:
        handle.remove()
    cache.reset()
    assert same(before, results()), "a call that was broken off changed the results"
fresh = SparseBudgetCache(budget=20, interval=5, window=4, sinks=2)
with torch.no_grad():
    assert torch.equal(model(ids, past_key_values=cache).logits,
                       model(ids, past_key_values=fresh).logits)
    step = ids[:, :1]
    assert torch.equal(model(step, past_key_values=cache).logits,
                       model(step, past_key_values=fresh).logits)
print("equal")
"""


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "script", [BITS, COMPILED, FAILED_CALL], ids=["bits", "compiled", "failed"]
)
def test_in_a_process_of_its_own(script: str, attention: str) -> None:
    code = f"ATTENTION = {attention!r}\n{COMMON}\n{script}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "equal"
