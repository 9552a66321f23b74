"""`make help` says how long a target takes."""

import re
import subprocess

from helpers.pages import ROOT

UNMEASURED = {  # a new target says its minutes, or stands here
    *("bench", "check-dist", "compare", "demo-ring", "dist", "docs", "mutants", "release"),
    *("setup", "test-all", "test-asan", "test-order", "test-tsan", "wheels"),
}
AT_ONCE = {"help", "clean"}


def test_targets_say_their_minutes():
    done = subprocess.run(
        ["make", "--no-print-directory", "help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    said = dict(re.findall(r"^  make (\S+) +(.*)$", done.stdout, re.M))
    assert "two cores" in said["help"]  # on which machine
    timed = {name for name, text in said.items() if re.search(r"\bminutes?\b", text)} - AT_ONCE
    assert timed == set(said) - UNMEASURED - AT_ONCE
