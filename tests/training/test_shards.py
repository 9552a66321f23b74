"""`train --shard`: the losses of unsharded runs, checkpoints in parts, kills, and damaged parts."""

import contextlib
import dataclasses
import errno
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ring_workers import workers_of
from rank_runs import (
    TOLERANCE,
    ForkedCommand,
    figures,
    has_reached,
    run,
    torchrun,
    train_words,
    watch,
    worker,
)
from safetensors import safe_open
from stranger import about, assert_refused, command, generate, unpickled, write_about
from torch.distributed.tensor import DTensor

from sparsering.cli import main
from sparsering.training import Recipe, load_model, train
from sparsering.training.checkpoint import Checkpoint, load_checkpoint
from sparsering.training.ranks import arrange

one = workers_of(1)
two = workers_of(2)
three = workers_of(3)
four = workers_of(4)

SLOW = pytest.mark.slow
CLOSE = 1e-6
"""Relative, of float32 losses and gradient norms with and without `--shard`; 3e-7 were seen."""


def parts_of(out: Path) -> Path:
    """The one folder of parts in a run's folder."""
    (folder,) = out.glob("parts-*")
    return folder


def part_files(out: Path) -> list[Path]:
    return sorted(parts_of(out).iterdir())


# Losses


SHARED_OUT = [
    pytest.param(2, 2, "contiguous", {}, id="dp 1, sp 2"),
    pytest.param(2, 1, "contiguous", {}, id="dp 2, sp 1", marks=SLOW),
    pytest.param(4, 2, "zigzag", {"checkpoint_layers": True}, id="dp 2, sp 2, run twice"),
    pytest.param(4, 4, "zigzag", {"context": 50}, id="uneven sequences", marks=SLOW),
    pytest.param(4, 4, "contiguous", {"context": 9, "batch_size": 3}, id="a rank without tokens"),
    pytest.param(3, 3, "contiguous", {"width": 4}, id="a rank without channels"),
    pytest.param(
        2,
        1,
        "contiguous",
        {"attention": "selected", "block_size": 16, "blocks": 3, "refine": 2},
        id="selected blocks",
        marks=SLOW,
    ),
]


