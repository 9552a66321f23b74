"""What the prior library's documents said (dilated-attention-pytorch, 2025), table by table.

All of it on a GTX 1080 of 8 GB, float16, forward, not causal; "memory" is the peak less the inputs.
Figures are as printed there; shapes were recovered from its scripts.
"""

from typing import NamedTuple


class Prior(NamedTuple):
    """What one table said.

    Attributes:
        said: (what, figures) of each claim.
        why: why ours differ.
        beside: the claim that stands beside a row of ours, by the start of the row's call, and its
            tokens where the claim is of one length.
    """

    said: tuple[tuple[str, str], ...]
    why: str
    beside: dict[tuple[str, int | None], str]


PLACE = "GTX 1080, 8 GB, float16, forward"


def beside(table: str, call: str, tokens: int | None) -> str:
    """The prior figure for a row of ours, "" where there is none."""
    if call.endswith((", with gradients", ", bfloat16")) and table != "chosen":
        return ""  # the prior rows are of a forward pass, told once
    claims = PRIOR[table].beside if table in PRIOR else {}
    for (start, length), figure in claims.items():
        if call.startswith(start) and length in (None, tokens):
            return figure
    return ""


def _by_length(calls: dict[str, tuple[str, ...]]) -> dict[tuple[str, int | None], str]:
    """Figures at 4,096 tokens and each doubling, by call."""
    return {
        (call, 4096 << place): figure
        for call, figures in calls.items()
        for place, figure in enumerate(figures)
    }


