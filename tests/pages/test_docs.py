"""Every Python block in README.md and docs/ runs; every command line of ours parses."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.pages import PAGES, README, ROOT, SHELLS, Block, blocks

import benchmarks.__main__ as benchmarks
from sparsering import cli

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
PROGRAMS = {"sparsering": cli.build_parser, "python -m benchmarks": benchmarks.build_parser}


def command_lines(script: str, program: str = "sparsering") -> Iterator[list[str]]:
    """The arguments of each call of a program in a shell block."""
    words = program.split()
    for line in script.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line.removeprefix("$ "), posix=True, punctuation_chars="&|;<>()")
        lexer.whitespace_split = True
        command: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set("&|;<>()"):  # the end of one simple command
                if command and [Path(command[0]).name, *command[1:]][: len(words)] == words:
                    yield command[len(words) :]
                command = []
            elif command or not re.match(r"\w+=", word):  # leave out `VARIABLE=value` in front
                command.append(word)


@each_page
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOKENS", "1024")  # of the script in docs/parallel.md, which takes 65,536
    namespace = {"__name__": "__main__"}
    for block in blocks(page.read_text(encoding="utf-8")):
        if block.language == "python":
            padding = "\n" * (block.line - 1)  # a traceback then names the page's own line
            exec(compile(padding + block.code, str(page), "exec"), namespace)


@each_page
def test_command_lines_parse(page, capsys):
    shell = [x for x in blocks(page.read_text(encoding="utf-8")) if x.language in SHELLS]
    for program, parser in PROGRAMS.items():
        for block in shell:
            for arguments in command_lines(block.code, program):
                try:
                    parser().parse_args(arguments)
                except SystemExit as exit:
                    message = f"{page.name}, block at line {block.line}: {capsys.readouterr().err}"
                    assert not exit.code, message


@each_page
def test_no_block_escapes_its_test(page):
    text = page.read_text(encoding="utf-8")
    assert 2 * len(blocks(text)) == len(re.findall(r"^ *```", text, re.MULTILINE)), "open fence"
    languages = {block.language for block in blocks(text)}
    assert not languages & {"py", "python3", "pycon", "ipython"}, "say ```python, so that it runs"


@each_page
def test_code_fits_a_narrow_screen(page):
    for block in blocks(page.read_text(encoding="utf-8")):
        if block.language in {"python", *SHELLS}:
            wide = [line for line in block.code.splitlines() if len(line) > 80]
            assert not wide, f"{page.name}, block at line {block.line}: {wide[0]}"


def test_readme_has_python():
    assert any(block.language == "python" for block in blocks(README.read_text(encoding="utf-8")))


PAGE = """
Text with `code`.

```python
x = 1
```

1. A list:

   ```python
   if x:
       x = 2
   ```

```bash
# sparsering is not called here
$ sparsering plot "Causal() & SlidingWindow(4, 0)" --length 64 \\
    --out a.png  # draws
OMP_NUM_THREADS=2 .venv/bin/sparsering info > out.txt && sparsering build; echo done
.venv/bin/python -m benchmarks report --quick
pip install sparsering
```

```
plain
```
"""


def test_blocks_of_a_page():
    found = blocks(PAGE)
    assert [block.language for block in found] == ["python", "python", "bash", ""]
    assert found[1] == Block("python", "if x:\n    x = 2\n", 11)
    assert list(command_lines(found[2].code)) == [
        ["plot", "Causal() & SlidingWindow(4, 0)", "--length", "64", "--out", "a.png"],
        ["info"],
        ["build"],
    ]
    assert list(command_lines(found[2].code, "python -m benchmarks")) == [["report", "--quick"]]
