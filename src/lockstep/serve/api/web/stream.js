// Asking the server: JSON answers and server-sent events, with errors as sentences.

export class Refused extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export async function get(path, key) {
  return (await reach(path, { headers: headers(key) })).json();
}

// Calls take(object) for each event until the stream ends. A stream that breaks off is an error.
export async function stream(path, body, key, signal, take) {
  const answer = await reach(path, {
    method: "POST", headers: { ...headers(key), "content-type": "application/json" }, body: JSON.stringify(body), signal,
  });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read().catch((error) => {
      if (error.name === "AbortError") throw error;
      throw new Refused("The connection broke off in the middle of the answer. Is the server still running?", 0);
    });
    if (done) throw new Refused("The server ended the answer before it was complete.", 0);
    held += value;
    const events = held.split("\n\n");
    held = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const object = JSON.parse(data);
      if (object.error) throw new Refused(sentence(object.error.message), 200);
      take(object);
    }
  }
}

async function reach(path, options) {
  let answer;
  try {
    answer = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused("The server cannot be reached. Is it still running?", 0);
  }
  if (answer.ok) return answer;
  let message = `The server answered with ${answer.status}.`;
  try {
    const { error } = await answer.json();
    message = sentence(error.message);
    if (error.code === "context_length_exceeded") {
      message = `This conversation is longer than the model can read. ${message}`;
    }
  } catch {
    // Not ours: a proxy's page, say.
  }
  if (answer.status === 401) message = "This server asks for an API key: open Settings and enter it there.";
  throw new Refused(message, answer.status);
}

function headers(key) {
  return key ? { authorization: `Bearer ${key}` } : {};
}

function sentence(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}
