// The page of `kata-gpu-boot show --html`: draws one boot, from the JSON in the page.
// No library, no network.
//
// Nothing of the boot is ever parsed as HTML: texts reach the document through textContent and
// attributes alone. Times in the data are ns on the guest's boot clock, negative for VMM and
// firmware; what is not known is null.
"use strict";

const $ = (id) => document.getElementById(id);
const root = document.documentElement;
// A page that breaks says so, to people and to the test that looks at it. A browser reports what an
// observer could not deliver in one frame as an event without an error, and delivers it later.
addEventListener("error", (event) => {
  if (!event.error) return;
  root.dataset.error = event.message;
  $("headline").textContent = "This page failed to draw: " + event.message;
});

const boot = JSON.parse($("boot").textContent);
const { lanes, steps, marks, gpus, owners } = boot;
const byId = new Map(steps.map((step, i) => [step.id, i]).filter(([id]) => id !== null));

// --- texts

const seconds = (ns) => (ns / 1e9).toFixed(3);
function duration(ns) {
  if (ns === null) return "";
  if (ns >= 999.5e6) return (ns / 1e9).toFixed(3) + " s";
  if (ns >= 999.5e3) return (ns / 1e6).toFixed(1) + " ms";
  return Math.round(ns / 1e3) + " µs";
}
const milliseconds = (ns) => (Math.ceil(ns / 1e5) / 10).toFixed(1);
function wall(ns) {
  const date = boot.clock && new Date(boot.clock.offset_ms + ns / 1e6);
  return date && !isNaN(date) ? date.toISOString().replace("T", " ").replace("Z", "") : null;
}
const wallError = (ns) =>
  boot.clock.error_ns + (Math.abs(ns - boot.clock.at_ns) * boot.clock.ppm) / 1e6;
const took = (step) => (step.end === null || step.lost ? null : step.end - step.begin);
const gpuName = (i) => (i === null ? "" : gpus[i] ? "GPU " + (gpus[i].index ?? "?") : "other GPU");
const stepEnd = (step) => (step.end === null ? Math.max(boot.end, step.begin) : step.end);

function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes))
    if (value !== null && value !== false) node.setAttribute(key, value);
  node.append(...children.filter((child) => child !== null && child !== ""));
  return node;
}
function shape(name, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in attributes)
    if (attributes[key] !== null) node.setAttribute(key, attributes[key]);
  if (text !== undefined) node.textContent = text;
  return node;
}

// --- the timeline

const ROW = 19,
  BAR = 15,
  PAD = 5,
  STRIP = 9,
  LABEL_ROW = 14,
  RIGHT = 14,
  CHARACTER = 6.15;
const PAPER = 860; // drawn that wide, text is readable on A4
const MIN_VIEW = 20e3; // 20 µs
const whole = [boot.begin, Math.max(boot.boot_end * 1.015, 1e6)];
const furthest = Math.max(whole[1], Math.min(boot.end * 1.015, Number.MAX_SAFE_INTEGER * 4e3)),
  extent = furthest - boot.begin;
const chart = $("chart"),
  tip = $("tip");
let view = whole.slice(),
  width = 0,
  left = 0,
  top0 = 0,
  labelRows = 0,
  hovered = null,
  pinned = null,
  focused = null,
  printing = false,
  range = null;
let places = [];

const plot = () => width - left - RIGHT;
const x = (ns) => left + ((ns - view[0]) / (view[1] - view[0])) * plot();
const time = (px) => view[0] + ((px - left) / plot()) * (view[1] - view[0]);
const fits = (px) => Math.floor(px / CHARACTER);

function show(from, to) {
  let span = Math.min(Math.max(to - from, MIN_VIEW), extent);
  from = Math.min(Math.max(from, boot.begin), furthest - span);
  view = [from, from + span];
  draw();
}
function zoom(factor, px = left + plot() / 2) {
  const at = time(px),
    share = (px - left) / plot(),
    span = (view[1] - view[0]) / factor;
  show(at - share * Math.min(span, extent), at + (1 - share) * Math.min(span, extent));
}
const pan = (share) =>
  show(view[0] + share * (view[1] - view[0]), view[1] + share * (view[1] - view[0]));
