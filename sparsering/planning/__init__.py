"""Predicts the counts, bytes and seconds of a call, and the largest sizes that fit in memory."""
