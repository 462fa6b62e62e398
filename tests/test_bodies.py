"""Higher-order operators: what their bodies allocate belongs to the step, under both code generators."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from measure import held_tensors, measured_peak
from torch import Tensor, nn

import dyngran
from dyngran.errors import BudgetTooSmall

WIDTH, ROWS, COPIES = 64, 256, 8
INSIDE_BYTES = ROWS * WIDTH * COPIES * 4  # one intermediate of a body


def wide(h: Tensor) -> Tensor:
    """Intermediates eight times as large as what comes in and goes out."""
    return h + torch.cat([h] * COPIES, 1).sin().cos().exp().sigmoid().view(ROWS, COPIES, WIDTH).mean(1)


def in_a_branch(h: Tensor) -> Tensor:
    return torch.cond(h.sum() > 0, wide, lambda h: wide(h) * 2, (h,))


region = torch.compiler.nested_compile_region(wide)


def in_regions(h: Tensor) -> Tensor:
    return region(region(h))


def in_a_map(h: Tensor) -> Tensor:
    from torch._higher_order_ops import map

    return map(lambda row: (row.unsqueeze(0) * row.unsqueeze(1)).sin().exp().sum(0), h[:, :32])


def in_a_scan(h: Tensor) -> Tensor:
    from torch._higher_order_ops import scan

    _, rows = scan(
        lambda carry, row: (carry * 0.5 + (row.unsqueeze(0) * row.unsqueeze(1)).sin().sum(0), carry.clone()), torch.zeros(WIDTH), h
    )
    return rows


class Net(nn.Module):
    def __init__(self, middle: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.middle = middle
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(32 if middle is in_a_map else WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)).sin()).mean()


def train(middle: Callable[[Tensor], Tensor], **options: object) -> tuple[Net, Tensor, Callable[..., Tensor]]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    net, x = Net(middle), torch.randn(ROWS, WIDTH)
    step = torch.compile(net, backend="dyngran", options={"keep_below": 0, **options})
    step(x).backward()
    return net, x, step


SCANS = pytest.mark.skipif(torch.__version__ < "2.12", reason="the scan's backward is refused by torch 2.11's own aot_eager as well")
CASES = [
    (in_a_branch, "eager"),
    (in_regions, "eager"),
    (in_a_map, "eager"),
    pytest.param(in_a_scan, "eager", marks=SCANS),
    (in_a_branch, "inductor"),
    (in_regions, "inductor"),
]


@pytest.mark.parametrize(("middle", "codegen"), CASES)
def test_the_least_peak_that_is_named_trains_and_is_the_measured_one(middle: Callable[[Tensor], Tensor], codegen: str) -> None:
    with pytest.raises(BudgetTooSmall) as refusal:
        train(middle, codegen=codegen, budget=1)
    least_bytes = refusal.value.least_peak_bytes
    net, x, step = train(middle, codegen=codegen, budget=least_bytes)
    got = {name: p.grad for name, p in net.named_parameters()}
    net.zero_grad()
    peak_bytes = measured_peak(lambda: step(x).backward(), held_tensors(net, (x,)))
    assert peak_bytes <= least_bytes
    if middle in (in_a_branch, in_regions):  # the other branch, which did not run, is a little larger
        assert peak_bytes >= least_bytes - ROWS * WIDTH * 4 - 64
        assert peak_bytes > INSIDE_BYTES
    if codegen == "eager":
        free, _, _ = train(middle, codegen=codegen, solver="default")
        for name, p in free.named_parameters():
            assert p.grad is not None and torch.equal(p.grad, got[name]), name


def test_inductors_bodies_are_read_and_not_guessed() -> None:
    for middle in (in_a_branch, in_regions):
        _, _, step = train(middle, codegen="inductor", budget=2**30)
        assert not any("could not be accounted for" in note for note in dyngran.explain(step).notes)


def test_code_that_cannot_be_read_is_refused_by_its_simulation() -> None:
    """The rows that are kept depend on the data, and so does the generated code's arithmetic."""
    layer, x = nn.Linear(WIDTH, WIDTH), torch.randn(ROWS, WIDTH)

    def loss(x: Tensor) -> Tensor:
        return layer(x)[torch.nonzero(x[:, 0] > 0).squeeze(1)].sin().sum()

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        torch._dynamo.reset()
        with pytest.raises(BudgetTooSmall) as refusal:
            torch.compile(loss, backend="dyngran", fullgraph=True, options={"budget": 1})(x)
        torch._dynamo.reset()
        step = torch.compile(loss, backend="dyngran", fullgraph=True, options={"budget": refusal.value.least_peak_bytes})
        step(x).backward()
    layer.zero_grad()
    assert measured_peak(lambda: step(x).backward(), [x, *layer.parameters()]) <= refusal.value.least_peak_bytes
