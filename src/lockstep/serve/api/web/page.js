// The page: a conversation, its settings, and what happens on keys and clicks.

import { Answer, copy, explain, spoken } from "./answer.js";
import { keepTurns, keptTurns } from "./kept.js";
import { get, stream } from "./stream.js";

const find = (id) => document.getElementById(id);
const log = find("log");
const prompt = find("prompt");
const turns = []; // as they are kept
let running = null; // the AbortController of the answer that is coming
let coming = null; // that answer
let follows = true; // the newest text is kept in view
let known = false; // whether the models shown are the server's
let later = 0; // the timer of the next look at its state
const answers = new WeakMap(); // by element

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"];
const KEPT = [...document.querySelectorAll("[data-keep]")];
const DEFAULTS = KEPT.map((field) => (field.type === "checkbox" ? field.checked : field.value));

function request() {
  const system = find("system").value.trim();
  const body = {
    model: find("model").value, stream: true, stream_options: { include_usage: true }, logprobs: true, top_logprobs: 5,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...turns.map(({ role, content }) => ({ role, content }))],
  };
  for (const name of NUMBERS) {
    if (find(name).value !== "") body[name] = Number(find(name).value);
  }
  return body;
}

async function ask() {
  const answer = new Answer();
  const turn = place(answer);
  for (const old of log.querySelectorAll(".again")) old.remove();
  const mine = new AbortController();
  running = mine;
  coming = answer;
  busy(true);
  let problem = null;
  let stopped = false;
  try {
    await stream("/v1/chat/completions", request(), find("key").value, mine.signal, (chunk) => answer.take(chunk));
  } catch (error) {
    stopped = error.name === "AbortError";
    problem = stopped ? null : error;
  }
  if (running === mine) {
    running = coming = null;
    busy(false);
  }
  if (!turn.isConnected) return; // a new chat was begun
  answer.end();
  const told = answer.kept(stopped);
  if (answer.text) turns.push(told);
  keepTurns(turns);
  if (answer.count || stopped) turn.append(foot(told, problem ? null : turn));
  else answer.element.remove();
  if (problem) turn.append(trouble(problem, turn));
  if (problem?.status === 401) settings(true, "key");
  if (problem?.status === 404) {
    known = false; // the server was started again with another model
    connect();
  }
  say(problem ? problem.message : "Answer complete.");
  follow();
  if (!problem) prompt.focus({ preventScroll: true });
}

// The answer's place in the log, where it is drawn as it grows.
function place(answer) {
  const turn = element("article", "turn assistant");
  turn.append(answer.element);
  answers.set(answer.element, answer);
  log.append(turn);
  return turn;
}

// turn: what may be asked for again; null where that is offered elsewhere.
function foot({ content, facts }, turn) {
  const bar = element("div", "foot");
  bar.append(button("Copy", (event) => copy(content, event.target)));
  if (turn) {
    const again = button("Regenerate", () => redo(turn));
    again.classList.add("again");
    bar.append(again);
  }
  for (const fact of facts) bar.append(element("span", "fact", fact));
  return bar;
}

function trouble(problem, turn) {
  const box = element("div", "problem");
  box.setAttribute("role", "alert");
  box.append(element("p", "", problem.message));
  const retry = button("Try again", () => redo(turn));
  retry.classList.add("again");
  box.append(retry);
  return box;
}

// Ask the last question again.
function redo(turn) {
  if (running) return;
  if (turns.at(-1)?.role === "assistant") turns.pop();
  turn.remove();
  ask();
}

function send() {
  const text = prompt.value.trim();
  if (!text || running) return;
  if (!find("model").value) {
    connect(true);
    return;
  }
  if (turns.at(-1)?.role === "user") turns.pop(); // it got no answer: templates want roles to alternate
  turns.push({ role: "user", content: text });
  question(text);
  prompt.value = "";
  grow();
  follows = true;
  follow();
  ask();
}

function question(text) {
  const turn = element("article", "turn user");
  turn.append(element("div", "text", text));
  find("empty").hidden = true;
  log.append(turn);
}

// The conversation that was here before the page was loaded again.
function resume() {
  turns.push(...keptTurns());
  for (const [at, told] of turns.entries()) {
    if (told.role === "user") {
      question(told.content);
    } else {
      const turn = place(Answer.again(told));
      turn.append(foot(told, at === turns.length - 1 ? turn : null));
    }
  }
  if (turns.at(-1)?.role === "user") {
    const turn = element("article", "turn assistant");
    turn.append(trouble(new Error("This has no answer yet."), turn));
    log.append(turn);
  }
  follow();
}

function begin() {
  running?.abort();
  coming = null;
  turns.length = 0;
  keepTurns(turns);
  for (const turn of log.querySelectorAll(".turn")) turn.remove();
  find("empty").hidden = false;
  prompt.focus();
}

