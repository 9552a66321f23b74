"""Patterns against drawn matrices, against the plain-Python oracle, and against the set laws.

Every drawing reads as the pattern it tests: `.` is no pair, a digit counts a pair, `|` stands
between heads and `---` between batch entries. Rows are queries, columns keys.
"""

import dataclasses
import operator
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from patterns_oracle import Spec, build, counts, is_batched, is_mixture, matrix
from strategies import Scene, cases, masks, mixtures, scenes
from torch import Tensor

import sparsering as sr


@dataclasses.dataclass(frozen=True)
class Drawing:
    """A pattern (as a spec), the arguments of `to_dense`, and the matrix as drawn."""

    behaviour: str
    spec: Spec
    arguments: dict[str, Any]
    picture: str


def drawing(behaviour: str, spec: Spec, q_len: int, picture: str, **arguments: Any) -> Drawing:
    return Drawing(behaviour, spec, {"q_len": q_len, **arguments}, picture)


DRAWINGS = [
    drawing(
        "full holds every pair of a rectangle", ("Full",), 2, kv_len=3, picture="""
        1 1 1
        1 1 1
        """
    ),
    drawing(
        "causal is the lower triangle", ("Causal",), 4, """
        1 . . .
        1 1 . .
        1 1 1 .
        1 1 1 1
        """
    ),
    drawing(
        "causal aligns the last query with the last key", ("Causal",), 2, kv_len=4, picture="""
        1 1 1 .
        1 1 1 1
        """
    ),
    drawing(
        "causal queries before the first key see nothing", ("Causal",), 4, kv_len=2, picture="""
        . .
        . .
        1 .
        1 1
        """
    ),
    drawing(
        "q_start replaces the alignment", ("Causal",), 2, kv_len=4, q_start=0, picture="""
        1 . . .
        1 1 . .
        """
    ),
    drawing(
        "a query after the last key sees every key",
        ("Causal",), 3, kv_len=3, q_start=1, picture="""
        1 1 .
        1 1 1
        1 1 1
        """
    ),
    drawing(
        "a window to the left includes the query's own key", ("SlidingWindow", 2), 5, """
        1 . . . .
        1 1 . . .
        1 1 1 . .
        . 1 1 1 .
        . . 1 1 1
        """
    ),
    drawing(
        "a window of width zero is the diagonal", ("SlidingWindow", 0, 0), 3, """
        1 . .
        . 1 .
        . . 1
        """
    ),
    drawing(
        "a window has two sides", ("SlidingWindow", 1, 2), 5, """
        1 1 1 . .
        1 1 1 1 .
        . 1 1 1 1
        . . 1 1 1
        . . . 1 1
        """
    ),
    drawing(
        "dilation thins the window, whose sides stay in tokens", ("SlidingWindow", 4, 3, 2), 7, """
        1 . 1 . . . .
        . 1 . 1 . . .
        1 . 1 . 1 . .
        . 1 . 1 . 1 .
        1 . 1 . 1 . 1
        . 1 . 1 . 1 .
        . . 1 . 1 . 1
        """
    ),
    drawing(
        "None is an unbounded side", ("SlidingWindow", None, 0, 3), 7, """
        1 . . . . . .
        . 1 . . . . .
        . . 1 . . . .
        1 . . 1 . . .
        . 1 . . 1 . .
        . . 1 . . 1 .
        1 . . 1 . . 1
        """
    ),
    drawing(
        "an unbounded right side is the upper band", ("SlidingWindow", 1, None), 4, """
        1 1 1 1
        1 1 1 1
        . 1 1 1
        . . 1 1
        """
    ),
    drawing(
        "two unbounded sides leave the dilation", ("SlidingWindow", None, None, 2), 4, """
        1 . 1 .
        . 1 . 1
        1 . 1 .
        . 1 . 1
        """
    ),
    drawing(
        "a dilated window counts from a negative position",  # positions -2 .. 2
        ("SlidingWindow", 1, 3, 3), 5, kv_len=3, picture="""
        . 1 .
        . . 1
        1 . .
        . 1 .
        . . 1
        """
    ),
    drawing(
        "global tokens are rows and columns", ("GlobalTokens", 2), 4, """
        1 1 1 1
        1 1 1 1
        1 1 . .
        1 1 . .
        """
    ),
    drawing(
        "global rows alone", ("GlobalTokens", 1, True, False), 3, """
        1 1 1
        . . .
        . . .
        """
    ),
    drawing(
        "global columns alone", ("GlobalTokens", 2, False, True), 3, """
        1 1 .
        1 1 .
        1 1 .
        """
    ),
    drawing(
        "a decoding query keeps the global columns only",
        ("GlobalTokens", 2), 2, kv_len=5, picture="""
        1 1 . . .
        1 1 . . .
        """
    ),
    drawing(
        "a negative position is no global row", ("GlobalTokens", 1), 4, kv_len=2, picture="""
        1 .
        1 .
        1 1
        1 .
        """
    ),
    drawing(
        "more global tokens than tokens is full", ("GlobalTokens", 9, True, False), 2, """
        1 1
        1 1
        """
    ),
    drawing(
        "no global token is no pair", ("GlobalTokens", 0), 2, """
        . .
        . .
        """
    ),
    drawing(
        "a branch stays in its segment, and a ragged last segment has only real keys",
        ("Dilated", 4, 2, 0), 7, """
        1 . 1 . . . .
        . . . . . . .
        1 . 1 . . . .
        . . . . . . .
        . . . . 1 . 1
        . . . . . . .
        . . . . 1 . 1
        """
    ),
    drawing(
        "the grid restarts at each segment where the rate does not divide it",
        ("Dilated", 5, 2, 0), 8, """
        1 . 1 . 1 . . .
        . . . . . . . .
        1 . 1 . 1 . . .
        . . . . . . . .
        1 . 1 . 1 . . .
        . . . . . 1 . 1
        . . . . . . . .
        . . . . . 1 . 1
        """
    ),
    drawing(
        "the grid of offset 1 restarts one later", ("Dilated", 5, 2, 1), 9, """
        . . . . . . . . .
        . 1 . 1 . . . . .
        . . . . . . . . .
        . 1 . 1 . . . . .
        . . . . . . . . .
        . . . . . . . . .
        . . . . . . 1 . 1
        . . . . . . . . .
        . . . . . . 1 . 1
        """
    ),
    drawing(
        "a segment longer than the sequence", ("Dilated", 100, 3, 2), 6, """
        . . . . . .
        . . . . . .
        . . 1 . . 1
        . . . . . .
        . . . . . .
        . . 1 . . 1
        """
    ),
    drawing(
        "a rate longer than the segment leaves one token of each", ("Dilated", 2, 5, 1), 4, """
        . . . .
        . 1 . .
        . . . .
        . . . 1
        """
    ),
    drawing(
        "a residue past the segment is empty", ("Dilated", 2, 5, 3), 4, """
        . . . .
        . . . .
        . . . .
        . . . .
        """
    ),
    drawing(
        "head offsets of six heads at rate 4 are 0 1 2 3 0 1",
        ("Dilated", 8, 4, "head"), 6, num_heads=6, picture="""
        1...1.|......|......|......|1...1.|......
        ......|.1...1|......|......|......|.1...1
        ......|......|..1...|......|......|......
        ......|......|......|...1..|......|......
        1...1.|......|......|......|1...1.|......
        ......|.1...1|......|......|......|.1...1
        """
    ),
    drawing(
        "block offsets of six heads at rate 4 are 0 0 1 1 2 2",
        ("Dilated", 8, 4, "block"), 6, num_heads=6, picture="""
        1...1.|1...1.|......|......|......|......
        ......|......|.1...1|.1...1|......|......
        ......|......|......|......|..1...|..1...
        ......|......|......|......|......|......
        1...1.|1...1.|......|......|......|......
        ......|......|.1...1|.1...1|......|......
        """
    ),
    drawing(
        "the head offset is the default", ("Dilated", 4, 2), 4, num_heads=2, picture="""
        1 . 1 . | . . . .
        . . . . | . 1 . 1
        1 . 1 . | . . . .
        . . . . | . 1 . 1
        """
    ),
    drawing(
        "an integer offset is taken modulo the rate", ("Dilated", 4, 3, 5), 4, """
        . . . .
        . . . .
        . . 1 .
        . . . .
        """
    ),
    drawing(
        "a negative offset counts from the end of the rate", ("Dilated", 4, 3, -2), 4, """
        . . . .
        . 1 . .
        . . . .
        . . . .
        """
    ),
    drawing(
        "a tuple gives one offset per kv head, modulo the rate",
        ("Dilated", 4, 2, (3, -2)), 4, num_heads=4, num_kv_heads=2, picture="""
        . . . . | . . . . | 1 . 1 . | 1 . 1 .
        . 1 . 1 | . 1 . 1 | . . . . | . . . .
        . . . . | . . . . | 1 . 1 . | 1 . 1 .
        . 1 . 1 | . 1 . 1 | . . . . | . . . .
        """
    ),
    drawing(
        "head offsets go by the kv head",
        ("Dilated", 4, 2), 4, num_heads=4, num_kv_heads=2, picture="""
        1 . 1 . | 1 . 1 . | . . . . | . . . .
        . . . . | . . . . | . 1 . 1 | . 1 . 1
        1 . 1 . | 1 . 1 . | . . . . | . . . .
        . . . . | . . . . | . 1 . 1 | . 1 . 1
        """
    ),
    drawing(  # three kv heads: 0 0 1. By query head it would be 0 0 0 1 1 1.
        "block offsets go by the kv head",
        ("Dilated", 4, 2, "block"), 3, num_heads=6, num_kv_heads=3, picture="""
        1 . 1 | 1 . 1 | 1 . 1 | 1 . 1 | . . . | . . .
        . . . | . . . | . . . | . . . | . 1 . | . 1 .
        1 . 1 | 1 . 1 | 1 . 1 | 1 . 1 | . . . | . . .
        """
    ),
    drawing(
        "a branch asks for the query's own position when decoding",
        ("Dilated", 4, 2, 1), 3, kv_len=8, picture="""
        . . . . . 1 . 1
        . . . . . . . .
        . . . . . 1 . 1
        """
    ),
    drawing(
        # -3 .. 1; position -1 is not in segment 0
        "a negative position shares no segment with a key",
        ("Dilated", 4, 1), 5, kv_len=2, picture="""
        . .
        . .
        . .
        1 1
        1 1
        """
    ),
    drawing(
        "a LongNet counts a pair once per branch", ("LongNet", (2, 4), (1, 2)), 6, """
        2 1 1 . . .
        1 1 . . . .
        1 . 2 1 . .
        . . 1 1 . .
        . . . . 2 1
        . . . . 1 1
        """
    ),
    drawing(
        "a LongNet shifts each branch by head, modulo that branch's rate",
        ("LongNet", (2, 4), (1, 2)), 4, num_heads=2, picture="""
        2 1 1 . | 1 1 . .
        1 1 . . | 1 2 . 1
        1 . 2 1 | . . 1 1
        . . 1 1 | . 1 1 2
        """
    ),
    drawing(
        "a causal LongNet keeps its counts", ("&", ("LongNet", (2, 4), (1, 2)), ("Causal",)), 4, """
        2 . . .
        1 1 . .
        1 . 2 .
        . . 1 1
        """
    ),
    drawing(
        "block-dilated sees its own block and those at a rate",  # blocks 0 0 1 1 2 2 3
        ("BlockDilated", (2,), 2), 7, """
        1 1 . . 1 1 .
        1 1 . . 1 1 .
        . . 1 1 . . 1
        . . 1 1 . . 1
        1 1 . . 1 1 .
        1 1 . . 1 1 .
        . . 1 1 . . 1
        """
    ),
    drawing(
        "block-dilated takes several rates, some out of reach",
        ("BlockDilated", (1, 3, 50), 1), 5, """
        1 1 . 1 .
        1 1 1 . 1
        . 1 1 1 .
        1 . 1 1 1
        . 1 . 1 1
        """
    ),
    drawing(
        "a negative position is in no block, not even in a neighbour's",
        ("BlockDilated", (1,), 2), 4, kv_len=3, picture="""
        . . .
        1 1 1
        1 1 1
        1 1 1
        """
    ),
    drawing(
        "a block window has a radius in blocks", ("BlockWindow", 1, 2), 7, """
        1 1 1 1 . . .
        1 1 1 1 . . .
        1 1 1 1 1 1 .
        1 1 1 1 1 1 .
        . . 1 1 1 1 1
        . . 1 1 1 1 1
        . . . . 1 1 1
        """
    ),
    drawing(
        "a block window of radius zero is block diagonal", ("BlockWindow", 0, 3), 4, """
        1 1 1 .
        1 1 1 .
        1 1 1 .
        . . . 1
        """
    ),
    drawing(
        "blocks are cut by position, not by query index",  # positions 3 4 5
        ("BlockWindow", 0, 2), 3, kv_len=6, picture="""
        . . 1 1 . .
        . . . . 1 1
        . . . . 1 1
        """
    ),
    drawing(
        "a negative position is in no block window", ("BlockWindow", 5, 2), 4, kv_len=2, picture="""
        . .
        . .
        1 1
        1 1
        """
    ),
    drawing(
        # near: one block around; far: even blocks see all
        "a hierarchy is the union of its levels",
        ("Hierarchical", ((2, 4), (4, None)), 2), 8, """
        1 1 1 1 1 1 1 1
        1 1 1 1 1 1 1 1
        1 1 1 1 1 1 . .
        1 1 1 1 1 1 . .
        1 1 1 1 1 1 1 1
        1 1 1 1 1 1 1 1
        . . . . 1 1 1 1
        . . . . 1 1 1 1
        """
    ),
    drawing(
        "a stride below the block is every block, a window below it is the diagonal block",
        ("Hierarchical", ((1, 1),), 2), 5, """
        1 1 . . .
        1 1 . . .
        . . 1 1 .
        . . 1 1 .
        . . . . 1
        """
    ),
    drawing(
        # 7 // 2 = 3 blocks, 9 // 2 // 2 = 2
        "a level strides over query blocks and halves its window",
        ("Hierarchical", ((7, 9),), 2), 9, """
        1 1 1 1 1 1 . . .
        1 1 1 1 1 1 . . .
        . . . . . . . . .
        . . . . . . . . .
        . . . . . . . . .
        . . . . . . . . .
        . . 1 1 1 1 1 1 1
        . . 1 1 1 1 1 1 1
        . . . . . . . . .
        """
    ),
    drawing(
        "a negative position is in no block of a hierarchy",
        ("Hierarchical", ((1, None),), 2), 3, kv_len=2, picture="""
        . .
        1 1
        1 1
        """
    ),
    drawing(
        "documents are blocks on the diagonal, an empty one is nothing",
        ("Documents", (2, 0, 1, 2)), 5, """
        1 1 . . .
        1 1 . . .
        . . 1 . .
        . . . 1 1
        . . . 1 1
        """
    ),
    drawing(
        "the last queries of documents", ("Documents", (2, 3)), 4, kv_len=5, picture="""
        1 1 . . .
        . . 1 1 1
        . . 1 1 1
        . . 1 1 1
        """
    ),
    drawing(
        "a negative position is in no document", ("Documents", (1, 2)), 5, kv_len=3, picture="""
        . . .
        . . .
        1 . .
        . 1 1
        . 1 1
        """
    ),
    drawing(
        "a position past the last document is in none",
        ("Documents", (1, 2)), 3, kv_len=3, q_start=2, picture="""
        . 1 1
        . . .
        . . .
        """
    ),
    drawing(
        "packing restarts the dilated grid in each document",  # Dilated(4, 2, 0) alone: 0 2 | 4 6
        ("Packed", (3, 4), ("Dilated", 4, 2, 0)), 7, """
        1 . 1 . . . .
        . . . . . . .
        1 . 1 . . . .
        . . . 1 . 1 .
        . . . . . . .
        . . . 1 . 1 .
        . . . . . . .
        """
    ),
    drawing(
        "packing restarts the segments, an empty document is nothing",
        ("Packed", (3, 0, 4), ("Dilated", 2, 1, 0)), 7, """
        1 1 . . . . .
        1 1 . . . . .
        . . 1 . . . .
        . . . 1 1 . .
        . . . 1 1 . .
        . . . . . 1 1
        . . . . . 1 1
        """
    ),
    drawing(
        "packing a causal mask", ("Packed", (2, 3), ("Causal",)), 5, """
        1 . . . .
        1 1 . . .
        . . 1 . .
        . . 1 1 .
        . . 1 1 1
        """
    ),
    drawing(
        "packing gives each document its global tokens",
        ("Packed", (3, 2), ("GlobalTokens", 1)), 5, """
        1 1 1 . .
        1 . . . .
        1 . . . .
        . . . 1 1
        . . . 1 .
        """
    ),
    drawing(
        "packing restarts the blocks", ("Packed", (3, 4), ("BlockWindow", 0, 2)), 7, """
        1 1 . . . . .
        1 1 . . . . .
        . . 1 . . . .
        . . . 1 1 . .
        . . . 1 1 . .
        . . . . . 1 1
        . . . . . 1 1
        """
    ),
    drawing(
        "packing restarts a table of blocks",
        ("Packed", (3, 4), ("Blocks", ((True, False), (True, False)), 2)), 7, """
        1 1 . . . . .
        1 1 . . . . .
        1 1 . . . . .
        . . . 1 1 . .
        . . . 1 1 . .
        . . . 1 1 . .
        . . . 1 1 . .
        """
    ),
    drawing(
        "packing a mixture keeps its counts",
        ("Packed", (2, 3), ("+", ("Causal",), ("SlidingWindow", 0))), 5, """
        2 . . . .
        1 2 . . .
        . . 2 . .
        . . 1 2 .
        . . 1 1 2
        """
    ),
    drawing(
        "packing for the last queries only, and none for a negative position",
        ("Packed", (2, 2), ("SlidingWindow", 1)), 5, kv_len=4, picture="""
        . . . .
        1 . . .
        1 1 . .
        . . 1 .
        . . 1 1
        """
    ),
    drawing(
        "packing in packing",
        ("Packed", (3, 3), ("Packed", (1, 2), ("Causal",))), 6, """
        1 . . . . .
        . 1 . . . .
        . 1 1 . . .
        . . . 1 . .
        . . . . 1 .
        . . . . 1 1
        """
    ),
    drawing(
        "padding hides the keys past each length",
        ("KeyPadding", (3, 0, 1)), 2, kv_len=3, picture="""
        1 1 1
        1 1 1
        ---
        . . .
        . . .
        ---
        1 . .
        1 . .
        """
    ),
    drawing(
        "padding joins a mask per batch entry", ("&", ("Causal",), ("KeyPadding", (3, 1))), 3, """
        1 . .
        1 1 .
        1 1 1
        ---
        1 . .
        1 . .
        1 . .
        """
    ),
    drawing(
        "padding joins per-head offsets",
        ("&", ("Dilated", 4, 2), ("KeyPadding", (4, 2))), 4, num_heads=2, picture="""
        1 . 1 . | . . . .
        . . . . | . 1 . 1
        1 . 1 . | . . . .
        . . . . | . 1 . 1
        ---
        1 . . . | . . . .
        . . . . | . 1 . .
        1 . . . | . . . .
        . . . . | . 1 . .
        """
    ),
    drawing(
        "a table of blocks, the last one ragged",
        ("Blocks", ((True, False), (False, True), (True, True)), 2), 5,
        kv_len=3, q_start=0, picture="""
        1 1 .
        1 1 .
        . . 1
        . . 1
        1 1 1
        """
    ),
    drawing(
        "a table of blocks is read at absolute positions",  # position 3 is in the second row
        ("Blocks", ((True, False), (False, True)), 2), 1, kv_len=4, picture="""
        . . 1 1
        """
    ),
    drawing(
        "a table of blocks has no row for a negative position",
        ("Blocks", ((True,),), 2), 4, kv_len=2, picture="""
        . .
        . .
        1 1
        1 1
        """
    ),
    drawing(
        "a table of blocks may be larger than the scene",
        ("Blocks", ((True, False, True), (False, True, True), (True, True, True)), 2), 3, """
        1 1 .
        1 1 .
        . . 1
        """
    ),
    drawing(
        "one table of blocks per query head",
        ("Blocks", (((True,),), ((False,),)), 2), 2, num_heads=2, num_kv_heads=1, picture="""
        1 1 | . .
        1 1 | . .
        """
    ),
    drawing(
        "one table of blocks per kv head",
        ("Blocks", (((True,),), ((False,),)), 2), 2, num_heads=4, num_kv_heads=2, picture="""
        1 1 | 1 1 | . . | . .
        1 1 | 1 1 | . . | . .
        """
    ),
    drawing(
        "one table of blocks for all heads",
        ("Blocks", (((True, False), (True, True)),), 1), 2, num_heads=2, picture="""
        1 . | 1 .
        1 1 | 1 1
        """
    ),
    drawing(
        "one table of blocks per batch entry and kv head",
        ("Blocks", ((((True,),), ((False,),)), (((False,),), ((True,),))), 2), 2,
        num_heads=4, num_kv_heads=2, picture="""
        1 1 | 1 1 | . . | . .
        1 1 | 1 1 | . . | . .
        ---
        . . | . . | 1 1 | 1 1
        . . | . . | 1 1 | 1 1
        """
    ),
    drawing(
        "a dense mask is read by query index, so a negative position may have keys",
        ("Dense", ((True, False), (False, True), (True, True))), 3, kv_len=2, picture="""
        1 .
        . 1
        1 1
        """
    ),
    drawing(
        "a dense mask ignores q_start",
        ("Dense", ((True, False, False), (False, False, True))), 2, kv_len=3, q_start=7, picture="""
        1 . .
        . . 1
        """
    ),
    drawing(
        "one dense mask per head",
        ("Dense", (((True, False),), ((False, True),))), 1, kv_len=2, num_heads=2, picture="""
        1 . | . 1
        """
    ),
    drawing(
        "a union counts a pair of both once",
        ("|", ("SlidingWindow", 1), ("GlobalTokens", 1)), 4, """
        1 1 1 1
        1 1 . .
        1 1 1 .
        1 . 1 1
        """
    ),
    drawing(
        "an intersection holds the pairs of both",
        ("&", ("SlidingWindow", 1, 1), ("Documents", (2, 2))), 4, """
        1 1 . .
        1 1 . .
        . . 1 1
        . . 1 1
        """
    ),
    drawing(
        "an intersection of coprime dilations",
        ("&", ("SlidingWindow", None, 0, 2), ("SlidingWindow", None, None, 3)), 7, """
        1 . . . . . .
        . 1 . . . . .
        . . 1 . . . .
        . . . 1 . . .
        . . . . 1 . .
        . . . . . 1 .
        1 . . . . . 1
        """
    ),
    drawing(
        "a union of two dilations counts the shared pairs once",
        ("|", ("SlidingWindow", 4, 0, 2), ("SlidingWindow", 3, 0, 3)), 5, """
        1 . . . .
        . 1 . . .
        1 . 1 . .
        1 1 . 1 .
        1 1 1 . 1
        """
    ),
    drawing(
        "a sum counts a pair of both twice", ("+", ("Causal",), ("GlobalTokens", 1)), 3, """
        2 1 1
        2 1 .
        2 1 1
        """
    ),
    drawing(
        "a sum of three counts to three",
        ("+", ("+", ("Causal",), ("Causal",)), ("SlidingWindow", 0)), 2, """
        3 .
        2 3
        """
    ),
    drawing(
        "a mask cuts a sum on the left too",
        ("&", ("GlobalTokens", 1, False, True), ("+", ("Causal",), ("Full",))), 2, """
        2 .
        2 .
        """
    ),
]  # fmt: skip