@pytest.mark.parametrize(("world", "sp", "sharding", "changes"), SHARED_OUT)
def test_losses_are_those_of_unsharded_ranks(
    request, recipe, tmp_path, world, sp, sharding, changes
):
    recipe = dataclasses.replace(recipe, steps=3, **changes)
    workers = request.getfixturevalue({2: "two", 3: "three", 4: "four"}[world])
    of_ranks = run(workers, recipe, tmp_path / "parts", sp, sharding, shard=True)
    run(workers, recipe, tmp_path / "whole", sp, sharding)
    assert figures(tmp_path / "parts") == pytest.approx(figures(tmp_path / "whole"), rel=CLOSE)
    assert all(metrics == of_ranks[0] for metrics in of_ranks)
    finished, whole = (load_model(tmp_path / name) for name in ("parts", "whole"))
    for a, b in zip(finished.parameters(), whole.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def losses_in_float64(
    rank: int, recipe: Recipe, out: Path, sp: int, micro_batch: int | None
) -> tuple[list[float], list[float]]:
    """Losses and norms of a rank, without and with `--shard`; float64 needs no checkpoints."""
    save = Checkpoint.save
    Checkpoint.save = lambda *_: None
    torch.set_default_dtype(torch.float64)
    try:
        whole, parts = (
            train(recipe, out, micro_batch=micro_batch, ranks=arrange(sp, shard_parameters=shard))
            for shard in (False, True)
        )
    finally:
        torch.set_default_dtype(torch.float32)
        Checkpoint.save = save
    of_whole, of_parts = (
        [r[name] for r in x.metrics for name in ("loss", "grad_norm") if name in r]
        for x in (whole, parts)
    )
    return of_whole, of_parts


@pytest.mark.parametrize(
    ("sp", "micro_batch"), [(2, None), pytest.param(1, 2, marks=SLOW)], ids=["sp 2", "dp 2"]
)
def test_losses_in_float64_are_equal_to_the_last_digits(two, recipe, tmp_path, sp, micro_batch):
    recipe = dataclasses.replace(recipe, batch_size=4, steps=3)
    whole, parts = two.run(losses_in_float64, recipe, tmp_path, sp, micro_batch)[0]
    assert len(whole) == 2 * 3
    assert parts == pytest.approx(whole, rel=1e-13)


def test_micro_batches_that_fit_in_memory_add_to_the_same_step(two, recipe, tmp_path):
    recipe = dataclasses.replace(recipe, batch_size=4, steps=3)
    run(two, recipe, tmp_path / "parts", 1, shard=True, micro_batch="auto")
    run(two, recipe, tmp_path / "whole", 1, micro_batch=2)
    assert figures(tmp_path / "parts") == pytest.approx(figures(tmp_path / "whole"), rel=CLOSE)


@SLOW
def test_one_rank_has_all_parts(one, recipe, tmp_path):
    run(one, recipe, tmp_path / "parts", 1, shard=True, stop_after=3)
    assert len(part_files(tmp_path / "parts")) == 1
    run(one, recipe, tmp_path / "parts", 1, shard=True, resume=True)
    run(one, recipe, tmp_path / "whole", 1)
    assert figures(tmp_path / "parts") == figures(tmp_path / "whole")


def sizes_of_parts(rank: int, recipe: Recipe, out: Path) -> dict[str, int]:
    """Numbers of elements that a rank has of each tensor, after a step."""
    ended = train(recipe, out, stop_after=1, ranks=arrange(2, shard_parameters=True))
    tensors = dict(ended.model.named_parameters())
    for name, weight in list(tensors.items()):
        tensors[f"{name} gradient"] = weight.grad
        tensors[f"{name} mean"] = ended.optimizer.state[weight]["exp_avg"]
        tensors[f"{name} square"] = ended.optimizer.state[weight]["exp_avg_sq"]
    assert all(isinstance(x, DTensor) for x in tensors.values())
    return {name: x.to_local().numel() for name, x in tensors.items()}


def test_each_rank_has_half_of_every_parameter_gradient_and_state(two, recipe, tmp_path):
    model = recipe.build_model()
    first, second = two.run(sizes_of_parts, recipe, tmp_path)
    assert first == second and len(first) == 4 * len(list(model.parameters()))
    assert sum(first.values()) == 2 * sum(p.numel() for p in model.parameters())


# Checkpoints


def test_each_rank_writes_its_part(three, recipe, tmp_path):
    out = tmp_path / "run"
    run(three, dataclasses.replace(recipe, width=4), out, 3, shard=True, stop_after=1)
    assert len(part_files(out)) == 3
    assert set(about(out)["parts"]["sha256"]) == {path.name for path in part_files(out)}
    for path in part_files(out):
        with safe_open(path, "pt") as file:
            rows, width = file.get_slice("model.embedding.weight").get_shape()
            assert rows in (84, 86) and width == 4
    with safe_open(out / "checkpoint.safetensors", "pt") as file:
        assert all(name.endswith(".step") for name in file.keys())  # noqa: SIM118 - no mapping


def test_a_run_goes_on_over_other_ranks_with_and_without_parts(two, three, recipe, tmp_path):
    recipe, out = dataclasses.replace(recipe, width=8), tmp_path / "changing"
    run(two, recipe, out, 2, shard=True, stop_after=1)
    run(three, recipe, out, 3, shard=True, resume=True, stop_after=2)
    assert len(part_files(out)) == 3
    train(recipe, out, resume=True, validate_every=4, stop_after=3)
    assert not list(out.glob("parts-*"))
    run(two, recipe, out, 2, shard=True, resume=True, stop_after=4)  # from a whole file
    run(three, recipe, out, 3, resume=True, stop_after=5)  # from parts, to a whole file
    run(two, recipe, out, 1, shard=True, resume=True, stop_after=6)
    run(two, recipe, out, 2, shard=True, resume=True)
    train(recipe, tmp_path / "whole", validate_every=4)
    changing, whole = figures(out), figures(tmp_path / "whole")
    assert changing == pytest.approx(whole, rel=TOLERANCE)
    losses = [key for key in whole if key[1] != "grad_norm"]
    assert [changing[key] for key in losses] == pytest.approx([whole[key] for key in losses], 1e-6)


@pytest.mark.parametrize("shard", [True, False])
def test_a_resumed_run_over_the_same_ranks_is_the_same_bit_for_bit(two, recipe, tmp_path, shard):
    recipe = dataclasses.replace(recipe, steps=4)
    run(two, recipe, tmp_path / "whole", 2, shard=shard)
    run(two, recipe, tmp_path / "stopped", 2, shard=shard, stop_after=2)
    run(two, recipe, tmp_path / "stopped", 2, shard=shard, resume=True)
    assert figures(tmp_path / "stopped") == figures(tmp_path / "whole")
    first, second = (about(tmp_path / name)["sha256"] for name in ("stopped", "whole"))
    assert first == second


def test_a_finished_run_has_one_whole_file(two, recipe, tmp_path):
    recipe = dataclasses.replace(recipe, steps=4)
    for name, shard in (("parts", True), ("whole", False)):
        run(two, recipe, tmp_path / name, 2, shard=shard, save_every=3)
    names = {path.name for path in (tmp_path / "parts").iterdir()}
    assert names == {"checkpoint.safetensors", "metrics.jsonl"}
    parts, whole = (about(tmp_path / name) for name in ("parts", "whole"))
    assert parts | {"sha256": set(parts["sha256"])} == whole | {"sha256": set(whole["sha256"])}
    sizes = {
        (tmp_path / name / "checkpoint.safetensors").stat().st_size for name in ("parts", "whole")
    }
    assert len(sizes) == 1


def weights_of(rank: int, recipe: Recipe, out: Path) -> list[torch.Tensor]:
    ended = train(recipe, out, stop_after=2, ranks=arrange(2, shard_parameters=True))
    return [weight.full_tensor().detach() for weight in ended.model.parameters()]


def test_an_unfinished_model_is_read_by_one_process(two, recipe, tmp_path):
    weights = two.run(weights_of, recipe, tmp_path / "run")[0]
    model = load_model(tmp_path / "run")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), weights, strict=True))
    assert generate(tmp_path / "run")[0] == 0
    begun = train(recipe, tmp_path / "new", init=tmp_path / "run", stop_after=1)
    assert begun.init == load_checkpoint(tmp_path / "run").digest


