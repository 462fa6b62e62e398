"""The replay of generated wrappers against wrappers whose peak is plain to see, against Python itself, and against the allocator."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from measure import forward_backward, held_tensors, measured_peak
from torch import Tensor, fx, nn

import dyngran
from dyngran.compiler.accounting import WrapperAccount, wrapper_peak
from dyngran.compiler.capture import Captured, JointGraph
from dyngran.compiler.storages import Storages
from dyngran.compiler.torch_private import GeneratedCode
from dyngran.errors import BudgetTooSmall
from dyngran.passes.plan import Plan
from dyngran.passes.problem import Kind, Op, Problem, Side, Value

KIB = 1024


def kib(num: int = 1) -> Tensor:
    return torch.empty(num * 256, dtype=torch.float32)


def graph_of(placeholders: dict[str, object], calls: Sequence[tuple[str, Any, tuple[object, ...], object]] = ()) -> fx.GraphModule:
    """A graph with these placeholders and calls of ``(name, target, arguments, value)``; values stand in ``meta``."""
    graph = fx.Graph()
    for name, value in placeholders.items():
        graph.placeholder(name).meta["val"] = value
    for name, target, arguments, value in calls:
        node = graph.create_node("call_function", target, arguments, name=name)  # type: ignore[arg-type]
        node.meta["val"] = value
    graph.output(())
    return fx.GraphModule({}, graph)


def captured_of(problem: Problem, *, device: str = "cpu", nodes: tuple[fx.Node | None, ...] = ()) -> Captured:
    joint = graph_of({"primals_1": kib(), "primals_2": kib(), "tangents_1": kib()})
    return Captured(
        joint=JointGraph(module=joint, num_fwd_outputs=1, static_input_indices=(), input_kinds=()),
        problem=problem,
        device=torch.device(device),
        nodes=nodes,
        storages=Storages(),
        node_info=None,
    )


EMPTY = Problem(values=(), ops=(), forward_outputs=frozenset(), gradients=frozenset())


def plan_of(saved: frozenset[int] = frozenset()) -> Plan:
    return Plan(
        budget_bytes=None, saved=saved, decisions=(), peak_bytes=0, static_bytes=0, saved_bytes=0, time_us=0.0, overhead_us=0.0,
        recompute_us=0.0, num_recomputed=0, solver="test",
    )  # fmt: skip


def code(body: str, graph: fx.GraphModule, *, is_backward: bool) -> GeneratedCode:
    """A wrapper as Inductor writes it: a method named ``call`` of a class, among other functions."""
    lines = textwrap.indent(textwrap.dedent(body).strip(), " " * 8)
    source = f"class Runner:\n    def other(self):\n        pass\n\n    def call(self, args):\n{lines}\n"
    return GeneratedCode(source=source, graph=graph, is_backward=is_backward)


NO_BACKWARD = code("args.clear()\nreturn ()", graph_of({}), is_backward=True)


def forward_peak(body: str, graph: fx.GraphModule | None = None, *, problem: Problem = EMPTY, device: str = "cpu") -> int | None:
    account = WrapperAccount()
    account.add(code(body, graph or graph_of({"primals_1": kib(100)}), is_backward=False))
    account.add(NO_BACKWARD)
    return wrapper_peak(account, captured_of(problem, device=device), plan_of())


def test_buffers_live_from_their_allocation_to_their_del() -> None:
    body = """
        primals_1, = args
        args.clear()
        buf0 = empty_strided_cpu((256, ), (1, ), torch.float32)
        buf1 = empty_strided_cpu((2, 256), (256, 1), torch.float32)
        cpp_fused_add_0(primals_1, buf0, buf1)
        del buf0
        buf2 = empty_strided_cpu((256, ), (1, ), torch.bfloat16)
        return (buf1, buf2, )
    """
    assert forward_peak(body) == 3 * KIB
    assert forward_peak(body.replace("del buf0", "pass")) == 3 * KIB + KIB // 2


def test_inputs_belong_to_the_caller() -> None:
    assert forward_peak("primals_1, = args\nargs.clear()\nbuf0 = empty_strided_cpu((256, ), (1, ), torch.float32)\nreturn (buf0, )") == KIB


def test_a_reused_buffer_costs_nothing() -> None:
    body = """
        primals_1, = args
        buf0 = empty_strided_cpu((512, ), (1, ), torch.float32)
        buf1 = buf0; del buf0  # reuse
        buf2 = reinterpret_tensor(buf1, (256, ), (1, ), 0); del buf1  # reuse
        buf3 = empty_strided_cpu((256, ), (1, ), torch.float32)
        return (buf2, buf3, )
    """
    assert forward_peak(body) == 3 * KIB  # the view of one KiB keeps its base of two alive


def test_deleting_a_name_frees_nothing_while_a_view_lives() -> None:
    body = """
        primals_1, = args
        buf0 = empty_strided_cpu((1024, ), (1, ), torch.float32)
        buf1 = reinterpret_tensor(buf0, (512, ), (1, ), 512)
        del buf0
        buf2 = empty_strided_cpu((256, ), (1, ), torch.float32)
        del buf1
        buf3 = empty_strided_cpu((768, ), (1, ), torch.float32)
        return (buf2, buf3, )
    """
    assert forward_peak(body) == 5 * KIB


TOPK = ("topk", torch.ops.aten.topk.default, (), (kib(1), torch.empty(256, dtype=torch.int64)))


def test_members_of_a_tuple_die_one_by_one() -> None:
    body = """
        primals_1, = args
        buf0 = torch.ops.aten.topk.default(primals_1, 256)
        buf1 = buf0[0]
        buf2 = buf0[1]
        del buf0
        del buf2
        buf3 = empty_strided_cpu((1024, ), (1, ), torch.float32)
        return (buf1, buf3, )
    """
    assert forward_peak(body, graph_of({"primals_1": kib()}, [TOPK])) == (1 + 4) * KIB
    assert forward_peak(body.replace("del buf2", "pass"), graph_of({"primals_1": kib()}, [TOPK])) == (1 + 2 + 4) * KIB


def test_members_of_members() -> None:
    """A random op that hands out its generator's state: ``(state, (result, mask))``."""
    state, result, mask = torch.empty(5056, dtype=torch.uint8), kib(2), torch.empty(512, dtype=torch.bool)
    save_state = torch.ops.higher_order.run_and_save_rng_state
    graph = graph_of({"primals_1": kib()}, [("saved", save_state, (torch.ops.aten.native_dropout.default,), (state, (result, mask)))])
    body = """
        primals_1, = args
        buf0 = torch.ops.higher_order.run_and_save_rng_state(torch.ops.aten.native_dropout.default, primals_1, 0.5, True)
        buf1 = buf0[0]
        buf2 = buf0[1]
        del buf0
        buf3 = buf2[0]
        buf4 = buf2[1]
        del buf2
        del buf3
        buf5 = empty_strided_cpu((2048, ), (1, ), torch.float32)
        return (buf1, buf4, buf5, )
    """
    assert forward_peak(body, graph) == 5056 + 512 + 8 * KIB


