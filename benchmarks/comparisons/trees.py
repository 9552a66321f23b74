"""Trees: layouts of 1,000 nodes, and a training step of a group of answers to one prompt.

The step is that of a small Qwen 3 with random weights: forward and backward of the summed loss of
all answers, as one packed tree with our attention, and as padded rows under "sdpa". Both compute
the logits of the answers alone. The packed step includes `pack_tree` and a new layout each time.
FlexAttention has no backward on a CPU, so its row is a forward pass, beside those of the others.
Its mask of the tree is built once and has a row of its own.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsering.layouts.cache import layout_cache
from sparsering.patterns.packed_tree import PackedTree, pack_tree
from sparsering.patterns.positions import Causal, SlidingWindow
from sparsering.patterns.tree import Tree

from ..measure import Row, distance_of, interleaved_times, peak_extra_bytes, spread_of
from ..new_layouts import lengths_of

NODES, WINDOW = 1000, 512
PROMPT, ANSWER, ANSWERS = 4096, 512, 8
VOCABULARY = 1024
PACKED, PADDED, FLEX = "packed as a tree", "padded rows, sdpa", "tree, FlexAttention"


def of_trees(quick: bool) -> list[Row]:
    """Measures layouts of trees, and the training step; `quick` takes few tokens."""
    rows = tree_layouts(1 << (14 if quick else 20), 3 if quick else 7)
    rows += tree_layouts(1 << 14, 3 if quick else 7) + flex_masks(1 << (11 if quick else 14))
    sizes, rounds = ((128, 16, 4), 2) if quick else ((PROMPT, ANSWER, ANSWERS), 5)
    return rows + steps("forward", sizes, rounds) + steps("step", sizes, rounds)


def parents_of(kind: str, nodes: int, seed: int) -> tuple[int, ...]:
    """Draws the parents of a kind of tree; depth first unless the kind says otherwise."""
    generator = torch.Generator().manual_seed(seed)
    shape, _, order = kind.partition(", ")
    drawn = {
        "flat": lambda i: 0,
        "chain": lambda i: i - 1,
        "binary": lambda i: (i - 1) // 2,
        "random": lambda i: int(torch.randint(i, (1,), generator=generator)),
    }[shape]
    parents = (-1, *(drawn(i) for i in range(1, nodes)))
    return parents if order else depth_first(parents)


def depth_first(parents: tuple[int, ...]) -> tuple[int, ...]:
    """Lists the nodes of a tree depth first, as `pack_tree` does."""
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents[1:], 1):
        children[parent].append(node)
    pending, ordered = [(0, -1)], list[int]()
    while pending:
        node, parent = pending.pop()
        pending += [(child, len(ordered)) for child in reversed(children[node])]
        ordered.append(parent)
    return tuple(ordered)


KINDS = ("flat", "chain", "binary", "random", "binary, breadth first", "random, as drawn")


def tree_layouts(tokens: int, rounds: int) -> list[Row]:
    """Times layouts that no cache has, each of other lengths: causal, and with a window."""
    from sparsering.kernels.cpu.build import library

    library()
    inner = {"causal": Causal(), f"window of {WINDOW}": SlidingWindow(WINDOW - 1, 0)}
    rows: list[Row] = []
    for along, pattern in inner.items():
        for kind in KINDS:
            times = []
            for seed in range(rounds + 1):
                lengths = lengths_of(tokens, NODES, seed)
                tree = Tree(lengths, parents_of(kind, NODES, seed), pattern)
                layout_cache.clear()
                begin = time.perf_counter()
                layout = tree.layout(tokens)
                times.append(1e3 * (time.perf_counter() - begin))
            rows.append({
                "case": "layout", "tree": kind, "along": along, "tokens": tokens, "nodes": NODES,
                **spread_of(times[1:]), "tiles": layout.num_blocks,
                "block_size": layout.block_size, "pairs": layout.num_pairs,
            })  # fmt: skip
    return rows


def flex_masks(tokens: int) -> list[Row]:
    """Times FlexAttention's `create_block_mask` of the same trees, plain and compiled."""
    from torch.nn.attention.flex_attention import create_block_mask

    makers: dict[str, Callable[..., Any]] = {
        "create_block_mask": create_block_mask,
        "create_block_mask, compiled": torch.compile(create_block_mask),
    }
    rows: list[Row] = []
    for name, make in makers.items():
        for kind in ("flat", "random"):
            times = []
            for seed in range(4):
                tree = Tree(lengths_of(tokens, NODES, seed), parents_of(kind, NODES, seed))
                visible = tree_mask(tree)
                begin = time.perf_counter()
                make(visible, None, None, tokens, tokens, device="cpu")
                times.append(1e3 * (time.perf_counter() - begin))
            rows.append({
                "case": name, "tree": kind, "along": "causal", "tokens": tokens, "nodes": NODES,
                **spread_of(times[1:]),
            })  # fmt: skip
    return rows


