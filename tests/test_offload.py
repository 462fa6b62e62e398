"""Values that wait for backward in host memory: gradients, peaks, what is chosen, the host's memory, files, and training loops.

On a CPU, where there is no link to measure, a made one stands for it.
"""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from families import DEVICES, FAMILIES, family_on, repeatable
from measure import forward_backward, held_tensors, measured_peak
from test_storage import LOSS_BYTES, SLACK_BYTES, compiled, decisions, gradients, store_everything
from torch import Tensor, fx, nn

import dyngran
from dyngran.compiler import host_memory, registry, stored_forms, strategy
from dyngran.compiler.cli import main
from dyngran.compiler.copy_nodes import is_loop_or_view
from dyngran.compiler.options import parse_options
from dyngran.compiler.planned_graph import PlannedGraph
from dyngran.compiler.plans.planfile import load_plan
from dyngran.errors import InvalidOption, PlanMismatch
from dyngran.kernels import host_copies
from dyngran.passes import host
from dyngran.passes.copies import HostLink
from dyngran.passes.plan import Action

needs_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")
FAST = HostLink(to_host_bytes_per_us=1e8, to_device_bytes_per_us=1e8, latency_us=0.1, source="made")
OFFLOAD: dict[str, object] = {"offload": True, "pack": False}


