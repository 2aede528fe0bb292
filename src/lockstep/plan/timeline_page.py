"""The page of the timeline: markup, style and script in one string, so that the file works anywhere."""

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>@TITLE@</title>
<meta name="viewport" content="width=device-width,initial-scale=1">
<style>
:root { color-scheme: light dark; --back: #fff; --ink: #1c2330; --soft: #6b7686; --line: #dfe3ea; --lane: #f5f7fa; }
@media (prefers-color-scheme: dark) {
  :root { --back: #14181f; --ink: #e6eaf0; --soft: #93a0b3; --line: #2b3240; --lane: #1b212b; }
}
body { margin: 0; background: var(--back); color: var(--ink); font: 14px/1.4 system-ui, sans-serif; }
header { padding: 14px 18px 6px; }
h1 { font-size: 18px; margin: 0 0 4px; }
h1 { overflow-wrap: anywhere; }
header div { display: flex; flex-wrap: wrap; gap: 0 18px; color: var(--soft); }
header b { color: var(--ink); font-weight: 600; }
#key i { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin: 0 5px 0 0; }
canvas { display: block; width: 100%; cursor: grab; touch-action: none; outline: none; }
canvas:active { cursor: grabbing; }
#tip { position: fixed; display: none; pointer-events: none; background: var(--ink); color: var(--back);
  padding: 6px 9px; border-radius: 5px; font-size: 12px; white-space: pre; z-index: 2; }
footer { padding: 6px 18px 14px; color: var(--soft); font-size: 12px; }
</style></head><body>
<header><h1>@TITLE@</h1><div>@FACTS@</div><div id="key"></div></header>
<canvas id="view" tabindex="0" aria-label="timeline of the pipeline"></canvas><div id="tip" role="status"></div>
<footer>Drag to pan; wheel or + and - to zoom; arrow keys to move; double click or 0 for all of it. The area below each
lane is what the device holds: @HELD@.</footer>
<script type="application/json" id="data">@DATA@</script>
<script>
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const view = document.getElementById("view"), tip = document.getElementById("tip"), pen = view.getContext("2d");
const NAMES = { F: "forward", B: "input gradient", W: "weight gradient", BW: "full backward", O: "overlapped" };
const COLOURS = { F: [214, 74, 56], B: [152, 48, 40], W: [36, 80, 46], BW: [338, 45, 46], O: [268, 45, 58] };
const LEFT = 46, TOP = 26, LANE = 26, MEMORY = 20, GAP = 8, ROW = LANE + MEMORY + GAP;
const kind = step => step[0].includes("&") ? "O" : step[1];
const colour = (k, chunk) => { const [h, s, l] = COLOURS[k]; return `hsl(${h} ${s}% ${l + 9 * Math.min(chunk, 3)}%)`; };
const shown = new Set(data.lanes.flat().map(kind));
document.getElementById("key").innerHTML = Object.keys(NAMES).filter(k => shown.has(k))
  .map(k => `<span><i style="background:${colour(k, 0)}"></i>${NAMES[k]}</span>`).join("");
let from = 0, to = data.span, width = 0, drag = null, hover = null;
const x = t => LEFT + (t - from) / (to - from) * (width - LEFT - 8);
const time = px => from + (px - LEFT) / (width - LEFT - 8) * (to - from);
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name);
const number = v => String(+v.toPrecision(6)) + (data.unit ? " " + data.unit : "");

