"""The page of the graph view: markup, style and script in one string, so that the file works anywhere."""

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>@TITLE@</title>
<meta name="viewport" content="width=device-width,initial-scale=1">
<style>
:root { color-scheme: light dark; --back: #fff; --ink: #1c2330; --soft: #6b7686; --line: #dfe3ea; --lane: #f5f7fa;
  --edge: #b4bfcd; }
@media (prefers-color-scheme: dark) {
  :root { --back: #14181f; --ink: #e6eaf0; --soft: #93a0b3; --line: #2b3240; --lane: #1b212b; --edge: #465267; }
}
* { box-sizing: border-box; }
body { margin: 0; height: 100vh; display: flex; flex-direction: column; background: var(--back); color: var(--ink);
  font: 14px/1.4 system-ui, sans-serif; }
header { padding: 12px 18px 8px; }
h1 { font-size: 18px; margin: 0 0 6px; }
nav button { font: inherit; color: var(--ink); background: var(--lane); border: 1px solid var(--line);
  padding: 3px 12px; border-radius: 5px; margin: 0 6px 4px 0; cursor: pointer; }
nav button[aria-selected=true] { border-color: hsl(214 70% 52%); box-shadow: inset 0 -2px hsl(214 70% 52%); }
#key { margin-top: 8px; font-size: 12px; color: var(--soft); }
#key span { margin-right: 14px; white-space: nowrap; }
#key i { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 5px; }
main { flex: 1; display: flex; gap: 1px; background: var(--line); min-height: 0; border-top: 1px solid var(--line); }
section { flex: 1; background: var(--back); position: relative; min-width: 0; display: flex; flex-direction: column; }
h2 { font-size: 13px; font-weight: 600; margin: 0; padding: 6px 12px; background: var(--lane); }
h2 small { font-weight: 400; color: var(--soft); margin-left: 8px; }
svg { flex: 1; min-height: 0; width: 100%; cursor: grab; touch-action: none; outline: none; }
svg:active { cursor: grabbing; }
svg:focus-visible { box-shadow: inset 0 0 0 2px hsl(214 70% 52%); }
.node rect { stroke-width: 1; } .node { cursor: pointer; }
.node text { font-size: 11px; fill: var(--ink); text-anchor: middle; pointer-events: none; }
.node text.small { font-size: 9px; fill: var(--soft); }
.node.solid text { fill: #fff; } .node.solid text.small { fill: #ffffffcc; }
.node.backward rect { stroke-dasharray: 4 2; }
.node.far { opacity: .22; } .node.picked rect { stroke: var(--ink); stroke-width: 3; stroke-dasharray: none; }
path { fill: none; stroke: var(--edge); stroke-width: 1.2; } path.near { stroke: var(--ink); stroke-width: 2; }
path.far { opacity: .2; }
#tip { position: fixed; display: none; pointer-events: none; background: var(--ink); color: var(--back);
  max-width: 520px; padding: 6px 9px; border-radius: 5px; font-size: 12px; white-space: pre-wrap; z-index: 2;
  overflow-wrap: anywhere; }
footer { padding: 6px 18px 10px; color: var(--soft); font-size: 12px; border-top: 1px solid var(--line); }
footer details { max-height: 30vh; overflow: auto; } footer li { margin: 1px 0; }
@media (max-width: 800px) {
  body { height: auto; } main { flex-direction: column; } section { flex: none; height: 75vh; }
  nav, #key { display: flex; overflow-x: auto; } nav button, #key span { flex: none; }
}
</style></head><body>
<header><h1>@TITLE@</h1><nav id="stages" role="tablist"></nav><div id="key"></div></header>
<main><section><h2 id="head0"></h2><svg id="view0" tabindex="0" role="img" aria-label="graph before the passes"></svg>
</section><section><h2 id="head1"></h2>
<svg id="view1" tabindex="0" role="img" aria-label="graph after the passes"></svg></section></main>
<div id="tip" role="status"></div>
<footer>Drag to pan; wheel or + and - to zoom; double-click to read; 0 for all of it. Click a node to see what it needs
and what needs it, and its fused region on the other side. Dashed: backward pass.<details id="notes"></details></footer>
<script type="application/json" id="data">@DATA@</script>
<script>
"use strict";
const stages = JSON.parse(document.getElementById("data").textContent), tip = document.getElementById("tip");
const WIDE = 150, HIGH = 62, BOX = 132, TALL = 40;
const KINDS = { product: [214, 60, 46], attention: [268, 45, 52], rows: [176, 55, 36], elementwise: [140, 38, 40],
  movement: [215, 12, 52], write: [4, 60, 50], collective: [30, 80, 45], view: null, input: null };
const NAMES = { product: "product", attention: "attention", rows: "norm, softmax", elementwise: "elementwise",
  movement: "copy, layout", write: "writes in place", collective: "collective", view: "view", input: "input" };
const FUSED = [[28, 42], [330, 42], [50, 31], [290, 42], [12, 42], [80, 30], [190, 32], [250, 48]];  // hue, lightness
const css = ([h, s, l]) => `hsl(${h} ${s}% ${l}%)`;
const ESCAPES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };
const text = value => String(value).replace(/[&<>"]/g, c => ESCAPES[c]);
function short(value, unit) {
  if (!value) return "";
  const step = Math.min(4, Math.floor(Math.log10(value) / 3));
  return `${+(value / 1000 ** step).toPrecision(3)} ${["", "k", "M", "G", "T"][step]}${unit}`;
}
let stage = null, regions = [], views = [null, null];
function region(name) {
  const [hue, light] = FUSED[regions.indexOf(name) % FUSED.length];
  return css([hue, 72, light]);
}
const fill = node => node.fused ? region(node.fused) : KINDS[node.kind] ? css(KINDS[node.kind]) : "var(--lane)";

function curve(points) {
  const at = ([x, y], dy) => [x * WIDE, y * HIGH + dy];
  let [x, y] = at(points[0], TALL / 2), d = `M${x} ${y}`;
  points.slice(1).forEach((point, i) => {
    const last = i === points.length - 2, [u, v] = at(point, last ? -TALL / 2 : 0), half = (y + v) / 2;
    d += `C${x} ${half} ${u} ${half} ${u} ${v}`; [x, y] = [u, v];
  });
  return d;
}
class View {
  constructor(side) {
    this.side = side; this.svg = document.getElementById("view" + side); this.drag = null; this.picked = null;
    const svg = this.svg;
    svg.addEventListener("wheel", event => { event.preventDefault();
      this.zoom(Math.exp(-event.deltaY * .0015), event.offsetX, event.offsetY); }, { passive: false });
    svg.addEventListener("dblclick", event => {
      if (this.scale < .9) this.zoom(1 / this.scale, event.offsetX, event.offsetY); else this.fit(); });
    svg.addEventListener("pointerdown", event => {
      this.drag = [event.clientX, event.clientY, this.x, this.y, false]; });
    svg.addEventListener("pointermove", event => this.move(event));
    svg.addEventListener("pointerup", event => {
      const dragged = this.drag && this.drag[4]; this.drag = null;
      if (!dragged) pick(this.side, this.found(event)); });
    svg.addEventListener("pointerleave", () => { this.drag = null; tip.style.display = "none"; });
    svg.addEventListener("keydown", event => {
      const w = svg.clientWidth / 2, h = svg.clientHeight / 2, by = { ArrowLeft: [60, 0], ArrowRight: [-60, 0],
        ArrowUp: [0, 60], ArrowDown: [0, -60] }[event.key];
      if (event.key === "+" || event.key === "=") this.zoom(1.3, w, h);
      else if (event.key === "-") this.zoom(1 / 1.3, w, h);
      else if (event.key === "0") this.fit();
      else if (by) { this.x += by[0]; this.y += by[1]; this.turn(); }
      else return;
      event.preventDefault();
    });
  }
  show(graph, title) {
    this.graph = graph; this.picked = null;
    const sum = key => graph.nodes.reduce((total, node) => total + node[key], 0);
    const work = graph.nodes.filter(node => node.kind !== "input").length;
    document.getElementById("head" + this.side).innerHTML =
      `${title}<small>${work} operators · ${short(sum("flops"), "FLOP")} · ${short(sum("bytes"), "B")} moved</small>`;
    const lines = graph.edges.map(([a, b, path], i) => `<path data-edge="${i}" d="${curve(path)}"/>`);
    const boxes = graph.nodes.map((node, i) => this.box(node, i));
    this.svg.innerHTML = `<g>${lines.join("")}${boxes.join("")}</g>`;
    this.start();
  }
  box(node, i) {
    const solid = node.fused || KINDS[node.kind], x = node.x * WIDE - BOX / 2, y = node.y * HIGH - TALL / 2;
    const label = node.op === "input" ? node.given : node.op, small = node.op === "input" ? node.result :
      [short(node.flops, "FLOP"), short(node.bytes, "B")].filter(Boolean).join(" · ") || node.result;
    const cut = (value, size) => text(value.length > size ? value.slice(0, size - 1) + "…" : value);
    return `<g class="node ${node.part} ${solid ? "solid" : ""}" data-node="${i}">` +
      `<rect x="${x}" y="${y}" width="${BOX}" height="${TALL}" rx="${node.kind === "input" ? 20 : 5}" ` +
      `style="fill:${fill(node)}" stroke="${solid ? "var(--back)" : "var(--edge)"}"/>` +
      `<text x="${node.x * WIDE}" y="${node.y * HIGH - 3}">${cut((node.again ? "↻ " : "") + label, 20)}</text>` +
      `<text class="small" x="${node.x * WIDE}" y="${node.y * HIGH + 11}">${cut(small, 26)}</text></g>`;
  }
  bounds() {
    const xs = this.graph.nodes.map(n => n.x * WIDE), ys = this.graph.nodes.map(n => n.y * HIGH);
    const aside = BOX / 2 + 12, above = TALL / 2 + 12;
    return [Math.min(...xs) - aside, Math.min(...ys) - above, Math.max(...xs) + aside, Math.max(...ys) + above];
  }
  start() {                            // all of it; where boxes would be dots, the top of it, as wide as can be read
    this.fit();
    if (this.scale >= .1) return;
    const [a, b, c] = this.bounds(), w = this.svg.clientWidth;
    this.scale = Math.min(1.1, Math.max(.75, w / (c - a))); this.x = w / 2 - (a + c) / 2 * this.scale;
    this.y = -b * this.scale; this.turn();
  }
  fit() {
    const [a, b, c, d] = this.bounds(), w = this.svg.clientWidth, h = this.svg.clientHeight;
    this.scale = Math.min(w / (c - a), h / (d - b), 1.1);
    this.x = w / 2 - (a + c) / 2 * this.scale; this.y = h / 2 - (b + d) / 2 * this.scale; this.turn();
  }
  zoom(factor, x, y) {
    const next = Math.min(4, Math.max(.03, this.scale * factor)), real = next / this.scale;
    this.x = x - (x - this.x) * real; this.y = y - (y - this.y) * real; this.scale = next; this.turn();
  }
  turn() { this.svg.firstChild.setAttribute("transform", `translate(${this.x} ${this.y}) scale(${this.scale})`); }
  found(event) {
    const box = event.target.closest && event.target.closest("[data-node]");
    return box ? +box.dataset.node : null;
  }
  move(event) {
    if (this.drag) {
      const dx = event.clientX - this.drag[0], dy = event.clientY - this.drag[1];
      if (Math.hypot(dx, dy) > 3) this.drag[4] = true;
      this.x = this.drag[2] + dx; this.y = this.drag[3] + dy; this.turn();
    }
    const i = this.found(event);
    tip.style.display = i === null || this.drag ? "none" : "block";
    if (i === null) return;
    const node = this.graph.nodes[i], lines = node.op === "input" ? [`${node.given}, an input`, node.result] :
      [`${node.name} = ${node.op}(${node.args})`, node.result];
    if (node.bytes) lines.push(`${short(node.flops, "FLOP") || "0 FLOP"}, ${short(node.bytes, "B")} read and written`);
    if (node.fused) lines.push(`fused: ${node.fused}${node.of.length ? " (" + node.of.join(", ") + ")" : ""}`);
    if (node.again) lines.push("computed again in the backward pass");
    tip.textContent = lines.filter(Boolean).join("\\n");
    tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + "px";
    tip.style.top = Math.min(event.clientY + 16, innerHeight - tip.offsetHeight - 8) + "px";
  }
  mark(chosen) {                       // chosen: nodes, or null for none
    const near = new Set(chosen || []), near_edges = new Set();
    if (chosen) this.graph.edges.forEach(([a, b], i) => {
      if (chosen.includes(a) || chosen.includes(b)) { near.add(a); near.add(b); near_edges.add(i); } });
    this.svg.querySelectorAll("[data-node]").forEach((box, i) => {
      box.classList.toggle("picked", !!chosen && chosen.includes(i));
      box.classList.toggle("far", !!chosen && !near.has(i)); });
    this.svg.querySelectorAll("[data-edge]").forEach((line, i) => {
      line.classList.toggle("near", near_edges.has(i));
      line.classList.toggle("far", !!chosen && !near_edges.has(i)); });
  }
}
function pick(side, i) {
  const mine = views[side], other = views[1 - side], node = i === null ? null : mine.graph.nodes[i];
  mine.mark(node ? [i] : null);
  if (!node) return other.mark(null);
  const [fusions, parts] = side ? [mine, other] : [other, mine];
  let twins = other.graph.nodes.flatMap((n, k) => n.name === node.name ? [k] : []);
  if (side && node.of.length) twins = other.graph.nodes.flatMap((n, k) => node.of.includes(n.name) ? [k] : []);
  if (!side && node.fused) {
    const whole = fusions.graph.nodes.filter(n => n.of.includes(node.name));
    twins = fusions.graph.nodes.flatMap((n, k) => whole.includes(n) ? [k] : []);
    mine.mark(parts.graph.nodes.flatMap((n, k) => whole.some(w => w.of.includes(n.name)) ? [k] : []));
  }
  other.mark(twins.length ? twins : null);
}
function open(next) {
  stage = next;
  const nodes = [...stage.before.nodes, ...stage.after.nodes];
  regions = [...new Set(nodes.map(node => node.fused).filter(Boolean))];
  const swatch = (style, name) => `<span><i style="${style}"></i>${text(name)}</span>`;
  document.getElementById("key").innerHTML =
    Object.keys(KINDS).filter(kind => KINDS[kind] && nodes.some(node => node.kind === kind && !node.fused))
      .map(kind => swatch(`background:${css(KINDS[kind])}`, NAMES[kind])).join("") +
    regions.map(name => swatch(`background:${region(name)}`, "fused: " + name)).join("");
  document.querySelectorAll("#stages button").forEach((b, i) => b.setAttribute("aria-selected", stages[i] === stage));
  const notes = document.getElementById("notes");
  notes.hidden = !stage.notes.length;
  notes.innerHTML = `<summary>${stage.notes.length} notes of the passes</summary><ul>` +
    stage.notes.map(note => `<li>${text(note)}</li>`).join("") + "</ul>";
  // last: how much room is left for a graph depends on the rest
  views[0].show(stage.before, "Captured"); views[1].show(stage.after, "After the passes");
}
views = [new View(0), new View(1)];
const tabs = document.getElementById("stages");
stages.forEach(one => {
  const button = document.createElement("button"); button.textContent = one.name; button.setAttribute("role", "tab");
  button.addEventListener("click", () => open(one)); tabs.append(button);
});
open(stages[0]);
</script></body></html>
"""
