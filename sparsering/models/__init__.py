"""Models built on `sparsering.attention`."""

from .longnet import LongNetLM

__all__ = ["LongNetLM"]
