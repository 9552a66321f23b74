"""Shared prompts for trl's GRPO and RLOO trainers: the prompt of a group is computed once.

    from sparsering.integrations import trl
    trl.share_prompts(trainer)           # a GRPOTrainer or RLOOTrainer, before or while it trains
    trl.share_prompts(trainer, False)    # as before

trl computes one row for each answer, and in each row the prompt. Here the rows of a call are packed
as a tree, whose common prefixes are stored and computed once.
"""

from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..ground.commands import program
from ..ground.keywords import with_hints
from ..patterns.packed_tree import PackedTree, pack_tree

__all__ = ["share_prompts"]

Trainer = TypeVar("Trainer")
IGNORED = -100  # a label that trl gives no log-probability
METHOD = "_get_per_token_logps_and_entropies"
"""The method of trl's trainers that computes log-probabilities, of all models that they have."""


@with_hints()
def share_prompts(trainer: Trainer, on: bool = True) -> Trainer:
    """Lets a trainer of trl compute the common prefixes of its rows once, in place.

    Losses, entropies and gradients are those of separate rows. The trainer's model, its reference
    model and its old log-probabilities go this way; generation and rewards do not change.

    Args:
        trainer: a `GRPOTrainer` or `RLOOTrainer`, of a text model whose family uses transformers'
            attention interface, with any attn_implementation. Its layers keep their own windows
            and chunks.
        on: False lets the trainer compute separate rows again.

    Returns: the trainer.

    Raises: ValueError for another object. NotImplementedError for a trainer that adds the load
        balancing loss of experts, and, when it trains, for images.

    Cost: the tokens of a call are those of the answers, and of each prompt once. Rows share within
        one micro-batch. trl shuffles answers over the micro-batches of a generation, so groups stay
        whole where there is one: steps_per_generation=1.

    Example:
        >>> trainer = share_prompts(GRPOTrainer(model, rewards, args=args, train_dataset=data))
        >>> trainer.train()
    """
    pip = program("pip", "pip")
    try:
        import trl
    except ImportError as error:
        raise ImportError(
            f"sparsering.integrations.trl needs trl 1.16 or newer; {pip} install trl"
        ) from error
    if tuple(int(part) for part in trl.__version__.split(".")[:2]) < (1, 16):
        raise ImportError(
            "sparsering.integrations.trl needs trl 1.16 or newer, whose models return "
            f"log-probabilities, got {trl.__version__}; {pip} install --upgrade trl"
        )
    if not isinstance(trainer, (trl.GRPOTrainer, trl.RLOOTrainer)):
        raise ValueError(
            f"expected a GRPOTrainer or RLOOTrainer of trl, got {type(trainer).__name__}; rows "
            "with labels= share nothing"
        )
    vars(trainer).pop(METHOD, None)
    if on:
        if trainer.aux_loss_enabled:
            raise NotImplementedError(
                "share_prompts does not compute the load balancing loss of experts, which counts "
                "a prompt once for each answer; set router_aux_loss_coef=0 in the config"
            )
        setattr(trainer, METHOD, partial(log_probs_and_entropies, trainer))
    return trainer


def log_probs_and_entropies(
    trainer: Any,
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    logits_to_keep: int,
    batch_size: int | None = None,
    compute_entropy: bool = False,
    compute_aux_loss: bool = False,
    **images: Any,
) -> tuple[Tensor, Tensor | None, None]:
    """Does what the method of trl's trainers does for [B, N] rows, by a tree for each chunk.

    Returns: log-probabilities [B, logits_to_keep] and, if asked for, entropies of that shape, both
        0 where the mask is 0; and no load balancing loss.
    """
    from . import transformers as hf

    assert not compute_aux_loss
    if given := [name for name, x in images.items() if x is not None]:
        raise NotImplementedError(
            f"share_prompts packs rows of text, got {', '.join(given)}; "
            "share_prompts(trainer, False) computes separate rows"
        )
    of_chunks: list[tuple[Tensor, ...]] = []
    for ids, real in zip(
        input_ids.split(batch_size or len(input_ids)),
        attention_mask.bool().split(batch_size or len(input_ids)),
        strict=True,
    ):
        rows = labelled_tree(ids, real, logits_to_keep)
        with trainer.accelerator.autocast(), hf.using(model, rows.tree):
            out = model(
                input_ids=rows.tokens[None],
                position_ids=rows.tree.position_ids[None],
                shift_labels=rows.labels[None],
                fused_lm_head=True,
            )
        columns = (out.log_probs, out.entropy) if compute_entropy else (out.log_probs,)
        answers = real[:, -logits_to_keep:]
        of_chunks.append(
            tuple(
                x.new_zeros(answers.shape).masked_scatter(answers, x[0, rows.places])
                for x in columns
            )
        )
    log_probs, *entropies = (torch.cat(parts) for parts in zip(*of_chunks, strict=True))
    return log_probs, entropies[0] if entropies else None, None


class LabelledTree(NamedTuple):
    """Rows of a prompt and an answer as a tree of T tokens, each of which predicts one token.

    Attributes:
        tree: the tree. Its tokens only say which ones are equal.
        tokens: [T] the tokens.
        labels: [T] the token of an answer that follows, or IGNORED.
        places: indices of the tokens before those of the answers, row after row.
    """

    tree: PackedTree
    tokens: Tensor
    labels: Tensor
    places: Tensor


def labelled_tree(input_ids: Tensor, real: Tensor, num_answer_tokens: int) -> LabelledTree:
    """Packs rows [B, N], whose last `num_answer_tokens` columns are answers, without padding.

    Each answer has a copy of the last token of its prompt, because a token has one label only. So
    answers share their prompts up to there, and nothing else.
    """
    sequences, keys, sizes = [], [], []
    fresh = int(input_ids.max()) + 1  # no token: what is numbered from here is equal to nothing
    for row, mask in zip(input_ids, real, strict=True):
        sequence, size = row[mask], int(mask[-num_answer_tokens:].sum())
        shared = len(sequence) - size - 1
        if shared < 0:
            raise ValueError(
                "expected prompts of at least one token, got a row without any; its answer's first "
                "token follows nothing"
            )
        own = torch.arange(fresh, fresh + size + 1, device=row.device)
        fresh += size + 1
        sequences.append(sequence)
        keys.append(torch.cat((sequence[:shared], own)))
        sizes.append(size)
    tree = pack_tree(keys)
    tokens = torch.empty_like(tree.tokens)
    labels = torch.full_like(tree.tokens, IGNORED)
    places = []
    for sequence, path, size in zip(sequences, tree.paths, sizes, strict=True):
        tokens[path] = sequence
        before = path[len(path) - size - 1 : -1]
        labels[before] = sequence[len(sequence) - size :]
        places.append(before)
    return LabelledTree(tree=tree, tokens=tokens, labels=labels, places=torch.cat(places))
