"use strict";
// The board's pages: the list, a run, a comparison. Every text of a run is set as text, never as markup.

const AXES = { agent_steps: "agent steps", wall_seconds: "wall seconds", update: "updates" };
const main = document.getElementById("main");
const live = document.getElementById("live");
const dark = matchMedia("(prefers-color-scheme: dark)");

/** An element with attributes, listeners ("onclick") and children; strings become text. */
function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((child) => child != null));
  return made;
}

function svg(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

async function get(path) {
  const answer = await fetch(path);
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}

// ------------------------------------------------------------------------------------------------------------ numbers

const DASH = "–";

function number(value, digits = 4) {
  if (value == null || !isFinite(value)) return DASH;
  const size = Math.abs(value);
  if (size >= 1e9) return (value / 1e9).toFixed(2) + "G";
  if (size >= 1e6) return (value / 1e6).toFixed(2) + "M";
  if (size >= 1e4) return (value / 1e3).toFixed(1) + "k";
  if (size && size < 1e-3) return value.toExponential(1);
  return String(+value.toPrecision(digits)).replace("-", "−");
}

const whole = (value) => (value == null ? DASH : Math.round(value).toLocaleString("en"));
const bytes = (value) => (value >= 1e9 ? (value / 1e9).toFixed(2) + " GB" : (value / 1e6).toFixed(1) + " MB");

function duration(seconds) {
  if (seconds == null || !isFinite(seconds)) return DASH;
  const s = Math.round(seconds);
  if (s < 60) return s + " s";
  if (s < 3600) return Math.floor(s / 60) + " min " + (s % 60) + " s";
  if (s < 86400) return Math.floor(s / 3600) + " h " + Math.floor((s % 3600) / 60) + " min";
  return Math.floor(s / 86400) + " d " + Math.floor((s % 86400) / 3600) + " h";
}

const ago = (time) => (time ? duration(Math.max(0, Date.now() / 1000 - time)).replace(/ (\d+ s|\d+ min)$/, "") + " ago" : DASH);
const share = (run) => (run.total_steps ? Math.min(1, run.steps / run.total_steps) : 0);
const plain = (value) => (value == null ? "none" : typeof value === "object" ? JSON.stringify(value) : String(value));

// ------------------------------------------------------------------------------------------------------------- charts

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** Colour of line i: five named ones, then hues by the golden angle. */
function colour(i) {
  return i < 5 ? style(`--series-${i}`) : `hsl(${(i * 137.5) % 360} 60% ${dark.matches ? 68 : 38}%)`;
}

/** Exponential running mean without a bias towards its start; `weight` of the past, 0 is none. */
function smoothed(values, weight) {
  let mean = 0, mass = 0;
  return values.map((value) => {
    if (value == null) return null;
    mean = weight * mean + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return mean / mass;
  });
}

const sync = uPlot.sync("board");
const charts = new Set();

/** A figure: `lines` are {name, x, y, low, high, colour, hidden}. `update(lines)` draws others. */
class Chart {
  constructor(title, axis, big = false) {
    this.title = title;
    this.axis = axis;
    this.weight = 0;
    this.output = el("output", { "aria-live": "off" });
    this.plot = el("div", { class: "plot" });
    this.node = el(
      "figure", { class: "chart" + (big ? " big" : ""), tabindex: 0, role: "group", onkeydown: (event) => this.key(event) },
      el("figcaption", {}, el("span", {}, title), this.output), this.plot,
    );
    this.height = big ? 380 : 190;
    this.range = null;
    charts.add(this);
    seen.observe(this.node);
    sizes.observe(this.plot);
  }

  update(lines) {
    this.lines = lines;
    this.stale = true;
    if (this.visible) this.draw();
  }

  draw() {
    if (!this.lines) return;
    this.stale = false;
    const width = this.plot.clientWidth;
    if (!width) return;
    const lines = this.lines.filter((line) => line.x.length);
    const tables = lines.map((line) => {
      const order = line.x.map((x, i) => i).filter((i) => line.x[i] != null);
      const pick = (values) => order.map((i) => values[i] ?? null);
      const columns = [pick(line.x), pick(line.y)];
      if (this.weight > 0) columns.push(smoothed(columns[1], this.weight));
      if (line.low) columns.push(pick(line.low), pick(line.high));
      return columns;
    });
    const series = [{}], bands = [];
    lines.forEach((line, i) => {
      const stroke = colour(line.colour ?? i), show = !line.hidden;
      const sparse = line.y.filter((value) => value != null).length < 40;
      const points = { show: sparse, size: 4, fill: stroke };
      series.push({ stroke, width: this.weight ? 1 : 1.75, alpha: this.weight ? 0.3 : 1, spanGaps: true, show, points });
      if (this.weight) series.push({ stroke, width: 2, spanGaps: true, show, points: { show: false } });
      if (line.low) {
        bands.push({ series: [series.length + 1, series.length], fill: stroke.startsWith("#") ? stroke + "26" : "transparent" });
        for (const _ of [0, 1]) series.push({ stroke: "transparent", width: 0, spanGaps: true, show, points: { show: false } });
      }
    });
    const data = tables.length === 1 ? tables[0] : tables.length ? uPlot.join(tables) : [[]];
    const ink = style("--muted"), rule = style("--rule");
    const values = (u, marks) => marks.map((mark) => (mark == null ? "" : number(mark, 5)));
    const look = { stroke: ink, grid: { stroke: rule, width: 1 }, ticks: { stroke: rule, width: 1 }, font: "12px system-ui, sans-serif", values };
    const options = {
      width, height: this.height, series, bands, padding: [8, 8, 0, 0],
      scales: { x: { time: false, range: (u, low, high) => this.range ?? (low === high ? [low - 1, high + 1] : [low, high]) } },
      axes: [{ ...look, space: 70, size: 30 }, { ...look, size: 58 }],
      cursor: { drag: { x: true, y: false, setScale: false }, points: { size: 6 }, sync: { key: "board", setSeries: false } },
      legend: { show: false },
      hooks: {
        setCursor: [(u) => this.tell(u)],
        setSelect: [(u) => {
          if (u.select.width > 4) zoom([u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")]);
          u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
        }],
        ready: [(u) => u.over.addEventListener("dblclick", () => zoom(null))],
      },
    };
    this.u?.destroy();
    this.u = new uPlot(options, data, this.plot);
    this.tell(this.u);
  }

  /** Values under the cursor, or the last ones. */
  tell(u) {
    const index = u.cursor.idx;
    const step = this.weight ? 2 : 1;
    let place = 1;
    const found = [];
    this.lines.filter((line) => line.x.length).forEach((line) => {
      const column = u.data[place + step - 1] ?? [];
      let i = index ?? column.length - 1;
      while (i > 0 && column[i] == null) i -= 1;
      if (!line.hidden && column[i] != null) found.push([line.name, column[i]]);
      place += step + (line.low ? 2 : 0);
    });
    const many = found.length > 1;
    const shown = found.slice(0, 3).map(([name, value]) => (many && found.length < 4 ? `${name} ` : "") + number(value, 5));
    const x = index == null ? null : u.data[0][index];
    this.output.textContent = shown.join("  ") + (x == null ? "" : ` at ${number(x, 5)}`);
    this.node.setAttribute("aria-label", `${this.title} over ${AXES[this.axis]}: ${found.map(([n, v]) => `${n} ${number(v)}`).join(", ") || "no values"}`);
  }

  key(event) {
    const u = this.u;
    if (!u || !u.data[0].length || event.ctrlKey || event.metaKey) return;
    const x = u.data[0], last = x.length - 1, at = u.cursor.idx ?? last;
    const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -last, End: last }[event.key];
    if (move) {
      const i = Math.max(0, Math.min(last, at + move));
      this.output.setAttribute("aria-live", "polite");
      u.setCursor({ left: u.valToPos(x[i], "x"), top: 20 });
    } else if (event.key === "+" || event.key === "-") {
      const { min, max } = u.scales.x, width = (max - min) * (event.key === "+" ? 0.5 : 2);
      const middle = u.cursor.idx == null ? (min + max) / 2 : x[at];
      const low = Math.max(x[0], middle - width / 2), high = Math.min(x[last], middle + width / 2);
      zoom(low <= x[0] && high >= x[last] ? null : [low, high]);
    } else if (event.key === "0" || event.key === "Escape") zoom(null);
    else return;
    event.preventDefault();
  }
}

/** Same stretch of the axis in every chart; null is all. */
function zoom(range) {
  for (const chart of charts) {
    chart.range = range;
    if (chart.u) chart.u.setScale("x", range ? { min: range[0], max: range[1] } : { min: null, max: null });
    if (chart.u && !range) chart.u.setData(chart.u.data);
  }
  const reset = document.getElementById("reset");
  if (reset) reset.disabled = !range;
}

const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const chart = [...charts].find((each) => each.node === entry.target);
    if (!chart) continue;
    chart.visible = entry.isIntersecting;
    if (chart.visible && (chart.stale || !chart.u)) chart.draw();
  }
}, { rootMargin: "200px" });
const sizes = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const chart = [...charts].find((each) => each.plot === target);
    if (chart?.u && target.clientWidth && Math.abs(chart.u.width - target.clientWidth) > 1) {
      chart.u.setSize({ width: target.clientWidth, height: chart.height });
    }
  }
});
dark.addEventListener("change", () => {
  for (const chart of charts) chart.draw();
  document.querySelectorAll("rect[data-colour]").forEach((rect) => rect.setAttribute("fill", colour(+rect.dataset.colour)));
});

