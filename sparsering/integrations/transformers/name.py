"""`NAME`: what transformers knows this library's attention by."""

NAME = "sparsering"
"""Name of the attn_implementation, and of the config attribute that holds patterns."""