def tree_mask(tree: Tree) -> Callable[..., Tensor]:
    """Builds FlexAttention's mask of a causal tree, from a number and an end for each token."""
    nodes = tree.nodes
    node = nodes.of_token(torch.arange(int(nodes.start[-1])))
    enter, leave = nodes.enter[node], nodes.leave[node]

    def visible(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (enter[k] <= enter[q]) & (enter[q] < leave[k])

    return visible


def steps(case: str, sizes: tuple[int, int, int], rounds: int) -> list[Row]:
    """Times a forward pass or a training step of each way to compute the group, in turns."""
    model, sequences = qwen(sizes), answers(sizes)
    prompt, answer, count = sizes
    exact = exact_scores(model, sequences, sizes)
    calls: dict[str, Callable[..., Tensor]] = {PACKED: packed_loss, PADDED: padded_loss}
    if case == "forward":
        mask = flex_mask_of(sequences)
        calls[FLEX] = partial(packed_loss, block_mask=mask)
    results: dict[str, list[Tensor]] = {}

    def call(name: str) -> Callable[[], object]:
        def run() -> None:
            results[name] = run_once(case, calls[name], model, sequences, prompt)

        return run

    times = interleaved_times({name: call(name) for name in calls}, rounds)
    rows: list[Row] = []
    for name in calls:
        scores, *gradients = results[name]
        row: Row = {
            "case": case, "way": name, "prompt": prompt, "answer": answer, "answers": count,
            **spread_of(times[name]), "loss": -float(scores.double().sum()),
            "error": distance_of([scores], exact[:1]),
        }  # fmt: skip
        if gradients:
            row["gradient_error"] = distance_of(gradients, exact[1:])
        if name != FLEX:
            row["peak_bytes"] = peak_extra_bytes(once, case, name, sizes)
        rows.append(row)
    return rows


def run_once(
    case: str, loss_of: Callable[..., Tensor], model: Any, sequences: list[Tensor], prompt: int
) -> list[Tensor]:
    """Returns log-probabilities [answers, n] and, of a training step, all gradients."""
    model.zero_grad()
    with torch.set_grad_enabled(case == "step"):
        scores = loss_of(model, sequences, prompt)
    if case == "forward":
        return [scores]
    (-scores.sum()).backward()
    return [scores.detach(), *(x.grad.clone() for x in model.parameters())]


def once(case: str, name: str, sizes: tuple[int, int, int]) -> Iterator[None]:
    """Warms up on few tokens, yields, and runs one call for `peak_extra_bytes`."""
    loss_of = {PACKED: packed_loss, PADDED: padded_loss}[name]
    model, few = qwen(sizes), (64, 8, 2)
    run_once(case, loss_of, model, answers(few), few[0])
    sequences = answers(sizes)
    yield
    run_once(case, loss_of, model, sequences, sizes[0])


def packed_loss(model: Any, sequences: list[Tensor], prompt: int, block_mask: Any = None) -> Tensor:
    """Log-probabilities of the answers [answers, n], from one row that holds their tree."""
    from sparsering.integrations import transformers as hf

    tree = pack_tree(sequences)
    places = torch.stack([path[prompt:] for path in tree.paths])
    before = tree.previous[places]  # [answers, n]
    kept, index = before.unique(return_inverse=True)
    given = {"position_ids": tree.position_ids[None], "use_cache": False, "logits_to_keep": kept}
    if block_mask is not None:
        model.set_attn_implementation("flex_attention")
        logits = model(tree.tokens[None], attention_mask=block_mask, **given).logits[0]
    else:
        layout_cache.clear()  # a new group has a new tree
        with hf.using(model, tree.pattern):
            logits = model(tree.tokens[None], **given).logits[0]
    return chosen(logits[index], tree.tokens[places])


def padded_loss(model: Any, sequences: list[Tensor], prompt: int) -> Tensor:
    """Log-probabilities of the answers [answers, n], from a padded row for each."""
    model.set_attn_implementation("sdpa")
    rows = nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    lengths = torch.tensor([len(x) for x in sequences])
    mask = (torch.arange(rows.shape[1]) < lengths[:, None]).long()
    size = rows.shape[1] - prompt
    out = model(rows, attention_mask=mask, use_cache=False, logits_to_keep=size + 1)
    return chosen(out.logits[:, :-1], rows[:, prompt:])


def chosen(logits: Tensor, tokens: Tensor) -> Tensor:
    """Returns the log-probability of each token."""
    return -F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none").view_as(
        tokens
    )


def exact_scores(model: Any, sequences: list[Tensor], sizes: tuple[int, int, int]) -> list[Tensor]:
    """Log-probabilities and gradients of the rows one by one, in float64."""
    exact = qwen(sizes).double()
    exact.load_state_dict(model.state_dict())
    for module in exact.modules():
        if type(module).__name__.endswith("RMSNorm"):  # the model's own computes in float32
            module.forward = lambda x, of=module: F.rms_norm(
                x, of.weight.shape, of.weight, of.variance_epsilon
            )
    scores = []
    for row in sequences:
        score = padded_loss(exact, [row], sizes[0])
        (-score.sum()).backward()
        scores.append(score.detach())
    return [torch.cat(scores), *(x.grad for x in exact.parameters())]


def flex_mask_of(sequences: list[Tensor]) -> Any:
    """Builds FlexAttention's mask of the packed tree."""
    from torch.nn.attention.flex_attention import create_block_mask

    tree: PackedTree = pack_tree(sequences)
    size = len(tree.tokens)
    return create_block_mask(tree_mask(tree.pattern), None, None, size, size, device="cpu")


def qwen(sizes: tuple[int, int, int]) -> Any:
    """Builds a Qwen 3 of 2 layers and 2M parameters; the same weights at every call."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from sparsering.integrations import transformers as hf

    hf.register()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=768, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        max_position_embeddings=sum(sizes), bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def answers(sizes: tuple[int, int, int]) -> list[Tensor]:
    """Draws a prompt, and answers of one length to it."""
    prompt, answer, count = sizes
    generator = torch.Generator().manual_seed(1)
    first = torch.randint(VOCABULARY, (prompt,), generator=generator)
    return [
        torch.cat([first, torch.randint(VOCABULARY, (answer,), generator=generator)])
        for _ in range(count)
    ]
