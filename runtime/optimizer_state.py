"""The optimizers that own a set of parameters, and the bytes of state that their first step will add.

The prediction runs one step of a copy of the optimizer on meta tensors: no memory, no change to the user's optimizer, its hooks or its
parameters. The copy shares the class and the plain attributes; tensors in it are replaced by meta tensors of the same shape.
"""

from __future__ import annotations

import gc
import inspect
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dyngran.passes.devices import rounded_bytes
from dyngran.passes.profile import on_clean_thread
from dyngran.runtime.identity import TensorMark

_DRY_FAILURES = (RuntimeError, AssertionError, TypeError, ValueError, KeyError, IndexError, AttributeError)
_OFF = {"fused": False, "foreach": False, "capturable": False, "differentiable": False}
# Bytes of state per byte of parameter when the dry step fails: from torch.optim's documentation of each class.
_STATES: dict[str, Callable[[dict[str, Any]], int]] = {
    **dict.fromkeys(("Adam", "AdamW", "FusedAdam"), lambda group: 3 if group.get("amsgrad") else 2),
    **dict.fromkeys(("NAdam", "RAdam", "Adamax", "Adadelta", "LAMB", "FusedLAMB"), lambda group: 2),
    **dict.fromkeys(("SGD", "FusedSGD"), lambda group: 1 if group.get("momentum") else 0),
    "RMSprop": lambda group: 1 + bool(group.get("momentum")) + bool(group.get("centered")),
    **dict.fromkeys(("Adagrad", "Lion", "Muon"), lambda group: 1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePrediction:
    """Bytes of optimizer state on the device of the parameters.

    Attributes:
        present_bytes: exists now. future_bytes: will appear at the first step.
        source: how future_bytes is known.
        storage_ids: ``data_ptr()`` of the storages in present_bytes, so that nobody counts them twice.
    """

    present_bytes: int
    future_bytes: int
    source: str
    storage_ids: frozenset[int] = frozenset()


_attached: list[tuple[weakref.ref[torch.nn.Module], weakref.ref[Optimizer]]] = []
_known: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_predictions: weakref.WeakKeyDictionary[Optimizer, tuple[Any, int, str]] = weakref.WeakKeyDictionary()
_searched: dict[int, TensorMark] = {}  # parameters whose optimizers were looked for, by their ids

_stepped: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()  # parameters each had when it stepped last
_num_seen = [0]


def attach(model: torch.nn.Module, optimizer: Optimizer) -> None:
    """Say beforehand which optimizer trains ``model`` (a module or a compiled one). Neither is kept alive.

    Raises:
        TypeError: the arguments are not a module and an optimizer. ValueError: the optimizer has none of the model's parameters.
    """
    if not isinstance(model, torch.nn.Module) or not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"attach(model, optimizer) takes a module and an optimizer, got {type(model).__name__} and {type(optimizer).__name__}"
        )
    if not _owns_any(optimizer, {id(parameter): parameter for parameter in model.parameters()}):
        raise ValueError("attach(model, optimizer): the optimizer has none of the model's parameters")
    _attached[:] = [(m, o) for m, o in _attached if m() is not None and o() is not None and (m() is not model or o() is not optimizer)]
    _attached.append((weakref.ref(model), weakref.ref(optimizer)))


def note_optimizer(optimizer: Optimizer) -> None:
    """Remember an optimizer that was seen to step; it is not kept alive."""
    groups = sum(len(group["params"]) for group in optimizer.param_groups)
    if _stepped.get(optimizer) != groups:
        _stepped[optimizer] = groups
        _num_seen[0] += 1
    _known.add(optimizer)


def num_optimizers_seen() -> int:
    """Grows whenever an optimizer steps for the first time, or for the first time with other parameters: its state is new then."""
    return _num_seen[0]


def find_optimizers(params: Iterable[Tensor]) -> list[Optimizer]:
    """Optimizers that update any of ``params`` (by identity): attached ones, else those among the live objects.

    The garbage collector's objects are searched once per set of parameters (about 50 ms for a million objects); an optimizer that
    is made later is noticed at its first step (`note_optimizer`).
    """
    wanted = {id(param): param for param in params}
    attached = [
        optimizer
        for model_ref, optimizer_ref in _attached
        if (model := model_ref()) is not None
        and (optimizer := optimizer_ref()) is not None
        and (any(id(param) in wanted for param in model.parameters()) or _owns_any(optimizer, wanted))
    ]
    attached = list({id(optimizer): optimizer for optimizer in attached}.values())
    if attached or not wanted:
        return attached
    found = [optimizer for optimizer in list(_known) if _owns_any(optimizer, wanted)]
    if not found and not all(key in _searched and _searched[key].is_alive() for key in wanted):
        for optimizer in _live_optimizers():
            _known.add(optimizer)
        for key in [key for key, mark in _searched.items() if not mark.is_alive()]:
            del _searched[key]
        _searched.update({key: TensorMark(param) for key, param in wanted.items()})
        found = [optimizer for optimizer in list(_known) if _owns_any(optimizer, wanted)]
    return sorted(found, key=id)


def _owns_any(optimizer: Optimizer, wanted: dict[int, Tensor]) -> bool:
    return any(id(param) in wanted for group in getattr(optimizer, "param_groups", ()) for param in group["params"])


def _live_optimizers() -> list[Optimizer]:
    classes: set[type] = set()
    stack: list[type] = [Optimizer]
    while stack:
        kind = stack.pop()
        if kind not in classes:
            classes.add(kind)
            stack.extend(type.__subclasses__(kind))
    # by exact type: isinstance asks foreign objects for their __class__, which may run their code
    return [thing for thing in gc.get_objects() if type(thing) in classes]


def predicted_state_bytes(optimizer: Optimizer) -> StatePrediction:
    """State on the device of the optimizer's parameters, now and after its first step. An unknown future is 0 and says so."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    device = params[0].device if params else torch.device("cpu")
    storages: dict[int, int] = {}
    for state in optimizer.state.values():
        for tensor in _tensors(state):
            if tensor.device.type == device.type and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = rounded_bytes(storage.nbytes(), device)
    for param in params if storages else ():  # a state may be a view of its parameter
        storages.pop(param.untyped_storage().data_ptr(), None)
    future_bytes, source = _future(optimizer, device)
    return StatePrediction(
        present_bytes=sum(storages.values()), future_bytes=future_bytes, source=source, storage_ids=frozenset(storages) - {0}
    )


def _future(optimizer: Optimizer, device: torch.device) -> tuple[int, str]:
    groups = [
        {**group, "params": [p for p in group["params"] if p.requires_grad and not optimizer.state.get(p)]}
        for group in optimizer.param_groups
    ]
    groups = [group for group in groups if group["params"]]
    if not groups:
        return 0, "all state exists"
    asked = tuple((id(p), p.shape, *sorted(_flags(group).items())) for group in groups for p in group["params"])
    known = _predictions.get(optimizer)
    if known is None or known[0] != asked:
        known = _predictions[optimizer] = (asked, *_predict(optimizer, groups, device))
    return known[1:]


def _flags(group: dict[str, Any]) -> dict[str, Any]:
    """The options of a group that may decide what state there is; numbers only as zero or not, so that schedules do not matter."""
    return {key: bool(value) for key, value in group.items() if isinstance(value, (bool, int, float, type(None)))}


def _predict(optimizer: Optimizer, groups: list[dict[str, Any]], device: torch.device) -> tuple[int, str]:
    name = type(optimizer).__name__
    reason = "its parameters are tensor subclasses"
    if all(type(param) in (Tensor, torch.nn.Parameter) or _is_fake(param) for group in groups for param in group["params"]):
        found = on_clean_thread(lambda: _dry_step(optimizer, groups, device))
        if isinstance(found, int):
            return found, "one step of a copy on meta tensors"
        reason = found
    if name in _STATES:
        sizes = [_STATES[name](group) * rounded_bytes(p.numel() * p.element_size(), device) for group in groups for p in group["params"]]
        return sum(sizes), f"table of known optimizers ({reason})"
    return 0, f"unknown: {reason}; the state is counted when it exists"


def _dry_step(optimizer: Optimizer, groups: list[dict[str, Any]], device: torch.device) -> int | str:
    """Bytes of state after one step of a copy, or why there is no answer."""
    twins: dict[int, Tensor] = {}
    for group in groups:
        for param in group["params"]:
            plain = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device="meta")
            twin = torch.nn.Parameter(plain, requires_grad=True)
            twin.grad = torch.empty_like(twin)
            twins[id(param)] = twin
    copied = _plain_copy(optimizer, twins)
    if isinstance(copied, str):
        return copied
    copied.param_groups = [
        {key: _OFF.get(key, value) for key, value in group.items() if key != "params"} | {"params": [twins[id(p)] for p in group["params"]]}
        for group in groups
    ]
    keeps_step_on_device = any(group.get("fused") or group.get("capturable") for group in groups)
    random_state = torch.get_rng_state()
    failure = ""
    try:
        with torch.no_grad():
            inspect.unwrap(type(optimizer).step)(copied)  # without hooks: they are the user's
    except _DRY_FAILURES as error:
        failure = f"{type(error).__name__} in a step without gradients"
    finally:
        torch.set_rng_state(random_state)
    if failure and not all(copied.state.get(twin) for twin in twins.values()):
        return failure
    return _state_bytes(copied, device, keeps_step_on_device=keeps_step_on_device)


def _is_fake(param: Tensor) -> bool:
    """Shapes without data, as plans without a card are made with: its state is that of a plain parameter."""
    return getattr(param, "fake_mode", None) is not None


def _plain_copy(optimizer: Optimizer, twins: dict[int, Tensor]) -> Any:
    """An optimizer of the same class that shares no tensor with the user's, or the reason why that cannot be made."""
    copied = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name in ("param_groups", "state", "step") or name.startswith(("_optimizer_", "_opt_called")):  # a scheduler patches `step`
            continue
        plain = _plain(value, twins)
        if plain is _OPAQUE:
            return f"its attribute {name!r} ({type(value).__name__}) cannot be copied"
        vars(copied)[name] = plain
    hooks = [name for name in vars(optimizer) if name.startswith("_optimizer_")]
    vars(copied).update({name: OrderedDict() for name in hooks})
    copied.state = defaultdict(dict)
    return copied


_OPAQUE = object()
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type, torch.dtype, torch.device)


