"""The eviction trace: which token died when, per layer, row and KV head."""

from .death_record import DeathRecord
from .eviction_trace import NEVER, EvictionTrace

__all__ = ["NEVER", "DeathRecord", "EvictionTrace"]
