"""Files that are whole or not there, and the folder of what is kept between runs."""

import os
from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """Puts `content` at `path` in one step; the folder is made if need be.

    A reader, or a crash at any moment, sees the old file or the new one, never a part.

    Raises: OSError where it cannot be written (no space, no permission); the old file is then
    untouched.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(aside, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        what = f"{error.strerror} while writing {path}; what was there before is untouched"
        raise OSError(error.errno, what) from error
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def cache_folder() -> Path:
    """`$SPARSERING_CACHE`, else `sparsering` in the user's cache folder; it need not exist.

    Compiled kernels and measured choices lie there.
    """
    if folder := os.environ.get("SPARSERING_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sparsering"