function reveal(step) {
  if (step.begin < view[0] || stepEnd(step) > view[1]) zoomTo(step);
}
function zoomTo(step) {
  const long = Math.max(stepEnd(step) - step.begin, MIN_VIEW);
  show(step.begin - long * 0.15, step.begin + long * 1.15);
}

// A pace of the axis: 1, 2 or 5 times a power of ten, about 100 px long.
function pace() {
  const wanted = ((view[1] - view[0]) / plot()) * 100,
    power = 10 ** Math.floor(Math.log10(wanted));
  return [1, 2, 5, 10].find((n) => n * power >= wanted) * power;
}

function draw() {
  width = printing ? PAPER : chart.clientWidth || PAPER;
  left = width < 640 ? 64 : 158;
  const labels = milestoneLabels();
  // The height never shrinks: lanes that jump while somebody pans are hard to follow.
  labelRows = Math.max(labelRows, labels.rows);
  top0 = 22 + labelRows * LABEL_ROW;
  let y = top0;
  places = lanes.map((lane) => {
    const place = { y, height: PAD + lane.rows * ROW + STRIP };
    y += place.height;
    return place;
  });
  const height = y + 4;
  const svg = shape("svg", {
    viewBox: `0 0 ${width} ${height}`,
    role: "group",
    "aria-label": "waterfall of the boot",
  });
  svg.append(defs(height));
  drawLanes(svg);
  drawAxis(svg, labels, y);
  const inner = shape("g", { "clip-path": "url(#plot)" });
  root.dataset.steps = drawSteps(inner);
  root.dataset.marks = drawMarks(inner);
  drawEdges(inner);
  if (range)
    inner.append(
      shape("rect", {
        class: "range",
        x: x(range[0]),
        width: Math.max(x(range[1]) - x(range[0]), 1),
        y: 0,
        height,
      }),
    );
  svg.append(inner);
  chart.querySelector("svg")?.remove();
  chart.prepend(svg);
  $("range").textContent = `${seconds(view[0])} to ${seconds(view[1])} s`;
  root.dataset.bars = inner.querySelectorAll(".bar").length;
}

function defs(height) {
  const clip = shape("clipPath", { id: "plot" });
  clip.append(shape("rect", { x: left - 5, y: 0, width: plot() + RIGHT + 5, height }));
  const hatch = shape("pattern", {
    id: "hatch",
    width: 7,
    height: 7,
    patternUnits: "userSpaceOnUse",
    patternTransform: "rotate(45)",
  });
  hatch.append(shape("rect", { class: "hatch", width: 3, height: 7 }));
  const node = shape("defs", {});
  node.append(clip, hatch);
  return node;
}

function drawLanes(svg) {
  lanes.forEach((lane, i) => {
    const { y, height } = places[i];
    const wrong = lane.gpu !== null && gpus[lane.gpu] && gpus[lane.gpu].state;
    svg.append(shape("rect", { class: "lane" + (i % 2 ? " odd" : ""), x: 0, y, width, height }));
    const middle = y + PAD + BAR / 2 + 4;
    svg.append(shape("text", { class: "name " + (wrong || ""), x: 8, y: middle }, lane.name));
    const small = lane.gpu !== null && gpus[lane.gpu] ? gpus[lane.gpu].address : "";
    if (left > 100)
      svg.append(
        shape("text", { class: "address", x: left - 10, y: middle, "text-anchor": "end" }, small),
      );
  });
  const last = places.at(-1);
  svg.append(
    shape("line", {
      class: "rule",
      x1: left - 0.5,
      x2: left - 0.5,
      y1: top0,
      y2: last ? last.y + last.height : top0,
    }),
  );
}