def expanded(dense: Tensor, batch: int, num_heads: int, q_len: int, kv_len: int) -> Tensor:
    """`to_dense`'s [H or 1, Nq, Nk] or [B, H or 1, Nq, Nk] at [B, H, Nq, Nk], the shape checked."""
    assert dense.dim() in (3, 4)
    assert dense.shape[-3] in (1, num_heads)
    assert dense.shape[-2:] == (q_len, kv_len)
    if dense.dim() == 4:
        assert dense.shape[0] == batch
    return dense.expand(batch, num_heads, q_len, kv_len)


def assert_is_matrix(pattern: Any, spec: Spec, arguments: dict[str, Any], expected: Tensor) -> None:
    dense = pattern.to_dense(**arguments)
    assert (dense.dim() == 4) == is_batched(spec)
    if is_mixture(spec):
        assert dense.dtype is not torch.bool
        assert not dense.is_floating_point()
    else:
        assert dense.dtype is torch.bool
    actual = expanded(dense, *expected.shape).to(torch.int64)
    assert actual.tolist() == expected.tolist()


@pytest.mark.parametrize("drawn", DRAWINGS, ids=lambda drawn: drawn.behaviour)
def test_pattern_is_the_drawn_matrix(drawn: Drawing) -> None:
    assert_is_matrix(build(drawn.spec), drawn.spec, drawn.arguments, matrix(drawn.picture))


