"""Measured operators: workspace against a whole replay's allocation events, side effects, the cache, and reasons for not measuring."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from dyngran.compiler.torch_private import cpu_memory_events, plain_dispatch
from dyngran.passes import profile_cache
from dyngran.passes.devices import DEVICES, find_device
from dyngran.passes.errors import InvalidOption
from dyngran.passes.host import measure_host_spec
from dyngran.passes.materialize import InputPool
from dyngran.passes.measure_cuda import with_recorded_peak
from dyngran.passes.profile import OpProfiler, Request
from dyngran.passes.profile_cache import Measurement, ProfileCache, default_cache_dir, device_settings
from dyngran.passes.record_memory import CallMemory, profiler_is_active, recorded
from dyngran.passes.signature import OpSignature, concrete

aten = torch.ops.aten
CPU = torch.device("cpu")


def profiler(cache: ProfileCache | None = None, **how: Any) -> OpProfiler:
    return OpProfiler(find_device("cpu"), CPU, cache=cache or ProfileCache(None), **how)


def request(target: Any, *args: Any, **kwargs: Any) -> Request:
    """A request with fake results, from meta or real arguments."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [mode.from_tensor(value) if isinstance(value, torch.Tensor) else value for value in args]
        return Request(target, tuple(fake), kwargs, target(*fake, **kwargs))


def peak_bytes(call: Any) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as session:
        call()
    assert session.profiler is not None
    events = [event for event in session.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


IMAGE = torch.rand(8, 16, 32, 32).to(memory_format=torch.channels_last)
CALLS: dict[str, tuple[Any, ...]] = {
    "mm": (aten.mm.default, torch.rand(256, 256), torch.rand(256, 256).t()),
    "sort": (aten.sort.default, torch.rand(256, 256)),
    "convolution": (aten.convolution.default, IMAGE, torch.rand(32, 16, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
    "dropout": (aten.native_dropout.default, torch.rand(256, 256), 0.1, True),
    "layer_norm": (aten.native_layer_norm.default, torch.rand(256, 256), [256], torch.rand(256), torch.rand(256), 1e-5),
    "expanded": (aten.add.Tensor, torch.rand(256, 1).expand(256, 512), torch.rand(512)),
    "embedding": (aten.embedding_dense_backward.default, torch.rand(64, 32, 64), torch.zeros(64, 32, dtype=torch.int64), 100, -1, False),
}


@pytest.mark.parametrize("name", CALLS)
def test_results_and_workspace_add_up_to_the_measured_peak(name: str) -> None:
    target, *args = CALLS[name]
    found = profiler().measure_all([request(target, *args)])[0]
    target(*args)
    with torch.no_grad():
        measured = peak_bytes(lambda: target(*args))
    assert found.is_measured
    assert found.cost_us > 0
    assert found.result_bytes is not None
    assert abs(found.workspace_bytes + sum(found.result_bytes) - measured) <= 256


def test_it_measures_inside_a_fake_tensor_mode_and_touches_nothing() -> None:
    state = torch.get_rng_state()
    with FakeTensorMode():
        x = torch.empty(128, 128)
        found = profiler().measure(aten.bernoulli.default, (x,), {}, x)
    assert found.is_measured
    assert torch.equal(state, torch.get_rng_state())
    assert torch.is_grad_enabled()


def test_equal_calls_are_run_once_and_answers_keep_the_order() -> None:
    seen: list[tuple[int, int]] = []
    add = request(aten.add.Tensor, torch.rand(64, 64), torch.rand(64, 64))
    relu = request(aten.relu.default, torch.rand(64, 64))
    view = request(aten.t.default, torch.rand(64, 64))
    measurements = profiler(on_progress=lambda done, total: seen.append((done, total))).measure_all([add, view, relu, add])
    assert seen == [(0, 2), (1, 2)]
    assert measurements[0] == measurements[3]
    assert [found.is_measured for found in measurements] == [True, False, True, True]
    assert measurements[1].cost_us == 0


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (request(aten.relu_.default, torch.rand(64, 64)), "writes its arguments"),
        (request(aten.relu.default, torch.rand(4)), "small"),
        (Request(aten.nonzero.default, (torch.rand(64, 64),), {}, None), "depends on data"),
        (Request(aten.index.Tensor, (torch.rand(64, 64), [torch.ones(64, dtype=torch.bool)]), {}, None), "depends on data"),
        (Request(torch.ops.mkldnn._linear_pointwise.default, (torch.rand(64, 64),), {}, None), "are not run"),
        (Request(aten.mm.default, (torch.rand(64, 64), torch.rand(32, 64)), {}, None), "RuntimeError: mat1 and mat2"),
        (Request(aten.relu.default, (torch.empty(64, 64, device="meta"),), {}, None), "another device"),
    ],
)
def test_what_is_not_measured_says_why_and_has_a_price(call: Request, reason: str) -> None:
    found = profiler().measure_all([call])[0]
    assert found.source.startswith("roofline: ")
    assert reason in found.source
    assert found.cost_us > 0
    assert found.result_bytes is None


def test_what_does_not_fit_the_budget_is_not_run() -> None:
    x = torch.rand(256, 256)
    call = request(aten.add.Tensor, x, x)
    needed = 3 * x.nbytes
    assert profiler(limit_bytes=needed - 1).measure_all([call])[0].source == "roofline: does not fit the budget"
    measured = peak_bytes(lambda: None)
    assert measured == 0
    assert profiler(limit_bytes=needed).measure_all([call])[0].is_measured


def test_without_a_device_everything_is_a_roofline_of_the_named_card() -> None:
    card = OpProfiler(find_device("h100"), None, cache=ProfileCache(None))
    found = card.measure_all([request(aten.mm.default, torch.rand(64, 64), torch.rand(64, 64))])[0]
    assert found.source == "roofline: h100"
    assert found.cost_us > 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")
def test_measuring_on_a_cuda_card_leaves_nothing_there_that_a_step_has_not() -> None:
    x = torch.rand(1024, 1024, device="cuda", requires_grad=True)
    (x @ x).sum().backward()  # both threads of a step have library handles now
    allocated = torch.cuda.memory_allocated()
    warm = OpProfiler(find_device("h100"), x.device, cache=ProfileCache(None), plain_dispatch=plain_dispatch)
    assert warm.measure_all([request(aten.mm.default, x.detach(), x.detach())])[0].is_measured
    assert torch.cuda.memory_allocated() - allocated <= 2 * 2**20  # cuBLASLt's


def test_it_does_not_start_a_second_profiler() -> None:
    with profile(activities=[ProfilerActivity.CPU], acc_events=True):
        found = profiler().measure_all([request(aten.mm.default, torch.rand(64, 64), torch.rand(64, 64))])[0]
    assert found.source == "roofline: another profiler is active"


@pytest.mark.parametrize("name", CALLS)
def test_beside_another_profiler_it_finds_what_it_finds_alone(name: str) -> None:
    target, *args = CALLS[name]
    alone = profiler().measure_all([request(target, *args)])[0]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True):
        found = profiler(beside_profiler=cpu_memory_events).measure_all([request(target, *args)])[0]
    assert found.is_measured
    assert (found.workspace_bytes, found.result_bytes, found.result_strides) == (
        alone.workspace_bytes,
        alone.result_bytes,
        alone.result_strides,
    )


