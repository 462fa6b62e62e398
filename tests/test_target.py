"""Targets: every form that may be named and returned, and one sentence for whatever is wrong with one."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from dyngran.compiler.cli import INTERRUPTED, main
from dyngran.compiler.offline.build import TraceProcess
from dyngran.compiler.offline.target import Target, call_target, load_callable
from dyngran.compiler.plans.planfile import PlanDocument, Settings
from dyngran.passes.errors import DyngranError, TargetError
from dyngran.passes.problem import Kind

MAX_CHARACTERS = 600  # of a sentence: a few lines of a terminal
WIDTH, BATCH = 16, 4

USER_FILE = """\
import os
import signal
import sys

import torch
from torch import nn

WIDTH, BATCH = 16, 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.layer(x).relu().sum()


class Does(Net):
    def __init__(self, what):
        super().__init__()
        self.what = what

    def forward(self, x):
        return self.what(self, x)


def data():
    return torch.randn(BATCH, WIDTH)


def make():
    return Net(), data()


class Recipes:
    @staticmethod
    def small():
        return Net(), data()


number = 3


def raises():
    raise ValueError("no such size")  # here: raises


def leaves():
    sys.exit("no data set")  # here: leaves


def looks_at_numbers():
    return nn.Linear(int(data().max()), WIDTH), data()  # here: looks_at_numbers


def frozen():
    return Net().requires_grad_(False), data()


def on_card():
    return Net().cuda(), data()  # here: on_card


def inputs_on_card():
    return Net(), torch.randn(BATCH, WIDTH, device="cuda")


def bad_shapes():
    return Net(), torch.randn(BATCH, WIDTH + 1)


def fails_in_step():
    def fail(net, x):
        raise KeyError("missing")  # here: fails_in_step

    return Does(fail), data()


def breaks_in_loop():
    def loop(net, x):
        for _ in range(2):
            x = net.layer(x)
            torch._dynamo.graph_break()  # here: breaks_in_loop
        return x

    return Does(loop), data()


def reads_in_step():
    def read(net, x):
        y = net.layer(x)
        print(float(y.sum()))  # here: reads_in_step
        return net.layer(y)

    return Does(read), data()


def sized_by_numbers():
    def some(net, x):
        rows = torch.where(x[:, 0] > 0)[0]
        return net.layer(x[rows]).sum()

    return Does(some), data()


def sized_in_loop():
    def some(net, x):
        for _ in range(2):
            x = net.layer(x[torch.where(x[:, 0] > 0)[0]])
        return x.sum()

    return Does(some), data()


def sized_and_captured():
    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    return sized_by_numbers()


def bad_optimizer():
    return {"model": Net(), "inputs": data(), "optimizer": lambda p: torch.optim.Adam(p, rate=1)}  # here: bad_optimizer


def compiled_in_place():
    net = Net()
    net.compile()
    return net, data()


def loaded():
    net = Net()
    path = os.path.join(os.path.dirname(__file__), "weights.pt")
    net.load_state_dict(torch.load(path), assign=True)
    return {"model": net, "inputs": data(), "optimizer": torch.optim.AdamW(net.parameters())}


def filled_later():
    with torch.device("meta"):
        net = Net()
    net.to_empty(device="cpu")
    return {"model": net, "inputs": data(), "optimizer": torch.optim.AdamW(net.parameters())}


def on_meta():
    with torch.device("meta"):
        return adamw()


def adamw():
    net = Net()
    return {"model": net, "inputs": data(), "optimizer": torch.optim.AdamW(net.parameters())}


def adamw_of_parameters():
    return {"model": Net(), "inputs": data(), "optimizer": torch.optim.AdamW}


def classifier():
    loss = nn.functional.cross_entropy
    return {"model": nn.Linear(WIDTH, 10), "inputs": data(), "loss": loss, "targets": torch.zeros(BATCH, dtype=torch.long)}


def cast():
    return {"model": Net(), "inputs": data(), "autocast": "bf16"}


def images():
    x = torch.randn(BATCH, 3, 8, 8).to(memory_format=torch.channels_last).requires_grad_()
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 2)), x


def dies():
    os._exit(3)


def crashes():
    os.kill(os.getpid(), signal.SIGSEGV)


def prints():
    print("a line of the target")
    os.write(1, b"and one of a library\\n")
    return make()


def slow():
    import pathlib, time

    pathlib.Path("started").touch()
    time.sleep(60)
"""

DRIVER = """\
from pathlib import Path

import user


