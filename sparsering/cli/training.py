"""The commands that train and generate: `train`, `generate`."""

import argparse
import shlex
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from .argument_types import Commands, add_quiet, positive, token_count

# other names of settings, as `plan` and other libraries call them
_OTHER_NAMES = {"context": ("--tokens",), "num_layers": ("--layers",), "num_heads": ("--heads",)}


def add_commands(commands: Commands) -> None:
    """Adds the commands that train and generate to the command line's parser."""
    train = commands.add_parser(
        "train", help="train a byte-level LongNet model on text", add_later=_add_settings
    )
    train.set_defaults(run=_train)
    add_quiet(train)
    add = train.add_argument
    add("--out", type=Path, required=True, help="folder of metrics and checkpoint")
    add("--resume", action="store_true", help="go on with --out's run and its settings")
    add("--init", type=Path, metavar="RUN", help="begin with the weights of another run's folder")
    add("--save-every", type=positive, default=50, help="steps between checkpoints")
    add("--validate-every", type=positive, default=50, help="steps between validations")
    add("--micro-batch", type=_micro_batch, metavar="N|auto", help="windows computed at once")
    add("--stop-after", type=positive, help="stop, as if interrupted, after this step")
    parallel = train.add_argument_group("under torchrun").add_argument
    parallel("--sequence-parallel", type=positive, help="processes that share a window's tokens")
    shardings, text = ("contiguous", "zigzag", "balanced", "auto"), "default: contiguous"
    parallel("--sharding", choices=shardings, help=f"which process has which tokens ({text})")
    parallel(
        "--shard",
        action="store_true",
        help="each process has a part of every parameter and of its optimizer state (FSDP2)",
    )
    parallel("--timeout", type=float, help="seconds to wait for another process (default: 60)")

    generate = commands.add_parser(
        "generate", help="continue a text with a trained model, printed as it is generated"
    )
    generate.set_defaults(run=_generate)
    add = generate.add_argument
    add("checkpoint", type=Path, help="folder that train wrote")
    add("--prompt", default="\n", help="text to continue")
    add("--num-bytes", "--max-new-tokens", type=positive, default=300, help="bytes to add at most")
    add("--stop", metavar="TEXT", help="end after this text")
    add("--temperature", type=float, default=0.7, help="0 takes the likeliest byte")
    add("--top-k", type=int, metavar="K", help="draw from the K likeliest bytes")
    add("--top-p", type=float, metavar="P", help="draw from the likeliest bytes that sum to P")
    add("--seed", type=int, default=0, help="seed of the draws")
    add(
        "--draft",
        default="none",
        metavar="ngram|FOLDER|none",
        help="guess by the text so far, or by a smaller model, and verify: the same text, "
        "later from a small model (docs/decoding.md)",
    )


def _add_settings(train: argparse.ArgumentParser) -> None:
    """Adds an option for each setting of a recipe.

    Options that are not given stay unset, so that --resume can take them from the checkpoint.
    """
    from ..training.recipe import Recipe

    title = "settings of the recipe (with --resume, default: the checkpoint's)"
    add = train.add_argument_group(title).add_argument
    for setting in fields(Recipe):
        default, (text,) = setting.default, setting.type.__metadata__  # type: ignore[union-attr]
        options: dict[str, Any] = {"type": str if default is None else type(default)}
        if setting.name == "context":
            options = {"type": token_count}  # a checkpoint's recipe has the number
        if default is False:
            options = {"action": "store_true"}
        elif "default" not in text:
            text += f" (default: {default})"
        name = "--" + setting.name.replace("_", "-")
        others = _OTHER_NAMES.get(setting.name, ())
        add(name, *others, default=argparse.SUPPRESS, help=text, **options)


def _micro_batch(text: str) -> int | str:
    """Parses "auto" or a whole number above 0, for argparse's `type`."""
    return text if text == "auto" else positive(text)


