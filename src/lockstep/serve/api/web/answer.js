// One answer as it grows: its text as Markdown, every token of it marked with how probable it was, and its numbers.

import { render } from "./markdown.js";

export class Answer {
  constructor() {
    this.text = "";
    this.thought = null; // its element, once the model thinks before it answers
    this.tokens = []; // {from, to, score}: the text of the token lies in [from, to)
    this.element = document.createElement("div");
    this.element.className = "text waiting";
    this.element.tabIndex = 0;
    this.element.setAttribute("aria-label", "Answer; the arrow keys go through its tokens");
    this.decoder = new TextDecoder();
    this.length = 0;
    this.began = performance.now();
    this.usage = null;
    this.finish = null;
    this.count = 0;
    this.here = -1;
    this.settled = 0; // elements that stay as they are
    this.from = 0; // where the text begins that is drawn again
  }

  // An answer that was kept, drawn.
  static again({ content, thought, tokens }) {
    const answer = new Answer();
    if (thought) answer.think(thought);
    answer.text = content;
    answer.tokens = tokens;
    answer.end();
    return answer;
  }

  // What is kept of it.
  kept(stopped) {
    const bare = ({ token, logprob }) => ({ token, logprob });
    const tokens = this.tokens.map(({ from, to, score }) => (
      { from, to, score: { ...bare(score), top_logprobs: score.top_logprobs.map(bare) } }
    ));
    const thought = this.thought?.lastChild.data ?? "";
    return { role: "assistant", content: this.text, thought, facts: this.facts(stopped), tokens };
  }

  // A chunk of the stream.
  take(chunk) {
    const now = performance.now();
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices[0];
    if (!choice) return;
    const text = choice.delta.content ?? "";
    if (choice.delta.reasoning_content) this.think(choice.delta.reasoning_content);
    for (const score of choice.logprobs?.content ?? []) {
      this.first ??= now;
      this.last = now;
      this.count += 1;
      if (this.thought && !this.text && !text) continue; // a token of the thought
      let piece = this.decoder.decode(new Uint8Array(score.bytes), { stream: true });
      // At the very beginning a tokenizer may leave out the space that the token has elsewhere; behind a thought all
      // white space is left out.
      if (this.length === 0 && text && !/^\s/.test(text)) piece = this.thought ? piece.trimStart() : piece.replace(/^ /, "");
      this.tokens.push({ from: this.length, to: this.length + piece.length, score });
      this.length += piece.length;
    }
    this.text += text;
    if (choice.finish_reason) this.finish = choice.finish_reason;
    this.show();
  }

  // More of what it thinks, which is shown where it is asked for.
  think(text) {
    if (!this.thought) {
      this.thought = document.createElement("details");
      this.thought.className = "thought";
      const summary = document.createElement("summary");
      summary.textContent = "Thoughts";
      this.thought.append(summary, "");
    }
    this.thought.lastChild.data += text;
  }

  // Draw at the next frame, however many chunks come before it.
  show() {
    this.frame ??= requestAnimationFrame(() => this.draw());
  }

  // Only what may have changed is made anew: what is above keeps its elements, and a selection in them.
  draw() {
    cancelAnimationFrame(this.frame);
    this.frame = undefined;
    if (this.thought && this.thought.parentNode !== this.element) this.element.prepend(this.thought);
    const kept = this.settled + (this.thought ? 1 : 0);
    while (this.element.childNodes.length > kept) this.element.lastChild.remove();
    const { root, settled, from } = render(this.text, (parent, a, b) => this.write(parent, a, b), this.from);
    for (const box of root.querySelectorAll(".code")) box.append(copyButton(box));
    this.element.append(root);
    this.settled += settled;
    this.from = from;
    this.element.dispatchEvent(new CustomEvent("drawn", { bubbles: true }));
  }

  end() {
    this.element.classList.remove("waiting");
    this.draw();
  }

  // Text [from, to) with a span for each token, or part of one, in it.
  write(parent, from, to) {
    let index = this.at(from);
    while (from < to) {
      const token = this.tokens[index];
      if (!token) {
        parent.append(this.text.slice(from, to));
        return;
      }
      const end = Math.min(to, token.to);
      const span = document.createElement("span");
      span.className = "token";
      span.dataset.token = index;
      span.style.setProperty("--p", Math.exp(token.score.logprob).toFixed(3));
      span.textContent = this.text.slice(from, end);
      parent.append(span);
      from = end;
      do index += 1;
      while (index < this.tokens.length && this.tokens[index].to <= from);
    }
  }

  // The token that has the character at `place`.
  at(place) {
    let low = 0;
    let high = this.tokens.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.tokens[middle].to > place) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  // The next token that is shown, from the marked one on; gives its element.
  move(step) {
    for (let i = this.here + step; i >= 0 && i < this.tokens.length; i += step) {
      const span = this.element.querySelector(`[data-token="${i}"]`);
      if (span) {
        this.mark(i);
        return span;
      }
    }
    return this.here < 0 ? null : this.element.querySelector(`[data-token="${this.here}"]`);
  }

  mark(index) {
    for (const span of this.element.querySelectorAll(".here")) span.classList.remove("here");
    this.here = index;
    for (const span of this.element.querySelectorAll(`[data-token="${index}"]`)) span.classList.add("here");
  }

  // The numbers under the answer.
  facts(stopped) {
    const told = [];
    // The rate after the first token; of the whole answer where all of it came at one time.
    const spread = this.last > this.first;
    const seconds = (this.last - (spread ? this.first : this.began)) / 1000;
    if (this.count > 1) told.push(`${((this.count - (spread ? 1 : 0)) / seconds).toFixed(1)} tokens/s`);
    if (this.first) told.push(`first after ${((this.first - this.began) / 1000).toFixed(2)} s`);
    told.push(`${this.count} token${this.count === 1 ? "" : "s"}`);
    if (this.usage) {
      const cached = this.usage.prompt_tokens_details?.cached_tokens ?? 0;
      told.push(`prompt ${this.usage.prompt_tokens} tokens, ${cached} from the cache`);
    }
    if (stopped) told.push("stopped");
    else if (this.finish === "length") told.push("cut off: it reached the most tokens allowed");
    else if (!this.finish) told.push("not complete");
    return told;
  }
}

// What the tooltip says of a token.
export function explain(score) {
  const table = document.createElement("table");
  const shown = score.top_logprobs.some((other) => same(other, score)) ? score.top_logprobs : [score, ...score.top_logprobs];
  for (const other of shown) {
    const row = table.insertRow();
    const code = document.createElement("code");
    code.textContent = visible(other.token);
    row.insertCell().append(code);
    row.insertCell().textContent = percent(other.logprob);
    if (same(other, score)) row.className = "drawn";
  }
  return table;
}

export function spoken(score) {
  return `${visible(score.token)}, ${percent(score.logprob)}`;
}

function same(one, other) {
  return one.token === other.token && one.logprob === other.logprob;
}

function percent(logprob) {
  const value = Math.exp(logprob) * 100;
  return value >= 99.95 ? "100 %" : value >= 0.1 ? `${value.toFixed(1)} %` : "below 0.1 %";
}

function visible(token) {
  return token.replace(/\n/g, "\u21b5").replace(/\t/g, "\u21e5").replace(/^ | $/g, "\u00b7");
}

function copyButton(box) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Copy";
  button.addEventListener("click", () => copy(box.querySelector("pre").textContent, button));
  return button;
}

export async function copy(text, button) {
  const name = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed";
  }
  setTimeout(() => (button.textContent = name), 1500);
}
