"""Models over any pattern: a causal language model, and an encoder of sequences of vectors."""

from .encoder import LongNetEncoder
from .longnet import LongNetLM

__all__ = ["LongNetEncoder", "LongNetLM"]
