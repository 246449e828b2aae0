// One run: its header line, a panel per question, one episode in detail, alerts, SQL and configuration.

import { readDiary, readFigure, readRun } from "./api.js";
import { el, fill, problem, setText } from "./dom.js";
import { episodeChooser } from "./episode.js";
import { figurePanel, panel, toggleTables, upkeep } from "./panels.js";
import { settingsList, sqlPanel } from "./sql.js";

export function runView(view, context, id) {
  const head = runHead(context, id);
  const place = el("div", { className: "panels" });
  let figures = [];
  let keeper = null;
  let chooser = null;
  let focusQuery = () => {};
  fill(view, head.element, place);

  function build(run) {
    chooser = episodeChooser(() => keeper.renew((one) => one.isOfEpisode));
    const diary = Object.assign(diaryPanel(id, chooser), { isOfEpisode: true });
    figures = run.page.figures.map((figure) => {
      const isOfEpisode = figure.of_episode;
      const read = () => readFigure(id, figure.key, isOfEpisode ? chooser.episode() : null);
      return Object.assign(figurePanel(figure, { read, extra: isOfEpisode ? [chooser.element] : [] }), {
        isOfEpisode,
      });
    });
    const query = sqlPanel(id, run.page.tables);
    focusQuery = query.focus;
    const panels = [
      conclusionPanel(() => head.run.page.conclusion),
      ...figures.flatMap((figure) => (figure.isOfEpisode ? [figure, diary] : [figure])),
      query.panel,
      settingsPanel("How was it configured?", () => head.run.page.config),
      settingsPanel("Where does it come from?", () => head.run.page.provenance),
    ];
    fill(
      place,
      panels.map((one) => one.element),
    );
    keeper = upkeep(panels);
  }

  async function refresh(changed) {
    if (changed && !changed.has(id)) return;
    try {
      const run = await readRun(id);
      head.show(run);
      if (run.page.entry.error) return;
      if (!keeper) build(run);
      chooser.setEpisodes(run.page.episodes, run.page.episode);
      await keeper.renew();
    } catch (error) {
      head.fail(error);
    }
  }

  refresh();
  return {
    refresh,
    marksChanged: () => head.showMark(),
    keys: {
      c: () => context.toggleMark(id, head.name()),
      "/": () => focusQuery(),
      "[": () => chooser?.move(-1),
      "]": () => chooser?.move(1),
      t: () => toggleTables(figures),
    },
    close: () => keeper?.close(),
  };
}

const FACTS = [
  ["", "progress"],
  ["time", "time"],
  ["left", "left"],
  ["pace", "pace"],
  ["score", "score"],
  ["twin", "twin"],
  ["lead", "lead"],
  ["params", "params"],
];

/** The line that says whether the run is alive, how far it is and how well it does. */
export function runHead(context, id) {
  const name = el("h1");
  const what = el("span", { className: "dim" });
  const state = el("span", { className: "state" });
  const mark = el("button", { type: "button", onclick: () => context.toggleMark(id, name.textContent) });
  const bar = el("progress", { max: 1 });
  const facts = el("div", { className: "facts" });
  const trouble = el("div");
  const element = el(
    "div",
    { className: "run-head" },
    el("div", { className: "run-title" }, el("a", { href: "#/", title: "Esc" }, "‹ runs"), name, what, mark),
    facts,
    trouble,
  );
  const fields = new Map();
  const alerts = el("ul", { className: "alerts" });
  element.insertBefore(alerts, trouble);
  const made = { element, run: null, name: () => name.textContent, showMark, show, fail };

  function showMark() {
    const isMarked = context.isMarked(id);
    setText(mark, isMarked ? "◆ marked" : "◇ compare");
    mark.setAttribute("aria-pressed", String(isMarked));
  }
  function fact(label, text) {
    if (!fields.has(label)) {
      const value = el("b", { className: "mono" });
      facts.append(
        el("span", { className: "fact", "data-fact": label || "progress" }, el("span", {}, label), value),
      );
      fields.set(label, value);
    }
    setText(fields.get(label), text);
  }
  function showAlerts(found) {
    if (alerts.dataset.shown === JSON.stringify(found)) return;
    alerts.dataset.shown = JSON.stringify(found);
    fill(
      alerts,
      found.map((alert) =>
        el(
          "li",
          {},
          el("b", { className: `alert-${alert.severity}` }, alert.rule),
          el("span", { className: "dim" }, ` ${alert.scope}, ${alert.since}. `),
          alert.hint,
        ),
      ),
    );
  }
  function show(run) {
    const { entry } = run.page;
    made.run = run;
    setText(name, run.name);
    setText(what, [entry.task, entry.controller].filter(Boolean).join(" · "));
    context.setPlace(run.folder, run.name);
    setText(state, entry.state);
    state.dataset.state = entry.state;
    if (!state.isConnected) facts.prepend(state, bar);
    bar.hidden = entry.share === null;
    bar.value = entry.share ?? 0;
    if (!entry.error) for (const [label, key] of FACTS) fact(label, entry[key]);
    fields.get("left")?.parentElement.toggleAttribute("hidden", entry.state !== "running");
    showAlerts(entry.alerts);
    fill(trouble, entry.error ? problem(entry.error) : []);
    showMark();
  }
  function fail(error) {
    if (!name.textContent) setText(name, "unknown run");
    fill(trouble, problem(error));
  }
  return made;
}

function diaryPanel(id, chooser) {
  const list = el("ol", { className: "diary", tabIndex: 0, "aria-label": "diary" });
  const made = panel("What happened in this episode?", {
    name: "diary",
    load: async () => {
      const notes = await readDiary(id, chooser.episode());
      fill(
        list,
        notes.map((note) =>
          el(
            "li",
            {},
            el("span", { className: "when" }, `epoch ${note.epoch}`),
            el(
              "span",
              {},
              note.stage
                ? el("span", { className: "glyph", "data-stage": note.stage }, `${note.glyph} `)
                : null,
              note.text,
            ),
          ),
        ),
      );
      if (!notes.length) fill(list, el("li", {}, "nothing yet"));
    },
  });
  made.body.append(list);
  return made;
}

function conclusionPanel(conclusionOf) {
  const made = panel("What does it come to?", {
    name: "conclusion",
    load: async () => {
      const { headline, sentences, facts } = conclusionOf();
      fill(
        made.body,
        el("p", { className: "headline" }, headline),
        sentences.map((text) => el("p", {}, text)),
        el(
          "dl",
          { className: "large" },
          facts.map((fact) =>
            el(
              "div",
              {},
              el("dt", {}, fact.name),
              el("dd", {}, fact.value),
              el("dd", { className: "dim" }, fact.note),
            ),
          ),
        ),
      );
    },
  });
  return made;
}

function settingsPanel(title, settingsOf) {
  const made = panel(title, { isWide: true, load: async () => fill(made.body, settingsList(settingsOf())) });
  made.element.classList.add("last");
  return made;
}
