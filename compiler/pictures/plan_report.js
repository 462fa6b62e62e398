"use strict";
/* Draws the plan in #plan. Every text of the file goes through textContent; nothing is parsed as HTML.
   State for people and tests: #at=POSITION&graph=NUMBER&side=before|after in the address; data-drawn on the body when all is drawn. */

window.addEventListener("error", event => { document.body.dataset.error = event.message; });

const data = JSON.parse(document.getElementById("plan").textContent);
const SVG = "http://www.w3.org/2000/svg";
const LISTED = 14, FIRST_ROWS = 100;
let numDrawn = 0;

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  for (const child of children) node.append(child);
  return node;
}
const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
const swatch = band => { const box = el("span", {class: "swatch"}); box.style.background = color(band); return box; };
const color = band => `var(--${data.bands[band][1]})`;

function significant(amount, digits) {
  return amount >= 10 ** digits ? amount.toFixed(0) : String(Number(amount.toPrecision(digits)));
}
function bytes(size) {
  let amount = Math.abs(size), unit = 0;
  while (amount >= 1024 && unit < 4) { amount /= 1024; unit += 1; }
  return `${size < 0 ? "-" : ""}${significant(amount, 4)} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
}
function micros(time) {
  if (time < 999.5) return `${significant(time, 3)} us`;
  return time < 999.5e3 ? `${significant(time / 1e3, 3)} ms` : `${significant(time / 1e6, 4)} s`;
}
function ticks(low, high, count, base) {
  const raw = Math.max(high - low, 1e-9) / count, unit = base ** Math.floor(Math.log(raw) / Math.log(base));
  const step = unit * ([1, 2, 5, 10, 20, 50, 100, 200, 500, 1000].find(nice => nice * unit >= raw) || base);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high * (1 + 1e-9); at += step) found.push(at);
  return found;
}

/* A step with everything that is drawn of it: the stack of each band at every position, and where each position lies. */
function prepare(step) {
  const length = step.ops.length, stacks = new Map(), total = new Float64Array(length);
  const stack = band => stacks.get(band) || stacks.set(band, new Float64Array(length + 1)).get(band);
  for (const [band, size] of step.held) stack(band).fill(size);
  const change = new Map();
  for (let i = 0; i < step.ranges.length; i += 4) {
    const [value, first, last, band] = step.ranges.slice(i, i + 4), size = step.sizes[value];
    const grid = change.get(band) || change.set(band, new Float64Array(length + 1)).get(band);
    grid[first] += size;
    grid[last + 1] -= size;
  }
  for (const [band, grid] of change) {
    let live = 0;
    const sums = stack(band);
    for (let p = 0; p < length; p++) sums[p] += live += grid[p];
  }
  for (const [position, size] of step.beside) stack(data.workspace)[position] += size;
  for (const sums of stacks.values()) for (let p = 0; p < length; p++) total[p] += sums[p];
  const starts = new Float64Array(length + 1);
  for (let p = 0; p < length; p++) starts[p + 1] = starts[p] + step.us[p];
  let peak = 0;
  for (let p = 0; p < length; p++) if (total[p] > total[peak]) peak = p;
  const held = step.held.reduce((sum, [, size]) => sum + size, 0);
  const order = [...stacks.keys()].sort((a, b) => a - b);
  return {...step, length, stacks, total, starts, peak, held, order, again: new Set(step.again)};
}

/* Positions of one pixel column are drawn as the highest of them: thinning never hides a peak. */
function columns(step, share, width) {
  const found = [];
  for (let p = 0; p < step.length; p++) {
    const pixel = Math.floor(share(p) * width), last = found[found.length - 1];
    if (last && last.pixel === pixel) {
      last.end = p + 1;
      if (step.total[p] > step.total[last.pick]) last.pick = p;
    } else found.push({pixel, start: p, end: p + 1, pick: p});
  }
  return found;
}

const PAD = {left: 74, right: 12, top: 20, bottom: 20};

function memoryChart(graph, side, state, onMove) {
  const step = graph[side], holder = el("div", {class: "chart", tabindex: "0", role: "group"});
  holder.setAttribute("aria-label", `memory over the step, ${step.title}: arrow keys move the cursor`);
  const cursor = svg("line", {class: "cursor"}), dot = svg("circle", {class: "dot", r: 3.5});
  let place = () => [0, 0], locate = () => 0;
  function draw() {
    const width = Math.max(holder.clientWidth, 320), height = 230, plotWidth = width - PAD.left - PAD.right, plotHeight = height - PAD.top - PAD.bottom;
    const lowest = state.held ? 0 : step.held, highest = Math.max(graph.top, lowest + 1);
    const duration = step.starts[step.length];
    const share = state.time && duration > 0 ? p => step.starts[p] / duration : p => p / Math.max(step.length, 1);
    const x = p => PAD.left + share(p) * plotWidth;
    const y = size => PAD.top + plotHeight * (1 - (Math.max(size, lowest) - lowest) / (highest - lowest));
    const picture = svg("svg", {viewBox: `0 0 ${width} ${height}`, height});
    for (const at of ticks(lowest, highest, 4, 1024)) {
      picture.append(svg("line", {class: "grid", x1: PAD.left, x2: width - PAD.right, y1: y(at), y2: y(at)}));
      picture.append(svg("text", {x: PAD.left - 8, y: y(at) + 4, "text-anchor": "end"}, bytes(at)));
    }
    const drawn = columns(step, share, plotWidth), below = new Float64Array(drawn.length);
    for (const band of step.order) {
      if (!state.held && step.heldBands.has(band)) { raise(step.stacks.get(band)); continue; }
      const up = [], down = [], sums = step.stacks.get(band);
      drawn.forEach((column, i) => {
        const left = x(column.start).toFixed(1), right = x(column.end).toFixed(1), bottom = y(below[i]).toFixed(1);
        below[i] += sums[column.pick];
        const top = y(below[i]).toFixed(1);
        up.push(`${left},${top} ${right},${top}`);
        down.push(`${right},${bottom} ${left},${bottom}`);
      });
      if (!up.length) continue;
      const area = svg("path", {d: `M${up.join(" ")} ${down.reverse().join(" ")}Z`, "data-band": data.bands[band][0]});
      area.style.fill = color(band);
      picture.append(area);
      numDrawn += 1;
    }
    function raise(sums) { drawn.forEach((column, i) => { below[i] += sums[column.pick]; }); }
    picture.append(svg("line", {class: "axis", x1: PAD.left, x2: width - PAD.right, y1: height - PAD.bottom, y2: height - PAD.bottom}));
    const middle = x(step.forward);
    if (step.forward > 0 && step.forward < step.length) {
      picture.append(svg("line", {class: "split", x1: middle, x2: middle, y1: PAD.top, y2: height - PAD.bottom + 6}));
      picture.append(svg("text", {x: middle + 6, y: height - 5}, "backward"));
    }
    if (step.forward > 0) picture.append(svg("text", {x: PAD.left, y: height - 5}, "forward"));
    const end = state.time ? micros(duration) : `${step.length} ${graph.unit}`;
    picture.append(svg("text", {x: width - PAD.right, y: height - 5, "text-anchor": "end"}, end));
    if (graph.budget !== null && graph.budget <= highest && graph.budget >= lowest) {
      picture.append(svg("line", {class: "budget", x1: PAD.left, x2: width - PAD.right, y1: y(graph.budget), y2: y(graph.budget)}));
      picture.append(svg("text", {class: "budget", x: width - PAD.right, y: y(graph.budget) - 5, "text-anchor": "end"}, `budget ${bytes(graph.budget)}`));
    }
    const most = step.length ? step.total[step.peak] : step.held;
    picture.append(svg("text", {class: "strong", x: PAD.left, y: 12}, step.title), svg("text", {x: PAD.left + 8 + 6.6 * step.title.length, y: 12}, `peak ${bytes(most)}, ${micros(duration)}`));
    picture.append(cursor, dot);
    holder.replaceChildren(picture);
    place = p => [(x(p) + x(p + 1)) / 2, y(step.total[p]), PAD.top, height - PAD.bottom];
    locate = pixel => {
      const wanted = (pixel - PAD.left) / plotWidth;
      let low = 0, high = step.length - 1;
      while (low < high) { const half = (low + high + 1) >> 1; if (share(half) <= wanted) low = half; else high = half - 1; }
      return low;
    };
    show();
  }
  function show() {
    const isHere = state.side === side && step.length > 0;
    cursor.style.display = dot.style.display = isHere ? "" : "none";
    if (!isHere) return;
    const [cx, cy, top, bottom] = place(state.at);
    fill(cursor, {x1: cx, x2: cx, y1: top, y2: bottom}, []);
    fill(dot, {cx, cy}, []);
  }
  holder.addEventListener("pointermove", event => { if (step.length) onMove(side, locate(event.clientX - holder.getBoundingClientRect().left), false); });
  holder.addEventListener("click", event => { if (step.length) onMove(side, locate(event.clientX - holder.getBoundingClientRect().left), true); });
  holder.addEventListener("keydown", event => {
    const at = state.side === side ? state.at : step.peak, far = event.shiftKey ? 10 : 1;
    const moves = {ArrowLeft: at - far, ArrowRight: at + far, Home: 0, End: step.length - 1, p: step.peak};
    if (!(event.key in moves) || !step.length) return;
    event.preventDefault();
    onMove(side, Math.max(0, Math.min(step.length - 1, moves[event.key])), true);
  });
  return {holder, draw, show};
}

/* What is live at the cursor: by band, and the largest values. */
function liveTables(graph, side, at) {
  const step = graph[side], values = graph.values, bands = el("tbody"), rows = el("tbody");
  for (const band of [...step.order].reverse()) {
    const size = step.stacks.get(band)[at];
    if (size) bands.append(el("tr", {}, el("td", {}, swatch(band), data.bands[band][0]), el("td", {class: "r"}, bytes(size))));
  }
  bands.append(el("tr", {}, el("td", {}, el("b", {}, "together")), el("td", {class: "r"}, el("b", {}, bytes(step.total[at])))));
  const live = [];
  for (let i = 0; i < step.ranges.length; i += 4) if (step.ranges[i + 1] <= at && at <= step.ranges[i + 2]) live.push(i);
  live.sort((a, b) => values.bytes[step.ranges[b]] - values.bytes[step.ranges[a]] || a - b);
  for (const i of live.slice(0, LISTED)) {
    const [value, first, last, band] = step.ranges.slice(i, i + 4);
    rows.append(el("tr", {},
      el("td", {class: "name"}, swatch(band), values.name[value]), el("td", {class: "r"}, bytes(values.bytes[value])),
      el("td", {}, data.bands[band][0]), el("td", {}, data.strings[values.label[value]]), el("td", {class: "r soft"}, `${first} – ${last}`)));
  }
  const rest = live.slice(LISTED), more = rest.reduce((sum, i) => sum + values.bytes[step.ranges[i]], 0);
  if (rest.length) rows.append(el("tr", {}, el("td", {class: "soft", colspan: "5"}, `and ${rest.length} more, ${bytes(more)}`)));
  const head = el("thead", {}, el("tr", {}, el("th", {}, "largest live values"), el("th", {class: "r"}, "bytes"), el("th", {}, "kind"), el("th", {}, "source"), el("th", {class: "r"}, "from – to")));
  const kinds = el("thead", {}, el("tr", {}, el("th", {}, "live by kind"), el("th", {class: "r"}, "bytes")));
  return el("div", {class: "live"}, el("table", {class: "kinds"}, kinds, bands), el("div", {class: "scroll"}, el("table", {class: "values"}, head, rows)));
}

function liveTitle(graph, side, at) {
  const step = graph[side], op = step.ops[at], where = data.strings[graph.ops.region[op]];
  const about = [data.strings[graph.ops.target[op]], where && `region ${where}`, micros(step.us[at])];
  const phase = (at < step.forward ? "forward" : "backward") + (step.again.has(at) ? ", runs again" : "");
  return el("p", {}, el("b", {}, graph.ops.name[op]), el("span", {class: "soft"}, `  ${about.filter(Boolean).join(" · ")} · position ${at} of ${step.length}, ${phase}, ${step.title}`));
}

function memoryPanel(graph, number) {
  const held = graph.after.held <= 0.6 * graph.top;
  const state = {side: "after", at: graph.after.peak, held, time: false};
  const panel = el("section", {class: "panel"}), live = el("div", {"aria-live": "polite"});
  const charts = ["before", "after"].map(side => memoryChart(graph, side, state, move));
  function move(side, at, isFixed) {
    state.side = side;
    state.at = at;
    charts.forEach(chart => chart.show());
    if (graph[side].length) live.replaceChildren(liveTitle(graph, side, at), liveTables(graph, side, at));
    live.dataset.at = at;
    live.dataset.side = side;
    if (isFixed) history.replaceState(null, "", `#at=${at}&graph=${number}&side=${side}`);
  }
  const redraw = () => { numDrawn -= panel.querySelectorAll("path[data-band]").length; charts.forEach(chart => chart.draw()); document.body.dataset.drawn = numDrawn; };
  const toggle = (name, key) => {
    const box = el("input", {type: "checkbox"});
    box.checked = state[key];
    box.addEventListener("change", () => { state[key] = box.checked; redraw(); });
    return el("label", {}, box, name);
  };
  const peak = el("button", {class: "plain", type: "button"}, "go to the peak");
  peak.addEventListener("click", () => move(state.side, graph[state.side].peak, true));
  const legend = el("div", {class: "legend"});
  for (const band of [...new Set([...graph.before.order, ...graph.after.order])].sort((a, b) => a - b)) legend.append(el("span", {}, swatch(band), data.bands[band][0]));
  const bar = el("div", {class: "bar"}, el("h3", {style: "margin:0"}, "Memory over the step"), el("span", {class: "space"}), peak, toggle("what is held", "held"), toggle("by time", "time"));
  panel.append(bar, legend, charts[0].holder, charts[1].holder, live);
  if (!graph.after.length) live.append(el("p", {class: "soft"}, "This graph has no op."));
  return {panel, state, move, redraw};
}

