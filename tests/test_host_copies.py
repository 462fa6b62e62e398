"""Copies to host memory and back: what comes back, that nothing is read before it is there, and CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DEVICES
from torch import Tensor

from dyngran.kernels import host_copies
from dyngran.kernels.operators import register

ops = register()
on_devices = pytest.mark.parametrize("device", DEVICES)
needs_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")
DELAY_CYCLES = 20_000_000  # some 10 ms of a card: a kernel that does not wait has run long before
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)


def there_and_back(x: Tensor, *, leaves_out: str = "") -> Tensor:
    """What comes back of ``x``, whose memory is overwritten as soon as the plan lets go of it; the memory that it comes back to is not
    what it was in before."""
    host = ops.offload(x, list(x.stride()))
    if leaves_out != "offload_wait":
        ops.offload_wait(host, x)
    x.zero_()
    if x.is_cuda:
        torch.cuda.empty_cache()
    torch.empty_like(x).fill_(1)  # this block is the next one's
    back: Tensor = ops.fetch(host, list(x.shape), list(x.stride()), x.device)
    if leaves_out != "fetch_wait":
        ops.fetch_wait(back)
    return back.clone()


@pytest.fixture
def delayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that begin late."""

    def copy_late(target: Tensor, source: Tensor, stream: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(DELAY_CYCLES)
            target.copy_(source, non_blocking=True)

    monkeypatch.setattr(host_copies, "_copy", copy_late)


@on_devices
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (7,), (2, 5, 3, 4), (1, 3), (0, 4)])
def test_what_comes_back_is_what_was_stored(device: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    x = raw.view(dtype).reshape(shape).to(device)
    if x.dim() == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    back = there_and_back(x.clone())
    assert (back.dtype, back.device, back.stride()) == (x.dtype, x.device, x.stride())
    assert torch.equal(in_bits(back), in_bits(x))


def in_bits(x: Tensor) -> Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


@on_devices
def test_a_layout_that_the_tensor_does_not_have_is_made(device: str) -> None:
    x = torch.randn(4, 6, device=device)
    host = ops.offload(x, [1, 4])
    ops.offload_wait(host, x)
    back = ops.fetch(host, [4, 6], [1, 4], x.device)
    ops.fetch_wait(back)
    assert torch.equal(back, x) and back.stride() == (1, 4)


@on_devices
def test_sizes_that_do_not_match_what_was_stored_are_refused(device: str) -> None:
    x = torch.randn(4, 6, device=device)
    host = ops.offload(x, [6, 1])
    ops.offload_wait(host, x)
    with pytest.raises(ValueError, match="24 elements were stored"):
        ops.fetch(host, [5, 6], [6, 1], x.device)


@pytest.mark.parametrize(("size", "rounded"), [(0, 0), (1, 1), (512, 512), (513, 1024), (3 * 2**20, 4 * 2**20)])
def test_page_locked_memory_comes_in_powers_of_two(size: int, rounded: int) -> None:
    assert host_copies.host_bytes(size) == rounded


@needs_card
def test_nothing_is_overwritten_or_read_before_its_copy_has_run(delayed: None) -> None:
    x = torch.randn(1 << 20, device="cuda")
    want = x.clone()
    assert torch.equal(there_and_back(x), want)
    for wait in ("offload_wait", "fetch_wait"):  # what no other test could tell from luck
        assert not torch.equal(there_and_back(want.clone(), leaves_out=wait), want)


@needs_card
def test_a_copy_that_somebody_has_waited_for_is_waited_for_again(delayed: None) -> None:
    x = torch.randn(1 << 20, device="cuda")
    want, host = x.clone(), ops.offload(x, [1])
    for _ in range(2):
        ops.offload_wait(host, x)
    x.zero_()
    for _ in range(2):  # backward of a graph that is retained
        back = ops.fetch(host, [1 << 20], [1], x.device)
        ops.fetch_wait(back)
        assert torch.equal(back, want)


@needs_card
def test_copies_in_a_captured_graph(delayed: None) -> None:
    x, other = torch.randn(1 << 18, device="cuda"), torch.randn(1 << 18, device="cuda")

    def step() -> Tensor:
        y = x * 2
        host = ops.offload(y, [1])
        z = y + 1
        ops.offload_wait(host, y)
        y.zero_()
        back = ops.fetch(host, [1 << 18], [1], x.device)
        ops.fetch_wait(back)
        return back + z

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    for value in (x.clone(), other):
        x.copy_(value)
        graph.replay()
        assert torch.equal(result, value * 2 + (value * 2 + 1))


@needs_card
def test_memory_that_is_freed_at_its_wait_is_not_written_before(delayed: None) -> None:
    """The caching allocator hands a freed block to the next tensor at once: a copy that still runs must not see that."""
    wrong = 0
    for number in range(4):
        x = torch.full((1 << 22,), float(number), device="cuda")
        host = ops.offload(x, [1])
        ops.offload_wait(host, x)
        address = x.data_ptr()
        del x
        other = torch.full((1 << 22,), -1.0, device="cuda")
        assert other.data_ptr() == address
        torch.cuda.synchronize()
        wrong += not torch.equal(host, torch.full((1 << 22,), float(number)))
        del other
    assert wrong == 0
