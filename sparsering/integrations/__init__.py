"""Other people's models, each integration by the name of what it is for.

    from sparsering.integrations import transformers as hf

None is imported with `sparsering`; `transformers` needs the extra `hf`, `torchscale` nothing.
"""