// Names of milestones: in the first row where there is room.
function milestoneLabels() {
  const rows = [],
    labels = [];
  for (const milestone of boot.milestones) {
    const at = x(milestone.at);
    if (milestone.at < view[0] || milestone.at > view[1]) continue;
    const long = milestone.name.length * CHARACTER + 8,
      begin = Math.min(at, width - long);
    let row = rows.findIndex((end) => end < begin);
    if (row < 0) row = rows.length;
    rows[row] = begin + long;
    labels.push({ milestone, at, begin, row });
  }
  return { rows: rows.length, labels };
}

function drawAxis(svg, { labels }, bottom) {
  const step = pace(),
    decimals = Math.max(0, Math.min(9, -Math.floor(Math.log10(step / 1e9) + 1e-9)));
  // The numbers of the axis stand on the lines.
  for (const { milestone, at, begin, row } of labels) {
    const y = 10 + row * LABEL_ROW;
    svg.append(shape("line", { class: "milestone", x1: at, x2: at, y1: y - 8, y2: bottom }));
    svg.append(shape("text", { class: "milestone", x: begin + 4, y }, milestone.name));
  }
  for (let n = Math.ceil(view[0] / step); n * step <= view[1]; n += 1) {
    const at = x(n * step);
    svg.append(shape("line", { class: "grid", x1: at, x2: at, y1: top0 - 4, y2: bottom }));
    svg.append(
      shape(
        "text",
        { class: "tick", x: at, y: top0 - 8, "text-anchor": "middle" },
        ((n * step) / 1e9).toFixed(decimals) + " s",
      ),
    );
  }
}

function drawSteps(into) {
  const last = new Map();
  let drawn = 0;
  steps.forEach((step, i) => {
    const end = stepEnd(step);
    if (end < view[0] || step.begin > view[1]) return;
    drawn += 1;
    const from = Math.max(x(step.begin), left - 4),
      to = Math.min(x(end), width + 4),
      long = Math.max(to - from, 2);
    // Many in one pixel are one bar, but for those that must be seen.
    const key = step.lane * 1000 + step.row,
      plain = !step.critical && step.error === null && step.end !== null;
    if (plain && long <= 2 && last.get(key) === Math.floor(from)) return;
    last.set(key, Math.floor(from));
    const y = places[step.lane].y + PAD + step.row * ROW;
    const states = { critical: step.critical, open: step.end === null, bad: step.error !== null };
    const set = Object.keys(states).filter((name) => states[name]);
    const kind = ["bar", step.owner, ...set].join(" ");
    const box = { x: from, y, width: long, height: BAR, rx: long > 4 ? 2.5 : 0 };
    into.append(
      shape("rect", {
        ...box,
        class: kind + (i === pinned || i === focused ? " focus" : ""),
        "data-step": i,
      }),
    );
    if (step.end === null)
      into.append(shape("rect", { ...box, class: "hatched", fill: "url(#hatch)" }));
    const name = lanes[step.lane].gpu === null ? step.label : step.label.replace(/^gpu\./, "");
    const more =
      step.end === null
        ? `${name}, open since ${seconds(step.begin)}`
        : `${name} ${duration(took(step))}`;
    const room = fits(long - 10);
    const text =
      more.length <= room
        ? more
        : name.length <= room
          ? name
          : room >= 5
            ? name.slice(0, room - 1) + "…"
            : "";
    if (text)
      into.append(
        shape(
          "text",
          { class: "on " + kind.slice(4), x: Math.max(from, left) + 5, y: y + BAR - 4 },
          text,
        ),
      );
  });
  return drawn;
}

const SHAPES = {
  published: "M0,-4L4,0L0,4L-4,0Z",
  usable: "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0Z",
  failed: "M-4,-4L4,4M-4,4L4,-4",
  warning: "M0,-4.5L4.5,3.5L-4.5,3.5Z",
  container: "M-3.5,-3.5h7v7h-7Z",
  tick: "M0,-2V4",
};

