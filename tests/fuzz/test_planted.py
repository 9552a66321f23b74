"""Plants defects all over the package; a minute of attack must find each."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

DEFECTS = {
    "the kernel reads rows in half precision as floats": (
        "calls",
        "kernels/cpu/results.h",
        "merge(part, lses[i], sums.row<S>(row), old, width)",
        "merge(part, lses[i], sums.row<float>(row), old, width)",
    ),
    "the kernel's cap has another slope": (
        "calls",
        "kernels/cpu/scores.h",
        "(Vec(1.f) - t * t).store(slope + i, n);",
        "(Vec(1.f) - t).store(slope + i, n);",
    ),
    "a token is drawn to those that it is pushed from in space": (
        "calls",
        "kernels/cpu/coordinates.h",
        "to[d] -= sum_of_lanes(total);",
        "to[d] += sum_of_lanes(total);",
    ),
    "gather takes the bias of another entry": (
        "calls",
        "kernels/gather/chunk_extras.py",
        "return bias[entries].gather(-1, slots)",
        "return bias[entries].gather(-1, slots.flip(-1))",
    ),
    "pairs of listed blocks are laid where they have no slot": (
        "calls",
        "layouts/terms.py",
        "[(grid, part) for grid, part in found if grid != plain]",
        "[]",
    ),
    "a repeated key of a list counts twice": (
        "calls",
        "kernels/cpu/lists/distinct.h",
        "if (i == 0 || sorted_.get()[i] != sorted_.get()[i - 1]) {",
        "if (i >= 0) {",
    ),
    "a query reads the list of its neighbour": (
        "calls",
        "kernels/cpu/lists/call.h",
        "to.read(lists + at, places",
        "to.read(lists + at - (query ? slots : 0), places",
    ),
    "pairs of a list and of the mask beside it count twice": (
        "calls",
        "layouts/lists.py",
        "of_branch = tuple(x.within(Not(own)) for x in of_branch)",
        "pass",
    ),
    "a list's sink is that of the first head": (
        "calls",
        "kernels/cpu/call.py",
        "lse.copy_(sink)",
        "lse.copy_(sink[:, :1])",
    ),
    "a cache evicts keys one token early": (
        "caches",
        "decoding/cache_state.py",
        "alive = (positions >= 0) & (last.amax(0) >= oldest)",
        "alive = (positions >= 0) & (last.amax(0) > oldest)",
    ),
    "siblings of a draft see each other": (
        "caches",
        "decoding/drafts.py",
        "(parent + 1 for parent in draft.parents)",
        "range(len(draft.parents))",
    ),
    "a draft's tokens are one too deep": (
        "caches",
        "patterns/tree.py",
        "depth.append(depth[place] + size[place] if place >= 0 else 0)",
        "depth.append(depth[place] + size[place] + (place == 0) if place >= 0 else 0)",
    ),
    "keys of a draft stay in the order of its tokens": (
        "caches",
        "decoding/drafts.py",
        "(x[:, :, index] for x in draft[:2])",
        "(x[:, :, : len(index)] for x in draft[:2])",
    ),
    "rejected tokens of a draft stay": (
        "caches",
        "decoding/drafts.py",
        "key, value = (x[:, :, index] for x in draft[:2])",
        "key, value = draft[:2]",
    ),
    "a window along a path counts packed indices": (
        "caches",
        "patterns/tree.py",
        "p, k = (nodes.depth_of(x.clamp(0, most)) for x in (p, k))",
        "p, k = (x.clamp(0, most) for x in (p, k))",
    ),
    "positions count the tokens of a draft before it is kept": (
        "caches",
        "decoding/kv_cache.py",
        "self._state = state.changed(draft=draft)",
        "self._state = state.advanced([1] * len(state.lengths), 0).changed(draft=draft)",
    ),
    "a difference of masks loses what it should keep": (
        "calls",
        "layouts/lower.py",
        "return Negated(condition(part, frame, in_document))",
        "return condition(part, frame, in_document)",
    ),
    "a noisy block sees its own clean block": (
        "calls",
        "patterns/blocks.py",
        "q_block + half - 1, q_block)  # last clean block",
        "q_block + half, q_block)  # last clean block",
    ),
    "each round of a ring adds the sink": (
        "rings",
        "distributed/rank.py",
        "options = dict(self.options.changed(sink=None).in_use)",
        "options = dict(self.options.in_use)",
    ),
    "top_p keeps one block less": (
        "selections",
        "selection/choose.py",
        "before = weight.cumsum(-1) - weight",
        "before = weight.cumsum(-1)",
    ),
    "the depth below a joined chain counts its last node alone": (
        "trees",
        "patterns/tree.py",
        "depth.append(depth[place] + size[place] if place >= 0 else 0)",
        "depth.append(depth[place] + lengths[up] if place >= 0 else 0)",
    ),
    "children of a node without tokens are roots": (
        "trees",
        "patterns/tree.py",
        "lengths[parent] else above[parent])",
        "lengths[parent] else -1)",
    ),
    "pieces of a long column repeat all heads of a group but the first": (
        "long",
        "kernels/cpu/backward.h",
        "const int64_t begin = std::max<int64_t>(row_ptr[0], row_ptr[0] + item.begin - first);",
        "const int64_t begin = first ? row_ptr[0] : row_ptr[0] + item.begin;",
    ),
    "more than four threads do work twice": (
        "long",
        "kernels/cpu/machine/threads.h",
        "for (int64_t i = next++; i < count; i = next++) {",
        "for (int64_t i = thread; i < count; i += std::min<int64_t>(threads, 4)) {",
    ),
    "a batch of gradients of a pattern of fixed batch is its first": (
        "ways",
        "route/differentiable.py",
        "rows = ((x.select(d, i) if",
        "rows = ((x.select(d, 0) if",
    ),
    "a forked process inherits a lock": (
        "ways",
        "ground/once.py",
        "with one_thread(), unseen(instance):",
        "with vars(sys).setdefault('lock', __import__('threading').RLock()), unseen(instance):",
    ),
    "another thread sees a property that is not computed yet": (
        "ways",
        "ground/once.py",
        "        with one_thread(), unseen(instance):",
        "        vars(instance)[self.name] = None\n        with one_thread(), unseen(instance):",
        "return vars(instance).setdefault(self.name, value)",
        "vars(instance)[self.name] = value; return value",
    ),
    "a compiled call has the lengths of the call before": (
        "ways",
        "patterns/expression.py",
        "return _parse(text, tuple(tensors), owned=True)",
        "return vars(parse_owned).setdefault(text, _parse(text, tuple(tensors), owned=True))",
    ),
    "a compiled call has its documents in another order": (
        "ways",
        "ground/arguments.py",
        'name: value.detach().to("cpu", torch.int64, copy=True)}',
        'name: value.detach().to("cpu", torch.int64, copy=True).roll(1, -1)}',
    ),
    "other lengths make a second graph": (
        "ways",
        "patterns/written.py",
        "if self._data is not None and torch.compiler.is_compiling():",
        "if self._data is not None and not torch.compiler.is_compiling():",
    ),
    "the compiled kernel cuts long segments one token early": (
        "layouts",
        "layouts/lower.py",
        "numbers += (2 if isinstance(rule, Congruent) else 4, size)",
        "numbers += (2, size) if isinstance(rule, Congruent) else (4, size - (size > 999))",
    ),
    "packed documents of one token are joined": (
        "models",
        "integrations/transformers/call/masks.py",
        "return text[:, 1:] <= text[:, :-1]",
        "return text[:, 1:] < text[:, :-1]",
    ),
    "results of padded steps are in the order of their keys": (
        "models",
        "integrations/transformers/call/sparse_cache.py",
        "lengths, extras), inverse)",
        "lengths, extras), order)",
    ),
    "each rank counts positions from 0": (
        "ranks",
        "integrations/transformers/ranks/parallel.py",
        'arguments["position_ids"] = ids',
        'arguments["position_ids"] = ids - ids[:, tokens[:1]]',
    ),
    "a cache attends before all keys have come": (
        "caches",
        "layouts/lookahead.py",
        "if begin >= end or end >= sequence.frame.kv_len:",
        "if begin >= 0:",
    ),
    "later keys are looked for behind a page alone": (
        "caches",
        "layouts/lookahead.py",
        "search.lowest(begin, end, begin + 1)",
        "search.lowest(begin, end, end)",
    ),
    "a page has keys past the end of its sequence": (
        "caches",
        "decoding/steps.py",
        "positions = positions.masked_fill(positions >= state.total, -1)",
        "positions = positions.clone()",
    ),
    "a denoising step is kept": (
        "caches",
        "decoding/kv_cache.py",
        "        if keep:  # without `keep`, the new keys",
        "        if True:  # without `keep`, the new keys",
    ),
    "a draft holds the tensors of its caller": (
        "caches",
        "decoding/drafts.py",
        "key, value = tokens.key.clone(), tokens.value.clone()",
        "key, value = tokens.key, tokens.value",
    ),
    "a crop cuts a block of which tokens have seen all": (
        "caches",
        "decoding/later_keys.py",
        "if pair := first_ahead(self.pattern, 0, length, tokens):",
        "if pair := first_ahead(self.pattern, 0, 0, tokens):",
    ),
    "gradients of joined shards are summed before ranks agree": (
        "steps",
        "distributed/shards.py",
        'agree_to_begin(group, "the backward pass of unshard", grad, **sizes)',
        "pass",
    ),
    "rows of cross attention go back before ranks agree": (
        "steps",
        "nn/over_ranks.py",
        "agree_to_begin(exchange.group, call, grad, batch=len(grad), dtype=grad.dtype)",
        "pass",
    ),
    "a constant of graphs is a list": (
        "ways",
        "kernels/triton/call.py",
        'return (*found, "it needs a GPU (TRITON_INTERPRET=1 tries its kernels without one)")',
        'return [*found, "it needs a GPU"]',
        "found = [*_machine_reasons(tuple({x.device.index for x in tensors if x.is_cuda}) or (None,))]",  # noqa: E501
        "found: Any = _machine_reasons((None,))",
    ),
    "typical trees lose the length that they are for": (
        "trees",
        "layouts/terms.py",
        "replace(tree, pattern=inner, length=own_length)",
        "replace(tree, pattern=inner)",
    ),
    "queries of a static cache stand at the end of its room": (
        "models",
        "integrations/transformers/call/sources.py",
        "q_start = mask.first_query",
        "q_start = key.shape[2] - q_len",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DEFECTS)
def test_a_minute_of_attack_finds_a_planted_defect(name, tmp_path):
    kind, file, *changes = DEFECTS[name]
    for folder in ("sparsering", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    planted = tmp_path / "sparsering" / file
    for right, wrong in zip(changes[::2], changes[1::2], strict=True):
        text = planted.read_text()
        assert text.count(right) == 1, "the defect has no place any more"
        planted.write_text(text.replace(right, wrong))
    path = os.pathsep.join([str(tmp_path / "tests"), str(tmp_path)])
    environment = os.environ | {"PYTHONPATH": path}
    if file.endswith(".h"):  # compile before the attack begins, into a temporary cache
        environment["SPARSERING_CACHE"] = str(tmp_path / "cache")
        build = [sys.executable, "-m", "sparsering", "build"]
        subprocess.run(build, cwd=tmp_path, env=environment, check=True, capture_output=True)
    attack = [sys.executable, "-m", "fuzz", "--kinds", kind, "--seconds", "600", "--seed", "1"]
    found = subprocess.run(
        attack, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert found.returncode == 1, found.stdout + found.stderr
    assert f"## FAULT in {kind}" in found.stdout, found.stdout + found.stderr
    spent = re.search(r"cases in (\d+) processor seconds", found.stdout)
    assert int(spent[1]) <= 120  # of the processor; a quiet one takes a minute at most


@pytest.mark.parametrize("name", DEFECTS)
def test_each_planted_defect_has_its_place(name):
    _, file, *changes = DEFECTS[name]
    text = (ROOT / "sparsering" / file).read_text()
    assert [text.count(right) for right in changes[::2]] == [1] * (len(changes) // 2)
