"""The pages of the project, README.md and docs/, and the blocks of code in them."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]

# A fence opens with its indentation, its backticks and its language; as many backticks close it.
FENCE = re.compile(
    r"^(?P<indent>[ ]*)(?P<ticks>`{3,})(?P<language>[^\n`]*)\n(?P<code>.*?)^[ ]*(?P=ticks)[ ]*$",
    re.MULTILINE | re.DOTALL,
)
SHELLS = {"bash", "sh", "shell", "console"}


class Block(NamedTuple):
    language: str
    code: str
    line: int  # 1-based, of the block's first line of code


def blocks(text: str) -> list[Block]:
    """The fenced code blocks of a Markdown text, in order, without their indentation."""
    found = []
    for match in FENCE.finditer(text):
        language = (match["language"].split() or [""])[0].lower()
        code = re.sub(f"^ {{0,{len(match['indent'])}}}", "", match["code"], flags=re.MULTILINE)
        found.append(Block(language, code, text.count("\n", 0, match.start("code")) + 1))
    return found
