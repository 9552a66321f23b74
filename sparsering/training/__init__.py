"""Trains the byte-level LongNet model: text, steps, checkpoints and demos.

Example:
    recipe = Recipe(pattern="LongNet((256, 1024), (1, 4)) & Causal()", context=4096, steps=500)
    train(recipe, Path("runs/mine"))
    train(recipe, Path("runs/mine"), resume=True)  # continues a stopped run, with equal losses
"""

from .checkpoint import load_model
from .data import Text, read_text
from .loop import Recipe, train

__all__ = ["Recipe", "Text", "load_model", "read_text", "train"]
