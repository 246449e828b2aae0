// The list of all runs: one line each, kept in place while numbers change.

import { listRuns, readEntry } from "./api.js";
import { el, fill, problem, setText } from "./dom.js";

const COLUMNS = [
  ["task", ""],
  ["controller", ""],
  ["state", "state"],
  ["progress", ""],
  ["left", "number wide-only"],
  ["trend", "trend"],
  ["score", "number"],
  ["twin", "number wide-only"],
  ["lead", "number"],
  ["params", "number"],
  ["alerts", ""],
  ["started", "wide-only"],
];

const UNREAD = { state: "", share: null, progress: "", counts: {} };

export function listView(view, context) {
  const rows = new Map();
  const body = el("tbody");
  const filter = el("input", {
    type: "search",
    placeholder: "filter",
    "aria-label": "filter the runs",
    oninput: show,
  });
  const count = el("span", { className: "count" });
  const message = el("div");
  let entries = [];
  let isClosed = false;

  fill(
    view,
    el("div", { className: "list-head" }, el("h1", {}, "Runs"), filter, count),
    message,
    el(
      "table",
      { className: "runs" },
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          el("th", {}),
          el("th", { scope: "col" }, "run"),
          COLUMNS.map(([name, kind]) =>
            el("th", { scope: "col", className: kind.startsWith("number") ? "number" : undefined }, name),
          ),
        ),
      ),
      body,
    ),
  );

  /** The names at once, then what each run says, one after the other; only of runs that changed. */
  async function refresh() {
    try {
      const { folder, runs } = await listRuns();
      context.setPlace(folder);
      const before = new Map(entries.map((entry) => [entry.id, entry]));
      entries = runs.map((run) => Object.assign(before.get(run.id) ?? { ...UNREAD }, run));
      fill(
        message,
        entries.length
          ? []
          : el(
              "p",
              { className: "hint" },
              `No run in ${folder} yet. Start one with `,
              el("code", {}, `esper run --out ${folder}/mine`),
              " and it appears here.",
            ),
      );
      show();
      for (let next; !isClosed && (next = entries.find((entry) => entry.read !== entry.version)); show()) {
        next.read = next.version;
        Object.assign(next, await readEntry(next.id));
      }
    } catch (error) {
      fill(message, problem(error));
    }
  }

  function show() {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const isWanted = (entry) =>
      words.every((word) =>
        [entry.name, entry.task, entry.controller, entry.state].join(" ").toLowerCase().includes(word),
      );
    const wanted = entries.filter(isWanted).sort(order);
    const ids = new Set(wanted.map((entry) => entry.id));
    for (const [id, row] of rows)
      if (!ids.has(id)) {
        row.element.remove();
        rows.delete(id);
      }
    const focused = document.activeElement;
    wanted.forEach((entry, at) => {
      if (!rows.has(entry.id)) rows.set(entry.id, oneRow(entry, context));
      const row = rows.get(entry.id);
      row.show(entry);
      if (body.children[at] !== row.element) body.insertBefore(row.element, body.children[at] ?? null);
    });
    if (focused !== document.activeElement && body.contains(focused)) focused.focus();
    setText(
      count,
      entries.length === wanted.length ? `${entries.length}` : `${wanted.length} of ${entries.length}`,
    );
  }

  const links = () => [...body.querySelectorAll("a")];
  function move(step) {
    const all = links();
    if (!all.length) return;
    const at = all.indexOf(document.activeElement?.closest("tr")?.querySelector("a"));
    const next = at < 0 ? (step > 0 ? 0 : all.length - 1) : Math.min(Math.max(at + step, 0), all.length - 1);
    all[next].focus();
    all[next].closest("tr").scrollIntoView({ block: "nearest" });
  }

  refresh().then(() => {
    if (document.activeElement === document.body || document.activeElement === view) move(1);
  });
  return {
    refresh,
    marksChanged: () => rows.forEach((row) => row.showMark()),
    keys: {
      j: () => move(1),
      ArrowDown: () => move(1),
      k: () => move(-1),
      ArrowUp: () => move(-1),
      c: () => {
        const row = document.activeElement?.closest("tr[data-run]");
        if (row) context.toggleMark(row.dataset.run, row.dataset.name);
      },
      f: () => filter.focus(),
    },
    close() {
      isClosed = true;
    },
  };
}

/** What runs stands first, then what began last; what is not read yet stands last, by name. */
function order(one, other) {
  const rank = (entry) => [entry.state === "running" ? 1 : 0, entry.started ?? ""];
  const [[a, b], [c, d]] = [rank(one), rank(other)];
  return c - a || (d > b) - (d < b) || (one.name > other.name) - (one.name < other.name);
}

function oneRow(first, context) {
  const { id } = first;
  const link = el("a", { href: `#/run/${id}` });
  const name = el("td", { className: "name" }, link);
  const mark = el("button", {
    type: "button",
    className: "mark",
    onclick: (event) => {
      event.stopPropagation();
      context.toggleMark(id, link.textContent);
    },
  });
  const cells = Object.fromEntries(
    COLUMNS.map(([key, kind]) => [key, el("td", { className: kind || undefined, "data-label": key })]),
  );
  const bar = el("progress", { max: 1 });
  const progress = el("span");
  const reason = el("div", { className: "reason" });
  cells.progress.append(bar, progress, reason);
  const element = el(
    "tr",
    {
      "data-run": id,
      onclick: (event) => {
        if (!event.target.closest("a, button")) context.go(`#/run/${id}`);
      },
    },
    el("td", {}, mark),
    name,
    Object.values(cells),
  );

  function showMark() {
    const isMarked = context.isMarked(id);
    setText(mark, isMarked ? "◆" : "◇");
    mark.setAttribute("aria-pressed", String(isMarked));
    mark.setAttribute("aria-label", `mark ${link.textContent} for comparison`);
  }

  function show(entry) {
    element.dataset.name = entry.name;
    setText(link, entry.name);
    element.classList.toggle("unreadable", Boolean(entry.error));
    setText(reason, entry.error ?? "");
    cells.progress.colSpan = entry.error ? COLUMNS.length - 3 : 1;
    cells.state.dataset.state = entry.state;
    for (const key of [
      "task",
      "controller",
      "state",
      "left",
      "trend",
      "score",
      "twin",
      "lead",
      "params",
      "started",
    ])
      setText(cells[key], entry[key] ?? "");
    bar.hidden = entry.share === null;
    bar.value = entry.share ?? 0;
    setText(progress, entry.progress);
    fill(
      cells.alerts,
      Object.entries(entry.counts).map(([severity, count]) =>
        el(
          "span",
          { className: `alert-${severity}`, title: `${count} of severity ${severity}` },
          `${count} `,
        ),
      ),
    );
    showMark();
  }
  return { element, show, showMark };
}
