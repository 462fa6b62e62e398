"""A small table of devices, so that a plan for an H100 can be made on a laptop.

Sources: the vendors' datasheets for dense (not sparse) tensor throughput and memory bandwidth: NVIDIA H100, H200, A100, L4, L40S and
V100 datasheets (the link to the host is PCIe of their generation), the NVIDIA Ada GPU architecture whitepaper (RTX 4090), the AMD
Instinct MI300X datasheet; memory as the driver reports it. The shares of those peaks that large kernels reach are ours: 650 of 989 bf16
TFLOP/s and 3.0 of 3.35 TB/s on H100 were met when the project was planned (`planning-notes.md`, section 2), 55 of 64 GB/s of the link on
an H200. ``cpu`` is a placeholder: `passes/host.py` measures the real one.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from dyngran.passes.errors import InvalidOption

MIB = 2**20
PCIE3, PCIE4, PCIE5 = 16e9, 32e9, 64e9  # bytes per second of 16 lanes, one direction
LINK_SHARE = 0.85
CUDA_BLOCK_BYTES = 512  # the caching allocator rounds every request up to a multiple, and
CUDA_UNSPLIT_BYTES = 2**20  # gives a free block whole, and counts it so, if no more than this of it would be left over


def rounded_bytes(num_bytes: int, device: torch.device) -> int:
    """What the device's allocator takes for a request of so many bytes."""
    return num_bytes if device.type == "cpu" else -(-num_bytes // CUDA_BLOCK_BYTES) * CUDA_BLOCK_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """What the roofline knows of a device.

    Attributes:
        matmul_tflops: datasheet TFLOP/s by ``fp16``, ``bf16``, ``tf32``, ``fp32``, ``fp64``, ``fp8``, ``int8``; ``fp32`` is required.
        bandwidth_bytes_per_s: datasheet memory bandwidth.
        matmul_share, bandwidth_share: the share of those peaks that large kernels reach.
        launch_us: least device time of one kernel, launch included.
        link_bytes_per_s: datasheet bandwidth of the link to the host, one direction; 0 where there is none. It reaches `LINK_SHARE` of it.
        memory_bytes: total memory as the driver reports it.
        capability: compute capability of an NVIDIA card, from which torch chooses attention kernels; (0, 0) for others.
    """

    name: str
    matmul_tflops: Mapping[str, float]
    bandwidth_bytes_per_s: float
    launch_us: float
    memory_bytes: int
    matmul_share: float = 0.66
    bandwidth_share: float = 0.9
    capability: tuple[int, int] = (0, 0)
    link_bytes_per_s: float = 0.0

    def __post_init__(self) -> None:
        if self.matmul_tflops.get("fp32", 0.0) <= 0 or self.bandwidth_bytes_per_s <= 0:
            raise ValueError(f"{self.name}: fp32 throughput and bandwidth must be > 0")

    @property
    def library_bytes(self) -> int:
        """What libraries keep from the first step on: cuBLAS a workspace for each of the two threads that run forward and backward.

        32 MiB each on Hopper, 8.125 MiB on other cards (torch's defaults of CUBLAS_WORKSPACE_CONFIG); an H200 then had 4 MiB more.
        """
        if self.name == "cpu":
            return 0
        return 2 * (32 * MIB if self.capability[0] == 9 else 8320 * 1024)

    @property
    def bytes_per_us(self) -> float:
        """Memory bandwidth that a large pointwise kernel reaches."""
        return self.bandwidth_bytes_per_s * self.bandwidth_share / 1e6

    def flops_per_us(self, dtype: torch.dtype, *, tf32: bool = False) -> float:
        """Matmul throughput that a large kernel reaches; a dtype that the device lacks runs at the rate of the next wider one."""
        for name in _RATES.get(dtype, ("fp32",)) if not (tf32 and dtype is torch.float32) else ("tf32", "fp32"):
            if name in self.matmul_tflops:
                return self.matmul_tflops[name] * self.matmul_share * 1e6
        return self.matmul_tflops["fp32"] * self.matmul_share * 1e6


_RATES: dict[torch.dtype, tuple[str, ...]] = {
    torch.bfloat16: ("bf16", "fp32"),
    torch.float16: ("fp16", "bf16", "fp32"),
    torch.float32: ("fp32",),
    torch.complex64: ("fp32",),
    torch.float64: ("fp64", "fp32"),
    torch.complex128: ("fp64", "fp32"),
    torch.float8_e4m3fn: ("fp8", "bf16", "fp32"),
    torch.float8_e5m2: ("fp8", "bf16", "fp32"),
    torch.int8: ("int8", "fp32"),
    torch.uint8: ("int8", "fp32"),
}


def _gpu(
    name: str,
    half: float,
    tf32: float,
    fp32: float,
    fp64: float,
    eight: float | None,
    tb_per_s: float,
    mib: int,
    *,
    share: float = 0.66,
    bandwidth_share: float = 0.9,
    capability: tuple[int, int] = (0, 0),
    link: float = PCIE4,
) -> DeviceSpec:
    rates = {"fp16": half, "bf16": half, "tf32": tf32, "fp32": fp32, "fp64": fp64}
    if eight is not None:
        rates |= {"fp8": eight, "int8": eight}
    return DeviceSpec(
        name=name,
        matmul_tflops=rates,
        bandwidth_bytes_per_s=tb_per_s * 1e12,
        launch_us=2.0,
        memory_bytes=mib * MIB,
        matmul_share=share,
        bandwidth_share=bandwidth_share,
        capability=capability,
        link_bytes_per_s=link,
    )


_A100 = {"fp16": 312.0, "bf16": 312.0, "tf32": 156.0, "fp32": 19.5, "fp64": 19.5, "int8": 624.0}  # no fp8


def _a100(name: str, tb_per_s: float, mib: int) -> DeviceSpec:
    return DeviceSpec(
        name=name,
        matmul_tflops=_A100,
        bandwidth_bytes_per_s=tb_per_s * 1e12,
        launch_us=2.0,
        memory_bytes=mib * MIB,
        matmul_share=0.75,
        capability=(8, 0),
        link_bytes_per_s=PCIE4,
    )


DEVICES: dict[str, DeviceSpec] = {
    spec.name: spec
    for spec in (
        _gpu("h100", 989.0, 494.0, 67.0, 67.0, 1979.0, 3.35, 81559, capability=(9, 0), link=PCIE5),
        _gpu("h200", 989.0, 494.0, 67.0, 67.0, 1979.0, 4.8, 143771, bandwidth_share=0.8, capability=(9, 0), link=PCIE5),
        _a100("a100-40", 1.555, 40960),
        _a100("a100-80", 2.039, 81920),
        _gpu("l4", 121.0, 60.0, 30.3, 0.47, 242.0, 0.3, 23034, capability=(8, 9)),
        _gpu("l40s", 362.0, 183.0, 91.6, 1.4, 733.0, 0.864, 46068, capability=(8, 9)),
        _gpu("rtx4090", 165.2, 82.6, 82.6, 1.3, 330.3, 1.008, 24564, share=0.85, capability=(8, 9)),
        DeviceSpec(
            name="v100",
            matmul_tflops={"fp16": 125.0, "fp32": 15.7, "fp64": 7.8, "int8": 62.0},
            bandwidth_bytes_per_s=0.9e12,
            launch_us=2.5,
            memory_bytes=32768 * MIB,
            matmul_share=0.75,
            capability=(7, 0),
            link_bytes_per_s=PCIE3,
        ),
        _gpu("mi300x", 1307.0, 654.0, 163.4, 163.4, 2615.0, 5.3, 196592, share=0.5, bandwidth_share=0.8, link=PCIE5),
        DeviceSpec(
            name="cpu",
            matmul_tflops={"fp32": 0.05, "fp64": 0.025, "bf16": 0.02, "fp16": 0.02},
            bandwidth_bytes_per_s=1e10,
            launch_us=3.0,
            memory_bytes=16 * 1024 * MIB,
            matmul_share=1.0,
            bandwidth_share=1.0,
        ),
    )
}

# What a driver calls the card, most specific first; 40 GB and 80 GB A100s differ in memory only.
_DRIVER_NAMES = (
    ("h200", "h200"),
    ("gh200", "h200"),
    ("h100", "h100"),
    ("h800", "h100"),
    ("a100", "a100-80"),
    ("a800", "a100-80"),
    ("l40s", "l40s"),
    ("l4", "l4"),
    ("4090", "rtx4090"),
    ("v100", "v100"),
    ("mi300", "mi300x"),
)


def find_device(name: str) -> DeviceSpec:
    """The spec of that name (case and punctuation do not matter). Raises `InvalidOption` with the nearest known name, if one is near."""
    wanted = _plain(name)
    for spec in DEVICES.values():
        if _plain(spec.name) == wanted:
            return spec
    near = difflib.get_close_matches(name.lower(), DEVICES, n=1)
    guess = f" (did you mean {near[0]!r}?)" if near else ""
    raise InvalidOption(f"no device is called {name!r}{guess}. Known devices: {', '.join(DEVICES)}.")


def match_device(torch_device_name: str) -> DeviceSpec | None:
    """The spec for what ``torch.cuda.get_device_name()`` says, for example ``NVIDIA A100-SXM4-40GB``; None if it is not in the table."""
    words = _plain(torch_device_name)
    if words == "cpu":
        return DEVICES["cpu"]
    for part, name in _DRIVER_NAMES:
        if part in words:
            return DEVICES["a100-40" if name == "a100-80" and "40gb" in words else name]
    return None


def _plain(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())