function busy(yes) {
  find("send").hidden = yes;
  find("stop").hidden = !yes;
  log.setAttribute("aria-busy", String(yes));
}

// The server's state, and its models once it is ready. asked: somebody waits for it, and is told why.
async function connect(asked) {
  const state = find("state");
  try {
    const ready = await fetch("/ready");
    if (!ready.ok) throw new Error((await ready.json()).reason);
    if (!known) {
      const { data } = await get("/v1/models", find("key").value);
      find("model").replaceChildren(...data.map(({ id }) => new Option(id.split("/").at(-1), id)));
      known = true;
    }
    state.textContent = "ready";
    state.title = "";
    state.className = "state good";
    find("wait").hidden = true;
  } catch (error) {
    known = false; // another server may come up
    const key = error.status === 401;
    const gone = error instanceof TypeError;
    const reason = key ? "the server asks for an API key." : gone ? "the server cannot be reached." : error.message;
    state.textContent = key ? "needs an API key" : gone ? "not reachable" : "not ready";
    state.title = reason;
    state.className = "state bad";
    if (key && find("settings").hidden && !find("key").value) settings(true, "key");
    if (asked) {
      find("wait").textContent = `This cannot be sent yet: ${reason}`;
      find("wait").hidden = false;
    }
  }
  clearTimeout(later);
  later = setTimeout(connect, known ? 5000 : 1000);
}

function settings(open, focus) {
  find("settings").hidden = !open;
  find("toggle").setAttribute("aria-expanded", String(open));
  if (open) find(focus ?? "system").focus();
  else find("toggle").focus();
}

function keep() {
  const values = KEPT.map((field) => (field.type === "checkbox" ? field.checked : field.value));
  try {
    localStorage.setItem("lockstep", JSON.stringify(Object.fromEntries(KEPT.map((field, i) => [field.id, values[i]]))));
  } catch {
    // Without storage they last as long as the page.
  }
  log.classList.toggle("tinted", find("tint").checked);
}

function restore() {
  let saved = {};
  try {
    saved = Object(JSON.parse(localStorage.getItem("lockstep")));
  } catch {
    // Nothing that can be read was kept.
  }
  for (const field of KEPT) {
    if (field.id in saved) field[field.type === "checkbox" ? "checked" : "value"] = saved[field.id];
  }
  log.classList.toggle("tinted", find("tint").checked);
}

function tip(span) {
  const box = find("tip");
  const answer = span && answers.get(span.closest(".text"));
  const token = answer?.tokens[span.dataset.token];
  box.hidden = !token;
  if (!token) return;
  box.replaceChildren(explain(token.score));
  const at = span.getClientRects()[0];
  const size = box.getBoundingClientRect();
  const above = at.top - size.height - 6;
  box.style.left = `${Math.max(8, Math.min(at.left, innerWidth - size.width - 8))}px`;
  box.style.top = `${above > 4 ? above : at.bottom + 6}px`;
}

function follow() {
  if (follows) log.scrollTop = log.scrollHeight;
}

function grow() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight + 2}px`;
}

function say(text) {
  find("said").textContent = text;
}

function element(tag, name, text) {
  const made = document.createElement(tag);
  made.className = name;
  if (text !== undefined) made.textContent = text;
  return made;
}

function button(name, action) {
  const made = element("button", "", name);
  made.type = "button";
  made.addEventListener("click", action);
  return made;
}

find("form").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
prompt.addEventListener("input", grow);
find("stop").addEventListener("click", () => running?.abort());
find("new").addEventListener("click", begin);
find("toggle").addEventListener("click", () => settings(find("settings").hidden));
find("close").addEventListener("click", () => settings(false));
find("reset").addEventListener("click", () => {
  KEPT.forEach((field, i) => (field[field.type === "checkbox" ? "checked" : "value"] = DEFAULTS[i]));
  keep();
});
find("key").addEventListener("change", () => connect());
for (const field of KEPT) field.addEventListener("input", keep);
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (running) running.abort();
  else if (!find("settings").hidden) settings(false);
  tip(null);
});
log.addEventListener("pointerover", (event) => tip(event.target.closest?.(".token")));
log.addEventListener("pointerleave", () => tip(null));
log.addEventListener("keydown", (event) => {
  const answer = answers.get(event.target);
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!answer || !step) return;
  event.preventDefault();
  const span = answer.move(step);
  span?.scrollIntoView({ block: "nearest" });
  tip(span);
  if (span) say(spoken(answer.tokens[answer.here].score));
});
log.addEventListener("focusout", () => tip(null));
log.addEventListener("scroll", () => {
  follows = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  tip(null);
});
log.addEventListener("drawn", follow);
addEventListener("pagehide", () => keepTurns(coming?.text ? [...turns, coming.kept(false)] : turns));

restore();
resume();
connect();
