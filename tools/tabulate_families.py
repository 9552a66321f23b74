"""Writes docs/families.md, and docs/parallel-families.md: which families run over ranks.

    .venv/bin/python tools/tabulate_families.py

It runs every family of the table over two processes, which takes a minute or two.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "integrations")]

if __name__ == "__main__":
    import transformers
    from families_page import PAGE as FAMILIES
    from families_page import families_page
    from helpers.ring_workers import Workers
    from sharing_families import PAGE, page, share
    from transformers_families import tabulated

    transformers.logging.set_verbosity_error()
    FAMILIES.write_text(families_page(), encoding="utf-8")
    workers = Workers(2)
    rows = []
    for family in tabulated():
        rows.append(workers.run(share, family)[0])
        print(f"{rows[-1].result:9} {family}", flush=True)
    workers.close()
    PAGE.write_text(page(rows), encoding="utf-8")