def make():
    return getattr(user, Path(__file__).with_name("which.txt").read_text())()
"""


def line_of(name: str) -> int:
    return next(number for number, line in enumerate(USER_FILE.splitlines(), 1) if line.endswith(f"# here: {name}"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's folder with a file; what importing it leaves in this process is taken back."""
    (tmp_path / "user.py").write_text(USER_FILE)
    monkeypatch.chdir(tmp_path)
    paths, modules = [*sys.path], {*sys.modules}
    yield tmp_path
    sys.path[:] = paths
    for name in {*sys.modules} - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def call(spec: str, *, batch: int | None = None, dtype: str | None = None) -> Target:
    return call_target(load_callable(spec), spec, batch=batch, dtype=dtype)[0]


def sentence(error: DyngranError) -> str:
    text = str(error)
    assert "\n" not in text
    assert len(text) <= MAX_CHARACTERS
    assert text.endswith((".", "?"))
    return text


@pytest.mark.parametrize("spec", ["user.py:make", "user:make", "user.py:Recipes.small", "user:Recipes.small", "./user.py:make"])
def test_a_target_is_a_callable_of_a_file_or_a_module(folder: Path, spec: str) -> None:
    target = call(spec)
    assert type(target.model).__name__ == "Net"
    assert [tuple(one.shape) for one in target.inputs] == [(BATCH, WIDTH)]


def test_a_file_is_found_by_its_whole_path_and_imports_its_neighbours(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "driver.py").write_text(DRIVER)
    (folder / "which.txt").write_text("make")
    monkeypatch.chdir("/")
    assert call(f"{folder / 'driver.py'}:make").module is not None


BAD_NAMES = [
    ("user.py", "names no callable"),
    ("user.py:", "names no callable"),
    (":make", "names no callable"),
    ("usr.py:make", "there is no file 'usr.py' in "),
    ("nowhere:make", "no module is called 'nowhere' here"),
    ("user.py:mke", "user.py has no 'mke'; did you mean 'make'?"),
    ("user:Recipes.smal", "did you mean 'small'?"),
    ("user.py:zzz", "user.py has no 'zzz'."),
    ("user.py:number", "number is a int, and must be a function that makes the model"),
    ("user.py:raises", f"failed: ValueError: no such size (user.py:{line_of('raises')})."),
    ("user.py:leaves", f"failed: SystemExit: no data set (user.py:{line_of('leaves')})."),
    ("broken.py:make", "cannot be imported: ZeroDivisionError: division by zero (broken.py:2)."),
    ("half.py:make", "cannot be imported: SyntaxError: "),
    ("needs.py:make", "cannot be imported: ModuleNotFoundError: No module named 'not_installed' (needs.py:1)."),
    ("needs:make", "cannot be imported: ModuleNotFoundError: No module named 'not_installed' (needs.py:1)."),
    ("leaving.py:make", "cannot be imported: SystemExit: 5 (leaving.py:1)."),
]


@pytest.mark.parametrize(("spec", "words"), BAD_NAMES)
def test_a_target_that_cannot_be_loaded_or_called_is_one_sentence(folder: Path, spec: str, words: str) -> None:
    (folder / "broken.py").write_text("x = 1\n1 / 0\n")
    (folder / "half.py").write_text("def make(:\n")
    (folder / "needs.py").write_text("import not_installed\n")
    (folder / "leaving.py").write_text("raise SystemExit(5)\n")
    with pytest.raises(TargetError) as caught:
        call(spec)
    assert words in sentence(caught.value)
    assert repr(spec) in str(caught.value)


def returning(made: object) -> Target:
    return call_target(lambda: made, "user.py:make", batch=None, dtype=None)[0]


MODEL, X = nn.Linear(WIDTH, WIDTH), torch.ones(BATCH, WIDTH)


def test_inputs_are_a_tensor_a_tuple_or_keywords() -> None:
    assert returning((MODEL, X)).inputs == (X,)
    assert returning((MODEL, (X, 2))).inputs == (X, 2)
    assert returning((MODEL, [X, 2])).inputs == (X, 2)
    keywords = returning({"model": MODEL, "inputs": {"x": X, "scale": 2}})
    assert (keywords.inputs, keywords.keywords) == ((), {"x": X, "scale": 2})


