"""Every function behind the one door to torch's private API, called on the torch that is installed.

What is checked is what dyngran relies on, so that a release which moves or changes something fails here and by name.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from joint import cut, save_nothing
from torch import Tensor, fx, nn
from torch._inductor import config as inductor_config
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from dyngran.compiler import torch_private
from dyngran.kernels.operators import register
from dyngran.passes.problem import Kind

RELEASE = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


class Net(nn.Module):
    """Two linear layers, dropout, batch norm: random ops, mutation, members of tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.dropout(torch.tanh(self.norm(self.first(x))), 0.5)).square().sum()


class Seen:
    """One joint graph as AOTAutograd hands it to a partitioner, with the arguments it came with."""

    def __init__(self, module: Callable[..., Any], *inputs: Any, dynamic: bool = False) -> None:
        self.graph: fx.GraphModule | None = None
        self.inputs: list[Any] = []

        def backend(graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            self.graph, self.inputs = torch_private.keep_copy(graph), list(example_inputs)
            return torch_private.compile_eager(graph, example_inputs, partition=self.partition, around=lambda run, _is_backward: run)

        torch._dynamo.reset()
        self.step = torch.compile(module, backend=backend, dynamic=dynamic)
        self.out = self.step(*inputs)

    def partition(self, joint: fx.GraphModule, joint_inputs: Sequence[Any], **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        self.num_fwd_outputs: int = kwargs["num_fwd_outputs"]
        self.static_indices = tuple(kwargs.get("static_lifetime_input_indices") or ())
        self.joint = torch_private.keep_copy(joint)
        self.joint_inputs = joint_inputs
        return torch_private.stock_partition(
            joint, joint_inputs, num_fwd_outputs=self.num_fwd_outputs, static_lifetime_input_indices=self.static_indices, fused=False
        )

    def named(self, target: object) -> list[fx.Node]:
        return [node for node in self.joint.graph.nodes if node.target is target]


@pytest.fixture(name="seen")
def _seen() -> Seen:
    return Seen(Net(), torch.randn(4, 8))


class Kernel:
    """What `fetched_ahead` asks of Inductor's kernels."""

    def __init__(self, name: str, *reads: str, target: object = None) -> None:
        self.name, self.unmet_dependencies = name, [SimpleNamespace(name=read) for read in reads]
        self.node = SimpleNamespace(op_overload=target)

    def get_buffer_names(self) -> list[str]:
        return [self.name]


def test_copies_stand_right_after_what_they_read() -> None:
    assert hasattr(inductor_config, "_post_fusion_custom_pass")  # where Inductor asks for it
    fetch = register().fetch.default
    kernels = [
        Kernel("mm", "given"),
        Kernel("attention", "mm"),
        Kernel("sum", "attention"),
        Kernel("one", "mm", target=fetch),
        Kernel("two", "one", "sum"),
        Kernel("other", "host", target=fetch),
    ]
    assert [kernel.name for kernel in torch_private.fetched_ahead(kernels)] == ["other", "mm", "one", "attention", "sum", "two"]


def test_this_release_is_a_supported_one() -> None:
    assert (2, 11) <= RELEASE < (2, 14)


def test_every_public_function_is_called_by_a_test_here() -> None:
    """Only names that exist are imported lazily inside of functions: calling each is the only proof that this release has them."""
    public = {
        name
        for name, value in vars(torch_private).items()
        if inspect.isfunction(value) and value.__module__ == torch_private.__name__ and not name.startswith("_")
    }
    text = Path(__file__).read_text()
    assert {name for name in public if f"torch_private.{name}(" not in text} == set()


def test_the_compile_lock_belongs_to_one_thread_which_may_take_it_again() -> None:
    taken: list[bool] = []

    def other() -> None:
        taken.append(torch_private.compile_lock().acquire(blocking=False))

    with torch_private.compile_lock(), torch_private.compile_lock():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert taken == [False]


def test_joint_graphs_have_primals_tangents_and_nothing_else_as_inputs(seen: Seen) -> None:
    placeholders = [node for node in seen.joint.graph.nodes if node.op == "placeholder"]
    tangents = [node for node in placeholders if torch_private.is_tangent(node)]
    assert len(tangents) == 1
    assert [node for node in placeholders if torch_private.is_primal(node)] == placeholders[: -len(tangents)]
    assert len(placeholders) - 1 == len(list(Net().parameters())) + len(list(Net().buffers())) + 1
    assert not torch_private.is_nested_joint(seen.joint)


def test_outputs_split_into_forward_backward_and_mutations(seen: Seen) -> None:
    forward, backward, descriptors = torch_private.split_outputs(seen.joint, seen.num_fwd_outputs)
    assert len(forward) == len(descriptors) == seen.num_fwd_outputs
    assert len(torch_private.mutated_input_descriptors(descriptors)) == 3  # mean, variance, counter of one batch norm
    primals = [node for node in seen.joint.graph.nodes if node.op == "placeholder" and torch_private.is_primal(node)]
    assert len(backward) == len(primals)
    gradients = [node for node in backward if node is not None]
    assert len(gradients) == 6
    described = {node.meta["desc"] for node in primals}
    assert set(torch_private.mutated_input_descriptors(descriptors)) <= described


def test_common_subexpressions_become_one_and_random_ops_do_not() -> None:
    def step(x: Tensor, weight: Tensor) -> Tensor:
        twice = torch.sin(x * weight) + torch.sin(x * weight)
        noise = [torch.empty_like(weight).exponential_() for _ in range(2)]
        return (twice + F.dropout(weight, 0.5) + F.dropout(weight, 0.5) + noise[0] * weight + noise[1] * weight).sum()

    seen = Seen(step, torch.randn(8), torch.randn(8, requires_grad=True))
    assert len(seen.named(torch.ops.aten.sin.default)) == 2
    graph = torch_private.common_subexpressions(seen.joint.graph)
    targets = [node.target for node in graph.nodes]
    assert targets.count(torch.ops.aten.sin.default) == 1
    assert targets.count(torch.ops.aten.native_dropout.default) == 2
    assert targets.count(torch.ops.aten.exponential.default) == 2
    assert [node.name for node in graph.nodes] == [node.name for node in seen.joint.graph.nodes if node.name in set(map(str, graph.nodes))]


def test_forced_saves_and_the_users_checkpoints_are_tagged() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            inner = checkpoint(lambda y: torch.sin(torch.sin(y * self.weight)), x, use_reentrant=False)
            assert isinstance(inner, Tensor)
            return torch.cos(inner).sum()

    seen = Seen(Checkpointed(), torch.randn(8))
    torch_private.tag_forced_saves(seen.joint)
    tags = [node.meta.get("recompute") for node in seen.named(torch.ops.aten.sin.default)]
    assert tags
    assert any(tag in torch_private.USER_RECOMPUTES for tag in tags)
    assert torch_private.MUST_SAVE is CheckpointPolicy.MUST_SAVE


def test_classification_knows_what_depends_on_tangents_and_what_forward_needs(seen: Seen) -> None:
    info = torch_private.classify(seen.joint, seen.static_indices, seen.num_fwd_outputs)
    (tanh,) = seen.named(torch.ops.aten.tanh.default)
    (tanh_backward,) = seen.named(torch.ops.aten.tanh_backward.default)
    assert info.is_required_fw(tanh)
    assert not info.is_required_fw(tanh_backward)
    assert tanh_backward in info.tangents_closure
    assert tanh not in info.tangents_closure


def test_stock_saves_are_nodes_of_forward_and_fewer_under_a_smaller_memory_budget(seen: Seen) -> None:
    info = torch_private.classify(seen.joint, seen.static_indices, seen.num_fwd_outputs)
    saved = torch_private.stock_saved_nodes(seen.joint, info, 1.0)
    assert saved
    assert all(node not in info.tangents_closure for node in saved)
    recomputing = torch_private.stock_saved_nodes(seen.joint, info, 0.0)
    assert all(node.op == "placeholder" for node in recomputing)


def test_kinds_of_nodes(seen: Seen) -> None:
    (dropout,) = seen.named(torch.ops.aten.native_dropout.default)
    (tanh,) = seen.named(torch.ops.aten.tanh.default)
    members = [node for node in seen.joint.graph.nodes if torch_private.is_getitem(node)]
    assert {node.args[0] for node in members} >= {dropout}
    assert torch_private.is_random(dropout)
    assert not torch_private.is_random(tanh)
    assert not torch_private.is_sym_node(tanh)
    assert not torch_private.is_assert_only(tanh)
    assert not torch_private.is_opaque(tanh)
    assert not torch_private.is_effect(tanh)
    assert not torch_private.must_be_in_backward(tanh)
    assert not torch_private.is_getitem(tanh)
    (primal, *_) = (node for node in seen.joint.graph.nodes if node.op == "placeholder")
    assert torch_private.is_copy_into(seen.joint.graph.call_function(torch.ops.aten.copy_.default, (primal, tanh)), primal)


def test_symbolic_sizes_are_nodes_with_hints() -> None:
    seen = Seen(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(6, 8), dynamic=True)
    symbols = [node for node in seen.joint.graph.nodes if torch_private.is_sym_node(node)]
    assert symbols
    assert 6 in [torch_private.size_hint(node.meta["val"]) for node in symbols]
    assert torch_private.size_hint(7) == 7
    assert seen.graph is not None
    fakes = torch_private.fake_inputs(seen.graph)
    positions = [position for position, fake in enumerate(fakes) if isinstance(fake, torch.SymInt)]
    assert positions
    symbols_of_sizes = torch_private.size_symbols(seen.graph)
    assert set(map(str, symbols_of_sizes)) == {str(fakes[position]) for position in positions}
    assert [read(fakes).node.expr for read in symbols_of_sizes.values()] == list(symbols_of_sizes)
    assert torch_private.data_dependent_symbols(torch.empty(3)) == {}


@pytest.mark.parametrize("is_padded", [False, True])
def test_a_nested_tensor_is_what_lies_in_it_and_so_are_its_sizes(is_padded: bool) -> None:
    """Three sequences of 9 rows: the name of the ragged dimension is no size, the longest sequence where something is padded to it."""
    x = torch.nested.nested_tensor([torch.randn(length, 8) for length in (2, 3, 4)], layout=torch.jagged)
    inner = list(torch_private.inner_tensors(x))
    assert [tensor.data_ptr() for tensor in inner[:2]] == [x.values().data_ptr(), x.offsets().data_ptr()]
    assert [tensor.numel() for tensor in inner[2:]] == [0, 0]
    plain = torch.ones(3)
    (itself,) = torch_private.inner_tensors(plain)
    assert itself is plain
    found: list[tuple[set[int], list[int]]] = []

    def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        read = [torch_private.size_hint(read(inputs)) for read in torch_private.size_symbols(graph).values()]
        found.append(({torch_private.size_hint(one) for one in inputs if isinstance(one, torch.SymInt)}, read))
        return graph.forward

    def total(t: torch.Tensor) -> torch.Tensor:
        return (torch.nested.to_padded_tensor(t, 0.0) if is_padded else t.values()).sum()

    torch.compile(total, backend=backend)(x)
    assert found == [({0}, [9, 4] if is_padded else [9])]


def test_a_size_that_depends_on_data_is_told_from_one_that_does_not() -> None:
    found: list[dict[Any, Any]] = []

    def backend(graph: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
        found.extend(torch_private.data_dependent_symbols(node.meta.get("example_value")) for node in graph.graph.nodes)
        return graph.forward

    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        torch.compile(lambda x: torch.nonzero(x), backend=backend, fullgraph=True)(torch.tensor([0.0, 1.0, 1.0]))
    assert {len(symbols) for symbols in found} == {0, 1}  # the argument has none, the result has one


def test_extraction_returns_the_saved_values_and_symbols_that_backward_reads() -> None:
    seen = Seen(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(6, 8), dynamic=True)
    info = torch_private.classify(seen.joint, seen.static_indices, seen.num_fwd_outputs)
    (tanh,) = seen.named(torch.ops.aten.tanh.default)
    primals = [node for node in seen.joint.graph.nodes if torch_private.is_primal(node) and isinstance(node.meta["val"], Tensor)]
    symbols = [node for node in seen.joint.graph.nodes if torch_private.is_sym_node(node) and node not in info.tangents_closure]
    forward, backward = torch_private.extract_forward_and_backward(
        seen.joint,
        [*primals, tanh],
        symbols,
        [],
        num_fwd_outputs=seen.num_fwd_outputs,
        static_lifetime_nodes=info.static_lifetime_input_nodes,
    )
    names = {node.name for node in backward.graph.nodes if node.op == "placeholder"}
    outputs = next(node for node in forward.graph.nodes if node.op == "output").args[0]
    assert tanh.name in names
    assert names <= {node.name for node in outputs} | {"tangents_1"}  # type: ignore[union-attr]  # an output node's argument is a tuple


def test_recomputed_random_ops_are_replayed_from_the_state_before_them() -> None:
    """`replay_random_state` is what partition calls for them: forward returns the state, backward starts from it."""
    module = Net()
    made = cut(module, save_nothing)
    made.step(torch.randn(4, 8))
    again = [node for node in made.captured.joint.module.graph.nodes if torch_private.is_random(node)]
    info = made.captured.node_info
    assert again
    joint = made.captured.joint
    primals = [node for node in joint.module.graph.nodes if node.op == "placeholder" and torch_private.is_primal(node)]
    kept = [node for value in made.saved[-1] if (node := made.captured.nodes[value]) is not None]
    forward, backward = torch_private.extract_forward_and_backward(
        joint.module, [*primals, *kept], [], [], num_fwd_outputs=joint.num_fwd_outputs,
        static_lifetime_nodes=info.static_lifetime_input_nodes,  # type: ignore[attr-defined]  # torch's NodeInfo
    )  # fmt: skip
    before = {node: node.meta.get("recompute") for node in joint.module.graph.nodes}
    with torch_private.tracing_again([node.meta["val"] for node in primals]):
        forward, backward = torch_private.replay_random_state(joint.module, forward, backward, again, 0)
    assert {node: node.meta.get("recompute") for node in joint.module.graph.nodes} == before  # tags are put back
    assert any("run_and_save_rng_state" in str(node.target) for node in forward.graph.nodes)
    replays = [node for node in backward.graph.nodes if "run_with_rng_state" in str(node.target)]
    assert [node.meta["val"][0].shape for node in replays] == [node.meta["val"][0].shape for node in again]


def test_a_random_op_is_run_again_from_the_state_that_its_first_run_returned() -> None:
    """As a schedule does it, which runs one any number of times."""
    save, again = torch_private.random_state_operators()
    ones = torch.ones(64)
    torch.manual_seed(3)
    state, first = save(torch.ops.aten.native_dropout.default, ones, 0.5, True)
    after = torch.get_rng_state()
    for _ in range(3):
        torch.rand(7)
        moved = torch.get_rng_state()
        assert all(map(torch.equal, again(state, torch.ops.aten.native_dropout.default, ones, 0.5, True), first))
        assert torch.equal(torch.get_rng_state(), moved)
    assert not torch.equal(after, state)
    made = cut(Net(), save_nothing)
    made.step(torch.randn(4, 8))
    node = next(node for node in made.captured.joint.module.graph.nodes if torch_private.is_random(node))
    sample = torch_private.sample_random_state(node)
    assert type(sample) is type(node.meta["val"][0])
    assert (sample.shape, sample.dtype, sample.device) == (state.shape, state.dtype, state.device)


def test_getitems_stand_next_to_their_producer() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    pair = graph.call_function(torch.ops.aten.topk.default, (x, 2))
    other = graph.call_function(torch.ops.aten.sin.default, (x,))
    member = graph.call_function(operator.getitem, (pair, 0))
    graph.output((other, member))
    raised = torch_private.raise_getitems(fx.GraphModule({}, graph))
    order = [node.name for node in raised.graph.nodes]
    assert order.index(member.name) == order.index(pair.name) + 1


def test_a_boxed_graph_empties_its_arguments() -> None:
    graph = fx.Graph()
    graph.output((graph.call_function(torch.ops.aten.sin.default, (graph.placeholder("x"),)),))
    args = [torch.zeros(2)]
    run = torch_private.boxed(fx.GraphModule({}, graph))
    assert torch.equal(run(args)[0], torch.zeros(2))
    assert args == []


def test_eager_compilation_runs_both_graphs_and_wraps_each() -> None:
    sides: list[bool] = []

    def around(run: torch_private.Boxed, is_backward: bool) -> torch_private.Boxed:
        sides.append(is_backward)
        return run

    def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return torch_private.compile_eager(graph, inputs, partition=partition, around=around)

    def partition(joint: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        return torch_private.stock_partition(
            joint, inputs, num_fwd_outputs=kwargs["num_fwd_outputs"], static_lifetime_input_indices=None, fused=True
        )

    torch._dynamo.reset()
    x = torch.ones(4, requires_grad=True)
    torch.compile(lambda y: torch.sin(y).sum(), backend=backend)(x).backward()
    assert sorted(sides) == [False, True]
    torch.testing.assert_close(x.grad, torch.cos(torch.ones(4)))


def test_inductor_compilation_hands_out_the_generated_code_of_both_graphs() -> None:
    codes: list[torch_private.GeneratedCode] = []
    ran: list[bool] = []
    uuids: list[object] = []

    def around(run: torch_private.Boxed, is_backward: bool) -> torch_private.Boxed:
        def counted(args: list[Any]) -> Any:
            ran.append(is_backward)
            return run(args)

        counted._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd's mark of this calling convention
        return counted

    def partition(joint: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        door = torch._inductor.config.custom_partitioner_fn  # type: ignore[attr-defined]
        uuids.append(door.uuid())
        return torch_private.stock_partition(
            joint, inputs, num_fwd_outputs=kwargs["num_fwd_outputs"], static_lifetime_input_indices=None, fused=True
        )

    def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return torch_private.compile_inductor(
            graph,
            inputs,
            options={},
            partition=partition,
            uuid="one",
            around=around,
            on_code=codes.append,
            budget_bytes=lambda: None,
            frees_at_once=lambda: False,
            keeps_order=lambda: False,
        )

    torch._dynamo.reset()
    weight = torch.ones(8, 8, requires_grad=True)
    for _ in range(2):  # the second compilation finds Inductor's cache filled: it must still hand out code, and be wrapped
        torch._dynamo.reset()
        weight.grad = None
        torch.compile(lambda w: torch.sin(w @ w).sum(), backend=backend)(weight).backward()
        assert [code.is_backward for code in codes] == [False, True]
        assert all("def call(" in code.source and "extern_kernels.mm" in code.source for code in codes)
        assert all(any(node.target is torch.ops.aten.mm.default for node in code.graph.graph.nodes) for code in codes)
        assert ran == [False, True]
        assert uuids == ["one"]
        codes.clear()
        ran.clear()
        uuids.clear()
    assert weight.grad is not None


def test_autotuning_of_a_first_run_clears_the_cache_with_what_the_budget_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.runtime.benchmarking import benchmarker
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    monkeypatch.setitem(benchmarker.__dict__, "L2_cache_size", 100_000)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 10**9)
    function = SimpleNamespace(arg_names=["in_out_ptr0", "in_ptr0"])
    asked: list[bool] = []

    class Kernel(SimpleNamespace):
        def __setattr__(self, name: str, value: object) -> None:
            asked.append(bool(value))
            super().__setattr__(name, value)

    kernel = Kernel(fn=function, mutated_arg_names=["in_out_ptr0"], optimize_mem=False)
    seen: list[int] = []

    def run(args: list[Any]) -> str:
        CachingAutotuner.copy_args_to_cpu_if_needed(kernel, torch.empty(10, 100), torch.empty(5000))
        by_method = getattr(benchmarker, "get_device_cache_size", lambda: benchmarker.L2_cache_size)  # torch 2.12 on
        assert by_method() == benchmarker.L2_cache_size
        seen.append(benchmarker.L2_cache_size)
        return "result"

    tight = torch_private.tuned_within(run, lambda: 10**9 + 2 * 2**20 + 6000)
    roomy = torch_private.tuned_within(run, lambda: 2 * 10**9)
    over = torch_private.tuned_within(run, lambda: 10**9 - 1)
    free = torch_private.tuned_within(run, lambda: None)
    assert tight([1]) == "result"
    assert asked == [True, False]  # what is set aside in host memory, for this benchmark only
    assert [tight([2]), roomy([3]), over([4]), free([5])] == ["result"] * 4
    in_blocks = 1536  # 6,000 less 4,096 of a copy, in blocks of 512, beside what two blocks may be too large
    assert seen == [in_blocks, 100_000, 100_000, 0, 100_000]  # the second time it is as it was


def test_inductor_turns_images_of_convolutions_to_channels_last() -> None:
    linear, image = Seen(nn.Linear(4, 4), torch.randn(4, 4)), Seen(nn.Conv2d(3, 8, 3), torch.randn(2, 3, 8, 8))
    assert not torch_private.lays_out_channels_last(linear.joint)
    assert torch_private.lays_out_channels_last(image.joint)


def test_a_partitioner_survives_the_cache_key() -> None:
    door = torch_private.DyngranPartitioner(lambda *_, **__: (fx.GraphModule({}, fx.Graph()), fx.GraphModule({}, fx.Graph())), "key")
    assert pickle.loads(pickle.dumps(door)).uuid() == "key"


def test_the_body_of_a_higher_order_operator_is_told_apart() -> None:
    graph = fx.Graph()
    graph.output((graph.placeholder("primals_1"),))
    assert torch_private.is_nested_joint(fx.GraphModule({}, graph))


def test_a_kept_graph_compiles_again_outside_of_dynamo_with_the_same_gradients() -> None:
    module, x = nn.Linear(8, 8), torch.randn(4, 8)
    seen = Seen(module, x)
    seen.out.sum().backward()
    want = module.weight.grad
    assert seen.graph is not None
    fakes = torch_private.fake_inputs(seen.graph)
    assert [tuple(fake.shape) for fake in fakes] == [tuple(value.shape) for value in seen.inputs]
    with torch_private.tracing_again(fakes):
        again = torch_private.compile_eager(
            torch_private.keep_copy(seen.graph), fakes, partition=seen.partition, around=lambda run, _is_backward: run
        )
    module.weight.grad = None
    values = {tuple(p.shape): p for p in module.parameters()} | {(4, 8): x}
    again(*(values[tuple(fake.shape)] for fake in fakes))[0].sum().backward()
    assert want is not None
    assert torch.equal(want, module.weight.grad)  # type: ignore[arg-type]


def test_configuration_is_changed_for_one_block_only() -> None:
    from torch._functorch import config

    before = config.enable_autograd_cache
    with torch_private.functorch_config(enable_autograd_cache=not before):
        assert config.enable_autograd_cache is not before
    assert config.enable_autograd_cache is before


def test_inductor_hands_to_draws_what_the_trace_hands_them(seen: Seen) -> None:
    module = torch_private.keep_copy(seen.joint)
    torch_private.hold_layouts_of_draws(module)
    (draw,) = (node for node in module.graph.nodes if torch_private.is_random(node))
    (laid,) = draw.all_input_nodes
    assert str(laid.target) == "dyngran.laid_out.default"
    assert laid.args[1] == list(laid.args[0].meta["val"].stride())
    assert laid.meta["val"] is laid.args[0].meta["val"]
    assert len(module.graph.nodes) == len(seen.joint.graph.nodes) + 1
    x = torch.randn(4, 8).t()
    assert torch.equal(laid.target(x, [1, 8]), x)
    assert laid.target(x, [1, 8]).stride() == (1, 8)


def test_options_and_modes_of_inductor() -> None:
    names = torch_private.inductor_option_names()
    assert {"fallback_random", "max_autotune", "custom_partitioner_fn"} <= set(names)
    assert torch_private.mode_options("reduce-overhead") == {"triton.cudagraphs": True}
    assert torch_private.mode_options("default") == {}
    assert set(torch_private.mode_options("max-autotune")) <= set(names)


def test_a_graph_break_is_seen_in_the_graph_before_it() -> None:
    ends: list[bool] = []

    def backend(graph: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
        ends.append(torch_private.ends_in_graph_break(graph))
        ends.append(torch_private.ends_in_graph_break(torch_private.keep_copy(graph)))
        return graph.forward

    def step(x: Tensor) -> Tensor:
        x = torch.sin(x)
        torch._dynamo.graph_break()
        return torch.cos(x)

    torch._dynamo.reset()
    torch.compile(step, backend=backend)(torch.ones(2))
    assert ends == [True, True, False, False]


def test_capture_on_this_release_knows_parameters_and_inputs() -> None:
    made = cut(Net(), save_nothing)
    made.step(torch.randn(4, 8))
    kinds = [value.kind for value in made.captured.problem.values]
    assert kinds.count(Kind.PARAMETER) == 6


def test_a_machine_without_a_compiler_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config

    assert torch_private.missing_tool({"meta"}) is None
    with config.patch({"cpp.cxx": ("no-such-compiler",)}):
        sentence = torch_private.missing_tool({"cpu"})
    assert sentence is not None and "C++ compiler" in sentence
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: False)
    assert "triton" in str(torch_private.missing_tool({"cuda"}))


def test_plain_dispatch_runs_real_tensors_whatever_the_thread_is_doing() -> None:
    from torch._subclasses import FakeTensorMode

    real = torch.ones(4, 4)
    with FakeTensorMode(), torch.device("meta"), torch.autocast("cpu", torch.bfloat16):
        with torch_private.plain_dispatch():
            product = torch.ops.aten.mm.default(real, torch.ones(4, 4))
        fake = torch.ones(4, 4)
    assert type(product) is Tensor
    assert (product.device.type, product.dtype, product.sum().item()) == ("cpu", torch.float32, 64.0)
    assert (type(fake).__name__, fake.device.type) == ("FakeTensor", "meta")


def test_allocations_of_a_thread_are_recorded_beside_a_profiler_of_another() -> None:
    def work() -> list[tuple[str, str, int]]:
        with torch_private.cpu_memory_events() as events, torch.profiler.record_function("ours"):
            torch.empty(1000)
        return [tuple(event) for event in events if event.kind == "memory_alloc" or event.name == "ours"]

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True):
        (found,) = ThreadPoolExecutor(1).map(lambda _: work(), [0])
    assert found == [("push", "ours", 0), ("memory_alloc", "", 4000), ("memory_alloc", "", -4000)]


def test_the_error_of_a_failed_code_generation_is_an_exception_of_inductor() -> None:
    error = torch_private.code_generation_error()
    assert issubclass(error, Exception) and error.__module__.startswith("torch._inductor")


def test_a_step_of_tensors_without_data_is_traced_up_to_the_partition() -> None:
    """Under fake tensors, through Dynamo and Inductor's passes over the joint graph; what runs are the two graphs, op by op."""
    seen: list[str] = []
    cuts: list[fx.GraphModule] = []

    def partition(joint: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        cuts.append(joint)
        indices = kwargs.get("static_lifetime_input_indices")
        return torch_private.stock_partition(
            joint, inputs, num_fwd_outputs=kwargs["num_fwd_outputs"], static_lifetime_input_indices=indices, fused=True
        )

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        seen.append("passes")
        yield
        seen.append("end of passes")

    def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return torch_private.trace_inductor(graph, inputs, options={}, partition=partition, around_passes=around)

    torch_private.forget_compiled()
    with torch_private.fake_tensor_mode():
        assert type(torch.ones(2)) is torch_private.fake_tensor_type()
        net = Net()
        loss = torch.compile(net, backend=backend)(torch.randn(4, 8))
        loss.backward()
    assert type(loss).__name__ == "FakeTensor" and net.first.weight.grad is not None
    assert seen == ["passes", "end of passes"] and len(cuts) == 1
    targets = {str(node.target) for node in cuts[0].graph.nodes}
    assert "prims.inductor_seeds.default" in targets  # the passes have run
    tensors = [tensor for node in cuts[0].graph.nodes for tensor in torch_private.tensors_in(node.meta.get("val"))]
    card = torch.device("cuda", 0)
    with torch_private.seen_on(card, [*tensors, None, 3]):
        assert {tensor.device for tensor in tensors} == {card}
    assert {tensor.device.type for tensor in tensors} == {"cpu"}


def test_a_tensor_that_stands_twice_in_a_tree_is_changed_once() -> None:
    one, other = torch.ones(1), torch.ones(2)
    changed = torch_private.mapped_tensors(lambda tensor: tensor + 1, {"a": one, "b": (one, [other, 5])})
    assert changed["a"] is changed["b"][0] and changed["b"][1][1] == 5
    assert torch_private.tensors_in(changed) == [changed["a"], changed["a"], changed["b"][1][0]]


def test_a_graph_break_has_a_reason_and_a_line() -> None:
    found: list[tuple[str, str] | None] = []

    def backend(graph: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        found.append(torch_private.break_reason(graph))
        return graph.forward

    def step(x: Tensor) -> Tensor:
        x = torch.sin(x)
        torch._dynamo.graph_break()
        return torch.cos(x)

    torch_private.forget_compiled()
    torch.compile(step, backend=backend)(torch.ones(2))
    assert found[1] is None and found[0] is not None
    assert "graph_break" in found[0][0]
    assert found[0][1].startswith("test_torch_private.py:")


def test_a_function_that_goes_on_awaits_what_it_calls() -> None:
    awaited: list[tuple[bool, bool]] = []
    frames: list[int | None] = []

    def backend(graph: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        awaited.append((torch_private.is_nested(), torch_private.is_awaited()))
        frames.append(torch_private.frame_id())
        return graph.forward

    def inner(x: Tensor) -> Tensor:
        x = torch.sin(x)
        torch._dynamo.graph_break()
        return torch.cos(x)

    def passes_on(x: Tensor) -> Tensor:
        return inner(x)

    def goes_on(x: Tensor) -> Tensor:
        return torch.exp(inner(torch.tanh(x)))

    found = []
    for step in (inner, passes_on, goes_on):
        torch_private.forget_compiled()
        torch.compile(step, backend=backend)(torch.ones(2))
        found.append([*awaited])
        awaited.clear()
    first, inside, called = (False, False), (True, False), (True, True)
    assert found == [[first, inside], [inside, inside], [first, called, called, inside]]
    assert None not in frames[-4:] and len(set(frames[-4:])) == 4
    assert torch_private.frame_id() is None


def test_the_nearest_compiled_forwards_are_found_through_other_operators() -> None:
    x = torch.ones(3, requires_grad=True)
    torch_private.forget_compiled()
    first, second = (torch.compile(function, backend="aot_eager") for function in (torch.sin, torch.cos))
    made = first(x)
    (node,) = torch_private.compiled_backwards([made.flip(0) * 2, 3])
    assert torch_private.compiled_backwards([made]) == [node]
    again = second(made)
    assert torch_private.compiled_backwards([made, again + made]) == [node, *torch_private.compiled_backwards([again])]
    assert torch_private.compiled_backwards([x, x * 2, torch.ones(2)]) == []


def test_other_threads_may_call_while_one_traces() -> None:
    asked: list[bool] = []
    ask = torch.fx._symbolic_trace.is_fx_symbolic_tracing

    def body(x: Tensor) -> Tensor:
        asked.extend([pool.submit(ask).result(), ask()])
        return x

    with ThreadPoolExecutor(1) as pool:
        with torch_private.tracing_here(), torch_private.tracing_here():
            fx.symbolic_trace(body)
        fx.symbolic_trace(body)
    assert asked == [False, True, True, True]
    assert not ask()


def test_what_the_compiled_function_holds_is_found_whether_it_is_read_or_not() -> None:
    found: list[Tensor] = []

    def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        found.extend(torch_private.tensors_of_frame())
        return graph.forward

    module, unread, nested = nn.Linear(4, 4), torch.randn(3), torch.randn(2)

    def step(x: Tensor, others: dict[str, list[Tensor]]) -> Tensor:
        return x + 1

    torch.compile(step, backend=backend)(unread, {"inside": [nested]})
    assert [id(t) for t in found] == [id(unread), id(nested)]
    found.clear()
    torch.compile(module, backend=backend)(torch.randn(2, 4))
    assert {id(p) for p in module.parameters()} <= {id(t) for t in found}
    assert torch_private.tensors_of_frame() == []


def test_modules_that_are_being_called_are_told_from_the_inside_out() -> None:
    seen: list[nn.Module] = []

    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.extend(torch_private.modules_being_called())
            return x

    model = nn.Sequential(Inner())
    model(torch.zeros(1))
    assert seen == [model[0], model]
    assert torch_private.modules_being_called() == []


def test_variables_that_somebody_has_asked_for_stay_as_they_were() -> None:
    class Module(nn.Module):
        def forward(self, x: Tensor) -> tuple[list[nn.Module], dict[str, Any]]:
            variables = locals()
            return torch_private.modules_being_called(), variables

    module, x = Module(), torch.zeros(1)
    found, variables = module(x)
    assert found == [module]
    assert {"self", "x"} <= set(variables)


class Gate(nn.Module):
    """Backward of softplus lies otherwise than torch's trace thinks when its gradient comes turned."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.bias = nn.Linear(8, 4), nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        gate = F.softplus(self.linear(x) + self.bias).transpose(1, 2)
        return (gate.contiguous() * torch.arange(16.0)).cumsum(-1).mul(0.1).sin().sum()


def test_a_view_copies_where_memory_lies_otherwise_than_the_trace_thought() -> None:
    torch.manual_seed(0)
    model, x = Gate(), torch.randn(2, 16, 8)
    model(x).backward()
    want = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    Seen(model, x).out.backward()
    for parameter, gradient in zip(model.parameters(), want, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


class Turned(nn.Module):
    """Dropout of a turned value that is turned back: its backward lies as the mask does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.linear(x).transpose(1, 2), 0.5).transpose(1, 2).sin().square().sum()


@pytest.mark.parametrize("make", [Gate, Turned])
def test_strides_are_what_kernels_make_them(make: Callable[[], nn.Module]) -> None:
    joint = torch_private.keep_copy(Seen(make(), torch.randn(2, 16, 8)).joint)
    wrong: list[str] = []

    class Compared(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            if isinstance(result, Tensor) and result.stride() != n.meta["val"].stride():
                wrong.append(n.name)
            return result

    def strays() -> list[str]:
        wrong.clear()
        for node in joint.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
            node.target = torch.ops.aten.reshape.default
        values = [node.meta["val"] for node in joint.graph.find_nodes(op="placeholder")]
        Compared(joint).run(*(torch.randn(v.shape).as_strided(v.shape, v.stride()) for v in values), enable_io_processing=False)
        return list(wrong)

    assert strays()
    torch_private.correct_fake_values(joint.graph)
    assert strays() == []


def test_attention_in_float64_sums_in_float64() -> None:
    class Attention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x).square().sum()

    joint = torch_private.keep_copy(Seen(Attention(), torch.randn(1, 2, 16, 8, dtype=torch.float64, requires_grad=True)).joint)
    torch_private.correct_fake_values(joint.graph)
    (attention,) = joint.graph.find_nodes(op="call_function", target=torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default)
    query = torch.randn(1, 2, 16, 8, dtype=torch.float64)
    real = attention.target(query, query, query)
    assert [value.dtype for value in attention.meta["val"]] == [value.dtype for value in real]
    (logsumexp,) = (user for user in attention.users if user.args[1] == 1)
    assert logsumexp.meta["val"].dtype is torch.float64


def test_what_dynamo_gives_up_is_told_with_its_backend_and_a_reason() -> None:
    told: list[tuple[torch_private.CompiledFor, torch_private.GivenUp]] = []
    watch = torch_private.GivenUpWatch(lambda compiled_for, given_up: told.append((compiled_for, given_up)))

    def planned(graph: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        torch_private.note_planned()
        return graph.forward

    def unplanned(graph: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        return graph.forward

    def broken(x: Tensor) -> Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos()

    def looped(x: Tensor) -> Tensor:
        for _ in range(2):
            x = x.sin()
            torch._dynamo.graph_break()
        return x

    for function, backend in ((broken, planned), (broken, unplanned), (looped, planned)):
        torch.compiler.reset()
        watch.start()
        watch.start()
        torch.compile(function, backend=backend, options={"one": 1})(torch.randn(2))
    assert [(one.backend, one.settings, given_up.function) for one, given_up in told] == [
        (unplanned, {"options": {"one": 1}}, "broken"),
        (planned, {"options": {"one": 1}}, "looped"),
    ]
    assert all("graph_break" in given_up.reason and given_up.place.startswith("test_torch_private.py:") for _, given_up in told)


def test_a_call_from_within_a_backward_is_seen() -> None:
    seen = [torch_private.is_in_backward()]
    x = torch.randn(2, requires_grad=True)
    y = x.sin()
    y.register_hook(lambda _: seen.append(torch_private.is_in_backward()))
    y.sum().backward()  # type: ignore[no-untyped-call]
    assert seen == [False, True]


def test_hooks_on_what_is_saved_are_seen() -> None:
    assert not torch_private.are_saved_tensors_hooked()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        assert torch_private.are_saved_tensors_hooked()
    assert not torch_private.are_saved_tensors_hooked()


def test_operators_run_on_fake_tensors() -> None:
    with torch_private.fake_tensor_mode():
        x = torch.randn(4, 8)
    assert torch_private.is_plain_fake(x) and not torch_private.is_plain_fake(torch.ones(2)) and not torch_private.is_plain_fake(3)
    made = torch_private.fake_call(x, torch.ops.aten.sum.dim_IntList, (x, [1]), {"dtype": torch.float64})
    assert torch_private.is_plain_fake(made) and made.shape == (4,) and made.dtype is torch.float64
