"""Tracing as on a CUDA card without one: FakeTensors of the CPU stand for the card's, and what depends on the device is decided as there.

Emulated, for a process that traces with FakeTensors through Dynamo and AOTAutograd:

- devices: a request for CUDA under a FakeTensorMode gives a tensor of the CPU, and no copy of one that is there already; in code that
  Dynamo traces, and in torch's decompositions, a tensor's ``device`` is cuda:0 and ``is_cuda`` is true;
- ``torch.autocast("cuda")`` (`torch_autocast`);
- ``F.scaled_dot_product_attention`` (`torch_attention`);
- RMS norm, one operator on CUDA alone, and the statistics of norms, in float32 there.

Not emulated, so that a plan may differ from one made on the card: ``torch.cuda.is_available()`` and what else asks the driver (a model
with kernels of its own takes its slow path); ``device`` and ``is_cuda`` read by code outside of Dynamo's trace; tensors meant for the host
(they count as the card's, and copies between the two vanish); ``torch.Generator("cuda")``; GradScaler, off without a card; nn.LSTM, GRU
and RNN, which Dynamo leaves to eager torch and which are cuDNN's there; operators of other libraries that CUDA alone has; graph passes
of Inductor that run after AOTAutograd.

Sources in pytorch/pytorch: ``torch/_subclasses/fake_tensor.py``, ``torch/fx/experimental/proxy_tensor.py``,
``torch/_dynamo/variables/tensor.py``, ``torch/_refs/__init__.py`` and ``torch/_decomp/decompositions.py`` (norms),
``aten/src/ATen/native/native_functions.yaml`` (which operators have kernels of CUDA alone).
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch._dynamo import trace_rules
from torch._dynamo.variables import ConstantVariable, TensorVariable
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental import proxy_tensor
from torch.library import Library

from dyngran.compiler.offline import torch_attention, torch_autocast

Register = torch_autocast.Register

_CARD = torch.device("cuda", 0)
_HOST = torch.device("cpu")
_FUSED_ON_CUDA = ("_fused_rms_norm",)
_libraries: list[Library] = []  # what is registered lives as long as its library
_reads_card = [False]  # whether Python sees FakeTensors on the card just now


def emulate_cuda(capability: tuple[int, int]) -> None:
    """Make this process trace as on a CUDA card of compute ``capability``, (9, 0) for an H100, for good.

    For a process that traces with FakeTensors of the CPU and then dies: it replaces kernels and methods of torch, and nothing undoes it.
    Raises FileNotFoundError if the installed torch lacks its headers, RuntimeError if called twice.
    """
    if _libraries:
        raise RuntimeError("emulate_cuda was called before in this process")
    make: Any = Library
    _libraries.append(make("aten", "IMPL"))
    register = functools.partial(_libraries[0].impl, allow_override=True)
    warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
    for module in (__name__, torch_autocast.__name__, torch_attention.__name__):
        trace_rules.add(module)  # frames of this code run below Dynamo wherever it left a model to eager torch
    _redirect_devices(register)
    let_fake_modules_move()
    _keep_fused(register)
    _show_card_to_dynamo()
    _show_card_to_decompositions()
    torch_autocast.install(register)
    torch_attention.install(register, capability)


def _home(value: Any) -> Any:
    return _HOST if isinstance(value, torch.device) and value.type == "cuda" else value


def _abroad(value: Any) -> Any:
    return _CARD if isinstance(value, torch.device) and value.type == "cpu" else value


def _redirect_devices(register: Register) -> None:
    """Requests for CUDA become requests for the CPU, before FakeTensors are made and before nodes are recorded."""

    def at_home(before: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(before)
        def dispatch(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            with seen_on_card(False):
                return before(mode, func, types, tuple(_home(one) for one in args), {k: _home(one) for k, one in (kwargs or {}).items()})

        return dispatch

    make: Any = FakeTensor.__new__

    def made(cls: Any, mode: Any, elem: Any, device: torch.device, *args: Any, **kwargs: Any) -> Any:
        """Python code that copies a FakeTensor's device while it is seen on the card."""
        return make(cls, mode, elem, _home(device) if _reads_card[0] else device, *args, **kwargs)

    fakes: Any = FakeTensor
    fakes.__new__ = staticmethod(made)
    for owner, name in ((FakeTensorMode, "dispatch"), (proxy_tensor.ProxyTorchDispatchMode, "__torch_dispatch__")):
        setattr(owner, name, at_home(getattr(owner, name)))
    register("to.device", _to_device, "CompositeImplicitAutograd")
    register("to.dtype_layout", _to_layout, "CompositeImplicitAutograd")


