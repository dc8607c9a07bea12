// Where the time of an answer went.

const NAMES = {
  cache: "looking for the answer among those that are known, or taking it from there or from another request",
  queue: "waiting for a worker to be chosen and to have room",
  prefill: "computing the prompt",
  transfer: "moving the prompt's KV, as far as computing did not hide it",
  decode: "computing the answer, token by token",
  other: "everything else: checks, tokenizing, the way between the services",
};
// Services send their spans in batches, each about twice a second: half a second is what most strips take.
const PAUSES_MS = [150, 250, 400, 600, 1000, 1500, 2000, 3000];

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

// The phases of a request; null when nothing is known of it. Rather late and whole than early and in part.
export async function phases(requestId, headers) {
  let last = null;
  for (const ms of PAUSES_MS) {
    await pause(ms);
    const response = await fetch(`playground/trace/${encodeURIComponent(requestId)}`, { headers });
    if (!response.ok) continue;
    last = await response.json();
    if (last.complete) break;
  }
  return last;
}

const shown = (ms) => (ms >= 1000 ? `${(ms / 1000).toFixed(2)} s` : `${ms.toFixed(ms < 10 ? 1 : 0)} ms`);

export function strip(trace) {
  const figure = document.createElement("figure");
  figure.className = "strip";
  figure.dataset.total = trace.total_ms;
  const bar = document.createElement("div");
  bar.className = "bar";
  bar.setAttribute("aria-hidden", "true");
  const list = document.createElement("ul");
  list.setAttribute("aria-label", `Where ${shown(trace.total_ms)} went`);
  for (const { phase, ms } of trace.phases) {
    const share = trace.total_ms > 0 ? ms / trace.total_ms : 0;
    const part = document.createElement("span");
    part.className = phase;
    part.style.flexGrow = share;
    bar.append(part);
    const item = document.createElement("li");
    item.className = phase;
    item.dataset.phase = phase;
    item.dataset.ms = ms;
    item.title = NAMES[phase] ?? "";
    item.textContent = `${phase} ${shown(ms)} (${Math.round(share * 100)} %)`;
    list.append(item);
  }
  const total = document.createElement("p");
  total.className = "note";
  total.textContent = `${shown(trace.total_ms)} in all${trace.complete ? "" : " (some spans are missing)"}`;
  figure.append(bar, list, total);
  return figure;
}
