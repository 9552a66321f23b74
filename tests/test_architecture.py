"""Files import one another only in the direction that docs/architecture.md draws.

Every import of the package by the package counts, also one inside a function; those under
TYPE_CHECKING, which never run, do not.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import sparsering as sr

PACKAGE = Path(sr.__file__).parent
FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))

# A room (a file, or a folder) and the rooms that it may import. Rooms without files are those that
# the next parts go to.
ROOMS = {
    "ground": "",
    "patterns": "ground",
    "call": "patterns ground",
    "layouts": "patterns ground",
    "checks": "layouts patterns ground",
    "coordinates": "checks patterns ground",
    "data": "patterns checks ground",
    "plots": "layouts patterns ground",
    "kernels": "call checks coordinates layouts patterns ground",
    "route": "call checks coordinates kernels layouts patterns ground",
    "export": "route kernels patterns ground",
    "functional": "route kernels checks patterns ground",
    "varlen": "functional route checks patterns ground",
    "weights": "route kernels checks layouts patterns ground",
    "distributed": "functional route call checks kernels layouts patterns ground",
    "selection": "distributed weights functional route checks kernels layouts patterns ground",
    "decoding": "selection functional route call checks kernels layouts patterns ground",
    "nn": "distributed functional selection decoding checks kernels layouts patterns ground",
    "models": "checks nn functional weights decoding patterns ground",
    "integrations": "distributed kernels models nn functional varlen weights selection decoding "
    "coordinates checks patterns ground",
    "planning": "functional distributed checks kernels layouts patterns ground",
    "training": "distributed models nn planning selection functional layouts patterns ground",
    "demo": "training models plots nn distributed kernels layouts patterns ground",
    "mistakes": "patterns ground",
    "cli": "",  # the command line takes what a command needs
}
ANYTHING = ("cli", "__init__", "__main__")

# Layouts stand on patterns; `Pattern.layout`, `live_keys` and `cache_bound` are conveniences the
# other way. `sparsering.models.gigapath` is the public address of a model of integrations, and
# `RingPlan.build` also makes plans on meshes, which consist of `RingPlan`s.
EXCEPTIONS = {
    "patterns/algebra.py": ("layouts/compile.py", "layouts/cache.py", "layouts/lifetimes.py"),
    "models/gigapath.py": ("integrations/gigapath/__init__.py",),
    "distributed/plan.py": ("distributed/mesh_plan.py",),
}

# Backends never import one another, nor does a file another's neighbours in a folder below.
KERNELS = ("gather", "cpu", "triton", "dense", "torch_sparse", "library")

OPTIONAL = {
    "anemoi": "integrations/anemoi",
    "trl": "integrations/trl",
    "transformers": ("integrations/transformers", "cli/trying", "cli/planned_models"),
    "triton": "kernels/triton",
    "flash_attn": "kernels/library/flash",
    "flash_attn_interface": "kernels/library/flash",
    "safetensors": "training",
    "matplotlib": "plots",
    "tqdm": "ground/progress",
    "h5py": "data/slides",
}


def runs(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a file, but for what stands under `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            for other in child.orelse:
                yield from runs(other)
            continue
        yield child
        yield from runs(child)


@cache
def imports(file: Path) -> tuple[tuple[str, str], ...]:
    """(dotted name, what is taken of it) of every import that runs, absolute."""
    return tuple(_imports(file))


def _imports(file: Path) -> Iterator[tuple[str, str]]:
    package = ("sparsering", *file.parent.parts)
    for node in runs(ast.parse((PACKAGE / file).read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, ""
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *([node.module] if node.module else [])))
            for alias in node.names:
                yield module, alias.name


def imported_files(file: Path) -> Iterator[str]:
    """Paths of the package's files that a file imports."""
    for module, name in imports(file):
        top, *parts = module.split(".")
        if top != "sparsering":
            continue
        for candidate in ([*parts, name] if name else parts, parts):
            path = "/".join(candidate)
            found = [p for p in (f"{path}.py", f"{path}/__init__.py") if (PACKAGE / p).is_file()]
            if candidate and found:
                yield found[0]
                break


def room_of(path: str) -> str:
    return path.split("/")[0].removesuffix(".py")


def test_files_import_only_from_the_rooms_of_their_row():
    wrong = []
    for file in FILES:
        room = room_of(file.as_posix())
        if room in ANYTHING:
            continue
        assert room in ROOMS, f"{file}: a new room needs a row here, a line in docs/architecture.md"
        allowed = {room, *ROOMS[room].split()}
        others = set(imported_files(file)) - set(EXCEPTIONS.get(file.as_posix(), ()))
        wrong += [f"{file} imports {x}" for x in sorted(others) if room_of(x) not in allowed]
    assert not wrong, wrong