function drawMarks(into) {
  const last = new Map();
  let drawn = 0;
  marks.forEach((mark, i) => {
    if (mark.at < view[0] || mark.at > view[1]) return;
    drawn += 1;
    const at = x(mark.at),
      key = mark.lane + mark.kind;
    if (mark.kind === "tick" && last.has(key) && at - last.get(key) < 2) return;
    last.set(key, at);
    const { y, height } = places[mark.lane];
    const move = `translate(${at.toFixed(2)},${y + height - 6})`;
    into.append(
      shape("path", {
        class: `mark ${mark.kind} ${mark.owner} ${mark.tone}`,
        d: SHAPES[mark.kind],
        transform: move,
        "data-mark": i,
      }),
    );
  });
  return drawn;
}

// The path's joints always; the edges of the step that is looked at.
function drawEdges(into) {
  const path = boot.path.filter((piece) => piece.step !== null);
  const middle = (step) => places[step.lane].y + PAD + step.row * ROW + BAR / 2;
  const edge = (from, to, kind, end = stepEnd(from), begin = to.begin) => {
    const a = x(end),
      b = x(begin),
      bend = Math.max(a, b) + (a > b ? 4 : 0);
    into.prepend(
      shape("path", {
        class: kind,
        d: `M${a},${middle(from)}H${(a + bend) / 2}V${middle(to)}H${b}`,
      }),
    );
  };
  for (let i = 1; i < path.length; i += 1)
    edge(
      steps[path[i - 1].step],
      steps[path[i].step],
      "joint",
      path[i - 1].begin + path[i - 1].took,
      path[i].begin,
    );
  const chosen = pinned ?? focused ?? hovered;
  if (chosen === null) return;
  steps[chosen].after.forEach(
    (id) => byId.has(id) && edge(steps[byId.get(id)], steps[chosen], "edge"),
  );
  const id = steps[chosen].id;
  if (id !== null)
    steps.forEach((step) => step.after.includes(id) && edge(steps[chosen], step, "edge"));
}

// --- details

function details(node, step, mark) {
  const rows = [],
    of = step ?? mark;
  const row = (name, value, kind) =>
    value &&
    rows.push(
      element("div", { class: kind ?? null }, element("dt", {}, name), element("dd", {}, value)),
    );
  const at = step ? step.begin : mark.at;
  const sure = of.approx ? "about " : "";
  if (step) {
    row("from", step.lost ? "not known: the record was lost" : `${sure}${seconds(step.begin)} s`);
    row(
      step.end === null ? "open" : "to",
      step.end === null
        ? `${duration(stepEnd(step) - step.begin)} when the stream ended`
        : `${sure}${seconds(step.end)} s`,
    );
    row("took", duration(took(step)));
  } else row("at", `${sure}${seconds(mark.at)} s`);
  if (wall(at)) row("wall clock", `${wall(at)} UTC ±${milliseconds(wallError(at))} ms`);
  row("owner", of.owner);
  row(
    "GPU",
    of.gpu !== null && gpus[of.gpu] ? `${gpus[of.gpu].index ?? "?"}, ${gpus[of.gpu].address}` : "",
  );
  if (step) {
    const after = step.after.map((id) =>
      byId.has(id)
        ? [steps[byId.get(id)].label, gpuName(steps[byId.get(id)].gpu)].join(" ").trim()
        : `span ${id}`,
    );
    row("after", after.join(", "));
    step.fields.forEach(([key, value]) => row(key, value));
    row("error", step.error ?? "", "wrong");
    row("critical path", step.critical ? "yes" : "");
  } else row("what", mark.text, mark.tone === "error" ? "wrong" : null);
  node.replaceChildren(
    element("strong", {}, step ? step.label : mark.name),
    element("dl", {}, ...rows),
  );
  return node.textContent;
}

// Beside a point, below the space from `top` to `bottom` or, where there is no room, above it.
function place(at, top, bottom) {
  tip.hidden = false;
  const { width: w, height: h } = tip.getBoundingClientRect(),
    room = root.clientWidth;
  tip.style.left = Math.max(8, at + 16 + w > room ? at - w - 16 : at + 16) + "px";
  tip.style.top = Math.max(8, bottom + 14 + h > innerHeight ? top - h - 14 : bottom + 14) + "px";
}

