"""Every model of the zoo by name: "transformers/llama", "timm/vision_transformer", "torchvision/resnet18"."""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import Any

from torch import nn

from zoo.trial import Make

LIBRARIES = ("transformers", "timm", "torchvision")

# What CI trains: small models with few layers, chosen so that every kind of operator and structure of the zoo is there once.
FAST = (
    "transformers/llama",
    "transformers/bert",
    "transformers/mixtral",
    "transformers/whisper",
    "transformers/vit",
    "transformers/clip",
    "timm/vision_transformer",
    "timm/resnet",
    "timm/convnext",
    "torchvision/squeezenet1_1",
)


def installed() -> list[str]:
    """The libraries that are there."""
    return [name for name in LIBRARIES if importlib.util.find_spec(name) is not None]


def names() -> list[str]:
    """Every entry of the libraries that are installed."""
    found: list[str] = []
    for library in installed():
        if library == "transformers":
            from zoo.hub_models import model_types

            found += [f"transformers/{model_type}" for model_type in model_types()]
        elif library == "timm":
            from zoo.timm_families import FAMILIES

            found += [f"timm/{family}" for family in FAMILIES]
        else:
            from zoo.vision_models import TORCHVISION

            found += [f"torchvision/{name}" for name, _, _ in TORCHVISION]
    return found


def make_of(name: str) -> Make:
    """What builds an entry's model and inputs."""
    library, _, which = name.partition("/")
    return partial(_MAKERS[library], which)


def _hub(model_type: str) -> tuple[nn.Module, dict[str, Any]]:
    from zoo.hub_models import build, inputs_of, task_of

    model = build(model_type)
    return model, inputs_of(model, task_of(model_type))


def _timm(family: str) -> tuple[nn.Module, dict[str, Any]]:
    from zoo.vision_models import timm_model

    return timm_model(family)


def _torchvision(name: str) -> tuple[nn.Module, dict[str, Any]]:
    from zoo.vision_models import torchvision_model

    return torchvision_model(name)


_MAKERS = {"transformers": _hub, "timm": _timm, "torchvision": _torchvision}