@pytest.fixture(autouse=True)
def fast_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that has time for whatever is copied, and for small values as well."""
    monkeypatch.setattr(strategy, "host_link", lambda *_, **__: FAST)
    small = partial(stored_forms.find_copies, min_bytes=1024)  # less may be a state of a random generator, which lies on the host
    monkeypatch.setattr(strategy, "find_copies", small)


@pytest.mark.parametrize(
    ("name", "device"), [pytest.param(name, device, marks=pytest.mark.xdist_group(name)) for device in DEVICES for name in FAMILIES]
)
def test_everything_in_host_memory_trains_bit_by_bit_at_the_predicted_peak(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    module, inputs = family_on(name, device)
    with repeatable(device):
        want = gradients(compiled(module, pack=False), module, inputs)
        store_everything(monkeypatch, formats=frozenset({"host"}))
        step = compiled(module, **OFFLOAD)
        got = gradients(step, module, inputs)
    assert all(map(torch.equal, got, want))
    assert {stored for stored, _, _ in decisions(step).values()} == {"host"}
    if device == "cpu":  # on a card libraries' workspaces appear between the two compilations
        module.zero_grad()
        peak_bytes = measured_peak(partial(forward_backward, step, inputs), held_tensors(module, inputs))
        assert abs(dyngran.explain(step).predicted_peak_bytes - peak_bytes) <= SLACK_BYTES + LOSS_BYTES


class Layers(nn.Module):
    """Products whose results take long to make again."""

    def __init__(self, width: int = 256, depth: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def layers(device: str = "cpu") -> tuple[Layers, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return Layers().to(device), (torch.randn(2048 if device == "cpu" else 65536, 256, device=device),)


@pytest.mark.parametrize("device", DEVICES)
def test_a_budget_is_met_by_copies_before_anything_runs_again(device: str) -> None:
    module, inputs = layers(device)
    step = compiled(module, budget=None)
    want = gradients(step, module, inputs)
    free = dyngran.explain(step)
    budget = free.predicted_peak_bytes - 2 * inputs[0].nbytes
    step = compiled(module, budget=budget, **OFFLOAD)
    got = gradients(step, module, inputs)
    assert all(map(torch.equal, got, want))
    plan = dyngran.explain(step).plan
    assert plan.num_recomputed == 0 and plan.peak_bytes <= budget
    assert {one.action for one in plan.decisions if one.format is not None} == {Action.OFFLOAD}
    assert all(one.stored_bytes == 0 and not one.error for one in plan.decisions if one.format is not None)
    report = str(dyngran.explain(step))
    assert "host" in report


@pytest.mark.parametrize("device", DEVICES)
def test_forwards_that_wait_for_each_other_s_backward_keep_their_own_copies(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, (x,) = layers(device)
    batches = (x, x.flip(0) * 2)

    def grads(step: Any) -> list[Tensor]:
        module.zero_grad()
        losses = [step(batch) for batch in batches]
        for number, loss in enumerate(losses):
            loss.backward(retain_graph=number == 0)
        losses[0].backward()  # a second time
        return [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]

    want = grads(compiled(module, pack=False))
    store_everything(monkeypatch, formats=frozenset({"host"}))
    step = compiled(module, **OFFLOAD)
    assert all(map(torch.equal, grads(step), want))
    assert decisions(step)


@pytest.mark.parametrize("device", DEVICES)
def test_inductor_trains_with_copies(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, inputs = layers(device)
    exact = copy.deepcopy(module).double()
    forward_backward(exact, tuple(value.double() for value in inputs))
    store_everything(monkeypatch, formats=frozenset({"host"}))
    torch._dynamo.reset()
    step = torch.compile(module, backend="dyngran", options={"budget": "20GiB", "keep_below": 0, **OFFLOAD})
    for _ in range(2):
        got = gradients(step, module, inputs)
    for one, parameter in zip(got, exact.parameters(), strict=True):
        assert parameter.grad is not None
        assert (one.double() - parameter.grad).norm() <= 1e-4 * parameter.grad.norm()
    assert {stored for stored, _, _ in decisions(step).values()} == {"host"}


@needs_card
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_delayed_copies_change_nothing(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that a copy still reads is written, nothing is read that a copy has not written; with CUDA graphs too."""
    module, inputs = layers("cuda")

    def train() -> list[Tensor]:
        torch._dynamo.reset()
        step = torch.compile(module, backend="dyngran", options={"budget": "20GiB", "keep_below": 0, "mode": mode, **OFFLOAD})
        for _ in range(4):  # CUDA graphs are recorded in the second
            got = gradients(step, module, inputs)
        assert decisions(step)
        return got

    store_everything(monkeypatch, formats=frozenset({"host"}))
    want = train()

    def copy_late(target: Tensor, source: Tensor, stream: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(5_000_000)
            target.copy_(source, non_blocking=True)

    monkeypatch.setattr(host_copies, "_copy", copy_late)
    assert all(map(torch.equal, train(), want))


def test_a_plan_file_has_its_copies_first_on_the_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, inputs = layers()
    step = compiled(module, budget=None)
    gradients(step, module, inputs)
    budget = dyngran.explain(step).predicted_peak_bytes - 2 * inputs[0].nbytes
    step = compiled(module, budget=budget, **OFFLOAD)
    want = gradients(step, module, inputs)
    path = tmp_path / "step.plan.json"
    dyngran.save_plan(path, step)
    chosen = decisions(step)
    few = sum(host_copies.host_bytes(size) for _, size, _ in chosen.values())
    step = compiled(module, budget=budget, plan=str(path), offload=few, pack=False)  # host memory for these alone
    assert all(map(torch.equal, gradients(step, module, inputs), want))
    assert decisions(step) == chosen
    (graph,) = load_plan(path).graphs
    forms = [form for form in graph.problem.forms if form.stored in graph.plan.saved]
    assert forms and all(form.fetch is not None and form.copy_us > 0 and form.store > form.load for form in forms)


@pytest.mark.parametrize(("value", "read"), [(True, True), (False, False), (None, False), ("2GiB", 2 * 2**30), (4096, 4096)])
def test_what_may_be_offloaded(value: object, read: bool | int) -> None:
    assert parse_options({"offload": value}, environ={}).offload == read


@pytest.mark.parametrize("value", ["", "much", 0, -1, 1.5, "0GiB"])
def test_amounts_of_host_memory_that_are_none_are_refused(value: object) -> None:
    with pytest.raises(InvalidOption, match="offload = "):
        parse_options({"offload": value}, environ={})


def test_more_than_the_host_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module, inputs = layers()
    monkeypatch.setattr(host_memory, "available_host_bytes", lambda: 2**30)
    with pytest.raises(InvalidOption, match=r"offload = 2 GiB, and this host has 1 GiB"):
        gradients(compiled(module, offload="2GiB"), module, inputs)


def test_processes_on_one_host_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available_host_bytes", lambda: 2**30)
    options = parse_options({"offload": True}, environ={})
    assert host_memory.host_limit_bytes(options) == 2**29
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert host_memory.host_limit_bytes(options) == 2**27
    assert host_memory.host_limit_bytes(parse_options({"offload": "512MiB"}, environ={})) == 2**29


def test_a_control_group_limits_the_host_s_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit, used = tmp_path / "max", tmp_path / "current"
    used.write_text("4096\n")
    monkeypatch.setattr(host, "_CONTROL_GROUPS", ((str(limit), str(used)),))
    free = host.available_host_bytes()  # no such file
    limit.write_text("max\n")
    assert host.available_host_bytes() == pytest.approx(free, rel=0.1)
    limit.write_text("12288\n")
    assert host.available_host_bytes() == 8192


def test_on_a_cpu_nothing_is_offloaded_and_explain_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategy, "host_link", host_memory.host_link)
    module, inputs = layers()
    step = compiled(module, **OFFLOAD)
    gradients(step, module, inputs)
    assert not decisions(step) and host_memory.NO_LINK_NOTE in dyngran.explain(step).notes


def test_a_table_of_devices_knows_their_links() -> None:
    link = host.link_of(dyngran.passes.devices.find_device("h200"))
    assert link is not None and 40e3 < link.to_host_bytes_per_us < 64e3
    assert host.link_of(dyngran.passes.devices.find_device("cpu")) is None


@needs_card
def test_the_link_of_a_card_is_measured() -> None:
    link = host.measure_link(torch.device("cuda"))
    assert 1e3 < link.to_host_bytes_per_us < 1e6 and 1e3 < link.to_device_bytes_per_us < 1e6


