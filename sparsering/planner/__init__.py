"""Plans before a run: the costs of a call, also over ranks, and the sizes that fit in memory."""
