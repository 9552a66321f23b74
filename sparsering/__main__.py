"""`python -m sparsering` is the command `sparsering`."""

import sys

from .cli import main

sys.exit(main())