def test_a_sharded_run_begins_with_weights_in_parts(two, recipe, tmp_path):
    run(two, recipe, tmp_path / "first", 2, shard=True, stop_after=3)
    options = {"init": tmp_path / "first", "stop_after": 2}
    run(two, recipe, tmp_path / "parts", 2, shard=True, **options)
    train(recipe, tmp_path / "whole", validate_every=4, **options)
    assert figures(tmp_path / "parts") == pytest.approx(figures(tmp_path / "whole"), rel=CLOSE)
    run(two, recipe, tmp_path / "parts", 2, shard=True, **options | {"stop_after": 3})
    assert load_checkpoint(tmp_path / "parts").step == 3


def test_parts_that_a_killed_process_has_left_are_ignored_and_removed(two, recipe, tmp_path):
    out = tmp_path / "run"
    run(two, recipe, out, 2, shard=True, stop_after=2)
    torn = out / "parts-000003-0123456789ab"
    torn.mkdir()
    shutil.copy(part_files_of(out, 2)[0], torn)
    kept = out / "parts-of-mine"
    kept.mkdir()
    run(two, recipe, out, 2, shard=True, resume=True, stop_after=3)
    assert load_checkpoint(out).step == 3
    assert not torn.exists() and kept.exists()


def part_files_of(out: Path, step: int) -> list[Path]:
    (folder,) = out.glob(f"parts-{step:06d}-*")
    return sorted(folder.iterdir())


# Damaged and foreign parts


@pytest.fixture(scope="module")
def in_parts(two, recipe, tmp_path_factory) -> Path:
    """A folder with a checkpoint in two parts, as it was written."""
    out = tmp_path_factory.mktemp("parts") / "run"
    run(two, recipe, out, 2, shard=True, stop_after=1)
    return out


@pytest.fixture
def copy(in_parts, tmp_path) -> Path:
    """A copy to change."""
    return Path(shutil.copytree(in_parts, tmp_path / "run"))


def test_the_parts_as_they_were_written_are_taken(copy):
    before = len(unpickled)
    assert generate(copy)[0] == 0
    assert command("train", "--out", copy, "--resume")[0] == 0
    assert unpickled[before:] == []