def test_tables_of_an_empty_scene_are_accepted() -> None:
    for shape in ((0, 5), (5, 0), (0, 0)):
        nothing = torch.zeros(shape, dtype=torch.bool)
        assert sr.Dense(nothing).to_dense(*shape).shape == (1, *shape)
        assert (sr.Dense(nothing) + sr.Causal()).to_dense(*shape).sum() == 0
        assert sr.Dense(nothing).layout(*shape, block_size=16).num_pairs == 0


def test_constructors_take_the_keywords_of_the_contract() -> None:
    active = torch.ones(1, 1, dtype=torch.bool)
    assert sr.SlidingWindow(left=3) == sr.SlidingWindow(left=3, right=0, dilation=1)
    assert sr.GlobalTokens(count=2) == sr.GlobalTokens(count=2, rows=True, columns=True)
    assert sr.Dilated(segment_length=4, dilation_rate=2) == sr.Dilated(4, 2, offset="head")
    assert sr.LongNet(segment_lengths=(4, 8), dilation_rates=(1, 2), offset=1) == sr.LongNet(
        (4, 8), (1, 2), 1
    )
    assert sr.BlockDilated(rates=(1,), block_size=16) == sr.BlockDilated((1,), 16)
    assert sr.BlockWindow(radius=1, block_size=16) == sr.BlockWindow(1, 16)
    assert sr.RandomBlocks(density=0.5, block_size=16) == sr.RandomBlocks(
        0.5, 16, seed=0, per_head=True
    )
    assert sr.Hierarchical(levels=((16, 32),), block_size=16) == sr.Hierarchical(((16, 32),), 16)
    assert sr.Documents(lengths=(1, 2)) == sr.Documents((1, 2))
    assert sr.Packed(lengths=(1, 2), pattern=sr.Causal()) == sr.Packed((1, 2), sr.Causal())
    assert sr.KeyPadding(lengths=(1, 2)) == sr.KeyPadding((1, 2))
    assert sr.Blocks(active=active, block_size=16) == sr.Blocks(active, 16)
    assert sr.Dense(mask=active) == sr.Dense(active)


