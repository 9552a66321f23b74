"""Plans before a run: counts, bytes and seconds of a call, over ranks too, and sizes that fit."""
