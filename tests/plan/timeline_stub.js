// Runs the timeline's script without a browser: a stub of what it uses, then the events a user makes.
const fs = require("fs"), page = fs.readFileSync(process.argv[2], "utf8");
const data = page.match(/id="data">([\s\S]*?)<\/script>/)[1];
const script = page.match(/<script>\s*"use strict";([\s\S]*?)<\/script>/)[1];
const handlers = {}, calls = { fillRect: 0, fillText: [] };
const pen = new Proxy({}, { get: (t, k) => k in t ? t[k] : (...a) => {
  if (k === "fillRect") { calls.fillRect++; if (a.some(v => !Number.isFinite(v))) throw new Error("not a number: " + a); }
  if (k === "fillText") calls.fillText.push(String(a[0])); }, set: (t, k, v) => (t[k] = v, true) });
const element = id => ({ textContent: id === "data" ? data : "", style: {}, clientWidth: 900, offsetWidth: 120,
  getContext: () => pen, addEventListener: (n, f) => { handlers[n] = f; }, setPointerCapture: () => {},
  getBoundingClientRect: () => ({ left: 0, top: 0 }) });
const made = {};
global.document = { getElementById: id => made[id] ||= element(id), documentElement: {} };
global.getComputedStyle = () => ({ getPropertyValue: () => "#000" });
global.requestAnimationFrame = f => f(); global.addEventListener = () => {}; global.innerWidth = 900; global.innerHeight = 600;
global.devicePixelRatio = 2;
eval(script + "; global.state = () => [from, to];");
const seen = [state(), ""], at = { preventDefault: () => {}, clientX: 60, clientY: 30, pointerId: 1 };
handlers.pointermove(at); seen[1] = made.tip.textContent;
handlers.wheel({ ...at, clientX: 450, deltaY: -400 }); seen.push(state());
handlers.pointerdown(at); handlers.pointermove({ ...at, clientX: 10 }); handlers.pointerup(at); seen.push(state());
handlers.keydown({ ...at, key: "+" }); seen.push(state());
handlers.dblclick(); seen.push(state());
console.log(JSON.stringify({ seen, drawn: calls.fillRect, texts: [...new Set(calls.fillText)].length }));