def _to_device(
    self: torch.Tensor,
    device: torch.device,
    dtype: torch.dtype,
    non_blocking: bool = False,
    copy: bool = False,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    return _to_layout(self, dtype=dtype, device=device, non_blocking=non_blocking, copy=copy, memory_format=memory_format)


def _to_layout(
    self: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    copy: bool = False,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    """Tensor.to, which would copy a tensor that stands for one on the card to the card."""
    target = _home(device)
    same = (
        (dtype is None or dtype == self.dtype)
        and (layout is None or layout == self.layout)
        and (target is None or target.type == _home(self.device).type)
        and (memory_format in (None, torch.preserve_format) or self.is_contiguous(memory_format=memory_format))
    )
    if same and not copy:
        return self
    return torch.ops.aten._to_copy.default(  # type: ignore[no-any-return]  # an operator is not annotated
        self, dtype=dtype, layout=layout, device=target, pin_memory=pin_memory, non_blocking=non_blocking, memory_format=memory_format
    )


@contextlib.contextmanager
def seen_on_card(seen: bool = True) -> Iterator[None]:
    """Python code reads that FakeTensors are on the card; what it calls of torch goes on with them on the CPU."""
    before, _reads_card[0] = _reads_card[0], seen
    try:
        yield
    finally:
        _reads_card[0] = before


def _show_card_to_dynamo() -> None:
    def device(self: Any, tx: Any) -> Any:
        return None if self.device is None else ConstantVariable.create(_CARD if self.device.type == "cpu" else self.device)

    def is_cuda(self: Any, tx: Any) -> Any:
        return None if self.device is None else ConstantVariable.create(self.device.type in ("cpu", "cuda"))

    TensorVariable.method_attr_device = device  # type: ignore[method-assign]  # for good, in a process that dies
    TensorVariable.method_attr_is_cuda = is_cuda  # type: ignore[method-assign]  # as above


def _show_card_to_decompositions() -> None:
    """torch's own Python code branches on a tensor's device in decompositions and in a few shape rules; C++ goes on seeing the CPU."""
    from torch._subclasses import fake_impls

    def device(self: Any) -> torch.device:
        if self.fake_mode.in_kernel_invocation:
            return torch.device("meta")
        return _CARD if _reads_card[0] and self.fake_device.type == "cpu" else self.fake_device

    def is_cuda(self: Any) -> bool:
        return bool(device(self).type == "cuda")

    fakes: Any = FakeTensor
    fakes.device, fakes.is_cuda = property(device), property(is_cuda)
    rules: Any = fake_impls.op_implementations_dict
    for table, operators in ((rules, [torch.ops.aten.native_layer_norm.default]), (decomposition_table, [*decomposition_table])):
        table.update({op: _with_card(table[op]) for op in operators if op in table})
    tracer: Any = proxy_tensor
    decompose = tracer.maybe_handle_decomp

    @functools.wraps(decompose)
    def decompose_on_card(mode: Any, op: Any, args: Any, kwargs: Any) -> Any:
        with seen_on_card(True):
            return decompose(mode, op, tuple(_abroad(one) for one in args), {k: _abroad(one) for k, one in kwargs.items()})

    tracer.maybe_handle_decomp = decompose_on_card


def _with_card(before: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(before)
    def run(*args: Any, **kwargs: Any) -> Any:
        with seen_on_card(True):
            return before(*(_abroad(one) for one in args), **{k: _abroad(one) for k, one in kwargs.items()})

    return run


def _keep_fused(register: Register) -> None:
    """Operators that have a kernel of their own on CUDA, and on the CPU are calls of others: with a kernel of the CPU they stay whole."""

    def never(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("only FakeTensors are traced in a process that emulates CUDA")

    for name in _FUSED_ON_CUDA:
        register(name, never, "CPU")


def let_fake_modules_move() -> None:
    """Module.to exchanges FakeTensors, which torch refuses for any that is traced: here a parameter takes the new one's data, for good.

    That cannot make a tensor of the meta device one of another (as `Module.to_empty` does), so there are none: they are made on the CPU.
    """
    utils: Any = torch.utils
    before = utils.swap_tensors

    @functools.wraps(before)
    def swap(first: torch.Tensor, second: torch.Tensor) -> None:
        if isinstance(first, FakeTensor) and isinstance(second, FakeTensor):
            first.data = second.data
            first.fake_device = second.fake_device
        else:
            before(first, second)

    utils.swap_tensors = swap
    dispatch: Any = FakeTensorMode.dispatch

    @functools.wraps(dispatch)
    def without_meta(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(mode, func, types, tuple(map(_from_meta, args)), {name: _from_meta(one) for name, one in (kwargs or {}).items()})

    modes: Any = FakeTensorMode
    modes.dispatch = without_meta


def _from_meta(value: Any) -> Any:
    return _HOST if isinstance(value, torch.device) and value.type == "meta" else value
