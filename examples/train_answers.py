"""Trains a small language model on groups of answers by the GRPO loss, each row a packed tree.

    python examples/train_answers.py
    python examples/train_answers.py --model llama --groups 4 --steps 100

Weights are random and the task is a toy: a token is rewarded if it is even. Nothing is downloaded.
Each prompt is continued by several reasonings, and each reasoning by several ends, so a tree has
three levels. The model computes a common prefix once. `collate`, `answer_log_probs` and
`grpo_loss` are what a trainer of yours needs: docs/trees.md explains them.
"""

import argparse
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import sparsering as sr
from sparsering.cli.argument_types import positive
from sparsering.ground.commands import install
from sparsering.mistakes import OneLineParser, one_line_errors

with one_line_errors("train_answers", install=install("hf")):
    from sparsering.integrations import transformers as hf

PAD, END, VOCABULARY = 0, 1, 64
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": PAD,
    "bos_token_id": None, "eos_token_id": END,
}  # fmt: skip


def collate(groups: list[dict[str, Tensor]]) -> dict[str, Any]:
    """Packs several groups of padded answers [G, n] as the tree of one row."""
    sequences, sizes, advantages = [], [], []
    for group in groups:
        prompt, rewards = group["prompt_ids"], group["rewards"]
        real = group["completion_mask"].bool()  # [G, n]
        for answer, mask in zip(group["completion_ids"], real, strict=True):
            sequences.append(torch.cat([prompt, answer[mask]]))
            sizes.append(len(prompt))
        spread = rewards.std() + 1e-4
        advantages.append((rewards - rewards.mean()) / spread)
    tree = sr.pack_tree(sequences)
    paths = zip(tree.paths, sizes, strict=True)
    answers = [path[size:] for path, size in paths]  # prompts have no loss
    places = pad_sequence(answers, True, padding_value=-1)  # [answers, n]
    return {
        "tree": tree,
        "places": places.clamp(min=0),
        "real": places >= 0,
        "advantages": torch.cat(advantages)[:, None],
    }


def answer_log_probs(model: Any, batch: dict[str, Any]) -> Tensor:
    """Returns log-probabilities of the answers' tokens, [answers, n]."""
    tree, places = batch["tree"], batch["places"]
    # The places whose logits predict a token of an answer, each once.
    before, index = tree.previous[places].unique(return_inverse=True)
    with hf.using(model, tree):
        logits = model(
            tree.tokens[None],
            position_ids=tree.position_ids[None],
            logits_to_keep=before,
            use_cache=False,
        ).logits[0]
    return logits.log_softmax(-1)[index, tree.tokens[places]]


def grpo_loss(
    new: Tensor,
    old: Tensor,
    reference: Tensor,
    batch: dict[str, Any],
    clip: float = 0.2,
    beta: float = 0.04,
) -> Tensor:
    """Clips ratios, adds a KL penalty; the mean over answers of means."""
    real, advantages = batch["real"], batch["advantages"]
    ratio = (new - old).exp()
    clipped = ratio.clamp(1 - clip, 1 + clip)
    gain = torch.minimum(ratio * advantages, clipped * advantages)
    kl = (reference - new).exp() - (reference - new) - 1
    of_token = torch.where(real, beta * kl - gain, 0.0)
    return (of_token.sum(1) / real.sum(1).clamp(min=1)).mean()


def sample(model: Any, prompt: Tensor, args: argparse.Namespace) -> dict[str, Tensor]:
    """Draws a group: reasonings that continue a prompt, and ends that continue each reasoning."""
    given = {"do_sample": True, "pad_token_id": PAD, "eos_token_id": END}
    rows = prompt.expand(args.reasonings, -1)
    # A reasoning goes on to its length; an end may stop early.
    rows = model.generate(
        rows, max_new_tokens=args.reasoning_tokens, suppress_tokens=[PAD, END], **given
    )
    rows = rows.repeat_interleave(args.ends, 0)
    rows = model.generate(rows, max_new_tokens=args.end_tokens, suppress_tokens=[PAD], **given)
    answers = rows[:, len(prompt) :]  # [G, n], padded
    ended = (answers == END).long()
    real = ended.cumsum(1) - ended == 0  # the first END is a token too
    even = ((answers % 2 == 0) & real).sum(1) / real.sum(1)
    return {
        "prompt_ids": prompt, "completion_ids": answers, "completion_mask": real.long(),
        "rewards": even,
    }  # fmt: skip


def model_of(kind: str) -> Any:
    """Builds a tiny Gemma 3, with a window in every second layer, or a tiny Llama."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**SIZES))
    types = ["sliding_attention", "full_attention"]
    return Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, sliding_window=8, layer_types=types))


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=("gemma3", "llama"), default="gemma3")
    parser.add_argument("--steps", type=positive, default=30, help="batches; default 30")
    parser.add_argument("--updates", type=positive, default=2, help="of a batch; default 2")
    parser.add_argument("--groups", type=positive, default=2, help="groups of a row; default 2")
    parser.add_argument("--reasonings", type=positive, default=3, help="of a prompt; default 3")
    parser.add_argument("--ends", type=positive, default=3, help="of a reasoning; default 3")
    parser.add_argument("--prompt-tokens", type=positive, default=24, help="default 24")
    parser.add_argument("--reasoning-tokens", type=positive, default=8, help="default 8")
    parser.add_argument("--end-tokens", type=positive, default=8, help="at most; default 8")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate; default 3e-3")
    parser.add_argument("--seed", type=int, default=0, help="default 0")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Trains, and returns mean rewards and losses by step, and tokens of trees and of rows."""
    args = parse(argv)
    torch.manual_seed(args.seed)
    model, frozen = model_of(args.model), model_of(args.model)
    frozen.load_state_dict(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    rewards: list[float] = []
    losses: list[float] = []
    tokens = tokens_of_rows = 0
    prompts = torch.randint(2, VOCABULARY, (args.steps * args.groups, args.prompt_tokens))
    for step, some in enumerate(prompts.split(args.groups)):
        with torch.no_grad():
            groups = [sample(model, prompt, args) for prompt in some]
        # A trainer's dataset of groups goes through the same loader.
        (batch,) = DataLoader(groups, batch_size=args.groups, collate_fn=collate)
        with torch.no_grad():
            old = answer_log_probs(model, batch)
            reference = answer_log_probs(frozen, batch)
        for _ in range(args.updates):
            loss = grpo_loss(answer_log_probs(model, batch), old, reference, batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        rewards.append(torch.cat([group["rewards"] for group in groups]).mean().item())
        tokens += len(batch["tree"].tokens)
        tokens_of_rows += sum(map(len, batch["tree"].paths))
        if step % 5 == 0 or step + 1 == args.steps:
            print(f"step {step}: mean reward {rewards[-1]:.2f}, loss {losses[-1]:+.4f}")
    print(f"{tokens:,} tokens of trees, for {tokens_of_rows:,} tokens of rows")
    return {
        "rewards": rewards, "losses": losses, "tokens": tokens, "tokens_of_rows": tokens_of_rows,
    }  # fmt: skip


if __name__ == "__main__":
    with one_line_errors("train_answers"):
        main()
