"""Selection of key blocks by content: scores, choices, pooled keys, and reports on a choice.

    scores = block_scores(query, key, 64)
    chosen = select_blocks(scores, 16, block_size=64)
    out = attention(query, key, value, SelectedBlocks(chosen, 64, query_block=1) & Causal())

Scores and chosen blocks stay on the keys' device; these three calls do not wait for a GPU.
"""

from .choose import select_blocks
from .documents import DocumentBlocks
from .indexer import index_scores, top_tokens
from .loss import selection_loss
from .mass import block_mass
from .pool import pool_blocks
from .refiner import PatternRefiner
from .report import SelectionReport, selection_report
from .schedule import GatedSchedule, Schedule
from .scorer import BlockScorer
from .scores import block_scores
from .summaries import BlockSummaries

__all__ = [
    "BlockScorer", "BlockSummaries", "DocumentBlocks", "GatedSchedule", "PatternRefiner",
    "Schedule", "SelectionReport", "block_mass", "block_scores", "index_scores", "pool_blocks",
    "select_blocks", "selection_loss", "selection_report", "top_tokens",
]  # fmt: skip