PRIOR: dict[str, Prior] = {
    "comparison": Prior(
        (
            ("baseline (ImprovedDilatedAttention)", "29.72 ms, 28.27 MB"),
            ("original block-sparse ring", "68.36 ms, 28.44 MB"),
            ('"optimized"', "28.23 ms, 148.13 MB"),
            ("torch.sparse", "540.95 ms, 29.22 MB"),
        ),
        "Its three sparse calls summed the outputs of a separate softmax for each block, and the "
        "softmax of its baseline ran over heads, so none of them computed attention; its 90% was "
        "a window of 256 in blocks of 64, whose density is 7.7%, which the first rows here "
        "compute exactly.",
        {
            ("LongNet, ours", None): "29.72 ms, 28.27 MB (baseline)",
            ("window of 256, ours (cpu)", None): '28.23 ms, 148.13 MB ("optimized")',
            ("window of 256, torch_sparse", None): "540.95 ms, 29.22 MB",
        },
    ),
    "lengths": Prior(
        (
            ("4,096 tokens, original -> optimized", "121.91 -> 39.82 ms"),
            ("8,192", "148.05 -> 47.35 ms"),
            ("16,384", "263.06 -> 90.79 ms"),
            ("32,768", "513.46 -> 197.16 ms"),
            ("65,536", "1003.10 -> 373.41 ms"),
            ("memory, original -> optimized", "+10x to +30x"),
            ("dense, 4K, 8K, 16K, 32K, 65K", "102, 41, 100, 182, 1598 ms"),
            ("90%", "63, 58, 104, 1717, 1810 ms"),
            ("95%", "411, 834, 938, 197, 2013 ms"),
            ("99%", "104, 52, 99, 2021, 432 ms"),
            ("hierarchical", "71, 156, 3685 ms, OOM"),
        ),
        "It timed one cold call at each length, of the same wrong operation; and its dense, 90, "
        "95 and 99% rows are one computation, since the ratio never reached the pattern.",
        {
            **_by_length(
                {
                    "window in blocks": (
                        "39.82 ms",
                        "47.35 ms",
                        "90.79 ms",
                        "197.16 ms",
                        "373.41 ms",
                    ),
                    "dense SDPA": ("102 ms", "41 ms", "100 ms", "182 ms", "1598 ms"),
                    "90% sparse": ("63 ms", "58 ms", "104 ms", "1717 ms", "1810 ms"),
                    "95% sparse": ("411 ms", "834 ms", "938 ms", "197 ms", "2013 ms"),
                    "99% sparse": ("104 ms", "52 ms", "99 ms", "2021 ms", "432 ms"),
                    "hierarchical": ("71 ms", "156 ms", "3685 ms", "OOM"),
                }
            ),
        },
    ),
    "memory": Prior(
        (
            ("peak at 16K: dense", "0.539 GB"),
            ("peak at 16K: 90, 95, 99% sparse", "0.531 GB each"),
            ("peak at 16K: hierarchical", "2.208 GB"),
            ("95% sparse, 4K, 8K, 16K, 32K", "0.133, 0.266, 0.531, 1.063 GB"),
        ),
        "All of its rows but the hierarchical one are one computation again, which gathered keys "
        "and values five times over; that memory grows with the length alone, not with its "
        "square, holds here too.",
        {
            **_by_length({"95% sparse": ("0.133 GB", "0.266 GB", "0.531 GB", "1.063 GB")}),
            ("dense SDPA", 16384): "0.539 GB",
            ("90% sparse", 16384): "0.531 GB",
            ("99% sparse", 16384): "0.531 GB",
            ("hierarchical", 16384): "2.208 GB",
        },
    ),
    "launches": Prior(
        (
            ("kernel launches a call, before -> after batching blocks", "308 -> about 10"),
            ("synchronisation", "60-70 ms of CPU against 6 ms of CUDA time"),
        ),
        "Each of its 154 blocks was two launches, then a batch of them; here a call is one "
        "operator whose kernel walks all blocks.",
        {("window of 256, cpu", None): "about 10"},
    ),
    "layouts": Prior(
        (
            ("pattern generation, first call", "48.74 ms, 60% of the call"),
            ("cache hit rate after warm-up", "97%"),
        ),
        "It built index lists block by block in Python; here a layout is compiled by arithmetic "
        "on the pattern and kept by value, so that the same pattern is never built twice.",
        {
            ("window in blocks, 4,096", None): "48.74 ms, 60% of the call",
            ("200 calls", None): "97%",
        },
    ),
    "sparsity": Prior(
        (
            ("10% density, before -> after", "1842.60 -> 8.39 ms"),
            ("25%", "4313.09 -> 36.67 ms"),
            ("50%", "7518.30 -> 54.83 ms"),
            ("claimed", "219x, 118x, 137x"),
        ),
        "Its real densities were 19.3, 44.9 and 75.8% (the last three rows have those windows), "
        "a softmax for each block, summed; before, each block was a Python loop's step.",
        {
            ("10% of random", None): "8.39 ms",
            ("25% of random", None): "36.67 ms",
            ("50% of random", None): "54.83 ms",
            ("window of 19.3%", None): "8.39 ms, told as 10%",
            ("window of 44.9%", None): "36.67 ms, told as 25%",
            ("window of 75.8%", None): "54.83 ms, told as 50%",
        },
    ),
    "rings": Prior(
        (
            ("RingV2, 131K tokens, 16 ring steps", "8065 ms, 925 MB"),
            ("Production, 131K tokens", '6.95 ms, 144 MB ("1161x")'),
            ("Production, 262K tokens", "288 MB"),
            ("DataParallel, 1 -> 2 GPUs: 4K", "110 -> 507 ms"),
            ("DataParallel, 8K", "71 -> 481 ms"),
            ("DataParallel, 16K", "1382 -> 625 ms"),
            (
                "most tokens by cluster, 99% sparse, estimated there",
                "2 x GTX 1080 130K; 4 x V100 1.6M; 8 x A100 8M+",
            ),
        ),
        "Production skipped each group whose segment exceeds its chunk, so it timed a function "
        "that returned zeros; RingV2 was dense inside chunks that never saw each other; both ran "
        "in one process, DataParallel split the batch and no sequence, and the cluster figures "
        "have no arithmetic behind them.",
        {
            ("1 rank", None): "6.95 ms, 144 MB (zeros)",
            ("4 ranks", None): "8065 ms, 925 MB (16 steps)",
        },
    ),
    "longest": Prior(
        (
            ("most tokens in 8 GB: dense", "65,536"),
            ("90, 95, 99% sparse", "65,536 each"),
            ("hierarchical", "16,384"),
            ("adaptive", "failed (dtype)"),
            ("GTX 1080, estimated there", "65K dense, 65K at 99%"),
            ("V100 32 GB, estimated there", "130K dense, 400K at 99%"),
            ("A100 80 GB, estimated there", "200K dense, 1M+ at 99%"),
            ("H100 80 GB, estimated there", "200K dense, 1M+ at 99%"),
        ),
        "All of its sparsities were one computation, limited by gathering keys and values five "
        "times over; its figures for other GPUs are constants.",
        {
            ("dense SDPA", None): "65,536 in 8 GB",
            ("99% sparse", None): "65,536 in 8 GB",
            ("window in blocks", None): "65,536 in 8 GB (as 90%)",
            ("V100", None): "130K dense, 400K at 99%",
            ("A100", None): "200K dense, 1M+ at 99%",
            ("H100", None): "200K dense, 1M+ at 99%",
        },
    ),
    "chosen": Prior(
        (
            ("hierarchical, 4K, 8K, 16K, 32K", "71, 156, 3685 ms, OOM"),
            ("hierarchical, peak at 16K", "2.208 GB"),
            ("adaptive (blocks by content)", "failed (dtype)"),
            ("parameters of its scorer that got a gradient", "0 of 17"),
        ),
        "Its presets of the hierarchy came to 100% density in part, and its scorer chose by hard "
        "indices, through which nothing flows; ours is trained by the exact mass of the blocks.",
        {
            ("hierarchical", 4096): "71 ms",
            ("hierarchical", 16384): "3685 ms, 2.208 GB",
            ("chosen by a scorer", None): "failed (dtype); 0 of 17 learn",
        },
    ),
}

