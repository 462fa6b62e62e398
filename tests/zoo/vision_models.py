"""The families of timm and torchvision: the smallest model of each, at few classes and a small image, seeded random weights."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zoo.timm_families import FAMILIES

Inputs = dict[str, Any]

BATCH, NUM_CLASSES = 4, 10
SIZES = (64, 96, 128, 160, 224, 256)  # of an image, the first that a model takes
DEPTHS: tuple[dict[str, Any], ...] = (  # the first that a model takes: few layers, but every stage
    {"depth": 2},
    {"depths": (1, 1, 2, 1)},
    {"depths": (1, 1, 1)},
    {"layers": (1, 1, 1, 1)},
    {"num_blocks": 2},
    {},
)


@cache
def import_torchvision() -> Any:
    """torchvision; where its compiled operators do not fit the installed torch, as on a CPU build, the two that it cannot be imported
    without are declared, and models that call any are not trained."""
    import sys

    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("torchvision is not installed: `make zoo` installs it")
    if "torchvision" not in sys.modules:
        extension = next(Path(spec.origin).parent.glob("_C*.so"), None)
        try:
            assert extension is not None
            torch.ops.load_library(str(extension))
        except (AssertionError, OSError):
            _LIBRARY.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _LIBRARY.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision

    return torchvision


_LIBRARY = torch.library.Library("torchvision", "FRAGMENT")


def timm_model(family: str) -> tuple[nn.Module, Inputs]:
    """The smallest model of one of timm's modules, with as few layers and as small an image as it takes."""
    options, size = _reduced(FAMILIES[family])
    return _timm(FAMILIES[family], options), images(3, size, size)


@cache
def _reduced(name: str) -> tuple[dict[str, Any], int]:
    """Options and image size: the first that a model can be built and called with."""
    for size in SIZES:
        for depth in DEPTHS:
            for options in ({**depth, "img_size": size}, depth):
                try:
                    with torch.no_grad():
                        _timm(name, options).eval()(**images(3, size, size))
                except Exception:  # noqa: BLE001 - families refuse sizes and depths each in its own way; the next is tried
                    continue
                return options, size
    raise RuntimeError(f"{name} takes none of the depths and image sizes that were tried")


def _timm(name: str, options: dict[str, Any]) -> nn.Module:
    import_torchvision()
    import timm

    torch.manual_seed(0)
    model: nn.Module = timm.create_model(name, num_classes=NUM_CLASSES, **options)
    return model.train()


def images(*shape: int) -> Inputs:
    torch.manual_seed(1)
    return {"x": torch.randn(BATCH, *shape)}


# torchvision's model of each family: (name, shape of an input, further options).
TORCHVISION: tuple[tuple[str, tuple[int, ...], dict[str, Any]], ...] = (
    ("alexnet", (3, 64, 64), {}),
    ("vgg11_bn", (3, 32, 32), {}),
    ("resnet18", (3, 64, 64), {}),
    ("resnext50_32x4d", (3, 64, 64), {}),
    ("wide_resnet50_2", (3, 64, 64), {}),
    ("squeezenet1_1", (3, 64, 64), {}),
    ("densenet121", (3, 64, 64), {}),
    ("googlenet", (3, 96, 96), {"init_weights": False}),
    ("inception_v3", (3, 128, 128), {"init_weights": False}),
    ("shufflenet_v2_x0_5", (3, 64, 64), {}),
    ("mobilenet_v2", (3, 64, 64), {}),
    ("mobilenet_v3_small", (3, 64, 64), {}),
    ("mnasnet0_5", (3, 64, 64), {}),
    ("efficientnet_b0", (3, 64, 64), {}),
    ("efficientnet_v2_s", (3, 64, 64), {}),
    ("regnet_y_400mf", (3, 64, 64), {}),
    ("vit_b_32", (3, 64, 64), {"image_size": 64}),
    ("convnext_tiny", (3, 64, 64), {}),
    ("swin_t", (3, 64, 64), {}),
    ("swin_v2_t", (3, 64, 64), {}),
    ("maxvit_t", (3, 64, 64), {"input_size": (64, 64), "partition_size": 2}),
    ("fcn_resnet50", (3, 64, 64), {"weights_backbone": None, "aux_loss": True}),
    ("deeplabv3_mobilenet_v3_large", (3, 64, 64), {"weights_backbone": None}),
    ("lraspp_mobilenet_v3_large", (3, 64, 64), {"weights_backbone": None}),
    ("r3d_18", (3, 4, 32, 32), {}),
    ("mc3_18", (3, 4, 32, 32), {}),
    ("r2plus1d_18", (3, 4, 32, 32), {}),
    ("s3d", (3, 16, 64, 64), {}),
    ("swin3d_t", (3, 4, 64, 64), {}),
    ("mvit_v2_s", (3, 16, 224, 224), {}),
)


def torchvision_model(name: str) -> tuple[nn.Module, Inputs]:
    models = import_torchvision().models
    shape, options = next((shape, options) for known, shape, options in TORCHVISION if known == name)
    torch.manual_seed(0)
    return models.get_model(name, weights=None, num_classes=NUM_CLASSES, **options).train(), images(*shape)