def test_the_package_does_without_what_no_wheel_holds():
    outside = {"benchmarks", "tests", "tools", "docs"}
    tops = {(str(f), module.partition(".")[0]) for f in FILES for module, _ in imports(f)}
    wrong = [(file, top) for file, top in tops if top in outside]
    assert not wrong, wrong


def test_rooms_are_listed_below_what_they_import():
    seen: set[str] = set()
    for room, allowed in ROOMS.items():
        assert set(allowed.split()) <= seen, room
        seen.add(room)


def test_no_files_import_each_other_in_a_circle():
    graph = {file.as_posix(): set(imported_files(file)) for file in FILES}
    for name, others in EXCEPTIONS.items():
        graph[name] -= set(others)
    for package in [name for name in graph if name.endswith("__init__.py")]:
        del graph[package]  # a folder's door names its files; its files never ask it
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join((*above[above.index(name) :], name))
        if name in graph and name not in done:
            for other in graph[name]:
                visit(other, (*above, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_backends_never_import_one_another():
    wrong = []
    for file in FILES:
        room, own, *_ = (*(part.removesuffix(".py") for part in file.parts), "", "")
        if room == "kernels" and own in KERNELS:
            others = (x.split("/") for x in imported_files(file))
            backends = {x[1].removesuffix(".py") for x in others if x[0] == "kernels"}
            wrong += [f"{file} imports {x}" for x in sorted(backends & {*KERNELS} - {own})]
    assert not wrong, wrong


@pytest.mark.parametrize("package", OPTIONAL)
def test_optional_packages_are_imported_where_they_are_used(package):
    found = {
        file.as_posix()
        for file in FILES
        for module, _ in imports(file)
        if module.split(".")[0] == package
    }
    assert found and all(name.startswith(OPTIONAL[package]) for name in found), found


HF = PACKAGE / "integrations" / "transformers"
# Families whose names are not those of their files.
OTHER_FAMILIES = {"llama", "led", "chronos2", "nllb", "pegasus", "moshi", "esm", "mobilebert"}


def words_of_code(file: Path) -> Iterator[str]:
    """Lower-case words of a file's names and texts, without docstrings and comments."""
    tree = ast.parse(file.read_text())
    documents = {id(x.value) for x in ast.walk(tree) if isinstance(x, ast.Expr)}
    for node in ast.walk(tree):
        if id(node) in documents:
            continue
        for _, value in ast.iter_fields(node):
            for text in value if isinstance(value, list) else [value]:
                if isinstance(text, str):
                    yield from re.findall(r"[a-z0-9]+|[A-Z][a-z0-9]*", text)


def test_general_modules_of_transformers_name_no_family():
    """Keeps what is known of a family in its file; others read the tables of `families`."""
    own = HF / "families"
    shared = {own / "__init__.py", own / "wrapped.py"}
    stems = {file.stem for file in set(own.glob("*.py")) - shared}
    families = {part for stem in stems for part in stem.split("_")} - {"entries", "moe"}
    assert {"gemma", "llama4", "t5", "longformer", "chronos", "nllb"} <= families
    wrong = []
    for file in sorted(set(HF.rglob("*.py")) - set(own.glob("*.py"))):
        words = {word.lower() for word in words_of_code(file)}
        named = words & (families | OTHER_FAMILIES)
        wrong += [f"{file.relative_to(HF)} names {x}" for x in sorted(named)]
        inside = [x for x in imported_files(file.relative_to(PACKAGE)) if "/families/" in x]
        doors = {path.relative_to(PACKAGE).as_posix() for path in shared}
        wrong += [f"{file.relative_to(HF)} imports {x}" for x in sorted({*inside} - doors)]
    assert not wrong, wrong


# Public in two modules, which callers name: `gigapath.SlideEncoder` and `trident.SlideEncoder`.
TWICE = {"SlideEncoder"}


def test_no_two_classes_have_one_name():
    places: dict[str, list[str]] = {}
    for file in FILES:
        for node in ast.walk(ast.parse((PACKAGE / file).read_text())):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{file}:{node.lineno}")
    twice = {name: where for name, where in places.items() if len(where) > 1}
    assert set(twice) == TWICE, twice


MAP = (PACKAGE.parent / "docs" / "architecture.md").read_text()


def test_every_folder_has_its_line_in_the_map():
    folders = {file.relative_to(PACKAGE).parent for file in PACKAGE.rglob("*.[chp]*")} - {Path()}
    sources = {folder for folder in folders if folder.name != "__pycache__"}
    missing = [path.as_posix() for path in sources if f"\n- `{path.as_posix()}/`: " not in MAP]
    assert not missing, missing


def test_every_file_that_the_map_names_exists():
    named = re.findall(r"[\w/]+\.(?:py|h|cpp)\b", MAP)
    missing = {x for x in named if not any((PACKAGE / y / x).is_file() for y in ("", ".."))}
    missing -= {"__init__.py"}
    assert len(named) > 12 and not missing, missing