function spark(values) {
  const known = values.filter((value) => value != null);
  const picture = svg("svg", { class: "spark", viewBox: "0 0 100 28", preserveAspectRatio: "none", "aria-hidden": "true" });
  if (known.length < 2) return picture;
  const low = Math.min(...known), high = Math.max(...known);
  const at = (value, i) => `${((100 * i) / (known.length - 1)).toFixed(1)} ${(25 - (22 * (value - low)) / (high - low || 1)).toFixed(1)}`;
  picture.append(svg("path", { d: "M" + known.map(at).join("L") }));
  return picture;
}

const chip = (status) => el("span", { class: `chip ${status}` }, status);

function swatch(i) {
  return svg("svg", { class: "swatch", "aria-hidden": "true" }, svg("rect", { fill: colour(i), "data-colour": i }));
}

/** Select of named choices. */
function choose(label, choices, value, change) {
  const select = el("select", { onchange: (event) => change(event.target.value) },
    Object.entries(choices).map(([key, text]) => el("option", { value: key, selected: key === value }, text)));
  return el("label", {}, label, select);
}

/** Slider of smoothing, select of the axis, and the button that ends a zoom. */
function controls(view, change) {
  const shown = el("span", {}, view.weight.toFixed(2));
  const range = el("input", {
    type: "range", min: 0, max: 0.99, step: 0.01, value: view.weight,
    oninput: (event) => { view.weight = +event.target.value; shown.textContent = view.weight.toFixed(2); change(false); },
  });
  return [
    el("label", {}, "Smoothing", range, shown),
    choose("Over", AXES, view.axis, (axis) => { view.axis = axis; zoom(null); change(true); }),
    el("button", { id: "reset", type: "button", disabled: true, onclick: () => zoom(null) }, "Whole range"),
  ];
}

