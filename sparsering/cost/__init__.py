"""What a call costs, told before it runs: counts, bytes, seconds."""