def oracle_of(spec: Spec, scene: Scene) -> Tensor:
    return counts(spec, batch=scene.batch if is_batched(spec) else 1, **scene.arguments)


@settings(max_examples=250, suppress_health_check=list(HealthCheck))
@given(cases())
def test_pattern_equals_the_oracle(case: tuple[Spec, Scene]) -> None:
    spec, scene = case
    assert_is_matrix(build(spec), spec, scene.arguments, oracle_of(spec, scene))


@settings(max_examples=20, suppress_health_check=list(HealthCheck))
@given(cases(max_length=260, min_length=71, max_heads=2))
def test_long_pattern_equals_the_oracle(case: tuple[Spec, Scene]) -> None:
    spec, scene = case
    assert_is_matrix(build(spec), spec, scene.arguments, oracle_of(spec, scene))


# Laws of sets and multisets.


def full_size(pattern: Any, scene: Scene) -> Tensor:
    """Counts at [B, H, Nq, Nk], so that those of two patterns can be compared."""
    dense = pattern.to_dense(**scene.arguments)
    return expanded(dense, scene.batch, scene.num_heads, scene.q_len, scene.kv_len).to(torch.int64)


def joined(data: Any, *strategies: Any) -> tuple[Scene, list[Any]]:
    scene = data.draw(scenes(max_length=40, max_heads=4))
    return scene, [build(data.draw(strategy(scene, 0, True))) for strategy in strategies]


def laws(test: Any) -> Any:
    """Draw the scene and the patterns inside the test: all its patterns share one scene."""
    return settings(max_examples=40, suppress_health_check=list(HealthCheck))(
        given(st.data())(test)
    )


@laws
def test_and_or_are_idempotent_and_plus_is_not(data: Any) -> None:
    scene, (a,) = joined(data, masks)
    once = full_size(a, scene)
    assert torch.equal(full_size(a & a, scene), once)
    assert torch.equal(full_size(a | a, scene), once)
    assert torch.equal(full_size(a + a, scene), 2 * once)


@laws
def test_operators_commute(data: Any) -> None:
    scene, (a, b) = joined(data, masks, masks)
    for op in (operator.and_, operator.or_, operator.add):
        assert torch.equal(full_size(op(a, b), scene), full_size(op(b, a), scene))


@laws
def test_operators_are_those_of_sets_and_multisets(data: Any) -> None:
    scene, (a, b) = joined(data, masks, masks)
    in_a, in_b = full_size(a, scene), full_size(b, scene)
    assert torch.equal(full_size(a & b, scene), in_a * in_b)
    assert torch.equal(full_size(a | b, scene), (in_a + in_b).clamp(max=1))
    assert torch.equal(full_size(a + b, scene), in_a + in_b)


@laws
def test_and_distributes_over_or_and_absorbs(data: Any) -> None:
    scene, (a, b, c) = joined(data, masks, masks, masks)
    assert torch.equal(full_size(a & (b | c), scene), full_size((a & b) | (a & c), scene))
    assert torch.equal(full_size(a | (b & c), scene), full_size((a | b) & (a | c), scene))
    assert torch.equal(full_size(a | (a & b), scene), full_size(a, scene))