def test_indices_are_in_range_and_spread() -> None:
    table, index = torch.rand(50, 8), torch.zeros(1000, dtype=torch.int64)
    pool = InputPool(CPU, limit_bytes=None)
    args: Any = concrete((table, index))
    real, _ = pool.arguments(aten.embedding.default, args, {})
    assert int(real[1].max()) < 50
    assert len(real[1].unique()) > 10
    assert bool(((real[0] >= 0.1) & (real[0] < 1)).all())


def test_a_pool_lets_go_of_what_the_last_call_did_not_take() -> None:
    pool = InputPool(CPU, limit_bytes=20_000)
    large: Any = concrete((torch.empty(1024), torch.empty(1024)))
    small: Any = concrete((torch.empty(1024), torch.empty(8)))
    pool.arguments(aten.add.Tensor, large, {})
    taken, _ = pool.arguments(aten.add.Tensor, small, {})
    pool.keep_used()
    pool.trim(20_000 - (4096 + 32))  # would clear it if more were held
    again, _ = pool.arguments(aten.add.Tensor, small, {})
    assert [one.data_ptr() for one in again] == [one.data_ptr() for one in taken]


def test_the_cache_survives_processes_torn_lines_and_a_read_only_directory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = Measurement(cost_us=1.5, workspace_bytes=3, source="measured: 1 run", result_bytes=(4, 0), result_strides=((1,), ()))
    ProfileCache(tmp_path).put("settings", [("a", found)])
    (path,) = tmp_path.iterdir()
    with path.open("a") as file:
        file.write('{"key": "b", "cost_us": \nnot json\n[1]\n' + json.dumps({"key": "c"}))
    other = Measurement(cost_us=2.0, workspace_bytes=0, source="measured: 1 run")
    ProfileCache(tmp_path).put("settings", [("d", other)])
    again = ProfileCache(tmp_path)
    assert again.get("settings", "a") == found
    assert again.get("settings", "d") == other
    assert again.get("settings", "b") is None
    assert again.get("other settings", "a") is None

    blocked = ProfileCache(tmp_path / path.name / "below a file")
    with caplog.at_level(logging.WARNING, "dyngran.profile"):
        blocked.put("settings", [("a", found)])
        blocked.put("settings", [("d", found)])
    assert blocked.get("settings", "a") == found
    assert [record.name for record in caplog.records] == ["dyngran.profile"]