def cut_short(parts: Path) -> None:
    path = parts / "shard-00002-model-00001-of-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def emptied(parts: Path) -> None:
    (parts / "shard-00001-model-00001-of-00001.safetensors").write_bytes(b"")


def gone(parts: Path) -> None:
    (parts / "shard-00002-model-00001-of-00001.safetensors").unlink()


def all_gone(parts: Path) -> None:
    shutil.rmtree(parts)


def one_more(parts: Path) -> None:
    shutil.copy(parts / "shard-00002-model-00001-of-00001.safetensors", parts / "x.safetensors")


def swapped(parts: Path) -> None:
    first, second = sorted(parts.iterdir())
    first.rename(parts / "x")
    second.rename(first)
    (parts / "x").rename(second)


def linked(parts: Path) -> None:
    first, _ = sorted(parts.iterdir())
    first.rename(parts.parent / "elsewhere")
    first.symlink_to(parts.parent / "elsewhere")


def a_linked_folder(parts: Path) -> None:
    parts.rename(parts.parent / "elsewhere")
    parts.symlink_to(parts.parent / "elsewhere")


def with_pickles(parts: Path) -> None:
    for path in list(parts.iterdir()):
        path.unlink()
    for name in (".metadata", "__0_0.distcp", "__1_0.distcp"):
        (parts / name).write_bytes(pickle.dumps(os.mkdir))


@pytest.mark.parametrize(
    "change",
    [cut_short, emptied, gone, all_gone, one_more, swapped, linked, a_linked_folder, with_pickles],
)
def test_damaged_and_foreign_parts_are_refused_in_one_line(copy, change):
    change(parts_of(copy))
    before = len(unpickled)
    assert_refused(copy)
    assert unpickled[before:] == []


def test_pickles_beside_the_parts_are_not_read(copy):
    for name in (".metadata", "__0_0.distcp"):
        (parts_of(copy) / name).write_bytes(pickle.dumps(os.mkdir))
    before = len(unpickled)
    assert generate(copy)[0] == 0
    assert unpickled[before:] == []


def test_any_changed_byte_is_refused(copy):
    draw = random.Random(0)
    for path in part_files(copy):
        content = path.read_bytes()
        header = 8 + int.from_bytes(content[:8], "little")
        places = [0, 7, 8, header - 1, header, len(content) - 1]
        for place in [
            *places,
            *draw.sample(range(header), 6),
            *draw.sample(range(len(content)), 6),
        ]:
            changed = bytearray(content)
            changed[place] ^= 1 << draw.randrange(8)
            path.write_bytes(changed)
            code, said = generate(copy)
            assert code == 2 and "damaged or foreign" in said and said.count("\n") == 1, place
        path.write_bytes(content)
    assert generate(copy)[0] == 0


STRANGE = [
    None,
    True,
    1,
    "",
    "x",
    "../parts-1-0123456789ab",
    "parts-1-0123456789ab",
    [],
    {},
    {"": 1},
]


def test_a_strange_description_of_parts_is_refused(copy):
    values = about(copy)
    (part, other), folder = values["parts"]["sha256"], values["parts"]["folder"]
    whole = values["parts"]["sha256"]
    changes: list[Any] = list(STRANGE)
    changes += [{"folder": folder, "sha256": x} for x in STRANGE]
    changes += [{"folder": x, "sha256": whole} for x in STRANGE]
    changes += [{"folder": folder, "sha256": whole | {part: x}} for x in [*STRANGE, "0" * 64]]
    changes += [{"folder": folder, "sha256": {part: whole[part]}}]
    changes += [{"folder": folder, "sha256": whole | {"../x.safetensors": whole[part]}}]
    changes += [{"folder": folder, "sha256": {part: whole[other], other: whole[part]}}]
    changes += [{"folder": folder, "sha256": whole, "more": 1}]
    for new in changes:
        write_about(copy, values | {"parts": new})
        code, said = generate(copy)
        assert code == 2 and "damaged or foreign" in said and said.count("\n") == 1, (new, said)
    del values["parts"]
    write_about(copy, values)
    assert_refused(copy)


