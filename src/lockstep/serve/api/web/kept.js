// The conversation, kept for as long as its tab is open: a reload shows it again. Another tab has its own.

const NAME = "lockstep.chat";

// turns: {role: "user", content} and {role: "assistant", content, thought, facts, tokens} in turn.
export function keepTurns(turns) {
  const bare = turns.map((turn) => ({ ...turn, tokens: [] }));
  for (const kept of [turns, bare]) {
    try {
      sessionStorage.setItem(NAME, JSON.stringify(kept));
      return;
    } catch {
      // It is full: without probabilities there is more room. Or there is none at all, and a reload begins anew.
    }
  }
}

// What was kept; [] where that is nothing, or nothing that can be read.
export function keptTurns() {
  try {
    const turns = JSON.parse(sessionStorage.getItem(NAME)) ?? [];
    return turns.every(sound) ? turns : [];
  } catch {
    return [];
  }
}

function sound(turn, index) {
  if (typeof turn.content !== "string" || turn.role !== ["user", "assistant"][index % 2]) return false;
  return turn.role === "user" || (typeof turn.thought === "string" && turn.facts.every(isText) && turn.tokens.every(isToken));
}

function isToken({ from, to, score }) {
  const alike = [score, ...score.top_logprobs];
  return from <= to && alike.every(({ token, logprob }) => isText(token) && typeof logprob === "number");
}

function isText(value) {
  return typeof value === "string";
}
