// Asks the server. Every refusal becomes an Error whose message is the server's own sentence.

async function answer(response) {
  const body = await response.json().catch(() => ({ error: `the server answered ${response.status}` }));
  if (!response.ok) throw new Error(body.error ?? `the server answered ${response.status}`);
  return body;
}

async function ask(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch {
    throw new Error("the server does not answer; it may have been stopped");
  }
  return answer(response);
}

const of = (id) => `/api/runs/${encodeURIComponent(id)}`;
const chosen = (episode) => (episode ? `?env=${episode.env}&episode=${episode.episode}` : "");

export const listRuns = () => ask("/api/runs");
export const readRun = (id) => ask(of(id));
export const readEntry = (id) => ask(`${of(id)}/entry`);
export const readFigure = (id, key, episode) =>
  ask(`${of(id)}/figures/${encodeURIComponent(key)}${chosen(episode)}`);
export const readFigureBeside = (id, key, other) =>
  ask(`${of(id)}/figures/${encodeURIComponent(key)}?beside=${encodeURIComponent(other)}`);
export const readDiary = (id, episode) => ask(`${of(id)}/diary${chosen(episode)}`);
export const readComparison = (left, right) =>
  ask(`/api/comparisons/${encodeURIComponent(left)}/${encodeURIComponent(right)}`);
export const runQuery = (id, query) =>
  ask(`${of(id)}/sql`, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ query }),
  });

/**
 * Follow the folder: `onNews(versions, gone)` is told the runs that changed. The connection is closed while
 * nobody looks at the page, and a new one begins with all runs, so nothing is missed.
 */
export function follow(onNews, onState) {
  let source = null;
  let known = new Map();

  function take(found, isWhole) {
    const entries = Object.entries(found).filter(([, version]) => version !== null);
    const gone = isWhole
      ? [...known.keys()].filter((id) => !(id in found))
      : Object.keys(found).filter((id) => found[id] === null);
    const changed = entries.filter(([id, version]) => known.get(id) !== version).map(([id]) => id);
    if (isWhole) known = new Map(entries);
    else {
      entries.forEach(([id, version]) => known.set(id, version));
      gone.forEach((id) => known.delete(id));
    }
    if (changed.length || gone.length) onNews(new Set(changed), new Set(gone));
  }

  function open() {
    source = new EventSource("/api/events");
    source.addEventListener("open", () => onState("live"));
    source.addEventListener("error", () => onState("not connected"));
    source.addEventListener("runs", (event) => take(JSON.parse(event.data), true));
    source.addEventListener("changed", (event) => take(JSON.parse(event.data), false));
  }

  function close() {
    source?.close();
    source = null;
    onState("paused");
  }

  document.addEventListener("visibilitychange", () => {
    if (document.hidden) close();
    else if (!source) open();
  });
  open();
}
