"""Blocks of keys chosen by content: scored, selected, pooled, and told how good the choice was."""

from .mass import block_mass

__all__ = ["block_mass"]
