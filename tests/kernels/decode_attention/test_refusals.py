"""Wrong input is refused in one sentence that names the tensor, before any kernel runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sparse_cache.kernels.decode_attention import decode_attention
from sparse_cache.kernels.launch import counted_launches
from tests.kernels.decode_attention.inputs import make

Change = Callable[[dict[str, Any]], Any]

PLAIN: dict[str, tuple[str, Change, type[Exception]]] = {
    "query rank": ("query", lambda a: a["query"][:, :, 0], ValueError),
    "two queries": ("query", lambda a: a["query"].expand(-1, -1, 2, -1), ValueError),
    "query dtype": ("query", lambda a: a["query"].double(), TypeError),
    "query stride": (
        "query",
        lambda a: a["query"].repeat(1, 1, 1, 2)[..., ::2],
        ValueError,
    ),
    "query heads": ("query", lambda a: a["query"][:, :7], ValueError),
    "batch": ("keys", lambda a: a["keys"][:1], ValueError),
    "keys dtype": ("keys", lambda a: a["keys"].half(), TypeError),
    "keys rank": ("keys", lambda a: a["keys"][..., 0], ValueError),
    "head size": ("keys", lambda a: a["keys"][..., :63], ValueError),
    "keys stride": ("keys", lambda a: a["keys"].mT.contiguous().mT, ValueError),
    "keys device": ("keys", lambda a: a["keys"].to("meta"), ValueError),
    "values dtype": ("values", lambda a: a["values"].half(), TypeError),
    "values int8": ("values", lambda a: a["values"].to(torch.int8), TypeError),
    "values capacity": ("values", lambda a: a["values"][:, :, :-1], ValueError),
    "values heads": ("values", lambda a: a["values"][:, :1], ValueError),
    "values size": ("values", lambda a: a["values"].repeat(1, 1, 1, 5), ValueError),
    "values stride": ("values", lambda a: a["values"].mT.contiguous().mT, ValueError),
    "lengths dtype": ("lengths", lambda a: a["lengths"].long(), TypeError),
    "lengths shape": ("lengths", lambda a: a["lengths"][:, :1], ValueError),
    "lengths device": ("lengths", lambda a: a["lengths"].to("meta"), ValueError),
    "softcap": ("softcap", lambda a: 0.0, ValueError),
    "sinks shape": ("sinks", lambda a: a["sinks"][:2], ValueError),
    "sinks dtype": ("sinks", lambda a: a["sinks"].int(), TypeError),
    "sinks device": ("sinks", lambda a: a["sinks"].to("meta"), ValueError),
    "scales of floats": ("key_scales", lambda a: a["mass"], ValueError),
    "mass shape": ("mass", lambda a: a["mass"][..., :-1], ValueError),
    "mass dtype": ("mass", lambda a: a["mass"].half(), TypeError),
    "mass stride": ("mass", lambda a: a["mass"].mT.contiguous().mT, ValueError),
    "mass memory": ("mass", lambda a: a["mass"][:1].expand(2, -1, -1), ValueError),
    "offsets without pool": (
        "keys",
        lambda a: (a.update(offsets=torch.zeros_like(a["lengths"]).long()), a["keys"])[1],
        ValueError,
    ),
}
INT8: dict[str, tuple[str, Change, type[Exception]]] = {
    "no key scales": ("key_scales", lambda a: None, ValueError),
    "no value scales": ("value_scales", lambda a: None, ValueError),
    "scales dtype": ("value_scales", lambda a: a["value_scales"].half(), TypeError),
    "scales shape": ("key_scales", lambda a: a["key_scales"][..., None], ValueError),
    "scales stride": ("key_scales", lambda a: a["key_scales"].mT.contiguous().mT, ValueError),
}
POOLED: dict[str, tuple[str, Change, type[Exception]]] = {
    "offsets dtype": ("offsets", lambda a: a["offsets"].int(), TypeError),
    "offsets shape": ("offsets", lambda a: a["offsets"][:1], ValueError),
    "lengths of a row": ("lengths", lambda a: a["lengths"][:, 0], ValueError),
    "offsets device": ("offsets", lambda a: a["offsets"].to("meta"), ValueError),
}


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize(
    ("kind", "case"),
    [
        *(("plain", case) for case in PLAIN),
        *(("int8", case) for case in INT8),
        *(("pooled", case) for case in POOLED),
    ],
)
def test_refused(implementation: str, kind: str, case: str) -> None:
    name, change, error = {"plain": PLAIN, "int8": INT8, "pooled": POOLED}[kind][case]
    made = make(sinks=True, int8=kind == "int8", pooled=kind == "pooled")
    arguments = made.arguments()
    arguments[name] = change(arguments)
    with counted_launches() as launched, pytest.raises(error) as refused:
        decode_attention(**arguments, implementation=implementation)
    message = str(refused.value)
    assert message.startswith(name)
    assert message.count(". ") == 0 and message.endswith(".")
    assert not launched


@pytest.mark.skipif(torch.cuda.is_available(), reason="the inputs lie on the GPU")
def test_triton_is_refused_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU without the interpreter; the reference runs there."""
    monkeypatch.delenv("TRITON_INTERPRET")
    arguments = make(size=16).arguments()
    with counted_launches() as launched:
        decode_attention(**arguments)
        with pytest.raises(RuntimeError, match="implementation='triton' cannot run: "):
            decode_attention(**arguments, implementation="triton")
    assert not launched
