// Keeps a page up to date. Every element with `data-part` holds HTML that the server renders at that address;
// it is loaded when the element becomes visible, and again when one of its runs has new rows.

const REFRESH_MS = 1000;
const $ = (selector) => document.querySelector(selector);
const all = (selector, within = document) => [...within.querySelectorAll(selector)];
const parts = new Map(all("[data-part]").map((element) => [element, { isStale: true, isSeen: false, html: "" }]));

// --- parts ---------------------------------------------------------------------------------------

/** Replace the content of a part; open details, marks, focus and scroll positions are kept. */
function swap(element, html) {
  const focusable = () => all("a, button, select, input, summary, [tabindex]", element);
  const focus = focusable().indexOf(document.activeElement);
  const open = all("details", element).map((one) => one.open);
  const marked = all(":checked[type=checkbox]", element).map((one) => one.value);
  const scrolled = all(".scroll, .diary", element).map((one) => [one.scrollLeft, one.scrollTop]);
  element.innerHTML = html;
  element.classList.remove("pending");
  all("details", element).forEach((one, at) => (one.open = open[at] ?? one.open));
  all("[type=checkbox]", element).forEach((one) => (one.checked = marked.includes(one.value)));
  all(".scroll, .diary", element).forEach((one, at) => one.scrollTo(...(scrolled[at] ?? [0, 0])));
  if (focus >= 0) focusable()[focus]?.focus({ preventScroll: true });
}

async function load(element, part) {
  const address = element.dataset.part;
  try {
    const answer = await fetch(address.includes("?") ? address : address + location.search);
    const html = await answer.text();
    if (html !== part.html) swap(element, html);
    part.html = html;
    if (element.querySelector(".pending")) part.isStale = true; // rows that the server left unread
  } catch {
    part.isStale = true; // no answer; the next event arrives when the server is back
    await new Promise((resolve) => setTimeout(resolve, REFRESH_MS));
  }
  showList();
}

/** Load stale visible parts one after another, to limit the load of the server. */
let isBusy = false;
async function work() {
  if (isBusy) return;
  isBusy = true;
  for (let next; !document.hidden && (next = [...parts].find(([, one]) => one.isStale && one.isSeen)); ) {
    next[1].isStale = false;
    await load(...next);
  }
  isBusy = false;
}

function renew(isConcerned) {
  for (const [element, part] of parts) if (isConcerned(element)) part.isStale = true;
  work();
}

const observer = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) parts.get(entry.target).isSeen = entry.isIntersecting;
    work();
  },
  { rootMargin: "300px" },
);
for (const element of parts.keys()) observer.observe(element);

// --- events --------------------------------------------------------------------------------------

/** Follow the folder while the page is visible. Every event has all runs, so nothing is missed. */
let source = null;
let known = null;
let waiting = new Set();

function take(versions) {
  for (const id of Object.keys({ ...known, ...versions })) {
    if (known && known[id] !== versions[id]) waiting.add(id);
  }
  known = versions;
  if (waiting.size) setTimeout(tell, REFRESH_MS / 4);
}

function tell() {
  const ids = waiting;
  waiting = new Set();
  const isAbout = (element) => element.dataset.runs.split(" ").some((id) => id === "*" || ids.has(id));
  renew((element) => ids.size && isAbout(element));
}

function follow() {
  const state = (text) => {
    $("#connection").dataset.state = $("#connection").textContent = text;
  };
  if (document.hidden) {
    source?.close();
    source = null;
    return state("paused");
  }
  if (source) return;
  source = new EventSource("/events");
  source.addEventListener("open", () => state("live"));
  source.addEventListener("error", () => state("not connected"));
  source.addEventListener("runs", (event) => {
    take(JSON.parse(event.data));
    work();
  });
}
document.addEventListener("visibilitychange", follow);
follow();

// --- one episode ---------------------------------------------------------------------------------

function choose(search) {
  history.replaceState(null, "", search);
  renew((element) => "episode" in element.dataset);
}
document.addEventListener("change", (event) => {
  if ("at" in event.target.dataset) choose(`?at=${event.target.value}`);
  const marks = all("[name=run]:checked");
  if (marks.length > 2) marks.find((one) => one !== event.target).checked = false;
});
document.addEventListener("click", (event) => {
  const step = event.target.closest(".chooser a[href]");
  if (!step) return;
  event.preventDefault();
  choose(step.getAttribute("href"));
});

// --- the list ------------------------------------------------------------------------------------

function showList() {
  const filter = $("#filter");
  if (!filter) return;
  const words = filter.value.toLowerCase().split(/\s+/);
  const rows = all("tr[data-run]");
  for (const row of rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
  const shown = rows.filter((row) => !row.hidden).length;
  $("#count").textContent = shown === rows.length ? shown : `${shown} of ${rows.length}`;
  if (document.activeElement === document.body) move(1);
}
$("#filter")?.addEventListener("input", showList);

function move(step) {
  const links = all("tr[data-run]:not([hidden]) a");
  const at = links.indexOf(document.activeElement?.closest("tr")?.querySelector("a"));
  const next = at < 0 ? (step > 0 ? 0 : links.length - 1) : at + step;
  links[Math.min(Math.max(next, 0), links.length - 1)]?.focus();
}

// --- keys and theme ------------------------------------------------------------------------------

const THEMES = { system: "◐ system", light: "○ light", dark: "● dark" };
function setTheme(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  localStorage.setItem("esper-theme", theme);
  $("#theme").textContent = THEMES[theme];
}
function nextTheme() {
  const names = Object.keys(THEMES);
  setTheme(names[(names.indexOf(document.documentElement.dataset.theme ?? "system") + 1) % names.length]);
}
setTheme(localStorage.getItem("esper-theme") in THEMES ? localStorage.getItem("esper-theme") : "system");

const KEYS = {
  j: () => move(1),
  k: () => move(-1),
  ArrowDown: $("#filter") && (() => move(1)),
  ArrowUp: $("#filter") && (() => move(-1)),
  c: () => document.activeElement?.closest("tr")?.querySelector("[name=run]").click(),
  C: () => all("[name=run]:checked").length === 2 && $("form.list").requestSubmit(),
  f: () => $("#filter")?.focus(),
  "[": () => $("[rel=prev][href]")?.click(),
  "]": () => $("[rel=next][href]")?.click(),
  t: () => {
    const tables = all("details.numbers");
    const isOpen = tables.some((one) => one.open);
    tables.forEach((one) => (one.open = !isOpen));
  },
  d: nextTheme,
  "?": () => $("#keys").showModal(),
};
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || $("#keys").open) return;
  const isWriting = event.target.closest("input:not([type=checkbox]), select");
  if (event.key === "Escape") {
    if (isWriting) event.target.blur();
    else if (location.pathname !== "/") location.href = "/";
  } else if (!isWriting && KEYS[event.key]) {
    event.preventDefault();
    KEYS[event.key]();
  }
});
$("#help").addEventListener("click", KEYS["?"]);
$("#theme").addEventListener("click", nextTheme);
showList();
