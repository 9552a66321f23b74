"""Triton's interpreter without the work that changes no result: the same bits in half the time.

For each operation on a few numbers it checks types, makes types of blocks, and looks for what is
left to replace in `triton.language`. Here types of a kind are made once, operands that are alike
are not made alike again, and NumPy sorts (the interpreter takes a second over a sorting network).
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest


def quicken(patch: pytest.MonkeyPatch) -> None:
    """Replaces the interpreter's slow parts; does nothing where Triton has no such parts."""
    try:
        from triton import language
        from triton.runtime import interpreter

        builder = interpreter.interpreter_builder
        parts = (
            (interpreter, "_patch_lang"),
            (interpreter, "_LangPatchScope"),
            (interpreter, "_patch_attr"),
            (interpreter, "_get_np_dtype"),
            (interpreter.TritonSemantic, "binary_op_type_checking_impl"),
            (builder.options, "sanitize_overflow"),
        )
        if not all(hasattr(*part) for part in parts):
            return
    except (ImportError, AttributeError):
        return
    _patch_the_language_once(patch, language, interpreter)
    _call_builtins_directly(patch, language, interpreter)
    _make_types_once(patch, language, interpreter)
    _take_operands_that_are_alike(patch, language, interpreter)
    if not builder.options.debug:  # the check of sums of integers is thrown away without debug
        options = dataclasses.replace(builder.options, sanitize_overflow=False)
        patch.setattr(builder, "options", options)
    _sort_by_numpy(patch, language, interpreter)


def _patch_the_language_once(patch: pytest.MonkeyPatch, language: Any, interpreter: Any) -> None:
    """For a launch, and each call of a function in it, functions of its own are put in place."""
    patch_language, nothing = interpreter._patch_lang, interpreter._LangPatchScope()

    @cache
    def used(function: Callable[..., object]) -> list[Any]:
        return [x for x in function.__globals__.values() if x is language or x is language.core]

    def patch_what_is_left(function: Callable[..., object]) -> object:
        is_left = any(language.core.is_builtin(module.load) for module in used(function))
        return patch_language(function) if is_left else nothing

    patch.setattr(interpreter, "_patch_lang", patch_what_is_left)


