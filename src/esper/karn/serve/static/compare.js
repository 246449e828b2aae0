// Two runs side by side: headers, what they were configured with differently, and every figure twice.
// What is drawn shares its axes.

import { readComparison, readFigureBeside, readRun } from "./api.js";
import { sharedRanges } from "./charts.js";
import { el, fill, problem, setText, table } from "./dom.js";
import { figurePanel, panel, toggleTables, upkeep } from "./panels.js";
import { runHead } from "./run.js";

export function compareView(view, context, leftId, rightId) {
  const ids = [leftId, rightId];
  const heads = ids.map((id) => runHead(context, id));
  const place = el("div", { className: "panels" });
  let keeper = null;
  let pairs = [];
  fill(
    view,
    el(
      "div",
      { className: "sides" },
      heads.map((head) => head.element),
    ),
    place,
  );

  function build(runs) {
    const names = runs.map((run) => run.name);
    const said = el("p", { className: "headline" });
    const verdict = figurePanel({ key: "verdict", question: "What did growth buy?" });
    const difference = panel("What was configured differently?", { name: "difference" });
    verdict.body.prepend(said);
    const both = pairOf([verdict, difference], async () => {
      const found = await readComparison(...ids);
      setText(said, found.sentence);
      verdict.show(found.verdict);
      fill(
        difference.body,
        found.differences.length
          ? table(["setting", ...names], found.differences, "configuration")
          : el("p", { className: "hint" }, "Nothing: both have the same configuration."),
      );
    });
    const readable = runs.find((run) => run.page.figures.length);
    pairs = (readable?.page.figures ?? []).map((figure) => figurePair(ids, figure));
    fill(
      place,
      both.element,
      pairs.map((pair) => pair.element),
    );
    keeper = upkeep([both, ...pairs]);
  }

  async function refresh(changed) {
    if (changed && !ids.some((id) => changed.has(id))) return;
    try {
      const runs = await Promise.all(ids.map(readRun));
      runs.forEach((run, at) => heads[at].show(run));
      context.setPlace(runs[0].folder, `${runs[0].name} and ${runs[1].name}`);
      if (!keeper) build(runs);
      else await keeper.renew();
    } catch (error) {
      heads[0].fail(error);
    }
  }

  refresh();
  return {
    refresh,
    marksChanged: () => heads.forEach((head) => head.showMark()),
    keys: { t: () => toggleTables(pairs.flatMap((pair) => pair.sides)) },
    close: () => keeper?.close(),
  };
}

/** Two panels in a row that are loaded together. */
function pairOf(sides, load) {
  const close = () => sides.forEach((side) => side.close?.());
  return {
    sides,
    load,
    close,
    element: el(
      "div",
      { className: "sides wide" },
      sides.map((side) => side.element),
    ),
    trouble: sides[0].trouble,
    isStale: true,
    isSeen: false,
  };
}

/** One figure of both runs; what cannot be read on one side leaves the other as it is. */
function figurePair(ids, figure) {
  const sides = ids.map(() => figurePanel(figure));
  return pairOf(sides, async () => {
    const found = await Promise.allSettled(
      ids.map((id, at) => readFigureBeside(id, figure.key, ids[1 - at])),
    );
    const ranges = sharedRanges(found.map((one) => one.value?.chart ?? null));
    found.forEach(({ value, reason }, at) => {
      fill(sides[at].trouble, reason ? problem(reason) : []);
      if (!reason) sides[at].show(value, ranges);
    });
  });
}
