"""Calls that the ranks of a process group share: hooks, arguments, losses and moved rows."""
