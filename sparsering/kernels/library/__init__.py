"""Backends that hand a whole call to another library's attention."""