@laws
def test_operators_associate(data: Any) -> None:
    scene, (a, b, c) = joined(data, masks, masks, masks)
    for op in (operator.and_, operator.or_, operator.add):
        left, right = op(op(a, b), c), op(a, op(b, c))
        assert torch.equal(full_size(left, scene), full_size(right, scene))


@laws
def test_mask_distributes_over_a_mixture_from_either_side(data: Any) -> None:
    scene, (a, b, m) = joined(data, masks, masks, masks)
    expected = full_size((a & m) + (b & m), scene)
    assert torch.equal(full_size((a + b) & m, scene), expected)
    assert torch.equal(full_size(m & (a + b), scene), expected)


@laws
def test_mixture_sums_and_masks_multiply(data: Any) -> None:
    scene, (x, y, m) = joined(data, mixtures, mixtures, masks)
    total = full_size(x, scene) + full_size(y, scene)
    assert torch.equal(full_size(x + y, scene), total)
    assert torch.equal(full_size(x + m, scene), full_size(x, scene) + full_size(m, scene))
    assert torch.equal(full_size((x + y) & m, scene), total * full_size(m, scene))


@laws
def test_full_is_neutral_for_and_and_absorbing_for_or(data: Any) -> None:
    scene, (a,) = joined(data, masks)
    everything = torch.ones(scene.batch, scene.num_heads, scene.q_len, scene.kv_len).long()
    assert torch.equal(full_size(a & sr.Full(), scene), full_size(a, scene))
    assert torch.equal(full_size(a | sr.Full(), scene), everything)


# Values: equal, hashable, frozen, readable.

TABLE = torch.tensor([[True, False], [True, True]])


def one_of_each() -> list[Any]:
    """One pattern of every constructor and operator, built anew at each call."""
    causal = sr.Causal()
    return [
        sr.Full(),
        causal,
        sr.SlidingWindow(4, 2, 2),
        sr.SlidingWindow(None, 7),
        sr.GlobalTokens(3, rows=False),
        sr.Dilated(8, 2),
        sr.Dilated(8, 2, offset=(1, 0)),
        sr.LongNet((4, 8), (1, 2)),
        sr.BlockDilated((1, 4), 16),
        sr.BlockWindow(2, 16),
        sr.RandomBlocks(0.25, 16, seed=3, per_head=False),
        sr.Hierarchical(((16, 64), (64, None)), 16),
        sr.Documents((3, 4)),
        sr.Packed((3, 4), sr.Dilated(4, 2)),
        sr.KeyPadding((5, 7)),
        sr.Blocks(TABLE.clone(), 16),
        sr.Dense(TABLE.clone()),
        causal & sr.SlidingWindow(9),
        causal | sr.GlobalTokens(2),
        causal + sr.SlidingWindow(9),
        (causal + sr.SlidingWindow(9)) & sr.Documents((3, 4)),
    ]


INDICES = range(len(one_of_each()))
NAMES = [repr(pattern)[:60] for pattern in one_of_each()]


@pytest.mark.parametrize("index", INDICES, ids=NAMES)
def test_patterns_built_alike_are_equal_and_hash_alike(index: int) -> None:
    first, second = one_of_each()[index], one_of_each()[index]
    assert first == second
    assert (first != second) is False
    assert hash(first) == hash(second)
    assert {first: "found"}[second] == "found"


def test_different_patterns_are_unequal() -> None:
    patterns = one_of_each()
    assert len(set(patterns)) == len(patterns)
    for i, a in enumerate(patterns):
        assert [a == b for b in patterns] == [i == j for j in range(len(patterns))]
        assert a != 3
        assert a != "Causal()"


def test_every_argument_is_part_of_the_value() -> None:
    flipped = TABLE.logical_not()
    different = [
        (sr.SlidingWindow(4), sr.SlidingWindow(5)),
        (sr.SlidingWindow(4), sr.SlidingWindow(4, 1)),
        (sr.SlidingWindow(4), sr.SlidingWindow(4, 0, 2)),
        (sr.SlidingWindow(0), sr.SlidingWindow(None)),
        (sr.GlobalTokens(1), sr.GlobalTokens(1, rows=False)),
        (sr.GlobalTokens(1), sr.GlobalTokens(1, columns=False)),
        (sr.Dilated(8, 2), sr.Dilated(8, 2, "block")),
        (sr.Dilated(8, 2), sr.Dilated(8, 2, 0)),
        (sr.Dilated(8, 2), sr.Dilated(8, 4)),
        (sr.LongNet((4, 8), (1, 2)), sr.LongNet((4, 8), (1, 4))),
        (sr.BlockDilated((1,), 16), sr.BlockDilated((1,), 32)),
        (sr.BlockDilated((1,), 16), sr.BlockDilated((2,), 16)),
        (sr.BlockWindow(1, 16), sr.BlockWindow(1, 32)),
        (sr.RandomBlocks(0.5, 16), sr.RandomBlocks(0.5, 16, seed=1)),
        (sr.RandomBlocks(0.5, 16), sr.RandomBlocks(0.5, 16, per_head=False)),
        (sr.RandomBlocks(0.5, 16), sr.RandomBlocks(0.25, 16)),
        (sr.Hierarchical(((16, 64),), 16), sr.Hierarchical(((16, None),), 16)),
        (sr.Documents((3, 4)), sr.Documents((4, 3))),
        (sr.Documents((3, 4)), sr.KeyPadding((3, 4))),
        (sr.Packed((3, 4), sr.Causal()), sr.Packed((3, 4), sr.Full())),
        (sr.KeyPadding((3,)), sr.KeyPadding((3, 3))),
        (sr.Blocks(TABLE, 16), sr.Blocks(flipped, 16)),
        (sr.Blocks(TABLE, 16), sr.Blocks(TABLE, 32)),
        (sr.Dense(TABLE), sr.Dense(flipped)),
        (sr.Blocks(torch.ones(2, 8, dtype=bool), 16), sr.Blocks(torch.ones(4, 4, dtype=bool), 16)),
        (sr.Causal() & sr.Full(), sr.Causal() | sr.Full()),
        (sr.Causal() + sr.Full(), sr.Causal() + sr.Causal()),
    ]
    for a, b in different:
        assert a != b, f"{a!r} == {b!r}"


def test_longnet_is_the_sum_of_its_branches_by_value() -> None:
    for offset in ("head", "block", 1, (0, 1)):
        d1, d2, d3 = (sr.Dilated(w, r, offset) for w, r in ((4, 1), (8, 2), (16, 4)))
        for longnet, total in (
            (sr.LongNet((4, 8), (1, 2), offset), d1 + d2),
            (sr.LongNet((4, 8, 16), (1, 2, 4), offset), d1 + d2 + d3),
        ):
            assert longnet == total
            assert total == longnet
            assert hash(longnet) == hash(total)


def test_longnet_of_one_branch_has_that_branch_s_counts() -> None:
    one = sr.LongNet((4,), (2,)).to_dense(6, num_heads=2)
    assert torch.equal(one.int(), sr.Dilated(4, 2).to_dense(6, num_heads=2).int())