// Chooses a step for good: from the table, by click, by key.
function choose(i, how) {
  focused = how === "key" ? i : null;
  pinned = how === "key" ? null : i;
  if (i !== null) reveal(steps[i]);
  draw();
  if (i === null) return void (tip.hidden = true);
  $("said").textContent = details(tip, steps[i], null);
  const bar = chart.querySelector(`[data-step="${i}"]`),
    box = (bar ?? chart).getBoundingClientRect();
  if (box.top < 0 || box.bottom > innerHeight) chart.scrollIntoView({ block: "nearest" });
  const now = (bar ?? chart).getBoundingClientRect();
  place(Math.max(now.left, 0) + Math.min(now.width, 80), now.top, now.bottom);
}

// --- hands

const pointers = new Map();
let drag = null;
const local = (event) => event.clientX - chart.getBoundingClientRect().left;
const onAxis = (event) => event.clientY - chart.getBoundingClientRect().top < top0;

chart.addEventListener("pointerdown", (event) => {
  if (event.button) return;
  pointers.set(event.pointerId, local(event));
  drag = { x: local(event), view: view.slice(), axis: onAxis(event), moved: false };
});
chart.addEventListener("pointermove", (event) => {
  if (!pointers.has(event.pointerId)) return void hover(event);
  const before = [...pointers.values()];
  pointers.set(event.pointerId, local(event));
  const now = [...pointers.values()];
  if (now.length === 2) {
    const apart = (two) => Math.max(Math.abs(two[0] - two[1]), 10);
    drag.moved = true;
    return void zoom(apart(now) / apart(before), (now[0] + now[1]) / 2);
  }
  if (!drag.moved && Math.abs(now[0] - drag.x) < 4) return;
  if (!drag.moved) chart.setPointerCapture(event.pointerId);
  drag.moved = true;
  tip.hidden = pinned === null;
  if (drag.axis) {
    range = [time(Math.min(drag.x, now[0])), time(Math.max(drag.x, now[0]))];
    return void draw();
  }
  const shift = ((drag.x - now[0]) / plot()) * (drag.view[1] - drag.view[0]);
  show(drag.view[0] + shift, drag.view[1] + shift);
});
for (const kind of ["pointerup", "pointercancel"])
  chart.addEventListener(kind, (event) => {
    pointers.delete(event.pointerId);
    const chosen = range;
    range = null;
    if (chosen) show(chosen[0], chosen[1]);
  });
chart.addEventListener("click", (event) => {
  if (drag?.moved) return;
  const i = event.target.dataset.step;
  choose(i === undefined || Number(i) === pinned ? null : Number(i), "hand");
});
chart.addEventListener("dblclick", (event) => {
  const i = event.target.dataset.step;
  i === undefined ? show(...whole) : zoomTo(steps[Number(i)]);
});
chart.addEventListener("pointerleave", () => {
  if (pinned === null) tip.hidden = true;
  if (hovered !== null) ((hovered = null), draw());
});
chart.addEventListener(
  "wheel",
  (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) {
      event.preventDefault();
      zoom(Math.exp(-event.deltaY / 300), local(event));
    } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      pan((event.deltaX || event.deltaY) / 800);
    }
  },
  { passive: false },
);

function hover(event) {
  if (pinned !== null) return;
  const { step, mark } = event.target.dataset,
    i = step === undefined ? null : Number(step);
  if (i !== hovered && focused === null) {
    hovered = i;
    chart.querySelectorAll(".edge").forEach((edge) => edge.remove());
    if (i !== null) drawEdges(chart.querySelector("svg > g[clip-path]"));
  }
  if (i === null && mark === undefined) return void (tip.hidden = focused === null);
  details(tip, i === null ? null : steps[i], i === null ? marks[Number(mark)] : null);
  place(event.clientX, event.clientY, event.clientY);
}

