"""Patterns against matrices drawn by hand, and against an oracle in plain Python."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from oracles.every_pattern import expanded
from oracles.patterns_oracle import Spec, build, counts, is_batched, is_mixture, matrix
from oracles.strategies import Scene, cases
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
        "batch entries with documents of their own", ("Documents", ((2, 1), (0, 3))), 3, """
        1 1 .
        1 1 .
        . . 1
        ---
        1 1 1
        1 1 1
        1 1 1
        """
    ),
    drawing(
        "batch entries packed on their own, positions from each document's start",
        ("Packed", ((2, 2), (1, 3)), ("Dilated", 2, 2, 1)), 4, """
        . . . .
        . 1 . .
        . . . .
        . . . 1
        ---
        . . . .
        . . . .
        . . 1 .
        . . . .
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
        "a key mask holds where it is True, for every query",
        ("KeyMask", (True, False, True)), 2, kv_len=3, picture="""
        1 . 1
        1 . 1
        """
    ),
    drawing(
        "a key mask of each batch entry joins a mask",
        ("&", ("Causal",), ("KeyMask", ((False, True, True), (True, False, False)))), 3, """
        . . .
        . 1 .
        . 1 1
        ---
        1 . .
        1 . .
        1 . .
        """
    ),
    drawing(
        "a key mask in documents says of each document's keys",
        ("Packed", (2, 2), ("&", ("Causal",), ("KeyMask", (False, True)))), 4, """
        . . . .
        . 1 . .
        . . . .
        . . . 1
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
    assert sr.KeyMask(valid=active) == sr.KeyMask(active)
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