def _plain(value: Any, twins: dict[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return twins.get(id(value), torch.empty_like(value, device="meta"))
    if isinstance(value, _PLAIN):
        return value
    if type(value) in (list, tuple, set):
        items = [_plain(item, twins) for item in value]
        return _OPAQUE if any(item is _OPAQUE for item in items) else type(value)(items)
    if type(value) in (dict, OrderedDict, defaultdict):
        pairs = [(_plain(key, twins), _plain(item, twins)) for key, item in value.items()]
        return _OPAQUE if any(part is _OPAQUE for pair in pairs for part in pair) else dict(pairs)
    # the class's own method, such as `_patch_step_function`, or a plain function: nothing to copy
    return value if inspect.isfunction(value) else _OPAQUE


def _state_bytes(copied: Any, device: torch.device, *, keeps_step_on_device: bool) -> int:
    sizes: dict[int, int] = {}
    for twin, state in copied.state.items():
        for tensor in _tensors(state):
            on_device = tensor.device.type == "meta" or tensor.device.type == device.type or (keeps_step_on_device and tensor.numel() == 1)
            if on_device and tensor is not twin:
                storage = tensor.untyped_storage()
                sizes[storage._cdata] = rounded_bytes(storage.nbytes(), device)
    return sum(sizes.values())


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
