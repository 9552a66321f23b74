"""Other people's models, each integration in a package of the name of what it is for.

    from sparsering.integrations import transformers as hf

None is imported with `sparsering`; each asks for its own extra.
"""