def test_lists_and_tuples_give_the_same_pattern() -> None:
    assert sr.LongNet([4, 8], [1, 2]) == sr.LongNet((4, 8), (1, 2))
    assert sr.Dilated(8, 2, [0, 1]) == sr.Dilated(8, 2, (0, 1))
    assert sr.BlockDilated([1, 2], 16) == sr.BlockDilated((1, 2), 16)
    assert sr.Hierarchical([[16, 32], [64, None]], 16) == sr.Hierarchical(
        ((16, 32), (64, None)), 16
    )
    for constructor in (sr.Documents, sr.KeyPadding):
        assert constructor([3, 4]) == constructor((3, 4))
        assert hash(constructor([3, 4])) == hash(constructor((3, 4)))
    assert sr.Packed([3, 4], sr.Causal()) == sr.Packed((3, 4), sr.Causal())


def test_a_list_changed_afterwards_does_not_change_the_pattern() -> None:
    lengths = [3, 4]
    documents, padding = sr.Documents(lengths), sr.KeyPadding(lengths)
    lengths[0] = 1
    assert documents == sr.Documents((3, 4))
    assert padding == sr.KeyPadding((3, 4))


@pytest.mark.parametrize("index", INDICES, ids=NAMES)
def test_assignment_to_a_pattern_raises(index: int) -> None:
    pattern = one_of_each()[index]
    names = [field.name for field in dataclasses.fields(pattern)]
    for name in [*names, "something_new"]:
        with pytest.raises((AttributeError, TypeError)):
            setattr(pattern, name, 1)
    assert pattern == one_of_each()[index]


@pytest.mark.parametrize("constructor", [lambda t: sr.Blocks(t, 1), sr.Dense])
def test_tables_are_copied(constructor: Any) -> None:
    table = torch.tensor([[True, False], [False, True]])
    pattern, as_built = constructor(table), constructor(table.clone())
    before = hash(pattern)
    table.logical_not_()
    assert pattern.to_dense(2)[0].tolist() == [[True, False], [False, True]]
    assert pattern == as_built
    assert hash(pattern) == before
    assert pattern != constructor(table)


def test_a_dense_matrix_changed_by_its_receiver_does_not_change_the_pattern() -> None:
    for pattern in (sr.Dense(TABLE), sr.Blocks(TABLE, 1), sr.Causal()):
        before = pattern.to_dense(2).clone()
        pattern.to_dense(2).logical_not_()
        assert torch.equal(pattern.to_dense(2), before)


def test_tables_of_any_strides_compare_by_value() -> None:
    table = torch.tensor([[True, True, True], [False, False, True], [False, True, False]])
    transposed = table.t().contiguous().t()
    every_other = torch.zeros(6, 6, dtype=torch.bool)
    every_other[::2, ::2] = table
    for constructor in (sr.Dense, lambda t: sr.Blocks(t, 16)):
        for same in (transposed, every_other[::2, ::2]):
            assert constructor(same) == constructor(table)
            assert hash(constructor(same)) == hash(constructor(table))
        assert constructor(table.t()) != constructor(table)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        (sr.Causal(), ["Causal"]),
        (sr.SlidingWindow(17, 3, 2), ["SlidingWindow", "17", "3", "2"]),
        (sr.Dilated(8, 2, "block"), ["Dilated", "8", "2", "block"]),
        (sr.LongNet((4, 8), (1, 2)), ["4", "8", "1", "2"]),
        (sr.RandomBlocks(0.25, 16, seed=9), ["RandomBlocks", "0.25", "16", "9"]),
        (sr.Documents((31, 47)), ["Documents", "31", "47"]),
        (sr.Packed((31, 47), sr.SlidingWindow(5)), ["Packed", "31", "47", "SlidingWindow", "5"]),
        (sr.Blocks(TABLE, 16), ["Blocks", "16"]),
        (sr.Causal() & sr.SlidingWindow(9), ["Causal", "SlidingWindow", "9"]),
        (sr.Causal() + sr.GlobalTokens(9), ["Causal", "GlobalTokens", "9"]),
    ],
)
def test_repr_tells_the_pattern(pattern: Any, words: list[str]) -> None:
    for word in words:
        assert word in repr(pattern)


def test_repr_tells_the_operator_and_stays_short_for_large_tables() -> None:
    a, b = sr.Causal(), sr.SlidingWindow(9)
    assert len({repr(a & b), repr(a | b), repr(a + b)}) == 3
    assert repr((a & b) | b) != repr(a & (b | b))
    assert len(repr(sr.Blocks(torch.ones(512, 512, dtype=torch.bool), 16))) < 2000


@pytest.mark.parametrize("index", INDICES, ids=NAMES)
def test_patterns_survive_pickling(index: int) -> None:
    pattern = one_of_each()[index]
    again = pickle.loads(pickle.dumps(pattern))
    assert again == pattern
    assert hash(again) == hash(pattern)


# RandomBlocks: the choice is the library's own, its properties are not.


def chosen_blocks(pattern: Any, blocks: int, block_size: int = 2, **arguments: Any) -> Tensor:
    """Bool [H or 1, blocks, blocks] of a square scene of whole blocks."""
    dense = pattern.to_dense(blocks * block_size, **arguments)
    heads = dense.shape[0]
    tiles = dense.view(heads, blocks, block_size, blocks, block_size)
    chosen = tiles[:, :, 0, :, 0]
    whole_tiles = chosen[:, :, None, :, None].expand(heads, blocks, block_size, blocks, block_size)
    assert torch.equal(tiles, whole_tiles)
    return chosen


@pytest.mark.parametrize("blocks", [1, 2, 3, 7, 16])
@pytest.mark.parametrize("density", [0.001, 0.1, 0.25, 0.3, 0.5, 0.9, 1.0])
def test_random_rows_have_the_stated_count_and_the_diagonal(blocks: int, density: float) -> None:
    expected = max(1, int(density * blocks + 0.5))
    pattern = sr.RandomBlocks(density, 2, seed=1)
    chosen = chosen_blocks(pattern, blocks, num_heads=3).expand(3, -1, -1)
    assert chosen.sum(-1).tolist() == [[expected] * blocks] * 3
    assert chosen.diagonal(dim1=1, dim2=2).all()


def test_random_count_rounds_halves_up() -> None:
    for density, blocks, expected in ((0.5, 5, 3), (0.25, 6, 2), (0.25, 2, 1), (0.125, 12, 2)):
        chosen = chosen_blocks(sr.RandomBlocks(density, 2), blocks)
        assert set(chosen.sum(-1).flatten().tolist()) == {expected}


def test_random_count_includes_a_ragged_last_block() -> None:
    # 9 tokens in blocks of 2: 5 blocks, 0.6 of them are 3
    dense = sr.RandomBlocks(0.6, 2).to_dense(9)[0]
    assert dense[:, ::2].sum(-1).tolist() == [3] * 9
    assert dense[8, 8]


def test_random_choice_does_not_depend_on_which_queries_are_asked() -> None:
    pattern = sr.RandomBlocks(0.3, 4, seed=5)
    whole = pattern.to_dense(40, num_heads=2)
    assert torch.equal(pattern.to_dense(7, 40, num_heads=2), whole[:, 33:])
    assert torch.equal(pattern.to_dense(13, 40, num_heads=2, q_start=6), whole[:, 6:19])


def test_random_rows_past_the_last_key_keep_the_stated_count() -> None:
    dense = sr.RandomBlocks(0.5, 2).to_dense(4, 8, q_start=20)[0]
    assert dense[:, ::2].sum(-1).tolist() == [2] * 4


def test_random_rows_of_negative_positions_are_empty() -> None:
    dense = sr.RandomBlocks(0.5, 2).to_dense(8, 5)[0]  # positions -3 .. 4
    assert not dense[:3].any()
    assert dense[3:].any(dim=1).all()


def test_random_choice_goes_by_block_not_by_token() -> None:
    small = chosen_blocks(sr.RandomBlocks(0.3, 1, seed=2), 12, block_size=1, num_heads=2)
    large = chosen_blocks(sr.RandomBlocks(0.3, 5, seed=2), 12, block_size=5, num_heads=2)
    assert torch.equal(small, large)


