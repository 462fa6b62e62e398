"""What a plan leaves free of its budget beside its peak, for what a simulation cannot know."""

from __future__ import annotations

from dyngran.compiler.options import Codegen
from dyngran.passes.errors import format_bytes

LOSS_BYTES = 64  # the loss and the gradient it starts from are eager scalars
# On CUDA above what is accounted for. The caching allocator hands out a cached block that is up to 1 MiB too large without splitting it:
# less than 0.5 % of the transient on a Llama, a ViT-L and a ResNet-152. Libraries keep up to 5 MiB of their own from their first step on.
KNOWN_SLACK = 0.005  # share of the transient, where generated code is known
GUESSED_SLACK = 0.01
SLACK_BYTES = 8 * 2**20
UNREAD_SHARE = 0.1  # code for the CPU holds buffers of which the simulator knows nothing, workspaces of attention among them
UNREAD_CUDA_SHARE, UNREAD_CUDA_BYTES = 0.02, 24 * 2**20  # for a card: 17 MiB and 1 % were seen (bench/results/offline-h200.jsonl)


def room_beside(device_type: str, *, share: float = GUESSED_SLACK, is_unread: bool) -> tuple[float, int]:
    """Of the transient (``share`` on CUDA, where code is read), and in bytes. ``is_unread``: of the code that will be nothing is read."""
    if device_type == "cpu":
        return UNREAD_SHARE if is_unread else 0.0, LOSS_BYTES
    return (UNREAD_CUDA_SHARE, UNREAD_CUDA_BYTES) if is_unread else (share, SLACK_BYTES)


def room_sentence(device: str, codegen: str) -> str:
    """For people who choose a budget by the peaks of plans that were made without training."""
    share, num_bytes = room_beside("cpu" if device == "cpu" else "cuda", is_unread=codegen == Codegen.INDUCTOR.value)
    parts = [f"{share:.0%} of what a step adds" if share else "", format_bytes(num_bytes) if num_bytes > LOSS_BYTES else ""]
    left = " and ".join(part for part in parts if part)
    return f"A budget leaves {left} beside a plan's peak, for what only training can tell." if left else ""
