"""Models built on `sparsering.attention`."""

from .encoder import LongNetEncoder
from .longnet import LongNetLM

__all__ = ["LongNetEncoder", "LongNetLM"]
