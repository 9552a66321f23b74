"""Integrations for models of other libraries, one module each; `import sparsering` imports none."""
