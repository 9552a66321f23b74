"""Plans before a run: what a call costs, what fits, and what it costs over ranks."""
