// The frame: which view is shown, the keys, the marks for comparison, and the news that refresh it.

import { follow } from "./api.js";
import { repaint } from "./charts.js";
import { compareView } from "./compare.js";
import { el, fill, setText } from "./dom.js";
import { listView } from "./list.js";
import { runView } from "./run.js";

const KEYS = [
  ["j  k  ↓  ↑", "move in the list"],
  ["Enter", "open"],
  ["c", "mark for comparison"],
  ["Shift + C", "compare the two that are marked"],
  ["f", "filter the list"],
  ["/", "write a query (SQL)"],
  ["Ctrl + Enter", "run the query"],
  ["[  ]", "the episode before, the episode after"],
  ["t", "all tables behind the figures"],
  ["← →", "in a chart: read its values"],
  ["d", "light or dark"],
  ["Esc", "back"],
  ["?", "this help"],
];
const REFRESH_MS = 1000;

const view = document.getElementById("view");
const help = document.getElementById("keys");
const footer = document.getElementById("marks");
let current = null;
let marks = [];

const context = {
  go(hash) {
    location.hash = hash;
  },
  setPlace(text, title = "") {
    setText(document.getElementById("where"), text);
    document.title = title ? `${title} · esper` : "esper";
  },
  isMarked: (id) => marks.some((mark) => mark.id === id),
  toggleMark(id, name) {
    marks = context.isMarked(id)
      ? marks.filter((mark) => mark.id !== id)
      : [...marks, { id, name }].slice(-2);
    showMarks();
    current?.marksChanged?.();
  },
};

function showMarks() {
  footer.hidden = marks.length === 0 || location.hash.startsWith("#/compare/");
  const button = el("button", { type: "button", disabled: marks.length < 2, onclick: compare }, "compare");
  fill(
    footer,
    el(
      "span",
      { className: "names" },
      marks.length === 2
        ? `${marks[0].name}  and  ${marks[1].name}`
        : `${marks[0]?.name ?? ""}: mark a second run to compare`,
    ),
    button,
    el(
      "button",
      {
        type: "button",
        onclick: () => {
          marks = [];
          showMarks();
          current?.marksChanged?.();
        },
      },
      "clear",
    ),
  );
}

function compare() {
  if (marks.length === 2) context.go(`#/compare/${marks[0].id}/${marks[1].id}`);
}

const ROUTES = [
  [/^#\/run\/([0-9a-f]+)$/, runView],
  [/^#\/compare\/([0-9a-f]+)\/([0-9a-f]+)$/, compareView],
  [/^/, listView],
];

function route() {
  const [pattern, make] = ROUTES.find(([known]) => known.test(location.hash));
  current?.close();
  showMarks();
  view.replaceChildren();
  scrollTo(0, 0);
  view.focus({ preventScroll: true });
  current = make(view, context, ...(location.hash.match(pattern) ?? []).slice(1));
}

/** One refresh at a time, and no more than one a second; what changed meanwhile is remembered. */
const waiting = { changed: new Set(), isBusy: false };
async function takeNews(changed, gone) {
  for (const id of [...changed, ...gone]) waiting.changed.add(id);
  if (waiting.isBusy) return;
  waiting.isBusy = true;
  while (waiting.changed.size) {
    const now = waiting.changed;
    waiting.changed = new Set();
    await current?.refresh(now);
    await new Promise((resolve) => setTimeout(resolve, REFRESH_MS));
  }
  waiting.isBusy = false;
}

function showHelp() {
  fill(
    help,
    el("h2", { id: "keys-title" }, "Keys"),
    el(
      "dl",
      {},
      KEYS.flatMap(([keys, text]) => [
        el(
          "dt",
          {},
          keys.split("  ").flatMap((key) => [el("kbd", {}, key), " "]),
        ),
        el("dd", {}, text),
      ]),
    ),
    el("form", { method: "dialog" }, el("button", {}, "close")),
  );
  help.showModal();
}

const THEMES = ["system", "light", "dark"];
function setTheme(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  localStorage.setItem("esper-theme", theme);
  setText(document.getElementById("theme"), { system: "◐ system", light: "○ light", dark: "● dark" }[theme]);
  repaint();
}
function nextTheme() {
  const at = THEMES.indexOf(document.documentElement.dataset.theme ?? "system");
  setTheme(THEMES[(at + 1) % THEMES.length]);
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || help.open) return;
  const isWriting = event.target.closest("input, textarea, select");
  if (event.key === "Escape") {
    if (isWriting) event.target.blur();
    else if (location.hash.length > 2) context.go("#/");
    return;
  }
  if (isWriting) return;
  const action = current?.keys[event.key] ?? { "?": showHelp, C: compare, d: nextTheme }[event.key];
  if (!action) return;
  event.preventDefault();
  action();
});

document.getElementById("help").addEventListener("click", showHelp);
document.getElementById("theme").addEventListener("click", nextTheme);
addEventListener("hashchange", route);
setTheme(
  THEMES.includes(localStorage.getItem("esper-theme")) ? localStorage.getItem("esper-theme") : "system",
);
route();
follow(takeNews, (state) => {
  const shown = document.getElementById("connection");
  shown.dataset.state = state;
  setText(shown, state);
});