def test_random_choice_is_per_kv_head() -> None:
    pattern = sr.RandomBlocks(0.3, 2, seed=1)
    two = chosen_blocks(pattern, 16, num_heads=2)
    grouped = chosen_blocks(pattern, 16, num_heads=6, num_kv_heads=2)
    assert not torch.equal(two[0], two[1])
    assert torch.equal(grouped, two.repeat_interleave(3, dim=0))
    assert torch.equal(chosen_blocks(pattern, 16)[0], two[0])


def test_random_choice_shared_by_heads() -> None:
    pattern = sr.RandomBlocks(0.3, 2, seed=1, per_head=False)
    chosen = chosen_blocks(pattern, 16, num_heads=3).expand(3, -1, -1)
    assert torch.equal(chosen[0], chosen[1])
    assert torch.equal(chosen[0], chosen[2])
    assert torch.equal(chosen[0], chosen_blocks(pattern, 16)[0])


def test_random_choice_differs_between_seeds_and_between_rows() -> None:
    by_seed = [chosen_blocks(sr.RandomBlocks(0.3, 2, seed=seed), 16)[0] for seed in range(20)]
    assert len({tuple(chosen.flatten().tolist()) for chosen in by_seed}) == 20
    shifted = {
        tuple(by_seed[0][row].roll(-row).tolist()) for row in range(16)
    }  # relative to the diagonal
    assert len(shifted) > 12


def test_random_choice_is_independent_between_neighbours() -> None:
    # Seeds, heads and rows must not be mixed by a sum: (seed 1, head 0) is not (seed 0, head 1).
    first, second = (
        chosen_blocks(sr.RandomBlocks(0.3, 1, seed=seed), 24, block_size=1, num_heads=2)
        for seed in (0, 1)
    )
    assert not torch.equal(first[1], second[0])
    off_diagonal = ~torch.eye(24, dtype=torch.bool)
    for a, b in ((first[0], first[1]), (first[0], second[0]), (first[1], second[0])):
        shared = (a & b & off_diagonal).sum().item()
        # 24 rows of 6 out of 23: 24 * 6 * 6 / 23 = 38 shared by chance, standard deviation 5
        assert 15 <= shared <= 61


def furthest_in_deviations(hits: Tensor, trials: int, probability: float) -> float:
    """Largest distance of any of the counts from its mean, in standard deviations."""
    deviation = (trials * probability * (1 - probability)) ** 0.5
    return ((hits - trials * probability).abs().max() / deviation).item()


def test_random_choice_is_uniform_over_seeds_and_over_heads() -> None:
    blocks = 12  # 4 a row: the diagonal, and 3 of the 11 others, each with probability 3 / 11
    off_diagonal = ~torch.eye(blocks, dtype=torch.bool)
    by_seed = torch.cat(
        [
            chosen_blocks(sr.RandomBlocks(0.34, 1, seed=seed), blocks, block_size=1)
            for seed in range(400)
        ]
    )
    many_heads = sr.RandomBlocks(0.34, 1, seed=1)
    by_head = chosen_blocks(many_heads, blocks, block_size=1, num_heads=400)
    for chosen in (by_seed, by_head):
        hits = chosen.sum(0)
        assert hits.diagonal().tolist() == [400] * blocks
        assert furthest_in_deviations(hits[off_diagonal], 400, 3 / 11) < 5


def test_random_choice_favours_no_key_block() -> None:
    blocks, heads = 96, 8
    chosen = chosen_blocks(sr.RandomBlocks(0.1, 1), blocks, block_size=1, num_heads=heads)
    hits = chosen.sum((0, 1)) - heads  # of a key block, over heads and query blocks
    assert furthest_in_deviations(hits, heads * (blocks - 1), 9 / 95) < 5


def test_random_choice_does_not_depend_on_the_process_or_the_global_seed() -> None:
    torch.manual_seed(1)
    first = sr.RandomBlocks(0.3, 2, seed=4).to_dense(32, num_heads=2)
    torch.manual_seed(2)
    assert torch.equal(sr.RandomBlocks(0.3, 2, seed=4).to_dense(32, num_heads=2), first)
    program = (
        "import sparsering as sr\n"
        "dense = sr.RandomBlocks(0.3, 2, seed=4).to_dense(32, num_heads=2)\n"
        "print(''.join(map(str, dense.flatten().int().tolist())))\n"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        cwd=Path(sr.__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "".join(map(str, first.flatten().int().tolist()))


# Errors: each says what was expected, in the caller's words, and what came.


def raised(error: type[Exception] | tuple[type[Exception], ...], call: Any) -> str:
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: sr.SlidingWindow(-3), ["left", "-3"]),
        (lambda: sr.SlidingWindow(1, -2), ["right", "-2"]),
        (lambda: sr.SlidingWindow(1, 1, 0), ["dilation", "0"]),
        (lambda: sr.SlidingWindow(1, 1, -2), ["dilation", "-2"]),
        (lambda: sr.GlobalTokens(-1), ["count", "-1"]),
        (lambda: sr.Dilated(0, 1), ["segment", "0"]),
        (lambda: sr.Dilated(-4, 1), ["segment", "-4"]),
        (lambda: sr.Dilated(4, 0), ["rate", "0"]),
        (lambda: sr.Dilated(4, -2), ["rate", "-2"]),
        (lambda: sr.Dilated(4, 2, "heads"), ["offset", "heads", "head", "block"]),
        (lambda: sr.LongNet((4, 8), (1, 0)), ["rate", "0"]),
        (lambda: sr.LongNet((4, 0), (1, 2)), ["segment", "0"]),
        (lambda: sr.LongNet((4, 8), (1,)), ["segment_lengths", "dilation_rates", "2", "1"]),
        (lambda: sr.BlockDilated((1, 0), 16), ["rate", "0"]),
        (lambda: sr.BlockDilated((-1,), 16), ["rate", "-1"]),
        (lambda: sr.BlockDilated((1,), 0), ["block_size", "0"]),
        (lambda: sr.BlockWindow(-1, 16), ["radius", "-1"]),
        (lambda: sr.BlockWindow(1, 0), ["block_size", "0"]),
        (lambda: sr.BlockWindow(1, -16), ["block_size", "-16"]),
        (lambda: sr.RandomBlocks(0.0, 16), ["density", "0"]),
        (lambda: sr.RandomBlocks(-0.25, 16), ["density", "-0.25"]),
        (lambda: sr.RandomBlocks(1.5, 16), ["density", "1.5"]),
        (lambda: sr.RandomBlocks(float("nan"), 16), ["density", "nan"]),
        (lambda: sr.RandomBlocks(0.5, 0), ["block_size", "0"]),
        (lambda: sr.Hierarchical(((-16, 32),), 16), ["-16"]),
        (lambda: sr.Hierarchical(((16, -32),), 16), ["-32"]),
        (lambda: sr.Hierarchical(((16, 32),), 0), ["block_size", "0"]),
        (lambda: sr.Documents((3, -1)), ["length", "-1"]),
        (lambda: sr.Packed((3, -1), sr.Causal()), ["length", "-1"]),
        (lambda: sr.KeyPadding((2, -5)), ["length", "-5"]),
        (lambda: sr.Blocks(torch.ones(4, dtype=torch.bool), 16), ["Blocks", "4"]),
        (
            lambda: sr.Blocks(torch.ones(1, 1, 1, 2, 2, dtype=torch.bool), 16),
            ["Blocks", "1, 1, 1, 2, 2"],
        ),
        (lambda: sr.Blocks(TABLE, 0), ["block_size", "0"]),
        (lambda: sr.Dense(torch.ones(4, dtype=torch.bool)), ["Dense", "4"]),
        (lambda: sr.Dense(torch.ones(1, 1, 2, 2, 2, dtype=torch.bool)), ["Dense"]),
    ],
)
def test_value_error_at_construction_names_the_argument_and_the_value(
    call: Any, words: list[str]
) -> None:
    message = raised(ValueError, call)
    for word in words:
        assert word in message, f"{word!r} is not in {message!r}"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: sr.SlidingWindow("4"), ["left"]),
        (lambda: sr.SlidingWindow(1.5), ["left"]),
        (lambda: sr.SlidingWindow(1, dilation=None), ["dilation"]),
        (lambda: sr.GlobalTokens(None), ["count"]),
        (lambda: sr.Dilated("8", 2), ["segment"]),
        (lambda: sr.Dilated(8, 2.5), ["rate"]),
        (lambda: sr.Dilated(8, 2, offset=1.5), ["offset"]),
        (lambda: sr.LongNet(8, 2), ["segment_lengths"]),
        (lambda: sr.BlockDilated(3, 16), ["rates"]),
        (lambda: sr.BlockWindow(1, "16"), ["block_size"]),
        (lambda: sr.RandomBlocks("half", 16), ["density"]),
        (lambda: sr.Documents(7), ["lengths"]),
        (lambda: sr.Documents((3, 1.5)), ["length"]),
        (lambda: sr.Packed((7,), "causal"), ["pattern"]),
        (lambda: sr.Packed((7,), sr.Causal), ["pattern"]),
        (lambda: sr.KeyPadding(7), ["lengths"]),
        (lambda: sr.Blocks(torch.ones(2, 2), 16), ["Blocks", "bool", "float32"]),
        (lambda: sr.Blocks("table", 16), ["Blocks", "str"]),
        (lambda: sr.Dense(torch.ones(2, 2, dtype=torch.int64)), ["Dense", "bool", "int64"]),
    ],
)
def test_type_error_at_construction_names_the_argument(call: Any, words: list[str]) -> None:
    message = raised(TypeError, call)
    for word in words:
        assert word in message, f"{word!r} is not in {message!r}"