def with_workspace(name: str, target: str, workspace_bytes: int) -> Problem:
    value = Value(index=0, name="x", size_bytes=KIB, kind=Kind.TEMPORARY, producer=0)
    op = Op(
        index=0, name=name, target=target, side=Side.FORWARD, reads=(), writes=(0,), cost_us=1.0, workspace_bytes=workspace_bytes
    )  # fmt: skip
    return Problem(values=(value,), ops=(op,), forward_outputs=frozenset(), gradients=frozenset())


@pytest.mark.parametrize(
    "call", ["extern_kernels.mm(primals_1, primals_1, out=buf0)", "buf1 = extern_kernels.mm(primals_1, primals_1)"], ids=["out", "result"]
)
def test_a_library_call_has_its_workspace_while_it_runs(call: str) -> None:
    graph = graph_of({"primals_1": kib()}, [("mm", torch.ops.aten.mm.default, (), kib())])
    body = f"primals_1, = args\nbuf0 = empty_strided_cpu((256, ), (1, ), torch.float32)\n{call}\nreturn (buf0, )"
    own = 0 if "out" in call else KIB
    assert forward_peak(body, graph, problem=with_workspace("mm", "aten.mm.default", 7 * KIB)) == KIB + own + 7 * KIB
    assert forward_peak(body, graph) == KIB + own


def test_a_device_guard_is_looked_into_and_blocks_are_rounded_on_cuda() -> None:
    body = """
        primals_1, = args
        with torch.cuda._DeviceGuard(0):
            buf0 = empty_strided_cuda((100, ), (1, ), torch.float32)
            buf1 = empty_strided_cuda((1, ), (1, ), torch.float32)
            buf2 = empty_strided_cpu((4096, ), (1, ), torch.float32)
        return (buf0, buf1, )
    """
    assert forward_peak(body, device="cuda") == 512 + 512  # and what lives on another device does not count
    assert forward_peak(body) == 4 * 4096