function frontierChart(graph) {
  const holder = el("div"), points = graph.frontier;
  function draw() {
    const width = Math.max(holder.clientWidth, 300), height = 330, all = [...points, graph.chosen, graph.free];
    const budgets = graph.budget !== null && graph.budget <= 1.25 * Math.max(...all.map(point => point[0])) ? [graph.budget] : [];
    const reach = (values, share) => { const low = Math.min(...values), high = Math.max(...values), room = (high - low || high || 1) * share; return [Math.max(0, low - room), high + room]; };
    const [left, right] = reach([...all.map(point => point[0]), ...budgets], 0.06), [low, high] = reach(all.map(point => point[1]), 0.1);
    const x = size => PAD.left + (size - left) / (right - left) * (width - PAD.left - PAD.right);
    const y = time => 14 + (1 - (time - low) / (high - low)) * (height - 58);
    const picture = svg("svg", {viewBox: `0 0 ${width} ${height}`, height});
    for (const at of ticks(low, high, 4, 10)) picture.append(svg("line", {class: "grid", x1: PAD.left, x2: width - PAD.right, y1: y(at), y2: y(at)}), svg("text", {x: PAD.left - 8, y: y(at) + 4, "text-anchor": "end"}, micros(at)));
    for (const at of ticks(left, right, 4, 1024)) picture.append(svg("line", {class: "grid", x1: x(at), x2: x(at), y1: 14, y2: height - 44}), svg("text", {x: x(at), y: height - 28, "text-anchor": "middle"}, bytes(at)));
    picture.append(svg("text", {x: width - PAD.right, y: height - 8, "text-anchor": "end"}, "peak of the step →"), svg("text", {x: PAD.left, y: height - 8}, "↑ time"));
    for (const at of budgets) picture.append(svg("line", {class: "budget", x1: x(at), x2: x(at), y1: 14, y2: height - 44}), svg("text", {class: "budget", x: x(at) + 5, y: 24}, "budget"));
    picture.append(svg("polyline", {class: "curve", points: points.map(([size, time]) => `${x(size)},${y(time)}`).join(" ")}));
    const named = (shape, [size, time], what) => { shape.append(svg("title", {}, `${what}: ${bytes(size)}, ${micros(time)}`)); picture.append(shape); };
    for (const point of points) named(svg("circle", {class: "point", cx: x(point[0]), cy: y(point[1]), r: 3}), point, "a plan");
    named(svg("rect", {class: "free", x: x(graph.free[0]) - 4, y: y(graph.free[1]) - 4, width: 8, height: 8}), graph.free, "without a budget");
    named(svg("circle", {class: "chosen", cx: x(graph.chosen[0]), cy: y(graph.chosen[1]), r: 5.5}), graph.chosen, "this plan");
    holder.replaceChildren(picture);
  }
  const key = el("div", {class: "legend"});
  for (const [what, shade] of [["this plan", "accent"], ["plans known", "activation"], ["without a budget", "soft"]]) {
    const box = el("span", {class: "swatch"});
    box.style.background = `var(--${shade})`;
    key.append(el("span", {}, box, what));
  }
  return {panel: el("section", {class: "panel"}, el("h3", {}, "Peak against time"), key, holder), draw};
}

