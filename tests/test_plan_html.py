"""The page: its data is the simulator's, nothing of the file can run in it, and a browser draws it."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from shown_plans import MIB, document_of, graph_plan, layers, shown, with_peak

from dyngran.compiler.pictures.plan_html import COLOURS, page, palette
from dyngran.compiler.pictures.plan_picture import BANDS, StepPicture, pictures_of
from dyngran.compiler.plans.planfile import GraphBreak, PlanDocument, save_plan
from dyngran.passes.errors import format_bytes

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))

from layered import layered_problem, layers_for

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run"
    " --disable-background-networking --disable-component-update --disable-sync"
)
NASTY = (
    "</script><script>document.body.dataset.error='ran'</script><img src=x onerror=\"document.body.dataset.error='ran'\"><!-- &lt; \u2028"
)
MAX_PAGE_BYTES = 5_000_000

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt-get install chromium")
Browse = Callable[..., str]


def page_of(document: PlanDocument, name: str = "plan.json") -> str:
    return page(document, pictures_of(document, source=name), name)


def data_of(text: str) -> Any:
    (found,) = re.findall(r'<script id="plan" type="application/json">(.*?)</script>', text, re.DOTALL)
    return json.loads(found)


def nasty_document() -> PlanDocument:
    graph = graph_plan(layers(2))
    decisions = tuple(replace(one, name=NASTY, reason=NASTY, label=NASTY) for one in graph.plan.decisions)
    values = tuple(replace(value, name=NASTY, label=NASTY) for value in graph.problem.values)
    ops = tuple(replace(op, name=NASTY, target=NASTY, region=NASTY) for op in graph.problem.ops)
    problem = replace(graph.problem, ops=ops, values=values)
    plan = replace(graph.plan, decisions=decisions, solver=NASTY, order=NASTY, bound=NASTY)
    forged = replace(graph, problem=problem, plan=plan, fingerprint=NASTY)
    return replace(document_of(forged), device=NASTY, torch_version=NASTY, breaks=(GraphBreak(NASTY, NASTY),))


@pytest.mark.parametrize("fused", [False, True])
def test_the_intervals_of_the_page_add_up_to_the_curves(fused: bool) -> None:
    document = document_of(graph_plan(layers(5, fused=fused)))
    (picture,) = pictures_of(document, source="plan.json")
    (graph,) = data_of(page_of(document))["graphs"]

    def check(found: Any, step: StepPicture) -> None:
        length = len(found["ops"])
        change = [0] * (length + 1)
        for place in range(0, len(found["ranges"]), 4):
            value, first, last, _ = found["ranges"][place : place + 4]
            change[first] += graph["values"]["bytes"][value]
            change[last + 1] -= graph["values"]["bytes"][value]
        live = list(accumulate(change[:-1], initial=0))[1:]
        for position, size in found["beside"]:
            live[position] += size
        held_bytes = sum(size for _, size in found["held"])
        assert [size + held_bytes for size in live] == list(step.total_bytes)
        assert found["forward"] == step.live.num_forward

    check(graph["before"], picture.before)
    check(graph["after"], picture.after)
    assert [graph["values"]["name"][one[0]] for one in graph["decisions"]] == [
        one.name for one in sorted(picture.plan.decisions, key=lambda one: (-one.size_bytes, one.value))
    ]


def test_the_page_is_alone() -> None:
    text = page_of(document_of(graph_plan(layers(3))))
    policy = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    script = text[text.rindex("<script>") + len("<script>") : text.rindex("</script>")]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy == [f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"]
    assert set(re.findall(r"https?://[^\"' )]+", text)) <= {"http://www.w3.org/2000/svg"}
    assert not re.findall(r"\b(?:src|href)=|@import|url\(|\bfetch\(|innerHTML|eval\(", text)


def test_nothing_of_the_file_can_leave_its_place() -> None:
    text = page_of(nasty_document(), name=f"{NASTY}.json")
    assert len(re.findall(r"<script", text)) == len(re.findall(r"</script", text)) == 2
    assert "<img" not in text and "<!--" not in text
    (title,) = re.findall(r"<title>(.*?)</title>", text)
    assert unescape(title).startswith("</script><script>")
    (graph,) = data_of(text)["graphs"]
    assert graph["values"]["name"][0].startswith("</script>"), "it is there, as text"


def test_placeholders_in_the_file_stay_text() -> None:
    text = page_of(replace(document_of(graph_plan(layers(1))), device="@SCRIPT@ @DATA@ \\1 \\g<0>"))
    assert data_of(text)["heading"].startswith("@SCRIPT@ @DATA@ \\1 \\g<0>")


def test_every_band_has_a_colour() -> None:
    assert len(COLOURS) == len(BANDS) == len(set(BANDS))
    assert all(re.fullmatch(r"#[0-9a-f]{6}", colour) for colour in palette().values())
    style = (Path(__file__).parent.parent / "compiler" / "pictures" / "plan_report.css").read_text()
    assert all(style.count(f"--{name}: ") == 2 for name in COLOURS), "one for light, one for dark"


@pytest.fixture(scope="module")
def large_page() -> str:
    problem = layered_problem(layers_for(10_000))
    stock = sorted(problem.stock["min-cut"])
    return page_of(document_of(graph_plan(problem, [value for place, value in enumerate(stock) if place % 3])))


def test_a_page_of_ten_thousand_ops_is_small(large_page: str) -> None:
    assert len(data_of(large_page)["graphs"][0]["ops"]["name"]) >= 9_900
    assert len(large_page.encode()) < MAX_PAGE_BYTES


@pytest.fixture
def browse(tmp_path: Path) -> Browse:
    """The page as a browser has it when its script has run: the document, or a screenshot at ``picture``."""

    def run(text: str, address: str = "", picture: Path | None = None, *more: str) -> str:
        place = tmp_path / "page.html"
        place.write_text(text, encoding="utf-8")
        profile = tmp_path / "profile"
        shutil.rmtree(profile, ignore_errors=True)
        wanted = "--dump-dom" if picture is None else f"--screenshot={picture}"
        command = [
            str(CHROMIUM),
            *FLAGS.split(),
            f"--user-data-dir={profile}",
            "--window-size=1200,1600",
            *more,
            wanted,
            f"{place.as_uri()}{address}",
        ]
        return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True, timeout=120).stdout

    return run


def body_of(dom: str) -> dict[str, str]:
    (attributes,) = re.findall(r"<body([^>]*)>", dom)
    return dict(re.findall(r'data-(\w+)="([^"]*)"', attributes))


def live_rows(dom: str, table: str) -> list[list[str]]:
    (body,) = re.findall(rf'<table class="{table}">.*?<tbody>(.*?)</tbody>', dom, re.DOTALL)
    return [
        [unescape(re.sub(r"<[^>]*>", "", cell)) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL)]
        for row in re.findall(r"<tr>(.*?)</tr>", body, re.DOTALL)
    ]


@needs_chromium
@pytest.mark.parametrize("side", ["before", "after"])
def test_a_browser_draws_every_band_and_lists_what_is_live_at_the_cursor(browse: Browse, side: str) -> None:
    document = document_of(graph_plan(layers(1)), graph_plan(layers(6)))
    picture = pictures_of(document, source="plan.json")[1]
    step = picture.before if side == "before" else picture.after
    at = step.live.num_forward + 2
    dom = browse(page_of(document), f"#at={at}&graph=2&side={side}")
    body = body_of(dom)
    assert "error" not in body
    assert int(body["drawn"]) == sum(len(one.bands) for each in pictures_of(document, source="") for one in (each.before, each.after))
    second = dom[dom.index("graph 2 of 2") :]
    assert f'data-at="{at}"' in second and f'data-side="{side}"' in second
    kinds = dict(live_rows(second, "kinds"))
    assert kinds == {band: format_bytes(sizes[at]) for band, sizes in step.bands if sizes[at]} | {
        "together": format_bytes(step.total_bytes[at])
    }
    values = picture.problem.values
    live = [
        (values[one.value].name, format_bytes(one.size_bytes), f"{one.first} – {one.last}")  # noqa: RUF001  # the page writes that dash
        for one in step.live.ranges
        if one.first <= at <= one.last
    ]
    listed = [(row[0], row[1], row[4]) for row in live_rows(second, "values") if len(row) == 5]
    assert listed and set(listed) <= set(live)
    assert len(listed) == min(len(live), 14)


@needs_chromium
def test_what_the_file_holds_does_not_run_in_a_browser(browse: Browse) -> None:
    dom = browse(page_of(nasty_document(), name="plan</title>.json"))
    assert "error" not in body_of(dom) and int(body_of(dom)["drawn"]) > 0
    assert "&lt;/script&gt;&lt;script&gt;" in dom and "<img" not in dom


# What a person does, done by a script: its results are attributes of the body.
ACTIONS = """{
const told = document.body.dataset, live = document.querySelector("[aria-live]"), charts = document.querySelectorAll(".chart");
const press = (key, shiftKey = false) => {
  charts[1].dispatchEvent(new KeyboardEvent("keydown", {key, shiftKey}));
  return live.dataset.at;
};
told.keys = [press("Home"), press("ArrowRight"), press("ArrowRight", true), press("ArrowLeft"), press("End")].join(" ");
const box = charts[0].getBoundingClientRect();
charts[0].dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + 74, clientY: box.top + 50}));
told.mouse = `${live.dataset.side} ${live.dataset.at} ${location.hash}`;
const tables = document.querySelectorAll("section table"), decisions = tables[tables.length - 1];
const sizes = () => [...decisions.querySelectorAll("tbody tr td:nth-child(3)")].map(cell => cell.textContent).join(" ");
decisions.querySelectorAll("th button")[2].click();
told.falling = sizes();
decisions.querySelectorAll("th button")[2].click();
told.rising = sizes();
const search = document.querySelector("input[type=search]");
search.value = "value_5";
search.dispatchEvent(new Event("input"));
told.found = decisions.querySelectorAll("tbody tr").length;
const areas = () => document.querySelectorAll("path[data-band=parameter]").length;
const before = areas(), held = document.querySelector("input[type=checkbox]");
held.click();
told.held = `${before} ${areas()}`;
}"""


@needs_chromium
def test_keys_mouse_sorting_and_search(browse: Browse) -> None:
    graph = graph_plan(layers(6))
    smaller = tuple(replace(value, size_bytes=value.size_bytes // (1 + value.index)) for value in graph.problem.values)
    graph = graph_plan(replace(graph.problem, values=smaller))
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page_of(document_of(graph)))
    body = body_of(browse(text.replace("</body>", f"<script>{ACTIONS}</script></body>")))
    (picture,) = pictures_of(document_of(graph), source="plan.json")
    last = len(picture.after.total_bytes) - 1
    assert "error" not in body
    assert body["keys"] == f"0 1 11 10 {last}"
    assert body["mouse"] == f"before 0 #at={last}&amp;graph=1&amp;side=after", "the mouse moves the cursor, a key keeps it"
    rising = [format_bytes(one.size_bytes) for one in sorted(graph.plan.decisions, key=lambda one: one.size_bytes)]
    assert body["rising"] == " ".join(rising) and body["falling"] == " ".join(reversed(rising))
    assert int(body["found"]) == sum("value_5" in f"{one.name} {one.label} {one.reason}" for one in graph.plan.decisions) > 0
    assert body["held"] in ("2 0", "0 2")


@needs_chromium
def test_thinning_keeps_the_peak(browse: Browse, large_page: str) -> None:
    """Of 4,000 positions on 1,000 pixels the highest is drawn as high as it is: the upper edge of the top band reaches its pixel."""
    dom = browse(large_page)
    assert "error" not in body_of(dom)
    assert len(dom) < 4 * MAX_PAGE_BYTES
    after = dom[dom.index("with the plan: arrow keys") :]
    after = after[: after.index("</svg>")]
    heights = [float(y) for path in re.findall(r'<path d="M([^"]*)Z"', after) for _, y in re.findall(r"([\d.]+),([\d.]+)", path)]
    (dot,) = re.findall(r'<circle class="dot"[^>]*cy="([\d.]+)"', after)  # the cursor stands at the peak
    assert min(heights) == pytest.approx(float(dot), abs=0.06)


@needs_chromium
@pytest.mark.parametrize("scheme", ["0", "1"])
def test_the_screenshot_is_not_blank(browse: Browse, tmp_path: Path, scheme: str) -> None:
    image = pytest.importorskip("matplotlib.image", reason="reads the screenshot with matplotlib")
    out = tmp_path / "page.png"
    graph = graph_plan(layers(6))
    browse(
        page_of(document_of(with_peak(graph, graph.plan.peak_bytes + 8 * MIB))),
        "#at=4",
        out,
        f"--blink-settings=preferredColorScheme={scheme}",
    )
    pixels = (image.imread(out)[..., :3] * 255).round().astype(int)
    colours = pixels[..., 0] * 65536 + pixels[..., 1] * 256 + pixels[..., 2]
    counts = {colour: int((colours == colour).sum()) for colour in {int(colour) for colour in colours[::4, ::4].ravel()}}
    share = {colour: count / colours.size for colour, count in counts.items()}
    style = (Path(__file__).parent.parent / "compiler" / "pictures" / "plan_report.css").read_text()
    activation = re.findall(r"--activation: #([0-9a-f]{6})", style)[1 if scheme == "0" else 0]
    assert share.get(int(activation, 16), 0) > 0.01, "the area of activations is drawn in its colour"
    assert max(share.values()) < 0.9 and sum(count > 200 for count in counts.values()) >= 8


@needs_chromium
def test_the_written_file_is_the_page(browse: Browse, tmp_path: Path) -> None:
    save_plan(tmp_path / "plan.json", document_of(graph_plan(layers(2))))
    shown([str(tmp_path / "plan.json"), "--html", str(tmp_path / "report.html")])
    body = body_of(browse((tmp_path / "report.html").read_text(encoding="utf-8")))
    assert int(body["drawn"]) > 0 and "error" not in body
