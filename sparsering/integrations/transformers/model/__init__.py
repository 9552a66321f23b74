"""A whole model: its config, its patterns, its adapters, and what its indexers run."""
