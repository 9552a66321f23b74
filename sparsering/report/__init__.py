"""Pages that tell figures."""
