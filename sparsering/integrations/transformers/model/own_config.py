"""Configs of a model's own: what is set for one model must not change another.

transformers keeps the config object that a model is made of, and reads a model's attention from it.
So all models of one object change together, and so does a model that is made of it later.
"""

import copy
import gc
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

_copies: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""By each `PreTrainedModel` module: its config, if that was copied for the module's model alone."""


def give_own_config(model: Any) -> dict[int, Any]:
    """Gives a model copies of its configs, unless it has such copies; returns {old id: copy}.

    A model that is part of another one shares its configs, so the whole model gets the copies.

    Returns: the copies by the ids of the configs that they replace; empty if nothing changes.
    """
    parts = [x for x in model.modules() if isinstance(x, PreTrainedModel)]
    if all(x in _copies and _copies[x] is x.config for x in parts):
        return {}
    whole = _whole_model(model)
    replaced: dict[int, Any] = {}  # memo: modules that share a config share its copy
    for module in whole.modules():
        for name, config in list(vars(module).items()):
            if isinstance(config, PreTrainedConfig):
                vars(module)[name] = copy.deepcopy(config, replaced)
    for module in whole.modules():
        if isinstance(module, PreTrainedModel):
            _copies[module] = module.config
    return replaced


def forget_own_config(config: Any) -> None:
    """Notes that a second model is built from a config, so no model owns it alone."""
    for module in [module for module, own in _copies.items() if own is config]:
        del _copies[module]


def _whole_model(model: Any) -> Any:
    """Returns the outermost module that contains a model and has a config, or the model."""
    whole = model
    for other in gc.get_objects():
        if not issubclass(type(other), nn.Module) or other is model:
            continue
        if not any(isinstance(x, PreTrainedConfig) for x in [*vars(other).values()]):
            continue
        parts = {id(x) for x in other.modules()}
        if id(model) in parts and id(whole) in parts:
            whole = other
    return whole