USES = [
    pytest.param(lambda pattern, *a, **k: pattern.to_dense(*a, **k), id="to_dense"),
    pytest.param(lambda pattern, *a, **k: pattern.layout(*a, block_size=16, **k), id="layout"),
]


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(
    ("pattern", "q_len", "arguments", "words"),
    [
        (sr.Documents((31, 16)), 40, {}, ["47", "40"]),
        (sr.Documents((31, 16)), 47, {"kv_len": 48}, ["47", "48"]),
        (sr.Packed((31, 16), sr.Causal()), 40, {}, ["47", "40"]),
        (sr.Packed((31, 16), sr.Causal() + sr.Full()), 48, {}, ["47", "48"]),
        (sr.Packed((20, 20), sr.Documents((20, 3))), 40, {}, ["23", "20"]),
        (sr.Causal() & sr.Documents((31, 16)), 40, {}, ["47", "40"]),
        (sr.Causal() + sr.Documents((31, 16)), 40, {}, ["47", "40"]),
        (sr.Dilated(8, 4, (0, 1, 2)), 8, {"num_heads": 2}, ["offset", "3", "2"]),
        (sr.Dilated(8, 4, (0, 1)), 8, {"num_heads": 4}, ["offset", "2", "4"]),
        (
            sr.Dilated(8, 4, (0, 1, 2, 3)),
            8,
            {"num_heads": 4, "num_kv_heads": 2},
            ["offset", "4", "2"],
        ),
        (sr.Blocks(torch.ones(2, 3, dtype=torch.bool), 16), 48, {}, ["Blocks", "2", "3"]),
        (sr.Blocks(torch.ones(3, 2, dtype=torch.bool), 16), 48, {}, ["Blocks", "2", "3"]),
        (
            sr.Blocks(torch.ones(2, 3, dtype=torch.bool), 16),
            1,
            {"kv_len": 48},
            ["Blocks", "2", "3"],
        ),
        (
            sr.Blocks(torch.ones(2, 2, dtype=torch.bool), 16),
            8,
            {"kv_len": 32, "q_start": 25},
            ["Blocks", "2", "3"],
        ),
        (
            sr.Blocks(torch.ones(3, 2, 2, dtype=torch.bool), 16),
            32,
            {"num_heads": 4, "num_kv_heads": 2},
            ["3", "4", "2"],
        ),
        (sr.Dense(TABLE), 3, {}, ["Dense", "2", "3"]),
        (sr.Dense(TABLE), 2, {"kv_len": 3}, ["Dense", "2", "3"]),
        (sr.Dense(torch.ones(3, 2, 2, dtype=torch.bool)), 2, {"num_heads": 2}, ["Dense", "3", "2"]),
        (sr.KeyPadding((1, 2)) & sr.KeyPadding((1, 2, 3)), 4, {}, ["2", "3"]),
        (
            sr.KeyPadding((1, 2)) | sr.Blocks(torch.ones(3, 1, 1, 1, dtype=torch.bool), 16),
            4,
            {},
            ["2", "3"],
        ),
        (sr.Causal(), 8, {"num_heads": 6, "num_kv_heads": 4}, ["6", "4"]),
        (sr.Causal(), -1, {}, ["-1"]),
        (sr.Causal(), 8, {"kv_len": -8}, ["-8"]),
    ],
)
def test_value_error_at_use_tells_expected_and_got(
    use: Any, pattern: Any, q_len: int, arguments: dict[str, Any], words: list[str]
) -> None:
    message = raised(ValueError, lambda: use(pattern, q_len, **arguments))
    for word in words:
        assert word in message, f"{word!r} is not in {message!r}"


@pytest.mark.parametrize("index", INDICES, ids=NAMES)
def test_truth_of_a_pattern_raises(index: int) -> None:
    pattern = one_of_each()[index]
    message = raised(TypeError, lambda: bool(pattern))
    assert "&" in message
    raised(TypeError, lambda: pattern and sr.Causal())
    raised(TypeError, lambda: pattern or sr.Causal())
    raised(TypeError, lambda: not pattern)


MIXTURES = [
    sr.Causal() + sr.Full(),
    sr.LongNet((4, 8), (1, 2)),
    (sr.Causal() + sr.Full()) & sr.Causal(),
    sr.Causal() & (sr.Causal() + sr.Full()),
    sr.Packed((3, 4), sr.LongNet((4, 8), (1, 2))),
]


@pytest.mark.parametrize("mixture", MIXTURES, ids=repr)
def test_operators_that_a_mixture_has_not_raise(mixture: Any) -> None:
    mask, other = sr.Causal(), sr.Full() + sr.SlidingWindow(3)
    raised(TypeError, lambda: mixture | mask)
    raised(TypeError, lambda: mask | mixture)
    raised(TypeError, lambda: mixture | mixture)
    raised(TypeError, lambda: mixture & mixture)
    raised(TypeError, lambda: mixture & other)
    raised(TypeError, lambda: other & mixture)


@pytest.mark.parametrize("pattern", [sr.Causal(), MIXTURES[0]], ids=repr)
@pytest.mark.parametrize("other", [3, True, None, "mask", torch.ones(2, 2, dtype=torch.bool)])
def test_operators_with_something_else_raise(pattern: Any, other: Any) -> None:
    for op in (operator.and_, operator.or_, operator.add):
        raised(TypeError, lambda op=op: op(pattern, other))
        raised(TypeError, lambda op=op: op(other, pattern))