def refusal(
    rank: int, recipe: Recipe, outs: list[Path], shard: bool, options: dict[str, Any]
) -> str:
    """The kind and text of a rank's error, else "none"."""
    began = time.process_time()  # which other work does not change
    try:
        train(recipe, outs[rank], ranks=arrange(len(outs), shard_parameters=shard), **options)
    except (ValueError, OSError) as error:
        assert time.process_time() - began < 10
        return f"{type(error).__name__}: {error}"
    return "none"


def changed_byte(parts: Path) -> None:
    _, second = sorted(parts.iterdir())
    content = bytearray(second.read_bytes())
    content[-1] ^= 1
    second.write_bytes(content)


@pytest.mark.parametrize("shard", [True, False])
@pytest.mark.parametrize("change", [changed_byte, gone, with_pickles])
def test_damage_stops_all_ranks_at_once(two, recipe, copy, shard, change):
    change(parts_of(copy))
    before = {path: path.lstat().st_mtime_ns for path in copy.rglob("*")}
    for said in two.run(refusal, recipe, [copy, copy], shard, {"resume": True}):
        assert re.search(
            "ValueError: (rank 1: )?expected a sparsering checkpoint in .* got a damaged", said
        )
        assert "\n" not in said
    assert {path: path.lstat().st_mtime_ns for path in copy.rglob("*")} == before


@pytest.mark.parametrize("shard", [True, False])
def test_a_rank_that_lacks_its_part_stops_all(two, recipe, copy, tmp_path, shard):
    """Each machine sees a disk of its own, and the second has lost its part."""
    other = Path(shutil.copytree(copy, tmp_path / "other"))
    gone(parts_of(other))
    said = two.run(refusal, recipe, [copy, other], shard, {"resume": True})
    assert all("are missing, or are of another one: shard-00002" in line for line in said)
    assert said[0].startswith("ValueError: rank 1: ") and not any("\n" in line for line in said)
    assert len(part_files(copy)) == 2 and load_checkpoint(copy).step == 1


def test_ranks_that_write_into_folders_of_their_own_are_told(two, recipe, tmp_path):
    outs = [tmp_path / "a", tmp_path / "b"]
    said = two.run(refusal, recipe, outs, True, {})
    assert all("expected a folder that all ranks share" in line for line in said)
    assert not any((out / "checkpoint.safetensors").exists() for out in outs)


