"""CUDA's autocast for tensors on the CPU: the operator lists that torch was built with, as Python kernels of the AutocastCPU key.

Sources: the lists are read from the installed torch, ``include/ATen/autocast_mode.h`` (macros AT_FORALL_LOWER_PRECISION_FP,
AT_FORALL_FP32, AT_FORALL_FP32_SET_OPT_DTYPE, AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE, AT_FORALL_PROMOTE); what each list means
is that of ``aten/src/ATen/autocast_mode.cpp`` and of the page "Automatic Mixed Precision package" of torch's documentation.

The cache of casted weights is not emulated: the tracers of torch switch it off, and common subexpressions are merged after them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.library import fallthrough_kernel

Kernel = Callable[..., Any]
Register = Callable[[str, Kernel, str], None]
Policy = Callable[[Any, dict[str, Any]], Any]

_KEY = "AutocastCPU"
_ENTRY = re.compile(r"_\(\s*(\w+)(?:\s*,\s*(\w+))?\s*\)")
_RENAMED = re.compile(r'"(\w+\.?\w*)"')


def install(register: Register) -> None:
    """Make autocast on the CPU treat every aten operator as autocast on CUDA does, with CUDA's default dtype.

    Raises FileNotFoundError if the installed torch came without its headers.
    """
    text = _header().read_text()
    policies: dict[str, Policy] = {}
    for macro, policy in _LISTS.items():
        policies |= dict.fromkeys(_names(text, macro), policy)
    policies |= dict.fromkeys(_RENAMED.findall(_macro(text, "AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE")), _append_float32)
    policies["binary_cross_entropy"] = _refuse
    for name in _cpu_names() - policies.keys():
        register(name, fallthrough_kernel, _KEY)
    for name, policy in policies.items():
        register(name, _kernel(name, policy), _KEY)
    _map_context()


def _header() -> Path:
    path = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: the lists of CUDA's autocast are read from the headers that torch is shipped with")
    return path


def _macro(text: str, name: str) -> str:
    """The body of a macro of one argument, its continuation lines joined."""
    found = re.search(rf"#define {name}\(_\)((?:.*\\\n)*.*)", text)
    if found is None:
        raise LookupError(f"{_header()} has no list {name}")
    return found.group(1).replace("\\\n", " ")


def _names(text: str, macro: str) -> list[str]:
    """Operators of a list, as ``name`` or ``name.overload``."""
    return [f"{name}.{overload}" if overload else name for name, overload in _ENTRY.findall(_macro(text, macro))]


def _cpu_names() -> set[str]:
    names = (name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    return {name for name in names if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", _KEY)}


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _kernel(name: str, policy: Policy) -> Kernel:
    """The kernel of one operator: ``policy`` calls it, with other arguments, below autocast."""
    op = _overload(name)
    parameters = [argument.name for argument in op._schema.arguments]
    below = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(below):
            return policy(op, dict(zip(parameters, args, strict=False)) | kwargs)

    return kernel


def _eligible(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64 and value.device.type == "cpu"


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(one, dtype) for one in value)
    return value.to(dtype) if _eligible(value) and value.dtype != dtype else value


def _cast_all(arguments: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Cast the last argument first, the order in which torch's own casts come out of its compiler and into a trace."""
    return dict([(name, _cast(value, dtype)) for name, value in [*arguments.items()][::-1]][::-1])


def _call(op: Any, arguments: dict[str, Any]) -> Any:
    """Call with arguments by name, those that may be given by position so given."""
    kinds = {argument.name: argument.kwarg_only for argument in op._schema.arguments}
    positional: list[Any] = []
    for name, kwarg_only in kinds.items():
        if kwarg_only or name not in arguments:
            break
        positional.append(arguments[name])
    rest = {name: arguments[name] for name in [*kinds][len(positional) :] if name in arguments}
    return op(*positional, **rest)


def _lower(op: Any, arguments: dict[str, Any]) -> Any:
    return _call(op, _cast_all(arguments, torch.get_autocast_dtype("cpu")))


def _float32(op: Any, arguments: dict[str, Any]) -> Any:
    return _call(op, _cast_all(arguments, torch.float32))


def _set_float32(op: Any, arguments: dict[str, Any]) -> Any:
    """Compute and return in float32 unless the caller chose a dtype or the first argument is no float."""
    if _eligible(next(iter(arguments.values()))) and arguments.get("dtype") is None:
        arguments = arguments | {"dtype": torch.float32}
    return _call(op, arguments)


def _append_float32(op: Any, arguments: dict[str, Any]) -> Any:
    """The same norm in its overload that takes a dtype."""
    first = next(iter(arguments.values()))
    dtype = torch.float32 if _eligible(first) else first.dtype
    if op._overloadname == "Scalar":
        return torch.ops.aten.norm.ScalarOpt_dtype(first, arguments.get("p", 2), dtype=dtype)
    norms = torch.ops.aten.norm
    by_name = op._overloadname.startswith("names")
    norm = norms.names_ScalarOpt_dim_dtype if by_name else norms.ScalarOpt_dim_dtype
    return norm(first, arguments["p"], arguments["dim"], arguments.get("keepdim", False), dtype=dtype)


def _promote(op: Any, arguments: dict[str, Any]) -> Any:
    """Cast all to float32 if one of the arguments is float32, to autocast's dtype otherwise."""
    wide = any(value.dtype == torch.float32 for value in _tensors(arguments.values()) if _eligible(value))
    return _call(op, _cast_all(arguments, torch.float32 if wide else torch.get_autocast_dtype("cpu")))


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _tensors(value)
        elif isinstance(value, torch.Tensor):
            yield value


def _refuse(op: Any, arguments: dict[str, Any]) -> Any:
    raise RuntimeError(
        "binary_cross_entropy (BCELoss) is refused under CUDA autocast, its backward overflows in float16: "
        "use binary_cross_entropy_with_logits (BCEWithLogitsLoss)"
    )


_LISTS: dict[str, Policy] = {
    "AT_FORALL_LOWER_PRECISION_FP": _lower,
    "AT_FORALL_FP32": _float32,
    "AT_FORALL_FP32_SET_OPT_DTYPE": _set_float32,
    "AT_FORALL_PROMOTE": _promote,
}


def _map_context() -> None:
    """torch.autocast("cuda") becomes autocast on the CPU in CUDA's dtype; what code asks of CUDA's autocast answers likewise."""
    autocast: Any = torch.autocast
    before, enter, leave = autocast.__init__, autocast.__enter__, autocast.__exit__

    @functools.wraps(before)
    def start(
        self: Any, device_type: str, dtype: torch.dtype | None = None, enabled: bool = True, cache_enabled: bool | None = None
    ) -> None:
        if device_type == "cuda":
            dtype = torch.get_autocast_dtype("cuda") if dtype is None else dtype
            device_type = "cpu"
        before(self, device_type, dtype, enabled, cache_enabled)

    @functools.wraps(enter)
    def enter_both(self: Any) -> Any:
        self.prev_cuda = (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"))
        entered = enter(self)
        if self.device == "cpu":
            torch.set_autocast_enabled("cuda", self._enabled)
            torch.set_autocast_dtype("cuda", self.fast_dtype)
        return entered

    @functools.wraps(leave)
    def leave_both(self: Any, *error: Any) -> Any:
        torch.set_autocast_enabled("cuda", self.prev_cuda[0])
        torch.set_autocast_dtype("cuda", self.prev_cuda[1])
        return leave(self, *error)

    autocast.__init__, autocast.__enter__, autocast.__exit__ = start, enter_both, leave_both