def test_sizes_are_read_from_symbols() -> None:
    graph = graph_of({"primals_1": 8, "primals_2": kib()})
    body = """
        primals_1, primals_2 = args
        s77 = primals_1
        buf0 = empty_strided_cpu((s77, 64 * s77 // 2 - 1 + 1), (256, 1), torch.float32)
        return (buf0, )
    """
    assert forward_peak(body, graph) == 8 * 256 * 4


def backward_peak(
    body: str, placeholders: dict[str, object], *, problem: Problem = EMPTY, saved: frozenset[int] = frozenset()
) -> int | None:
    account = WrapperAccount()
    graph = graph_of(placeholders)
    account.add(code("args.clear()\nreturn ()", graph_of({}), is_backward=False))
    account.add(code(body, graph, is_backward=True))
    nodes = {node.name: node for node in graph.graph.nodes}
    return wrapper_peak(account, captured_of(problem, nodes=tuple(nodes.get(value.name) for value in problem.values)), plan_of(saved))


BACKWARD = """
    primals_1, kept, tangents_1 = args
    args.clear()
    buf0 = empty_strided_cpu((256, ), (1, ), torch.float32)
    del kept
    del tangents_1
    del primals_1
    buf1 = empty_strided_cpu((1024, ), (1, ), torch.float32)
    return (buf0, buf1, )
"""


def test_backward_frees_what_it_consumes_but_the_engine_holds_tangents() -> None:
    peak = backward_peak(BACKWARD, {"primals_1": kib(50), "kept": kib(2), "tangents_1": kib(8)})
    assert peak == (1 + 4 + 8) * KIB  # 1 + 2 + 8 before, then without `kept` and with 4 more
    peak = backward_peak(BACKWARD, {"primals_1": kib(50), "kept": kib(6), "tangents_1": kib(8)})
    assert peak == (1 + 6 + 8) * KIB


@pytest.mark.parametrize("is_saved", [True, False])
def test_a_forward_output_lives_through_backward_whether_it_is_saved_or_not(is_saved: bool) -> None:
    value = Value(index=0, name="kept", size_bytes=2 * KIB, kind=Kind.OUTPUT, producer=0)
    op = Op(index=0, name="make", target="aten.sin.default", side=Side.FORWARD, reads=(), writes=(0,), cost_us=1.0)
    problem = Problem(values=(value,), ops=(op,), forward_outputs=frozenset({0}), gradients=frozenset())
    body, placeholders = BACKWARD, {"primals_1": kib(), "kept": kib(2), "tangents_1": kib(8)}
    if not is_saved:
        body = body.replace(" kept,", "").replace("del kept", "pass")
        del placeholders["kept"]
    peak = backward_peak(body, placeholders, problem=problem, saved=frozenset({0} if is_saved else ()))
    assert peak == (1 + 4 + 8 + 2) * KIB


GOOD = "buf0 = empty_strided_cpu((256, ), (1, ), torch.float32)"


@pytest.mark.parametrize(
    "line",
    [
        "if primals_1 is None: pass",
        "for i in range(3): pass",
        "buf0 = empty_strided_cpu((u0, ), (1, ), torch.float32)",
        "buf0 = empty_strided_cpu(shape, (1, ), torch.float32)",
        "buf0 = empty_strided_cpu((256, ), (1, ), torch.not_a_dtype)",
        "buf0 = torch.ops.aten.topk.default(primals_1, 3)",
        "buf0 = extern_kernels.convolution(primals_1)",
    ],
)
def test_a_wrapper_that_cannot_be_read_gives_no_number(line: str) -> None:
    assert forward_peak(f"primals_1, = args\n{GOOD}\nreturn (buf0, )") == KIB
    assert forward_peak(f"primals_1, = args\n{line}\nreturn (buf0, )") is None


def test_arguments_that_do_not_match_the_graph_give_no_number() -> None:
    assert forward_peak(f"primals_1, primals_2 = args\n{GOOD}\nreturn (buf0, )") is None


def test_without_a_function_named_call_there_is_no_number() -> None:
    account = WrapperAccount()
    account.add(GeneratedCode(source="def other(args):\n    return ()\n", graph=graph_of({}), is_backward=False))
    account.add(NO_BACKWARD)
    assert wrapper_peak(account, captured_of(EMPTY), plan_of()) is None


