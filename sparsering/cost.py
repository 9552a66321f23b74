"""What work costs beside what moving data costs."""

PAIRS_PER_TOKEN = 2048
"""How many (query, key) pairs are taken to cost as much time as receiving one key token: one to ten
thousand would be right for GPUs (NVLink, a network), some 250 for processes on one CPU.
"""
