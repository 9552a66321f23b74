"""Modules over ranks: outputs and gradients of one process, the bytes of the plan, refusals."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.pages import ROOT, blocks
from helpers.ring_workers import MAX_WORLD, groups, workers_of
from helpers.thinned import thinned
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import sparsering as sr
from sparsering.distributed import RingMismatchError, RingPlan, last_traffic, shard, unshard
from sparsering.nn import MultiheadAttention

workers = workers_of(MAX_WORLD)
four = workers_of(4)

E, H, B = 12, 3, 2
PATTERNS = {
    "full": sr.Full(),
    "causal": sr.Causal(),
    "window": sr.SlidingWindow(5, 2),
    "longnet": sr.LongNet((8, 32), (1, 4)),
    "global": sr.SlidingWindow(3, 3) | sr.GlobalTokens(2),
}
PAGE = ROOT / "docs" / "ring.md"
CUTS = "chunks:1,0,0,1,0"  # of two ranks


def module(seed: int = 0, **options: Any) -> MultiheadAttention:
    torch.manual_seed(seed)
    made = MultiheadAttention(E, H, dtype=torch.float64, **options)
    with torch.no_grad():
        for x in made.parameters():  # torch's biases begin at 0
            x.add_(0.1 * torch.randn_like(x))
    return made


def drawn(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def padding(keys: int) -> Tensor:
    """Marks the last keys of the first batch entry and some of the second as padding."""
    index = torch.arange(keys)
    return torch.stack((index >= keys - keys // 3, index % 5 == 2))


def results(
    made: nn.Module, inputs: list[Tensor], weight: Tensor, **call: Any
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Output, gradients of the distinct inputs, and gradients of the parameters."""
    leaves = {id(x): x.clone().requires_grad_() for x in inputs}
    out, none = made(*(leaves[id(x)] for x in inputs), need_weights=False, **call)
    assert none is None
    (out * weight).sum().backward()
    return out.detach(), [x.grad for x in leaves.values()], [x.grad for x in made.parameters()]


def tensors(length: int, keys: int | None, batch_first: bool) -> tuple[list[Tensor], Tensor]:
    """Query, key and value of a call (one tensor if `keys` is None), and weights of its loss."""
    x, weight = drawn(1, B, length, E), drawn(2, B, length, E)
    inputs = [x, x, x] if keys is None else [x, drawn(3, B, keys, E), drawn(4, B, keys, E)]
    if not batch_first:
        swapped = {id(t): t.transpose(0, 1).contiguous() for t in (*inputs, weight)}
        inputs, weight = [swapped[id(t)] for t in inputs], swapped[id(weight)]
    return inputs, weight


def of_ranks(
    rank: int, world: int, sharding: str, sizes: tuple[int, int | None], options: dict[str, Any]
) -> tuple[list[Tensor], list[Tensor]]:
    """Whole results (output, gradients of inputs), and this rank's part of the others."""
    options = {"batch_first": True, "is_causal": False, "padded": False, "seed": None, **options}
    batch_first, causal, padded, seed = (
        options.pop(x) for x in ("batch_first", "is_causal", "padded", "seed")
    )
    place: Any = {"dim": int(batch_first), "group": groups[world], "sharding": sharding}
    options["pattern"] = PATTERNS[options["pattern"]]
    made = module(batch_first=batch_first, group=groups[world], sharding=sharding, **options)
    inputs, weight = tensors(*sizes, batch_first)
    own = {id(t): shard(t, **place) for t in inputs}
    mask = None
    if padded:
        whole = padding(sizes[0] if sizes[1] is None else sizes[1])
        mask = shard(whole, dim=1, group=groups[world], sharding=sharding)
    if seed is not None:
        torch.manual_seed(seed + rank)  # that of rank 0 decides
    given = [own[id(t)] for t in inputs]
    out, of_inputs, of_parameters = results(
        made, given, shard(weight, **place), key_padding_mask=mask, is_causal=causal
    )
    assert out.shape == given[0].shape
    return [unshard(t.contiguous(), **place) for t in (out, *of_inputs)], of_parameters