def train_on_a_full_disk(rank: int, recipe: Recipe, out: Path) -> str:
    """The OSError of a rank, where rank 1 cannot write."""
    fsync = os.fsync
    if rank == 1:

        def full(number: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        os.fsync = full
    try:
        return refusal(rank, recipe, [out, out], True, {"resume": True, "save_every": 1})
    finally:
        os.fsync = fsync


def test_a_rank_without_space_leaves_the_checkpoint_whole(two, recipe, copy):
    said = two.run(train_on_a_full_disk, recipe, copy)
    assert all(re.search("OSError: rank 1: No space.*before is untouched", line) for line in said)
    assert not any("\n" in line for line in said)
    assert load_checkpoint(copy).step == 1
    assert len(part_files(copy)) == 2  # and no folder of the failed one
    run(two, recipe, copy, 2, shard=True, resume=True, stop_after=3)
    assert load_checkpoint(copy).step == 3


def test_a_folder_that_cannot_be_made_is_told_before_the_training(two, recipe, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    out = tmp_path / "file" / "run"
    for line in two.run(refusal, recipe, [out, out], True, {}):
        assert re.search("OSError: rank 0: Not a directory while writing parts", line)
        assert "\n" not in line


def run_until_error(command: list[str], log: Path) -> None:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    with open(log, "w") as file:
        done = subprocess.run(command, stdout=file, stderr=file, env=environment, timeout=300)
    assert done.returncode != 0


@SLOW
def test_one_of_the_ranks_that_torchrun_started_says_one_sentence(copy, recipe, tmp_path):
    changed_byte(parts_of(copy))
    before = {path: path.lstat().st_mtime_ns for path in copy.rglob("*")}
    options = ["--shard", "--sequence-parallel", 2, "--timeout", 600]
    words = [*train_words(recipe, copy), *options, "--resume"]
    run_until_error(torchrun(2, *words), tmp_path / "log")  # and far before the ranks' timeout
    said = [line for line in (tmp_path / "log").read_text().splitlines() if "damaged" in line]
    (line,) = said  # of the rank that read it; the other waits
    assert line.startswith("sparsering: ") and "sparsering: rank" not in line
    assert {path: path.lstat().st_mtime_ns for path in copy.rglob("*")} == before


def error_without_safetensors(rank: int, recipe: Recipe, out: Path) -> str:
    """The text of a rank's ImportError, where safetensors is not installed."""
    loaded = {name: x for name, x in sys.modules.items() if name.split(".")[0] == "safetensors"}
    sys.modules.update(dict.fromkeys([*loaded, "safetensors"]))
    try:
        train(recipe, out, ranks=arrange(2, shard_parameters=True))
    except ImportError as error:
        return str(error)
    finally:
        del sys.modules["safetensors"]
        sys.modules.update(loaded)
    return "none"


def test_without_safetensors_all_ranks_say_how_to_install_it(two, recipe, tmp_path):
    said = two.run(error_without_safetensors, recipe, tmp_path / "run")
    assert all("checkpoints need safetensors; " in line for line in said), said


def test_shard_needs_torchrun(tmp_path, capsys):
    assert main(["train", "--out", str(tmp_path / "run"), "--shard"]) == 2
    assert "--shard and --timeout need processes started by torchrun" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


# Kills


def kill(launcher: subprocess.Popen | ForkedCommand, log: Path, rank: int) -> None:
    """Kills a rank, as soon as torchrun has started it (again)."""
    forked = isinstance(launcher, ForkedCommand)
    while True:
        assert launcher.poll() is None, log.read_text()
        with contextlib.suppress(AssertionError, ProcessLookupError, FileNotFoundError):
            pid = launcher.worker(rank) if forked else worker(launcher.pid, rank)
            os.kill(pid, signal.SIGKILL)
            return
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("kills", "starting", "seed"),
    [
        (1, 0, 0),
        pytest.param(2, 0, 0, marks=SLOW),
        *(pytest.param(3, 1, seed, marks=SLOW) for seed in (1, 2, 3)),
    ],
)
def test_kills_at_random_instants_lose_nothing(two, recipe, tmp_path, kills, starting, seed):
    """Drawn ranks are killed between drawn steps, and others while they start.

    torchrun goes on from the newest complete checkpoint each time, with the same bits. A single
    kill is one of forked ranks.
    """
    draw = random.Random(seed)
    steps = 20 if kills == 1 else 60 * kills
    recipe = dataclasses.replace(recipe, steps=steps)  # the kills come in the first half
    out, log = tmp_path / "run", tmp_path / "log"
    options = ["--sequence-parallel", 2, "--shard", "--timeout", 30]
    words = [*train_words(recipe, out), *options, "--save-every", 2, "--validate-every", 1000]
    command = torchrun(2, "--max-restarts", kills + starting + 1, *words)
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    process: subprocess.Popen | ForkedCommand
    if kills == 1:
        process = ForkedCommand("torchrun", command[3:], log)
    else:
        with open(log, "w") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
    try:
        for number, step in enumerate(sorted(draw.sample(range(1, recipe.steps // 2), kills))):
            watch(process, log, lambda n=step: has_reached(out, n))
            time.sleep(draw.random() / 25)  # somewhere in a step or while it saves
            kill(process, log, draw.randrange(2))
            time.sleep(0.3)  # until the other rank is no longer saving
            reached = max(step for step, _ in figures(out))
            assert load_checkpoint(out).step >= reached - 2
            if number < starting:
                time.sleep(1 + 5 * draw.random())
                kill(process, log, draw.randrange(2))
        assert process.wait(timeout=120) == 0, log.read_text()
    finally:
        process.terminate()
        process.wait()
    run(two, recipe, tmp_path / "undisturbed", 2, shard=True)
    disturbed, undisturbed = (
        {key: x for key, x in figures(folder).items() if key[1] != "validation_loss"}
        for folder in (out, tmp_path / "undisturbed")
    )
    assert disturbed == undisturbed
    assert about(out)["sha256"] == about(tmp_path / "undisturbed")["sha256"]
    assert load_checkpoint(out).finished and not list(out.glob("parts-*"))
