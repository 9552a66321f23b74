"""Writes docs/families.md: every model type of transformers, from runs of tiny models.

    .venv/bin/python tools/tabulate_families.py

It runs each type in one process, then text models over two, which takes about 7 minutes on 2 cores.
"""

import multiprocessing
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "integrations")]

if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    import transformers
    from families_page import PAGE, page, place, ways_cell
    from helpers.ring_workers import Workers
    from indexed_caches import CACHES, FAMILIES, ways
    from running_families import run
    from sharing_families import shared
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers_families import shared_name

    transformers.logging.set_verbosity_error()
    begin = time.monotonic()
    with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=60) as pool:
        runs = {x.kind: x for x in pool.imap_unordered(run, sorted(CONFIG_MAPPING_NAMES))}
    print(f"{len(runs)} types ran after {time.monotonic() - begin:.0f} s", flush=True)
    workers = Workers(2)
    ranks = {}
    for kind in sorted(runs):
        if runs[kind].register == "equal" and (family := shared_name(kind)):
            ranks[kind] = shared(workers, family)
    workers.close()
    print(f"{len(ranks)} were shared after {time.monotonic() - begin:.0f} s", flush=True)
    places = {kind: place(x, ranks.get(kind, "")) for kind, x in runs.items()}
    caches = {(x, y): ways_cell(ways(x, y)) for x in FAMILIES for y in CACHES}
    PAGE.write_text(page(places, caches), encoding="utf-8")