def of_one(sizes: tuple[int, int | None], options: dict[str, Any]) -> tuple[list, list]:
    options = {"batch_first": True, "is_causal": False, "padded": False, "seed": None, **options}
    batch_first, causal, padded, seed = (
        options.pop(x) for x in ("batch_first", "is_causal", "padded", "seed")
    )
    options["pattern"] = PATTERNS[options["pattern"]]
    made = module(batch_first=batch_first, **options)
    inputs, weight = tensors(*sizes, batch_first)
    mask = padding(sizes[0] if sizes[1] is None else sizes[1]) if padded else None
    if seed is not None:
        torch.manual_seed(seed)
    call = {"key_padding_mask": mask, "is_causal": causal}
    out, of_inputs, of_parameters = results(made, inputs, weight, **call)
    return [out, *of_inputs], of_parameters


def compare(found: list[tuple[list, list]], expected: tuple[list, list]) -> None:
    """Outputs within 1e-12, gradients within 1e-10; parameters' gradients sum over ranks."""
    for whole, _ in found:
        for number, (got, wanted) in enumerate(zip(whole, expected[0], strict=True)):
            bound = 1e-10 if number else 1e-12
            torch.testing.assert_close(got, wanted, rtol=0, atol=bound)
    for number, wanted in enumerate(expected[1]):
        got = sum(of_parameters[number] for _, of_parameters in found)
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-10)


SELF, CROSS = (37, None), (21, 40)
CASES = {
    "plain": (SELF, {"pattern": "full"}),
    "causal, tokens first": (SELF, {"pattern": "window", "is_causal": True, "batch_first": False}),
    "padded": (SELF, {"pattern": "causal", "padded": True}),
    "longnet, padded": (SELF, {"pattern": "longnet", "padded": True, "is_causal": True}),
    "global tokens": (SELF, {"pattern": "global"}),
    "dropout": (SELF, {"pattern": "causal", "dropout": 0.3, "seed": 5}),
    "scale": (SELF, {"pattern": "window", "scale": 0.2, "bias": False}),
    "cross, as many": ((24, 24), {"pattern": "full", "padded": True}),
    "cross, more keys": (CROSS, {"pattern": "full", "padded": True, "batch_first": False}),
    "cross, fewer keys": ((40, 21), {"pattern": "window", "padded": True}),
    "cross, fewer keys, no mask": ((40, 9), {"pattern": "full", "is_causal": True}),
    "cross, dropout": (CROSS, {"pattern": "longnet", "dropout": 0.3, "seed": 3}),
    "cross, dropout, fewer keys": ((30, 21), {"pattern": "full", "dropout": 0.3, "seed": 3}),
    "three tokens": ((3, None), {"pattern": "causal", "padded": True}),
    "cross, two keys": ((9, 2), {"pattern": "full"}),
    "cross, no keys": ((9, 0), {"pattern": "full"}),
    "no tokens": ((0, None), {"pattern": "causal"}),
}
PLACES = [(2, CUTS), *((n, x) for n in (1, 2, 3, 4, 8) for x in ("contiguous", "zigzag"))]


@pytest.mark.parametrize(("name", "place"), thinned(11, CASES, PLACES))
def test_ranks_compute_what_one_process_does(workers, name, place):
    world, sharding = place
    sizes, options = CASES[name]
    compare(
        workers.run(of_ranks, world, sharding, sizes, options, world=world), of_one(sizes, options)
    )


