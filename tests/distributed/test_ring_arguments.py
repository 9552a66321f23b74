"""Wrong arguments of the functions over ranks raise a ValueError that names them, in one process.

TypeError, with the argument's name, only where a count or a pattern is of another kind.
"""

import pytest
import torch

import sparsering as sr
from sparsering.distributed import RingPlan, ring_attention, shard, simulate_ring, unshard

_X = torch.randn(1, 2, 8, 8, generator=torch.Generator().manual_seed(0))
_CALL = {"query": _X, "key": _X, "value": _X, "pattern": sr.Causal()}
_OF_PLAN = {"pattern": sr.Causal(), "seq_len": 8}
_WRONG = ("x", [1], 3.5, True, float("nan"), object(), b"y", {}, torch.zeros(3))
_RIGHT = {("tensor", torch.Tensor), ("timeout", float), ("device", bool)}
_FUNCTIONS = {
    ring_attention: (_CALL, "mesh sharding timeout compression backend"),
    simulate_ring: (_CALL | {"world_size": 2}, "world_size sharding"),
    shard: ({"tensor": _X}, "tensor dim group mesh sharding"),
    unshard: ({"tensor": _X}, "tensor dim group mesh sharding length"),
    RingPlan.build: (_OF_PLAN | {"world_size": 2}, "seq_len world_size block_size sharding"),
}


@pytest.mark.parametrize(
    ("function", "name"),
    [(f, name) for f, (_, names) in _FUNCTIONS.items() for name in names.split()],
)
def test_an_argument_of_another_kind_is_refused_by_name(function, name):
    for wrong in _WRONG:
        if (name, type(wrong)) in _RIGHT:
            continue
        with pytest.raises((ValueError, TypeError)) as caught:
            function(**{**_FUNCTIONS[function][0], name: wrong})
        told = str(caught.value)
        counted = " must be " in told and name in told
        assert caught.type is ValueError or counted, (wrong, caught.value)
        assert name in told or name == "group", (wrong, told)


@pytest.mark.parametrize("timeout", ["x", [1], object(), True, 0, -1, float("nan"), torch.ones(2)])
def test_a_timeout_that_is_no_time_is_refused_with_a_way_out(timeout):
    with pytest.raises(ValueError, match=r"timeout must be a number of seconds .* leave it out"):
        ring_attention(**_CALL, timeout=timeout)
