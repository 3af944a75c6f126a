"""The verifier `math`: what it accepts, and that nothing a model writes holds it up."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from sparse_cache.recipe.verifiers import MathVerifier, get_verifier

pytest.importorskip("math_verify")

ENDLESS = [
    r"\boxed{10^{10^{10}}}",
    "The answer is 9^9^9^9",
    r"$\sum_{k=1}^{100000000} \frac{1}{k^2}$",
]
LIMIT_S = 0.3


@pytest.fixture(scope="module")
def math() -> MathVerifier:
    verifier = get_verifier("math")
    assert isinstance(verifier, MathVerifier)
    return verifier


@pytest.fixture
def short() -> Iterator[MathVerifier]:
    verifier = MathVerifier(limit=LIMIT_S, workers=1)
    assert verifier("7", "7") == 1.0  # started, so that the clock does not count that
    yield verifier
    verifier.close()


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("He has 3 + 15 = 18 apples.\n#### 18", "9 * 2 = <<9*2=18>>18\n#### 18"),
        ("#### 18\n\nI hope that helps, 100%!", "#### 18"),
        ("#### 1,450", "#### 1450"),
        ("#### $1,450", "#### 1,450"),
        ("#### -3", "-3"),
        ("#### Step 2: 5 * 5\nso the answer is 25", "25"),
        (r"#### \frac{1}{2}", "0.5"),
        ("The answer is 12.", 12.0),
        ("She had 3 and got 4, so 7", 7),
        (r"\boxed{\frac{1}{2}}", "0.5"),
        (r"so $x = \boxed{\dfrac{14}{3}}$.", r"\frac{14}{3}"),
        (r"\boxed{(3, \frac{\pi}{2})}", r"\left( 3, \frac{\pi}{2} \right)"),
        (r"\boxed{q + p}", "p + q"),
        (r"\boxed{(x+1)^2}", "x^2 + 2x + 1"),
        (r"\boxed{\text{Evelyn}}", r"\text{Evelyn}"),
        (r"The final answer is 3. No: \boxed{4}", "4"),
        (r"\boxed{4}, though you may think the final answer is 3", "4"),
        ("<think>$9$</think> It is $5$.", "$5$"),
        (r"<answer>\frac{6}{4}</answer>", r"\boxed{\frac32}"),
        ("7", ["6", "7"]),
    ],
)
def test_accepts(math: MathVerifier, completion: str, answer: object) -> None:
    assert math(completion, answer) == 1.0


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("#### 19", "#### 18"),
        ("18 is not it, so #### 19", "#### 18"),
        ("", "7"),
        ("I do not know.", "7"),
        ("<think>it is 7", "7"),
        (r"\boxed{7, 8, 9}", "7"),
        (r"\boxed{p - q}", "p + q"),
        (r"\boxed{", "7"),
        ("7", ["5", "6"]),
    ],
)
def test_refuses(math: MathVerifier, completion: str, answer: object) -> None:
    assert math(completion, answer) == 0.0


@pytest.mark.parametrize("completion", ENDLESS)
def test_endless_checks_end(short: MathVerifier, completion: str) -> None:
    start = time.monotonic()
    assert short(completion, "7") == 0.0
    assert time.monotonic() - start < LIMIT_S + 1.5
    assert short.timeouts == 1
    assert short("7", "7") == 1.0


def test_threads_wait_for_no_endless_check_but_their_own() -> None:
    verifier = MathVerifier(limit=LIMIT_S, workers=2)
    work = [(f"so #### {n}", str(n), 1.0) for n in range(100)]
    work += [(f"so #### {n + 1}", str(n), 0.0) for n in range(100)]
    work[50:50] = [(text, "7", 0.0) for text in ENDLESS[:2]]
    with ThreadPoolExecutor(8) as threads:
        given = list(threads.map(lambda one: verifier(one[0], one[1]), work))
    assert given == [reward for _, _, reward in work]
    assert verifier.timeouts == 2
    verifier.close()


def test_no_more_processes_than_workers() -> None:
    verifier = MathVerifier(workers=2)
    with ThreadPoolExecutor(6) as threads:
        list(threads.map(lambda n: verifier(str(n), str(n)), range(60)))
    assert 1 <= len(verifier._pool._idle) <= 2
    verifier.close()
    assert not verifier._pool._idle
    assert verifier("7", "7") == 1.0
    verifier.close()


def test_a_worker_that_was_killed_is_replaced(short: MathVerifier) -> None:
    (idle,) = short._pool._idle
    idle._process.kill()
    idle._process.wait()
    assert short("7", "7") == 1.0
    assert short.timeouts == 0


def test_texts_longer_than_a_pipe(math: MathVerifier) -> None:
    text = "First, 3 + 4 = 7 apples and then some more. " * 10_000
    assert math(text + r"\boxed{8}", "8") == 1.0
    assert math(text + r"\boxed{8}", "7") == 0.0


def test_bad_answers(math: MathVerifier) -> None:
    with pytest.raises(ValueError, match="empty"):
        math("7", " ")
    with pytest.raises(TypeError, match="type dict"):
        math("7", {"answer": 7})
    with pytest.raises(ValueError, match="limit=0"):
        MathVerifier(limit=0)
    with pytest.raises(ValueError, match="workers=0"):
        MathVerifier(workers=0)


def test_a_missing_package(math: MathVerifier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install math-verify"):
        math("7", "7")


def test_survives_pickling() -> None:
    copy = pickle.loads(pickle.dumps(MathVerifier(limit=2.0, workers=1)))
    assert copy._pool.limit == 2.0
    assert copy("7", "7") == 1.0
    copy.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_has_its_own_workers(short: MathVerifier) -> None:
    """Replies would otherwise reach the wrong process."""
    child = os.fork()
    if child == 0:
        try:
            right = all(short(str(n), str(n)) == 1.0 for n in range(50))
            wrong = all(short(str(n), str(n + 1)) == 0.0 for n in range(50))
            short.close()
            os._exit(0 if right and wrong else 1)
        finally:
            os._exit(2)
    assert all(short(str(n), str(n + 1)) == 0.0 for n in range(50))
    assert all(short(str(n), str(n)) == 1.0 for n in range(50))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_ctrl_c_reaches_no_worker(short: MathVerifier) -> None:
    (idle,) = short._pool._idle
    idle._process.send_signal(signal.SIGINT)
    assert short("7", "7") == 1.0
    assert short._pool._idle == [idle]


def test_main_thread_alarms_are_left_alone(math: MathVerifier) -> None:
    """math-verify's own limits would replace the handler."""
    if not hasattr(signal, "SIGALRM"):
        pytest.skip("no alarms on this system")
    before = signal.getsignal(signal.SIGALRM)
    assert math("7", "7") == 1.0
    assert signal.getsignal(signal.SIGALRM) is before
