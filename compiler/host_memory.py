"""How much of the host's memory a plan may use, and how fast it is reached."""

from __future__ import annotations

import os

import torch

from dyngran.compiler.options import Options
from dyngran.passes.copies import HostLink
from dyngran.passes.devices import DeviceSpec
from dyngran.passes.errors import InvalidOption, format_bytes
from dyngran.passes.host import available_host_bytes, link_of, measure_link

SPARED_SHARE = 0.5  # of what the host has to spare, unless the user says how much
NO_LINK_NOTE = "offload changes nothing here: the device's memory is the host's"


def host_link(device: torch.device, options: Options, spec: DeviceSpec, *, is_offline: bool = False) -> HostLink | None:
    """Measured where the device is, from the table where it is not; None for a device without memory of its own. ``is_offline``: nothing
    will run here."""
    if not is_offline and device.type != "cuda":
        return None
    return measure_link(device) if device.type == "cuda" and options.device_profile is None else link_of(spec)


def host_limit_bytes(options: Options, *, is_offline: bool = False) -> int:
    """Page-locked memory that this process may take. ``is_offline``: on another host, of which nothing is known.

    Raises InvalidOption if the user allows more than the host has. Processes that torchrun started on this host share what it can spare.
    """
    named = None if options.offload is True else int(options.offload)
    if is_offline:
        return 2**62 if named is None else named
    available_bytes = available_host_bytes()
    if named is None:
        return int(SPARED_SHARE * available_bytes) // _num_processes_here()
    if named > available_bytes:
        raise InvalidOption(
            f"offload = {format_bytes(named)}, and this host has {format_bytes(available_bytes)} of memory to spare. Name less, or use "
            f"offload=True for {SPARED_SHARE:.0%} of that."
        )
    return named


def _num_processes_here() -> int:
    text = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, int(text)) if text.isascii() and text.isdigit() else 1
