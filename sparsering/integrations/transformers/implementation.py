"""The attention that a model runs: `apply` sets it, `using` and `parallelize` hold it for a time.

The name of an implementation is in a config. Models may share a config, several threads a model,
and the blocks and calls that hold it may end in any order. So holds are counted by config.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from threading import RLock
from typing import Any

from transformers import PreTrainedModel

from .config import NAME


@dataclass(eq=False)
class Hold:
    """A config whose implementation is "sparsering" until the last of several holders ends."""

    config: Any
    before: str | None  # what it had before the first holder
    count: int = 0


_holds: dict[int, Hold] = {}  # by the id of the config
_lock = RLock()


def switch(model: Any, modules: list[Any], verb: str) -> None:
    """Sets a model's attention to "sparsering" for good; raises if a module does not follow."""
    with _lock:
        _set(model, modules, verb)
        for config in _configs(model):
            if id(config) in _holds:
                _holds[id(config)].before = NAME


def hold(model: Any, modules: list[Any], verb: str) -> list[Hold]:
    """Sets a model's attention to "sparsering", until `release` gets the result; as `switch`."""
    with _lock:
        configs = list(_configs(model))
        implementations = [config._attn_implementation for config in configs]
        _set(model, modules, verb)
        held = [
            _holds.setdefault(id(config), Hold(config, before))
            for config, before in zip(configs, implementations, strict=True)
        ]
        for each in held:
            each.count += 1
        return held


def release(held: list[Hold]) -> None:
    """Ends a hold. The last one of a config restores the implementation before the first."""
    with _lock:
        for each in held:
            each.count -= 1
            if each.count == 0:
                del _holds[id(each.config)]
                if each.config._attn_implementation == NAME:  # else somebody else has set it
                    each.config._attn_implementation_internal = each.before


def _set(model: Any, modules: list[Any], verb: str) -> None:
    before = [(config, config._attn_implementation) for config in _configs(model)]
    model.set_attn_implementation(NAME)
    unchanged = {type(x).__name__ for x in modules if x.config._attn_implementation != NAME}
    if unchanged:
        for config, name in before:
            config._attn_implementation_internal = name
        raise NotImplementedError(
            f"transformers does not let {', '.join(sorted(unchanged))} change its attention after "
            f'loading; load the model with attn_implementation="{NAME}", then call {verb}'
        )


def _configs(model: Any) -> Iterator[Any]:
    waiting = [x.config for x in model.modules() if isinstance(x, PreTrainedModel)]
    seen: set[int] = set()
    while waiting:
        config = waiting.pop()
        if config is not None and id(config) not in seen:
            seen.add(id(config))
            yield config
            waiting.extend(getattr(config, name, None) for name in config.sub_configs)
