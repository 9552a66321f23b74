"""Backends: each computes attention over a layout its own way; they never import one another."""
