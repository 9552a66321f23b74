"""Adapters of peft, such as LoRA: they are saved and loaded with the pattern of `apply`.

An adapter's folder has no config of the model. So the pattern is stored in sparsering.json beside
adapter_config.json, as the same text that the model's config holds.
"""

import functools
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.utils import cached_file

from ....ground.arguments import shortened
from ..name import NAME
from .config import Texts, model_inside, stored_text

FILE = "sparsering.json"
_WHERE = ("subfolder", "revision", "token", "cache_dir", "local_files_only", "force_download")


def watch_adapters(give: Callable[[Any, Texts], None]) -> None:
    """Patches peft and transformers, so that they save and load a model's pattern with an adapter.

    `give(model, texts)` applies the pattern of a loaded file. Without peft nothing is patched.
    """
    try:
        from peft import PeftModel
    except ImportError:
        return
    classes: tuple[Any, ...] = (PeftModel, PreTrainedModel)
    for cls in classes:
        if not hasattr(cls.save_pretrained, NAME):
            cls.save_pretrained = _saving(cls.save_pretrained)
            cls.load_adapter = _loading(cls.load_adapter, give)


def _saving(save: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a `save_pretrained`, so that it writes the pattern beside each adapter."""

    @functools.wraps(save)
    def saved(self: Any, save_directory: Any, *arguments: Any, **options: Any) -> Any:
        result = save(self, save_directory, *arguments, **options)
        names = list(getattr(self, "peft_config", ()))
        if names and options.get("is_main_process", True):
            for name in options.get("selected_adapters") or names:
                folder = Path(save_directory)
                if name != "default" and (folder / name).is_dir():
                    folder = folder / name
                _write(folder / FILE, stored_text(model_inside(self).config))
        return result

    setattr(saved, NAME, True)
    return saved


def _write(file: Path, texts: Texts | None) -> None:
    """Writes a pattern beside an adapter's config; None removes a file of an earlier save."""
    if texts is None:
        file.unlink(missing_ok=True)
    elif (file.parent / "adapter_config.json").is_file():
        file.write_text(json.dumps({"pattern": texts}, indent=2) + "\n")


def _loading(load: Callable[..., Any], give: Callable[[Any, Texts], None]) -> Callable[..., Any]:
    """Wraps a `load_adapter`, so that a model without a pattern gets the adapter's.

    If the model has another pattern already, it keeps that one and a warning says so.
    """

    @functools.wraps(load)
    def loaded(self: Any, *arguments: Any, **options: Any) -> Any:
        result = load(self, *arguments, **options)
        path = arguments[0] if arguments else options.get("model_id", options.get("peft_model_id"))
        if path is None or (texts := text_of_adapter(path, options)) is None:
            return result
        model = model_inside(self)
        if (own := stored_text(model.config)) is None:
            give(model, texts)
        elif own != texts:
            warnings.warn(
                f"the adapter {shortened(str(path))} was saved with the pattern "
                f"{shortened(str(texts))}, and the model keeps its own, {shortened(str(own))}; "
                "hf.apply(model, pattern) changes it",
                stacklevel=2,
            )
        return result

    return loaded


def text_of_adapter(path: Any, options: dict[str, Any]) -> Texts | None:
    """Returns the pattern text saved with an adapter, in a folder or on the Hub, or None."""
    where = {name: options[name] for name in _WHERE if options.get(name) is not None}
    folder = Path(os.fspath(path), where.get("subfolder", ""))
    if folder.is_dir():
        file = folder / FILE if (folder / FILE).is_file() else None
    else:
        file = cached_file(
            str(path),
            FILE,
            **where,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    if file is None:
        return None
    found = json.loads(Path(file).read_text())
    pattern = found.get("pattern") if isinstance(found, dict) else None
    strings = [*pattern, *pattern.values()] if isinstance(pattern, dict) else [pattern]
    if not all(isinstance(x, str) for x in strings):
        raise ValueError(
            f'{file} must hold {{"pattern": text}}, or a dict from layers to such texts, got '
            f"{shortened(repr(found))}; hf.apply(model, pattern) and save_pretrained write it"
        )
    return pattern
