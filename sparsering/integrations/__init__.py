"""Integrations for models of other libraries, one module or folder each.

`import sparsering` imports none.
"""
