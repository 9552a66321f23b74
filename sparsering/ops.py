"""Runs a checked call: as a torch operator where something observes it, else directly."""

import torch
from torch import Tensor

from .behind_padding import forward
from .call_recipe import CallRecipe, Inputs
from .checks import check_batch, needs_operator, refuse_forward_mode
from .dense_reference import reference
from .dispatch import BACKENDS
from .extras import UNUSED, Extras
from .kernels.problem import Problem
from .kernels.triton import remember
from .numerics import without_autocast
from .operators import attention_op
from .pairs import frame_of
from .patterns.algebra import Pattern, check_fits
from .work import layout_of, problem_of


def attend(
    recipe: CallRecipe, inputs: Inputs, pattern: Pattern, extras: Extras
) -> tuple[Tensor, Tensor]:
    """Computes (out, lse) of a call that `recipe_of` checked.

    A backend with a `backward` runs as a torch operator, unless neither autograd nor a compiler
    observes the call: the operator takes a good part of a small call's time.
    """
    query, backend = inputs[0], BACKENDS[recipe.backend]
    if recipe.layout_key is not None and backend.forward is not None:
        layout, slots = layout_of(*recipe.layout_key)
        problem = Problem(layout, *inputs, recipe.scale, slots=slots)
        return backend.forward(problem if backend.reads_slots else problem.in_first_slots())
    if pattern.tensors and not torch.compiler.is_compiling():
        remember(pattern)
    if backend.backward is not None:
        text, operands = pattern.operands
        tensors = [x for x in (*extras.in_use.values(), *operands) if isinstance(x, Tensor)]
        if not recipe.plain:
            tensors += inputs
            refuse_forward_mode(*tensors)
        if recipe.learns or (tensors and needs_operator(*tensors)):
            query, key, value = inputs
            return attention_op(
                query=query,
                key=key,
                value=value,
                tensors=operands,
                pattern=text,
                scale=recipe.scale,
                q_start=recipe.q_start,
                block_size=recipe.block_size,
                backend=recipe.backend,
                **{**UNUSED, **extras.in_use},
            )
    with without_autocast(query):
        if backend.library_call is not None:
            return _library_call(recipe, inputs, pattern, extras)
        if backend.forward is None:
            return reference(recipe, inputs, pattern, extras)
        return forward(recipe, inputs, pattern, extras)


def value_gradient(
    recipe: CallRecipe, inputs: Inputs, pattern: Pattern, extras: Extras, lse: Tensor, grad: Tensor
) -> Tensor:
    """Sums `exp(s - lse) grad` over queries, [B, Hkv, Nk, Dv]; lse includes any sink."""
    problem = problem_of(recipe, inputs, pattern, extras)
    problem = problem._replace(learns_distances=False).in_first_slots()
    backward = BACKENDS[recipe.backend].backward
    assert backward is not None
    with without_autocast(inputs[0]):
        zeros = torch.zeros_like(grad), torch.zeros_like(lse)
        return backward(problem, zeros[0], lse, grad, zeros[1]).value


def _library_call(
    recipe: CallRecipe, inputs: Inputs, pattern: Pattern, extras: Extras
) -> tuple[Tensor, Tensor]:
    """Runs a backend that hands the whole call to a library; NotImplementedError if it cannot."""
    name, backend = recipe.backend, BACKENDS[recipe.backend]
    assert backend.library_call is not None and backend.refuses is not None
    assert not extras.in_use, f"{name} computes no {sorted(extras.in_use)}"
    refuse_forward_mode(*inputs)
    check_batch(pattern, inputs[0].shape[0])
    check_fits(pattern, frame := frame_of(*inputs[:2], recipe.q_start))
    if refused := backend.refuses(inputs, pattern, frame):
        raise NotImplementedError(f"{name}: {'; '.join(refused)}; leave out backend=")
    return backend.library_call(*inputs, pattern, frame, recipe.scale)
