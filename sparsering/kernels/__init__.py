"""Backends: each one computes attention over a layout; no backend imports another."""