def test_code_of_one_forward_and_one_backward_is_needed() -> None:
    account, one = WrapperAccount(), code("args.clear()\nreturn ()", graph_of({}), is_backward=False)
    assert wrapper_peak(account, captured_of(EMPTY), plan_of()) is None
    account.add(one)
    assert wrapper_peak(account, captured_of(EMPTY), plan_of()) is None
    account.add(NO_BACKWARD)
    assert wrapper_peak(account, captured_of(EMPTY), plan_of()) == 0
    account.add(one)
    assert wrapper_peak(account, captured_of(EMPTY), plan_of()) is None


class Meter:
    """Live and highest bytes of `Buffer` objects: Python's own reference counts decide when one dies."""

    def __init__(self) -> None:
        self.live = self.peak = 0

    def allocate(self, shape: tuple[int, ...], _strides: tuple[int, ...], _dtype: torch.dtype) -> Buffer:
        return Buffer(self, 4 * shape[0])


class Buffer:
    def __init__(self, meter: Meter, num_bytes: int) -> None:
        self.meter, self.num_bytes = meter, num_bytes
        meter.live += num_bytes
        meter.peak = max(meter.peak, meter.live)

    def __del__(self) -> None:
        self.meter.live -= self.num_bytes


class View:
    def __init__(self, base: Buffer | View) -> None:
        self.base = base


@st.composite
def wrappers(draw: st.DrawFn) -> str:
    """Straight-line wrappers over named buffers: allocate, view, rename, delete, in any order that Python can run."""
    names: list[str] = []
    lines = ["primals_1, = args", "args.clear()"]
    for step in range(draw(st.integers(1, 25))):
        what = draw(st.sampled_from(["new", "new", "view", "reuse", "view and del", "del"])) if names else "new"
        if what == "new":
            lines.append(f"buf{step} = empty_strided_cpu(({draw(st.integers(1, 40))}, ), (1, ), torch.float32)")
        else:
            old = draw(st.sampled_from(names))
            if what == "del":
                lines.append(f"del {old}")
            elif what == "reuse":
                lines.append(f"buf{step} = {old}; del {old}  # reuse")
            elif what == "view":
                lines.append(f"buf{step} = reinterpret_tensor({old}, (1, ), (1, ), 0)")
            else:
                lines.append(f"buf{step} = reinterpret_tensor({old}, (1, ), (1, ), 0); del {old}  # reuse")
            if what != "view":
                names.remove(old)
        if what != "del":
            names.append(f"buf{step}")
    return "\n".join([*lines, f"return ({''.join(f'{name}, ' for name in names)})"])


@settings(max_examples=200, deadline=None)
@given(body=wrappers())
def test_the_replay_agrees_with_pythons_reference_counts(body: str) -> None:
    meter = Meter()
    scope: dict[str, Any] = {"empty_strided_cpu": meter.allocate, "reinterpret_tensor": lambda base, *_: View(base), "torch": torch}
    exec(code(body, graph_of({}), is_backward=False).source, scope)
    result = scope["Runner"]().call([object()])
    assert result is not None
    assert forward_peak(body) == meter.peak


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.blocks(x)
        return out.square().mean()


def compiled(budget_bytes: int | None) -> tuple[Callable[..., Tensor], nn.Module, Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module, x = Mlp(), torch.randn(256, 64)
    step = torch.compile(module, backend="dyngran", options={"budget": budget_bytes, "keep_below": 0})
    return step, module, x


@pytest.mark.xdist_group("mlp")  # together with the family whose kernels are the same
@pytest.mark.parametrize("is_tight", [False, True])
def test_under_inductor_the_accounted_peak_is_the_measured_one_to_the_byte(is_tight: bool) -> None:
    budget_bytes = None
    if is_tight:
        step, module, x = compiled(1)
        with pytest.raises(BudgetTooSmall) as refusal:
            step(x)
        budget_bytes = refusal.value.least_peak_bytes
    step, module, x = compiled(budget_bytes)
    forward_backward(step, (x,))
    module.zero_grad()
    measured = measured_peak(lambda: forward_backward(step, (x,)), held_tensors(module, (x,)))
    report = dyngran.explain(step)
    assert report.predicted_peak_bytes == measured
    assert budget_bytes is None or (measured <= budget_bytes and report.plan.num_recomputed > 0)