def traffic(rank: int, name: str, sharding: str, padded: bool) -> tuple[int, int]:
    """Bytes that a forward pass brought to this rank, and that the plan says."""
    place: Any = {"dim": 1, "group": groups[4], "sharding": sharding}
    made = module(batch_first=True, pattern=PATTERNS[name], group=groups[4], sharding=sharding)
    x = shard(drawn(1, B, 300, E), **place)
    mask = shard(padding(300), **place) if padded else None
    made(x, x, x, need_weights=False, key_padding_mask=mask)
    pattern = PATTERNS[name] & sr.KeyMask(~padding(300)) if padded else PATTERNS[name]
    plan = RingPlan.build(pattern, 300, 4, num_heads=H, sharding=sharding)
    expected = plan.bytes_received(rank, head_dim=E // H, dtype=x.dtype)
    return last_traffic().received_bytes, B * expected


@pytest.mark.covering(2)
@pytest.mark.parametrize("sharding", ("contiguous", "zigzag"))
@pytest.mark.parametrize("padded", (False, True))
@pytest.mark.parametrize("name", PATTERNS)
def test_a_call_moves_the_bytes_of_the_plan(four, name, padded, sharding):
    moved = four.run(traffic, name, sharding, padded)
    assert all(got == expected for got, expected in moved), moved
    assert name == "longnet" or sum(got for got, _ in moved) > 0


def message(kind: type, function: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(kind) as raised:
        function(*args, **kwargs)
    return str(raised.value)


def refusals(rank: int) -> dict[str, str]:
    """Messages by what was refused. Only rank 0 calls: a message to the others would wait."""
    if rank:
        return {}
    x, wide = drawn(1, B, 6, E), {"batch_first": True, "group": groups[4]}
    made = module(**wide)
    nested = torch.nested.nested_tensor([x[0], x[1]])
    calls = {
        "attn_mask": (made, (x, x, x), {"attn_mask": torch.zeros(6, 6)}),
        "need_weights": (made, (x, x, x), {"need_weights": True}),
        "NestedTensor": (made, (nested, nested, nested), {}),
        "add_bias_kv": (module(add_bias_kv=True, **wide), (x, x, x), {}),
        "add_zero_attn": (module(add_zero_attn=True, **wide), (x, x, x), {}),
    }
    return {
        name: message(NotImplementedError, module, *inputs, **{"need_weights": False, **call})
        for name, (module, inputs, call) in calls.items()
    } | {"default": message(NotImplementedError, made, x, x, x)}


def test_options_are_refused_by_name_without_a_message(four):
    found = four.run(refusals)[0]
    assert "need_weights" in found.pop("default")
    assert len(found) == 5
    for name, text in found.items():
        assert f"does not take {name};" in text, (name, text)


def faults(rank: int, name: str) -> str:
    """The error of this rank where ranks do not fit one another."""
    place: Any = {"batch_first": True, "group": groups[4]}
    made, x, call = module(**place), drawn(1, B, 5, E), {"need_weights": False}
    y = x
    kind: type = RingMismatchError
    if name == "length":
        x = y = drawn(1, B, 3 + (rank == 1), E)
    elif name == "keys":
        y = drawn(1, B, 3 + (rank == 1), E)
    elif name == "mask" and rank == 2:
        call["key_padding_mask"] = torch.zeros(B, 5, dtype=torch.bool)
    elif name == "batch" and rank == 2:
        x = y = x[:1]
    elif name == "causal":
        call["is_causal"] = rank == 2
    elif name == "sharding" and rank == 2:
        made = module(sharding="zigzag", **place)
    elif name == "width" and rank == 2:
        x, kind = x[..., :-1], ValueError
    elif name == "floats" and rank == 2:
        call["key_padding_mask"], kind = torch.full((B, 5), 0.5), NotImplementedError
    elif name == "pattern":
        made, kind = module(pattern=sr.from_mask_mod(lambda b, h, q, k: q >= k), **place), Exception
        y = drawn(1, B, 3, E)
    text = message(kind, made, x, y, y, **call)
    made, x = module(**place), drawn(1, B, 5, E)
    assert made(x, x, x, need_weights=False)[0].shape == x.shape  # the group stays usable
    return text


@pytest.mark.parametrize(
    ("name", "words"),
    {
        "length": "contiguous' gives rank 0 4 of 13 tokens, got 3",
        "keys": "contiguous' gives rank 0 4 of 13 tokens, got 3",
        "mask": "key_padding_mask",
        "batch": "batch size",
        "causal": "pattern",
        "sharding": "sharding",
        "width": "refused its batch",
        "floats": "refused its batch",
        "pattern": "which counts them",
    }.items(),
)
def test_ranks_that_do_not_fit_raise_on_every_rank(four, name, words):
    found = four.run(faults, name)
    own = {"width": "must be [batch", "floats": "floats other than 0"}.get(name, words)
    for rank, text in enumerate(found):
        assert (own if rank == 2 else words) in text, (rank, text)


def copies(rank: int) -> None:
    made, x = module(batch_first=True, group=groups[4]), drawn(1, B, 5, E)
    call = {"need_weights": False}
    expected = made(x, x, x, **call)[0]
    assert made.group is groups[4]
    for copied in (copy.deepcopy(made), copy.copy(made), pickle.loads(pickle.dumps(made))):
        assert "set module.group" in message(RuntimeError, copied, x, x, x, **call)
        assert "set module.group" in message(RuntimeError, copy.deepcopy(copied), x, x, x, **call)
        copied.group = groups[4]
        assert torch.equal(copied(x, x, x, **call)[0], expected)
        copied.group = None
        assert copied(x, x, x)[1].shape == (B, 5, 5)
    mesh = init_device_mesh("cpu", (4,))
    made.group = mesh
    assert made.group is mesh.get_group()
    assert torch.equal(made(x, x, x, **call)[0], expected)
    cube = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp", "heads", "tokens"))
    assert "one axis" in message(ValueError, setattr, made, "group", cube)
    assert "ProcessGroup" in message(TypeError, setattr, made, "group", "world")
    assert "depends on the pattern" in message(ValueError, module, sharding="auto")
    names = {"group": groups[4], "sharding": "chunks:4"}
    assert "sharding must be" in message(ValueError, module, **names)
    alone = module(batch_first=True)
    assert list(alone.state_dict()) == list(made.state_dict())
    assert all(map(torch.equal, alone.state_dict().values(), made.state_dict().values()))
    assert copy.deepcopy(alone).group is None
    model = nn.Sequential(nn.MultiheadAttention(E, H, dtype=torch.float64, batch_first=True))
    sr.nn.convert(model, sr.Causal())
    model[0].group = groups[4]
    assert model[0](x, x, x, **call)[0].shape == x.shape


def test_copies_lose_their_group_until_it_is_set(four):
    four.run(copies)


def dropout_of_rank(rank: int, seed: int | None) -> Tensor:
    made, x = module(batch_first=True, dropout=0.5, group=groups[2]), drawn(1, B, 5, E)
    if seed is not None:
        torch.manual_seed(seed)
    first = made(x, x, x, need_weights=False)[0]
    assert not torch.equal(first, made(x, x, x, need_weights=False)[0])
    made.eval()
    assert torch.equal(*(made(x, x, x, need_weights=False)[0] for _ in range(2)))
    return first.detach()


def test_dropout_follows_the_seed_of_rank_0(four):
    first, again, other = (torch.cat(four.run(dropout_of_rank, x, world=2), 1) for x in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


class Model(nn.Module):
    """An encoder layer and a decoder layer of torch's, with modules of ours in their places."""

    recomputes = False

    def __init__(self, **place: Any) -> None:
        super().__init__()
        torch.manual_seed(7)
        layer = {"dropout": 0.0, "batch_first": True, "dtype": torch.float64}
        self.encoder = nn.TransformerEncoderLayer(E, H, 16, **layer)
        self.decoder = nn.TransformerDecoderLayer(E, H, 16, **layer)
        sr.nn.convert(self, sr.SlidingWindow(9, 9))
        for x in self.modules():
            if isinstance(x, MultiheadAttention) and place:
                x.sharding, x.group = place["sharding"], place["group"]

    def forward(self, source: Tensor, target: Tensor, mask: Tensor) -> Tensor:
        if self.recomputes:
            memory = checkpoint(
                self.encoder, source, src_key_padding_mask=mask, use_reentrant=False
            )
        else:
            memory = self.encoder(source, src_key_padding_mask=mask)
        return self.decoder(target, memory, tgt_is_causal=True, memory_key_padding_mask=mask)


def model_data() -> tuple[Tensor, ...]:
    return drawn(1, B, 34, E), drawn(2, B, 19, E), padding(34), drawn(3, B, 19, E)


def of_model(rank: int, kind: str, sharding: str) -> tuple[Tensor, list[Tensor]]:
    """Whole output and gradients of a model whose tokens two or four ranks share."""
    if kind in ("fsdp", "ddp"):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
        axis, part = mesh["sp"], mesh["dp"].get_local_rank()
    else:
        mesh = axis = init_device_mesh("cpu", (4,))
    place: Any = {"group": axis.get_group(), "sharding": sharding}
    model: Any = Model(**place)
    model.recomputes = kind == "recomputed"
    own = [shard(x, dim=1, **place) for x in model_data()]
    if kind in ("fsdp", "ddp"):  # each half of the mesh has one entry of the batch
        own = [x[part : part + 1] for x in own]
    if kind.startswith("fsdp"):
        shards: DeviceMesh = mesh["dp"] if kind == "fsdp" else mesh
        for layer in (model.encoder, model.decoder):
            fully_shard(layer, mesh=shards)
        fully_shard(model, mesh=shards)
    elif kind.startswith("ddp"):
        model = DistributedDataParallel(model)
    *inputs, weight = own
    out = model(*inputs)
    (out * weight).sum().backward()
    grads = []
    for x in model.parameters():
        grad = x.grad
        if kind.startswith("fsdp"):
            grad = grad.full_tensor() * shards.size()  # FSDP divides by the size of its axis
            if kind == "fsdp":
                dist.all_reduce(grad, group=axis.get_group())
        elif kind.startswith("ddp"):
            grad = 4 * grad
        else:
            dist.all_reduce(grad)
        grads.append(grad)
    whole = unshard(out.detach(), dim=1, **place)
    if kind in ("fsdp", "ddp"):
        parts = [torch.empty_like(whole) for _ in range(2)]
        dist.all_gather(parts, whole, group=mesh["dp"].get_group())
        whole = torch.cat(parts)
    return whole, grads


KINDS = ("plain", "recomputed", "ddp", "fsdp", "ddp of one axis", "fsdp of one axis")


@pytest.mark.covering(1)
@pytest.mark.parametrize("sharding", ("contiguous", "zigzag"))
@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_torch_under_ddp_and_fsdp(four, kind, sharding):
    model, (*inputs, weight) = Model(), model_data()
    out = model(*inputs)
    (out * weight).sum().backward()
    for whole, grads in four.run(of_model, kind, sharding):
        torch.testing.assert_close(whole, out.detach(), rtol=0, atol=1e-12)
        for got, x in zip(grads, model.parameters(), strict=True):
            torch.testing.assert_close(got, x.grad, rtol=0, atol=1e-10)


def in_eval(rank: int) -> Tensor:
    """An encoder layer in eval mode, where torch would fuse its own attention; without a batch."""
    place: Any = {"group": groups[2], "sharding": "contiguous"}
    model, (source, _, mask, _) = Model(**place).eval(), model_data()
    own, mask = (shard(x, dim=1, group=groups[2]) for x in (source, mask))
    with torch.no_grad():
        out = model.encoder(own, src_key_padding_mask=mask)
        one = model.encoder.self_attn(own[1], own[1], own[1], mask[1], need_weights=False)[0]
        both = model.encoder.self_attn(own, own, own, mask, need_weights=False)[0]
    torch.testing.assert_close(one, both[1], rtol=0, atol=1e-12)
    return out


def test_in_eval_mode_and_without_a_batch(four):
    model, (source, _, mask, _) = Model().eval(), model_data()
    expected = model.encoder(source, src_key_padding_mask=mask).detach()
    found = torch.cat(four.run(in_eval, world=2), 1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def of_the_page(rank: int, whole: bool) -> dict[str, Tensor]:
    """Gradients that the code of docs/ring.md leaves; on one rank of four, or in one process."""
    code = next(x.code for x in blocks(PAGE.read_text(encoding="utf-8")) if "convert(" in x.code)
    names = {"pattern": PATTERNS["longnet"], "torch": torch, "dist": dist, "shard": shard}
    if whole:
        code = code.replace("dist.group.WORLD", "None")
        names["shard"] = lambda x, dim: x
    torch.manual_seed(3)
    exec(code, names)
    return {name: x.grad for name, x in names["layer"].named_parameters()}


def test_the_page_leaves_the_gradients_of_one_process(four):
    expected = of_the_page(0, True)
    for found in four.run(of_the_page, False):
        for name, wanted in expected.items():
            error = (found[name] - wanted).norm() / wanted.norm()
            assert error < 1e-4, (name, error)
