"""The models that `fit.py` trains. A case is data; building one needs transformers, timm or torchvision, the rest does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Loss = Callable[[Callable[..., object], tuple[Tensor, ...]], tuple[Tensor, object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model at one batch size.

    Attributes:
        build: seeded random weights, fp32, on the CPU; needs no network.
        inputs: (batch, device) → inputs and targets, seeded.
        loss: (compiled or plain model, inputs) → scalar loss, and what the model returned, which a user's loop still has a name for while
            backward runs; what is outside of the model runs eagerly, as in a user's loop.
        channels_last: convert the model and four-dimensional inputs.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[int, torch.device], tuple[Tensor, ...]]
    loss: Loss
    batch: int
    channels_last: bool = False


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=16,
        max_position_embeddings=1024,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def _vit() -> nn.Module:
    import timm

    model: nn.Module = timm.create_model("vit_large_patch16_224", pretrained=False)
    return model


def _resnet() -> nn.Module:
    import torchvision

    model: nn.Module = torchvision.models.resnet152(weights=None)
    return model


class TinyLM(nn.Module):
    """A language model of torch's own layers that returns its loss and trains in milliseconds on a CPU: for ``--smoke`` only."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(256, 64), nn.Linear(64, 256)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True, norm_first=True) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def _token_inputs(vocabulary: int, num_tokens: int) -> Callable[[int, torch.device], tuple[Tensor, ...]]:
    def inputs(batch: int, device: torch.device) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(1)
        return (torch.randint(0, vocabulary, (batch, num_tokens), generator=generator).to(device),)

    return inputs


def _image_inputs(batch: int, device: torch.device) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    image = torch.randn(batch, 3, 224, 224, generator=generator)
    return image.to(device), torch.randint(0, 1000, (batch,), generator=generator).to(device)


def _labels_loss(model: Callable[..., object], inputs: tuple[Tensor, ...]) -> tuple[Tensor, object]:
    (tokens,) = inputs
    output = model(input_ids=tokens, labels=tokens)
    loss = getattr(output, "loss")  # noqa: B009 - transformers is not typed here
    assert isinstance(loss, Tensor)
    return loss, output


def _class_loss(model: Callable[..., object], inputs: tuple[Tensor, ...]) -> tuple[Tensor, object]:
    image, target = inputs
    logits = model(image)
    assert isinstance(logits, Tensor)
    return F.cross_entropy(logits, target), logits


def _own_loss(model: Callable[..., object], inputs: tuple[Tensor, ...]) -> tuple[Tensor, object]:
    loss = model(*inputs)
    assert isinstance(loss, Tensor)
    return loss, loss


CASES: dict[str, Case] = {
    "llama350m": Case(build=_llama, inputs=_token_inputs(32000, 1024), loss=_labels_loss, batch=24),
    "vitl": Case(build=_vit, inputs=_image_inputs, loss=_class_loss, batch=96),
    "resnet152": Case(build=_resnet, inputs=_image_inputs, loss=_class_loss, batch=256, channels_last=True),
    "tiny": Case(build=TinyLM, inputs=_token_inputs(256, 64), loss=_own_loss, batch=16),
}
