// A query over one run's tables, and the lists of what it was configured with.

import { runQuery } from "./api.js";
import { el, fill, problem, setText, table } from "./dom.js";
import { panel } from "./panels.js";

const FIRST_QUERY =
  "SELECT env, episode, val_score, test_score, twin_val_score, params\nFROM episode ORDER BY val_score DESC LIMIT 20";

/** The box and its answer; `focus()` goes to it. */
export function sqlPanel(id, tables) {
  const query = el("textarea", {
    value: FIRST_QUERY,
    spellcheck: false,
    "aria-label": "query in SQL",
    onkeydown: (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
        event.preventDefault();
        run();
      }
    },
  });
  const button = el("button", { type: "button", onclick: run }, "run  ·  Ctrl Enter");
  const said = el("span", { className: "dim", role: "status" });
  const answer = el("div");

  async function run() {
    button.disabled = true;
    setText(said, "running");
    const began = performance.now();
    try {
      const found = await runQuery(id, query.value);
      fill(answer, table(found.columns, found.rows, "answer of the query"));
      setText(
        said,
        `${found.note ?? (found.rows.length === 1 ? "1 row" : `${found.rows.length} rows`)}, in ${Math.round(performance.now() - began)} ms`,
      );
    } catch (error) {
      fill(answer, problem(error));
      setText(said, "");
    }
    button.disabled = false;
  }

  const made = panel("Ask the rows yourself", { isWide: true, name: "sql" });
  made.element.classList.add("sql", "last");
  made.body.append(
    query,
    el("div", { className: "bar" }, button, said),
    answer,
    el(
      "details",
      {},
      el("summary", {}, "tables and columns"),
      table(
        ["table", "columns"],
        tables.map(([name, columns]) => [name, columns.join(", ")]),
        "tables",
      ),
    ),
  );
  return {
    panel: made,
    focus() {
      query.focus();
      query.scrollIntoView({ block: "center" });
    },
  };
}

/** Names and values, in columns. */
export function settingsList(pairs) {
  return el(
    "dl",
    { className: "settings" },
    pairs.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", { className: "mono" }, value))),
  );
}