// The next step in its lane, or the nearest one in time in the lane above or below.
function neighbour(from, lane, way) {
  if (from === null) return steps.length ? 0 : null;
  const here = steps[from],
    order = steps.map((step, i) => i).filter((i) => steps[i].lane === (lane ? null : here.lane));
  if (!lane) return order[order.indexOf(from) + way] ?? from;
  for (let l = here.lane + way; l >= 0 && l < lanes.length; l += way) {
    const there = steps.map((step, i) => i).filter((i) => steps[i].lane === l);
    if (there.length)
      return there.reduce((a, b) =>
        Math.abs(steps[b].begin - here.begin) < Math.abs(steps[a].begin - here.begin) ? b : a,
      );
  }
  return from;
}
const keys = {
  "+": () => zoom(1.5),
  "=": () => zoom(1.5),
  "-": () => zoom(1 / 1.5),
  0: () => show(...whole),
  a: () => show(boot.begin, furthest),
  ArrowRight: (shift) => (shift ? pan(0.2) : choose(neighbour(focused ?? pinned, false, 1), "key")),
  ArrowLeft: (shift) =>
    shift ? pan(-0.2) : choose(neighbour(focused ?? pinned, false, -1), "key"),
  ArrowDown: () => choose(neighbour(focused ?? pinned, true, 1), "key"),
  ArrowUp: () => choose(neighbour(focused ?? pinned, true, -1), "key"),
  Enter: () => (focused ?? pinned) !== null && zoomTo(steps[focused ?? pinned]),
  Escape: () => choose(null, "key"),
};
chart.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
  event.preventDefault();
  keys[event.key](event.shiftKey);
});
chart.addEventListener("blur", () => focused !== null && choose(null, "key"));
addEventListener("scroll", () => pinned === null && (tip.hidden = true), { passive: true });
for (const [id, key] of [
  ["in", "+"],
  ["out", "-"],
  ["fit", "0"],
])
  $(id).addEventListener("click", () => keys[key]());

// --- the rest of the page

const MAX_ROWS = 1500;
let all = false,
  order = "time";
const entries = [
  // The label says one field already.
  ...steps.map((step, i) => ({
    ...step,
    at: step.begin,
    i,
    took: took(step),
    detail: false,
    what: step.label,
    fields: step.fields.filter(([, value]) => !step.label.endsWith(" " + value)),
  })),
  ...marks.map((mark) => ({
    ...mark,
    i: null,
    took: null,
    what: mark.text,
    error: null,
    fields: [],
  })),
].sort((a, b) => a.at - b.at);

function table() {
  const words = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean),
    verbose = $("details").checked;
  const text = ({ owner, gpu, what, fields, error }) =>
    [owner, gpuName(gpu), what, ...fields, error ?? ""].join(" ").toLowerCase();
  const found = entries.filter(
    (entry) => (verbose || !entry.detail) && words.every((word) => text(entry).includes(word)),
  );
  if (order === "took") found.sort((a, b) => (b.took ?? -1) - (a.took ?? -1));
  const shown = all ? found : found.slice(0, MAX_ROWS);
  $("rows").replaceChildren(
    ...shown.map((entry) => {
      const name =
        entry.i === null ? entry.what : element("button", { type: "button" }, entry.what);
      if (entry.i !== null) name.addEventListener("click", () => choose(entry.i, "hand"));
      const fields = entry.fields.map(([key, value]) => `${key}=${value}`).join(" ");
      const what = element(
        "td",
        { class: "what" },
        name,
        fields && element("span", { class: "fields" }, fields),
        entry.error && element("span", { class: "wrong" }, entry.error),
      );
      const time = element(
        "td",
        { class: "number" },
        (entry.approx ? "~" : "") + seconds(entry.at),
      );
      const open =
        entry.end === null ? element("span", { class: "wrong" }, "open") : duration(entry.took);
      const kind = `${entry.tone ?? "plain"}${entry.critical ? " critical" : ""}`;
      return element(
        "tr",
        { class: kind },
        time,
        element("td", { class: "wide number" }, wall(entry.at) ?? ""),
        element("td", {}, element("i", { class: "dot " + entry.owner }), entry.owner),
        element("td", {}, gpuName(entry.gpu)),
        what,
        element("td", { class: "number" }, open),
      );
    }),
  );
  const left = found.length - shown.length;
  $("count").textContent =
    `${found.length} of ${entries.length}` + (left ? `, the first ${shown.length} shown` : "");
  $("all").hidden = !left;
}
$("filter").addEventListener("input", table);
$("details").addEventListener("change", table);
$("all").addEventListener("click", () => ((all = true), table()));
for (const by of ["time", "took"])
  $("by-" + by).addEventListener("click", () => {
    order = by;
    for (const other of ["time", "took"])
      $("by-" + other).parentElement.setAttribute(
        "aria-sort",
        other !== by ? "none" : by === "time" ? "ascending" : "descending",
      );
    table();
  });