ADVICE = (
    "dense below 8K; 90-95% at 8K-64K; 99% above 64K; hierarchical where structure helps; ring "
    "above 100K"
)

WISHES: tuple[tuple[str, str], ...] = (
    ("automatic sparsity by length", "Left to the user: no pattern changes by itself. What one "
     "costs is told before it runs: sr.estimate, sparsering plan."),
    ("dynamic sparsity in training, sparsity scheduler",
     "selection.Schedule, and GatedSchedule, which waits until the model has learned: blocks that "
     "fall by the clock alone were measured to leave it at chance."),
    ("adaptive fixed", "nn.SelectedAttention.adaptive and BlockScorer, trained by selection_loss; "
     "the table of chosen blocks says how many parameters learn."),
    ("larger GPUs", "Not measured: no GPU has run this library yet."),
    ("FA3, FA3 path", "FlashAttention 3 takes no blocks. A backend for FlashAttention 4, which "
     "does, is there, not run yet."),
    ("custom kernels, fused kernel", "C++ for CPUs and Triton for GPUs, forward and backward, one "
     "softmax over all visited blocks."),
    ("distributed tests", "Real processes in the tests, and results equal to one process."),
    ("fragmentation-aware buffer pool", "Not built: torch's allocator has one; the kernels need "
     "little beside their results."),
    ("lazy weight buffers", "Weights exist only where attention_weights asks for them, as blocks."),
    ("block-size tuner", "sparsering tune measures block sizes; a call takes what was measured."),
    ("cache-aware order", "On the CPU short query tiles are walked by key tile, which was measured "
     "against tiles of their union."),
    ("adaptive compression", 'ring_attention(compression="auto"): off unless asked for, with the '
     "error that it made told."),
    ("asynchronous pattern sync", "Not needed: each rank derives the same plan from the pattern, "
     "and ranks agree on it before anything moves."),
    ("versioned pattern cache", "Not needed: layouts are kept by value, and a changed pattern is "
     "another value."),
    ("hardware-aware patterns", "Patterns say which pairs attend; tiles are the kernel's matter."),
    ("importance tracker", "block_mass and key_mass, exact; PatternRefiner swaps blocks by them."),
    ("mixed precision", "bfloat16 and float16 inputs, sums in float32, errors beside each figure."),
    ("coarse-to-fine hierarchy", "Hierarchical, and nn.SelectedAttention.hierarchical over pooled "
     "keys."),
    ("NUMA placement", "Left to torchrun, which binds its processes."),
    ("adaptive batch size",
     "sr.choose_batch_size: the largest that fits in a memory, by arithmetic."),
)  # fmt: skip
"""What it wished for or sketched, and what became of it."""