function table(heads, rows, label) {
  return el("div", { class: "card table", tabindex: 0, role: "region", "aria-label": `Table: ${label}` },
    el("table", {}, el("thead", {}, el("tr", {}, heads.map((head) => el("th", { scope: "col" }, head)))), el("tbody", {}, rows)));
}

function figures(pairs) {
  return el("dl", { class: "figures" }, pairs.filter(([, value]) => value != null && value !== DASH)
    .map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

/** Server-sent events that say in the page's corner if they arrive. */
function listen(query, handlers) {
  const source = new EventSource("/api/events" + query());
  source.onopen = () => { live.textContent = "● live"; live.className = "on"; };
  source.onerror = () => {
    live.textContent = "○ the board does not answer"; live.className = "off";
    source.close();
    setTimeout(() => listen(query, handlers), 2000);
  };
  for (const [name, handle] of Object.entries(handlers)) source.addEventListener(name, (event) => handle(JSON.parse(event.data)));
  addEventListener("pagehide", () => source.close());
}

// --------------------------------------------------------------------------------------------------------------- list

const COLUMNS = {
  name: ["Run", (run) => run.name, 1],
  status: ["Status", (run) => run.status, 1],
  steps: ["Agent steps", (run) => run.steps, -1],
  rate: ["Steps/s", (run) => run.rate ?? -Infinity, -1],
  value: ["Return", (run) => run.value ?? -Infinity, -1],
  created: ["Started", (run) => run.created, -1],
};

async function list() {
  const found = await get("/api/runs");
  let runs = new Map(found.runs.map((run) => [run.name, run]));
  document.getElementById("where").textContent = found.where;
  const query = new URLSearchParams(location.search);
  const view = { words: query.get("q") ?? "", status: query.get("status") ?? "", sort: query.get("sort") ?? "created", back: query.has("back") };
  if (!COLUMNS[view.sort]) view.sort = "created";
  const picked = new Set();
  const body = el("tbody"), count = el("span", { class: "muted", role: "status" });
  const compare = el("button", {
    type: "button", class: "primary", disabled: true,
    onclick: () => { location.href = "/compare?" + new URLSearchParams([...picked].map((name) => ["run", name])); },
  }, "Compare");
  const heads = Object.entries(COLUMNS).map(([key, [title]]) => {
    const head = el("th", { scope: "col", class: (key === "name" ? "name" : "") + (key === "rate" || key === "created" ? "extra" : "") },
      el("button", { type: "button", onclick: () => { view.back = view.sort === key ? !view.back : false; view.sort = key; show(); } }, title));
    head.dataset.key = key;
    return head;
  });
  const all = el("input", { type: "checkbox", class: "tick", "aria-label": "Choose all shown runs", onchange: (event) => {
    for (const run of visible()) event.target.checked ? picked.add(run.name) : picked.delete(run.name);
    for (const box of body.querySelectorAll("input")) box.checked = picked.has(box.value);
    choice();
  } });
  const rows = new Map();

  function choice() {
    compare.disabled = picked.size < 1;
    compare.textContent = picked.size ? `Compare ${picked.size}` : "Compare";
  }

  function row(run) {
    const old = rows.get(run.name);
    if (old?.run === run) return old.node;
    const box = el("input", { type: "checkbox", class: "tick", value: run.name, "aria-label": `Choose ${run.name}`,
      onchange: () => { box.checked ? picked.add(run.name) : picked.delete(run.name); choice(); } });
    box.checked = picked.has(run.name);
    const about = [run.recipe, run.environment !== run.recipe && run.environment, run.algorithm, `seed ${run.seed}`, run.members > 1 && `${run.members} runs`];
    const node = el("tr", {},
      el("td", { class: "pick" }, box),
      el("th", { scope: "row", class: "name", title: run.name }, el("a", { href: "/run/" + encodeURIComponent(run.name) }, run.name), el("small", {}, about.filter(Boolean).join(" · "))),
      el("td", {}, chip(run.status)),
      el("td", {}, number(run.steps), el("progress", { max: 1, value: share(run), "aria-label": `${Math.round(100 * share(run))} % of ${number(run.total_steps)} steps` })),
      el("td", { class: "extra" }, number(run.rate)),
      el("td", {}, number(run.value)),
      el("td", { class: "extra" }, ago(run.created)),
      el("td", {}, spark(run.spark)));
    if (old?.node.isConnected) {
      const inside = old.node.contains(document.activeElement) && document.activeElement.tagName;
      old.node.replaceWith(node);
      if (inside) node.querySelector(inside)?.focus();
    }
    rows.set(run.name, { run, node });
    return node;
  }

  function visible() {
    const words = view.words.toLowerCase().split(/\s+/).filter(Boolean);
    const of = (run) => `${run.name} ${run.recipe} ${run.environment} ${run.algorithm} ${run.status} seed ${run.seed}`.toLowerCase();
    const kept = [...runs.values()].filter((run) => (!view.status || run.status === view.status) && words.every((word) => of(run).includes(word)));
    const [, key, way] = COLUMNS[view.sort], sign = view.back ? -way : way;
    return kept.sort((a, b) => (key(a) < key(b) ? -sign : key(a) > key(b) ? sign : a.name < b.name ? -1 : 1));
  }

  const gap = () => el("tr", { class: "gap", "aria-hidden": "true", hidden: true }, el("td", { colspan: 8 }));
  const above = gap(), below = gap();
  body.append(above, below);
  let kept = [], height = 58;

  /** Rows of the window and some around it; gaps stand for the others. What stays is not moved, so that it keeps the focus. */
  function paint() {
    const top = body.getBoundingClientRect().top, margin = 8;
    const from = Math.max(0, Math.min(kept.length - 1, Math.floor(-top / height) - margin));
    const to = Math.min(kept.length, Math.ceil((innerHeight - top) / height) + margin);
    const wanted = kept.slice(from, Math.max(from, to)).map(row), stays = new Set([above, below, ...wanted]);
    for (const node of [...body.children]) if (!stays.has(node)) node.remove();
    let last = above;
    wanted.forEach((node, i) => {
      if (last.nextSibling !== node) last.after(node);
      node.setAttribute("aria-rowindex", from + i + 2);
      const box = node.querySelector("input");
      box.checked = picked.has(box.value);
      last = node;
    });
    if (wanted.length && body.isConnected) height = wanted[0].getBoundingClientRect().height || height;
    for (const [node, count] of [[above, from], [below, kept.length - from - wanted.length]]) {
      node.hidden = !count;
      node.firstChild.style.height = `${count * height}px`;
    }
  }

  let painting = 0;
  for (const event of ["scroll", "resize"]) addEventListener(event, () => {
    cancelAnimationFrame(painting);
    painting = requestAnimationFrame(paint);
  }, { passive: true });

  function show() {
    kept = visible();
    main.querySelector("#runs")?.setAttribute("aria-rowcount", kept.length + 1);
    paint();
    count.textContent = kept.length === runs.size ? `${runs.size} runs` : `${kept.length} of ${runs.size} runs`;
    for (const head of heads) {
      if (head.dataset.key === view.sort) head.setAttribute("aria-sort", (COLUMNS[view.sort][2] > 0) !== view.back ? "ascending" : "descending");
      else head.removeAttribute("aria-sort");
    }
    const query = new URLSearchParams();
    if (view.words) query.set("q", view.words);
    if (view.status) query.set("status", view.status);
    if (view.sort !== "created") query.set("sort", view.sort);
    if (view.back) query.set("back", "1");
    history.replaceState(null, "", query.size ? "?" + query : "/");
  }

  const states = { "": "all", running: "running", starting: "starting", done: "done", stopped: "stopped", damaged: "damaged" };
  const search = el("input", { type: "search", value: view.words, placeholder: "name, recipe, environment …", oninput: (event) => { view.words = event.target.value; show(); } });
  main.replaceChildren(
    el("header", {}, el("h1", {}, "Runs")),
    found.trouble ? el("p", { class: "trouble" }, found.trouble) : "",
    el("div", { class: "bar" }, el("label", { class: "wide" }, "Filter", search),
      choose("Status", states, view.status, (status) => { view.status = status; show(); }), compare, count),
    runs.size ? el("div", { class: "card table", tabindex: 0, role: "region", "aria-label": "Runs" },
      el("table", { id: "runs" }, el("thead", {}, el("tr", {}, el("th", { class: "pick", scope: "col" }, all), heads, el("th", { scope: "col" }, "Curve"))), body))
      : el("div", { class: "card empty" }, el("p", {}, "There are no runs yet. "), el("p", {}, el("code", {}, "longhaul train cartpole"), " makes one.")),
  );
  show();
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && !/INPUT|SELECT/.test(document.activeElement.tagName)) { event.preventDefault(); search.focus(); }
  });
  listen(() => "", { runs: ({ changed, names }) => {
    const same = names.length === runs.size && changed.every((run) => runs.has(run.name));
    for (const run of changed) runs.set(run.name, run);
    runs = new Map([...runs].filter(([name]) => names.includes(name)));
    if (!found.runs.length) location.reload();
    kept = kept.map((run) => runs.get(run.name) ?? run);
    if (same) for (const run of changed) { if (rows.get(run.name)?.node.isConnected) row(run); }
    else show();
  } });
}

