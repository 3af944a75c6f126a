"""Cases with one fault each, for the gate's command line."""

from sparse_cache.kernels.ahead_of_time.case import Case
from tests.kernels.ahead_of_time.small_kernels import bad_cases


def cases() -> list[Case]:
    return list(bad_cases().values())
