// Panels load what they show when they come into view, and again when their run has new rows.

import { chartElement } from "./charts.js";
import { el, fill, problem, setDrawing, setText, table } from "./dom.js";

/** A section with a heading; `load` is called when it is seen and stale. */
export function panel(title, { load = async () => {}, isWide = false, extra = [], name = "" } = {}) {
  const body = el("div");
  const trouble = el("div");
  const element = el(
    "section",
    { className: isWide ? "panel wide" : "panel", "aria-label": title, "data-panel": name || undefined },
    el("header", {}, el("h2", {}, title), extra),
    trouble,
    body,
  );
  return { element, body, trouble, load, isStale: true, isSeen: false };
}

/** A figure: its drawing or interactive chart, its caption, and its table on demand. */
export function figurePanel({ key, question }, { read, extra = [] } = {}) {
  const button = el(
    "button",
    { type: "button", "aria-expanded": "false", onclick: () => setOpen(!isOpen) },
    "table",
  );
  const drawing = el("div", { className: "drawing picture" });
  const caption = el("p", { className: "caption" });
  const numbers = el("div", { hidden: true });
  const chart = chartElement(question);
  const made = panel(question, {
    load: async () => show(await read()),
    name: key,
    extra: [...extra, button],
  });
  let isOpen = false;
  let shown = null;

  function showTable() {
    if (shown && isOpen) fill(numbers, table(shown.columns, shown.rows, `numbers: ${question}`));
  }
  function setOpen(open) {
    isOpen = open;
    numbers.hidden = !open;
    button.setAttribute("aria-expanded", String(open));
    showTable();
  }
  /** Show an answer of the server; `ranges` are axes that another chart shares. */
  function show(found, ranges = null) {
    shown = found;
    made.element.classList.remove("is-pending");
    made.element.classList.toggle("is-empty", !found);
    button.hidden = !found;
    drawing.hidden = !found || found.chart !== null;
    chart.element.hidden = !found?.chart;
    setText(caption, found?.caption ?? "nothing to show");
    if (found?.chart) chart.show(found.chart, ranges);
    else if (found) setDrawing(drawing, found.svg);
    showTable();
  }
  // Room for what is not loaded yet, so that what stands below stays where it is.
  made.element.classList.add("is-pending");
  chart.element.hidden = true;
  made.body.append(chart.element, drawing, caption, numbers);
  return Object.assign(made, { show, setOpen, isOpen: () => isOpen, close: chart.close });
}

/** Open all tables, or close them if one is open. */
export function toggleTables(figures) {
  const open = !figures.some((one) => one.isOpen());
  figures.forEach((one) => one.setOpen(open));
}

/** Keeps panels up to date: those in view, one after the other, so that the server is asked little. */
export function upkeep(panels) {
  let isBusy = false;
  let isClosed = false;
  const observer = new IntersectionObserver(
    (entries) => {
      for (const entry of entries)
        panels.find((one) => one.element === entry.target).isSeen = entry.isIntersecting;
      work();
    },
    { rootMargin: "200px" },
  );
  panels.forEach((one) => observer.observe(one.element));

  async function work() {
    if (isBusy) return;
    isBusy = true;
    for (let next; !isClosed && (next = panels.find((one) => one.isStale && one.isSeen));) {
      next.isStale = false;
      try {
        await next.load();
        next.trouble.replaceChildren();
      } catch (error) {
        fill(next.trouble, problem(error));
      }
    }
    isBusy = false;
  }
  return {
    renew(isConcerned = () => true) {
      panels.filter(isConcerned).forEach((one) => {
        one.isStale = true;
      });
      return work();
    },
    close() {
      isClosed = true;
      observer.disconnect();
      panels.forEach((one) => one.close?.());
    },
  };
}