def test_loss_targets_and_optimizer_are_taken_as_they_are() -> None:
    optimizer = torch.optim.SGD(MODEL.parameters())
    target = returning({"model": MODEL, "inputs": X, "loss": nn.functional.mse_loss, "targets": X, "optimizer": optimizer})
    assert (target.loss, target.targets, target.optimizer) == (nn.functional.mse_loss, (X,), optimizer)
    assert returning({"model": MODEL, "inputs": X, "optimizer": torch.optim.SGD}).optimizer is torch.optim.SGD


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (None, None),
        (False, None),
        ("bf16", torch.bfloat16),
        ("float16", torch.float16),
        (torch.bfloat16, torch.bfloat16),
        (torch.autocast("cpu", torch.float16), torch.float16),
        (torch.autocast("cpu", torch.bfloat16, enabled=False), None),
    ],
)
def test_autocast_is_a_dtype_its_name_or_torchs_own(value: object, dtype: torch.dtype | None) -> None:
    assert returning({"model": MODEL, "inputs": X, "autocast": value}).autocast is dtype


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (None, "returned a NoneType. It must return (model, inputs), or a dict"),
        (MODEL, "returned a Linear."),
        ((MODEL, X, X), "returned a tuple."),
        ({"model": MODEL}, "returned a dict without 'inputs'."),
        ({"modle": MODEL, "inputs": X}, "returned the key 'modle' (did you mean 'model'?)."),
        ({"model": MODEL, "inputs": X, "scheduler": 1}, "returned the key 'scheduler'."),
        (
            {"model": torch.jit.script(nn.Linear(2, 2)), "inputs": X},
            "its model is a torch.jit.ScriptModule, which torch.compile does not trace.",
        ),
        (
            {"model": nn.Sequential(torch.jit.script(nn.ReLU()), MODEL), "inputs": X},
            "the module '0' of its model is a torch.jit.ScriptModule",
        ),
        ({"model": 3, "inputs": X}, "its model is a int, and must be callable."),
        ({"model": MODEL, "inputs": X, "loss": 0.5}, "its loss is a float, and must be callable."),
        ({"model": MODEL, "inputs": X, "optimizer": "adam"}, "its optimizer is a str, and must be a torch.optim.Optimizer or a function"),
        (
            {"model": MODEL, "inputs": X, "autocast": "bf"},
            "autocast must be a dtype, a name such as 'bf16', or torch.autocast(...), got 'bf'.",
        ),
    ],
)
def test_something_else_returned_is_one_sentence(made: object, words: str) -> None:
    with pytest.raises(TargetError) as caught:
        returning(made)
    assert words in sentence(caught.value)


def test_batch_and_dtype_are_given_to_a_function_that_takes_them() -> None:
    seen: list[object] = []

    def make(dtype: torch.dtype, batch: int = 1) -> object:
        seen.append((batch, dtype))
        return MODEL, X

    assert call_target(make, "user.py:make", batch=7, dtype="bf16")[1] == {"batch", "dtype"}
    assert call_target(lambda batch: (MODEL, X), "user.py:make", batch=7, dtype="bf16")[1] == {"batch"}
    assert call_target(lambda: (MODEL, X), "user.py:make", batch=7, dtype="bf16")[1] == set()
    assert seen == [(7, torch.bfloat16)]