def test_no_kernel_that_could_run_meanwhile_stands_behind_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where loops fuse, between the wait for a value and the first kernel that needs it there are only loops; fetch and wait are bound to
    kernels before them."""
    cut: list[fx.GraphModule] = []

    def keep(self: PlannedGraph, *args: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        halves = plan_and_cut(self, *args)
        cut.append(copy.deepcopy(halves[1]))
        return halves

    plan_and_cut = PlannedGraph._plan_and_cut
    monkeypatch.setattr(PlannedGraph, "_plan_and_cut", keep)
    store_everything(monkeypatch, formats=frozenset({"host"}))
    module, inputs = layers()
    torch._dynamo.reset()
    gradients(torch.compile(module, backend="dyngran", options={"budget": "20GiB", "keep_below": 0, **OFFLOAD}), module, inputs)
    nodes = list(cut[-1].graph.nodes)
    fetches = [node for node in nodes if node.target is torch.ops.dyngran.fetch.default]
    assert len(fetches) > 2
    for fetch in fetches:
        (wait,) = [user for user in fetch.users if user.target is torch.ops.dyngran.fetch_wait.default]
        needs = {fetch}
        for node in nodes[nodes.index(wait) + 1 :]:
            if not needs.isdisjoint(node.all_input_nodes):
                needs.add(node)
                if not is_loop_or_view(node):
                    break
            else:
                assert is_loop_or_view(node) or "dyngran" in str(node.target), f"{node} stands behind {wait}"
        for bound, earlier in ((fetch, fetch.args[4]), (wait, wait.args[1])):
            assert earlier is None or nodes.index(earlier) < nodes.index(bound)
    assert any(fetch.args[4] is not None for fetch in fetches)


class Parts(nn.Module):
    """Three graphs with breaks between them."""

    def __init__(self) -> None:
        super().__init__()
        layers = ([nn.Linear(64, 64), nn.Tanh()] * 3 for _ in range(3))
        self.first, self.second, self.third = (nn.Sequential(*(copy.deepcopy(one) for one in part)) for part in layers)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        x = self.second(x)
        torch._dynamo.graph_break()
        return self.third(x).square().mean()


def test_graphs_of_one_step_share_the_host_s_memory() -> None:
    torch.manual_seed(0)
    module, inputs = Parts(), (torch.randn(1024, 64),)
    step = compiled(module, budget=None)
    want = gradients(step, module, inputs)
    budget = dyngran.explain(step).predicted_peak_bytes - 3 * inputs[0].nbytes
    limit = 2 * host_copies.host_bytes(inputs[0].nbytes)
    step = compiled(module, budget=int(budget), offload=limit, pack=False)
    assert all(map(torch.equal, gradients(step, module, inputs), want))
    graphs = [graph for graph in registry.graphs_of(step) if graph.plan is not None and graph.options.offload == limit]
    on_host = [host_copies.host_bytes(one.size_bytes) for graph in graphs for one in graph.plan.decisions if one.format == "host"]
    assert len(graphs) == 3 and on_host and sum(on_host) <= limit


def test_on_a_cpu_a_device_profile_offloads_nothing_and_training_asks_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategy, "host_link", host_memory.host_link)
    module, inputs = layers()
    step = compiled(module, device_profile="h200", budget="36MiB", **OFFLOAD)
    gradients(step, module, inputs)
    assert not decisions(step)
    monkeypatch.setattr(strategy, "host_link", lambda *_, **__: FAST)
    with pytest.raises(InvalidOption, match=r"offload = 976562 TiB|offload = .*TiB, and this host has"):
        gradients(compiled(module, device_profile="h200", offload="999999TiB"), module, inputs)


def test_plan_files_with_copies_are_compared_and_refused_by_the_option_s_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module, inputs = layers()
    free = compiled(module, budget=None)
    gradients(free, module, inputs)
    paths = [tmp_path / "two.json", tmp_path / "three.json", tmp_path / "deeper.json"]
    for count, path in ((1, paths[0]), (2, paths[1])):
        step = compiled(module, budget=dyngran.explain(free).predicted_peak_bytes - count * inputs[0].nbytes, **OFFLOAD)
        gradients(step, module, inputs)
        dyngran.save_plan(path, step)
    deeper = Layers(depth=8)
    step = compiled(deeper, budget=None)
    gradients(step, deeper, inputs)
    dyngran.save_plan(paths[2], step)
    assert main(["diff", str(paths[0]), str(paths[1])]) in (0, 1)
    assert "offload host" in capsys.readouterr().out
    assert main(["diff", str(paths[1]), str(paths[2])]) in (0, 1)  # other graphs, whose regions are paired
    with pytest.raises(PlanMismatch, match="needs the option offload"):
        gradients(compiled(module, plan=str(paths[0]), pack=False), module, inputs)
