"""Cases without a fault, for the gate's command line."""

from tests.kernels.ahead_of_time.small_kernels import good_cases as cases

__all__ = ["cases"]
