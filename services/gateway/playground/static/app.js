// The page: a conversation, its parameters, and the strip under each answer. What a model says is only ever text.
import { events } from "./sse.js";
import { phases, strip } from "./strip.js";

const $ = (id) => document.getElementById(id);
let messages = [];
let running = null;

function headers(more = {}) {
  // The key lives in its field alone: it is stored nowhere.
  const key = $("key").value.trim();
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

function fail(text) {
  $("error").textContent = text;
  $("error").hidden = !text;
}

async function problem(response) {
  try {
    const { error } = await response.json();
    return `${error.message} (${error.code ?? error.type ?? response.status})`;
  } catch {
    return `The gateway answered ${response.status}.`;
  }
}

async function listModels() {
  try {
    const response = await fetch("v1/models", { headers: headers() });
    if (!response.ok) return fail(await problem(response));
    fail("");
    const chosen = $("model").value;
    const names = (await response.json()).data.filter((model) => !model.embeds).map((model) => model.id);
    $("model").replaceChildren(
      ...["auto", ...names].map((name) => new Option(name, name, false, name === chosen)),
    );
  } catch (error) {
    fail(`The gateway does not answer: ${error.message}`);
  }
}

function element(tag, name, text = "") {
  const made = document.createElement(tag);
  made.className = name;
  made.textContent = text;
  return made;
}

function article(role, text) {
  $("empty").hidden = true;
  const made = element("article", role);
  made.append(element("h2", "", role));
  if (text) made.append(element("p", "text", text));
  $("log").append(made);
  made.scrollIntoView({ block: "end" });
  return made;
}

const json = (id, what) => {
  const text = $(id).value.trim();
  if (!text) return undefined;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${what}: ${error.message}`);
  }
};

const number = (id) => ($(id).value === "" ? undefined : Number($(id).value));

function request() {
  const system = $("system").value.trim();
  const stop = $("stop").value.split("\n").filter((line) => line !== "");
  const schema = json("schema", "JSON Schema");
  return {
    model: $("model").value || "auto",
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    stream: true,
    stream_options: { include_usage: true },
    temperature: number("temperature"),
    top_p: number("top_p"),
    max_tokens: number("max_tokens"),
    seed: number("seed"),
    stop: stop.length ? stop : undefined,
    response_format: schema && { type: "json_schema", json_schema: { name: "answer", schema, strict: true } },
    tools: json("tools", "Tools"),
  };
}

// One answer being put together: its parts appear in the page as they come.
class Answer {
  constructor() {
    this.article = article("assistant", "");
    this.text = "";
    this.calls = [];
    this.finish = "";
    this.usage = null;
  }

  part(name) {
    const key = `_${name}`;
    if (!this[key]) this.article.append((this[key] = element("p", name)));
    return this[key];
  }

  add(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta ?? {};
    if (reasoning) this.part("reasoning").append(reasoning);
    if (content) {
      this.text += content;
      this.part("text").append(content);
    }
    for (const piece of calls ?? []) {
      const call = (this.calls[piece.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
      call.id ||= piece.id ?? "";
      call.function.name ||= piece.function?.name ?? "";
      call.function.arguments += piece.function?.arguments ?? "";
      this.callPart(piece.index).textContent = `${call.function.name}(${call.function.arguments})`;
    }
    if (choice.finish_reason) this.finish = choice.finish_reason;
    this.article.scrollIntoView({ block: "end" });
  }

  callPart(index) {
    this.callParts ??= [];
    if (!this.callParts[index]) this.article.append((this.callParts[index] = element("p", "call")));
    return this.callParts[index];
  }

  note(text, bad = false) {
    this.article.append(element("p", bad ? "note bad" : "note", text));
  }
}

async function ask(question) {
  let body;
  messages.push({ role: "user", content: question });
  try {
    body = JSON.stringify(request());
  } catch (error) {
    messages.pop();
    return fail(error.message);
  }
  fail("");
  $("question").value = "";
  article("user", question);
  const answer = new Answer();
  running = new AbortController();
  busy(true);
  let requestId = "";
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST", body, headers: headers({ "Content-Type": "application/json" }), signal: running.signal,
    });
    requestId = response.headers.get("x-request-id") ?? "";
    if (!response.ok) throw new Error(await problem(response));
    let done = false;
    for await (const data of events(response.body)) {
      if (data === "[DONE]") {
        done = true;
        break;
      }
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(`${chunk.error.message} (${chunk.error.code ?? chunk.error.type})`);
      answer.add(chunk);
    }
    if (!done) throw new Error("The answer broke off.");
    const used = answer.usage;
    const told = used ? `, ${used.prompt_tokens} tokens in, ${used.completion_tokens} out` : "";
    answer.note(`${answer.finish || "ended"}${told}`);
  } catch (error) {
    if (error.name === "AbortError") answer.note("stopped");
    else answer.note(error.message, true);
  } finally {
    running = null;
    busy(false);
  }
  const calls = answer.calls.filter(Boolean);
  if (answer.text || calls.length) {
    messages.push({ role: "assistant", content: answer.text || null, ...(calls.length && { tool_calls: calls }) });
  } else {
    messages.pop();
  }
  if (requestId) await showStrip(answer, requestId);
}

async function showStrip(answer, requestId) {
  try {
    const trace = await phases(requestId, headers());
    if (trace) answer.article.append(strip(trace));
    else answer.note("No spans of this answer came: the mesh sends them elsewhere.");
  } catch {
    answer.note("The spans of this answer could not be read.");
  }
  answer.article.scrollIntoView({ block: "end" });
}

function busy(is) {
  $("send").hidden = is;
  $("abort").hidden = !is;
  $("log").setAttribute("aria-busy", is);
  if (!is) $("question").focus();
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = $("question").value.trim();
  if (question && !running) ask(question);
});
$("question").addEventListener("keydown", (event) => {
  // While a character is being composed, Enter chooses it.
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("form").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => event.key === "Escape" && running?.abort());
$("abort").addEventListener("click", () => running?.abort());
$("clear").addEventListener("click", () => {
  running?.abort();
  messages = [];
  $("log").replaceChildren($("empty"));
  $("empty").hidden = false;
  fail("");
  $("question").focus();
});
$("key").addEventListener("change", listModels);
// A wide window has room for them.
$("parameters").open = matchMedia("(min-width: 48rem)").matches;
listModels();
