"""Compiling the CPU kernel prints how long it may take, and did; a script is the compiler here."""

import importlib
import re

build = importlib.import_module("sparsering.kernels.cpu.build")


def test_the_compile_says_how_long_it_may_take_and_then_how_long_it_took(
    tmp_path, capsys, monkeypatch
):
    compiler = tmp_path / "compiler"
    compiler.write_text(
        "#!/bin/sh\nwhile [ $1 != -o ]; do shift; done\nsleep 1\necho library > $2\n"
    )
    compiler.chmod(0o755)
    monkeypatch.setattr(build, "_compiler", lambda: str(compiler))
    library = tmp_path / "cpu-kernel.so"
    build._compile(library)
    first, second = capsys.readouterr().err.splitlines()
    assert first == "sparsering: compiling the CPU kernel, once; it takes 20 s to 2 minutes"
    seconds = re.fullmatch(r"sparsering: compiled the CPU kernel in (\d+) s", second)
    assert 1 <= int(seconds[1]) < 60
    assert build._is_whole(library)
