// What comes from the server: events, and answers to prompts. The key stays in this variable.

let apiKey = "";

class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function reach(path, options = {}) {
  const headers = { ...options.headers };
  if (apiKey) headers.Authorization = `Bearer ${apiKey}`;
  const answer = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  if (answer.ok) return answer;
  let message = `the server said ${answer.status}`;
  try {
    message = (await answer.json()).error.message;
  } catch { /* it has no words of its own */ }
  throw new Refused(answer.status, message);
}

// The data of each server-sent event of an answer, as texts.
async function* sentEvents(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split(/\r?\n\r?\n/);
      rest = blocks.pop();
      for (const block of blocks) {
        const lines = block.split(/\r?\n/).filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

const pause = (ms) => new Promise((resume) => setTimeout(resume, ms));

async function nameOfModel(signal) {
  return (await (await reach("/v1/models", { signal })).json()).data[0].id;
}

// Calls `onEvent` with each event for as long as the page is open, `onState` with how the connection
// is when that changes, and `onModel` with the model's name. A key is got by `getKey`.
async function listen(onEvent, onState, onModel, getKey) {
  for (let wait = 500; ; wait = Math.min(8000, wait * 2)) {
    // A browser keeps a page that was left for a while, and its connections, of which it has few.
    const left = new AbortController();
    addEventListener("pagehide", () => left.abort(), { signal: left.signal });
    try {
      const answer = await reach("/events", { headers: { Accept: "text/event-stream" }, signal: left.signal });
      onState("good", "live");
      nameOfModel().then(onModel, () => {});
      for await (const text of sentEvents(answer)) {
        wait = 500;
        onEvent(JSON.parse(text));
      }
      onState("bad", "the server has ended, trying again");
    } catch (error) {
      if (error instanceof Refused && (error.status === 401 || error.status === 403)) {
        onState("bad", apiKey ? "the key is wrong" : "a key is needed");
        await getKey();
        continue;
      }
      onState("bad", "no connection, trying again");
    }
    await pause(wait);
  }
}

// The parts of an answer as they come: `{text}`, and at the end `{usage}`, `{reason}`.
async function* answerTo(messages, most, signal) {
  const model = await nameOfModel(signal);
  const answer = await reach("/v1/chat/completions", {
    method: "POST",
    signal,
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({
      model, messages, max_tokens: most, temperature: 0, stream: true, stream_options: { include_usage: true },
    }),
  });
  for await (const text of sentEvents(answer)) {
    if (text === "[DONE]") return;
    const chunk = JSON.parse(text);
    if (chunk.error) throw new Refused(500, chunk.error.message);
    const choice = chunk.choices?.[0];
    if (choice?.delta?.content) yield { text: choice.delta.content };
    if (choice?.finish_reason) yield { reason: choice.finish_reason };
    if (chunk.usage) yield { usage: chunk.usage };
  }
}