def _call_builtins_directly(patch: pytest.MonkeyPatch, language: Any, interpreter: Any) -> None:
    """A function of the language is called with its semantics, without two wrappers between."""
    wrapper = language.core.builtin(lambda: None).__code__

    def patch_attribute(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        semantic = interpreter.TritonSemantic(builder)
        function = member.__wrapped__ if member.__code__ is wrapper else member

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        scope.set_attr(owner, name, call)

    patch.setattr(interpreter, "_patch_attr", patch_attribute)


def _make_types_once(patch: pytest.MonkeyPatch, language: Any, interpreter: Any) -> None:
    """Types of blocks, shapes of tensors and types of NumPy are looked up after the first time."""
    core, check_block = language.core, language.block_type.__init__
    fields_of_blocks: dict[Any, dict[str, Any]] = {}

    def shape_and_size(sizes: Sequence[int]) -> tuple[Any, Any]:
        return core.tuple([core.constexpr(x) for x in sizes]), core.constexpr(math.prod(sizes))

    shape_and_size_of_one = shape_and_size(())

    def init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(x.value if type(x) is core.constexpr else x for x in shape)
        key = type(element_ty), element_ty.name, sizes
        if key not in fields_of_blocks:
            check_block(self, element_ty, shape)
            self.shape_and_size = shape_and_size(sizes)
            fields_of_blocks[key] = dict(self.__dict__)
        self.__dict__.update(fields_of_blocks[key])
        self.element_ty = element_ty

    def init_tensor(self: Any, handle: Any, kind: Any) -> None:
        self.handle = handle
        self.type = kind
        self.dtype = kind.scalar
        block = kind.is_block()
        self.shape, self.numel = kind.shape_and_size if block else shape_and_size_of_one

    numpy_type = interpreter._get_np_dtype
    numpy_types: dict[Any, Any] = {}

    def cached_numpy_type(kind: Any) -> Any:
        element = kind.scalar
        key = type(element), element.name
        if key not in numpy_types:
            numpy_types[key] = numpy_type(kind)
        return numpy_types[key]

    dtype_equal, unwrap = core.dtype.__eq__, core._unwrap_if_constexpr
    plain = (core.tensor, int, float, bool, core.dtype)

    def equal_types(self: Any, other: Any) -> bool:
        return self.name == other.name if type(other) is core.dtype else dtype_equal(self, other)

    def unwrapped(x: Any) -> Any:
        if type(x) is core.constexpr:
            return x.value
        return x if type(x) in plain else unwrap(x)

    def init_handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data = data
        self.dtype = dtype
        self.attr = {} if attr is None else attr
        if 8 * data.itemsize > getattr(dtype, "primitive_bitwidth", 64):  # none of a pointer
            self.__post_init__()  # says which types do not fit

    patch.setattr(core.dtype, "__eq__", equal_types)
    patch.setattr(core, "_unwrap_if_constexpr", unwrapped)
    patch.setattr(interpreter.TensorHandle, "__init__", init_handle)
    patch.setattr(language.block_type, "__init__", init_block_type)
    patch.setattr(language.tensor, "__init__", init_tensor)
    patch.setattr(interpreter, "_get_np_dtype", cached_numpy_type)


def _take_operands_that_are_alike(
    patch: pytest.MonkeyPatch, language: Any, interpreter: Any
) -> None:
    """Tensors of one type are the operands as they are; a number is made a tensor once."""
    semantic = interpreter.TritonSemantic
    made_alike, broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value
    common_type = semantic.computation_type_impl
    tensor, numbers = language.tensor, (int, float, bool)
    constants: dict[Any, Any] = {}
    common_types: dict[Any, Any] = {}

    def operands(self: Any, a: Any, b: Any, *rest: Any, **options: Any) -> tuple[Any, Any]:
        if type(a) is not tensor:
            return made_alike(self, a, b, *rest, **options)
        kind = a.type
        if type(b) in numbers:
            key = kind.name, type(b), b, rest, *options.items()
            if key in constants:
                return a, constants[key]
            same, constant = made_alike(self, a, b, *rest, **options)
            if same is a:
                constants[key] = constant
            return same, constant
        is_alike = type(b) is tensor and kind.name == b.type.name and not kind.scalar.is_ptr()
        if is_alike and kind.scalar.primitive_bitwidth >= 32:  # narrower quotients are wider
            return a, b
        return made_alike(self, a, b, *rest, **options)

    def with_one_shape(self: Any, a: Any, b: Any) -> tuple[Any, Any]:
        one, other = a.type, b.type
        if one.is_block() and other.is_block():
            if one.shape.values == other.shape.values:
                return a, b
        elif one.is_block():
            kind = language.block_type(other, one.shape)
            return a, tensor(self.builder.create_splat(kind, b.handle), kind)
        elif other.is_block():
            kind = language.block_type(one, other.shape)
            return tensor(self.builder.create_splat(kind, a.handle), kind), b
        return broadcast(self, a, b)

    def cached_common_type(self: Any, a: Any, a_is: bool, b: Any, b_is: bool, divides: bool) -> Any:
        key = a.name, a_is, b.name, b_is, divides
        if key not in common_types:
            common_types[key] = common_type(self, a, a_is, b, b_is, divides)
        return common_types[key]

    patch.setattr(semantic, "binary_op_type_checking_impl", operands)
    patch.setattr(semantic, "broadcast_impl_value", with_one_shape)
    patch.setattr(semantic, "computation_type_impl", cached_common_type)


def _sort_by_numpy(patch: pytest.MonkeyPatch, language: Any, interpreter: Any) -> None:
    def topk(x: Any, k: int) -> Any:
        largest = np.sort(x.handle.data, -1)[..., ::-1][..., : int(k)].copy()
        kind = language.block_type(x.dtype, list(largest.shape))
        return language.tensor(interpreter.TensorHandle(largest, x.dtype), kind)

    def sort(x: Any) -> Any:
        ordered = np.sort(x.handle.data, -1)
        return language.tensor(interpreter.TensorHandle(ordered, x.dtype), x.type)

    patch.setattr(language, "topk", topk)
    patch.setattr(language, "sort", sort)
