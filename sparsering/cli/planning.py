"""The command that predicts costs before a run: `plan`."""

import argparse
import shlex
from typing import TYPE_CHECKING

from .argument_types import DTYPE, PATTERN, Commands, add_quiet, memory_size, positive, token_count

if TYPE_CHECKING:
    import torch

    from ..planning.machines import Machine


def add_commands(commands: Commands) -> None:
    """Adds `plan` to the command line's parser."""
    plan = commands.add_parser(
        "plan", help="what a pattern costs on a machine: time, memory, what fits, over ranks"
    )
    plan.set_defaults(run=_plan)
    add = plan.add_argument
    add_quiet(plan)
    add("pattern", nargs="?", help=f"{PATTERN}; without one, patterns are proposed")
    add("--tokens", type=token_count, help="tokens of a sequence, such as 65536, 64K or 1M")
    add(
        "--memory", type=memory_size, help="of one device: 24GB, total (default: what is free here)"
    )
    add("--gpu", "--machine", dest="machine", help="such as H200 (default: this machine)")
    add(
        "--tflops",
        type=float,
        help="of another machine: dense products, with --bandwidth, --memory",
    )
    add("--bandwidth", type=float, metavar="GB/S", help="of its memory")
    add("--seconds", type=float, help="limit of a call, which proposals meet")
    add("--full", action="store_true", help="proposals see later keys too")
    add(
        "--take", type=positive, metavar="ROW", help="the plan of one proposal, by its row's number"
    )
    add("--ranks", type=positive, default=1, help="devices that share each sequence")
    add("--sharding", default="auto", help="which rank has which tokens")
    add("--heads", "--num-heads", type=positive, help="query heads (default: 8)")
    add(
        "--kv-heads", "--num-kv-heads", type=positive, help="key and value heads (default: --heads)"
    )
    add("--head-dim", type=positive, help="channels of a head (default: 64)")
    add("--dtype", **DTYPE)
    add("--batch-size", type=positive, default=1, help="sequences of one call")
    passes = plan.add_mutually_exclusive_group().add_argument
    passes("--backward", action="store_true", help="with gradients, as in training")
    passes("--forward", dest="backward", action="store_false", help="without gradients (default)")
    add("--backend", help="default: the backend that would run")
    add("--block-size", type=positive, help="default: the block size that would run")
    add = plan.add_argument_group("a training step of a whole model").add_argument
    add(
        "--model",
        help="a causal language model of transformers: folder, config.json or name; or "
        "longnet-encoder (of slides), longnet. Without --tokens: the longest row that trains",
    )
    add("--width", type=positive, help="channels of longnet-encoder and longnet (default: 768)")
    add("--layers", type=positive, help="their layers (default: 12)")
    add("--in-width", type=positive, help="channels of a tile of longnet-encoder (default: 1536)")
    add("--vocab-size", type=positive, help="tokens that longnet knows (default: 256)")
    add("--replicas", type=positive, default=1, help="groups of ranks, each with rows of its own")
    add("--fsdp", action="store_true", help="each device has a part of weights and states")


def _plan(arguments: argparse.Namespace) -> int:
    """Runs `plan`: prints the costs of a pattern, proposed patterns, or the plan of a model."""
    import torch

    from ..ground.commands import sparsering
    from ..patterns.expression import parse
    from ..planning.estimate import Scenario
    from ..planning.fit import memory_of, usable
    from ..planning.machines import described, machine_of
    from ..planning.proposals import candidates, default_dtype, propose
    from ..planning.screen import proposal_screen, screen, title_of
    from ..planning.sizes import parse_tokens

    machine = machine_of(arguments.machine)
    if arguments.tflops or arguments.bandwidth:
        machine = described(machine, arguments.tflops, arguments.bandwidth, arguments.memory)
    dtype = getattr(torch, arguments.dtype) if arguments.dtype else default_dtype(machine)
    if arguments.model:
        print(_model_plan(arguments, machine, dtype))
        return 0
    own = ("width", "layers", "in_width", "vocab_size", "fsdp")
    if arguments.replicas > 1 or any(getattr(arguments, name) for name in own):
        raise ValueError("--width, --layers, --replicas, --fsdp are of --model; name a model")
    if arguments.tokens is None:
        raise ValueError("expected the tokens of a sequence; pass --tokens, such as 64K or 1M")
    heads, head_dim = arguments.heads or 8, arguments.head_dim or 64
    tokens, text = parse_tokens(arguments.tokens), arguments.pattern
    texts = [text for _, text in candidates(tokens, not arguments.full)]
    if text and (arguments.seconds is not None or arguments.full or arguments.take):
        raise ValueError("--seconds, --full and --take are for proposals; leave the pattern out")
    if arguments.take:
        if arguments.take > len(texts):
            raise ValueError(
                f"--take must be the number of a row, 1 to {len(texts)}, got {arguments.take}; "
                "leave it out to see the rows"
            )
        text = texts[arguments.take - 1]
    if not text and (arguments.backend or arguments.block_size or arguments.sharding != "auto"):
        raise ValueError("--backend, --block-size and --sharding are for one pattern; name it")
    scenario = Scenario(
        pattern=parse(text or "Causal()"),
        tokens=tokens,
        num_heads=heads,
        num_kv_heads=arguments.kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        batch_size=arguments.batch_size,
        backward=arguments.backward,
        machine=machine,
        ranks=arguments.ranks,
        sharding=arguments.sharding,
        backend=arguments.backend,
        block_size=arguments.block_size,
    )
    if text:
        print(screen(scenario, arguments.memory, text))
        return 0
    proposals = propose(
        tokens,
        num_heads=heads,
        num_kv_heads=arguments.kv_heads,
        head_dim=head_dim,
        batch_size=arguments.batch_size,
        dtype=dtype,
        machine=machine,
        ranks=arguments.ranks,
        seconds=arguments.seconds,
        causal=not arguments.full,
        memory=usable(memory_of(machine, arguments.memory)),
        backward=arguments.backward,
    )
    command = sparsering(shlex.join(arguments.typed))
    print(proposal_screen(proposals, title_of(scenario), texts, command))
    return 0


def _model_plan(
    arguments: argparse.Namespace, machine: "Machine | None", dtype: "torch.dtype"
) -> str:
    """Returns the text that `plan --model` prints about a training step of a whole model."""
    from ..planning.estimate import Scenario
    from ..planning.fit import memory_of
    from ..planning.sizes import parse_tokens
    from ..planning.training_step import longest_row_screen, step_screen
    from .planned_models import planned_model

    if arguments.seconds is not None or arguments.full or arguments.take:
        raise ValueError("--seconds, --full and --take are for proposals; leave --model out")
    tokens = None if arguments.tokens is None else parse_tokens(arguments.tokens)
    planned = planned_model(arguments)
    scenario = Scenario(
        pattern=planned.patterns[0],
        tokens=tokens or 4096,
        num_heads=planned.num_heads,
        num_kv_heads=planned.num_kv_heads,
        head_dim=planned.head_dim,
        dtype=dtype,
        batch_size=arguments.batch_size,
        backward=True,
        machine=machine,
        ranks=arguments.ranks,
        sharding=arguments.sharding,
        backend=arguments.backend,
        block_size=arguments.block_size,
    )
    limit = memory_of(machine, arguments.memory, arguments.backend)
    show = longest_row_screen if tokens is None else step_screen
    return show(planned, scenario, limit, replicas=arguments.replicas, sharded=arguments.fsdp)