// ---------------------------------------------------------------------------------------------------------------- run

const FIRST = ["episode/return", "episode/accuracy", "episode/progress", "episode/collision", "episode/offroad", "episode/length", "sps"];

/** Completions with the verifier's word, beside those before training where they are known. */
function completions(some) {
  const paired = some.some((each) => each.before != null), said = (right) => el("td", {}, right ? "right" : "wrong");
  const text = (value) => el("td", { class: "left" }, el("code", {}, value ?? ""));
  const before = (each) => (each.before == null ? [text(""), el("td")] : [text(each.before), said(each.before_right)]);
  return table(["problem", ...(paired ? ["before", "verifier"] : []), paired ? "after" : "completion", "verifier"], some.map((each) =>
    el("tr", {}, el("th", { scope: "row", class: "left" }, el("code", {}, each.prompt)), paired ? before(each) : [], text(each.chain), said(each.right))), "Completions");
}

const EVALUATED = ["return", "accuracy", "progress", "goal", "collision", "offroad", "red_light", "pass_at_1", "pass_at_k", "majority_at_k", "soundness", "length"];

async function run(name) {
  const path = "/api/run/" + encodeURIComponent(name);
  const [detail, first, made] = await Promise.all([get(path), get(path + "/curves"), get(path + "/evaluations")]);
  document.title = `${name} · Longhaul`;
  let columns = first.columns, count = first.count, evaluations = made, newest = detail;
  const view = { weight: 0, axis: "agent_steps", words: "" };
  const head = el("header"), facts = el("section", { "aria-label": "Key figures" }), health = el("section", { "aria-label": "Health" });
  const grid = el("div", { class: "charts" }), player = el("section", { "aria-label": "Episodes" }), end = el("section", { "aria-label": "Evaluation" });
  const during = el("section", { "aria-label": "Evaluations during training" }), chains = el("section", { "aria-label": "Completions" });
  const figures_of = new Map();

  function draw() {
    const names = Object.keys(columns).filter((metric) => !(metric in AXES) && metric !== "env_steps" && !metric.startsWith("eval/"));
    const rank = (metric) => (FIRST.includes(metric) ? FIRST.indexOf(metric) : FIRST.length);
    names.sort((a, b) => rank(a) - rank(b) || (a < b ? -1 : 1));
    for (const metric of names) {
      let chart = figures_of.get(metric);
      if (!chart) {
        chart = new Chart(metric, view.axis);
        figures_of.set(metric, chart);
        const before = names.slice(names.indexOf(metric) + 1).map((other) => figures_of.get(other)?.node).find((node) => node?.isConnected);
        grid.insertBefore(chart.node, before ?? null);
      }
      chart.weight = view.weight;
      chart.axis = view.axis;
      chart.node.hidden = !metric.toLowerCase().includes(view.words);
      chart.update([{ name: metric, x: columns[view.axis] ?? [], y: columns[metric], colour: 0 }]);
    }
    grid.classList.toggle("none", !names.length);
    waiting.hidden = names.length > 0;
    evaluated();
  }

  /** Evaluations made so far: curves with their intervals, and a row each, the newest first. */
  const scores = new Map(), scored = el("div", { class: "charts" }), latest = el("div");
  function evaluated() {
    if (!evaluations.length) return;
    const all = [...new Set(evaluations.flatMap((each) => Object.keys(each.metrics)))];
    const some = EVALUATED.filter((metric) => all.includes(metric));
    for (const metric of some.length ? some : all.slice(0, 6)) {
      let chart = scores.get(metric);
      if (!chart) {
        scores.set(metric, chart = new Chart(metric.replaceAll("_", " ") + ", evaluated", view.axis));
        scored.append(chart.node);
      }
      chart.axis = view.axis;
      const part = (i) => evaluations.map((each) => each.metrics[metric]?.[i] ?? null);
      chart.update([{ name: metric, x: evaluations.map((each) => each[view.axis]), y: part(0), low: part(1), high: part(2), colour: 2 }]);
    }
    if (!during.children.length) during.append(el("h2", {}, "Evaluations"), scored, latest);
    const shown = some.length ? some : all.slice(0, 6);
    const cell = (value) => el("td", {}, value ? number(value[0]) : DASH, value?.[1] == null ? "" : el("small", {}, ` ${number(value[1])} to ${number(value[2])}`));
    latest.replaceChildren(table(["update", "agent steps", ...shown.map((metric) => metric.replaceAll("_", " ")), "episodes"],
      evaluations.slice(-12).reverse().map((each) => el("tr", {}, el("th", { scope: "row" }, whole(each.update)), el("td", {}, number(each.agent_steps)),
        shown.map((metric) => cell(each.metrics[metric])), el("td", {}, whole(each.episodes)))), "Evaluations during training"),
    el("p", { class: "muted note" }, "Means over episodes by the policy's mode, with 95 % bootstrap intervals."));
  }

  /** Completions of one evaluation of a language model, the newest unless another is chosen. */
  let wanted = "";
  function complete() {
    const of = new Map(evaluations.filter((each) => each.chains).map((each) => [String(each.update), each.chains]));
    if (newest.chains.length) of.set("end", newest.chains);
    if (!of.size) return;
    const key = of.has(wanted) ? wanted : [...of.keys()].at(-1);
    const names = Object.fromEntries([...of.keys()].map((each) => [each, each === "end" ? "at the end" : `after update ${whole(+each)}`]));
    if (document.activeElement?.tagName === "SELECT" && chains.contains(document.activeElement)) return;
    chains.replaceChildren(el("h2", {}, "Completions"),
      el("div", { class: "bar" }, choose("Sampled", names, key, (chosen) => { wanted = chosen; document.activeElement.blur(); complete(); })),
      completions(of.get(key)));
  }

  function tell(fresh) {
    const { summary, memory, findings, about, result } = newest = fresh;
    const left = summary.rate && summary.status === "running" ? (summary.total_steps - summary.steps) / summary.rate : null;
    const now = about.command && (Array.isArray(about.command) ? about.command.slice(1).join(" ") : about.command);
    head.replaceChildren(
      el("p", { class: "muted" }, el("a", { href: "/" }, "Runs"), " / "),
      el("h1", {}, summary.name, " ", chip(summary.status)),
      el("p", { class: "muted" }, [summary.recipe, summary.environment !== summary.recipe && summary.environment, summary.algorithm, `seed ${summary.seed}`,
        about.commit && `commit ${String(about.commit).slice(0, 12)}`, about.host && `on ${about.host}`].filter(Boolean).join(" · ")),
      el("progress", { max: 1, value: share(summary), "aria-label": `${Math.round(100 * share(summary))} % of ${number(summary.total_steps)} steps` }),
    );
    head.title = now || "";
    facts.replaceChildren(figures([
      ["agent steps", `${whole(summary.steps)}`], ["of", whole(summary.total_steps)], ["steps a second", number(summary.rate)],
      ["return", number(summary.value)], ["return, evaluated", number(summary.trained)], ["training", duration(summary.seconds)],
      ["time left", left == null ? null : duration(left)], ["updates", whole(summary.updates)],
      ["device memory", memory.needed ? bytes(memory.needed) : null],
      ["newest checkpoint", summary.checkpoints.length ? whole(summary.checkpoints.at(-1)) : "none"], ["parameters", about.parameters ? number(about.parameters) : null],
    ]));
    health.replaceChildren(...(findings.length ? [el("h2", {}, "Health")] : []), ...findings.map((found) =>
      el("div", { class: "card finding" + (found.until == null ? "" : " past") },
        el("p", {}, el("strong", {}, found.says), ` since update ${whole(found.since)}` + (found.until == null ? ", and still" : ` until ${whole(found.until)}`)),
        el("p", { class: "muted" }, found.remedy))));
    if (Object.keys(result).length) finished(result);
    const step = summary.checkpoints.at(-1);
    button.disabled = busy || step == null;
    button.textContent = step == null ? "No checkpoint yet" : `${shown != null && shown !== step ? "Newer: show" : "Show"} the episodes of the checkpoint after update ${whole(step)}`;
    complete();
  }

  function finished(result) {
    const rows = Object.entries(result.evaluation ?? {}).filter(([, means]) => means && typeof means === "object");
    const metrics = [...new Set(rows.flatMap(([, means]) => Object.keys(means)))].filter((metric) => metric !== "episodes");
    if (!rows.length) return;
    end.replaceChildren(el("h2", {}, "Evaluation at the end"), table(["policy", ...metrics.map((metric) => metric.replaceAll("_", " ")), "episodes"],
      rows.map(([policy, means]) => el("tr", {}, el("th", { scope: "row" }, policy), metrics.map((metric) => el("td", {}, number(means[metric]))), el("td", {}, whole(means.episodes)))), "Evaluation"));
  }

  let busy = false, shown = null;
  const said = el("p", { class: "muted", role: "status" }), place = el("div");
  const frame = (src, title) => el("iframe", { src, title, sandbox: "allow-scripts", loading: "lazy" });
  const button = el("button", { type: "button", onclick: async () => {
      const step = newest.summary.checkpoints.at(-1);
      button.disabled = busy = true;
      said.textContent = "Driving with the newest checkpoint; this takes a minute …";
      const answer = await (await fetch("/player/" + encodeURIComponent(name), { method: "POST" })).json();
      said.textContent = answer.trouble;
      busy = false;
      if (!answer.trouble) shown = step;
      tell(newest);
      if (!answer.trouble) place.replaceChildren(frame(`/player/${encodeURIComponent(name)}?at=${Date.now()}`, "Player with the newest checkpoint's episodes"));
  } });

  function episodes() {
    const report = detail.report ? [el("a", { class: "button", href: "/report/" + encodeURIComponent(name), target: "_blank", rel: "noopener" }, "Report")] : [];
    player.replaceChildren(el("h2", {}, "Episodes"), el("div", { class: "bar" }, button, report, said), place);
  }

  const settings = el("details", {}, el("summary", {}, "Settings and origin"),
    el("pre", { tabindex: 0 }, Object.entries({ ...detail.config, ...detail.about }).map(([key, value]) => `${key} = ${plain(value)}`).join("\n")));
  const filter = el("input", { type: "search", placeholder: "metric …", oninput: (event) => { view.words = event.target.value.toLowerCase(); draw(); } });
  const waiting = el("p", { class: "muted" }, "No record yet: it imports, makes scenarios or compiles.");
  main.replaceChildren(head, facts, health, el("h2", {}, "Curves"),
    el("div", { class: "bar" }, controls(view, () => draw()), el("label", { class: "wide" }, "Filter", filter)), waiting, grid, during, end, player, chains, el("section", { "aria-label": "Settings" }, settings));
  tell(detail);
  draw();
  if (detail.config["environment.kind"] !== "Reasoning") episodes();
  let due = 0;
  listen(() => `?run=${encodeURIComponent(name)}&count=${count}`, {
    run: tell,
    evaluations: (found) => { evaluations = found; evaluated(); complete(); },
    rows: async (rows) => {
      const length = Object.values(columns)[0]?.length ?? 0;
      if (rows.start !== count || length > 2500) {
        const fresh = rows.start === 0 ? rows : await get(path + "/curves");
        columns = fresh.columns;
        count = fresh.count;
      } else {
        const more = Object.values(rows.columns)[0]?.length ?? 0;
        for (const metric of new Set([...Object.keys(columns), ...Object.keys(rows.columns)])) {
          columns[metric] = [...(columns[metric] ?? Array(length).fill(null)), ...(rows.columns[metric] ?? Array(more).fill(null))];
        }
        count = rows.count;
      }
      cancelAnimationFrame(due);
      due = requestAnimationFrame(draw);
    },
  });
}

