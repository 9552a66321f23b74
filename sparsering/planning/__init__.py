"""Predicts what patterns cost on a machine, and proposes patterns for a length."""

from .proposals import Proposal, propose

__all__ = ["Proposal", "propose"]