/* A table that sorts by the column whose head is clicked. A cell is a text, or [text, what it is sorted by]. */
function sortable(heads, rows, {search = false} = {}) {
  const body = el("tbody"), more = el("button", {class: "plain", type: "button"}), holder = el("div");
  let limit = FIRST_ROWS, key = -1, direction = 1, wanted = "";
  const text = cell => Array.isArray(cell) ? cell[0] : cell, rank = cell => Array.isArray(cell) ? cell[1] : cell;
  function show() {
    const words = wanted.toLowerCase();
    const chosen = words ? rows.filter(row => row.some(cell => text(cell).toLowerCase().includes(words))) : [...rows];
    if (key >= 0) chosen.sort((a, b) => { const [p, q] = [rank(a[key]), rank(b[key])]; return direction * (p < q ? -1 : p > q ? 1 : 0); });
    body.replaceChildren(...chosen.slice(0, limit).map(row => el("tr", {}, ...row.map((cell, i) => el("td", {class: heads[i][1] || ""}, text(cell))))));
    more.textContent = `show all ${chosen.length}`;
    more.style.display = chosen.length > limit ? "" : "none";
    heads.forEach((_, i) => { if (i === key) head.children[i].setAttribute("aria-sort", direction > 0 ? "ascending" : "descending"); else head.children[i].removeAttribute("aria-sort"); });
  }
  const head = el("tr", {}, ...heads.map(([name, side], i) => {
    const button = el("button", {type: "button"}, name);
    button.addEventListener("click", () => { direction = key === i ? -direction : side === "r" ? -1 : 1; key = i; show(); });
    return el("th", {class: side || ""}, button);
  }));
  more.addEventListener("click", () => { limit = Infinity; show(); });
  if (search) {
    const box = el("input", {type: "search", placeholder: "find a value, region or reason"});
    box.addEventListener("input", () => { wanted = box.value; show(); });
    holder.append(el("div", {class: "bar"}, box));
  }
  holder.append(el("div", {class: "scroll"}, el("table", {}, el("thead", {}, head), body)), more);
  show();
  return holder;
}