function first(lane, t) {            // the first step that ends after t: lanes are in order, so by bisection
  let low = 0, high = lane.length;
  while (low < high) { const mid = (low + high) >> 1; if (lane[mid][4] > t) high = mid; else low = mid + 1; }
  return low;
}
function axis() {
  const raw = (to - from) / Math.max(2, width / 110), base = 10 ** Math.floor(Math.log10(raw));
  const tick = base * [1, 2, 5, 10].find(f => f * base >= raw);
  pen.fillStyle = css("--soft"); pen.strokeStyle = css("--line"); pen.lineWidth = 1; pen.textAlign = "center";
  for (let t = Math.ceil(from / tick) * tick; t <= to; t += tick) {
    pen.beginPath(); pen.moveTo(x(t), TOP - 6); pen.lineTo(x(t), TOP + ROW * data.lanes.length); pen.stroke();
    pen.fillText(number(t), x(t), TOP - 14);
  }
}
function lane(row, i) {
  const top = TOP + i * ROW, low = top + LANE + MEMORY;
  pen.fillStyle = css("--lane"); pen.fillRect(LEFT, top, width - LEFT - 8, LANE);
  pen.fillStyle = css("--soft"); pen.textAlign = "right"; pen.fillText(i, LEFT - 10, top + LANE / 2);
  pen.save(); pen.beginPath(); pen.rect(LEFT, top, width - LEFT - 8, LANE + MEMORY); pen.clip();
  pen.textAlign = "center";
  for (let k = Math.max(0, first(row, from) - 1); k < row.length && row[k][3] < to; k++) {
    const step = row[k], a = x(step[3]), b = x(step[4]), next = k + 1 < row.length ? x(row[k + 1][3]) : b;
    const high = (MEMORY - 3) * step[5] / (data.peak || 1);
    pen.fillStyle = "hsl(214 40% 60% / .45)"; pen.fillRect(a, low - high, next - a, high);
    pen.fillStyle = colour(kind(step), step[2]); pen.fillRect(a, top, Math.max(.6, b - a - (b - a > 3 ? 1 : 0)), LANE);
    pen.strokeStyle = css("--ink"); pen.lineWidth = 2;
    if (step === hover) pen.strokeRect(a, top + 1, b - a, LANE - 2);
    if (b - a > 7 * step[0].length + 4) { pen.fillStyle = "#fff"; pen.fillText(step[0], (a + b) / 2, top + LANE / 2); }
  }
  pen.restore();
}
function draw() {
  const ratio = devicePixelRatio || 1, height = TOP + ROW * data.lanes.length + 4;
  width = view.clientWidth; view.width = width * ratio; view.height = height * ratio; view.style.height = height + "px";
  pen.setTransform(ratio, 0, 0, ratio, 0, 0); pen.font = "11px system-ui, sans-serif"; pen.textBaseline = "middle";
  axis(); data.lanes.forEach(lane);
}
function set(a, b) {                 // keep the window inside, with a margin of half a window
  const size = Math.min(Math.max(b - a, data.span * 1e-6), data.span * 1.2);
  from = Math.min(Math.max(a, -size / 2), data.span - size / 2); to = from + size; requestAnimationFrame(draw);
}
function zoom(factor, at) { set(at - (at - from) * factor, at + (to - at) * factor); }
function find(event) {
  const box = view.getBoundingClientRect(), i = Math.floor((event.clientY - box.top - TOP) / ROW);
  const t = time(event.clientX - box.left), row = data.lanes[i];
  if (!row || (event.clientY - box.top - TOP) % ROW > LANE + MEMORY) return null;
  const step = row[first(row, t)];
  return step && step[3] <= t ? [i, step] : null;
}
view.addEventListener("wheel", event => { event.preventDefault();
  zoom(Math.exp(event.deltaY * .0015), time(event.clientX - view.getBoundingClientRect().left)); }, { passive: false });
view.addEventListener("pointerdown", event => {
  drag = [event.clientX, from, to]; view.setPointerCapture(event.pointerId);
});
view.addEventListener("pointerup", () => { drag = null; });
view.addEventListener("pointermove", event => {
  if (drag) {
    const by = (drag[0] - event.clientX) / (width - LEFT - 8) * (drag[2] - drag[1]);
    set(drag[1] + by, drag[2] + by);
  }
  const found = find(event), step = found && found[1];
  if (step !== hover) { hover = step; requestAnimationFrame(draw); }
  tip.style.display = found ? "block" : "none";
  if (!found) return;
  tip.textContent = `device ${found[0]}: ${step[0]} (${NAMES[kind(step)]})\\n` +
    `start ${number(step[3])}, end ${number(step[4])}, takes ${number(step[4] - step[3])}\\n` +
    `${data.held} held ${+step[5].toPrecision(4)} ${data.memory}`;
  tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = Math.max(0, Math.min(event.clientY + 16, innerHeight - tip.offsetHeight - 4)) + "px";
});
view.addEventListener("pointerleave", () => { hover = null; tip.style.display = "none"; requestAnimationFrame(draw); });
view.addEventListener("dblclick", () => set(0, data.span));
view.addEventListener("keydown", event => {
  const size = to - from, middle = (from + to) / 2;
  const act = { "+": () => zoom(.7, middle), "=": () => zoom(.7, middle), "-": () => zoom(1 / .7, middle),
    "0": () => set(0, data.span), ArrowLeft: () => set(from - size / 8, to - size / 8),
    ArrowRight: () => set(from + size / 8, to + size / 8) }[event.key];
  if (act) { event.preventDefault(); act(); }
});
addEventListener("resize", draw);
draw();
</script></body></html>
"""