// Parts of the path, the largest part first: the answer to "why does it take so long".
function path() {
  const list = boot.path.filter((piece) => piece.step !== null),
    parts = new Map();
  $("path").hidden = !list.length;
  if (!list.length) return;
  for (const piece of list) {
    const step = steps[piece.step],
      part = parts.get(step.name) ?? {
        name: step.name,
        owner: step.owner,
        of: new Set(),
        total: 0,
      };
    part.of.add(piece.step);
    part.total += piece.took;
    parts.set(step.name, part);
  }
  const all = boot.path.reduce((n, piece) => n + piece.took, 0),
    sum = list.reduce((n, piece) => n + piece.took, 0);
  const sorted = [...parts.values()].sort((a, b) => b.total - a.total),
    count = new Set(list.map((piece) => piece.step)).size;
  const share = (ns) => (100 * ns) / Math.max(all, 1);
  $("path-sum").textContent =
    (count === 1 ? "1 step" : `${count} steps, each of which the next one waited for`) +
    `: ${duration(sum)} in steps and ${duration(all - sum)} between them.`;
  const bar = shape("svg", {
    viewBox: "0 0 100 14",
    preserveAspectRatio: "none",
    class: "parts",
    "aria-hidden": "true",
  });
  let at = 0;
  for (const { step, took } of boot.path) {
    const long = share(took);
    if (step !== null)
      bar.append(
        shape("rect", {
          class: `bar critical ${steps[step].owner}`,
          x: at,
          width: Math.max(long - 0.15, 0.08),
          height: 14,
        }),
      );
    at += long;
  }
  const percent = (ns) => (share(ns) < 1 ? "<1" : Math.round(share(ns)));
  $("path-parts").replaceChildren(
    ...sorted.map((part) =>
      element(
        "li",
        {},
        element("i", { class: "dot " + part.owner }),
        element("b", {}, part.name),
        ` ${duration(part.total)}${part.of.size > 1 ? ` in ${part.of.size} steps` : ""}` +
          `, ${percent(part.total)} % (${part.owner})`,
      ),
    ),
  );
  $("path-bar").replaceChildren(bar);
  $("path-list").replaceChildren(
    ...list.map(({ step: i, begin, took }) => {
      const step = steps[i],
        button = element("button", { type: "button" }, `${step.label} ${gpuName(step.gpu)}`.trim());
      button.addEventListener("click", () => choose(i, "hand"));
      return element(
        "li",
        {},
        button,
        ` ${seconds(begin)} s, ${step.end === null ? "open" : duration(took)}`,
      );
    }),
  );
}

const resized = () => !printing && chart.clientWidth !== width && draw();
new ResizeObserver(() => requestAnimationFrame(resized)).observe(chart);
addEventListener("beforeprint", () => ((printing = true), (tip.hidden = true), draw()));
addEventListener("afterprint", () => ((printing = false), draw()));
$("legend-owners").replaceChildren(
  ...owners.map((owner) => element("span", {}, element("i", { class: "dot " + owner }), owner)),
);
path();
table();
draw();