Plan = Callable[..., PlanDocument]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plan]:
    """Plans a function of the user's file, all in one process of the CPU."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "user.py").write_text(USER_FILE)
    (folder / "driver.py").write_text(DRIVER)
    torch.save(nn.ModuleDict({"layer": nn.Linear(WIDTH, WIDTH)}).state_dict(), folder / "weights.pt")

    def plan_one(name: str, *, batch: int | None = None, dtype: str | None = None, dynamic: bool = False) -> PlanDocument:
        (folder / "which.txt").write_text(name)
        return process.plan(Settings(profile="cpu", batch=batch, dtype=dtype, dynamic=dynamic), codegen="eager")

    with TraceProcess(f"{folder / 'driver.py'}:make", "cpu") as process:
        yield plan_one


def held(document: PlanDocument, kind: Kind) -> int:
    return sum(value.size_bytes for value in document.graphs[0].problem.values if value.kind is kind)


def targets_of(document: PlanDocument) -> list[str]:
    return [op.target for op in document.graphs[0].problem.ops]


@pytest.mark.xdist_group("target")
def test_batch_and_dtype_override_what_a_function_makes(plan: Plan) -> None:
    made = plan("make")
    assert held(made, Kind.INPUT) == 4 * BATCH * WIDTH
    assert held(plan("make", batch=BATCH * 10), Kind.INPUT) == 40 * BATCH * WIDTH
    assert held(plan("make", dtype="bf16"), Kind.INPUT) == 2 * BATCH * WIDTH
    assert held(plan("make", dtype="bf16"), Kind.PARAMETER) * 2 == held(made, Kind.PARAMETER) == 4 * (WIDTH + 1) * WIDTH
    labels = plan("classifier", batch=BATCH * 10)
    assert held(labels, Kind.INPUT) == 10 * BATCH * (4 * WIDTH + 8)


@pytest.mark.xdist_group("target")
def test_a_batch_keeps_layout_and_gradient_of_the_inputs(plan: Plan) -> None:
    made, wider = plan("images"), plan("images", batch=2 * BATCH)
    assert targets_of(made) == targets_of(wider)
    assert len(made.graphs[0].problem.gradients) == len(wider.graphs[0].problem.gradients) == 5  # two weights, two biases, the input


@pytest.mark.xdist_group("target")
def test_dynamic_sizes_are_planned_at_those_of_the_inputs(plan: Plan) -> None:
    dynamic = plan("make", dynamic=True)
    assert dynamic.settings.dynamic
    assert dynamic.peak_bytes == pytest.approx(plan("make").peak_bytes, abs=64)


@pytest.mark.xdist_group("target")
@pytest.mark.parametrize("name", ["adamw", "adamw_of_parameters", "loaded", "on_meta", "filled_later"])
def test_an_optimizers_state_counts_also_where_a_checkpoint_is_loaded_or_nothing_was_made(plan: Plan, name: str) -> None:
    bare, document = plan("make"), plan(name)
    steps_bytes = 2 * 4  # a counter for each parameter
    assert document.plan.static_bytes - bare.plan.static_bytes == 2 * held(bare, Kind.PARAMETER) + steps_bytes
    assert held(document, Kind.PARAMETER) == held(bare, Kind.PARAMETER)


@pytest.mark.xdist_group("target")
def test_loss_and_autocast_are_part_of_the_step(plan: Plan) -> None:
    assert any("log_softmax" in target for target in targets_of(plan("classifier")))
    assert any("_to_copy" in target for target in targets_of(plan("cast")))


@pytest.mark.xdist_group("target")
def test_a_module_that_compiles_itself_is_planned_as_any(plan: Plan) -> None:
    assert plan("compiled_in_place").graphs == plan("make").graphs


@pytest.mark.xdist_group("target")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("looks_at_numbers", ["failed: it reads the numbers of a tensor (user.py:LINE)", "no numbers here: make inputs with torch.zeros"]),
        ("reads_in_step", ["it reads the numbers of a tensor (user.py:LINE)", "leave what reads them out of the step"]),
        ("frozen", ["nothing needs a gradient", "Return a model in training mode"]),
        ("on_card", ["(user.py:LINE)", "No card is here: name the one to plan for, as in --device h100"]),
        ("inputs_on_card", ["its tensors are on cuda:0, which is not here. Name the device to plan for: --device h100"]),
        (
            "bad_shapes",
            ["its step cannot be traced: RuntimeError: a and b must have same reduction dim, but got [4, 17] X [16, 16] (user.py:17)."],
        ),
        ("fails_in_step", ["its step cannot be traced: KeyError: 'missing' (user.py:LINE)."]),
        ("breaks_in_loop", ["torch.compile leaves its step to Python", "graph_break()` (user.py:LINE)", "take it out"]),
        ("sized_by_numbers", ["it reads the numbers of a tensor", "or set torch._dynamo.config.capture_scalar_outputs"]),
        ("sized_in_loop", ["torch.compile leaves its step to Python", "capture_dynamic_output_shape_ops to True in the target"]),
        ("bad_optimizer", ["its optimizer cannot be made: TypeError: Adam.__init__() got", "'rate' (user.py:LINE)."]),
    ],
)
def test_a_step_that_cannot_be_planned_is_one_sentence(plan: Plan, name: str, words: list[str]) -> None:
    if torch.cuda.is_available() and name in ("on_card", "inputs_on_card"):
        pytest.skip("a card is here")
    with pytest.raises(TargetError) as caught:
        plan(name)
    said = sentence(caught.value)
    for word in words:
        assert word.replace("LINE", str(line_of(name) if "LINE" in word else "")) in said


def last_line(text: str) -> str:
    """The error; lines of progress come before it where the machine is slow."""
    return text.splitlines()[-1]


def run(folder: Path, *words: str) -> int:
    output = ["-o", "plan.json"] if words[0] == "build" and "-o" not in words else []
    return main([*words, "--device", "cpu", "--codegen", "eager", *output])


@pytest.mark.parametrize(("name", "how"), [("dies", "left with exit code 3"), ("crashes", "was ended by SIGSEGV")])
def test_a_process_that_dies_is_told_by_how(folder: Path, capsys: pytest.CaptureFixture[str], name: str, how: str) -> None:
    assert run(folder, "build", f"user.py:{name}") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert last_line(captured.err) == f"dyngran-plan: target 'user.py:{name}': the process that traces it {how}."
    assert not (folder / "plan.json").exists()


def test_what_a_target_prints_is_in_no_output(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "frontier", "user.py:prints", "--json") == 0
    captured = capfd.readouterr()
    assert json.loads(captured.out)["device"] == "cpu"
    assert "a line of" not in captured.out + captured.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--budget", "20Gig"], "--budget = '20Gig': it cannot be read as an amount of memory; did you mean '20GiB'?"),
        (["--budget", "20"], "it has no unit; did you mean '20GiB' or '20%'?"),
        (["--keep-below", "few"], "--keep-below 'few' is no size"),
        (["--device", "h10"], "no device is called 'h10' (did you mean 'h100'?). Known devices: h100, "),
        (["--device", "h100", "--profile"], "--profile measures on the device that is here, and h100 is not"),
        (["-o", "missing/plan.json"], "plan file 'missing/plan.json' cannot be written: there is no folder "),
        (["-o", "."], "plan file '.' cannot be written: it is a folder"),
        (["-o", "read-only/plan.json"], "cannot be written: the folder "),
    ],
)
def test_bad_arguments_are_one_sentence_before_anything_is_traced(
    folder: Path, words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def never(*arguments: object) -> None:
        raise AssertionError("a process was started")

    (folder / "read-only").mkdir(mode=0o500)
    if os.geteuid() == 0:  # to whom nothing is read-only
        monkeypatch.setattr("os.access", lambda path, mode: not str(path).endswith("read-only"))
    monkeypatch.setattr("dyngran.compiler.offline.build.TraceProcess", never)
    assert main(["build", "user.py:make", *words, *([] if "-o" in words else ["-o", "plan.json"])]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("dyngran-plan: ")
    assert said in captured.err
    assert captured.err.count("\n") == 1


needs_children = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's list of children")


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def slow_build(folder: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """A build in the middle of its target, and the processes that it has started."""
    heeds = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # ignored if the tests run in a shell's background
    script = f"{heeds}; import sys; from dyngran.compiler.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", script, "build", "user.py:slow", "--device", "cpu", "-o", "plan.json"]
    process = subprocess.Popen(command, cwd=folder, start_new_session=True, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    until = time.monotonic() + 120
    while not (folder / "started").exists() and time.monotonic() < until and process.poll() is None:
        time.sleep(0.05)
    tracers = children_of(process.pid)
    assert len(tracers) == 1
    return process, tracers


@needs_children
def test_ctrl_c_leaves_nothing_behind_and_the_old_plan_in_place(folder: Path) -> None:
    (folder / "plan.json").write_text("old")
    process, tracers = slow_build(folder)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, last_line(err)) == (INTERRUPTED, "", "dyngran-plan: interrupted; no file was changed.")
    assert not any(is_alive(pid) for pid in tracers)
    assert {path.name for path in folder.iterdir()} - {"__pycache__"} == {"plan.json", "started", "user.py"}
    assert (folder / "plan.json").read_text() == "old"


@needs_children
def test_the_process_that_traces_ends_with_the_one_that_asked(folder: Path) -> None:
    process, tracers = slow_build(folder)
    (tracer,) = map(os.pidfd_open, tracers)
    process.kill()
    process.communicate(timeout=60)
    ended, _, _ = select.select([tracer], [], [], 60)
    os.close(tracer)
    assert ended


def test_a_budget_below_the_floor_is_one_line_and_writes_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "build", "user.py:make", "--budget", "1KiB") == 2
    captured = capsys.readouterr()
    assert last_line(captured.err).startswith("dyngran-plan: budget 1 KiB (1024 bytes) is below the least reachable peak ")
    assert not (folder / "plan.json").exists()


@pytest.mark.xdist_group("target")
def test_a_step_whose_sizes_depend_on_numbers_is_planned_where_torch_captures_them(plan: Plan) -> None:
    """Runs after the refusals: the setting stays in the process."""
    assert len(plan("sized_and_captured").graphs) == 1
