"""Costs of a call: counts, bytes and seconds, by arithmetic and by calibration."""
