"""Sparse attention for models of transformers: over the model's own mask, or over your pattern.

    from sparsering.integrations import transformers as hf

    hf.register()                           # attn_implementation="sparsering": the model's own mask
    hf.apply(model, pattern)                # the pattern, within padding, documents and causality
    with hf.using(model, pattern):          # exactly the pattern, in this block
        model(**inputs)
    model = hf.load(path)                   # a saved model, with the patterns of its config
    hf.convert(model)                       # Longformer, LED, Chronos-2, DiNAT: their own patterns
    hf.parallelize(model, group)            # ranks share the tokens of each call
    model.generate(**inputs, past_key_values=hf.SparseCache(model))     # drops unneeded keys
    with hf.continuous_batching(model):     # many requests at once, without masks
        model.generate_batch(prompts, generation_config)
    print(hf.explain(model))

docs/transformers.md explains the rules.
"""

from ...ground.commands import install

try:
    import transformers
except ImportError as error:
    raise ImportError(
        f"sparsering.integrations.transformers needs transformers; {install('hf')}"
    ) from error

if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (5, 23):
    raise ImportError(
        "sparsering.integrations.transformers needs transformers 5.23 or newer, got "
        f"{transformers.__version__}; {install('hf')}"
    )

from .call.paged import continuous_batching
from .call.sparse_cache import SparseCache
from .families import without_natten
from .model.apply import apply, explain, load, register, using
from .model.converted import convert
from .ranks.parallel import local_positions, parallelize

__all__ = [
    "SparseCache", "apply", "continuous_batching", "convert", "explain", "load", "local_positions",
    "parallelize", "register", "using", "without_natten",
]  # fmt: skip