function tables(graph) {
  const regions = graph.regions.map(([name, actions, saved, again, us]) => [name, actions, [bytes(saved), saved], [bytes(again), again], [micros(us), us]]);
  const decisions = graph.decisions.map(([value, action, us, reason]) => {
    const size = graph.values.bytes[value];
    return [graph.values.name[value], action, [bytes(size), size], [micros(us), us], data.strings[reason], data.strings[graph.values.label[value]]];
  });
  const found = [];
  if (regions.length) found.push(el("section", {class: "panel"}, el("h3", {}, "By region"), sortable([["region", "name"], ["actions"], ["saved", "r"], ["recomputed", "r"], ["time, op by op", "r"]], regions)));
  if (decisions.length) found.push(el("section", {class: "panel"}, el("h3", {}, `Decisions (${decisions.length})`), sortable([["value", "name"], ["action"], ["bytes", "r"], ["recompute", "r"], ["reason"], ["source"]], decisions, {search: true})));
  return found;
}

function definitions(rows) {
  return el("dl", {}, ...rows.flatMap(([name, text]) => [el("dt", {}, name), el("dd", {}, text)]));
}

function section(graph, number) {
  for (const side of ["before", "after"]) {
    graph[side].sizes = graph.values.bytes;
    const held = graph[side].held;
    graph[side] = prepare(graph[side]);
    graph[side].heldBands = new Set(held.map(([band]) => band));
  }
  graph.top = Math.max(...["before", "after"].map(side => graph[side].length ? graph[side].total[graph[side].peak] : graph[side].held), 1);
  if (graph.budget !== null && graph.budget <= 1.25 * graph.top) graph.top = Math.max(graph.top, graph.budget);
  graph.top *= 1.04;
  const memory = memoryPanel(graph, number), frontier = frontierChart(graph);
  const parts = graph.title ? [el("h2", {}, graph.title)] : [];
  const tiles = el("div", {class: "tiles"}, ...graph.tiles.map(([name, text]) => el("div", {class: "tile"}, el("b", {}, text), el("span", {}, name))));
  parts.push(tiles);
  if (graph.note) parts.push(el("section", {class: "panel"}, el("p", {class: "note", style: "margin:0"}, graph.note)));
  parts.push(memory.panel, el("div", {class: "pair"}, frontier.panel, el("section", {class: "panel"}, el("h3", {}, "The plan"), definitions(graph.rows))), ...tables(graph));
  return {parts, memory, draw: () => { memory.redraw(); frontier.draw(); }};
}

const page = document.getElementById("page");
page.append(el("h1", {}, data.file), el("p", {class: "soft"}, data.heading));
if (data.step.length) page.append(el("section", {class: "panel"}, definitions(data.step)));
const sections = data.graphs.map((graph, i) => section(graph, i + 1));
for (const one of sections) page.append(...one.parts);
const drawAll = () => { for (const one of sections) one.draw(); };
drawAll();
for (const one of sections) one.memory.move(one.memory.state.side, one.memory.state.at, false);

function follow() {
  const wanted = new URLSearchParams(location.hash.slice(1)), number = Number(wanted.get("graph") || 1);
  if (!wanted.has("at") || !sections[number - 1]) return;
  const graph = data.graphs[number - 1], side = wanted.get("side") === "before" ? "before" : "after";
  const at = Math.max(0, Math.min(graph[side].length - 1, Math.floor(Number(wanted.get("at")) || 0)));
  sections[number - 1].memory.move(side, at, false);
}
window.addEventListener("hashchange", follow);
let width = window.innerWidth;
window.addEventListener("resize", () => { if (window.innerWidth !== width) { width = window.innerWidth; drawAll(); } });
follow();
document.body.dataset.drawn = numDrawn;
