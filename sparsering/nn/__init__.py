"""Modules that models are built of; what attends is passed in."""
