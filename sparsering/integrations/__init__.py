"""Integrations for models of other libraries, one module per library.

`import sparsering` imports none of them. The module `transformers` needs the extra `hf`; the module
`torchscale` needs no other package.
"""
