"""Integrations for models of other libraries, one module per library.

    from sparsering.integrations import transformers as hf

`import sparsering` imports none of them. `transformers` needs the extra `hf`; `torchscale` does not
need torchscale.
"""
