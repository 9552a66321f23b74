"""Names the namespaces of torch's operators that this copy of the package registers.

Torch keeps all operators of a process in one table. A process may hold this package twice: once
installed, and once as a kernel of the Hugging Face Hub, which is imported under a name of its own.
So the namespace is the name under which the package was imported.
"""

NAMESPACE = __name__.partition(".")[0]
"""Namespace of the operators that Python defines: `torch.ops.sparsering` where it is installed."""

CPU_NAMESPACE = f"{NAMESPACE}_cpu"
"""Namespace of the operators in the compiled CPU kernel."""