// ------------------------------------------------------------------------------------------------------------ compare

async function compare() {
  document.title = "Comparison · Longhaul";
  const query = new URLSearchParams(location.search);
  const names = [...new Set(query.getAll("run"))];
  if (!names.length) {
    main.replaceChildren(el("h1", {}, "Comparison"), el("p", {}, "Choose runs in ", el("a", { href: "/" }, "the list"), "."));
    return;
  }
  const view = { metric: query.get("metric") ?? "episode/return", axis: query.get("axis") in AXES ? query.get("axis") : "agent_steps",
    weight: +(query.get("smooth") ?? 0), seeds: query.has("seeds"), hidden: new Set(query.getAll("hide")) };
  let found, chart;
  const address = () => {
    const asked = new URLSearchParams(names.map((name) => ["run", name]));
    asked.set("metric", view.metric);
    asked.set("axis", view.axis);
    return asked;
  };

  function keep() {
    const asked = address();
    if (view.weight) asked.set("smooth", view.weight);
    if (view.seeds) asked.set("seeds", "1");
    for (const name of view.hidden) asked.append("hide", name);
    history.replaceState(null, "", "/compare?" + asked);
  }

  const varying = (group) => {
    const own = Object.entries(found.differences).filter(([field]) => field !== "seed");
    const words = own.map(([field, values]) => `${field.split(".").at(-1)} ${plain(values[names.indexOf(group[0])])}`);
    return group.length === 1 && (!words.length || words.length > 4) ? group[0] : words.join(", ") || "all seeds";
  };

  function draw() {
    chart.weight = view.weight;
    chart.axis = view.axis;
    chart.update(view.seeds
      ? found.groups.map((group, i) => ({ name: varying(group), x: found.over[i][0], y: found.over[i][1], low: found.over[i][2], high: found.over[i][3], colour: i, hidden: view.hidden.has(group[0]) }))
      : names.map((name, i) => ({ name, x: found.lines[name][0], y: found.lines[name][1], colour: i, hidden: view.hidden.has(name) })));
    keep();
  }

  async function load() {
    found = await get("/api/compare?" + address());
    view.metric = found.metric;
    charts.clear();
    chart = new Chart(found.metric, view.axis, true);
    const many = found.groups.some((group) => group.length > 1);
    const interval = (low, high) => (low == null ? DASH : `${number(low)} to ${number(high)}`);
    const toggle = el("label", {}, el("input", { type: "checkbox", class: "tick", checked: view.seeds, onchange: (event) => { view.seeds = event.target.checked; legend(); draw(); } }), "Aggregate over seeds");
    const lists = el("ul", { class: "legend" });
    const legend = () => lists.replaceChildren(...(view.seeds ? found.groups : names.map((name) => [name])).map((group, i) => {
      const box = el("input", { type: "checkbox", class: "tick", checked: !view.hidden.has(group[0]), onchange: () => {
        box.checked ? view.hidden.delete(group[0]) : view.hidden.add(group[0]);
        draw();
      } });
      const text = view.seeds ? `${varying(group)} (${group.length} seed${group.length > 1 ? "s" : ""})` : group[0];
      return el("li", {}, el("label", {}, box, swatch(i), text));
    }));
    legend();
    const choices = Object.fromEntries(found.metrics.map((metric) => [metric, metric]));
    const fields = Object.entries(found.differences);
    main.replaceChildren(
      el("header", {}, el("p", { class: "muted" }, el("a", { href: "/" }, "Runs"), " / "), el("h1", {}, `Comparison of ${names.length} run${names.length > 1 ? "s" : ""}`)),
      el("div", { class: "bar" }, choose("Metric", choices, view.metric, (metric) => { view.metric = metric; load(); }),
        controls(view, (other) => (other ? load() : draw())), many ? toggle : null,
        el("a", { class: "button", href: "/api/compare.csv?" + address(), download: "runs.csv" }, "CSV")),
      chart.node, lists,
      el("h2", {}, "Final values"),
      table(["setting", "runs", "mean", "95 % interval", "IQM", "95 % interval"], found.rows.map((row) => el("tr", {},
        el("th", { scope: "row", class: "left" }, varying(found.groups.find((group) => group.includes(row.runs[0])))), el("td", {}, whole(row.runs.length)),
        el("td", {}, number(row.mean)), el("td", {}, interval(row.mean_low, row.mean_high)), el("td", {}, number(row.iqm)), el("td", {}, interval(row.iqm_low, row.iqm_high)))), "Final values"),
      el("p", { class: "muted note" }, "A run's final value is the mean of its last 5 % of records. IQM is the mean of the middle half of the seeds; intervals are percentiles of a bootstrap over seeds (Agarwal et al. 2021), and a single run has none."),
      el("h2", {}, "Different settings"),
      fields.length ? table(["setting", ...names], fields.map(([field, values]) => el("tr", {}, el("th", { scope: "row" }, field), values.map((value) => el("td", {}, plain(value))))), "Different settings")
        : el("p", { class: "muted" }, "All settings are the same."),
      el("h2", {}, "Runs"),
      table(["run", "status", "agent steps", "steps/s", "return", "training"], found.summaries.map((each) => el("tr", {},
        el("th", { scope: "row" }, el("a", { href: "/run/" + encodeURIComponent(each.name) }, each.name)), el("td", {}, chip(each.status)), el("td", {}, number(each.steps)),
        el("td", {}, number(each.rate)), el("td", {}, number(each.value)), el("td", {}, duration(each.seconds)))), "Runs"),
    );
    draw();
  }

  await load();
  listen(() => "", { runs: ({ changed }) => {
    if (!changed.some((each) => names.includes(each.name))) return;
    get("/api/compare?" + address()).then((fresh) => { found = fresh; draw(); });
  } });
}

const [, kind, name] = location.pathname.split("/");
(kind === "run" ? run(decodeURIComponent(name)) : kind === "compare" ? compare() : list()).catch((error) => {
  main.replaceChildren(el("h1", {}, "Not shown"), el("p", { class: "trouble" }, error.message), el("p", {}, el("a", { href: "/" }, "All runs")));
});