def test_a_warm_cache_runs_nothing(tmp_path: Path) -> None:
    call = request(aten.mm.default, torch.rand(64, 64), torch.rand(64, 64))
    first = profiler(ProfileCache(tmp_path)).measure_all([call])
    seen: list[int] = []
    assert profiler(ProfileCache(tmp_path), on_progress=lambda done, total: seen.append(done)).measure_all([call]) == first
    assert seen == []


def test_two_processes_do_not_measure_at_once_and_the_second_finds_what_the_first_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = request(torch.ops.aten.mm.default, torch.empty(128, 128), torch.empty(128, 128))
    theirs, ours = ProfileCache(tmp_path), ProfileCache(tmp_path)
    settings = device_settings(torch.device("cpu"))
    began, answers = threading.Event(), []

    def measure() -> None:
        began.set()
        answers.append(profiler(ours).measure_all([call])[0])

    waiting = threading.Thread(target=measure)
    found = Measurement(cost_us=7.0, workspace_bytes=0, source="measured elsewhere", result_bytes=(65536,))
    with theirs.alone(settings):
        assert ours.get(settings, "anything") is None  # its table was read before the other measured
        waiting.start()
        began.wait()
        waiting.join(0.3)
        assert waiting.is_alive()
        theirs.put(settings, [(OpSignature.of(call.target, call.args, call.kwargs).key, found)])
    waiting.join(30)
    assert answers == [found]

    monkeypatch.setattr(profile_cache, "MAX_WAIT_S", 0.01)
    other = request(torch.ops.aten.mm.default, torch.empty(64, 64), torch.empty(64, 64))
    with theirs.alone(settings):
        assert profiler(ours).measure_all([other])[0].is_measured, "a process that hangs stops no other"


def test_the_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("DYNGRAN_CACHE_DIR", raising=False)
    assert default_cache_dir() == tmp_path / "dyngran"
    monkeypatch.setenv("DYNGRAN_CACHE_DIR", str(tmp_path / "own"))
    assert default_cache_dir() == tmp_path / "own"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DYNGRAN_CACHE_DIR", "~/own")  # as an env file or a job description hands it over
    assert default_cache_dir() == tmp_path / "home" / "own"


@pytest.mark.parametrize(("name", "guess"), [("nope", ""), ("rtx490", " (did you mean 'rtx4090'?)")])
def test_a_device_is_only_guessed_where_one_is_near(name: str, guess: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        find_device(name)
    assert str(caught.value) == f"no device is called {name!r}{guess}. Known devices: {', '.join(DEVICES)}."


def test_the_host_is_measured_once(tmp_path: Path) -> None:
    first = measure_host_spec(ProfileCache(tmp_path))
    assert measure_host_spec(ProfileCache(tmp_path)) == first
    assert 1e8 < first.bandwidth_bytes_per_s < 1e13
    assert 1e-4 < first.matmul_tflops["fp32"] < 1e3


def test_a_session_counts_as_active_from_its_warm_up_to_its_end() -> None:
    ended = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True)
    with ended:
        assert profiler_is_active()
    assert not profiler_is_active()
    waiting = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], schedule=torch.profiler.schedule(wait=1, warmup=1, active=1), acc_events=True
    )
    with waiting:
        waiting.step()
        assert profiler_is_active()
        waiting.step()
    assert not profiler_is_active()
    assert ended is not None  # kept alive until here, as a user's variable would keep it


def test_a_record_tells_the_peak_of_temporaries_that_follow_one_another() -> None:
    """Two temporaries of 64 KiB, one after the other, and a result of 4 KiB: the sum says 128 KiB of workspace, the peak 64."""
    with recorded(torch.device("cpu")) as recorder:
        assert recorder is not None
        with recorder.mark(3):
            for _ in range(2):
                temporary = torch.empty(16384)
                del temporary
            result = torch.empty(1024)
    assert recorder.calls == {3: CallMemory(workspace=65536 - result.nbytes, allocated=2 * 65536 + result.nbytes)}


@pytest.mark.parametrize(
    ("seen", "workspace_bytes"),
    [
        (CallMemory(workspace=64, allocated=128 + 32), 64),  # everything that the counter saw is in the record
        (CallMemory(workspace=64, allocated=128 + 31), 128),  # something is missing: the sum stays
        (CallMemory(workspace=200, allocated=1024), 128),  # blocks are rounded up: never more than the sum
        (None, 128),
    ],
)
def test_a_workspace_is_the_recorded_peak_where_the_record_is_complete(seen: CallMemory | None, workspace_bytes: int) -> None:
    summed = Measurement(cost_us=1.0, workspace_bytes=128, source="measured", result_bytes=(32,))
    found = with_recorded_peak(summed, seen)
    assert isinstance(found, Measurement)
    assert found.workspace_bytes == workspace_bytes
    assert with_recorded_peak("out of memory", seen) == "out of memory"