def _train(arguments: argparse.Namespace) -> int:
    """Runs `train` on each rank; rank 0 says how far the run is, and how to go on with it."""
    from ..training.checkpoint import has_checkpoint, load_checkpoint
    from ..training.loop import train
    from ..training.ranks import ranks_of_torchrun, was_restarted
    from ..training.recipe import Recipe

    settings = {f.name: getattr(arguments, f.name) for f in fields(Recipe) if f.name in arguments}
    if settings.get("data") is not None:
        settings["data"] = str(Path(settings["data"]).resolve())
    with ranks_of_torchrun(
        arguments.sequence_parallel,
        sharding=arguments.sharding,
        timeout=arguments.timeout,
        shard_parameters=arguments.shard,
    ) as ranks:
        out = arguments.out
        resume = arguments.resume or (was_restarted() and ranks.from_leader(has_checkpoint(out)))
        began = ranks.together(lambda: load_checkpoint(out)) if resume else None
        base, first_step = (began.recipe, began.step) if began else (Recipe(), 0)
        run = train(
            replace(base, **settings),
            out,
            resume=resume,
            save_every=arguments.save_every,
            validate_every=arguments.validate_every,
            stop_after=arguments.stop_after,
            micro_batch=arguments.micro_batch,
            init=arguments.init,
            ranks=ranks,
        )
        if ranks.leads:
            print(
                f"Step {run.step} of {run.recipe.steps}: validation loss {run.validation_loss:.4f} "
                f"nats per byte at step {run.validated_at}."
            )
            if began and run.step == first_step >= run.recipe.steps:
                print(
                    f"The run in {out} was finished before, so nothing was trained; --steps with "
                    f"more than {run.step} trains it further"
                )
            if run.step < run.recipe.steps:
                size = f" --micro-batch {arguments.micro_batch}" if arguments.micro_batch else ""
                command = f"{ranks.start('train')} --out {shlex.quote(str(out))} --resume{size}"
                print(f"Stopped; to go on: {command}")
    return 0 if run.stopped_by is None else 128 + run.stopped_by


def _generate(arguments: argparse.Namespace) -> int:
    """Runs `generate`: prints the prompt and its continuation, then times and bytes on stderr."""
    import codecs
    import time

    import torch

    from ..training.checkpoint import load_model

    model = load_model(arguments.checkpoint)
    prompt = arguments.prompt.encode(errors="surrogateescape")  # the typed bytes, even if not UTF-8
    stop = None if arguments.stop is None else arguments.stop.encode(errors="surrogateescape")
    caches = model.caches(max_length=len(prompt) + arguments.num_bytes)
    draft = arguments.draft.lower().replace("n-gram", "ngram")
    draft = draft if draft in ("none", "ngram") else load_model(arguments.draft)
    passes: list[None] = []
    model.norm.register_forward_hook(lambda *_: passes.append(None))
    tokens = model.generate(
        torch.tensor([list(prompt)], dtype=torch.int64),
        arguments.num_bytes,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        stop=stop,
        generator=torch.Generator().manual_seed(arguments.seed),
        caches=caches,
        draft=None if draft == "none" else draft,
    )
    times = [time.perf_counter()]  # of the start, and of each token
    text = codecs.getincrementaldecoder("utf-8")(errors="replace")
    try:
        print(printable(text.decode(prompt)), end="", flush=True)
        for token in tokens:
            times.append(time.perf_counter())
            print(printable(text.decode(bytes(token.tolist()))), end="", flush=True)
        print(printable(text.decode(b"", final=True)), flush=True)
    except BrokenPipeError:
        raise
    except BaseException:
        print(flush=True)  # the error message starts a new line
        raise
    live, full = model.cache_bytes(caches)
    start, first, later = times[0], times[:2][-1], times[2:]
    pace = f", then {len(later) / (later[-1] - first):,.0f} tokens/s" if later else ""
    if draft != "none" and passes:
        pace += f" ({(len(times) - 1) / len(passes):.1f} tokens a pass)"
    held = f"{live:,} bytes held, {full:,} in a full cache"
    if live >= full:  # a short text, whose last page is not full
        held = f"{full:,} bytes, in a cache with room for more, of {live:,}"
    print(
        f"{len(prompt):,} bytes read in {first - start:.2f} s{pace}; keys and values of "
        f"{caches[0].length:,} bytes: {held}",
        file=sys.stderr,
    )
    return 0


def printable(text: str) -> str:
    """Replaces each character that is not printable with U+FFFD."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
